"""Which segments may replace which."""

from __future__ import annotations

import itertools
from dataclasses import replace

from common.chain import Chain
from compaction.supersede import contained, made_by, may_supersede, outstanding
from tests.support.compaction import ref


def test_a_higher_level_stands_above_a_lower_one_and_of_one_level_the_larger_name_of_the_same_coverage():
    small, large = sorted([ref(1, 10, 1, twin=1), ref(1, 10, 1, twin=2)], key=lambda s: s.name)
    upper, lower, foreign = ref(1, 100, 1), ref(1, 10), ref(1, 100, 1, chain=Chain("eu-west", "NODES"))
    assert may_supersede(upper, lower)
    assert may_supersede(large, small)
    for above, below in ((lower, upper), (small, large), (ref(1, 20, 1), small), (lower, lower), (foreign, lower)):
        assert not may_supersede(above, below)


def test_the_order_has_no_cycles():
    segments = [ref(1, last, level, twin=t) for last in (5, 10) for level in (0, 1, 2) for t in range(3)]
    for a, b, c in itertools.product(segments, repeat=3):
        if may_supersede(a, b) and may_supersede(b, c):
            assert may_supersede(a, c)
            assert not may_supersede(c, a)


def test_the_inputs_of_a_merge_are_found_again_by_its_output():
    inputs, output = [ref(1, 50), ref(51, 100)], ref(1, 100, 1)
    [found] = contained([*inputs, output])
    assert replace(found, exact=True) == made_by(output, reversed(inputs))


def test_two_segments_together_may_contain_a_third_unless_there_is_a_hole_or_it_reaches_beyond():
    upper = [ref(1, 60, 1), ref(61, 100, 1)]
    [found] = contained([ref(50, 70), *upper])
    assert found.superseding == tuple(upper)
    assert [str(s.rows) for s in found.stretches] == ["50..60", "61..70"]
    assert contained([ref(50, 70), upper[0], ref(62, 100, 1)]) == contained([ref(91, 110), *upper]) == []


def test_a_segment_is_replaced_by_what_stays():
    lower, middle, upper = ref(1, 10), ref(1, 100, 1), ref(1, 1000, 2)
    found = contained([lower, middle, upper])
    assert [f.superseding for f in found] == [(upper,)]
    assert found[0].superseded == (lower, middle)


def test_equal_coverage_of_one_level_is_replaced_by_the_largest_name():
    twins = sorted((ref(1, 10, twin=n) for n in range(3)), key=lambda s: s.name)
    [found] = contained(twins)
    assert (found.superseded, found.superseding) == (tuple(twins[:2]), (twins[2],))


def test_outstanding_is_what_nothing_supersedes():
    segments = [ref(1, 50), ref(51, 100), ref(101, 150), ref(1, 100, 1)]
    assert outstanding(segments, 0) == [ref(101, 150)]


def test_a_supersession_is_cut_into_parts_with_what_concerns_each():
    whole = made_by(ref(1, 100, 1), [ref(1, 30), ref(31, 60), ref(61, 100)])
    assert whole.parts(3) == [whole]
    parts = whole.parts(2)
    assert [[str(s.coverage) for s in p.superseded] for p in parts] == [["1..30", "31..60"], ["61..100"]]
    assert [str(p.stretches[0].rows) for p in parts] == ["1..60", "61..100"]
    assert not any(p.exact for p in parts)
