"""Answers that are confirmed, stalls, tasks that end, fair shares, one budget for all, requests to freeze."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chain import Chain
from common.clock import DELAYS, Backoff
from common.errors import Unavailable
from common.leasing import fair_share, group_name, surplus
from common.tasks import Stop, first_of, unless
from egress.deps import Tuning
from egress.evidence import confirm
from egress.flush import FlushAnswer, FlushRequests
from egress.memory import LARGEST_WINDOW, MemoryBudget
from egress.watchdog import ProgressCheck, Rise, SessionStanding, StreamLimits, left_by_age, left_by_size
from tests.support.clock import ManualClock


async def confirmed(answers: str, clock: ManualClock) -> str:
    waiting = answers.split()

    async def ask(_: None) -> str:
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    deps: Any = SimpleNamespace(clock=clock, tuning=Tuning(), freshly=lambda question: question(None))
    return await confirm(deps, ask, harmless=lambda a: a == "same", outline=lambda a: a[0])


async def test_only_an_answer_with_consequences_is_asked_three_times_and_those_that_never_agree_are_given_up() -> None:
    found = {
        "same": ("same", 0),
        "recreated1 recreated2 recreated3": ("recreated3", 20),
        "gone gone recreated recreated recreated": ("recreated", 40),  # those that differ begin again
        "gone gone same": ("same", 20),
    }
    clocks = {answers: ManualClock() for answers in found}
    assert {each: (await confirmed(each, clock), clock.monotonic()) for each, clock in clocks.items()} == found
    with pytest.raises(Unavailable, match="answers differently"):
        await confirmed("gone recreated " * 10, ManualClock())


async def test_work_is_dropped_when_the_stop_comes_first_and_what_it_raises_is_raised() -> None:
    stop = Stop()

    async def work(error: Exception | None = None) -> int:
        if error is not None:
            raise error
        return 7

    assert await unless(stop, work()) == 7
    with pytest.raises(Unavailable, match="down"):
        await unless(stop, work(Unavailable("down")))
    stop.set()
    assert await unless(stop, asyncio.sleep(30)) is None


async def test_the_first_of_several_waits_ends_the_others_and_may_be_time() -> None:
    event, forgotten = asyncio.Event(), []

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            forgotten.append(True)

    asyncio.get_running_loop().call_soon(event.set)
    await asyncio.wait_for(first_of(never(), event.wait()), 10)
    assert forgotten == [True]
    await asyncio.wait_for(first_of(asyncio.Event().wait(), seconds=0.01), 10)


def test_delays_grow_with_jitter_and_begin_again() -> None:
    backoff = Backoff(random.Random(1))
    delays = [backoff.next() for _ in range(20)]
    assert all(longest / 2 <= delay <= longest for delay, longest in zip(delays, DELAYS, strict=False))
    assert max(delays) <= DELAYS[-1]
    backoff.reset()
    assert backoff.next() <= DELAYS[0]


def test_a_budget_is_shared_and_tells_when_there_is_room_again() -> None:
    told: list[str] = []
    budget = MemoryBudget(100, chains=2)
    assert budget.has_room(1_000), "for one message of any size where it is empty"
    one, other = budget.account(lambda: told.append("one")), budget.account(lambda: told.append("other"))
    one.charge(70)
    assert (budget.has_room(30), budget.has_room(31)) == (True, False)
    assert (one.is_largest(), other.is_largest()) == (True, False)
    one.release(50)
    assert (told, budget.used) == (["one", "other"], 20)
    one.close()
    assert budget.used == 0


def test_pull_requests_of_many_chains_fit_together() -> None:
    assert MemoryBudget(128 << 20).window == LARGEST_WINDOW
    assert MemoryBudget(128 << 20, chains=100).window * 100 <= 128 << 20


# Fair shares: enough for every lease to be held, and no more than that


@given(st.integers(0, 10_000), st.integers(1, 100))
def test_all_shares_together_reach_and_one_less_of_each_does_not(chains: int, members: int) -> None:
    share = fair_share(chains, members)
    assert share * members >= chains
    assert chains == 0 or (share - 1) * members < chains
    assert fair_share(chains, 0) == chains, "one that nobody counts is the caller"


@given(st.sets(st.text(max_size=5), max_size=20), st.integers(0, 25))
def test_the_surplus_is_what_is_above_the_share_and_always_the_same(held: set[str], share: int) -> None:
    given_back = surplus(held, share)
    assert len(held - set(given_back)) == min(len(held), share)
    assert surplus(sorted(held, reverse=True), share) == given_back
    assert surplus(held - set(given_back), share) == []


def test_members_with_the_same_leases_in_any_order_are_one_circle() -> None:
    assert group_name(["a", "b"]) == group_name(["b", "a", "a"])
    assert group_name(["a", "b"]) != group_name(["a", "c"])
    assert group_name(["a.b"]) != group_name(["a", "b"])


# Requests to freeze: partitions of feeds, by several commands at the same time

FEED = [Chain("us-east", "NODES", partition=number) for number in range(3)]
COUNTS = {"NODES": 3}
NOTHING = FlushRequests({})


def asked(found: FlushRequests) -> list[int]:
    return [chain.partition for chain in FEED if found.feeds["NODES"].asks(chain.partition)]


def stored(found: FlushRequests, *partitions: int) -> FlushRequests:
    number = found.feeds["NODES"].id
    return found.answered({FEED[each]: (number, FlushAnswer(0, 9, is_stored=True)) for each in partitions})


def test_a_partition_is_asked_alone_and_a_feed_whole():
    assert asked(NOTHING.asking(FEED[1:2], COUNTS, "a", 0)) == [1]
    whole = NOTHING.asking(FEED, COUNTS, "a", 0)
    assert (asked(whole), whole.feeds["NODES"].only) == ([0, 1, 2], ())
    assert asked(stored(whole, 0, 2)) == [1]


def test_what_another_command_waits_for_stays_asked():
    first = NOTHING.asking(FEED[:1], COUNTS, "a", 0)
    assert asked(first.asking(FEED[1:2], COUNTS, "b", 1)) == [0, 1]
    assert asked(stored(NOTHING.asking(FEED, COUNTS, "a", 0), 0).asking(FEED[:1], COUNTS, "b", 1)) == [0, 1, 2]


def test_what_was_answered_to_another_command_stays_until_it_is_asked_again():
    done = stored(NOTHING.asking(FEED[:1], COUNTS, "a", 0), 0)
    again = done.asking(FEED[1:2], COUNTS, "b", 1)
    assert asked(again) == [1]
    assert again.feeds["NODES"].answers.keys() == {0}
    assert again.asking(FEED[:1], COUNTS, "c", 2).feeds["NODES"].answers == {}


SECOND = 10**9
HALF = SessionStanding(count=50, received=50, archived=50, source=100)


def progress() -> ProgressCheck:
    return ProgressCheck(patience=60, segment_age=300, now=0.0)


def test_messages_that_wait_for_a_minute_are_a_stall_that_a_fresh_reader_may_heal_unless_there_is_no_room() -> None:
    for asks in (True, False):
        judge, standing = progress().judge, replace(HALF, asks=asks)
        assert [judge(standing, now) for now in (0.0, 30.0, 59.9)] == [None] * 3
        stall = judge(replace(standing, source=200), 60.0)
        assert (stall.pending, stall.since, stall.heals) == ("sequences 51..200 are not received", 60.0, asks)


@pytest.mark.parametrize("change", [{"count": 51}, {"received": 51}, {"archived": 51, "received": 51}])
def test_whatever_moves_begins_the_minute_anew(change: dict[str, int]) -> None:
    judge, moved = progress().judge, replace(HALF, **change)
    judge(HALF, 0.0)
    assert [judge(moved, now) is None for now in (59.0, 118.0, 119.0)] == [True, True, False]


@pytest.mark.parametrize("standing", [replace(HALF, source=50), replace(HALF, source=7), replace(HALF, is_done=True)])
def test_where_nothing_waits_nothing_stalls_and_the_next_message_has_a_minute(standing: SessionStanding) -> None:
    judge = progress().judge

    assert [judge(standing, now) for now in (0.0, 1000.0, 2000.0)] == [None] * 3
    assert [judge(HALF, now) is None for now in (2030.0, 2059.0, 2060.0)] == [True, True, False]


def test_what_is_received_and_not_archived_stalls_after_its_segment_had_to_close() -> None:
    judge = progress().judge
    received = SessionStanding(count=50, received=50, archived=10, source=50)

    assert [judge(received, now) for now in (0.0, 300.0, 359.0)] == [None] * 3
    stall = judge(replace(received, count=60, received=60, source=60), 360.0)
    assert (stall.pending, stall.heals) == ("sequences 11..60 are received and not archived", False)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=30))
def test_a_chain_that_archives_at_each_check_never_stalls(steps: list[tuple[int, int, bool]]) -> None:
    judge = progress().judge
    archived = 0
    for number, (more, behind, asks) in enumerate(steps):
        archived += 1 + more
        standing = SessionStanding(archived, archived + behind, archived, archived + behind + more, asks)
        assert judge(standing, number * 59.0) is None


# How long the source keeps it


def test_limits_of_a_stream() -> None:
    assert StreamLimits.of({"max_age": 5, "max_msgs": -1, "max_bytes": -1}) == StreamLimits(5)
    for config in ({"max_msgs": 10}, {"max_bytes": 10, "discard": "old"}):
        assert StreamLimits.of(config) == StreamLimits(0, True)
    keeps = ({"max_msgs": 10, "discard": "new"}, {"max_msgs": 10, "retention": "workqueue"})
    for config in (*keeps, {"max_msgs_per_subject": 1}):
        assert StreamLimits.of(config) == StreamLimits()


def test_it_is_kept_as_long_as_the_oldest_waiting_message_has_left_or_the_pace_takes_to_it() -> None:
    day, full = StreamLimits(86_400 * SECOND), StreamLimits(by_size=True)
    ages = ((100 * SECOND, 100 * SECOND), (100 * SECOND, 86_400 * SECOND), (0, 10 * 86_400 * SECOND))

    assert [left_by_age(day, *each) for each in ages] == [86_400, 100, 0]
    assert left_by_age(StreamLimits(), *ages[2]) == math.inf
    paces = ((400, 6), (1000, 6), (400, 0))
    assert [left_by_size(full, waiting=1000, first=first, pace=pace) for first, pace in paces] == [100, 0, math.inf]
    assert left_by_size(StreamLimits(max_age_ns=1), waiting=1000, first=400, pace=6) == math.inf


def test_the_pace_is_that_of_the_last_looks() -> None:
    rise = Rise()

    assert [rise.look(at, last) for at, last in ((0.0, 1), (30.0, 301), (60.0, 301))] == [0, 10, 5]
    paces = [rise.look(float(now), 301) for now in range(90, 600, 30)]
    assert (paces[-1], rise.look(600.0, 1)) == (0, 0), "what rose was long ago; another stream"
