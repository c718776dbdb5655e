"""Must hold: an archive of months. Its keys stay as few as the policy says, and a target that follows is exact.

Time is simulated: segments are put as egress puts them, each at its time, and compaction with retention runs each
hour, all by one clock. Ingress is a process that follows as fast as it can; for `stands` it does not run at all.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from common.chain import Chain
from common.jetstream.client import FloeClient
from common.jetstream.kv import KeyValue, state_key
from common.objects.local import LocalObjects
from common.objects.port import ObjectStore
from common.segments.documents import ChainDocument, ChainStore, StreamDocument, TargetPositions
from common.segments.keys import Layout
from common.segments.segment import Message
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from compaction.retention import Retention, RetentionRule
from compaction.run import Compaction, LocalRunner, Report, Selection
from infra.oracle import Trace, archive_holes, archived, compare, prefixed
from ingress.checkpoint_store import StateStore
from tests.scenarios.delivery_centre import PREFIX, TARGET
from tests.scenarios.single_centre import SingleCentre, single_centre
from tests.support.basics import PATIENCE
from tests.support.clock import ManualClock
from tests.support.compaction import TestPolicy
from tests.support.oracle import classes
from tests.support.segments import write_segment
from tests.support.stores import DatedObjects

HOUR, DAY = 3600.0, 86_400.0
BEGIN = 1_700_000_000.0  # seconds since 1970
WIDTH = 10  # sequences of a segment
LAYOUT = Layout("data")
STATE_BUCKET = "FLOE_STATE"


@dataclass(frozen=True, slots=True)
class Months:
    """What is simulated. `interval`: seconds between two segments of a chain. `ages`: `max_age` of each feed in
    seconds. `stands`: the hours in which ingress does not run. `first`, `second`: stored bytes that are worth a
    merge, of each level. `grace`: seconds from a tombstone to the deletion. `settle`: hours between two waits for
    ingress.
    """

    sites: int = 10
    interval: float = 300.0
    hours: int = 720
    ages: tuple[tuple[str, float], ...] = (("NODES", 10 * DAY), ("EVENTS", 2 * DAY))
    stands: range = range(360, 432)
    first: int = 40_000
    second: int = 150_000
    grace: float = 6 * HOUR
    settle: int = 24

    @property
    def levels(self) -> tuple[TestPolicy, TestPolicy]:
        """The policy: by size alone, so that what it says of the number of keys can be told from sizes."""
        sizes = ((0, 1, self.first), (1, 2, self.second))
        rest = {"min_age": HOUR, "max_wait": 10 * DAY, "min_count": 10, "max_count": 10_000}
        return tuple(TestPolicy(low, high, min_size=size, max_size=8 * size, **rest) for low, high, size in sizes)  # type: ignore[return-value, arg-type]

    @property
    def names(self) -> list[str]:
        return [f"site-{number}" for number in range(self.sites)]

    @property
    def chains(self) -> list[Chain]:
        return [Chain(site, feed) for site in self.names for feed, _ in self.ages]


@dataclass(slots=True)
class Sizes:
    """The least and the largest stored size of segments of one level."""

    least: int = 2**62
    most: int = 0

    def add(self, size: int) -> None:
        self.least, self.most = min(self.least, size), max(self.most, size)

    def runs(self, size: int) -> tuple[int, int]:
        """How many segments reach `size`, at least and at most, an empty one included."""
        return ceil(size / max(1, self.most)), ceil(size / self.least) + 1


class Writer:
    """Puts segments into one store, each at its time by the clock."""

    def __init__(self, objects: ObjectStore, clock: ManualClock, spool: Path, seed: int) -> None:
        self.objects: ObjectStore = DatedObjects(objects, clock)  # type: ignore[assignment]
        self.store = SegmentStore(self.objects, LAYOUT, spool_dir=spool, clock=clock)
        self.documents = ChainStore(self.objects, LAYOUT)
        self.seed = seed

    def begin(self, chain: Chain) -> None:
        self.documents.create_stream(chain, StreamDocument({"name": chain.feed}, "t0", None))
        self.documents.create_chain(chain, ChainDocument((), 1, 1))

    def put(self, months: Months, chain: Chain, number: int) -> tuple[int, int]:
        """The segment `number`, from 0, of the chain; returns its size and how many rows it has."""
        rows, path = rows_of(months, chain, number, self.seed), self.store.new_spool()
        coverage = SequenceRange(number * WIDTH + 1, (number + 1) * WIDTH)
        size = self.store.put(write_segment(path, rows, coverage, chain=chain)).size
        path.unlink()
        return size, len(rows)


def rows_of(months: Months, chain: Chain, number: int, seed: int) -> list[Message]:
    """The messages of a segment, always the same; some sequences have none, some segments are empty."""
    rng = random.Random(f"{seed} {chain} {number}")
    first, at = number * WIDTH + 1, BEGIN + number * months.interval
    held = [] if number % 50 == 49 else [s for s in range(first, first + WIDTH) if rng.random() < 0.9]
    return [
        Message(
            sequence,
            int(at * 10**9) + sequence,
            f"{chain.site}.n{sequence % 5}".encode(),
            None if sequence % 3 else b"NATS/1.0\r\nX-N: %d\r\n\r\n" % sequence,
            f"{chain} {sequence} ".encode() + rng.randbytes(rng.randrange(150)),
        )
        for sequence in held
    ]


@dataclass(slots=True)
class Totals:
    """What the runs of compaction did, and how near the keys came to their limit."""

    merged: int = 0
    outputs: Counter[int] = field(default_factory=Counter)  # by level
    deleted: int = 0
    expired: int = 0
    held_hours: Counter[str] = field(default_factory=Counter)  # by feed
    most_keys: int = 0
    most_of_limit: float = 0.0


class World:
    """The archive, its compaction and retention, and what the policy says of the number of keys."""

    def __init__(self, months: Months, folder: Path, seed: int) -> None:
        self.months, self.clock, self.seed = months, ManualClock(BEGIN), seed
        self.local = Writer(LocalObjects(folder / "store"), self.clock, folder / "spool", seed)
        self.sizes, self.totals = {0: Sizes(), 1: Sizes()}, Totals()
        self.positions: dict[Chain, int] = {}
        self.written = 0  # segments of each chain
        self.messages = 0  # of all
        self._pool = ThreadPoolExecutor(4)
        for chain in months.chains:
            self.local.begin(chain)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(f"{chain.site}/{chain.feed}" for chain in self.months.chains)

    def hour(self) -> None:
        """All segments of the next hour, each at its time; then the tails."""
        end = self.clock.now() + HOUR
        while (at := BEGIN + (self.written + 1) * self.months.interval) <= end:
            self.clock.advance(at - self.clock.now())
            for size, rows in self._pool.map(self._put, self.months.chains):
                self.messages += rows
                if rows:
                    self.sizes[0].add(size)
            self.written += 1
        self.clock.advance(end - self.clock.now())
        for chain in self.months.chains:
            self.local.documents.write_tail(chain, self.written * WIDTH)

    def _put(self, chain: Chain) -> tuple[int, int]:
        return self.local.put(self.months, chain, self.written)

    def compact(self) -> None:
        """One run, as `floe compact --engine local` does it.

        Raises AssertionError where there are more keys than the policy allows.
        """
        ages = dict(self.months.ages)
        retention = Retention(
            self.local.store, lambda _site, feed: RetentionRule(ages[feed]), {TARGET: frozenset(self.sources)}
        )
        store = self.local.store
        work = Compaction(store, self.months.levels, self.months.grace, LocalRunner(store))  # type: ignore[arg-type]
        report = work.run(Selection(), retention)
        assert report.failures == [], report.failures
        for merged in report.merged:
            if merged.ref.level == 1:
                self.sizes[1].add(merged.ref.size)
        self._count(report)
        keys, limit = len(self.local.objects.list("")), self.limit()
        self.totals.most_keys = max(self.totals.most_keys, keys)
        self.totals.most_of_limit = max(self.totals.most_of_limit, keys / limit)
        assert keys <= limit, f"hour {(self.clock.now() - BEGIN) / HOUR:.0f}: {keys} keys, the policy allows {limit}"

    def _count(self, report: Report) -> None:
        totals = self.totals
        totals.merged += sum(merged.inputs for merged in report.merged)
        totals.outputs.update(merged.ref.level for merged in report.merged)
        totals.deleted += len(report.deleted)
        totals.expired += len(report.retained.expired)
        totals.held_hours.update({held.chain.feed for held in report.retained.held})

    def limit(self) -> int:
        """How many keys the policy allows now, by the sizes of the segments so far."""
        return 10 + sum(map(self._limit, self.months.chains))

    def _limit(self, chain: Chain) -> int:
        """Of each level: what is too young or too small for a merge, and what was merged within the grace; of the
        highest, what retention keeps. A tombstone for each merge, until the run behind its deletion; four documents.
        """
        months, low, high = self.months, *self.months.levels
        least, most = self.sizes[0].runs(low.min_size)
        first = max(HOUR, least * months.interval)  # seconds between two merges of level 0
        at_least, at_most = self.sizes[1].runs(high.min_size)
        second = at_least * first
        waits = (low.min_age + months.grace + HOUR) / months.interval + 2 * most + 2
        waits += (high.min_age + months.grace + HOUR) / first + 2 * at_most + 2
        kept = max(dict(months.ages)[chain.feed], self.clock.now() - self._reached(chain))
        stones = (months.grace + 3 * HOUR) * (1 / first + 1 / second) + 4
        return ceil(waits + kept / second + 2 + stones + 4)

    def _reached(self, chain: Chain) -> float:
        """Up to which time the target holds the chain, by what it has said."""
        return BEGIN + (self.positions.get(chain, 1) - 1) // WIDTH * self.months.interval

    def say(self, positions: dict[Chain, int]) -> None:
        """Write what the target says of itself; it says so once a minute, which is too seldom for simulated hours."""
        self.positions = positions
        self.local.documents.write_positions(TargetPositions(TARGET, self.clock.now(), positions, self.sources))

    def expected(self) -> dict[Chain, Trace]:
        """What the target must hold of each chain."""
        return {chain: Trace.of(self._all(chain, self.written), prefixed(PREFIX)) for chain in self.months.chains}

    def _all(self, chain: Chain, count: int) -> Iterator[Message]:
        for number in range(count):
            yield from rows_of(self.months, chain, number, self.seed)

    def check_archive(self) -> None:
        """What is left of each chain begins at its floor, has no hole, and holds what was put."""
        for chain in self.months.chains:
            floor = self.local.documents.read_floor(chain) or 1
            assert archive_holes(self.local.store, chain) == []
            held = (row for row in self._all(chain, self.written) if row.sequence >= floor)
            found = compare(Trace.of(held), Trace.of(archived(self.local.store, chain, floor)), name=f"archive {chain}")
            assert found.ok, found.report()


async def months(rng: random.Random, what: Months) -> dict[str, Any]:
    """Hour by hour. Raises AssertionError where there are ever more keys than the policy says, where retention takes
    what the target needs or keeps what nobody needs, or where the target or the archive is not exact.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="floe-months-") as name:
        folder = Path(name)
        world = await asyncio.to_thread(World, what, folder, rng.getrandbits(32))
        place = {"url": f"file://{folder}/store", "prefix": "data"}
        async with single_centre(place, what.names, [feed for feed, _ in what.ages]) as at:
            await _live(at, world)
            await _followed(at, world)
            compared = await at.judge(await asyncio.to_thread(world.expected))
            assert compared.ok, compared.report()
            await at.drain()
        await asyncio.to_thread(world.check_archive)
    totals = world.totals
    found = {
        "chains": len(what.chains),
        "hours": what.hours,
        "segments": world.written * len(what.chains),
        "messages": compared.expected,
        **classes(compared),
        "merged": totals.merged,
        "outputs by level": {str(level): count for level, count in sorted(totals.outputs.items())},
        "deleted": totals.deleted,
        "expired": totals.expired,
        "hours held": dict(totals.held_hours),
        "most keys": totals.most_keys,
        "most keys, of what the policy allows": round(totals.most_of_limit, 2),
        "seconds": round(time.monotonic() - started, 1),
    }
    _judge(what, totals, found)
    return found


