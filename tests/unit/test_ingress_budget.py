"""The byte budget: order, cancellation, what is larger than all of it."""

from __future__ import annotations

import asyncio

import pytest

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


async def test_what_is_larger_than_the_budget_is_served_alone_and_forced_bytes_wait_for_nothing() -> None:
    budget = ByteBudget(100)
    await budget.take(10)
    waiting = asyncio.create_task(budget.take(1000))
    await turn()
    assert not waiting.done()
    budget.give(10)
    await waiting
    assert budget.used == 1000
    budget.force(50)
    budget.give(1050)
    assert budget.used == 0


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


async def test_what_is_larger_than_a_budget_is_decoded_alone_in_the_process() -> None:
    alone = asyncio.Lock()
    budgets = [ByteBudget(100, alone), ByteBudget(100, alone)]
    began, go_on = list[str](), asyncio.Event()

    async def decode(name: str, budget: ByteBudget, size: int, *, wait: bool = True) -> None:
        async with budget.decoding(size, wait=wait):
            began.append(name)
            await go_on.wait()

    works = [
        decode("first large", budgets[0], 1000),
        decode("other large", budgets[1], 1000),
        decode("forced large", budgets[0], 500, wait=False),
    ]
    tasks = [asyncio.create_task(work) for work in works]
    await turn()
    assert began == ["first large"]
    go_on.set()
    await asyncio.gather(*tasks)

    assert began == ["first large", "other large", "forced large"]
    assert [budget.used for budget in budgets] == [0, 0]


async def test_what_fits_waits_for_nobody_of_another_target() -> None:
    alone = asyncio.Lock()
    async with ByteBudget(100, alone).decoding(1000, wait=True), ByteBudget(100, alone).decoding(100, wait=True):
        assert alone.locked()


async def test_decoding_that_fails_gives_its_bytes_back() -> None:
    budget = ByteBudget(100)
    with pytest.raises(ValueError, match="damaged"):
        async with budget.decoding(1000, wait=True):
            raise ValueError("damaged")
    assert budget.used == 0
    async with budget.decoding(1000, wait=True):
        assert budget.used == 1000
