"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from common.clock import first_of

T = TypeVar("T")

AGAIN = 0.5  # seconds until a task that goes on is cancelled once more


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks` and return when they have ended; what they raise is dropped.

    More than once, because `asyncio.wait_for` of Python 3.11 loses a cancellation that comes together with
    the result it waits for: the task goes on.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=AGAIN)
    for task in tasks:
        if not task.cancelled():
            task.exception()


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None where `stop` is set first: then it is cancelled."""
    task = asyncio.create_task(work)
    try:
        await first_of(stop.wait(), asyncio.wait({task}))
        return task.result() if task.done() else None
    finally:
        await end(task)


@asynccontextmanager
async def either(*events: asyncio.Event, seconds: float | None = None) -> AsyncIterator[asyncio.Event]:
    """An event of its own that is set as soon as one of `events` is, for the length of the block.

    `seconds`: it is set after that time at the latest.
    """
    one = asyncio.Event()

    async def pass_on(event: asyncio.Event) -> None:
        await first_of(event.wait(), seconds=seconds)
        one.set()

    if any(event.is_set() for event in events):
        one.set()
    tasks = [asyncio.create_task(pass_on(event), name="either") for event in events]
    try:
        yield one
    finally:
        await end(*tasks)


async def together(*works: Coroutine[Any, Any, object]) -> None:
    """Run `works` side by side to their ends; the first that fails ends the others.

    Raises a BaseExceptionGroup of what failed. Unlike asyncio's TaskGroup it ends a task for certain.
    """
    tasks = [asyncio.create_task(work) for work in works]
    await _run(tasks, tasks)


async def beside(main: Coroutine[Any, Any, object], *sides: Coroutine[Any, Any, object]) -> None:
    """Run `main` to its end; the `sides` run as long, and one of them that fails ends everything.

    Raises a BaseExceptionGroup of what failed.
    """
    tasks = [asyncio.create_task(work) for work in (main, *sides)]
    await _run(tasks[:1], tasks)


async def _run(needed: Sequence[asyncio.Task[object]], tasks: Sequence[asyncio.Task[object]]) -> None:
    try:
        while not all(task.done() for task in needed) and not any(map(_failure, tasks)):
            await asyncio.wait([t for t in tasks if not t.done()], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(*tasks)
    if failures := [failure for failure in map(_failure, tasks) if failure is not None]:
        raise BaseExceptionGroup("side by side", failures)


def _failure(task: asyncio.Task[object]) -> BaseException | None:
    return None if not task.done() or task.cancelled() else task.exception()
