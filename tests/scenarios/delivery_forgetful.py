"""Must hold: a target that forgets (a work queue) gets each message once all the same.

A consumer reads as the target forgets. It records each message in a journal under its target sequence, to
distinguish a message that is delivered twice from one that was stored twice. (A stream that captures republished
messages of the target would be no journal: headers such as `Nats-Batch-Id` act again there, and it loses messages
when leaders change.)
"""

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from common.errors import FloeError
from common.nats.api import create_stream, stream_info
from common.nats.client import FloeClient
from tests.scenarios.delivery import arrived, disturbed, require_faults
from tests.scenarios.delivery_centre import PREFIX, REPLICAS, TARGET, Centre
from tests.scenarios.delivery_journal import Consumer, Journal
from tests.support.basics import answered, soon
from tests.support.oracle import classes, compare_target


async def work_queue(s3: Any, rng: random.Random, seconds: float, publisher: str) -> dict[str, Any]:
    """A consumer acknowledges, the queue deletes; the consumer has seen each message once, none is left."""
    started, journal = time.monotonic(), Journal()

    @asynccontextmanager
    async def reading(at: Centre) -> AsyncIterator[None]:
        async with at.client("reader") as client:
            await _make_target(client)
            async with Consumer(client, TARGET, journal):
                yield

    async with disturbed(s3, rng, seconds, beside=reading, publisher=publisher) as (run, expected):
        await arrived(run.centre, sum(map(len, expected.values())))
        async with run.centre.client() as client:
            last = await _read_up(client)
        assert not journal.changed, f"two messages under target sequences {journal.changed[:9]}"
        compared = compare_target(expected, journal.traces(), journal.foreign)
        found = {**run.found(started), **journal.counts, **classes(compared), "messages": compared.expected}
    unseen = journal.unseen(last)
    assert unseen == 0, f"{unseen} of {last} messages left the queue unseen; {compared.report()}"
    assert journal.counts["delivered again"], "no acknowledgement of the consumer was ever lost"
    assert compared.is_ok, f"{compared.report()}\n{found}"
    require_faults(found)
    return found


async def _make_target(client: FloeClient) -> None:
    common = {"storage": "file", "num_replicas": REPLICAS, "duplicate_window": 10**8, "retention": "workqueue"}
    offered = {"allow_atomic": True, "allow_batched": True, "allow_direct": True}
    config = {"name": TARGET, "subjects": [f"{PREFIX}.>"], **common, **offered}
    await answered(lambda: create_stream(client, config), FloeError)  # servers that have just started are not all known


async def _read_up(client: FloeClient) -> int:
    """Wait until the consumer has acknowledged all; return the target's last sequence."""

    async def is_read() -> int:
        info = await stream_info(client, TARGET)
        return info.last_sequence if info.messages == 0 else 0

    return await soon(is_read, 40, 0.3)
