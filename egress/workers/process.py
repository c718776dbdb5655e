"""A worker process: the parent's side, the worker's side, and the socket between them."""

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

log = get_logger(__name__)


FINAL = (78, 77, 2)  # a restart would only repeat these errors: configuration, credentials, the command line


def exit_code(returned: int) -> int:
    """Return the shell's exit code. `returned` below 0: a signal ended the process; the code is 128 plus its number."""
    return 128 - returned if returned < 0 else returned


def worst(codes: Iterable[int]) -> int:
    """Return the code that matters most to an operator; 0 if `codes` is empty."""
    ranks = {0: 0, LATER: 1, **dict.fromkeys(FINAL, 3)}
    return max(codes, key=lambda code: (ranks.get(code, 2), code), default=0)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The worker's side: it is `index` of `count`; its parent holds the other end of the socket `descriptor`."""

    index: int
    count: int
    descriptor: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `INDEX/COUNT/DESCRIPTOR`. Raises UsageError for anything else; only the parent uses the option."""
        try:
            index, count, descriptor = map(int, text.split("/"))
        except ValueError:
            raise UsageError(f"--worker: expected INDEX/COUNT/DESCRIPTOR, found {text!r:.40}") from None
        return cls(index, count, descriptor)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}/{self.descriptor}"

    async def watch(self, port: int, stop: Stop) -> None:
        """Send the monitor's `port` to the parent; set `stop` when the parent has ended."""
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
    """The parent's side of worker `index` of `count`. It runs one process at a time, as often as `run_once` is called.

    `pid` and `port` are 0 while they are unknown. Other threads read them.
    """

    def __init__(self, index: int, count: int, command: Sequence[str], environment: dict[str, str]) -> None:
        self.index, self._count = index, count
        self._command, self._environment = tuple(command), environment
        self.pid, self.port, self.restarts = 0, 0, 0
        begin("egress_worker_", worker=str(index))

    async def run_once(self, ending: Stop, patience: float) -> int:
        """Run one process until it ends, and return its exit code. Raises OSError if it cannot be started.

        Once `ending` is set, it receives SIGTERM and drains; after `patience` seconds it is killed.
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
        descriptor, nothing = line.fileno(), asyncio.subprocess.DEVNULL
        command = (*self._command, "--worker", str(WorkerPlace(self.index, self._count, descriptor)))
        # In a session of its own: a terminal's Ctrl-C goes to the parent only, which signals its workers once.
        return await asyncio.create_subprocess_exec(
            *command, stdin=nothing, env=self._environment, pass_fds=(descriptor,), start_new_session=True
        )

    async def _read(self, line: socket.socket) -> None:
        line.setblocking(False)
        loop, text = asyncio.get_running_loop(), b""
        while not text.endswith(b"\n"):
            if not (part := await loop.sock_recv(line, 1024)):
                return
            text += part
        self.port = int(json.loads(text)["port"])

    def _unreadable(self, error: Exception) -> None:
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
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
