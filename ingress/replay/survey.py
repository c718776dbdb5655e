"""Looks into the archive: which chains and sequences a request means, which segments hold them, what is not
there.

Nothing is written. Of segments only footers are read; listings are taken anew where compaction removes what
one named.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from common.chain import Chain
from common.clock import Clock
from common.errors import SegmentCorrupt, UsageError
from common.segments.documents import ChainStore, StreamDocument
from common.segments.faults import SegmentGone
from common.segments.moments import Timeline
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, Stretch, cover
from common.service.threads import Threads
from ingress.replay.plan import ChainPlan, ChainRange, Part, Plan, asked_range, stretches_of
from ingress.replay.request import Request

LISTINGS = 3  # tries, each on a new listing


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, what the source stream was, and what an operator should know before."""

    plan: Plan
    stream: StreamDocument | None
    notes: tuple[str, ...]


class Survey:
    """Looks into one archive."""

    def __init__(self, store: SegmentStore, documents: ChainStore, threads: Threads, clock: Clock) -> None:
        self._store, self._documents, self._threads, self._clock = store, documents, threads, clock

    async def look(self, request: Request) -> Found:
        """What `request` means now. Raises UsageError, what the store raises, SegmentCorrupt never."""
        chains = request.chains(await self._threads.run(self._documents.chains, request.site, request.feed))
        stream = await self._threads.run(self._documents.read_stream, chains[-1])
        begin, end = request.moments(self._clock.now())
        notes, plans = _first_notes(request, chains), []
        for chain in chains:
            plan = await self._chain(chain, request, (begin, end), notes)
            if plan is not None:
                plans.append(plan)
        return Found(Plan(tuple(plans), bool(request.subjects)), stream, tuple(notes))

    async def plan_of(self, ranges: list[ChainRange], *, is_filtered: bool) -> Plan:
        """The plan of ranges that are known already."""
        plans = [await self._planned(each, []) for each in ranges]
        return Plan(tuple(plans), is_filtered)

    async def _chain(
        self, chain: Chain, request: Request, moments: tuple[int | None, int | None], notes: list[str]
    ) -> ChainPlan | None:
        rows = await self._relisted(chain, request, moments, notes)
        return None if rows is None else await self._planned(ChainRange(chain, rows), notes)

    async def _relisted(
        self, chain: Chain, request: Request, moments: tuple[int | None, int | None], notes: list[str]
    ) -> SequenceRange | None:
        for _ in range(LISTINGS - 1):
            try:
                return await self._range(chain, request, moments, notes)
            except SegmentGone:
                continue
        return await self._range(chain, request, moments, notes)

    # Which sequences

    async def _range(
        self, chain: Chain, request: Request, moments: tuple[int | None, int | None], notes: list[str]
    ) -> SequenceRange | None:
        refs = await self._threads.run(self._store.list, chain)
        begins, ends = await self._bounds(chain)
        covered = max((ref.coverage.last for ref in refs), default=0)
        first, last = request.from_sequence, request.to_sequence
        if moments != (None, None):
            timed = await self._threads.run(self._timed, refs, begins, moments)
            if timed is None:
                return None
            first, last = max(first or 1, timed[0]), min(last or timed[1], timed[1])
        if request.from_sequence is not None and request.from_sequence < begins:
            notes.append(f"the archive of {chain} begins at {begins}")
        if request.to_sequence is not None and request.to_sequence > min(covered, ends or covered):
            notes.append(f"the archive of {chain} ends at {min(covered, ends or covered)}")
        return asked_range(begins, covered, ends, first, last)

    async def _bounds(self, chain: Chain) -> tuple[int, int | None]:
        """Where the chain begins, and where its incarnation ended (None: it has not)."""
        call = self._threads.run
        document, floor, following = await asyncio.gather(
            call(self._documents.read_chain, chain),
            call(self._documents.read_floor, chain),
            call(self._documents.read_stream, chain.next_incarnation()),
        )
        begins = max(1 if document is None else document.first, floor or 1)
        previous = None if following is None else following.previous
        return begins, None if previous is None else previous.get(chain.partition, 0)

    def _timed(
        self, refs: list[SegmentRef], begins: int, moments: tuple[int | None, int | None]
    ) -> tuple[int, int] | None:
        """First and last sequence between two moments; None where nothing is. Blocking."""
        timeline = Timeline(self._store, refs)
        begin_ns, end_ns = moments
        first, last = begins, max((ref.coverage.last for ref in refs), default=0)
        if begin_ns is not None:
            found = timeline.first_at(begin_ns)
            if found is None:
                return None
            first = _with_hole_before(timeline, refs, begins, found, begin_ns)
        if end_ns is not None:
            found = timeline.first_at(end_ns)
            last = last if found is None else found - 1
        return (first, last) if first <= last else None

    # Which segments

    async def _planned(self, each: ChainRange, notes: list[str]) -> ChainPlan:
        damaged: set[str] = set()
        found = await self._threads.run(self._documents.gaps, each.chain)
        gaps = [gap.range for gap in found]
        for _ in range(LISTINGS):
            refs = await self._threads.run(self._store.list, each.chain, position=each.rows.first)
            usable = [ref for ref in refs if ref.key not in damaged]
            stretches, holes, accepted = stretches_of(usable, each.rows, gaps)
            parts, bad = await self._footers(stretches)
            if not bad:
                return ChainPlan(each, tuple(parts), tuple(holes), tuple(accepted))
            damaged |= bad
            notes += [f"damaged or gone, left out: {key}" for key in sorted(bad)]
        raise UsageError(
            f"chain {each.chain}: too many segments are damaged or vanish; see floe segments verify"
        )

    async def _footers(self, stretches: list[Stretch[SegmentRef]]) -> tuple[list[Part], set[str]]:
        """The stretches with their footers, and the keys of segments that cannot be read."""
        parts: list[Part] = []
        bad: set[str] = set()

        async def read(stretch: Stretch[SegmentRef]) -> Part | None:
            try:
                return Part(stretch, await self._threads.run(self._store.footer, stretch.segment))
            except (SegmentCorrupt, SegmentGone):
                bad.add(stretch.segment.key)
                return None

        for begin in range(0, len(stretches), 256):
            found = await asyncio.gather(*map(read, stretches[begin : begin + 256]))
            parts += [part for part in found if part is not None]
        return parts, bad


def _first_notes(request: Request, chains: list[Chain]) -> list[str]:
    if request.by_sequence and request.incarnation is None and chains[-1].incarnation:
        return [f"sequences are those of incarnation {chains[-1].incarnation:04d}, the newest"]
    return []


def _with_hole_before(
    timeline: Timeline, refs: list[SegmentRef], begins: int, found: int, moment_ns: int
) -> int:
    """`found`, or where the hole before it begins: what is missing there may be as new as `moment_ns`."""
    before = begins - 1
    for stretch in cover(refs, begins):
        if found in stretch.rows:
            times = timeline.times_of(stretch.segment)
            is_whole_later = times is not None and times[0] >= moment_ns
            return before + 1 if is_whole_later and stretch.rows.first > before + 1 else found
        before = stretch.rows.last
    return found
