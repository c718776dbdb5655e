"""The steps of the demo up to the comparison: start, publish, kill, compact, wait."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError
from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient, connect
from common.settings.service import NatsSettings
from common.tasks import Stop
from infra.demo_compare import ArchivedChain, read_archive
from infra.demo_publish import Load, SitePublisher
from infra.demo_services import DemoService, run_command
from infra.demo_view import DemoView
from infra.demo_world import ADVISORIES, SAMPLE_SECONDS, TARGET, Services, World
from infra.facts import read_facts
from infra.fleet import describe

ARRIVAL_TIMEOUT = 60.0  # seconds without a further message at the centre
DARK = 1.5  # seconds between a kill and the next start
IDLE_SECONDS = 8.0  # until egress has noticed that a stream is idle, and its advisories are stored
TICK = 0.5  # seconds between two looks at the counts


@dataclass(slots=True)
class Run:
    """One run of the demo; `stack` closes the connections."""

    load: Load
    world: World
    view: DemoView
    clock: Clock
    stack: AsyncExitStack
    clients: dict[str, FloeClient] = field(default_factory=dict)
    publishers: list[SitePublisher] = field(default_factory=list)
    archive: dict[Chain, ArchivedChain] = field(default_factory=dict)
    publishing_seconds: float = 0.0
    published_until: float = 0.0

    @property
    def services(self) -> Services:
        assert self.world.services is not None, "start_floe comes first"
        return self.world.services

    async def start_servers(self) -> None:
        """Start the servers, connect to them, and prepare a publisher for each site."""
        facts = read_facts()
        self.world.start()
        for name, server in {**self.world.sites, "central": self.world.central}.items():
            self.clients[name] = await self._connect(server.url)
            self.view.say(f"nats-server {name}: {server.url}, process {server.pid}")
        self.view.say(f"bucket: {self.world.s3.endpoint_url}, process {self.world.s3.pid}")
        self.view.say(f"the fleet is made from this machine: {describe(facts)}")
        self.publishers = [
            SitePublisher(site, self.clients[site], self.load, facts, self.clock) for site in self.world.sites
        ]

    async def _connect(self, url: str) -> FloeClient:
        client = await connect(NatsSettings(url=(url,)), name="floe demo")
        self.stack.push_async_callback(client.aclose)
        return client

    async def start_floe(self) -> None:
        """Make the source streams and start egress at each site and ingress at the centre."""
        for publisher in self.publishers:
            await publisher.make_streams()
        for service in self.world.write_configs().all():
            service.start()
            self.view.say(f"floe {service.name}: started, configuration in {service.config.name}")

    async def publish_and_disturb(self) -> None:
        """Publish for the load's time; kill egress and ingress and compact meanwhile."""
        started, stop = self.clock.monotonic(), Stop()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            working = [group.create_task(publisher.run(stop)) for publisher in self.publishers]
            working += [group.create_task(self._disturb()), group.create_task(self._compact_meanwhile())]
            await asyncio.wait(working[: len(self.publishers)])
            self.published_until = self.clock.monotonic()
            self.publishing_seconds = self.published_until - started
            await asyncio.wait(working)
            watching.cancel()
        for publisher in self.publishers:
            self.view.say(f"{publisher.site}: {publisher.line()}")

    async def _disturb(self) -> None:
        """Kill each service in turn, then two at once; each is started again after a moment."""
        first, second = self.services.egress.values()
        turns: list[tuple[DemoService, ...]] = [
            (first,),
            (self.services.ingress,),
            (second, self.services.ingress),
        ]
        for turn in turns:
            await self.clock.sleep(self.load.seconds * 0.8 / len(turns) - DARK)
            for service in turn:
                service.check()
                self.view.say(f"kill -9: {service.name}, process {service.kill()}")
            await self.clock.sleep(DARK)
            for service in turn:
                service.start()
                self.view.say(f"started again: {service.name}")

    async def _compact_meanwhile(self) -> None:
        await self.clock.sleep(self.load.seconds * 0.4)
        self.view.say("floe compact: Spark merges the segments so far, while more of them arrive")
        await self.compact()

    async def compact(self) -> None:
        """Run `floe compact` once, to its end."""
        started = self.clock.monotonic()
        self.view.progress("floe compact runs on Spark")
        out = await run_command(
            self.world.folder, "compact", "floe", "compact", "-c", str(self.world.central_config), "--json"
        )
        self.view.say(f"floe compact: {_summary(out)} in {self.clock.monotonic() - started:.0f} s")

    async def wait_for_silence(self) -> None:
        """Return when the last advisories have come: every node has been silent for longer than its time."""
        over = self.published_until + SAMPLE_SECONDS + IDLE_SECONDS
        told, since = -1, self.clock.monotonic()
        while self.clock.monotonic() < max(over, since + IDLE_SECONDS):
            now = await self._told()
            if now != told:
                told, since = now, self.clock.monotonic()
            self.view.progress(f"{told:,} advisories")
            self.services.check()
            await self.clock.sleep(TICK)
        self.view.say(f"{told:,} advisories were published at the sites")

    async def _told(self) -> int:
        found = [await stream_info(self.clients[site], ADVISORIES) for site in self.world.sites]
        return sum(info.messages for info in found if info)

    async def drain_egress(self) -> None:
        """Stop egress at each site as a service manager would."""
        for service in self.services.egress.values():
            service.check()
            await service.drain()
            self.view.say(f"{service.name}: drained, exit code 0")

    async def wait_for_arrival(self) -> None:
        """Return when the target holds as many messages as the archive, or when nothing has come for long."""
        self.archive = await asyncio.to_thread(read_archive, self.world)
        rows = sum(len(chain.trace) for chain in self.archive.values())
        seen, since = -1, self.clock.monotonic()
        while (held := await self._held()) < rows:
            self.services.ingress.check()
            if held != seen:
                seen, since = held, self.clock.monotonic()
            elif self.clock.monotonic() - since > ARRIVAL_TIMEOUT:
                self.view.say(f"nothing has arrived for {ARRIVAL_TIMEOUT:.0f} s: {held:,} of {rows:,}")
                break
            self.view.progress(f"{held:,} of {rows:,} messages are at the centre")
            await self.clock.sleep(TICK)
        self.view.say(f"{held:,} of {rows:,} messages are at the centre")
        await self.services.ingress.drain()

    async def _watch(self) -> None:
        """Show how far publishing and arrival are, until cancelled."""
        while True:
            sent = sum(publisher.sent() for publisher in self.publishers)
            self.view.progress(f"{sent:,} published, {await self._held():,} at the centre")
            self.services.check()
            await self.clock.sleep(TICK)

    async def _held(self) -> int:
        info = await stream_info(self.clients["central"], TARGET)
        return info.messages if info else 0


def _summary(out: str) -> str:
    """What a compaction says of itself, as words. Raises FloeError where it does not."""
    try:
        report = json.loads(out)
        inputs = sum(merged["input_count"] for merged in report["merged"])
        return f"{inputs} segments merged into {len(report['merged'])}, {len(report['deleted'])} deleted"
    except (ValueError, KeyError, TypeError) as error:
        raise FloeError(
            f"floe compact --json: expected a report, found {out[:80]!r}", code="E-DEMO"
        ) from error
