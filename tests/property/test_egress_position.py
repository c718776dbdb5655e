"""Where reading goes on, against a brute force over single sequences."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.sequences import Covered, SequenceRange
from egress.partition import Position
from egress.partition import position as position_of_gaps

RANGES = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 15)).map(lambda r: SequenceRange(r[0], r[0] + r[1])), max_size=8
)


def position(first: int, ranges: list[SequenceRange], source_first: int) -> Position:
    """From the ranges that are covered, in the order in which a listing may give them."""
    covered = Covered()
    for each in ranges:
        covered.add(each)
    assert all((s in covered) == any(s in each for each in ranges) for s in range(1, 80))
    within = [SequenceRange(first, covered.end)] if covered.end >= first else []
    return position_of_gaps(first, covered.end, [gap for each in within for gap in covered.holes(each)], source_first)


@given(st.integers(1, 40), RANGES, st.integers(1, 90))
@settings(max_examples=800)
def test_agrees_with_looking_at_every_sequence(first: int, ranges: list[SequenceRange], source_first: int) -> None:
    covered = {s for r in ranges for s in range(r.first, r.last + 1)}
    end = max(covered, default=0)
    missing = [s for s in range(first, end + 1) if s not in covered]
    found = position(first, ranges, source_first)

    held = [s for s in missing if s >= source_first]
    lost = [s for s in missing if s < source_first]
    assert found.first == (held[0] if held else max(first, end + 1))
    assert [s for r in found.lost for s in range(r.first, r.last + 1)] == lost
    if held:
        assert found.until is not None
        hole = range(found.first, found.until + 1)
        assert not covered & set(hole)
        assert found.until + 1 in covered
    else:
        assert found.until is None


def test_a_new_chain_begins_where_its_document_says() -> None:
    assert position(1_000, [], 1) == Position(1_000)


def test_the_end_of_the_archive_is_the_position_even_if_the_source_has_moved_on() -> None:
    assert position(1, [SequenceRange(1, 10)], 500) == Position(11)


def test_a_hole_that_the_source_half_holds_is_read_from_there() -> None:
    ranges = [SequenceRange(1, 10), SequenceRange(21, 30)]
    assert position(1, ranges, 15) == Position(15, 20, (SequenceRange(11, 14),))


def test_a_lost_hole_is_stepped_over_to_the_next_that_is_held() -> None:
    ranges = [SequenceRange(1, 10), SequenceRange(21, 30), SequenceRange(41, 50)]
    assert position(1, ranges, 25) == Position(31, 40, (SequenceRange(11, 20),))
