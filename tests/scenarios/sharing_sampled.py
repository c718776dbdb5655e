"""Members that share the partitions of a sampled feed while they are killed, paused and cut off.

What is right is said by one fold over the log of each partition, as in `sampling.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

from common.chain import Chain
from common.jetstream.api import create_stream
from common.open import load_settings, open_store
from common.segments.segment import Message, Reason
from common.segments.store import SegmentStore
from egress.advisories.advisory import event_id
from infra.acked import AckedPublisher
from infra.oracle import archive_holes
from tests.scenarios.load import client_of
from tests.scenarios.sampling import (
    SAMPLED,
    Row,
    columns_of,
    difference,
    fold_of,
    payload_of,
    rows_in,
    rows_of,
    told_in,
)
from tests.scenarios.sharing import PARTITIONS, SITE, archived_to, disturbed, feed_of, logs_of
from tests.scenarios.world import World
from tests.support.invariants import rows_balance

ADVISORIES = "ADV"
FEED = {**SAMPLED, "advisory": {"subject": f"{ADVISORIES}.%s.%v", "reliable": True}}
NODES = 30  # of each partition
TOLD_WITHIN = 60.0  # seconds: silence of two seconds, a lease time, and a slow machine
# What may be left out beside what is sampled out; where messages were deleted, nobody knows whose they were.
OTHERS = {Reason.NOT_MATCHED, Reason.DELETED, Reason.GONE_BEFORE_READ, Reason.UNATTRIBUTED}


async def sampled_shared(s3: Any, rng: random.Random, seconds: float, rate: int = 400) -> dict[str, Any]:
    """Rows, ledgers and advisories as if there had been no SIGKILL, no SIGSTOP and no cut (I1, I8, I9).

    Raises AssertionError where anything differs.
    """

    async def load(world: World, rng: random.Random, until: float) -> None:
        await _load(world, rng, rate, until)

    with World(s3, SITE) as world:
        started = time.monotonic()
        await _make_advisories(world)
        async with disturbed(world, rng, seconds, load, **FEED) as members:
            judge = Judge(world, await logs_of(world))
            store = open_store(load_settings(str(members.config)))
            await archived_to(store, judge.ends)
            await judge.told(TOLD_WITHIN)
        await judge.compare(store)
        return {"seconds": round(time.monotonic() - started, 1), "faults": dict(members.faults), **judge.counts}


async def _make_advisories(world: World) -> None:
    """With a duplicate window that is too short to help: what is sent twice would be stored twice."""
    config = {"name": ADVISORIES, "subjects": [f"{ADVISORIES}.>"], "storage": "file"}
    async with client_of(world.sites[SITE].url) as client:
        await create_stream(client, {**config, "duplicate_window": 100_000_000})


async def _load(world: World, rng: random.Random, rate: int, until: float) -> None:
    """About `rate` messages a second over all partitions, whose nodes fall silent now and then."""
    silent: dict[tuple[int, int], float] = {}
    async with client_of(world.sites[SITE].url, "load") as client, AckedPublisher(client) as publisher:
        while (now := time.monotonic()) < until:
            for _ in range(2):
                silent[rng.randrange(PARTITIONS), rng.randrange(NODES)] = now + rng.uniform(0.5, 4.0)
            for _ in range(max(1, rate // 10)):
                partition, node = rng.randrange(PARTITIONS), rng.randrange(NODES)
                if silent.get((partition, node), 0) <= now:
                    subject = f"{SITE}.p{partition}.n{node}"
                    await publisher.publish(subject.encode(), payload_of(rng, node))
            await publisher.settle()
            await asyncio.sleep(0.1)


class Judge:
    """What the logs of the partitions must lead to, and what was found."""

    def __init__(self, world: World, logs: dict[Chain, list[Message]]) -> None:
        self._world, self._logs = world, logs
        self._kept: dict[Chain, list[Row]] = {}
        self._expected = Counter[str]()
        for chain, log in logs.items():
            kept, advisories = fold_of(feed_of(FEED), columns_of(log))
            self._kept[chain] = rows_of(kept)
            self._expected.update(event_id(chain, advisory) for advisory in advisories)
        self.counts = {
            "messages": sum(map(len, logs.values())),
            "rows": sum(map(len, self._kept.values())),
            "advisories": self._expected.total(),
        }

    @property
    def ends(self) -> dict[Chain, int]:
        """The last sequence of each."""
        return {chain: log[-1].sequence for chain, log in self._logs.items()}

    async def told(self, seconds: float) -> None:
        """Wait until every advisory is stored. What is missing then is for the comparison to name."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._expected.keys() - (await self._told()).keys():
            await asyncio.sleep(0.3)

    async def compare(self, store: SegmentStore) -> None:
        """Fails where anything differs."""
        for chain, kept in self._kept.items():
            assert archive_holes(store, chain) == [], f"{chain}: holes {archive_holes(store, chain)}"
            self._balance(store, chain)
            found = rows_in(store, chain)
            assert found == kept, f"{chain}: {_other_rows(found, kept)}"
        told = await self._told()
        assert told == self._expected, difference(told, self._expected)
        self.counts["segments"] = sum(len(store.list(chain)) for chain in self._kept)

    def _balance(self, store: SegmentStore, chain: Chain) -> None:
        """Each segment, those that overlap included, accounts for its part of the log as the fold does."""
        for ref in store.list(chain):
            footer = store.footer(ref)
            ledger = footer.ledger.counts
            rows = sum(row[0] in footer.coverage for row in self._kept[chain])
            read = sum(message.sequence in footer.coverage for message in self._logs[chain])
            assert rows_balance(footer), f"{ref.key}: rows {footer.rows} + ledger {ledger} != coverage"
            assert footer.rows == rows, f"{ref.key}: {footer.rows} rows, expected {rows}"
            assert ledger.get(Reason.SAMPLED_OUT, 0) == read - rows, f"{ref.key}: {ledger}, {read} read"
            assert ledger.keys() <= {Reason.SAMPLED_OUT, *OTHERS}, f"{ref.key}: {ledger}"

    async def _told(self) -> Counter[str]:
        async with client_of(self._world.sites[SITE].url) as client:
            return await told_in(client, ADVISORIES)


def _other_rows(found: list[Row], kept: list[Row]) -> str:
    """How rows differ, in words."""
    missing = sorted({row[0] for row in kept} - {row[0] for row in found})
    more = sorted({row[0] for row in found} - {row[0] for row in kept})
    pairs = zip(found, kept, strict=False)
    first = next(((one, other) for one, other in pairs if one != other), None)
    return f"{len(found)} rows, expected {len(kept)}; missing {missing[:9]}; more {more[:9]}; first {first}"
