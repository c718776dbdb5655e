"""What to carry next: holes, damage, ends of incarnations, beginnings."""

from __future__ import annotations

from common.chain import Chain
from common.segments.keys import Layout, SegmentName
from common.segments.segment import SegmentRef
from common.sequences import SequenceRange
from ingress.chains.plan import ChainPlan, Phase, first_position, plan_chain

CHAIN = Chain("us-east", "NODES")


def ref(first: int, last: int, level: int = 0, modified: float = 100.0) -> SegmentRef:
    name = SegmentName(CHAIN, level, SequenceRange(first, last), "0" * 16)
    return SegmentRef(name, Layout().segment(name), 10, modified)


def taken(plan: ChainPlan) -> list[tuple[int, int, int]]:
    return [(s.segment.level, s.rows.first, s.rows.last) for s in plan.stretches]


def test_adjacent_and_overlapping_segments_are_carried_up_to_the_first_hole() -> None:
    plan = plan_chain([ref(1, 10), ref(8, 20), ref(21, 30), ref(41, 50)], 5, None)

    assert plan.phase is Phase.READY
    assert taken(plan) == [(0, 5, 10), (0, 11, 20), (0, 21, 30)]


def test_a_merged_segment_is_read_from_the_position_on() -> None:
    assert taken(plan_chain([ref(1, 100, level=1), ref(91, 100)], 42, None)) == [(1, 42, 100)]


def test_nothing_behind_the_position_is_idle() -> None:
    assert plan_chain([ref(1, 10)], 11, None) == ChainPlan(Phase.IDLE)
    assert plan_chain([], 1, None) == ChainPlan(Phase.IDLE)


def test_a_hole_is_late_since_the_first_segment_behind_it_came() -> None:
    plan = plan_chain([ref(1, 10), ref(31, 40, modified=7.0), ref(21, 30, modified=9.0)], 11, None)

    assert plan == ChainPlan(Phase.LATE, (), SequenceRange(11, 20), 7.0)


def test_a_damaged_segment_is_left_out_where_another_covers() -> None:
    whole, damaged = ref(1, 30, level=1), ref(1, 40)

    assert taken(plan_chain([whole, damaged], 1, None)) == [(0, 1, 40)]
    assert taken(plan_chain([whole, damaged], 1, None, {damaged.key})) == [(1, 1, 30)]


def test_the_chain_stops_where_only_damaged_segments_would_continue() -> None:
    damaged, behind = ref(11, 20, modified=3.0), ref(18, 30)

    assert plan_chain([damaged], 11, None, {damaged.key}) == ChainPlan(Phase.DAMAGED, (), SequenceRange(11, 20), 3.0)
    assert plan_chain([damaged, behind], 11, None, {damaged.key}).hole == SequenceRange(11, 17)


def test_an_incarnation_is_carried_to_its_end_and_not_beyond() -> None:
    plan = plan_chain([ref(1, 10), ref(11, 30)], 5, 20)

    assert taken(plan) == [(0, 5, 10), (0, 11, 20)]
    assert plan.beyond == 30
    assert plan_chain([ref(1, 10), ref(11, 30)], 21, 20) == ChainPlan(Phase.DONE, beyond=30)


def test_a_chain_begins_at_its_first_sequence_or_at_what_retention_left() -> None:
    assert first_position(1, None) == 1
    assert first_position(500, None) == 500
    assert first_position(500, 900) == 900
    assert first_position(500, 100) == 500
