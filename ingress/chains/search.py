"""Which segments continue a chain, by listings of bounded length.

No look takes longer in an archive of a million segments.

Level 0 is listed first, because new segments stand there; the levels above only on a miss, ascending, until
one leads on. A page holds the segments that end first behind the position, so it holds the one that continues
unless more than a page of them end inside a later, larger one: egress writes such a segment when it reads
again above a hole. `SearchState` finds it, a page a look; and before anything is given up for good, `survey`
looks at everything.
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

log = get_logger("ingress.chains.search")


LISTED = 100  # segments of one level that a look takes
SURVEYED = 1000  # segments that a survey lists at a time
LEFT_OUT = 10  # damaged segments at one position that a look into them passes

_LEADS_ON = (Phase.READY, Phase.DONE)


@dataclass(slots=True)
class SearchState:
    """Where a look that found nothing goes on: behind the last segments of pages that were full.

    `position`: what is searched for; another one begins the search anew.
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
    """What can be carried from `position` on, as far as one page of each level and one of `search` tell.

    `everywhere` false: the levels above 0 are listed only if level 0 shows anything. Blocking.
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
    """A plan by what segments hold, not by their names only. `damaged`: keys of those left out, each of which
    would continue; `gone`: why the chain stands at its position though a segment covers it.
    """

    plan: ChainPlan
    damaged: tuple[str, ...] = ()
    gone: FromHole | None = None


def look_into(
    store: SegmentStore, chain: Chain, position: int, end: int | None, passed: Sequence[SequenceRange]
) -> Inside:
    """What ingress finds at `position` once it opens what continues there; for commands.

    `passed`: what is given up of filled holes. Blocking; raises what the store raises.
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
        except (SegmentGone, Forked):  # being replaced right now; a matter of `segments verify`
            return Inside(plan, damaged)
        if gone is None or gone.rows.first != position:
            return Inside(plan, damaged)
        return Inside(ChainPlan(Phase.LATE, (), gone.rows, segment.modified, plan.beyond), damaged, gone)


def survey(
    store: SegmentStore, chain: Chain, hole: SequenceRange, damaged: AbstractSet[str]
) -> SegmentRef | SequenceRange:
    """What all there is of a chain says about a hole: an undamaged segment that continues after all, or how
    much of the hole, from its first sequence on, no such segment covers.

    Lists everything that reaches the hole, page by page, in bounded memory. Blocking. For decisions that are
    final only. Raises what the store raises.
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
    """Whether a segment stands where something was missing that was not there, as far as one page tells."""
    refs = store.list(gone.segment.chain, position=gone.rows.first, limit=LISTED)
    return any(ref.coverage.overlaps(gone.rows) and ref.key not in gone.known for ref in refs)


def _everything(store: SegmentStore, chain: Chain, position: int) -> Iterator[SegmentRef]:
    """Level by level, from the lowest: what is merged meanwhile is seen in one of them."""
    for level in range(MAX_LEVEL + 1):
        page = store.list(chain, position=position, level=level, limit=SURVEYED)
        while page:
            yield from page
            page = store.list_behind(page[-1], SURVEYED) if len(page) >= SURVEYED else []


FIRST_PAGE, NEXT_PAGE = 100, 1000  # segments that are listed at a time


def covering(
    store: SegmentStore, chain: Chain, rows: SequenceRange, damaged: AbstractSet[str]
) -> list[Stretch[SegmentRef]]:
    """What to read for all of `rows`; empty where segments whose keys are not `damaged` do not cover them.

    Lists no further than until they are covered. Blocking; raises what the store raises.
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
    """The first page of each level, because what is wanted stands there but for rare cases; then the rest."""
    behind: deque[SegmentRef] = deque()
    for level in range(MAX_LEVEL + 1):
        page = store.list(chain, position=position, level=level, limit=FIRST_PAGE)
        behind += page[-1:] if len(page) >= FIRST_PAGE else []
        yield page
    while behind:
        page = store.list_behind(behind.popleft(), NEXT_PAGE)
        behind += page[-1:] if len(page) >= NEXT_PAGE else []
        yield page


ASKED_EVERY = 60.0  # seconds; in between the host's clock that never jumps is added


class StoreClock:
    """The store's clock as one target asks for it, by the object `key`. Blocking; safe to use from several
    threads.
    """

    def __init__(self, objects: ObjectStore, key: str, clock: Clock) -> None:
        self.objects, self._key, self._clock = objects, key, clock
        self._known: tuple[float, float] | None = None  # of the store, of the host
        self._refused, self._lock = False, threading.Lock()

    def now(self, at_least: float) -> float:
        """Seconds since 1970 UTC by the store's clock.

        `at_least`: the time of an object that is there; it is the answer where ingress may not write, which
        can only make holes wait longer. Raises what the store raises otherwise.
        """
        known = self._now()
        return at_least if known is None else max(at_least, known)

    def stamp(self) -> float:
        """As `now`, for what is only written down: by the host's clock where ingress may not write."""
        known = self._now()
        return self._clock.now() if known is None else known

    def _now(self) -> float | None:
        """None where ingress may not write."""
        # Locked: two that ask at once would put the object twice, and neither would know whose time it has.
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
