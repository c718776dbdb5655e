"""A worker process: as its parent sees it, its own side, and the line between the two."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from common.errors import UsageError
from common.exits import LATER
from common.logs import get_logger
from common.metrics import begin
from common.tasks import Stop, end, first_of, told, watched

log = get_logger("egress.workers")


FINAL = (78, 77, 2)  # what a restart would only repeat: configuration, credentials, the command line


def exit_code(returned: int) -> int:
    """The exit code of a process that `returned`, below 0: ended by that signal."""
    return 128 - returned if returned < 0 else returned


def worst(codes: Iterable[int]) -> int:
    """The code that says most of what an operator has to do; 0 if there is none."""
    ranks = {0: 0, LATER: 1, **dict.fromkeys(FINAL, 3)}
    return max(codes, key=lambda code: (ranks.get(code, 2), code), default=0)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker's side: it is `index` of `count`, its parent at the other end of the socket `descriptor`."""

    index: int
    count: int
    descriptor: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`INDEX/COUNT/DESCRIPTOR`. Raises UsageError: the option is the parent's, not for people."""
        try:
            index, count, descriptor = map(int, text.split("/"))
        except ValueError:
            raise UsageError(f"--worker: expected INDEX/COUNT/DESCRIPTOR, found {text!r:.40}") from None
        return cls(index, count, descriptor)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}/{self.descriptor}"

    async def watch(self, port: int, stop: Stop) -> None:
        """Tell the parent the monitor's `port`; set `stop` when the parent has gone."""
        with socket.socket(fileno=self.descriptor) as line:
            line.setblocking(False)
            loop = asyncio.get_running_loop()
            try:
                await loop.sock_sendall(line, json.dumps({"port": port}).encode() + b"\n")
                while await loop.sock_recv(line, 1024):
                    pass
            except OSError as error:
                log.debug("line broken", action="line_broken", error=str(error))
        log.warning("the parent has gone", action="parent_gone")
        stop.set()


class WorkerProcess:
    """Worker `index` of `count`; started again and again, one process at a time.

    `pid` and `port` are 0 while there is none; they are read by other threads.
    """

    def __init__(self, index: int, count: int, command: Sequence[str], environment: dict[str, str]) -> None:
        self.index, self._count = index, count
        self._command, self._environment = tuple(command), environment
        self.pid, self.port, self.restarts = 0, 0, 0
        begin("egress_worker_", worker=str(index))

    async def run_once(self, ending: Stop, patience: float) -> int:
        """Run one process to its end; its exit code. Raises OSError where none can be started.

        Once `ending` is set it is asked to drain, and killed after `patience` seconds.
        """
        mine, other = socket.socketpair()
        with mine:
            with other:
                process = await self.start(other)
            self.pid = process.pid
            log.info("worker started", action="worker_started", worker=self.index, pid=process.pid)
            reading = watched(self._read(mine), self._unreadable, name=f"line of worker {self.index}")
            try:
                return exit_code(await self._wait(process, ending, patience))
            finally:
                self.pid = self.port = 0
                await end(reading)

    async def start(self, line: socket.socket) -> asyncio.subprocess.Process:
        """Start the process, with `line` to its parent."""
        descriptor, nothing = line.fileno(), asyncio.subprocess.DEVNULL
        command = (*self._command, "--worker", str(WorkerPlace(self.index, self._count, descriptor)))
        # A session of its own: a terminal's Ctrl-C is for the parent, which passes it on once.
        return await asyncio.create_subprocess_exec(
            *command, stdin=nothing, env=self._environment, pass_fds=(descriptor,), start_new_session=True
        )

    async def _read(self, line: socket.socket) -> None:
        """Learn the port of the worker's monitor."""
        line.setblocking(False)
        loop, text = asyncio.get_running_loop(), b""
        while not text.endswith(b"\n"):
            if not (part := await loop.sock_recv(line, 1024)):
                return
            text += part
        self.port = int(json.loads(text)["port"])

    def _unreadable(self, error: Exception) -> None:
        """A worker that nobody can look into is ended, and started again."""
        told(error, "worker", f"line of worker {self.index}")
        self.send(signal.SIGTERM)

    async def _wait(self, process: asyncio.subprocess.Process, ending: Stop, patience: float) -> int:
        try:
            await first_of(process.wait(), ending.wait())
            if process.returncode is None:
                self.send(signal.SIGTERM)
                await first_of(process.wait(), seconds=patience)
            if process.returncode is None:
                log.error("worker does not end", action="worker_killed", worker=self.index, pid=self.pid)
                self.send(signal.SIGKILL)
            return await process.wait()
        finally:
            if process.returncode is None:
                self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal, if there is a process."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
