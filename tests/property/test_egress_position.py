"""The sequence at which egress continues to read, against a brute force over single sequences."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.sequences import CoverageSet, SequenceRange
from egress.partition import Position
from egress.partition import next_position as position_of_gaps

RANGES = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 15)).map(lambda r: SequenceRange(r[0], r[0] + r[1])), max_size=8
)


def position(first: int, ranges: list[SequenceRange], source_first: int) -> Position:
    """Return the position for covered ranges, in the order of a possible listing."""
    covered = CoverageSet()
    for each in ranges:
        covered.add(each)
    assert all((s in covered) == any(s in each for each in ranges) for s in range(1, 80))
    within = [SequenceRange(first, covered.end)] if covered.end >= first else []
    return position_of_gaps(first, covered.end, [gap for each in within for gap in covered.holes(each)], source_first)


@given(st.integers(1, 40), RANGES, st.integers(1, 90))
@settings(max_examples=200)
def test_agrees_with_checking_every_sequence(first: int, ranges: list[SequenceRange], source_first: int) -> None:
    covered = {s for r in ranges for s in range(r.first, r.last + 1)}
    end = max(covered, default=0)
    missing = [s for s in range(first, end + 1) if s not in covered]
    found = position(first, ranges, source_first)

    held = [s for s in missing if s >= source_first]
    lost = [s for s in missing if s < source_first]
    assert found.first == (held[0] if held else max(first, end + 1))
    assert [s for r in found.lost for s in range(r.first, r.last + 1)] == lost
    if held:
        assert not covered & set(range(found.first, found.until + 1))
        assert found.until + 1 in covered
    else:
        assert found.until is None
