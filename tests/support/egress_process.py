"""Egress as a process of its own over a bench's bucket, to be killed, paused and drained by tests."""

import asyncio
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
from tests.scenarios.processes import Service
from tests.support.basics import PATIENCE, unique
from tests.support.egress import QUICK, Bench

FEED = {"segment": {"max_messages": 100, "max_age": "1s"}}


class Process(Service):
    """One egress process over the bench's bucket."""

    def __init__(self, bench: Bench, stream: str, *, failpoints: str = "", **egress: Any) -> None:
        name, feed = unique("egress"), {"stream": stream, **FEED}
        document = bench.document(feed, **{"monitor": {"listen": ""}, "lease_ttl": "1s", **egress})
        config = bench.root / f"{name}.yaml"
        config.write_text(yaml.safe_dump({**document, "log": {"level": "debug", "format": "text"}}))
        env = {"FLOE_FAILPOINTS": failpoints}
        super().__init__(bench.root, name, str(config), env=env, module="tests.support.egress_process")
        self.start()

    async def ended(self) -> int:
        """Return its exit code; negative for a signal."""
        return await asyncio.to_thread(self.wait, PATIENCE)

    async def drained(self) -> None:
        """Send SIGTERM; fail unless it ends with 0."""
        code = await asyncio.to_thread(self.drain)
        assert code == 0, f"exit code {code}\n{self.tail()}"


@contextmanager
def processes() -> Iterator[list[Process]]:
    """Yield a list of processes; the remaining ones are killed at the end."""
    started: list[Process] = []
    try:
        yield started
    finally:
        for each in started:
            each.kill()


if __name__ == "__main__":
    # Not through the checks of files: a test may set values that users cannot yet.
    settings = Settings.model_validate(yaml.safe_load(Path(sys.argv[1]).read_text()))
    logs.configure(settings.log.level, settings.log.format, instance=settings.instance)
    sys.exit(run_async(serve(settings, tuning=QUICK)))
