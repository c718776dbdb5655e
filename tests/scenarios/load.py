"""Messages published into a site's stream while the services are being killed."""

import asyncio
import random
from typing import Self

from common.nats.api import create_stream
from common.nats.client import FloeClient
from common.tasks import Stop
from infra.acked import AckedPublisher
from tests.support.ingress import client_of

HEADERS = (None, b"NATS/1.0\r\nA: 1\r\nA: 2\r\n\r\n", b"NATS/1.0\r\nNats-Msg-Id: %d\r\n\r\n", b"NATS/1.0\r\n\r\n")


async def make_stream(client: FloeClient, name: str, root: str, **more: object) -> None:
    """Create a file stream with limits retention that takes `{root}.>`.

    Without TTLs: a message that expires between two readings would look like a difference.
    """
    config = {"name": name, "subjects": [f"{root}.>"], "storage": "file", "retention": "limits"}
    await create_stream(client, {**config, "duplicate_window": 10**9, "discard": "old", **more})


async def publish(client: FloeClient, root: str, rng: random.Random, count: int, first: int = 0) -> int:
    """Publish `count` plain messages, each acknowledged; return how many were stored."""
    async with AckedPublisher(client, window=512) as publisher:
        for number in range(first, first + count):
            subject = f"{root}.n{rng.randrange(50)}".encode()
            headers = rng.choice(HEADERS)
            block = headers % number if headers and b"%d" in headers else headers
            await publisher.publish(subject, rng.randbytes(rng.randrange(1200)), block)
        done = await publisher.wait_for_acks()
    return done.stored


class Background:
    """Work beside a block: `_run`, until the end of the block sets `_stop`."""

    def __init__(self) -> None:
        self._stop = Stop()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._task

    async def _run(self) -> None:
        raise NotImplementedError


class Load(Background):
    """A publisher of about `rate` messages a second into `{root}.>`, until its block ends."""

    def __init__(self, url: str, root: str, rng: random.Random, rate: int) -> None:
        super().__init__()
        self._url, self._root, self._rng, self._rate = url, root, rng, rate
        self.published = 0

    async def _run(self) -> None:
        async with client_of(self._url, name="load") as client:
            while not self._stop.is_set:
                self.published += await publish(client, self._root, self._rng, max(1, self._rate // 10), self.published)
                await asyncio.sleep(0.1)