def _judge(what: Months, totals: Totals, found: dict[str, Any]) -> None:
    assert set(totals.outputs) == {1, 2}, f"a level was not written: {found}"
    assert totals.expired, f"retention deleted nothing: {found}"
    assert totals.deleted, f"nothing that was merged was deleted: {found}"
    for feed, age in what.ages:
        # It is behind by so much at the end of its stand-still; what is older than `age` is held until it follows.
        behind = len(what.stands) * HOUR - age
        held = totals.held_hours[feed]
        # Where it never stood still long enough, a slow machine may have it an hour behind by chance.
        assert held or behind <= 0, f"{feed}: nothing was held: {found}"


async def _live(at: SingleCentre, world: World) -> None:
    what = world.months
    ingress = at.ingress
    ingress.start()
    async with at.client() as client:
        for hour in range(what.hours):
            if hour == what.stands.start:
                await _followed(at, world)
                code = await asyncio.to_thread(ingress.drain)
                assert code == 0, ingress.tail()
            if hour == what.stands.stop:
                ingress.start()
            await asyncio.to_thread(world.hour)
            if hour not in what.stands and hour % what.settle == 0:
                await _followed(at, world)
            await _say(client, world)
            await asyncio.to_thread(world.compact)


async def _followed(at: SingleCentre, world: World) -> None:
    arrived = await at.arrived(world.messages, 5 * PATIENCE)
    assert arrived, f"{world.messages} messages did not arrive: {at.ingress.tail()}"


async def _say(client: FloeClient, world: World) -> None:
    bucket = await KeyValue(client, STATE_BUCKET).ensure()
    stored = await StateStore(bucket, state_key("ingress", TARGET), TARGET).load()
    if stored.state is not None:
        await asyncio.to_thread(world.say, dict(stored.state.checkpoint.positions))
