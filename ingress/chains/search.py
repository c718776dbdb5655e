"""Search for the segments that continue a chain, by listings of bounded length.

A search takes no longer in an archive of a million segments.

Level 0 is listed first, because new segments are there. The levels above are listed only on a miss: all of them at
once, or if they hold too many segments, ascending until one continues the chain. A page holds the segments that end
first after the position. So it holds the one that continues, unless more than a page of them end inside a later, larger
one: egress writes such a segment when it reads again above a hole. `SearchState` finds it, with one page in each
search. Before a range is finally skipped, `search_whole_chain` lists all segments.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain as joined

from common.archive.guard import ForkError
from common.archive.keys import MAX_LEVEL
from common.archive.scan import ChainArchive
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import UnreadableSegment
from common.chain import Chain
from common.clock import Clock
from common.errors import OutcomeUnknown, Refused, Unavailable
from common.logs import get_logger
from common.objects.port import ObjectStore, read_store_clock
from common.sequences import SequenceRange, Stretch, leading_stretches, preference, reaches
from ingress.chains.plan import ChainPlan, Phase, plan_chain
from ingress.rows.decoder import IncompleteFill, check_filled_hole

log = get_logger(__name__)


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
        if reaches(ref.coverage, hole.first):
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


STORE_CLOCK_INTERVAL_S = 60.0  # seconds between two requests; in between, the host's monotonic clock is added


class StoreClock:
    """The store's clock, as one target reads it with the object `key`. Blocking; safe to call from several threads."""

    def __init__(self, objects: ObjectStore, key: str, clock: Clock) -> None:
        self.objects, self._key, self._clock = objects, key, clock
        self._known: tuple[float, float] | None = None  # time of the store, time of the host
        self._refused, self._lock = False, threading.Lock()

    def now(self, at_least: float) -> float:
        """Return seconds since 1970 UTC by the store's clock.

        `at_least`: the time of an existing object. It is the result if ingress may not write: holes then only wait
        longer. Otherwise raises as the store does.
        """
        known = self._now()
        return at_least if known is None else max(at_least, known)

    def now_or_host(self) -> float:
        """Return the time as `now`, for records only: by the host's clock if ingress may not write."""
        known = self._now()
        return self._clock.now() if known is None else known

    def _now(self) -> float | None:
        """Return the store's time; None if ingress may not write."""
        # Locked: two threads at once would put the object twice, and neither would know which time it got.
        with self._lock:
            host = self._clock.monotonic()
            if self._known is None or host - self._known[1] >= STORE_CLOCK_INTERVAL_S:
                try:
                    self._known = read_store_clock(self.objects, self._key), host
                except Refused as error:
                    if not self._refused:
                        self._refused = True
                        log.warning("store clock refused", action="store_clock_refused", error=str(error))
                    return None
                except OutcomeUnknown as error:
                    raise Unavailable(error.message, code=error.code) from error
            return self._known[0] + host - self._known[1]
