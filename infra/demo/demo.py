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
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.chain import Chain
from common.clock import Clock
from common.errors import ConfigError, FloeError
from common.exits import INSTALL_ALL
from common.nats.api import stream_info
from common.nats.client import FloeClient, connect
from common.settings.service import NatsSettings
from common.tasks import Stop
from infra.demo.compare import (
    COLUMNS,
    ArchivedChain,
    DemoResult,
    count_advisories,
    count_with_spark,
    read_archive,
    read_chains,
    read_source,
    run_drill,
)
from infra.demo.lost import LOST_SITE, SiteRestore, create_reader, lose_and_restore
from infra.demo.world import (
    ADVISORIES,
    SAMPLE_SECONDS,
    STREAMS,
    TARGET_STREAM,
    DemoService,
    DemoWorld,
    PublishLoad,
    Services,
    SitePublisher,
    run_command,
)
from infra.emulator import describe, read_facts
from infra.local.nats import nats_server_binary
from infra.oracle import Trace

LINE_INTERVAL_S = 5.0  # if lines cannot be rewritten


class DemoView(Protocol):
    """The output of the demo."""

    def step(self, title: str, reason: str) -> None:
        """Begin the next numbered step. `reason`: the reason why it is worth seeing."""

    def print_line(self, text: str) -> None: ...

    def progress(self, text: str) -> None:
        """Show the progress of the step; replace the former text if that is possible."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table. The first column holds names."""


