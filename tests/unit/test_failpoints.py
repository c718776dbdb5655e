"""Failpoints act where and when the environment says, and cost nothing elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.local.process import spawn
from tests.support.basics import PATIENCE, eventually

ROOT = Path(__file__).parents[2]


def passes(points: str, times: int = 5) -> subprocess.Popen[str]:
    """A process that passes `here` several times, and prints each pass that it survives."""
    script = f"""
from common.failpoints import FailpointRaised, failpoint
for n in range(1, {times} + 1):
    try:
        failpoint("here")
        print(n, flush=True)
    except FailpointRaised as error:
        print("raised", error, flush=True)
"""
    environment = {**os.environ, "FLOE_FAILPOINTS": points}
    return spawn([sys.executable, "-c", script], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def ended(points: str) -> tuple[list[str], int]:
    with passes(points) as process:
        output, _ = process.communicate(timeout=PATIENCE)
    return output.split("\n")[:-1], process.returncode


def test_nothing_happens_where_the_environment_names_another_place():
    assert ended("elsewhere=kill") == (["1", "2", "3", "4", "5"], 0)
    assert ended("") == (["1", "2", "3", "4", "5"], 0)


def test_kill_ends_the_process_as_sigkill_does_at_the_first_pass():
    assert ended("elsewhere=raise,here=kill") == ([], -signal.SIGKILL)


def test_an_action_may_wait_for_a_later_pass():
    assert ended("here=kill@3") == (["1", "2"], -signal.SIGKILL)


def test_raise_raises_once_or_at_every_pass():
    assert ended("here=raise@2") == (["1", "raised here", "3", "4", "5"], 0)
    assert ended("here=raise@*") == (["raised here"] * 5, 0)


def test_sleep_blocks_the_calling_thread():
    started = time.monotonic()
    assert ended("here=sleep:0.3@*")[1] == 0
    assert time.monotonic() - started >= 1.5


def test_stop_stops_until_the_process_is_continued():
    with passes("here=stop@2") as process:
        state = lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]  # noqa: E731
        eventually(lambda: state() == "T")
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=PATIENCE)
    assert (output, process.returncode) == ("1\n2\n3\n4\n5\n", 0)


@pytest.mark.parametrize("points", ["here=explode", "here"])
def test_an_unknown_action_is_an_error(points: str):
    with passes(points) as process:
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
