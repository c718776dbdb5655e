"""Egress as a process of its own over a bench's bucket, to be killed, paused and drained by tests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from common import logs
from common.cli import run_async
from common.settings.root import Settings
from egress.service import serve
from infra.local.process import spawn
from tests.support.basics import PATIENCE, unique
from tests.support.egress import QUICK, Bench

ROOT = Path(__file__).parents[2]
FEED = {"segment": {"max_messages": 100, "max_age": "1s"}}


class Process:
    """One egress process over the bench's bucket."""

    def __init__(self, bench: Bench, stream: str, *, failpoints: str = "", **egress: Any) -> None:
        self._bench = bench
        self.log = bench.root / f"{unique('egress')}.log"
        config = self.log.with_suffix(".yaml")
        config.write_text(yaml.safe_dump(self._config(stream, egress)))
        with self.log.open("wb") as log:
            self.process = spawn(
                [sys.executable, "-m", "tests.support.egress_process", str(config)],
                cwd=ROOT,
                env={**os.environ, "FLOE_FAILPOINTS": failpoints},
                stdout=log,
                stderr=log,
            )

    def _config(self, stream: str, egress: dict[str, Any]) -> dict[str, Any]:
        feed = {"stream": stream, **FEED}
        document = self._bench.document(feed, **{"monitor": {"listen": ""}, "lease_ttl": "1s", **egress})
        return {**document, "log": {"level": "debug", "format": "text"}}

    def send(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    async def ended(self, seconds: float = PATIENCE) -> int:
        """Its exit code; negative for a signal."""
        return await asyncio.to_thread(self.process.wait, seconds)

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await self.ended()

    async def drain(self) -> None:
        """SIGTERM; fails unless it ends with 0."""
        self.send(signal.SIGTERM)
        code = await self.ended()
        assert code == 0, f"exit code {code}\n{self.log.read_text()[-4000:]}"


@contextmanager
def processes() -> Iterator[list[Process]]:
    """A list of processes, whatever is left of them killed at the end."""
    started: list[Process] = []
    try:
        yield started
    finally:
        for each in started:
            each.send(signal.SIGCONT)
            each.send(signal.SIGKILL)
            each.process.wait(PATIENCE)


if __name__ == "__main__":
    # Not through the checks of files: a test may set what users cannot yet.
    settings = Settings.model_validate(yaml.safe_load(Path(sys.argv[1]).read_text()))
    logs.configure(settings.log.level, settings.log.format, instance=settings.instance)
    sys.exit(run_async(serve(settings, tuning=QUICK)))
