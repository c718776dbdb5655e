"""Signals, on a real process: the first drains, the second ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.service.shutdown import stop_on_signals

ROOT = Path(__file__).parents[2]

DRAINS = """
async def main():
    async with stop_on_signals() as stop:
        print("ready", flush=True)
        await stop.wait()
        print("draining", flush=True)
        {drain}
        print("drained", flush=True)
"""


@contextmanager
def service(drain: str = "pass", runner: str = "run_async(main())") -> Iterator[subprocess.Popen[str]]:
    script = (
        "import asyncio, time\nfrom common.service.cli import run_async\n"
        f"from common.service.shutdown import stop_on_signals\n{DRAINS.format(drain=drain)}\n{runner}\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("runner", ["run_async(main())", "asyncio.run(main())"])
def test_the_first_signal_lets_the_service_drain(number: signal.Signals, runner: str):
    with service(runner=runner) as process:
        process.send_signal(number)
        assert process.stdout.read() == "draining\ndrained\n"
        assert process.wait(10) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_second_signal_ends_the_process_at_once(number: signal.Signals, code: int):
    with service(drain="await asyncio.sleep(60)") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(number)
        assert process.wait(10) == code
        assert process.stdout.read() == ""


def test_the_second_signal_works_while_the_event_loop_is_blocked():
    with service(drain="time.sleep(60)") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143


async def test_the_former_handlers_are_back_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    async with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 5)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
