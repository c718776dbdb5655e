"""Floe's commands as processes that a test starts, kills, pauses and drains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from infra.local.process import spawn
from tests.support import canaries
from tests.support.basics import PATIENCE

ROOT = Path(__file__).parents[2]


class Service:
    """One `floe … run` process with a log file; started again after every kill. `tree`: the checkout that it runs."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *command: str,
        env: Mapping[str, str] | None = None,
        tree: Path = ROOT,
        module: str = "floe",
    ) -> None:
        self.name, self._env, self._tree = name, env or {}, tree
        self._command = [sys.executable, "-m", module, *command]
        self.log = folder / f"{name}.log"
        self.log_size = 0  # at its last start
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **env: str) -> Service:
        """Start it; nothing if it runs. `env`: for this time only."""
        if not self.runs():
            self.log_size = self.log.stat().st_size if self.log.exists() else 0
            environ = {**os.environ, "PYTHONUNBUFFERED": "1", **self._env, **env}
            with self.log.open("ab") as log:
                self._process = spawn(self._command, stdout=log, stderr=log, cwd=self._tree, env=environ)
        return self

    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the last start. Raises RuntimeError before the first."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send the signal, if the process runs."""
        if self.runs() and self._process:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it (SIGKILL); return when it is gone."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGKILL)
        self.wait(PATIENCE)

    def drain(self, seconds: float = PATIENCE, *, is_known_to_work: bool = False) -> int:
        """Send SIGTERM and return the exit code. Waits first for a log line since its last start, unless it
        `is_known_to_work`: before that, SIGTERM would just end it. Fails if it takes longer than `seconds`.
        """
        self.send(signal.SIGCONT)
        deadline = time.monotonic() + (0 if is_known_to_work else PATIENCE)
        while self.runs() and self.log.stat().st_size <= self.log_size and time.monotonic() < deadline:
            time.sleep(0.05)
        self.send(signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        """Return its exit code once it ends; 0 if it was never started."""
        code = self._process.wait(seconds) if self._process else 0
        canaries.check(self.log.read_text(errors="replace") if self.log.exists() else "", self.name)
        return code

    def tail(self, lines: int = 25) -> str:
        """Return the end of its log, for the message of a failed assertion."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"--- {self.name}\n" + "\n".join(text.splitlines()[-lines:])
