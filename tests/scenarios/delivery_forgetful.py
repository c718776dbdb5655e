"""Must hold: a target that forgets (work queue, one message per subject) gets each message once all the same.

A consumer reads as the target forgets. What it read stands in a journal under its target sequence, so a
message that is delivered twice is known from one that was stored twice. (A stream that captures what the
target republishes would be no journal: headers such as `Nats-Batch-Id` act again there, and it loses messages
when leaders change.)
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from common.errors import FloeError
from common.jetstream.api import create_stream, stream_info
from common.jetstream.client import FloeClient
from infra.oracle import Comparison, allow
from tests.scenarios.delivery import arrived, disturbed, require_faults
from tests.scenarios.delivery_centre import PREFIX, REPLICAS, TARGET, Centre
from tests.scenarios.delivery_journal import Consumer, Journal
from tests.support.basics import soon
from tests.support.oracle import classes, compare_target

# Kept of each kind of target, beside what all have.
WORK_QUEUE = {"retention": "workqueue"}
PER_SUBJECT = {"max_msgs_per_subject": 1, "discard": "old"}
# Of each chain in the target with one message per subject: a message is superseded some seconds later.
SUBJECTS = 3000
UNSEEN = 0.02  # part of the messages that may be superseded before anybody saw them


async def work_queue(s3: Any, rng: random.Random, seconds: float, publisher: str) -> dict[str, Any]:
    """A consumer acknowledges, the queue deletes; the consumer has seen each message once, none is left."""
    found, journal, last, left, compared = await _carried(s3, rng, seconds, publisher, WORK_QUEUE)
    unseen = journal.unseen(last)
    assert unseen == 0, f"{unseen} of {last} messages left the queue unseen; {compared.report()}"
    assert left == 0, f"{left} messages were never acknowledged"
    assert journal.counts["delivered again"], "no acknowledgement of the consumer was ever lost"
    return _checked(found, compared)


async def per_subject(s3: Any, rng: random.Random, seconds: float, publisher: str) -> dict[str, Any]:
    """The target keeps the last message of each subject; what was seen of it holds each message once.

    A message that another one supersedes at once may be unseen: as many messages may be missing as there are
    target sequences that nobody saw, and the target's last sequence says how many were stored.
    """
    found, journal, last, left, compared = await _carried(s3, rng, seconds, publisher, PER_SUBJECT)
    unseen = journal.unseen(last)
    assert last == compared.expected, f"stored {last}, expected {compared.expected}; {compared.report()}"
    assert unseen <= UNSEEN * last, f"{unseen} of {last} messages unseen: the run proves too little"
    assert left < last, "nothing was superseded"
    return _checked({**found, "unseen": unseen, "left": left}, allow(compared, unseen))


def _checked(found: dict[str, Any], compared: Comparison) -> dict[str, Any]:
    found |= {**classes(compared), "messages": compared.expected}
    assert compared.ok, f"{compared.report()}\n{found}"
    require_faults(found)
    return found


async def _carried(
    s3: Any, rng: random.Random, seconds: float, publisher: str, kept: dict[str, Any]
) -> tuple[dict[str, Any], Journal, int, int, Comparison]:
    """The run, what was seen, the target's last sequence, how many it still holds, and the comparison."""
    started, journal = time.monotonic(), Journal()

    @asynccontextmanager
    async def reading(at: Centre) -> AsyncIterator[None]:
        async with at.client("reader") as client:
            await _make_target(client, kept)
            async with Consumer(client, TARGET, journal):
                yield

    # An egress's chain comes in bursts over few subjects: most of it would be superseded unseen.
    chains: dict[str, Any] = {"subjects": SUBJECTS, "frozen": False} if kept is PER_SUBJECT else {}
    async with disturbed(s3, rng, seconds, beside=reading, publisher=publisher, **chains) as (run, expected):
        await arrived(run.centre, sum(map(len, expected.values())))
        async with run.centre.client() as client:
            last, left = await _read_up(client, journal, kept)
        assert not journal.changed, f"two messages under target sequences {journal.changed[:9]}"
        compared = compare_target(expected, journal.traces(), journal.foreign)
        return {**run.found(started), **journal.counts}, journal, last, left, compared


async def _make_target(client: FloeClient, kept: dict[str, Any]) -> None:
    common = {"storage": "file", "num_replicas": REPLICAS, "duplicate_window": 10**8}
    offered = {"allow_atomic": True, "allow_batched": True, "allow_direct": True}
    config = {"name": TARGET, "subjects": [f"{PREFIX}.>"], **common, **offered, **kept}

    async def create() -> bool:
        with suppress(FloeError):  # the servers have just started and do not all know of each other
            await create_stream(client, config)
            return True
        return False

    await soon(create, 30, 0.3)


async def _read_up(client: FloeClient, journal: Journal, kept: dict[str, Any]) -> tuple[int, int]:
    """Wait until the consumer has all it can get; the target's last sequence, and messages that it holds."""

    async def is_read() -> bool:
        info = await stream_info(client, TARGET)
        assert info is not None
        if kept is WORK_QUEUE:
            return info.messages == 0
        return info.last_sequence in journal.entries

    await soon(is_read, 40, 0.3)
    info = await stream_info(client, TARGET)
    assert info is not None
    return info.last_sequence, info.messages
