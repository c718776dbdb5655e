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
from common.exits import EXIT_RETRY_LATER
from common.logs import get_logger
from common.metrics import show_zeros
from common.tasks import Stop, cancel, first_of, record_unexpected, spawn

log = get_logger(__name__)


FATAL_EXIT_CODES = (78, 77, 2)  # a restart would only repeat these errors: configuration, credentials, the command line


def shell_exit_code(returncode: int) -> int:
    """Return the shell's exit code. `returncode` below 0: a signal ended the process; it is 128 plus its number."""
    return 128 - returncode if returncode < 0 else returncode


def worst_exit_code(codes: Iterable[int]) -> int:
    """Return the code that matters most to an operator; 0 if `codes` is empty."""
    ranks = {0: 0, EXIT_RETRY_LATER: 1, **dict.fromkeys(FATAL_EXIT_CODES, 3)}
    return max(codes, key=lambda code: (ranks.get(code, 2), code), default=0)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
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

    async def watch_parent(self, port: int, stop: Stop) -> None:
        """Send the monitor's `port` to the parent; set `stop` when the parent has ended."""
        with socket.socket(fileno=self.descriptor) as connection:
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            try:
                await loop.sock_sendall(connection, json.dumps({"port": port}).encode() + b"\n")
                while await loop.sock_recv(connection, 1024):
                    pass
            except OSError as error:
                log.debug("parent socket closed", action="parent_socket_closed", error=str(error))
        log.warning("parent lost", action="parent_lost")
        stop.set()


class WorkerProcess:
    """The parent's side of worker `index` of `count`. It runs one process at a time, as often as `run_once` is called.

    `pid` and `port` are 0 while they are unknown. Other threads read them.
    """

    def __init__(self, index: int, count: int, command: Sequence[str], environment: dict[str, str]) -> None:
        self.index, self._count = index, count
        self._command, self._environment = tuple(command), environment
        self.pid, self.port, self.restarts = 0, 0, 0
        show_zeros("egress_worker_", worker=str(index))

    async def run_once(self, stop: Stop, kill_after_s: float) -> int:
        """Run one process until it ends, and return its exit code. Raises OSError if it cannot be started.

        Once `stop` is set, it receives SIGTERM and drains; after `kill_after_s` seconds it is killed.
        """
        parent_end, worker_end = socket.socketpair()
        with parent_end:
            with worker_end:
                process = await self.start(worker_end)
            self.pid = process.pid
            log.info("worker started", action="worker_started", worker=self.index, pid=process.pid)
            reading = spawn(self._read_port(parent_end), self._on_read_error, name=f"line of worker {self.index}")
            try:
                return shell_exit_code(await self._wait_for_end(process, stop, kill_after_s))
            finally:
                self.pid = self.port = 0
                await cancel(reading)

    async def start(self, connection: socket.socket) -> asyncio.subprocess.Process:
        descriptor, devnull = connection.fileno(), asyncio.subprocess.DEVNULL
        command = (*self._command, "--worker", str(WorkerIdentity(self.index, self._count, descriptor)))
        # In a session of its own: a terminal's Ctrl-C goes to the parent only, which signals its workers once.
        return await asyncio.create_subprocess_exec(
            *command, stdin=devnull, env=self._environment, pass_fds=(descriptor,), start_new_session=True
        )

    async def _read_port(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        loop, text = asyncio.get_running_loop(), b""
        while not text.endswith(b"\n"):
            if not (part := await loop.sock_recv(connection, 1024)):
                return
            text += part
        self.port = int(json.loads(text)["port"])

    def _on_read_error(self, error: Exception) -> None:
        record_unexpected(error, "worker", f"line of worker {self.index}")
        self.send_signal(signal.SIGTERM)

    async def _wait_for_end(self, process: asyncio.subprocess.Process, stop: Stop, kill_after_s: float) -> int:
        try:
            await first_of(process.wait(), stop.wait())
            if process.returncode is None:
                self.send_signal(signal.SIGTERM)
                await first_of(process.wait(), seconds=kill_after_s)
            if process.returncode is None:
                log.error("worker killed", action="worker_killed", worker=self.index, pid=self.pid)
                self.send_signal(signal.SIGKILL)
            return await process.wait()
        finally:
            if process.returncode is None:
                self.send_signal(signal.SIGKILL)

    def send_signal(self, signal_number: int) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)
