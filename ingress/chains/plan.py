"""Plans of the next reads of a chain: pure functions over its segments, and the search for them by bounded listings.

A search takes no longer in an archive of a million segments.

Level 0 is listed first, because new segments are there. The levels above are listed only on a miss: all of them at
once, or if they hold too many segments, ascending until one continues the chain. A page holds the segments that end
first after the position. So it holds the one that continues, unless more than a page of them end inside a later, larger
one: egress writes such a segment when it reads again above a hole. `SearchState` finds it, with one page in each
search. Before a range is finally skipped, `search_whole_chain` lists all segments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain as joined

from common.archive.documents import AcceptedGap, accepted_part
from common.archive.guard import ForkError
from common.archive.keys import MAX_LEVEL
from common.archive.scan import ChainArchive
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import UnreadableSegment
from common.chain import Chain
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch, leading_stretches, preference
from common.settings.ingress import SourceSettings
from common.settings.types import format_duration
from ingress.rows.decoder import IncompleteFill, check_filled_hole


class Phase(StrEnum):
    """Phase of a chain. A plan has only the first six; `ChainState` has all."""

    READY = "ready"  # rows can be read now
    IDLE = "idle"  # the chain is at the end of the archive
    LATE = "late"  # a hole: a segment after it exists, the segment that continues does not
    LOST = "lost"  # a hole that has been late for too long; an operator must decide
    DAMAGED = "damaged"  # only damaged segments would continue
    DONE = "done"  # its incarnation ended, and is read to its end
    BEGINNING = "beginning"  # its first sequence is not known
    SEARCHING = "searching"  # nothing is planned
    SKIPPING_START = "skipping start"  # the range that it skips before it begins is next
    SKIPPING_HOLE = "skipping hole"  # the skipped range of a hole is next
    FAILED = "failed"  # the last turn ended with an error
    STOPPED = "stopped"  # for a reason that needs an operator
    PAUSED = "paused"  # by an operator


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """The stretches of one chain that can be read, ascending and without a hole from its position on.

    `hole`: the missing sequences, if the phase is LATE, LOST or DAMAGED. `waiting_since`: the earliest LastModified
    of the segments after the hole (or of the damaged ones), in seconds by the store's clock, so that waiting
    survives restarts; None if no segment is after it, because the incarnation ended there. `late_end`: the greatest
    end of coverage after the end of the incarnation, which is reported and never replayed; 0 if there is none.
    """

    phase: Phase
    stretches: tuple[Stretch[SegmentRef], ...] = ()
    hole: SequenceRange | None = None
    waiting_since: float | None = None
    late_end: int = 0

    @property
    def is_waiting(self) -> bool:
        return self.phase in (Phase.LATE, Phase.LOST, Phase.DAMAGED)

    def with_wait_of(self, former: ChainPlan) -> ChainPlan:
        """Return this plan; if `former` was late at the same sequence, late since then.

        Compaction rewrites segments after a hole, with a new LastModified. Time of damage does not count as time of
        being late.
        """
        if not self.hole or not former.hole or self.hole.first != former.hole.first:
            return self
        if Phase.DAMAGED in (self.phase, former.phase):
            return self
        times = [t for t in (self.waiting_since, former.waiting_since) if t is not None]
        return replace(self, waiting_since=min(times, default=None))


def plan_chain(
    segments: Iterable[SegmentRef], position: int, end: int | None, damaged: AbstractSet[str] = frozenset()
) -> ChainPlan:
    """Plan the stretches from `position` to the first hole, or to `end` (inclusive) if the incarnation ended there.

    `damaged`: keys of segments to leave out.
    """
    found = list(segments)
    last = MAX_SEQUENCE if end is None else end
    late_end = max((ref.coverage.last for ref in found if ref.coverage.last > last), default=0)
    if position > last:
        return ChainPlan(Phase.DONE, late_end=late_end)
    usable = [ref for ref in found if ref.key not in damaged]
    if stretches := tuple(leading_stretches(usable, position, last)):
        return ChainPlan(Phase.READY, stretches, late_end=late_end)
    broken = [ref for ref in found if ref.key in damaged and position in ref.coverage]
    behind = [ref for ref in usable if ref.coverage.first > position]
    if not broken and not behind and end is None:
        return ChainPlan(Phase.IDLE, late_end=late_end)
    ends = [ref.coverage.first - 1 for ref in behind] or [ref.coverage.last for ref in broken]
    ends += [] if end is None else [end]
    since = min((ref.modified for ref in broken or behind), default=None)
    phase = Phase.DAMAGED if broken else Phase.LATE
    return ChainPlan(phase, (), SequenceRange(position, min(ends)), since, late_end)


def first_position(first: int, floor: int | None) -> int:
    return max(first, floor or 1)


@dataclass(frozen=True, slots=True)
class GapDecision:
    """The leading `part` of a hole is skipped, or lost and an operator must decide (`needs_operator`). `is_recorded`:
    it was decided before, by an operator or this target.
    """

    part: SequenceRange
    reason: str
    needs_operator: bool = False
    is_recorded: bool = False


def decide_hole(plan: ChainPlan, gaps: Sequence[AcceptedGap], now: float, source: SourceSettings) -> GapDecision | None:
    """Decide about the hole of `plan`, which is LATE or DAMAGED; None: wait, it may still be filled.

    `gaps`: gaps that operators accepted, and gaps that this target skipped before. `now`: seconds by the store's clock.
    Damage never turns into a lost hole by itself: the object exists, and waiting does not make it worse.
    """
    assert plan.hole is not None, "only holes are decided about"
    part = accepted_part(plan.hole, (gap.range for gap in gaps))
    if part is not None:
        gap = next(gap for gap in gaps if part.first in gap.range)
        reason = f"accepted by {gap.decided_by or 'someone'}" + (f": {gap.note}" if gap.note else "")
        return GapDecision(part, reason, is_recorded=True)
    timeout = source.lost_segment_timeout
    if plan.phase is Phase.DAMAGED or plan.waiting_since is None or now - plan.waiting_since < timeout:
        return None
    return GapDecision(plan.hole, f"no segment within {format_duration(timeout)}", source.on_lost != "skip")


# The search

SEARCH_PAGE = 100  # segments of one level in a search
FULL_SEARCH_PAGE = 1000  # segments that a survey lists at a time
MAX_ABOVE = 1000  # segments above level 0 that are listed at once: for one request a store returns as many
MAX_DAMAGED_AT_POSITION = 10  # damaged segments at one position that `plan_from_contents` leaves out, at most

_CONTINUING = (Phase.READY, Phase.DONE)


@dataclass(slots=True)
class SearchState:
    """Continuation of a search that found nothing: after the last segments of the pages that were full.

    `position`: the sequence that is searched for; another position starts a new search.
    """

    position: int = 0
    frontier: deque[SegmentRef] = field(default_factory=deque)


def plan_from_listings(
    store: SegmentStore,
    chain: Chain,
    position: int,
    end: int | None,
    damaged: AbstractSet[str],
    *,
    everywhere: bool = True,
    search: SearchState | None = None,
    limit: int = SEARCH_PAGE,
) -> ChainPlan:
    """Plan the reads from `position` on, as far as one page of each level and one page of `search` show.

    `everywhere` false: the levels above 0 are listed only if level 0 lists a segment. Blocking.
    """
    found: list[SegmentRef] = []
    full: list[SegmentRef] = []
    for page in _level_pages(store, chain, position, limit):
        found += page
        full += page[-1:] if len(page) == limit else []
        plan = plan_chain(found, position, end, damaged)
        if plan.phase in _CONTINUING or not (found or everywhere):
            return plan
    if search is None:
        return plan
    if position != search.position:
        search.position, search.frontier = position, deque()
    search.frontier = search.frontier or deque(full)
    if not search.frontier:
        return plan
    page = store.list_after(search.frontier.popleft(), limit)
    if len(page) >= limit:
        search.frontier.append(page[-1])
    better = plan_chain([*found, *page], position, end, damaged)
    return better if better.phase in _CONTINUING else plan


def _level_pages(store: SegmentStore, chain: Chain, position: int, limit: int) -> Iterator[list[SegmentRef]]:
    """Yield the first page of level 0, then all that is above it, or the first page of each level above."""
    yield ChainArchive.listed(store, chain, position, level=0, limit=limit).refs
    if (above := store.list_above(chain, 0, MAX_ABOVE)) is not None:
        yield [ref for ref in above if ref.coverage.last >= position]
        return
    for level in range(1, MAX_LEVEL + 1):
        yield ChainArchive.listed(store, chain, position, level=level, limit=limit).refs


@dataclass(frozen=True, slots=True)
class OpenedPlan:
    """A plan by the content of segments, not only by their names. `damaged`: keys of segments that would continue and
    were left out; `incomplete_fill`: the filled hole at which the chain blocks although a segment covers it.
    """

    plan: ChainPlan
    damaged: tuple[str, ...] = ()
    incomplete_fill: IncompleteFill | None = None


def plan_from_contents(
    store: SegmentStore, chain: Chain, position: int, end: int | None, skipped: Sequence[SequenceRange]
) -> OpenedPlan:
    """Plan the reads at `position` as ingress does once it opens the segments that continue there; for commands.

    `skipped`: ranges of filled holes that are skipped. Blocking; raises as the store does.
    """
    damaged: tuple[str, ...] = ()
    while True:
        plan = plan_from_listings(store, chain, position, end, frozenset(damaged))
        if not plan.stretches or len(damaged) >= MAX_DAMAGED_AT_POSITION:
            return OpenedPlan(plan, damaged)
        segment, fill = plan.stretches[0].segment, None
        try:
            with suppress(ForkError):  # being replaced right now; `segments verify` reports a lasting one
                fill = check_filled_hole(store, plan.stretches[0], frozenset(damaged), skipped)
        except UnreadableSegment as found:
            if not found.is_gone:
                damaged = (*damaged, segment.key)
                continue
        if fill is None or fill.rows.first != position:
            return OpenedPlan(plan, damaged)
        return OpenedPlan(ChainPlan(Phase.LATE, (), fill.rows, segment.modified, plan.late_end), damaged, fill)


def search_whole_chain(
    store: SegmentStore, chain: Chain, hole: SequenceRange, damaged: AbstractSet[str]
) -> SegmentRef | SequenceRange:
    """Search the whole chain for a hole: return an undamaged segment that continues after all, or the part of the
    hole, from its first sequence on, that no such segment covers.

    Lists all segments that reach the hole, page by page, in bounded memory. Blocking. Only for final decisions.
    Raises as the store does.
    """
    best: SegmentRef | None = None
    reach = hole.last
    for ref in joined.from_iterable(store.pages(chain, position=hole.first, size=FULL_SEARCH_PAGE)):
        if ref.key in damaged or ref.coverage.first > reach:
            continue
        if hole.first in ref.coverage:
            best = ref if best is None else max(best, ref, key=preference)
        else:
            reach = ref.coverage.first - 1
    return best or SequenceRange(hole.first, reach)


def has_new_segments(store: SegmentStore, fill: IncompleteFill) -> bool:
    near = ChainArchive.listed(store, fill.segment.chain, fill.rows.first, limit=SEARCH_PAGE)
    return any(ref.key not in fill.known for ref in near.overlapping(fill.rows))


COVER_FIRST_PAGE, COVER_NEXT_PAGE = 100, 1000  # segments that are listed at a time


def stretches_for(
    store: SegmentStore, chain: Chain, rows: SequenceRange, damaged: AbstractSet[str]
) -> list[Stretch[SegmentRef]]:
    """Return the stretches to read for all of `rows`; empty if segments that are not `damaged` do not cover them.

    Lists only until they are covered. Blocking; raises as the store does.
    """
    kept: list[SegmentRef] = []
    for page in _pages(store, chain, rows.first):
        found = [ref for ref in page if ref.coverage.overlaps(rows) and ref.key not in damaged]
        kept += found
        stretches = leading_stretches(kept, rows.first, rows.last) if found else []
        if stretches and stretches[-1].rows.last == rows.last:
            return stretches
    return []


def _pages(store: SegmentStore, chain: Chain, position: int) -> Iterator[list[SegmentRef]]:
    """List the first page of each level, because it almost always holds the wanted segment; then the other pages."""
    behind: deque[SegmentRef] = deque()
    for level in range(MAX_LEVEL + 1):
        page = ChainArchive.listed(store, chain, position, level=level, limit=COVER_FIRST_PAGE).refs
        behind += page[-1:] if len(page) >= COVER_FIRST_PAGE else []
        yield page
    while behind:
        page = store.list_after(behind.popleft(), COVER_NEXT_PAGE)
        behind += page[-1:] if len(page) >= COVER_NEXT_PAGE else []
        yield page
