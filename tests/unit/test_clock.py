"""Clocks: the host's, one that moves by hand, and the waits built on them."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.clock import Clock, SystemClock, parse_time
from common.tasks import first_of, wait_for
from tests.support.clock import ManualClock


def test_the_hosts_clock_tells_the_time_and_never_goes_back():
    clock: Clock = SystemClock()
    assert abs(clock.now() - time.time()) < 5
    before = clock.monotonic()
    clock.pause(0.01)
    assert clock.monotonic() - before >= 0.01


async def test_a_manual_clock_moves_only_when_told_or_slept_on():
    clock = ManualClock(now=1000.0)
    clock.advance(5)
    assert (clock.now(), clock.monotonic()) == (1005.0, 5.0)
    started = time.monotonic()
    await clock.sleep(3600)
    clock.pause(60)
    assert (clock.now(), clock.monotonic()) == (4665.0, 3665.0)
    assert time.monotonic() - started < 60


async def test_sleeping_lets_other_tasks_run():
    ran = []
    task = asyncio.create_task(asyncio.sleep(0, ran.append(1)))
    await ManualClock().sleep(1)
    await SystemClock().sleep(0)
    await task
    assert ran


async def test_waiting_for_an_event_tells_whether_it_was_set():
    event = asyncio.Event()
    assert not await wait_for(event, 0.01)
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_for(event, 10)
    assert await wait_for(event, 0)


async def test_the_first_of_several_waits_ends_the_others():
    event, forgotten = asyncio.Event(), []

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            forgotten.append(True)

    asyncio.get_running_loop().call_soon(event.set)
    await asyncio.wait_for(first_of(never(), event.wait()), 10)
    assert forgotten == [True]


async def test_the_first_of_several_waits_may_be_time():
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


@pytest.mark.parametrize("text", ["", "2023-11-14", "2023-11-14T22:13:20", "2023-02-30T00:00:00Z"])
def test_other_times_are_refused(text: str):
    with pytest.raises(ValueError):
        parse_time(text)
