"""Chains under random events of an archive: each row is carried once and in order, and no hole without a decision.

Segments are shuffled, delayed, missing, overlapping, damaged, repaired, replaced by compaction; gaps are accepted and
skipped; there are take-overs and pauses.
"""

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import pytest

from common.archive.documents import AcceptedGap, ChainDocument, ChainStore, FloorDocument, StreamDocument
from common.archive.keys import Layout, SegmentName
from common.archive.segment import SegmentRef
from common.archive.store import SegmentGone, SegmentStore
from common.archive.unread import UnreadableSegment
from common.chain import Chain
from common.errors import SegmentCorrupt, Stopped
from common.objects.port import ObjectInfo
from common.sequences import SequenceRange
from common.settings.ingress import TargetSettings
from common.tasks import Stop
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.plan import GapDecision, plan_from_listings
from ingress.chains.prefetch import Prefetcher
from ingress.chains.sources import Pause, Pauses
from ingress.checkpoint import Gap, IntentPiece, advance_positions
from ingress.rows.prepare import SubjectFilters, TargetLimits
from ingress.rows.rows import Block, ReadyBlocks
from tests.support.basics import seeded
from tests.support.clock import ManualClock

CHAIN = Chain("us-east", "NODES")
LATER = CHAIN.next_incarnation()
LAYOUT = Layout()
LAST = 80  # last sequence of the first incarnation
LATER_LAST = 20
TIMEOUT = 1000.0
QUIET = 80  # turns of the event loop until all tasks wait


