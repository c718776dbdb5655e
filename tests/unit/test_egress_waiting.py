"""Confirming answers, ending tasks, waiting longer each time, one budget for all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from common.clock import DELAYS, Backoff
from common.errors import Unavailable
from common.tasks import Stop, end, unless
from egress.deps import Tuning
from egress.evidence import confirm
from egress.memory import LARGEST_WINDOW, MemoryBudget
from tests.support.clock import ManualClock


def answers(*values: str) -> Callable[[], Awaitable[str]]:
    waiting = list(values)

    async def ask() -> str:
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    return ask


async def settle(ask: Callable[[], Awaitable[str]], clock: ManualClock) -> str:
    deps: Any = SimpleNamespace(clock=clock, tuning=Tuning(), freshly=lambda question: question(None))
    return await confirm(deps, lambda _: ask(), harmless=lambda a: a == "same", outline=lambda a: a[0])


@pytest.mark.parametrize(
    ("given", "taken", "seconds"),
    [
        ("same", "same", 0),
        ("recreated1 recreated2 recreated3", "recreated3", 20),
        ("gone gone recreated recreated recreated", "recreated", 40),  # those that differ begin again
        ("gone gone same", "same", 20),
    ],
)
async def test_a_harmless_answer_is_taken_at_once_and_one_with_consequences_asked_three_times(
    given: str, taken: str, seconds: int
) -> None:
    clock = ManualClock()
    assert (await settle(answers(*given.split()), clock), clock.monotonic()) == (taken, seconds)


async def test_answers_that_never_agree_are_given_up() -> None:
    with pytest.raises(Unavailable, match="answers differently"):
        await settle(answers(*["gone", "recreated"] * 10), ManualClock())


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
