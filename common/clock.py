"""Clocks and random delays, passed as arguments: no other module reads a clock (ruff's TID251 enforces this)."""

import asyncio
import random
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

NS_PER_S = 1_000_000_000


TIME_FORM = "a time with its zone such as 2026-01-02T03:04:05Z"
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|z|[+-]\d\d:\d\d)", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_time(text: str) -> int:
    """Convert RFC 3339, with a zone and up to nine digits after the second, to nanoseconds since 1970 UTC.

    Raises ValueError.
    """
    if not (match := _TIME.fullmatch(text)):
        raise ValueError(f"expected {TIME_FORM}, found {text!r:.60}")
    try:
        at = datetime.fromisoformat(f"{match[1].upper()}{match[3].upper().replace('Z', '+00:00')}")
    except ValueError as error:
        raise ValueError(f"expected {TIME_FORM}, found {text!r:.60}: {error}") from error
    return (at - _EPOCH) // timedelta(seconds=1) * NS_PER_S + int((match[2] or "").ljust(9, "0"))


def format_unix(seconds: float | None) -> str | None:
    """Format whole seconds since 1970 as `format_time` does; None stays."""
    return None if seconds is None else format_time(int(seconds) * NS_PER_S)


def format_time(nanoseconds: int) -> str:
    """Format as RFC 3339 UTC, with nanoseconds if they are not 0; the bare number for a year outside 1 to 9999."""
    seconds, rest = divmod(nanoseconds, NS_PER_S)
    try:
        text = datetime.fromtimestamp(seconds, UTC).isoformat().removesuffix("+00:00")
    except (ValueError, OverflowError, OSError):
        return str(nanoseconds)
    return f"{text}.{rest:09d}Z" if rest else f"{text}Z"


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return seconds since 1970 UTC by this host's wall clock, for logs and for ages shown to people."""

    def monotonic(self) -> float:
        """Return seconds on a clock that never jumps, for leases, deadlines and the age of an open segment."""

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds` (at least one turn of the event loop)."""

    def block(self, seconds: float) -> None:
        """Block this thread for `seconds`. Never call it on an event loop."""


class SystemClock:
    """The host's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def block(self, seconds: float) -> None:
        time.sleep(seconds)


async def sleep_in_step(clock: Clock, seconds: float) -> None:
    """Wait `seconds`, or up to a thirtieth longer: many tasks then wake together, and their requests share writes."""
    due = clock.monotonic() + seconds
    await clock.sleep(seconds + -due % (seconds / 30))


RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0)  # seconds


def doubling_delays(first: float, last: float) -> tuple[float, ...]:
    delays = [first]
    while delays[-1] < last:
        delays.append(min(last, delays[-1] * 2))
    return tuple(delays)


class Backoff:
    """The `delays` (seconds) one after another; the last one repeats.

    `rng`: scales each to 50 to 100 %, so that instances that failed together do not return together; None: no scaling.
    """

    def __init__(self, rng: random.Random | None, delays: Sequence[float] = RETRY_DELAYS_S) -> None:
        self._rng, self._delays, self._failures = rng, delays, 0

    def next_delay(self) -> float:
        delay = self._delays[min(self._failures, len(self._delays) - 1)]
        self._failures += 1
        return delay if self._rng is None else delay * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._failures = 0
