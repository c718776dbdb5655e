"""What a policy makes of a listing."""

from __future__ import annotations

from typing import Any

import pytest

from common.chain import Chain
from common.logs import RESERVED
from common.segments.store import SegmentRef
from compaction.plan import Output, Planner, blocks, overlapping, unite
from compaction.supersede import made_by
from tests.support.compaction import CHAIN, NOW, TestPolicy, plan, ref


def ranges(outputs: list[Output]) -> list[str]:
    return [str(o.coverage) for o in outputs]


def tens(count: int, **how: float) -> list:
    """Adjacent segments of ten sequences each."""
    return [ref(i * 10 + 1, i * 10 + 10, **how) for i in range(count)]


def test_overlapping_segments_stay_together_past_max_size():
    segments = [ref(1, 60, size=600), ref(50, 100, size=600), ref(101, 200, size=600)]
    [output] = plan(segments, TestPolicy(max_size=1000), NOW)
    assert str(output.coverage) == "1..100"
    assert not made_by(output.inputs[0], output.inputs).is_disjoint


def test_of_twins_only_the_larger_name_is_merged():
    twins = [ref(1, 10, twin=n) for n in range(3)]
    [output] = plan([*twins, *tens(10)[1:]], TestPolicy(), NOW)
    assert output.inputs[0] == max(twins, key=lambda s: s.name)


HUNDREDS = [ref(i * 100 + 1, i * 100 + 100, level=1, size=500) for i in range(4)]
# By what it shows: segments, settings of the policy that differ from TestPolicy's, coverages of the outputs.
DUE = {
    "an empty chain": ([], {}, ""),
    "a run below min_size": (tens(9), {}, ""),
    "a run of min_size": (tens(10), {}, "1..100"),
    "a run of max_count": (tens(5), {"max_count": 5}, "1..50"),
    "an oldest that may wait": (tens(3, age=1000), {}, ""),
    "an oldest that has waited": ([*tens(2, age=500), ref(21, 30, age=1001)], {}, "1..30"),
    "too few, however old": (tens(2, age=10**9), {}, ""),
    "one alone for its age or count": ([ref(1, 10, age=10**9)], {"min_count": 1, "max_count": 1}, ""),
    "one alone that has the size": ([ref(1, 10, size=1000)], {}, "1..10"),
    "a young one ends the run": ([*tens(10), ref(101, 110, age=59), ref(111, 120)], {}, "1..100"),
    "max_size closes": (tens(10, size=300), {"min_size": 900, "max_size": 1000}, "1..30 31..60 61..90"),
    "closed below min_size": ([*tens(2, size=400), ref(21, 30, size=900)], {"max_size": 1000}, "1..20"),
    "no span over a hole": ([*tens(10), *(ref(n, n + 9) for n in range(102, 202, 10))], {}, "1..100 102..201"),
    "overlapped by a young one": ([*tens(10), ref(95, 120, age=1)], {"min_size": 900}, "1..90"),
    "accounted for above": ([*tens(10), ref(1, 100, level=1)], {}, ""),
    "accounted for above in part": ([*tens(20), ref(1, 95, level=1)], {}, "91..200"),
    "other levels": ([*tens(9), *HUNDREDS], {"from_": 1, "to": 2}, "1..400"),
}


@pytest.mark.parametrize(("segments", "settings", "due"), DUE.values(), ids=DUE)
def test_what_is_due_is_merged_and_nothing_else(segments: list[SegmentRef], settings: dict[str, Any], due: str):
    assert ranges(plan(segments, TestPolicy(**settings), NOW)) == due.split()


def test_an_output_names_its_level_and_inputs_and_leaves_the_level_of_its_log_line_alone():
    [output] = plan(tens(10), TestPolicy(min_size=1000), NOW)
    assert (output.level, len(output.inputs), output.log_context()["segment_level"]) == (1, 10, 1)
    assert not RESERVED & output.log_context().keys()


def test_a_damaged_segment_ends_the_runs_beside_it_and_accounts_for_nothing_below():
    segments, broken = tens(21), ref(1, 100, level=1)
    outputs = plan(segments, TestPolicy(), NOW, damaged={segments[10].key})
    assert ranges(outputs) == ["1..100", "111..210"]
    assert ranges(plan([*tens(10), broken], TestPolicy(), NOW, damaged={broken.key})) == ["1..100"]


def test_late_segments_are_united_with_what_contains_them_one_level_above():
    first, second, third = ref(1, 100, 1), ref(101, 200, 2), ref(301, 400, 1)
    found = unite([(ref(5, 9), first), (ref(90, 110), first, second), (ref(301, 302), third)])
    assert [(o.level, str(o.coverage), len(o.inputs)) for o in found] == [(3, "1..200", 4), (2, "301..400", 2)]


def test_late_segments_of_different_chains_or_above_level_9_are_not_united():
    other = Chain("eu-west", "NODES")
    found = unite([(ref(5, 9), ref(1, 10, 1)), (ref(5, 9, chain=other), ref(1, 10, 1, chain=other))])
    assert {(o.chain, str(o.coverage)) for o in found} == {(CHAIN, "1..10"), (other, "1..10")}
    assert unite([(ref(5, 9), ref(1, 10, 9))]) == unite([]) == []


def test_late_segments_that_overlap_in_part_are_united_one_level_above_once_all_of_them_are_old():
    pair = ref(1, 40, 1), ref(33, 90, 1, age=100)
    planner = Planner(TestPolicy(min_age=60), NOW)
    [found] = unite([pair], planner.old)
    assert (found.level, str(found.coverage), found.inputs) == (2, "1..90", pair)
    assert unite([pair], NOW - 101) == []


def test_what_overlaps_is_found_on_all_levels_but_not_below_what_supersedes_it():
    apart, first, second, third = ref(200, 210, 1), ref(1, 40, 1), ref(33, 60), ref(55, 90, 1)
    twin = ref(33, 60, twin=1)
    named = max(second, twin, key=lambda s: s.name)
    found = overlapping(blocks([apart, third, ref(5, 9), second, twin, first]))
    assert list(found) == [(first, named, third)]
    assert list(overlapping(blocks([first, second, ref(1, 60, 2)]))) == []


def test_what_is_united_is_left_out_of_the_runs_beside_it():
    segments = [*tens(21), ref(95, 110)]
    taken = {s.key for s in segments if s.coverage.overlaps(segments[-1].coverage)}
    planner = Planner(TestPolicy(min_size=900), NOW)
    outputs = [*planner.add(blocks(segments), taken), *planner.end()]
    assert ranges(outputs) == ["1..90", "111..210"]
