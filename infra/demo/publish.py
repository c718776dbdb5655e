"""The publishers of the demo: a fleet at each site, and bursts of awkward messages beside it."""

import asyncio
import random
from dataclasses import dataclass, field

from common.clock import Clock
from common.nats.api import create_stream
from common.nats.client import FloeClient
from common.tasks import Stop, wait_for
from infra.awkward import AwkwardReport, publish_awkward
from infra.demo.world import AWKWARD, NODES, STREAMS
from infra.emulator import Emulator, PublishSchedule
from infra.fleet import Fleet, MachineFacts

AWKWARD_BURSTS = 4
SILENT_NODES = 10  # nodes that fall silent before the others do
FIRST_SILENT_NODE = 90_000  # of the first leaver; the numbers of the fleet are smaller


class SilentFleet(Fleet):
    """Nodes that fall silent early; their names differ from those of the fleet."""

    def sender(self, node: int) -> str:
        return super().sender(node + FIRST_SILENT_NODE)


@dataclass(frozen=True, slots=True)
class PublishLoad:
    """The load at each site. `rate`: documents per second; `awkward`: awkward messages in all."""

    seconds: float
    seed: int
    rate: float = 400.0
    nodes: int = 500
    awkward: int = 600


@dataclass(slots=True)
class SitePublisher:
    """The publisher of one site. `reports`: one for each burst of awkward messages."""

    site: str
    client: FloeClient
    load: PublishLoad
    facts: MachineFacts
    clock: Clock
    emulators: list[Emulator] = field(default_factory=list)
    reports: list[AwkwardReport] = field(default_factory=list)

    async def create_streams(self) -> None:
        for config in STREAMS.values():
            await create_stream(self.client, config)

    async def run(self, stop: Stop) -> None:
        """Publish into both streams until the load's time is over or `stop` is set."""
        async with asyncio.TaskGroup() as group:
            for emulator in self._make_emulators():
                group.create_task(emulator.run(stop))
            group.create_task(self._bursts(stop))

    def sent(self) -> int:
        """Return the number of messages published so far, without those of the current burst."""
        documents = sum(emulator.published.sent for emulator in self.emulators)
        return documents + sum(report.published.sent for report in self.reports)

    def summary(self) -> str:
        documents = self.emulators[0].published.summary() if self.emulators else "none"
        kinds = {kind for report in self.reports for kind in report.stored}
        stored = sum(report.published.stored for report in self.reports)
        deleted = sum(len(report.deleted) for report in self.reports)
        return f"documents: {documents}; awkward: {stored} stored of {len(kinds)} kinds, {deleted} deleted again"

    def _make_emulators(self) -> list[Emulator]:
        load = self.load
        fleet = Fleet(self.facts, seed=self._seed(), nodes=load.nodes)
        silent_fleet = SilentFleet(self.facts, seed=self._seed(), nodes=SILENT_NODES)
        self.emulators = [
            self._emulator(fleet, PublishSchedule(load.nodes, rate=load.rate, duration=load.seconds)),
            self._emulator(silent_fleet, PublishSchedule(SILENT_NODES, rate=SILENT_NODES, duration=load.seconds / 2)),
        ]
        return self.emulators

    def _emulator(self, fleet: Fleet, schedule: PublishSchedule) -> Emulator:
        return Emulator([self.client], fleet, schedule, self.clock, subject=f"{NODES.lower()}.{{sender}}")

    async def _bursts(self, stop: Stop) -> None:
        rng = random.Random(self._seed())
        for burst in range(AWKWARD_BURSTS):
            root = f"{AWKWARD.lower()}.b{burst}"
            count = self.load.awkward // AWKWARD_BURSTS
            self.reports.append(await publish_awkward(self.client, AWKWARD, root, rng, count, clock=self.clock))
            if burst == AWKWARD_BURSTS - 1 or await wait_for(stop, self.load.seconds / AWKWARD_BURSTS):
                return

    def _seed(self) -> int:
        return random.Random(f"{self.load.seed} {self.site}").getrandbits(32)