class ConsoleView:
    """The output for people, on stdout. `steps`: how many there will be."""

    def __init__(self, clock: Clock, steps: int) -> None:
        self._clock, self._steps, self._number = clock, steps, 0
        self._console = Console(highlight=False)
        self._progress_bar = Progress(
            SpinnerColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
        )
        self._line = self._progress_bar.add_task("starting", total=None)
        self._started = self._printed_at = clock.monotonic()

    def running(self) -> AbstractContextManager[object]:
        """Keep the moving line in place, and restore the terminal afterwards."""
        return self._progress_bar if self._console.is_terminal else nullcontext()

    def step(self, title: str, reason: str) -> None:
        self._number += 1
        self._console.print(f"\n[bold]Step {self._number} of {self._steps}: {title}[/bold]")
        self._console.print(f"  [dim]{reason}[/dim]", soft_wrap=True)
        self._update(title)

    def print_line(self, text: str) -> None:
        self._printed_at = self._clock.monotonic()
        self._console.print(f"  {self._printed_at - self._started:5.1f} s  {text}", markup=False, soft_wrap=True)

    def progress(self, text: str) -> None:
        self._update(text)
        if not self._console.is_terminal and self._clock.monotonic() - self._printed_at >= LINE_INTERVAL_S:
            self.print_line(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
        for index, name in enumerate(columns):
            table.add_column(name, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self._console.print()
        self._console.print(table)
        self._console.print()

    def _update(self, text: str) -> None:
        self._progress_bar.update(self._line, description=text)


class StepView:
    """The output of `--json`: steps only, on stderr, because stdout belongs to the result."""

    def __init__(self) -> None:
        self._number = 0

    def step(self, title: str, reason: str) -> None:  # noqa: ARG002
        self._number += 1
        sys.stderr.write(f"step {self._number}: {title}\n")

    def print_line(self, text: str) -> None: ...

    def progress(self, text: str) -> None: ...

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...


ARRIVAL_TIMEOUT_S = 60.0  # seconds without a further message at the centre
RESTART_DELAY_S = 1.5  # seconds between a kill and the next start
IDLE_S = 8.0  # until egress has noticed that a stream is idle, and its advisories are stored
VIEW_INTERVAL_S = 0.5  # seconds between two reads of the counts


STEP_COUNT = 10


def require_parts() -> None:
    """Raise ConfigError, with the command that installs it, if one of the parts is missing that the demo needs: PySpark
    (an extra), Java of the right version, and the wheel with nats-server. SeaweedFS reports its own absence.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError("floe demo: expected pyspark, found none", hint=INSTALL_ALL, code="E-DEMO")
    script = Path(__file__).parents[1] / "require_java.sh"
    check = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    if check.returncode:
        raise ConfigError(" ".join(check.stderr.split()), code="E-JAVA")
    try:
        nats_server_binary()
    except FileNotFoundError as error:
        raise ConfigError(str(error), hint=INSTALL_ALL, code="E-DEMO") from error


async def run_demo(load: PublishLoad, view: DemoView, clock: Clock, *, keep: bool = False) -> DemoResult:
    """Run the demo. `keep`: do not remove the folder with all data, logs and configurations.

    Raises FloeError if a part does not start, fails, or ends by itself.
    """
    require_parts()
    world = DemoWorld(keep=keep)
    try:
        async with AsyncExitStack() as stack:
            return await _steps(DemoRun(load, world, view, clock, stack), view, world)
    finally:
        with _ignore_interrupt():
            world.close()
        if keep:
            view.print_line(f"kept: {world.folder}")


async def _steps(run: DemoRun, view: DemoView, world: DemoWorld) -> DemoResult:
    started = run.clock.monotonic()
    view.step("start the servers", "Two sites and a centre with NATS JetStream, and an S3 server between them.")
    view.print_line(f"all data, logs and configurations are in {world.folder}")
    await run.start_servers()
    view.step("start Floe", "Egress archives the streams of each site; ingress publishes them at the centre.")
    await run.start_floe()
    view.step(
        "publish, and kill services meanwhile",
        "A fleet registers; one document per node in 10 s is kept. Floe is killed and restarted.",
    )
    await run.publish_and_kill()
    view.step("wait for silence", "The fleet has stopped: egress reports every node as silent.")
    await run.wait_for_silence()
    view.step("stop egress", "SIGTERM: open segments are closed and stored; no message is left behind.")
    await run.drain_egress()
    view.step("compact again", "Spark merges the rest and deletes the segments that the first run merged.")
    await run.compact("spark")
    view.step("wait for the centre", "Every archived message must arrive in the target stream, in order and once.")
    await run.wait_for_arrival()
    view.step("drill", "A feed is restored from its segments into a scratch stream and compared with them.")
    restored, wrong = await run_drill(world)
    view.print_line(restored)
    view.step(
        "lose a site",
        "The whole folder of its server is removed; floe restore restores streams and consumers as they were.",
    )
    sources = await run.read_sources(LOST_SITE)
    lost = await lose_and_restore(world, run.clients, run.connect, run.clock)
    view.print_line(lost.text)
    view.step("compare", "Source, archive and target, chain by chain, message by message, byte for byte.")
    result = await _compare(run, started, wrong, lost, sources)
    view.table(COLUMNS, result.rows())
    for text in (*result.summary_lines(), *result.comparison().examples, *result.problems):
        view.print_line(text)
    return result


async def _compare(
    run: DemoRun, started: float, wrong: list[str], lost: SiteRestore, sources: dict[Chain, Trace]
) -> DemoResult:
    readings, problems = await read_chains(run.clients, run.archive, sources, lost.restored)
    run.view.print_line(await count_advisories(run.clients))
    run.view.print_line("asking Spark to count the archive")
    counted, differences = await count_with_spark(run.world, readings, lost.archived_since)
    run.view.print_line(counted)
    return DemoResult(
        readings=tuple(readings),
        published=sum(publisher.sent() for publisher in run.publishers),
        publishing_seconds=run.publishing_seconds,
        seconds=run.clock.monotonic() - started,
        problems=(*wrong, *lost.problems, *problems, *differences),
    )


@contextmanager
def _ignore_interrupt() -> Iterator[None]:
    """Ignore a second Ctrl-C, which would leave servers running."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(slots=True)
class DemoRun:
    """One run of the demo; `stack` closes the connections."""

    load: PublishLoad
    world: DemoWorld
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
            self.view.print_line(f"nats-server {name}: {server.url}, process {server.pid}")
        self.view.print_line(f"bucket, {self.world.s3.name}: {self.world.s3.endpoint_url}, process {self.world.s3.pid}")
        self.view.print_line(f"the fleet is modelled on this machine: {describe(facts)}")
        self.publishers = [
            SitePublisher(site, self.clients[site], self.load, facts, self.clock) for site in self.world.sites
        ]

    async def connect(self, url: str) -> FloeClient:
        client = await connect(NatsSettings(url=(url,)), name="floe demo")
        self.stack.push_async_callback(client.aclose)
        return client

    async def start_floe(self) -> None:
        for publisher in self.publishers:
            await publisher.create_streams()
        for service in self.world.write_configs().all():
            service.start()
            self.view.print_line(f"floe {service.name}: started, configuration in {service.config.name}")

    async def publish_and_kill(self) -> None:
        started, stop = self.clock.monotonic(), Stop()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            working = [group.create_task(publisher.run(stop)) for publisher in self.publishers]
            working += [
                group.create_task(self._kill_and_restart()),
                group.create_task(self._compact_while_publishing()),
            ]
            await asyncio.wait(working[: len(self.publishers)])
            self.published_until = self.clock.monotonic()
            self.publishing_seconds = self.published_until - started
            await asyncio.wait(working)
            watching.cancel()
        for publisher in self.publishers:
            self.view.print_line(f"{publisher.site}: {publisher.summary()}")
        await create_reader(self.clients[LOST_SITE], self.clock)

    async def _kill_and_restart(self) -> None:
        first, second = self.services.egress.values()
        turns: list[tuple[DemoService, ...]] = [(first,), (self.services.ingress,), (second, self.services.ingress)]
        for turn in turns:
            await self.clock.sleep(self.load.seconds * 0.8 / len(turns) - RESTART_DELAY_S)
            for service in turn:
                service.raise_if_ended()
                self.view.print_line(f"kill -9: {service.name}, process {service.kill()}")
            await self.clock.sleep(RESTART_DELAY_S)
            for service in turn:
                service.start()
                self.view.print_line(f"restarted: {service.name}")

    async def _compact_while_publishing(self) -> None:
        await self.clock.sleep(self.load.seconds * 0.4)
        self.view.print_line("floe compact --engine local: merges the segments so far, while more arrive")
        await self.compact("local")

    async def compact(self, engine: str) -> None:
        started = self.clock.monotonic()
        self.view.progress(f"floe compact --engine {engine} runs")
        command = ("floe", "compact", "-c", str(self.world.central_config), "--engine", engine, "--json")
        out = await run_command(self.world.folder, "compact", *command)
        self.view.print_line(f"floe compact: {_summary(out)} in {self.clock.monotonic() - started:.0f} s")

    async def wait_for_silence(self) -> None:
        """Wait for the last advisories: every node has been silent for longer than `SAMPLE_SECONDS`."""
        over = self.published_until + SAMPLE_SECONDS + IDLE_S
        count, since = -1, self.clock.monotonic()
        while self.clock.monotonic() < max(over, since + IDLE_S):
            now = await self._count_advisories()
            if now != count:
                count, since = now, self.clock.monotonic()
            self.view.progress(f"{count:,} advisories")
            self.services.raise_if_ended()
            await self.clock.sleep(VIEW_INTERVAL_S)
        self.view.print_line(f"{count:,} advisories were published at the sites")

    async def _count_advisories(self) -> int:
        found = [await stream_info(self.clients[site], ADVISORIES) for site in self.world.sites]
        return sum(info.messages for info in found if info)

    async def read_sources(self, site: str) -> dict[Chain, Trace]:
        return {(chain := Chain(site, stream)): await read_source(self.clients, chain) for stream in STREAMS}

    async def drain_egress(self) -> None:
        for service in self.services.egress.values():
            service.raise_if_ended()
            await service.drain()
            self.view.print_line(f"{service.name}: drained, exit code 0")

    async def wait_for_arrival(self) -> None:
        """Wait until the target holds as many messages as the archive, or none has come for `ARRIVAL_TIMEOUT_S`."""
        self.archive = await asyncio.to_thread(read_archive, self.world)
        rows = sum(len(chain.trace) for chain in self.archive.values())
        seen, since = -1, self.clock.monotonic()
        while (target_messages := await self._target_messages()) < rows:
            self.services.ingress.raise_if_ended()
            if target_messages != seen:
                seen, since = target_messages, self.clock.monotonic()
            elif self.clock.monotonic() - since > ARRIVAL_TIMEOUT_S:
                self.view.print_line(
                    f"no message has arrived for {ARRIVAL_TIMEOUT_S:.0f} s: {target_messages:,} of {rows:,}"
                )
                break
            self.view.progress(f"{target_messages:,} of {rows:,} messages are at the centre")
            await self.clock.sleep(VIEW_INTERVAL_S)
        self.view.print_line(f"{target_messages:,} of {rows:,} messages are at the centre")
        await self.services.ingress.drain()

    async def _watch(self) -> None:
        while True:
            sent = sum(publisher.sent() for publisher in self.publishers)
            self.view.progress(f"{sent:,} published, {await self._target_messages():,} at the centre")
            self.services.raise_if_ended()
            await self.clock.sleep(VIEW_INTERVAL_S)

    async def _target_messages(self) -> int:
        info = await stream_info(self.clients["central"], TARGET_STREAM)
        return info.messages if info else 0


def _summary(out: str) -> str:
    """Return the report of a compaction in words. Raises FloeError if it cannot be read."""
    try:
        report = json.loads(out)
        inputs = sum(merged["input_count"] for merged in report["merged"])
        return f"{inputs} segments merged into {len(report['merged'])}, {len(report['deleted'])} deleted"
    except (ValueError, KeyError, TypeError) as error:
        raise FloeError(f"floe compact --json: expected a report, found {out[:80]!r}", code="E-DEMO") from error
