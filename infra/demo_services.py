"""Floe's commands as processes that the demo starts, kills and stops by their ids."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from common.errors import FloeError
from infra.local.tether import spawn

PROJECT = Path(__file__).parents[1]  # where floe.py stands, in a checkout and when installed
STOP_TIMEOUT = 30.0  # seconds until a drain has taken too long


class DemoService:
    """One long-running `floe …` command with a log file of its own."""

    def __init__(self, folder: Path, name: str, config: Path, *command: str) -> None:
        self.name, self.config = name, config
        self._command = ("floe", *command, "-c", str(config))
        self.log = folder / f"{name.replace(' ', '-')}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; after a kill or a stop, again."""
        with self.log.open("ab") as log:
            self._process = _spawn(self._command, stdout=log, stderr=log)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raises FloeError with the end of the log where the process has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise FloeError(
                f"{self.name}: expected to run, found exit code {self._process.returncode}: {tail(self.log)}",
                code="E-DEMO",
            )

    def kill(self) -> int:
        """SIGKILL, as when the power fails; the id of the process that is gone."""
        if self._process is None:
            return 0
        pid = _kill(self._process)
        self._process = None
        return pid

    async def drain(self) -> None:
        """SIGTERM, and wait until its work is done. Raises FloeError where it takes too long or fails."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.terminate()
        try:
            code = await asyncio.to_thread(process.wait, STOP_TIMEOUT)
        except BaseException:
            _kill(process)
            raise
        if code:
            raise FloeError(
                f"{self.name}: expected exit code 0 after SIGTERM, found {code}: {tail(self.log)}",
                code="E-DEMO",
            )


async def run_command(folder: Path, name: str, *command: str) -> str:
    """Run one `floe …` command to its end; what it wrote to stdout. Raises FloeError where it fails.

    Cancelling kills the process.
    """
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("ab") as stderr:
        process = _spawn(command, stdout=subprocess.PIPE, stderr=stderr)
        try:
            out = await _communicate(process)
        finally:
            _kill(process)
    if process.returncode:
        raise FloeError(
            f"{name}: expected exit code 0, found {process.returncode}: {tail(log)}", code="E-DEMO"
        )
    return out.decode()


async def _communicate(process: subprocess.Popen[bytes]) -> bytes:
    """The process's output; read in a thread that ends with the process."""
    out, _ = await asyncio.to_thread(process.communicate)
    return out


def _spawn(
    command: tuple[str, ...], *, stdout: int | IO[bytes], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    return spawn(
        [sys.executable, "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=PROJECT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # Ctrl-C is for the demo, which stops its processes in order
    )


def _kill(process: subprocess.Popen[bytes]) -> int:
    """SIGKILL to the process and what it started itself (Spark's JVM); its id. Nothing where it has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.pid


def tail(log: Path, lines: int = 5) -> str:
    """The end of a log, on one line; empty where there is none."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return " | ".join(text.splitlines()[-lines:])