class Objects:
    """An object store in memory with the clock of the test."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.held: dict[str, tuple[bytes, float]] = {}

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        keys = sorted(key for key in self.held if key.startswith(prefix) and key > start_after)
        return [self._info(key) for key in keys[:limit]]

    def get(self, key: str, *, first: int = 0, length: int | None = None) -> bytes | None:
        return self.held[key][0] if key in self.held else None

    def put(self, key: str, body: bytes, **_: Any) -> None:
        self.held[key] = (body, self._clock.now())

    def put_if_absent(self, key: str, body: bytes, **_: Any) -> bool:
        if key not in self.held:
            self.put(key, body)
        return True

    def head(self, key: str) -> ObjectInfo | None:
        return self._info(key) if key in self.held else None

    def _info(self, key: str) -> ObjectInfo:
        body, modified = self.held[key]
        return ObjectInfo(key, len(body), modified, str(modified))


class Inline:
    """A thread pool that runs each call inline."""

    async def run(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return fn(*args, **kwargs)


@dataclass
class Reading:
    """An open segment. `next_sequence`: the next row."""

    segment: SegmentRef
    next_sequence: int
    last: int
    held_bytes: int = 1 << 20
    is_done: bool = False
    is_closed: bool = False
    incomplete_fill: None = None

    def close(self) -> None:
        self.is_closed = True


@dataclass
class World:
    """The archive, one centre that carries it, and the carried rows."""

    rng: random.Random
    skip: bool
    clock: ManualClock = field(default_factory=ManualClock)
    positions: dict[Chain, int] = field(default_factory=dict)
    carried: dict[Chain, list[int]] = field(default_factory=dict)
    given_up: dict[Chain, list[SequenceRange]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    accepted: set[tuple[Chain, int]] = field(default_factory=set)
    pauses: Pauses = field(default_factory=Pauses)
    digests: Any = field(default_factory=count)
    opened: list[Reading] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.objects = Objects(self.clock)
        self.store = SegmentStore(self.objects, LAYOUT)  # type: ignore[arg-type]
        self.documents = ChainStore(self.objects, LAYOUT)  # type: ignore[arg-type]
        for chain, previous in ((CHAIN, None), (LATER, {0: LAST})):
            self.documents.create_stream(chain, StreamDocument({}, "t", previous))
            self.documents.create_chain(chain, ChainDocument((), 1, 1))
        source = {"site": "us-east", "feed": "NODES", "lost_segment_timeout": f"{TIMEOUT:g}s"}
        source |= {"on_lost": "skip"} if self.skip else {}
        settings = TargetSettings.model_validate({"stream": "FLEET", "sources": [source]})
        registry = ChainRegistry(settings, TargetLimits(SubjectFilters([">"]), 1 << 20))
        prefetcher = Prefetcher(
            registry, self.store, self.documents, Inline(), self.clock, ReadyBlocks(1 << 30), decisions=self
        )  # type: ignore[arg-type]
        prefetcher.decoder = self  # type: ignore[assignment]
        gaps = prefetcher.locator.gaps
        self._give_up, gaps.skip_hole = gaps.skip_hole, self.give_up  # type: ignore[method-assign]
        self.prefetcher = prefetcher
        prefetcher.reset({})

    # Replacements of other parts

    async def read(self) -> Pauses:
        return self.pauses

    def open(self, ref: SegmentRef, rows: SequenceRange, _: Any) -> Reading:
        """Open a segment, which must be closed at the end and have no other reader afterwards."""
        reading = Reading(ref, rows.first, rows.last)
        self.opened.append(reading)
        return reading

    async def turn(self, reading: Reading, _: Any, emit: Any) -> None:
        """Emit some of the rows, in random blocks."""
        assert not reading.is_closed
        ref, turns = reading.segment, self.rng.randint(1, 4)
        while not reading.is_done and turns:
            turns -= 1
            await asyncio.sleep(0)
            if ref.key not in self.objects.held:
                raise UnreadableSegment(ref, SegmentGone(ref.key))
            if ref.key in self.broken and self.rng.random() < 0.7:
                raise UnreadableSegment(ref, SegmentCorrupt(ref.key))
            end = self.rng.randint(reading.next_sequence, reading.last)
            piece = IntentPiece(ref.segment, SequenceRange(reading.next_sequence, end), end - reading.next_sequence + 1)
            emit(Block(piece, None, 100))
            self.prefetcher.ahead.budget.acquire_unchecked(100)  # the real one acquires before, releases unused bytes
            reading.next_sequence, reading.is_done = end + 1, end == reading.last

    async def close(self, reading: Reading) -> None:
        reading.close()

    def give_up(self, chain: Chain, decision: Any, damaged: Any) -> Any:
        """Give up a range, which no sound segment may cover and for which a decision must exist."""
        found = self._give_up(chain, decision, damaged)
        for sequence in range(found.first, found.last + 1) if isinstance(found, SequenceRange) else ():
            for ref in self.store.list(chain):
                assert sequence not in ref.coverage or ref.key in self.broken, (sequence, ref)
            if (chain, sequence) not in self.accepted:
                assert self.skip
                behind = [r.modified for r in self.store.list(chain) if r.coverage.first > sequence]
                behind.append(self.objects.held[LAYOUT.stream_document(LATER)][1])
                assert self.clock.now() - min(behind) >= TIMEOUT
        return found

    # Events of the archive

    def put(self, chain: Chain, first: int, last: int, level: int = 0) -> None:
        name = SegmentName(chain, level, SequenceRange(first, last), f"{next(self.digests):016x}")
        self.objects.put(LAYOUT.segment(name), b"x")

    def refs(self, chain: Chain) -> list[SegmentRef]:
        return [ref for ref in self.store.list(chain) if ref.key not in self.broken]

    def compact(self, chain: Chain) -> None:
        """Merge some adjacent segments into one of the next level; the inputs may stay for a while."""
        refs = sorted(self.refs(chain), key=lambda r: r.coverage)
        if not refs:
            return
        start = self.rng.randrange(len(refs))
        run, end = [refs[start]], refs[start].coverage.last
        for ref in refs[start + 1 : start + 6]:
            if ref.coverage.first > end + 1:
                break
            run.append(ref)
            end = max(end, ref.coverage.last)
        if len(run) > 1 and (level := max(r.level for r in run) + 1) < 10:
            self.put(chain, run[0].coverage.first, end, level)
            for ref in run:
                if self.rng.random() < 0.8:
                    del self.objects.held[ref.key]

    def happens(self, waiting: list[tuple[Chain, int, int]]) -> None:
        """Make one random event happen."""
        rng, chain = self.rng, self.rng.choice([CHAIN, CHAIN, LATER])
        what = rng.random()
        if what < 0.45 and waiting:
            self.put(*waiting.pop(rng.randrange(len(waiting))))
        elif what < 0.6:
            self.compact(chain)
        elif what < 0.7 and (refs := self.refs(chain)):
            self.broken.add(rng.choice(refs).key)
        elif what < 0.8 and chain == CHAIN:
            first = rng.choice([rng.randint(1, LAST), min(LAST, self.positions.get(CHAIN, 1))])
            self.accept(first, min(LAST, first + rng.randint(0, 15)))
        elif what < 0.85:
            self.prefetcher.reset(self.positions)
        elif what < 0.9:
            paused = chain in self.pauses.paused
            at = str(self.clock.now())
            self.pauses = self.pauses.with_resume(chain, at) if paused else self.pauses.with_pause(chain, Pause(at))
        self.clock.advance(rng.choice([1, 1, 30, 200]))

    def accept(self, first: int, last: int) -> None:
        self.documents.accept_gap(CHAIN, AcceptedGap(SequenceRange(first, last)))
        self.accepted |= {(CHAIN, sequence) for sequence in range(first, last + 1)}

    # The centre

    async def settles(self) -> None:
        """Run the centre until it has no more work."""
        for _ in range(3):
            for chain in (CHAIN, LATER):
                self.prefetcher.add_chain(chain, self.rng.choice([None, 0, LAST]))
            await self.prefetcher.tick()
            await self.prefetcher.apply_decisions()
            await turns(QUIET)
            await self.carry()

    async def carry(self) -> None:
        while list(self.prefetcher.ahead):
            rows = await self.prefetcher.take(Stop(), 1.0)
            assert rows is not None
            if self.rng.random() < 0.1:
                # A pause and its end while the intent is open: rows already taken are not read again.
                for pauses in (
                    self.pauses.with_pause(CHAIN, Pause("now")),
                    self.pauses.with_resume(CHAIN, str(self.clock.now())),
                ):
                    self.pauses = pauses
                    await self.prefetcher.apply_decisions()
                await turns(QUIET)
            self.positions = advance_positions(self.positions, rows.pieces())
            for piece in rows.pieces():
                self.note(piece)
            self.prefetcher.release(rows)
            self.prefetcher.record_stored(self.positions)
            await turns(QUIET)

    def note(self, piece: IntentPiece) -> None:
        if piece.chain == LATER:
            assert self.positions[CHAIN] == LAST + 1, "the next incarnation began too early"
        if isinstance(piece.segment, Gap):
            self.given_up.setdefault(piece.chain, []).append(piece.rows)
        else:
            self.carried.setdefault(piece.chain, []).extend(range(piece.rows.first, piece.rows.last + 1))

    def check(self, chain: Chain, last: int) -> None:
        """Check that every sequence is carried or given up, in order, once."""
        passed = {s for rows in self.given_up.get(chain, []) for s in range(rows.first, rows.last + 1)}
        carried = self.carried.get(chain, [])
        assert carried == sorted(set(carried))
        assert not passed & set(carried)
        assert (passed | set(carried), self.prefetcher.ahead.budget.used) == (set(range(1, last + 1)), 0)
        assert (
            len([each for each in self.opened if not each.is_closed])
            <= len(self.prefetcher.open_segments.segments)
            <= 8
        )


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def archive_of(rng: random.Random, chain: Chain, last: int) -> list[tuple[Chain, int, int]]:
    """Return segments that cover everything, with occasional overlaps."""
    found, begin = [], 1
    while begin <= last:
        end = min(last, begin + rng.randint(0, 12))
        found.append((chain, max(1, begin - rng.choice([0, 0, 0, 3, 9])), end))
        begin = end + 1
    # Egress writes such segments when it reads again above a hole.
    wide = rng.randint(1, last)
    return [*found, (chain, wide, min(last, wide + 40)), (chain, wide, min(last, wide + 30))]


async def live(seed: int, skip: bool) -> None:
    rng = random.Random(seed)
    world = World(rng, skip)
    waiting = archive_of(rng, CHAIN, LAST) + archive_of(rng, LATER, LATER_LAST)
    tasks = [asyncio.create_task(world.prefetcher.take_turns()) for _ in range(3)]
    try:
        for _ in range(60):
            world.happens(waiting)
            if rng.random() < 0.5:
                await world.settles()
                if rng.random() < 0.3:  # only while they are not about to be given up
                    world.broken -= {*rng.sample(sorted(world.broken), rng.randint(0, len(world.broken)))}
                if rng.random() < 0.2 and (at := world.positions.get(CHAIN, 1)) <= LAST:
                    world.accept(at, min(LAST, at + rng.randint(0, 15)))
            else:
                world.prefetcher.add_chain(rng.choice([CHAIN, LATER]))
                await world.prefetcher.tick()
                await turns(rng.randint(0, 40))
        # In the end every segment arrives, damage is repaired, and no chain is paused.
        for segment in waiting:
            world.put(*segment)
        world.broken.clear()
        for chain in (CHAIN, LATER):
            world.pauses = world.pauses.with_resume(chain, "at last")
        for _ in range(12):
            world.clock.advance(400)
            await world.settles()
        world.check(CHAIN, LAST)
        world.check(LATER, LATER_LAST)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("skip", [False, True], ids=["halt", "skip"])
async def test_every_row_once_in_order_and_no_hole_without_a_decision(
    skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingress.chains.plan.FULL_SEARCH_PAGE", 3)
    rng = seeded()
    for _ in range(25):
        seed = rng.randrange(1 << 32)
        # Short pages, so that many segments follow each of them.
        monkeypatch.setattr(
            "ingress.chains.locate.plan_from_listings", partial(plan_from_listings, limit=rng.choice([2, 5, 100]))
        )
        try:
            await live(seed, skip)
        except BaseException:
            print(f"world {seed}, skip {skip}")
            raise


async def test_whoever_decided_only_what_no_sound_segment_covers_is_given_up_and_written_down() -> None:
    world, decision = World(seeded(), skip=False), GapDecision(SequenceRange(1, 10), "accepted")
    world.put(CHAIN, 5, 20)
    assert world._give_up(CHAIN, decision, frozenset()) == SequenceRange(1, 4)
    assert [gap.range for gap in world.documents.skipped_gaps("FLEET", CHAIN)] == [SequenceRange(1, 4)]
    world.put(CHAIN, 1, 7)
    assert world._give_up(CHAIN, decision, frozenset()) in world.store.list(CHAIN)


async def test_sequences_that_retention_deleted_are_skipped_only_once_an_operator_accepted_them() -> None:
    world = World(seeded(), skip=True)
    world.put(CHAIN, 21, 40)
    world.objects.put(LAYOUT.floor_document(CHAIN), FloorDocument(21).to_json())
    world.clock.advance(TIMEOUT)
    world.prefetcher.reset({CHAIN: 11})
    state = world.prefetcher.chains.add(CHAIN, 40)
    with pytest.raises(Stopped, match="position 11: retention deleted the sequences before 21"):
        await world.prefetcher.locator.search(state)
    world.accept(11, 20)
    await world.prefetcher.locator.search(state)
    assert [gap.range for gap in world.documents.skipped_gaps("FLEET", CHAIN)] == [SequenceRange(11, 20)]
