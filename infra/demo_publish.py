"""What the demo publishes: a fleet at each site, and bursts of awkward messages beside it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from common.clock import Clock, wait_for
from common.jetstream.client import FloeClient
from common.jetstream.streams import create_stream
from infra.awkward import Report, publish_awkward
from infra.demo_world import AWKWARD, NODES, STREAMS
from infra.emulator import Emulator, Pace
from infra.facts import Facts
from infra.fleet import Fleet

BURSTS = 4


@dataclass(frozen=True, slots=True)
class Load:
    """How much is published at each site. `rate`: documents per second; `awkward`: messages in all."""

    seconds: float
    seed: int
    rate: float = 400.0
    nodes: int = 500
    awkward: int = 600


@dataclass(slots=True)
class SitePublisher:
    """Publishes at one site. `reports`: one for each burst of awkward messages."""

    site: str
    client: FloeClient
    load: Load
    facts: Facts
    clock: Clock
    emulator: Emulator | None = None
    reports: list[Report] = field(default_factory=list)

    async def make_streams(self) -> None:
        """Make the site's streams."""
        for config in STREAMS.values():
            await create_stream(self.client, config)

    async def run(self, stop: asyncio.Event) -> None:
        """Publish into both streams until the load's time is over or `stop` is set."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._documents(stop))
            group.create_task(self._bursts(stop))

    def sent(self) -> int:
        """Messages published so far, without those of the burst under way."""
        documents = self.emulator.progress.published.sent if self.emulator else 0
        return documents + sum(report.published.sent for report in self.reports)

    def line(self) -> str:
        """What was published, in one line."""
        documents = self.emulator.progress.published.line() if self.emulator else "none"
        kinds = {kind for report in self.reports for kind in report.stored}
        stored = sum(report.published.stored for report in self.reports)
        deleted = sum(len(report.deleted) for report in self.reports)
        return (
            f"documents: {documents}; awkward: {stored} stored of {len(kinds)} kinds, {deleted} deleted again"
        )

    async def _documents(self, stop: asyncio.Event) -> None:
        load = self.load
        fleet = Fleet(self.facts, seed=self._seed(), nodes=load.nodes)
        pace = Pace(load.nodes, rate=load.rate, duration=load.seconds)
        self.emulator = Emulator(self.client, fleet, pace, self.clock, subject=f"{NODES.lower()}.{{sender}}")
        await self.emulator.run(stop)

    async def _bursts(self, stop: asyncio.Event) -> None:
        rng = random.Random(self._seed())
        for burst in range(BURSTS):
            root = f"{AWKWARD.lower()}.b{burst}"
            count = self.load.awkward // BURSTS
            self.reports.append(
                await publish_awkward(self.client, AWKWARD, root, rng, count, clock=self.clock)
            )
            if burst == BURSTS - 1 or await wait_for(stop, self.load.seconds / BURSTS):
                return

    def _seed(self) -> int:
        return random.Random(f"{self.load.seed} {self.site}").getrandbits(32)
