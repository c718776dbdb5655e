"""`floe emulate`: connect, publish as a fleet until told to stop, compare with what was stored."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from common.clock import Clock, SystemClock
from common.jetstream.client import connect
from common.service.logs import get_logger
from common.service.process import stop_on_signals
from common.settings.service import NatsSettings
from common.tasks import Stop, wait_for
from infra.emulator import Emulator, PublishSchedule, check_stored, open_stream
from infra.facts import read_facts
from infra.fleet import Fleet, Sizes, describe

SECONDS_BETWEEN_LINES = 10.0

log = get_logger("infra.emulate")


@dataclass(frozen=True, slots=True)
class Emulation:
    """What to publish, where and for how long. Sizes in bytes, times in seconds."""

    settings: NatsSettings
    stream: str
    subject: str
    create: bool
    nodes: int
    interval: float
    rate: float | None
    min_size: int
    max_size: int
    count: int | None
    duration: float | None
    seed: int

    def pace(self) -> PublishSchedule:
        return PublishSchedule(self.nodes, self.interval, self.rate, self.count, self.duration)


async def run_emulation(emulation: Emulation, clock: Clock | None = None) -> dict[str, object]:
    """Publish until the pace is over or a signal comes; the result as a document, its sentence under `line`.

    Raises DataError where the stream does not hold what was sent, ConfigError where it does not exist.
    """
    clock, facts = clock or SystemClock(), read_facts()
    pace = emulation.pace()
    sizes = Sizes(emulation.min_size, emulation.max_size)
    fleet = Fleet(facts, seed=emulation.seed, nodes=emulation.nodes, interval=emulation.interval, sizes=sizes)
    async with aclosing(await connect(emulation.settings, name="floe emulate", clock=clock)) as client:
        emulator = Emulator(client, fleet, pace, clock, subject=emulation.subject)
        before = await open_stream(client, emulation.stream, emulation.subject, create=emulation.create)
        log.info(
            "emulating", action="emulate", machine=describe(facts), nodes=fleet.nodes, seed=emulation.seed
        )
        await _run(emulator)
        await check_stored(client, before, emulator.progress.published)
    return _result(emulation, emulator)


async def _run(emulator: Emulator) -> None:
    """Run until it is over or a signal comes, with a line now and then."""
    async with stop_on_signals() as stop, asyncio.TaskGroup() as group:
        watching = group.create_task(_watch(emulator, stop))
        await emulator.run(stop)
        watching.cancel()


async def _watch(emulator: Emulator, stop: Stop) -> None:
    while not await wait_for(stop, SECONDS_BETWEEN_LINES):
        progress = emulator.progress
        log.info(progress.published.line(), action="emulating", per_second=round(progress.rate()))


def _result(emulation: Emulation, emulator: Emulator) -> dict[str, object]:
    published, elapsed = emulator.progress.published, emulator.progress.elapsed
    pace = f"in {elapsed:.1f} s, {emulator.progress.rate():,.0f} a second"
    return {
        "line": f"{published.line()} {pace}, seed {emulation.seed}",
        "stream": emulation.stream,
        "seed": emulation.seed,
        "sent": published.sent,
        "stored": published.stored,
        "bytes": published.bytes,
        "seconds": round(elapsed, 3),
    }
