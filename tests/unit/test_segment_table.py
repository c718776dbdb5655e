"""Very many segments in little memory, and the windows in which they are looked at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.segments.segment import SegmentRef
from common.segments.table import SegmentTable
from common.sequences import MAX_SEQUENCE
from tests.support.compaction import ref, refs

SEGMENTS = refs(200, level=3, size=2**40, count=40)


def listed(segments: list[SegmentRef]) -> list[SegmentRef]:
    return sorted(segments, key=lambda s: s.key)


def windows(table: SegmentTable, size: int) -> Iterator[list[SegmentRef]]:
    for window in table.windows(size):
        yield [table[place] for places in window for place in places]


@given(SEGMENTS)
def test_what_is_put_in_comes_out(segments: list[SegmentRef]) -> None:
    table = SegmentTable.listing(segments)
    assert table == listed(segments)
    assert table != [*segments, ref(1000, 1000)]
    assert [table.place(s) for s in listed(segments)] == list(range(len(segments)))
    assert table.place(ref(1000, 1001)) is None
    assert table.place(ref(1, 1, 9)) is None
    assert (table.end, table.newest) == (
        max((s.coverage.last for s in segments), default=0),
        max((s.modified for s in segments), default=0.0),
    )
    for place, segment in enumerate(table):
        assert table[place] == segment
        assert (table.size_of(place), table.end_of(place)) == (segment.size, segment.coverage.last)


def test_the_greatest_values_are_kept_exactly() -> None:
    segment = ref(MAX_SEQUENCE, MAX_SEQUENCE, 9, size=2**62, age=0.123456)
    table = SegmentTable([segment])
    assert (table[0], table[-1], table[:]) == (segment, segment, [segment])
    with pytest.raises(IndexError):
        table[1]


@given(SEGMENTS, st.integers(1, 10))
def test_windows_hold_each_segment_once_and_no_two_overlap(segments: list[SegmentRef], size: int) -> None:
    table = SegmentTable.listing(segments)
    found = list(windows(table, size))
    assert listed([s for window in found for s in window]) == listed(segments)
    reach = 0
    for window in found:
        assert window == sorted(window, key=lambda s: (s.level, s.name))
        assert reach < min(s.coverage.first for s in window)
        reach = max(s.coverage.last for s in window)


@given(st.integers(0, 60), st.integers(1, 10))
def test_a_window_is_no_larger_than_it_must_be(count: int, size: int) -> None:
    apart = [ref(n * 10 + 1, n * 10 + 10) for n in range(count)]
    assert all(len(window) <= size for window in windows(SegmentTable.listing(apart), size))
    across = [ref(1, 1000, 1)]
    assert [len(window) for window in windows(SegmentTable.listing(apart + across), size)] == [count + 1]


def test_what_was_taken_in_any_order_and_of_many_levels_can_be_gone_through() -> None:
    refs = [ref(21, 30), ref(1, 10, 1), ref(1, 10)]
    table = SegmentTable()
    table.extend(refs)
    assert (list(table), len(table)) == ([refs[0], refs[2], refs[1]], 3)
    table.absorb(SegmentTable([ref(31, 40), ref(1, 10, 2)]))
    assert [str(s.coverage) for s in table] == ["21..30", "1..10", "31..40", "1..10", "1..10"]
