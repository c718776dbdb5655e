"""The parent process of several workers: starts them, shows them, passes signals on."""

from __future__ import annotations

import importlib.util
import os
import random
import sys

from common.clock import Clock, SystemClock
from common.errors import FloeError
from common.service.exits import is_debug
from common.service.logs import flush
from common.service.monitor import Health, Monitor
from common.service.process import exit_at_once, hangups, stop_on_signals
from common.settings.root import Settings
from common.tasks import end, orphaned, watched
from egress.partition import require_feeds
from egress.workers.pages import WorkerPages
from egress.workers.process import WorkerProcess
from egress.workers.supervisor import Crew

BEAT = 1.0  # seconds


def command(config: str) -> list[str]:
    """What runs one worker: this Python, this Floe, the same file."""
    # As a script its own folder comes first, whatever the folder is that the parent was started in.
    found = importlib.util.find_spec("floe")
    if found is None or found.origin is None:
        raise FloeError("floe: expected the command among the modules, found none", code="E-UNEXPECTED")
    return [sys.executable, found.origin, "egress", "run", "-c", config]


async def run_workers(config: str, settings: Settings, count: int) -> int:
    """Run `count` workers of the configuration file `config` until a signal; the worst of their exit codes.

    The first signal has them drain, the second kills them.
    """
    require_feeds(settings.egress.feeds)
    clock = SystemClock()
    environment = {**os.environ, **({"FLOE_DEBUG": "1"} if is_debug() else {})}
    workers = [WorkerProcess(index, count, command(config), environment) for index in range(count)]
    crew = Crew(workers, settings.egress.shutdown_timeout, clock, random.SystemRandom())
    health = Health(clock)
    monitor = Monitor(settings.egress.monitor.listen, health, pages=WorkerPages(health, workers))
    monitor.start()
    try:
        return await _run(crew, health, clock)
    finally:
        monitor.close()


async def _run(crew: Crew, health: Health, clock: Clock) -> int:
    def kill(number: int) -> None:
        crew.kill()
        flush()
        exit_at_once(number)

    hangups.append(crew.hang_up)
    async with stop_on_signals(second=kill) as stop:
        beating = watched(_beat(health, clock), orphaned, name="beat")
        try:
            return await crew.run(stop)
        finally:
            hangups.remove(crew.hang_up)
            await end(beating)


async def _beat(health: Health, clock: Clock) -> None:
    while True:
        health.beat()
        await clock.sleep(BEAT)
