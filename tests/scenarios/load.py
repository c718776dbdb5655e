"""Messages published into a site's stream."""

import random

from common.nats.api import create_stream
from common.nats.client import FloeClient
from infra.publish import AckedPublisher

HEADERS = (None, b"NATS/1.0\r\nA: 1\r\nA: 2\r\n\r\n", b"NATS/1.0\r\nNats-Msg-Id: %d\r\n\r\n", b"NATS/1.0\r\n\r\n")


async def make_stream(client: FloeClient, name: str, root: str, **more: object) -> None:
    """Create a file stream with limits retention that takes `{root}.>`.

    Without TTLs: a message that expires between two readings would look like a difference.
    """
    config = {"name": name, "subjects": [f"{root}.>"], "storage": "file", "retention": "limits"}
    await create_stream(client, {**config, "duplicate_window": 10**9, "discard": "old", **more})


async def publish(client: FloeClient, root: str, rng: random.Random, count: int) -> int:
    """Publish `count` plain messages, each acknowledged; return how many were stored."""
    async with AckedPublisher(client, window=512) as publisher:
        for number in range(count):
            subject = f"{root}.n{rng.randrange(50)}".encode()
            headers = rng.choice(HEADERS)
            block = headers % number if headers and b"%d" in headers else headers
            await publisher.publish(subject, rng.randbytes(rng.randrange(1200)), block)
        done = await publisher.wait_for_acks()
    return done.stored
