"""Child processes that end with the process that started them, even if that is killed; and free ports for them.

A test run or a demo that is killed cannot stop its servers. A death signal (PR_SET_PDEATHSIG) follows the thread that
started the child, not the process: a server would end with the thread that started it. Here a small guard process holds
the reading end of a pipe. The kernel closes the writing end when its owner has ended, and the guard then kills the
tethered processes that still run.
"""

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple


class _Guard(NamedTuple):
    pid: int
    pipe: int  # the writing end


_lock = threading.Lock()
_guards: dict[int, _Guard] = {}  # by process id: a forked process has to start its own


def spawn(command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
    """Return `subprocess.Popen(command, **options)`, tethered to this process."""
    process = subprocess.Popen(command, **options)
    try:
        kill_with_parent(process.pid)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def kill_with_parent(pid: int) -> None:
    """Have the child `pid` killed when this process has ended, together with the process group that it leads.

    Call it before the child is waited for: until then its process id is not reused.
    """
    with _lock:
        try:
            _register(pid)
        except BrokenPipeError:  # the guard was killed
            killed = _guards.pop(os.getpid())
            os.close(killed.pipe)
            os.waitpid(killed.pid, 0)
            _register(pid)


def _register(pid: int) -> None:
    mine = os.getpid()
    if mine not in _guards:
        _guards[mine] = _start_guard()
    os.write(_guards[mine].pipe, b"%d\n" % pid)


def _start_guard() -> _Guard:
    # Not a Popen: the guard outlives this interpreter, and a Popen would warn about a child that still runs.
    reading, writing = os.pipe()
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", __file__],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
            setsid=True,  # so that Ctrl-C or a hang-up does not end it
        )
    finally:
        os.close(reading)
    return _Guard(pid, writing)


def _run_guard() -> None:
    """Read process ids, one a line, until the owner has ended; then kill those that still run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poll, rest = select.poll(), b""
    children: dict[int, int] = {}  # process ids by their descriptors
    poll.register(0, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                poll.unregister(descriptor)
                os.close(descriptor)
                del children[descriptor]
            elif descriptor == 0 and (read := os.read(0, 4096)):
                *lines, rest = (rest + read).split(b"\n")
                for pid in map(int, lines):
                    with contextlib.suppress(ProcessLookupError):
                        children[os.pidfd_open(pid)] = pid
                for descriptor in children:
                    poll.register(descriptor, select.POLLIN)
            elif descriptor == 0:
                for pid in children.values():
                    _kill(pid)
                return


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        leads = os.getpgid(pid) == pid
        (os.killpg if leads else os.kill)(pid, signal.SIGKILL)


# Below the range that Linux uses for outgoing connections (32768 and up): a server keeps its port over restarts, and a
# port in that range could be taken by a client of another server meanwhile.
_MIN_PORT, _MAX_PORT = 10_240, 20_240
PAIR_DISTANCE = _MAX_PORT - _MIN_PORT
_PORTS_PER_PROCESS = 250  # ports that one process gives out
_reserved: dict[int, Iterator[int]] = {}  # by process id, like the guards


def free_port() -> int:
    """Return a port of 127.0.0.1 without a listener. Raises OSError if none is found."""
    return free_ports(1)[0]


def free_ports(count: int, *, paired: bool = False) -> list[int]:
    """Return `count` different free ports; with `paired`, `port + 10_000` of each is free too. Raises OSError.

    The caller binds a port later. So no other process gives it out, and this one gives out all its other ports first.
    """
    with _lock:
        share = _reserved.get(os.getpid()) or _reserved.setdefault(os.getpid(), cycle(_reserve_ports()))
        free = (
            port
            for port in islice(share, _PORTS_PER_PROCESS)
            if is_free(port) and (not paired or is_free(port + PAIR_DISTANCE))
        )
        found = [*islice(free, count)]
    if len(found) < count:
        raise OSError(f"expected {count} free ports in {_MIN_PORT}..{_MAX_PORT}, found {len(found)}")
    return found


def _reserve_ports() -> list[int]:
    """Return ports reserved by this process until it ends, in random order; another's if all are reserved."""
    rng = random.SystemRandom()
    shares = [range(lowest, lowest + _PORTS_PER_PROCESS) for lowest in range(_MIN_PORT, _MAX_PORT, _PORTS_PER_PROCESS)]
    for share in rng.sample(shares, len(shares)):
        with socket.socket(socket.AF_UNIX) as claim, contextlib.suppress(OSError):
            claim.bind(f"\0floe-ports-{share.start}")  # an abstract name: it lasts until its last descriptor is closed
            claim.detach()
            break
    return rng.sample(share, _PORTS_PER_PROCESS)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    _run_guard()
