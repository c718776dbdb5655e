"""Children end with whoever started them, and with nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local.process import free_port, free_ports
from tests.support.basics import PATIENCE, eventually

ROOT = Path(__file__).parents[2]

# The child is started by a thread that ends at once; with `nested` it has a child of its own.
OWNER = """
import subprocess, sys, threading, time
from infra.local.process import spawn

def start():
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

# The guard stands in a session of its own, and is the only other child.
GUARD_KILLED = """
import os, signal, sys
from pathlib import Path
from infra.local.process import spawn

first = spawn(["sleep", "600"])
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
[guard] = {int(pid) for pid in children} - {first.pid}
os.kill(guard, signal.SIGKILL)
os.waitid(os.P_PID, guard, os.WEXITED | os.WNOWAIT)
print(spawn(["sleep", "600"]).pid, flush=True)
first.kill()
sys.stdin.readline()
"""


def owner(kind: str, program: str = OWNER) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("kind", ["alone", "nested"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_what_was_spawned_ends_when_its_owner_does_however_that_ends(kind: str, number: int | None):
    with owner(kind) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        try:
            assert len(pids) == (2 if kind == "nested" else 1)
            assert all(map(runs, pids)), "the thread that started it has ended, and it went with it"
            if number is None:
                process.stdin.close()  # it ends by itself
            else:
                process.send_signal(number)
            process.wait(PATIENCE)
            eventually(lambda: not any(map(runs, pids)))
        finally:
            for pid in filter(runs, pids):
                os.kill(pid, signal.SIGKILL)


def test_a_guard_that_was_killed_is_replaced():
    with owner("alone", GUARD_KILLED) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            assert runs(pid)
            process.stdin.close()
            process.wait(PATIENCE)
            eventually(lambda: not runs(pid))
        finally:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)


def test_no_two_processes_are_given_the_same_port():
    asking = "import sys; from infra.local.process import free_ports; print(*free_ports(200), flush=True); input()"
    owners = [owner("", asking) for _ in range(5)]
    given = [[*map(int, each.stdout.readline().split())] for each in owners if each.stdout]
    given.append(free_ports(100) + [free_port() for _ in range(50)])
    for each in owners:
        each.communicate("\n")
    ports = [port for each in given for port in each]
    assert len(ports) == len(set(ports)) == 1150
    assert all(port < 20_240 for port in ports)
