"""Errors in what a parent and its worker processes do beside their work (`egress run --workers`)."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.clock import SystemClock
from common.errors import Unforeseen
from common.service.monitor import Health
from common.tasks import Stop, to_its_end
from egress.service import stop_of
from egress.workers.process import WorkerPlace, WorkerProcess
from egress.workers.supervisor import Supervisor, supervise
from tests.support.basics import PATIENCE, soon
from tests.support.stores import Throw, count, is_no_room

SLEEPS = "import time; time.sleep(60)"
#: Its own end of the line is the last of `INDEX/COUNT/DESCRIPTOR`.
SPOILS = "import os, sys; os.write(int(sys.argv[-1].split('/')[2]), b'no json\\n');" + SLEEPS


def supervisor_of(*scripts: str) -> Supervisor:
    """A parent's supervisor whose workers run these scripts."""
    workers = [
        WorkerProcess(index, len(scripts), [sys.executable, "-c", script], dict(os.environ))
        for index, script in enumerate(scripts)
    ]
    return Supervisor(workers, 5.0, SystemClock(), random.Random(1))


@pytest.fixture(autouse=True)
async def _waited_for(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A parent that ends with an error waits for none that it killed; the loop of the test has to."""
    started: list[asyncio.subprocess.Process] = []
    real = WorkerProcess.start

    async def start(worker: WorkerProcess, line: socket.socket) -> asyncio.subprocess.Process:
        started.append(process := await real(worker, line))
        return process

    monkeypatch.setattr(WorkerProcess, "start", start)
    yield
    for process in started:
        await asyncio.wait_for(process.wait(), PATIENCE)
    await asyncio.sleep(0.01)  # its transport closes in the turns after


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_worker_whose_line_nobody_can_read_is_started_again_and_others_go_on() -> None:
    supervisor, stop, before = supervisor_of(SPOILS, SLEEPS), Stop(), count("worker")
    running = asyncio.create_task(supervisor.run(stop))
    spoiled, other = supervisor.workers
    await soon(lambda: spoiled.restarts >= 1)
    assert count("worker") > before
    assert (other.restarts, running.done()) == (0, False)
    stop.set()
    await asyncio.wait_for(running, PATIENCE)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Health, "beat"), (WorkerProcess, "run_once"), (Supervisor, "_keep")],
    ids=["beat", "process", "worker"],
)
async def test_what_fails_in_the_parent_ends_all(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    supervisor, clock = supervisor_of(SLEEPS, SLEEPS), SystemClock()
    throw = Throw(monkeypatch, owner, name, times=0 if owner is Health else 1)
    running = asyncio.create_task(to_its_end(supervise(supervisor, Health(clock))))
    if owner is Health:
        await soon(lambda: all(worker.pid for worker in supervisor.workers))
        throw.left = 1
    pids = [worker.pid for worker in supervisor.workers if worker.pid]
    with pytest.raises(Exception) as caught:
        await asyncio.wait_for(running, PATIENCE)
    assert is_no_room(caught.value)
    assert all(worker.pid == 0 for worker in supervisor.workers)
    await soon(lambda: all(map(is_gone, pids)))


async def test_a_worker_that_cannot_look_after_its_parent_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would live on without one."""
    mine, other = socket.socketpair()
    Throw(monkeypatch, WorkerPlace, "watch")

    async def worker() -> None:
        async with stop_of(WorkerPlace(0, 1, other.fileno()), 1) as stop:
            await stop.wait()

    with mine, other, pytest.raises(Unforeseen, match="no room"):
        await asyncio.wait_for(to_its_end(worker()), PATIENCE)
