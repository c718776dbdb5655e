"""The host's clock, the waits built on it, and times as they are written."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.clock import Clock, SystemClock, parse_time
from common.tasks import first_of, wait_for


def test_the_hosts_clock_tells_the_time_and_never_goes_back():
    clock: Clock = SystemClock()
    assert abs(clock.now() - time.time()) < 5
    before = clock.monotonic()
    clock.pause(0.01)
    assert clock.monotonic() - before >= 0.01


async def test_waiting_for_an_event_tells_whether_it_was_set():
    event = asyncio.Event()
    assert not await wait_for(event, 0.01)
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_for(event, 10)
    assert await wait_for(event, 0)


async def test_the_first_of_several_waits_ends_the_others_and_may_be_time():
    event, forgotten = asyncio.Event(), []

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            forgotten.append(True)

    asyncio.get_running_loop().call_soon(event.set)
    await asyncio.wait_for(first_of(never(), event.wait()), 10)
    assert forgotten == [True]
    await asyncio.wait_for(first_of(asyncio.Event().wait(), seconds=0.01), 10)


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2023-11-14T22:13:20.123456789Z", 1_700_000_000_123_456_789),
        ("2023-11-14T22:13:20.1Z", 1_700_000_000_100_000_000),
        ("2023-11-15T00:13:20+02:00", 1_700_000_000_000_000_000),
        ("1969-12-31T23:59:59.5Z", -500_000_000),
        ("0001-01-01T00:00:00Z", -62_135_596_800_000_000_000),
    ],
)
def test_times_are_read_to_the_nanosecond(text: str, nanoseconds: int):
    assert parse_time(text) == nanoseconds


def test_other_times_are_refused():
    for text in ("", "2023-11-14", "2023-11-14T22:13:20", "2023-02-30T00:00:00Z"):
        with pytest.raises(ValueError):
            parse_time(text)
