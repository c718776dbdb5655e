"""Which segments give the rows of a range, found by pages and kept in bounded memory: a chain may have a
million segments behind the range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from common.chain import Chain
from common.segments.keys import MAX_LEVEL
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, Stretch, leading

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
