"""The cover rule against its definition, one position at a time."""

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.sequences import SequenceRange, cover, holes, until_hole
from tests.support.invariants import accounts_once

LAST = 40


@dataclass(frozen=True)
class Segment:
    """The fields of a segment that the cover rule uses."""

    coverage: SequenceRange
    level: int
    name: str


positions = st.integers(1, LAST)
ranges = st.tuples(positions, positions).map(lambda pair: SequenceRange(min(pair), max(pair)))


def segment(coverage: SequenceRange, level: int, digest: str) -> Segment:
    """Return a segment named by end, beginning and content, so that no two of a level share a name."""
    return Segment(coverage, level, f"{coverage.last:02d}-{coverage.first:02d}-{digest}")


segments = st.lists(st.builds(segment, ranges, st.integers(0, 3), st.sampled_from("abcd")), max_size=12, unique=True)


def brute_force(found: list[Segment], first: int, last: int) -> dict[int, Segment]:
    """Return, for each position, the segment that accounts for it, found by a walk over all positions."""
    taken: dict[int, Segment] = {}
    position, current = first, None
    while position <= last:
        if current is None or position > current.coverage.last:
            candidates = [s for s in found if s.coverage.first <= position <= s.coverage.last]
            candidates.sort(key=lambda s: (s.coverage.last, s.level, s.name))
            current = candidates[-1] if candidates else None
        if current is not None:
            taken[position] = current
        position += 1
    return taken


@given(segments, positions, positions)
def test_the_cover_is_what_the_rule_gives_position_by_position(found: list[Segment], first: int, last: int) -> None:
    by_position = {n: s.segment for s in cover(found, first, last) for n in range(s.rows.first, s.rows.last + 1)}
    assert by_position == brute_force(found, first, last)


@given(segments, ranges)
def test_cover_and_holes_share_a_range_between_them_each_sequence_once(
    found: list[Segment], within: SequenceRange
) -> None:
    stretches = cover(found, within.first, within.last)
    missing = holes([s.coverage for s in found], within)
    taken = [n for s in stretches for n in range(s.rows.first, s.rows.last + 1)]
    absent = {n for hole in missing for n in range(hole.first, hole.last + 1)}
    assert taken == sorted(set(taken))
    assert all(s.segment.coverage.encloses(s.rows) and within.encloses(s.rows) for s in stretches)
    assert absent == set(range(within.first, within.last + 1)) - set(taken)
    assert accounts_once(stretches, within) == (not missing)
    assert all(b.first > a.last + 1 for a, b in pairwise(missing)), "as long as they can be"


@given(segments, positions)
def test_until_hole_goes_on_without_a_gap(found: list[Segment], position: int) -> None:
    for stretch in until_hole(cover(found, position), position):
        assert stretch.rows.first == position
        position = stretch.rows.last + 1
    assert not any(s.coverage.first <= position <= s.coverage.last for s in found)
