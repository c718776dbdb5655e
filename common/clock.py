"""Time and chance, passed as arguments: nothing else in Floe reads a clock (ruff's TID251 holds it)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

T = TypeVar("T")


NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Seconds since 1970 UTC, by this host's wall clock: for logs and ages shown to people."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps: for leases, deadlines and the age of an open segment."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds` (at least one turn of the event loop)."""
        ...

    def pause(self, seconds: float) -> None:
        """Block this thread for `seconds`; never called on an event loop."""
        ...


class SystemClock:
    """The host's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class ManualClock:
    """A clock that moves only when `advance` is called or somebody sleeps on it; for tests."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._monotonic = 0.0

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)

    def pause(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds`."""
        self._now += seconds
        self._monotonic += seconds


async def wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Wait until `event` is set or `seconds` have passed; whether it was set.

    Not by `asyncio.wait_for`, which in Python 3.11 loses a cancellation that comes together with the event.
    """
    if not event.is_set():
        await first_of(event.wait(), seconds=seconds)
    return event.is_set()


async def within(future: asyncio.Future[T], seconds: float) -> T:
    """The result of `future`, cancelled where it does not come in `seconds`: then raises TimeoutError.

    Instead of `asyncio.wait_for`, for the reason that `wait_for` gives.
    """
    try:
        await asyncio.wait((future,), timeout=seconds)
        if not future.done():
            raise TimeoutError
        return future.result()
    finally:
        future.cancel()


async def first_of(*waits: Awaitable[object], seconds: float | None = None) -> None:
    """Return when one of `waits` is done or `seconds` have passed; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
