"""Signals on a real process: the first drains, the second ends it at once; children end with their owner."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from common.service.process import stop_on_signals
from common.settings.loader import read_secret
from common.settings.types import FileSecret
from infra.local.process import free_port, free_ports, spawn
from tests.support.basics import PATIENCE, eventually, soon

ROOT = Path(__file__).parents[2]

DRAINS = """
import asyncio, time
from common.cli import run_async
from common.service.process import stop_on_signals

async def main():
    async with stop_on_signals() as stop:
        {setup}
        print("ready", flush=True)
        await stop.wait()
        print("draining", flush=True)
        {drain}

run_async(main())
"""


@contextmanager
def service(drain: str, setup: str = "pass") -> Iterator[subprocess.Popen[str]]:
    script = DRAINS.format(drain=drain, setup=setup)
    with spawn([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("second", "code", "drain"), [(15, 143, "time.sleep(60)"), (2, 130, "await asyncio.sleep(60)")]
)
def test_the_first_signal_drains_and_the_second_ends_it_at_once_also_where_the_loop_is_blocked(second, code, drain):
    with service(drain) as process:
        process.send_signal({15: signal.SIGINT, 2: signal.SIGTERM}[second])
        assert process.stdout.readline() == "draining\n"
        process.send_signal(second)
        assert process.wait(PATIENCE) == code


def test_sigquit_logs_where_a_blocked_event_loop_hangs_and_ends_nothing(tmp_path: Path):
    log = tmp_path / "log"

    def stacks() -> dict[str, list[str]]:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return {line.get("task") or line["thread"]: line["stack"] for line in lines if "stack" in line}

    setup = f"from common import logs; logs.configure('info', 'json', stream=open('{log}', 'w'))"
    with service("time.sleep(60)", setup) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGQUIT)
        eventually(lambda: "MainThread" in stacks())
        of_tasks = [place for name, stack in stacks().items() if name != "MainThread" for place in stack]
        assert any(place.endswith(" main") for place in of_tasks), stacks()
        assert process.poll() is None


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


# Children end with the process that started them

# The child is started by a thread that ends at once; with `nested` it has a child of its own; with `unguarded` the
# process that would end it was killed before.
OWNER = """
import os, signal, subprocess, sys, threading, time
from infra.local.process import _guards, spawn

def start():
    if sys.argv[1] == "unguarded":
        spawn(["true"]).wait()
        guard = _guards[os.getpid()].pid
        os.kill(guard, signal.SIGKILL)
        os.waitid(os.P_PID, guard, os.WEXITED | os.WNOWAIT)
    nested = "import sys, time; from infra.local.process import spawn; " \
        "print(spawn(['sleep', '600']).pid, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", nested] if sys.argv[1] == "nested" else ["sleep", "600"]
    child = spawn(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    print(child.pid, child.stdout.readline().strip() if sys.argv[1] == "nested" else "", flush=True)

thread = threading.Thread(target=start)
thread.start()
thread.join()
sys.stdin.readline()
"""


def owner(program: str, kind: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def runs(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("kind", "number"),
    [("nested", signal.SIGKILL), ("alone", signal.SIGTERM), ("nested", None), ("unguarded", signal.SIGKILL)],
)
def test_what_was_spawned_ends_when_its_owner_does_however_that_ends(kind: str, number: int | None):
    with owner(OWNER, kind) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        try:
            assert len(pids) == (2 if kind == "nested" else 1)
            assert all(map(runs, pids)), "the thread that started it has ended, and it went with it"
            if number is None:
                process.stdin.close()  # the owner ends by itself
            else:
                process.send_signal(number)
            process.wait(PATIENCE)
            eventually(lambda: not any(map(runs, pids)))
        finally:
            for pid in filter(runs, pids):
                os.kill(pid, signal.SIGKILL)


def test_no_two_processes_are_given_the_same_port():
    asking = "import sys; from infra.local.process import free_ports; print(*free_ports(200), flush=True); input()"
    owners = [owner(asking) for _ in range(5)]
    given = [[*map(int, each.stdout.readline().split())] for each in owners if each.stdout]
    given.append(free_ports(100) + [free_port() for _ in range(50)])
    for each in owners:
        each.communicate("\n")
    ports = [port for each in given for port in each]
    assert len(ports) == len(set(ports)) == 1150
    assert all(port < 20_240 for port in ports)
