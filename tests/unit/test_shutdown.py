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

from common.service.process import stop_on_signals
from common.settings.loader import read_secret
from common.settings.types import FileSecret
from infra.local.process import spawn
from tests.support.basics import PATIENCE, soon

ROOT = Path(__file__).parents[2]

DRAINS = """
async def main():
    async with stop_on_signals() as stop:
        {setup}
        print("ready", flush=True)
        await stop.wait()
        print("draining", flush=True)
        {drain}
        print("drained", flush=True)
"""


@contextmanager
def service(
    drain: str = "pass", runner: str = "run_async(main())", setup: str = "pass"
) -> Iterator[subprocess.Popen[str]]:
    script = (
        "import asyncio, time\nfrom common.cli import run_async\n"
        "from common.service.process import hangups, stop_on_signals\n"
        f"{DRAINS.format(drain=drain, setup=setup)}\n{runner}\n"
    )
    process = spawn([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
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
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_second_signal_ends_the_process_at_once(number: signal.Signals, code: int):
    with service(drain="await asyncio.sleep(60)") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(number)
        assert process.wait(PATIENCE) == code
        assert process.stdout.read() == ""


def test_the_second_signal_works_while_the_event_loop_is_blocked():
    with service(drain="time.sleep(60)") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143


async def test_the_former_handlers_are_back_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    async with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), PATIENCE)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("more", ["", " or 1 / 0"], ids=["it reads again", "it fails"])
def test_a_hangup_ends_nothing_and_calls_what_reads_again_even_where_that_fails(more: str):
    with service(setup=f"hangups.append(lambda: print('reads again', flush=True){more})") as process:
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "reads again\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "draining\ndrained\n"
        assert process.wait(PATIENCE) == 0


async def test_a_hang_up_stops_nothing_and_has_secrets_read_again(tmp_path: Path):
    path = tmp_path / "secret"
    path.write_text("former")
    secret = FileSecret("former", str(path), read_secret)
    path.write_text("later\n")
    async with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        await soon(lambda: secret.get_secret_value() == "later")
        path.unlink()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert not stop.is_set
    assert secret.get_secret_value() == "later", "a file that is gone takes nothing away"
    assert "later" not in f"{secret!r} {secret}"
