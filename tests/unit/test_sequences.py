"""Ranges, holes and gaplessness."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from common.sequences import MAX_SEQUENCE, SequenceRange, choose, cover, extends, holes, until_hole
from tests.support.basics import is_gapless


@dataclass(frozen=True)
class Segment:
    """What the cover rule sees."""

    coverage: SequenceRange
    level: int = 0
    name: str = "a"


def covering(first: int, last: int, level: int = 0, name: str = "a") -> Segment:
    return Segment(SequenceRange(first, last), level, name)


def test_a_range_includes_both_ends_and_may_be_the_whole_of_a_stream() -> None:
    span = SequenceRange(10, 12)
    assert (len(span), str(span)) == (3, "10..12")
    assert [n in span for n in (9, 10, 12, 13)] == [False, True, True, False]
    assert len(SequenceRange(1, MAX_SEQUENCE)) == MAX_SEQUENCE


def test_a_range_follows_exactly_next_overlaps_in_a_sequence_and_encloses_what_is_inside() -> None:
    ten = SequenceRange(1, 10)
    assert [SequenceRange(first, 20).follows(ten) for first in (10, 11, 12)] == [False, True, False]
    assert [ten.overlaps(SequenceRange(first, 20)) for first in (10, 11)] == [True, False]
    assert [ten.intersection(SequenceRange(first, 20)) for first in (8, 11)] == [SequenceRange(8, 10), None]
    assert [ten.encloses(SequenceRange(*each)) for each in ((1, 10), (3, 4), (3, 11))] == [True, True, False]


@pytest.mark.parametrize(("first", "last"), [(0, 1), (-1, 5), (5, 4), (1, MAX_SEQUENCE + 1)])
def test_a_range_outside_the_sequences_of_a_stream_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="expected 1 <= first <= last"):
        SequenceRange(first, last)


def test_extends_allows_overlap_and_gapless_does_not() -> None:
    assert extends(SequenceRange(1, 10), 5)
    assert not extends(SequenceRange(1, 10), 11)
    assert is_gapless([SequenceRange(1, 10), SequenceRange(11, 12)])
    assert not is_gapless([SequenceRange(1, 10), SequenceRange(10, 12)])
    assert not is_gapless([SequenceRange(1, 10), SequenceRange(12, 13)])
    assert is_gapless([])


def test_holes_are_named_at_the_start_between_and_at_the_end() -> None:
    covered = [SequenceRange(3, 4), SequenceRange(4, 6), SequenceRange(9, 9)]
    assert holes(covered, SequenceRange(1, 12)) == [SequenceRange(1, 2), SequenceRange(7, 8), SequenceRange(10, 12)]
    assert holes(covered, SequenceRange(3, 6)) == []
    assert holes([], SequenceRange(1, 2)) == [SequenceRange(1, 2)]


def test_the_segment_that_reaches_furthest_is_chosen() -> None:
    near, far = covering(1, 10), covering(5, 11)
    assert choose([near, far], 5) is far
    assert choose([near, far], 4) is near
    assert choose([near, far], 12) is None


def test_a_tie_goes_to_the_higher_level_then_to_the_larger_name() -> None:
    low, high = covering(1, 10, level=0, name="z"), covering(1, 10, level=1, name="a")
    assert choose([high, low], 1) is high
    twin = covering(1, 10, level=1, name="b")
    assert choose([high, twin], 1) is twin


def test_a_cover_skips_rows_before_the_position_and_cuts_at_the_end() -> None:
    [stretch] = cover([covering(1, 10)], 4, 7)
    assert stretch.rows == SequenceRange(4, 7)


def test_a_cover_steps_over_a_hole_and_until_hole_stops_there() -> None:
    stretches = cover([covering(1, 10), covering(21, 30)], 1)
    assert [s.rows for s in stretches] == [SequenceRange(1, 10), SequenceRange(21, 30)]
    assert until_hole(stretches, 1) == stretches[:1]
    assert until_hole(stretches, 2) == []


def test_a_merged_segment_takes_the_place_of_those_it_was_made_of() -> None:
    small = [covering(1, 10), covering(11, 20), covering(21, 30)]
    merged = covering(1, 20, level=1)
    assert [s.segment for s in cover([*small, merged], 1)] == [merged, small[2]]
