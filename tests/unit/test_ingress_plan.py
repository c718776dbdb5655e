"""What to carry next: holes, damage, ends of incarnations, beginnings."""

from __future__ import annotations

import asyncio

from common.chain import Chain
from common.segments.keys import Layout, SegmentName
from common.segments.segment import SegmentRef
from common.sequences import SequenceRange
from ingress.chains.plan import ChainPlan, Phase, TurnQueue, first_position, plan_chain

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


# Whose turn it is


async def turns_of(queue: TurnQueue[str], count: int) -> list[str]:
    """The next turns, each over before the next begins."""
    found = []
    for _ in range(count):
        site, waiting = await queue.get()
        queue.done(site)
        found.append(waiting)
    return found


async def test_turns_are_fair_by_site_and_then_in_order() -> None:
    queue = TurnQueue[str](3)
    for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.put(name[0], name)
    assert await turns_of(queue, 6) == ["a1", "b1", "c1", "a2", "c2", "a3"]


async def test_a_site_that_wants_every_turn_gets_each_other_one_beside_one_that_does_too() -> None:
    queue, found = TurnQueue[str](3), list[str]()
    for name in ("a1", "a2", "a3", "a4", "b1"):
        queue.put(name[0], name)
    for _ in range(12):
        (name,) = await turns_of(queue, 1)
        queue.put(name[0], name)
        found.append(name)
    assert found == ["a1", "b1", "a2", "b1", "a3", "b1", "a4", "b1", "a1", "b1", "a2", "b1"]


async def test_one_turn_is_left_for_a_site_that_begins_to_wait() -> None:
    queue = TurnQueue[str](3)
    for name in ("a1", "a2", "a3", "a4", "a5"):
        queue.put("a", name)
    assert [(await queue.get())[1] for _ in range(3)] == ["a1", "a2", "a3"]
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done(), "the site has three turns"
    queue.put("b", "b1")
    assert await waiting == ("b", "b1")
    queue.done("a")
    assert await queue.get() == ("a", "a4")


async def test_nobody_waits_any_more_once_the_turns_are_cleared() -> None:
    queue = TurnQueue[str](1)
    queue.put("a", "a1")
    queue.put("a", "a2")
    assert await queue.get() == ("a", "a1")
    queue.waiting.clear()
    queue.put("b", "b1")
    assert await queue.get() == ("b", "b1")
    queue.put("a", "a3")
    queue.done("a")
    assert await queue.get() == ("a", "a3")
