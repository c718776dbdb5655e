"""Time and chance, passed as arguments: nothing else in Floe reads a clock (ruff's TID251 holds it)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Protocol

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


DELAYS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0)  # seconds


def doubling(first: float, last: float) -> tuple[float, ...]:
    """Seconds from `first` to `last`, each twice the one before."""
    delays = [first]
    while delays[-1] < last:
        delays.append(min(last, delays[-1] * 2))
    return tuple(delays)


class Backoff:
    """`delays` (seconds) one after another, the last again and again.

    `rng`: for 50 to 100 % of each, so that instances that failed together do not come back together.
    """

    def __init__(self, rng: random.Random | None, delays: Sequence[float] = DELAYS) -> None:
        self._rng, self._delays = rng, delays
        self._failures = 0

    def next(self) -> float:
        """Seconds to wait now."""
        delay = self._delays[min(self._failures, len(self._delays) - 1)]
        self._failures += 1
        return delay if self._rng is None else delay * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Something succeeded."""
        self._failures = 0
