"""Confirming answers, ending tasks, waiting longer each time, fair shares, one budget for all, requests to freeze."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chain import Chain
from common.clock import DELAYS, Backoff
from common.errors import Unavailable
from common.leasing import fair_share, group_name, surplus
from common.tasks import Stop, end, unless
from egress.deps import Tuning
from egress.evidence import confirm
from egress.flush import FlushAnswer, FlushRequests
from egress.memory import LARGEST_WINDOW, MemoryBudget
from tests.support.clock import ManualClock


async def confirmed(answers: str, clock: ManualClock) -> str:
    waiting = answers.split()

    async def ask(_: None) -> str:
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    deps: Any = SimpleNamespace(clock=clock, tuning=Tuning(), freshly=lambda question: question(None))
    return await confirm(deps, ask, harmless=lambda a: a == "same", outline=lambda a: a[0])


@pytest.mark.parametrize(
    ("answers", "taken", "seconds"),
    [
        ("same", "same", 0),
        ("recreated1 recreated2 recreated3", "recreated3", 20),
        ("gone gone recreated recreated recreated", "recreated", 40),  # those that differ begin again
        ("gone gone same", "same", 20),
    ],
)
async def test_only_an_answer_with_consequences_is_asked_three_times(answers: str, taken: str, seconds: int) -> None:
    clock = ManualClock()
    assert (await confirmed(answers, clock), clock.monotonic()) == (taken, seconds)


async def test_answers_that_never_agree_are_given_up() -> None:
    with pytest.raises(Unavailable, match="answers differently"):
        await confirmed("gone recreated " * 10, ManualClock())


async def test_a_task_that_survives_its_first_cancellation_is_ended() -> None:
    async def stubborn() -> None:
        for _ in range(2):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task)
    assert task.done()


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
