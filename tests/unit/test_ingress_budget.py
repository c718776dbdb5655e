"""The byte budget: order, cancellation, what is larger than all of it."""

from __future__ import annotations

import asyncio

import pytest

from ingress.rows.rows import ByteBudget


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_whoever_asked_first_is_served_first_and_what_is_larger_than_the_budget_alone() -> None:
    budget, served = ByteBudget(100), list[str]()

    async def take(name: str, size: int) -> None:
        await budget.take(size)
        served.append(name)

    await budget.take(80)
    tasks = [asyncio.create_task(take(name, size)) for name, size in (("large", 60), ("small", 10), ("huge", 1000))]
    await turn()
    assert served == []
    budget.give(80)
    await turn()
    assert (served, budget.used) == (["large", "small"], 70)
    budget.give(70)
    await asyncio.gather(*tasks)
    assert (served[2:], budget.used) == (["huge"], 1000)
    budget.force(50)  # waits for nothing
    budget.give(1050)
    assert budget.used == 0


async def test_a_cancelled_wait_takes_nothing_and_holds_nobody_up() -> None:
    budget = ByteBudget(100)
    await budget.take(90)
    first, second = (asyncio.create_task(budget.take(size)) for size in (50, 10))
    await turn()
    first.cancel()
    await second
    assert budget.used == 100

    served = asyncio.create_task(budget.take(50))
    await turn()
    budget.give(100)
    served.cancel()  # right after it was served
    await asyncio.gather(served, return_exceptions=True)
    assert budget.used == 0


async def test_what_is_larger_than_a_budget_is_decoded_alone_in_the_process() -> None:
    alone = asyncio.Lock()
    budgets = [ByteBudget(100, alone) for _ in range(3)]
    began, go_on = list[str](), asyncio.Event()

    async def decode(name: str, budget: ByteBudget, size: int, *, wait: bool = True) -> None:
        async with budget.decoding(size, wait=wait):
            began.append(name)
            await go_on.wait()

    works = [
        decode("large", budgets[0], 1000),
        decode("other large", budgets[1], 1000),
        decode("forced large", budgets[0], 500, wait=False),
        decode("fits", budgets[2], 100),
    ]
    tasks = [asyncio.create_task(work) for work in works]
    await turn()
    assert began == ["large", "fits"]
    go_on.set()
    await asyncio.gather(*tasks)

    assert began == ["large", "fits", "other large", "forced large"]
    assert [budget.used for budget in budgets] == [0, 0, 0]


async def test_decoding_that_fails_gives_its_bytes_back() -> None:
    budget = ByteBudget(100)
    with pytest.raises(ValueError, match="damaged"):
        async with budget.decoding(1000, wait=True):
            raise ValueError("damaged")
    assert budget.used == 0
    async with budget.decoding(1000, wait=True):
        assert budget.used == 1000
