"""Tasks that run side by side and end for certain, also where a cancellation is swallowed on the way."""

from __future__ import annotations

import asyncio

import pytest

from common.clock import wait_for, within
from common.tasks import beside, together


async def swallows(times: int, ended: asyncio.Event) -> None:
    """Goes on after so many cancellations, as code over `asyncio.wait_for` of Python 3.11 may."""
    try:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if times == 0:
                    raise
                times -= 1
    finally:
        ended.set()


async def fails(after: float = 0.01) -> None:
    await asyncio.sleep(after)
    raise ValueError("failed")


async def test_sides_end_with_the_main_work_even_where_they_lose_a_cancellation() -> None:
    ended = asyncio.Event()
    await asyncio.wait_for(beside(asyncio.sleep(0.01), swallows(1, ended)), 5)
    assert ended.is_set()


async def test_a_side_that_fails_ends_the_main_work() -> None:
    ended = asyncio.Event()
    with pytest.raises(BaseExceptionGroup) as caught:
        await asyncio.wait_for(beside(swallows(1, ended), fails()), 5)
    assert ended.is_set()
    assert [str(error) for error in caught.value.exceptions] == ["failed"]


async def test_a_side_that_comes_to_its_end_does_not_end_the_main_work() -> None:
    done = []

    async def main() -> None:
        await asyncio.sleep(0.05)
        done.append(1)

    await beside(main(), asyncio.sleep(0))
    assert done == [1]


async def test_together_waits_for_all_and_ends_all_with_the_first_that_fails() -> None:
    await together(asyncio.sleep(0.01), asyncio.sleep(0.02))
    ended = asyncio.Event()
    with pytest.raises(BaseExceptionGroup):
        await asyncio.wait_for(together(swallows(1, ended), fails()), 5)
    assert ended.is_set()


async def test_a_cancelled_group_leaves_nothing_running() -> None:
    ended = asyncio.Event()
    task = asyncio.create_task(together(swallows(0, ended), asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_cancellation_that_comes_together_with_the_result_is_not_lost() -> None:
    for wait in ("event", "future"):
        event, future = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(wait_for(event, 60) if wait == "event" else within(future, 60))
        await asyncio.sleep(0.01)
        event.set()
        future.set_result(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_within_raises_in_time_and_cancels_what_it_waited_for() -> None:
    future = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await within(future, 0.01)
    assert future.cancelled()
