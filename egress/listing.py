"""What a few listings tell of a chain, in memory that does not grow with it: it may have a million segments.

Blocking; each raises what the store raises. `damaged`: keys of segments that count for nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from common.chain import Chain
from common.segments.keys import MAX_LEVEL
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import Covered, SequenceRange, extends

KEPT = 1000  # segments of a view, those that reach furthest
FIRST_PAGE = 100  # segments that are listed where a handful are wanted
WIDER = 4  # times as far back, where a look back has not found enough


class View:
    """What was listed. `covered`: by all of it; `newest`: the segments that reach furthest, at most KEPT."""

    def __init__(self, damaged: AbstractSet[str] = frozenset()) -> None:
        self.covered = Covered()
        self._damaged = damaged
        self._heap: list[tuple[int, str, SegmentRef]] = []

    @property
    def newest(self) -> list[SegmentRef]:
        """The one that reaches furthest first."""
        refs = (ref for _last, _key, ref in self._heap)
        return sorted(refs, key=lambda ref: (ref.coverage.last, ref.coverage.first), reverse=True)

    def add(self, page: Iterable[SegmentRef]) -> None:
        """Take more of the listing; none of it twice."""
        for ref in page:
            if ref.key in self._damaged:
                continue
            self.covered.add(ref.coverage)
            entry = (ref.coverage.last, ref.key, ref)
            if len(self._heap) < KEPT:
                heapq.heappush(self._heap, entry)
            elif entry[:2] > self._heap[0][:2]:
                heapq.heapreplace(self._heap, entry)


def whole(store: SegmentStore, chain: Chain, damaged: AbstractSet[str]) -> View:
    """All there is."""
    view = View(damaged)
    for page in store.walk(chain):
        view.add(page)
    return view


def reaching(store: SegmentStore, chain: Chain, position: int, damaged: AbstractSet[str]) -> View:
    """What reaches `position`: of level 0, and of the others where that does not contain it.

    The segment that reaches the end of a chain stays in level 0 until there is a newer one.
    """
    view = View(damaged)
    for level in range(MAX_LEVEL + 1):
        for page in store.pages(chain, level, position=position):
            view.add(page)
        if position in view.covered and not level:
            break
    return view


def newest(
    store: SegmentStore,
    chain: Chain,
    within: SequenceRange,
    width: int,
    damaged: AbstractSet[str],
    count: int = FIRST_PAGE,
) -> list[SegmentRef]:
    """The `count` segments that reach furthest, or all that reach `within` where these are fewer, the newest
    first. `width`: how many sequences they may cover together, to begin with.
    """
    while True:
        position = max(within.first, within.last + 1 - width)
        found = reaching(store, chain, position, damaged).newest
        if len(found) >= count or position <= within.first:
            return found[:count]
        width *= WIDER


def at(store: SegmentStore, chain: Chain, position: int, damaged: AbstractSet[str]) -> Sequence[SegmentRef]:
    """Segments that reach `position` and are nearest to it, with one that contains it if there is any."""
    found: list[SegmentRef] = []
    for level in range(MAX_LEVEL + 1):
        page = store.list(chain, position=position, level=level, limit=FIRST_PAGE)
        found += [ref for ref in page if ref.key not in damaged]
        if any(extends(ref.coverage, position) for ref in found):
            break
    return found


def uncovered(
    store: SegmentStore, chain: Chain, within: SequenceRange, damaged: AbstractSet[str]
) -> list[SequenceRange]:
    """The parts of `within` that no segment covers, level by level from the bottom, as far as it takes."""
    covered = Covered()
    for level in range(MAX_LEVEL + 1):
        for page in store.pages(chain, level, position=within.first):
            for ref in page:
                if ref.key not in damaged:
                    covered.add(ref.coverage)
            if page[-1].coverage.last >= within.last:
                break
        if not covered.holes(within):
            break
    return covered.holes(within)
