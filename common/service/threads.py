"""Blocking work in threads, awaited from the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_running: set[Future[Any]] = set()  # calls of all pools, those of forgotten pools included


class Threads:
    """A pool of `workers` threads. Cancelling an awaited call does not stop its thread: `idle` waits for it.

    So a lease must not be given up before `idle` returns: an upload may still be on its way.
    """

    def __init__(self, name: str, workers: int) -> None:
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._calls: set[Future[Any]] = set()

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `fn(*args, **kwargs)` returns or raises, called in a thread with the task's context variables.

        Cancelled while it waits for a free thread, it is never called.
        """
        context = contextvars.copy_context()
        call = self._executor.submit(context.run, functools.partial(fn, *args, **kwargs))
        for calls in (self._calls, _running):
            calls.add(call)
            call.add_done_callback(calls.discard)
        return await asyncio.wrap_future(call)

    @property
    def busy(self) -> int:
        """Calls that run or wait for a thread, cancelled awaits included."""
        return len(self._calls)

    async def idle(self) -> None:
        """Return when no call is running, those whose await was cancelled included."""
        while calls := set(self._calls):
            # asyncio.wait cancels nothing when it is cancelled itself.
            await asyncio.wait({_settled(call) for call in calls})

    def close(self) -> None:
        """Take no more calls and forget those not begun; does not wait for running ones."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _settled(call: Future[Any]) -> asyncio.Future[Any]:
    waiter: asyncio.Future[Any] = asyncio.wrap_future(call)
    # Whoever awaited the call has seen its error; here it only tells that the call ended.
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiter


def busy_threads() -> int:
    """Calls still running in all pools of this process: abandoned ones, once the event loop has ended."""
    return len(_running)
