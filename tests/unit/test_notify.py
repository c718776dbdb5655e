"""What the service manager is told, over a real datagram socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.clock import SystemClock
from common.service.monitor import MAX_BEAT_AGE, Health, Monitor
from common.service.process import SystemdNotifier, hangups
from common.tasks import Stop
from tests.support.basics import soon, unique
from tests.support.clock import ManualClock
from tests.support.notify import ServiceManager


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceManager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@{unique('notify')}"
    with ServiceManager(address) as manager:
        yield manager


@pytest.fixture
def monitor() -> Monitor:
    return Monitor("", Health(ManualClock()))


def notifier(monitor: Monitor, manager: ServiceManager, **environment: str) -> SystemdNotifier:
    return SystemdNotifier(monitor.says, SystemClock(), {"NOTIFY_SOCKET": manager.address, **environment})


async def test_it_is_ready_at_once_and_stopping_when_asked_to(manager: ServiceManager, monitor: Monitor):
    stop = Stop()
    async with notifier(monitor, manager).while_running(stop):
        assert manager.lines() == ["READY=1", f"MAINPID={os.getpid()}"]
        await soon(lambda: "STATUS=starting: nothing has reported yet" in manager.lines())
        stop.set()
        await soon(lambda: manager.lines()[-2:] == ["STOPPING=1", "STATUS=draining"])

    assert manager.lines().count("STOPPING=1") == 1
    assert "WATCHDOG=1" not in manager.lines()


async def test_the_watchdog_is_fed_while_healthz_says_that_the_loop_turns(manager: ServiceManager):
    clock = ManualClock()
    health = Health(clock)
    stop = Stop()
    async with notifier(Monitor("", health), manager, WATCHDOG_USEC="40000").while_running(stop):
        await soon(lambda: manager.lines().count("WATCHDOG=1") > 3)
        clock.advance(MAX_BEAT_AGE + 1)  # no beat: the loop that serves hangs
        await asyncio.sleep(0.1)  # what was under way
        manager.forget()
        await asyncio.sleep(0.2)
        assert manager.lines() == []
        health.beat()
        await soon(lambda: "WATCHDOG=1" in manager.lines())
        stop.set()
        manager.forget()
        await soon(lambda: "WATCHDOG=1" in manager.lines())  # draining is work too


async def test_the_watchdog_of_another_process_is_not_fed(manager: ServiceManager, monitor: Monitor):
    told = notifier(monitor, manager, WATCHDOG_USEC="40000", WATCHDOG_PID=str(os.getppid()))
    async with told.while_running(Stop()):
        await soon(lambda: any(line.startswith("STATUS=") for line in manager.lines()))
        await asyncio.sleep(0.1)

    assert "WATCHDOG=1" not in manager.lines()


async def test_a_status_is_one_line_and_cannot_forge_others(manager: ServiceManager):
    health = Health(ManualClock())
    health.set_ready("nats", False, "no\nWATCHDOG=trigger\x1b")
    health.set_ready("objects", False, "x" * 1000)
    async with notifier(Monitor("", health), manager).while_running(Stop()):
        await soon(lambda: any(line.startswith("STATUS=") for line in manager.lines()))

    [status] = [line for line in manager.lines() if line.startswith("STATUS=")]
    assert status.startswith(r"STATUS=nats: no\nWATCHDOG=trigger\x1b; objects: xxx")
    assert len(status) < 400


async def test_a_hangup_is_a_reload(manager: ServiceManager, monitor: Monitor):
    before = list(hangups)
    async with notifier(monitor, manager).while_running(Stop()):
        manager.forget()
        for call in hangups:
            call()
        lines = [line for line in manager.lines() if not line.startswith("STATUS=")]

    assert [line.partition("=")[0] for line in lines] == ["RELOADING", "MONOTONIC_USEC", "READY", "MAINPID"]
    assert int(lines[1].partition("=")[2]) > 0
    assert hangups == before


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "relative", "/nowhere/notify"])
async def test_without_a_service_manager_nothing_happens(address: str, monitor: Monitor):
    told = SystemdNotifier(monitor.says, SystemClock(), {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "spoiled"})
    stop = Stop()
    async with told.while_running(stop):
        stop.set()
        await asyncio.sleep(0)
