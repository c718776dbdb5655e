"""What a policy makes of a listing."""

from __future__ import annotations

from common.chain import Chain
from common.logs import RESERVED
from compaction.plan import Output, Planner, blocks, overlapping, unite
from compaction.supersede import made_by
from tests.support.compaction import CHAIN, NOW, TestPolicy, plan, ref


def ranges(outputs: list[Output]) -> list[str]:
    return [str(o.coverage) for o in outputs]


def tens(count: int, **how: float) -> list:
    """Adjacent segments of ten sequences each."""
    return [ref(i * 10 + 1, i * 10 + 10, **how) for i in range(count)]


def test_nothing_is_due_in_an_empty_chain():
    assert plan([], TestPolicy(), NOW) == []


def test_a_run_is_merged_when_it_reaches_min_size():
    assert plan(tens(9), TestPolicy(min_size=1000), NOW) == []
    [output] = plan(tens(10), TestPolicy(min_size=1000), NOW)
    assert (output.level, str(output.coverage), len(output.inputs)) == (1, "1..100", 10)


def test_a_run_is_merged_when_it_reaches_max_count():
    outputs = plan(tens(5), TestPolicy(max_count=5), NOW)
    assert ranges(outputs) == ["1..50"]


def test_a_quiet_chain_is_merged_when_its_oldest_has_waited():
    policy = TestPolicy(min_count=3, max_wait=1000)
    assert plan(tens(3, age=1000), policy, NOW) == []
    assert ranges(plan([*tens(2, age=500), ref(21, 30, age=1001)], policy, NOW)) == ["1..30"]


def test_too_few_segments_wait_however_old_they_are():
    assert plan(tens(2, age=10**9), TestPolicy(min_count=3), NOW) == []


def test_one_segment_alone_is_never_rewritten_for_its_age_or_count():
    assert plan([ref(1, 10, age=10**9)], TestPolicy(min_count=1, max_count=1), NOW) == []


def test_one_segment_alone_is_promoted_when_it_has_the_size():
    assert ranges(plan([ref(1, 10, size=1000)], TestPolicy(min_size=1000), NOW)) == ["1..10"]


def test_ages_are_taken_from_the_store_and_young_segments_end_a_run():
    segments = [*tens(10), ref(101, 110, age=59), ref(111, 120)]
    assert ranges(plan(segments, TestPolicy(min_age=60), NOW)) == ["1..100"]


def test_an_output_is_closed_before_it_passes_max_size():
    outputs = plan(tens(10, size=300), TestPolicy(min_size=900, max_size=1000), NOW)
    assert ranges(outputs) == ["1..30", "31..60", "61..90"]
    assert all(o.size <= 1000 for o in outputs)


def test_a_closed_output_is_merged_below_min_size_too():
    segments = [ref(1, 10, size=400), ref(11, 20, size=400), ref(21, 30, size=900)]
    assert ranges(plan(segments, TestPolicy(min_size=1000, max_size=1000), NOW)) == ["1..20"]


def test_an_output_never_spans_a_hole():
    segments = [*tens(10), *[ref(i * 10 + 2, i * 10 + 11) for i in range(10, 20)]]
    assert ranges(plan(segments, TestPolicy(), NOW)) == ["1..100", "102..201"]


def test_overlapping_segments_stay_together_past_max_size():
    segments = [ref(1, 60, size=600), ref(50, 100, size=600), ref(101, 200, size=600)]
    [output] = plan(segments, TestPolicy(max_size=1000), NOW)
    assert str(output.coverage) == "1..100"
    assert not made_by(output.inputs[0], output.inputs).is_disjoint


def test_an_old_segment_waits_for_a_young_one_that_overlaps_it():
    segments = [*tens(10), ref(95, 120, age=1)]
    assert ranges(plan(segments, TestPolicy(min_size=900), NOW)) == ["1..90"]


def test_what_a_higher_level_accounts_for_is_not_merged_again():
    assert plan([*tens(10), ref(1, 100, level=1)], TestPolicy(), NOW) == []


def test_what_a_higher_level_accounts_for_in_part_is_merged():
    [output] = plan([*tens(20), ref(1, 95, level=1)], TestPolicy(), NOW)
    assert str(output.coverage) == "91..200"


def test_of_twins_only_the_larger_name_is_merged():
    twins = [ref(1, 10, twin=n) for n in range(3)]
    [output] = plan([*twins, *tens(10)[1:]], TestPolicy(), NOW)
    assert output.inputs[0] == max(twins, key=lambda s: s.name)


def test_a_damaged_segment_ends_the_runs_beside_it():
    segments = tens(21)
    outputs = plan(segments, TestPolicy(), NOW, damaged={segments[10].key})
    assert ranges(outputs) == ["1..100", "111..210"]


def test_what_only_a_damaged_segment_accounts_for_above_is_merged_again():
    broken = ref(1, 100, level=1)
    assert ranges(plan([*tens(10), broken], TestPolicy(), NOW, damaged={broken.key})) == ["1..100"]


def test_other_levels_are_left_to_their_own_policies():
    second = [ref(i * 100 + 1, i * 100 + 100, level=1, size=500) for i in range(4)]
    assert ranges(plan([*tens(9), *second], TestPolicy(from_=1, to=2), NOW)) == ["1..400"]


def test_late_segments_are_united_with_what_contains_them_one_level_above():
    first, second, third = ref(1, 100, 1), ref(101, 200, 2), ref(301, 400, 1)
    found = unite([(ref(5, 9), first), (ref(90, 110), first, second), (ref(301, 302), third)])
    assert [(o.level, str(o.coverage), len(o.inputs)) for o in found] == [(3, "1..200", 4), (2, "301..400", 2)]


def test_late_segments_of_different_chains_are_not_united():
    other = Chain("eu-west", "NODES")
    found = unite([(ref(5, 9), ref(1, 10, 1)), (ref(5, 9, chain=other), ref(1, 10, 1, chain=other))])
    assert {(o.chain, str(o.coverage)) for o in found} == {(CHAIN, "1..10"), (other, "1..10")}


def test_above_level_9_nothing_is_united():
    assert unite([(ref(5, 9), ref(1, 10, 9))]) == []
    assert unite([]) == []


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


def test_what_is_logged_of_an_output_leaves_the_level_of_the_line_alone():
    [output] = plan(tens(10), TestPolicy(min_size=1000), NOW)
    assert output.log_context()["segment_level"] == 1
    assert not RESERVED & output.log_context().keys()
