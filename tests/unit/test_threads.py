"""Blocking calls in threads: awaited, cancelled, waited for."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.service.process import Threads, busy_threads
from tests.support.basics import PATIENCE, soon


@pytest.fixture
def threads() -> Iterator[Threads]:
    pool = Threads("test", 1)
    yield pool
    pool.close()


async def test_a_call_runs_in_a_thread_of_the_pool_with_the_context_of_the_task_and_returns_or_raises(threads: Threads):
    def divide(a: int, *, by: int) -> float:
        return a / by

    await asyncio.wait_for(threads.idle(), PATIENCE)
    assert await threads.run(divide, 6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        await threads.run(divide, 6, by=0)
    variable = contextvars.ContextVar("variable", default="")
    variable.set("from the task")
    assert await threads.run(variable.get) == "from the task"
    assert (await threads.run(threading.current_thread)).name.startswith("test")


async def test_the_event_loop_turns_while_a_call_runs_which_cancelling_idle_does_not_cancel(threads: Threads):
    before, release = busy_threads(), threading.Event()
    call = asyncio.create_task(threads.run(release.wait, PATIENCE))
    await soon(lambda: threads.busy)
    await soon(lambda: busy_threads() == before + 1)
    idle = asyncio.create_task(threads.idle())
    await asyncio.sleep(0)
    idle.cancel()
    await asyncio.wait([idle])
    release.set()
    assert await call
    await soon(lambda: busy_threads() == before)


async def test_idle_waits_for_a_call_whose_await_was_cancelled(threads: Threads):
    # Given an upload that was cancelled and runs on
    release, done = threading.Event(), threading.Event()

    def upload() -> None:
        release.wait(PATIENCE)
        done.set()
        raise OSError("nobody is there to see it")

    call = asyncio.create_task(threads.run(upload))
    await soon(lambda: threads.busy)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    # When somebody waits for the pool
    idle = asyncio.create_task(threads.idle())
    await asyncio.sleep(0.05)
    assert not idle.done()
    release.set()
    await idle
    # Then the upload has ended
    assert done.is_set()
    assert threads.busy == 0


async def test_a_call_that_is_cancelled_before_a_thread_is_free_never_runs(threads: Threads):
    release, ran = threading.Event(), threading.Event()
    first = asyncio.create_task(threads.run(release.wait, 10))
    await soon(lambda: threads.busy)
    second = asyncio.create_task(threads.run(ran.set))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    release.set()
    await first
    await threads.idle()
    assert not ran.is_set()


def test_a_thread_that_never_returns_does_not_keep_the_command_from_ending():
    script = """
import asyncio, sys, threading
import click, floe
from common.cli import run_command
from common.service.process import Threads

@floe.cli.command("hang")
@run_command
async def hang():
    call = asyncio.create_task(Threads("t", 1).run(threading.Event().wait))
    await asyncio.sleep(0.1)
    call.cancel()
    return 75

floe.COMMANDS["hang"] = floe.Entry("__main__:hang", "")
sys.argv = ["floe", "hang"]
floe.main()
"""
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=PATIENCE, check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (75, b"")
