"""The byte budget: order, cancellation, what is larger than all of it."""

from __future__ import annotations

import asyncio

from ingress.rows.rows import ByteBudget


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_whoever_asked_first_is_served_first() -> None:
    budget, served = ByteBudget(100), []

    async def take(name: str, size: int) -> None:
        await budget.take(size)
        served.append(name)

    await budget.take(80)
    tasks = [asyncio.create_task(take(name, size)) for name, size in (("large", 60), ("small", 10))]
    await turn()
    assert served == []
    budget.give(80)
    await asyncio.gather(*tasks)

    assert served == ["large", "small"]
    assert budget.used == 70


async def test_what_is_larger_than_the_budget_is_served_alone() -> None:
    budget = ByteBudget(100)
    await budget.take(10)
    waiting = asyncio.create_task(budget.take(1000))
    await turn()
    assert not waiting.done()
    budget.give(10)
    await waiting

    assert budget.used == 1000


async def test_a_cancelled_wait_takes_nothing_and_holds_nobody_up() -> None:
    budget = ByteBudget(100)
    await budget.take(90)
    first = asyncio.create_task(budget.take(50))
    second = asyncio.create_task(budget.take(10))
    await turn()
    first.cancel()
    await second

    assert budget.used == 100


async def test_a_wait_cancelled_when_it_was_just_served_gives_its_bytes_back() -> None:
    budget = ByteBudget(100)
    await budget.take(90)
    waiting = asyncio.create_task(budget.take(50))
    await turn()
    budget.give(90)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert budget.used == 0


async def test_forced_bytes_count_and_wait_for_nothing() -> None:
    budget = ByteBudget(100)
    await budget.take(100)
    budget.force(50)
    budget.give(150)

    assert budget.used == 0
