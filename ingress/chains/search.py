"""Which segments continue a chain, decided by listings of bounded length: no look takes longer in an archive
of a million segments.

Level 0 is listed first, because new segments stand there; the levels above only on a miss, ascending, until
one leads on. A page holds the segments that end first behind the position, so it holds the one that continues
unless more than a page of them end inside a later, larger one: egress writes such a segment when it reads
again above a hole. `Search` finds it, a page a look; and before anything is given up for good, `survey` looks
at everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from common.chain import Chain
from common.errors import SegmentCorrupt
from common.segments.faults import Forked, SegmentGone
from common.segments.keys import MAX_LEVEL
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, Stretch, extends, preference
from ingress.chains.plan import ChainPlan, Phase, plan_chain
from ingress.rows.decoder import FromHole, standing_in

LISTED = 100  # segments of one level that a look takes
SURVEYED = 1000  # segments that a survey lists at a time
LEFT_OUT = 10  # damaged segments at one position that a look into them passes

_LEADS_ON = (Phase.READY, Phase.DONE)
NONE: frozenset[str] = frozenset()


@dataclass(slots=True)
class Search:
    """Where a look that found nothing goes on: behind the last segments of pages that were full.

    `position`: what is searched for; another one begins the search anew.
    """

    position: int = 0
    frontier: deque[SegmentRef] = field(default_factory=deque)

    def begin(self, position: int) -> None:
        """Search for what continues from `position`."""
        if position != self.position:
            self.position = position
            self.frontier.clear()


def next_stretches(
    store: SegmentStore,
    chain: Chain,
    position: int,
    end: int | None = None,
    damaged: AbstractSet[str] = NONE,
    limit: int = LISTED,
) -> list[Stretch[SegmentRef]]:
    """What of `chain` comes next, from `position` up to the first hole, `end` (inclusive) or the listings'
    ends; empty where nothing continues, as far as one page of each level tells. Blocking.

    `damaged`: keys of segments to leave out. `limit`: segments of one level that are listed. Raises what the
    store raises.
    """
    return [*look(store, chain, position, end, damaged, limit=limit).stretches]


def look(
    store: SegmentStore,
    chain: Chain,
    position: int,
    end: int | None,
    damaged: AbstractSet[str],
    *,
    everywhere: bool = True,
    search: Search | None = None,
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
    return _searched(store, search, found, full, plan, position, end, damaged, limit) if search else plan


def _searched(
    store: SegmentStore,
    search: Search,
    found: list[SegmentRef],
    full: list[SegmentRef],
    plan: ChainPlan,
    position: int,
    end: int | None,
    damaged: AbstractSet[str],
    limit: int,
) -> ChainPlan:
    """The plan with one more page; `full`: the last segments of first pages behind which there is more."""
    search.begin(position)
    if not search.frontier:
        search.frontier += full
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


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What all there is of a chain says about a hole: an undamaged segment that continues after all
    (`leads_on`), or how much of the hole, from its first sequence on, no such segment covers (`free`).
    """

    leads_on: SegmentRef | None = None
    free: SequenceRange | None = None


def survey(store: SegmentStore, chain: Chain, hole: SequenceRange, damaged: AbstractSet[str]) -> Surveyed:
    """List everything that reaches the hole, page by page, in bounded memory. Blocking.

    For decisions that are final only. Raises what the store raises.
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
    return Surveyed(leads_on=best) if best else Surveyed(free=SequenceRange(hole.first, reach))


def has_news(store: SegmentStore, gone: FromHole) -> bool:
    """Whether a segment stands where something was missing that was not there, as far as one page tells."""
    refs = store.list(gone.segment.chain, position=gone.rows.first, limit=LISTED)
    return any(ref.coverage.overlaps(gone.rows) and ref.key not in gone.known for ref in refs)


def _everything(store: SegmentStore, chain: Chain, position: int) -> Iterator[SegmentRef]:
    for level in range(MAX_LEVEL + 1):
        page = store.list(chain, position=position, level=level, limit=SURVEYED)
        while page:
            yield from page
            page = store.list_behind(page[-1], SURVEYED) if len(page) >= SURVEYED else []
