"""Search for the segments that continue a chain, by listings of bounded length.

A search takes no longer in an archive of a million segments.

Level 0 is listed first, because new segments are there. The levels above are listed only on a miss, ascending, until
one continues the chain. A page holds the segments that end first after the position. So it holds the one that
continues, unless more than a page of them end inside a later, larger one: egress writes such a segment when it reads
again above a hole. `SearchState` finds it, with one page in each search. Before a range is finally skipped,
`survey` lists all segments.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from common.chain import Chain
from common.clock import Clock
from common.errors import OutcomeUnknown, Refused, SegmentCorrupt, Unavailable
from common.logs import get_logger
from common.objects.port import ObjectStore, store_now
from common.segments.keys import MAX_LEVEL
from common.segments.parquet_guard import Forked, SegmentGone
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, Stretch, extends, leading, preference
from ingress.chains.plan import ChainPlan, Phase, plan_chain
from ingress.rows.decoder import FromHole, standing_in

log = get_logger(__name__)


LISTED = 100  # segments of one level in a search
SURVEYED = 1000  # segments that a survey lists at a time
LEFT_OUT = 10  # damaged segments at one position that `look_into` leaves out, at most

_LEADS_ON = (Phase.READY, Phase.DONE)


@dataclass(slots=True)
class SearchState:
    """Continuation of a search that found nothing: after the last segments of the pages that were full.

    `position`: the sequence that is searched for; another position starts a new search.
    """

    position: int = 0
    frontier: deque[SegmentRef] = field(default_factory=deque)


def look(
    store: SegmentStore,
    chain: Chain,
    position: int,
    end: int | None,
    damaged: AbstractSet[str],
    *,
    everywhere: bool = True,
    search: SearchState | None = None,
    limit: int = LISTED,
) -> ChainPlan:
    """Plan the reads from `position` on, as far as one page of each level and one page of `search` show.

    `everywhere` false: the levels above 0 are listed only if level 0 lists a segment. Blocking.
    """
    found: list[SegmentRef] = []
    full: list[SegmentRef] = []
    plan = ChainPlan(Phase.IDLE)
    for level in range(MAX_LEVEL + 1):
        page = store.list(chain, position=position, level=level, limit=limit)
        found += page
        full += page[-1:] if len(page) >= limit else []
        plan = plan_chain(found, position, end, damaged)
        if plan.phase in _LEADS_ON or not (found or everywhere):
            return plan
    if search is None:
        return plan
    if position != search.position:
        search.position, search.frontier = position, deque()
    search.frontier = search.frontier or deque(full)
    if not search.frontier:
        return plan
    page = store.list_behind(search.frontier.popleft(), limit)
    if len(page) >= limit:
        search.frontier.append(page[-1])
    better = plan_chain([*found, *page], position, end, damaged)
    return better if better.phase in _LEADS_ON else plan


@dataclass(frozen=True, slots=True)
class Inside:
    """A plan by the content of segments, not only by their names. `damaged`: keys of segments that would continue and
    were left out; `gone`: the filled hole at which the chain blocks although a segment covers it.
    """

    plan: ChainPlan
    damaged: tuple[str, ...] = ()
    gone: FromHole | None = None


def look_into(
    store: SegmentStore, chain: Chain, position: int, end: int | None, passed: Sequence[SequenceRange]
) -> Inside:
    """Plan the reads at `position` as ingress does once it opens the segments that continue there; for commands.

    `passed`: ranges of filled holes that are skipped. Blocking; raises as the store does.
    """
    damaged: tuple[str, ...] = ()
    while True:
        plan = look(store, chain, position, end, frozenset(damaged))
        if not plan.stretches or len(damaged) >= LEFT_OUT:
            return Inside(plan, damaged)
        segment = plan.stretches[0].segment
        try:
            gone = standing_in(store, plan.stretches[0], frozenset(damaged), passed)
        except SegmentCorrupt:
            damaged = (*damaged, segment.key)
            continue
        except (SegmentGone, Forked):  # being replaced right now; `segments verify` reports a lasting one
            return Inside(plan, damaged)
        if gone is None or gone.rows.first != position:
            return Inside(plan, damaged)
        return Inside(ChainPlan(Phase.LATE, (), gone.rows, segment.modified, plan.beyond), damaged, gone)


def survey(
    store: SegmentStore, chain: Chain, hole: SequenceRange, damaged: AbstractSet[str]
) -> SegmentRef | SequenceRange:
    """Search the whole chain for a hole: return an undamaged segment that continues after all, or the part of the
    hole, from its first sequence on, that no such segment covers.

    Lists all segments that reach the hole, page by page, in bounded memory. Blocking. Only for final decisions.
    Raises as the store does.
    """
    best: SegmentRef | None = None
    reach = hole.last
    for ref in _everything(store, chain, hole.first):
        if ref.key in damaged or ref.coverage.first > reach:
            continue
        if extends(ref.coverage, hole.first):
            best = ref if best is None else max(best, ref, key=preference)
        else:
            reach = ref.coverage.first - 1
    return best or SequenceRange(hole.first, reach)


def has_news(store: SegmentStore, gone: FromHole) -> bool:
    refs = store.list(gone.segment.chain, position=gone.rows.first, limit=LISTED)
    return any(ref.coverage.overlaps(gone.rows) and ref.key not in gone.known for ref in refs)


def _everything(store: SegmentStore, chain: Chain, position: int) -> Iterator[SegmentRef]:
    """List level by level, from the lowest: a segment that is merged meanwhile is found in one of them."""
    for level in range(MAX_LEVEL + 1):
        page = store.list(chain, position=position, level=level, limit=SURVEYED)
        while page:
            yield from page
            page = store.list_behind(page[-1], SURVEYED) if len(page) >= SURVEYED else []


FIRST_PAGE, NEXT_PAGE = 100, 1000  # segments that are listed at a time


def covering(
    store: SegmentStore, chain: Chain, rows: SequenceRange, damaged: AbstractSet[str]
) -> list[Stretch[SegmentRef]]:
    """Return the stretches to read for all of `rows`; empty if segments that are not `damaged` do not cover them.

    Lists only until they are covered. Blocking; raises as the store does.
    """
    kept: list[SegmentRef] = []
    for page in _pages(store, chain, rows.first):
        found = [ref for ref in page if ref.coverage.overlaps(rows) and ref.key not in damaged]
        kept += found
        stretches = leading(kept, rows.first, rows.last) if found else []
        if stretches and stretches[-1].rows.last == rows.last:
            return stretches
    return []


def _pages(store: SegmentStore, chain: Chain, position: int) -> Iterator[list[SegmentRef]]:
    """List the first page of each level, because it almost always holds the wanted segment; then the other pages."""
    behind: deque[SegmentRef] = deque()
    for level in range(MAX_LEVEL + 1):
        page = store.list(chain, position=position, level=level, limit=FIRST_PAGE)
        behind += page[-1:] if len(page) >= FIRST_PAGE else []
        yield page
    while behind:
        page = store.list_behind(behind.popleft(), NEXT_PAGE)
        behind += page[-1:] if len(page) >= NEXT_PAGE else []
        yield page


ASKED_EVERY = 60.0  # seconds between two requests; in between, the host's monotonic clock is added


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

    def stamp(self) -> float:
        """Return the time as `now`, for records only: by the host's clock if ingress may not write."""
        known = self._now()
        return self._clock.now() if known is None else known

    def _now(self) -> float | None:
        """Return the store's time; None if ingress may not write."""
        # Locked: two threads at once would put the object twice, and neither would know which time it got.
        with self._lock:
            host = self._clock.monotonic()
            if self._known is None or host - self._known[1] >= ASKED_EVERY:
                try:
                    self._known = store_now(self.objects, self._key), host
                except Refused as error:
                    if not self._refused:
                        self._refused = True
                        log.warning("the store's clock cannot be read", action="store_clock", error=str(error))
                    return None
                except OutcomeUnknown as error:
                    raise Unavailable(error.message, code=error.code) from error
            return self._known[0] + host - self._known[1]
