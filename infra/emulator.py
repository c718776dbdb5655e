"""The fleet emulator: publishes the documents of a simulated fleet into a stream, and checks that they were stored.

A document has the form of a Choria server's registration: `sender`, `timestamp`, agents, classes, facts
and status. Everything in it is varied from the facts of one real machine, and is the same again for the same
seed, node, turn and time. Nodes of one role and variant share their packages and mounts, as
machines of one role do; names, addresses, sizes and counters are each node's own. At intervals a node is
upgraded: its variant, and with it the size of its document, changes.

Facts are read from /proc, /etc and the package database. Facts that a system does not have are left out (an
empty section), never invented. Processes are not read: their command lines and environments may hold secrets.
"""

import asyncio
import json
import logging
import os
import platform
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from common.cli import check_stream_name
from common.clock import Clock, SystemClock
from common.errors import ConfigError, DataError, UsageError
from common.logs import get_logger
from common.nats.api import StreamInfo, create_stream, stream_info
from common.nats.client import FloeClient, connect, frame
from common.service.process import stop_on_signals
from common.settings.service import NatsSettings
from common.settings.types import format_duration, is_subject
from common.tasks import Stop, wait_for
from infra.publish import AckedPublisher, PublishCounts

MAX_PACKAGES = 1500
MAX_MOUNTS = 40


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts of one machine. Sizes are in bytes unless a key names another unit; `packages`: version by name."""

    os: dict[str, str]
    kernel: dict[str, str]
    cpu: dict[str, object]
    memory: dict[str, int]
    mounts: tuple[dict[str, object], ...]
    packages: dict[str, str]


def read_facts(root: Path = Path("/")) -> MachineFacts:
    """Read the facts of the machine that has its file system at `root`."""
    return MachineFacts(
        os=_os_release(root),
        kernel={"name": platform.system(), "release": platform.release(), "machine": platform.machine()},
        cpu=_cpu(root),
        memory=_memory(root),
        mounts=tuple(_mounts(root)),
        packages=_installed(root),
    )


def _read_text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _os_release(root: Path) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in _read_text(root / "etc/os-release").splitlines() if "=" in line)
    values = {name.lower(): value.strip('"') for name, value in pairs}
    wanted = ("id", "name", "version", "version_id", "pretty_name")
    return {name: values[name] for name in wanted if name in values}


def _cpu(root: Path) -> dict[str, object]:
    info: dict[str, str] = {}
    for line in _read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        info.setdefault(name.strip(), value.strip())
    models = [info[name] for name in ("model name", "Processor", "vendor_id") if info.get(name)]
    return {"count": os.cpu_count() or 1, "model": models[0] if models else platform.machine()}


def _memory(root: Path) -> dict[str, int]:
    memory = {}
    for line in _read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        parts = value.split()
        if parts and parts[0].isdigit():
            memory[name] = int(parts[0]) * (1024 if parts[-1] == "kB" else 1)
    return memory


def _mounts(root: Path) -> Iterator[dict[str, object]]:
    for line in _read_text(root / "proc/mounts").splitlines()[:MAX_MOUNTS]:
        device, path, kind, options = line.split()[:4]
        with suppress(OSError):
            state = os.statvfs(root / path.lstrip("/"))
            yield {
                "device": device,
                "path": path,
                "type": kind,
                "options": options.split(","),
                "size": state.f_blocks * state.f_frsize,
                "available": state.f_bavail * state.f_frsize,
            }


def _installed(root: Path) -> dict[str, str]:
    """Return the installed packages of Debian and its derivatives; on other systems those of this Python."""
    packages, name = {}, ""
    for line in _read_text(root / "var/lib/dpkg/status").splitlines():
        if line.startswith("Package: "):
            name = line[9:]
        elif line.startswith("Version: "):
            packages[name] = line[9:]
    if not packages:
        packages = {entry.name: entry.version for entry in distributions()}
    return dict(sorted(packages.items())[:MAX_PACKAGES])


ROLES = ("web", "db", "cache", "queue", "build", "edge", "mail", "dns")
LOCATIONS = ("ams", "lon", "mlt", "nyc", "sfo", "syd")
AGENTS = ("rpcutil", "choria_util", "package", "service", "puppet", "filemgr", "shell", "scout")
VARIANTS_PER_ROLE = 8  # documents of one role, of different sizes
TURNS_BETWEEN_UPGRADES = 48  # four hours at an interval of five minutes
CPUS = (2, 4, 8, 16, 32, 64)
GIB = 2**30

PROTOCOL = "choria:registration:inventorycontent:1"
_HEAD = (
    b'{"protocol":"%b","sender":"%b","timestamp":%d,"identity":{"hostname":"%b","address":"10.%d.%d.%d",'
    b'"mac":"02:%02x:%02x:%02x:%02x:%02x","serial":"%016x","processors":%d,"memory":%d},'
)
_STATUS = (
    b',"status":{"uptime":%d,"load":[%d.%02d,%d.%02d,%d.%02d],"memory_free":%d,"processes":%d,"cpu_seconds":%d,'
    b'"bytes_received":%d,"bytes_sent":%d,"total_messages":%d,"valid_messages":%d,"initializing":false}}'
)
_OVERHEAD_BYTES = 900  # bytes of everything except the facts, about
_PACKAGE_BYTES = 32  # bytes of JSON that a package entry takes, about


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of documents, in bytes: spread over the range, most of them in its lower third."""

    min_bytes: int = 1024
    max_bytes: int = 15 * 1024

    def __post_init__(self) -> None:
        if not 1 <= self.min_bytes <= self.max_bytes:
            found = f"--min-size {self.min_bytes}, --max-size {self.max_bytes}"
            raise UsageError(f"{found}: expected at least 1 byte, the smaller first")

    def pick(self, rng: random.Random) -> int:
        return self.min_bytes + int((self.max_bytes - self.min_bytes) * rng.betavariate(1.1, 4.0))


class Fleet:
    """`nodes` nodes that publish every `interval` seconds (by which their counters grow)."""

    def __init__(
        self, facts: MachineFacts, *, seed: int, nodes: int, interval: float = 300.0, sizes: Sizes | None = None
    ) -> None:
        self.nodes = nodes
        self._seed, self._interval = seed, interval
        rng = random.Random(f"{seed} profiles")
        sizes = sizes or Sizes()
        self._bodies = [
            [_shared_body(facts, role, sizes.pick(rng), rng) for _ in range(VARIANTS_PER_ROLE)] for role in ROLES
        ]

    def sender(self, node: int) -> str:
        """Return the host name of `node`, 0 to nodes-1."""
        mixed = _hash64(self._seed, node, 0)
        return f"{ROLES[mixed % len(ROLES)]}{node:05d}.{LOCATIONS[(mixed >> 8) % len(LOCATIONS)]}.example.net"

    def document(self, node: int, turn: int, now: float) -> bytes:
        """Return the document of `node` in the interval `turn` (0 is the first), at `now` seconds since 1970."""
        own, turn_hash = _hash64(self._seed, node, 0), _hash64(self._seed, node, turn + 1)
        variant = (own // 64 + (turn + node) // TURNS_BETWEEN_UPGRADES) % VARIANTS_PER_ROLE
        body = self._bodies[own % len(ROLES)][variant]
        return self._head(node, own, int(now)) + body + self._status(own, turn_hash, turn)

    def _head(self, node: int, own: int, now: int) -> bytes:
        sender = self.sender(node).encode()
        memory = (1 << (own >> 20) % 9) * GIB
        mac = (own & 255, own >> 8 & 255, own >> 16 & 255, node >> 8 & 255, node & 255)
        address = (node >> 16 & 255, node >> 8 & 255, node & 255)
        host = sender.split(b".")[0]
        processors = CPUS[(own >> 24) % len(CPUS)]
        return _HEAD % (PROTOCOL.encode(), sender, now, host, *address, *mac, own, processors, memory)

    def _status(self, own: int, turn_hash: int, turn: int) -> bytes:
        uptime = own % (90 * 86400) + int(turn * self._interval)
        load = turn_hash % 400
        return _STATUS % (
            uptime,
            *divmod(load, 100),
            *divmod(load * 4 // 5 + 7, 100),
            *divmod(load * 3 // 5 + 11, 100),
            (turn_hash >> 9) % (8 * GIB),
            60 + (turn_hash >> 5) % 40,
            uptime * (own % 7 + 1) // 8,
            uptime * (own % 65536) + turn_hash % 1_000_000,
            uptime * (own % 32768) + turn_hash % 500_000,
            uptime // 60 + turn_hash % 50,
            uptime // 60,
        )


def _hash64(seed: int, a: int, b: int) -> int:
    """Return 64 bits that look random and depend on all three arguments (the finalizer of splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + a * 0xBF58476D1CE4E5B9 + b * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31


def _shared_body(facts: MachineFacts, role: str, size: int, rng: random.Random) -> bytes:
    """Return the part that nodes of one role and variant share: JSON members without the braces around them."""
    document: dict[str, object] = {
        "agents": sorted(rng.sample(AGENTS, rng.randint(2, len(AGENTS)))),
        "classes": [f"roles::{role}", "profiles::base", f"profiles::{rng.choice(('blue', 'green'))}"],
        "collectives": ["mcollective", f"{role}_collective"],
    }
    document["facts"] = _facts(facts, size - _OVERHEAD_BYTES, rng)
    return json.dumps(document, separators=(",", ":"))[1:-1].encode()


def _facts(facts: MachineFacts, room: int, rng: random.Random) -> dict[str, object]:
    """Return facts of about `room` bytes of JSON: first those that every machine has, then as many lists as fit."""
    chosen: dict[str, object] = {"os": facts.os, "kernel": facts.kernel, "cpu": facts.cpu}
    room -= len(json.dumps(chosen))
    chosen["mounts"] = _sample_entries(facts.mounts, room // 2, rng)
    room -= len(json.dumps(chosen["mounts"]))
    memory = {name: value * rng.randint(50, 150) // 100 for name, value in facts.memory.items()}
    if room > 2 * len(json.dumps(memory)):
        chosen["memory"] = memory
        room -= len(json.dumps(memory))
    chosen["packages"] = _packages(facts, max(room, 0) // _PACKAGE_BYTES, rng)
    return chosen


def _sample_entries(entries: tuple[dict[str, object], ...], room: int, rng: random.Random) -> list[dict[str, object]]:
    taken = []
    for entry in rng.sample(entries, len(entries)):
        room -= len(json.dumps(entry))
        if room < 0:
            break
        taken.append(entry)
    return taken


def _packages(facts: MachineFacts, count: int, rng: random.Random) -> dict[str, str]:
    names = sorted(rng.sample(sorted(facts.packages), min(count, len(facts.packages))))
    return {name: facts.packages[name] + rng.choice(("", "", "", "+upd1")) for name in names}


def describe(facts: MachineFacts) -> str:
    lists = f"{len(facts.mounts)} mounts, {len(facts.packages)} packages"
    return f"{facts.os.get('pretty_name', facts.kernel['name'])}, {facts.cpu['count']} CPUs, {lists}"


log = get_logger(__name__)


DEFAULT_SUBJECT = "choria.node_metadata.{sender}"
MAX_BURST_MESSAGES = 20_000  # published before the next check
DUE_CHECK_INTERVAL_S = 0.05  # seconds between two checks for due messages
PING_SUBJECT = "floe.emulated.ping."
PARALLEL_CONNECTS = 32


class Connections:
    """The connections of the nodes: `number` of them, each with `subscriptions` to `PING_SUBJECT` and a number from 0.

    A connection answers each request on such a subject with the name of each of its nodes. `pings`: requests received.
    """

    def __init__(self, fleet: Fleet, number: int, subscriptions: int) -> None:
        self.clients: list[FloeClient] = []
        self.pings = 0
        self._fleet, self._number, self._subscriptions = fleet, number, subscriptions

    @asynccontextmanager
    async def open(self, settings: NatsSettings, clock: Clock) -> AsyncIterator[FloeClient]:
        """Connect all of them, PARALLEL_CONNECTS at once; yield the first. Raises the errors of `connect`."""
        turns = asyncio.Semaphore(PARALLEL_CONNECTS)
        if self._number > 1:  # a line for each would hide the others
            logging.getLogger("common.nats.client").setLevel(logging.WARNING)
        async with AsyncExitStack() as stack:

            async def open_one(number: int) -> FloeClient:
                async with turns:
                    client = await connect(settings, name=f"floe emulate {number}", clock=clock)
                    await stack.enter_async_context(aclosing(client))
                    for each in range(self._subscriptions):
                        await client.subscribe_raw(f"{PING_SUBJECT}{each}", partial(self._answer, client, number))
                    return client

            self.clients = await asyncio.gather(*map(open_one, range(self._number)))
            yield self.clients[0]

    def _answer(self, client: FloeClient, number: int, _subject: bytes, reply: bytes, *_: bytes | None) -> None:
        self.pings += 1
        if reply and client.is_up:
            for node in range(number, self._fleet.nodes, self._number):
                client.send(frame(reply, self._fleet.sender(node).encode(), None))


@dataclass(frozen=True, slots=True)
class PublishSchedule:
    """The schedule of the messages, in seconds after the start.

    `interval`: every node publishes once in so many seconds, one after the other. `rate`: messages per second of the
    whole fleet instead; 0 means as fast as the server takes them. `count`, `duration`: publishing stops at the first
    of the two; None means never.
    """

    nodes: int
    interval: float = 300.0
    rate: float | None = None
    count: int | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        for option, seconds in (("--interval", self.interval), ("--duration", self.duration)):
            if seconds is not None and seconds <= 0:
                raise UsageError(f"{option}: expected more than 0s, found {format_duration(seconds)}")

    def messages_per_second(self) -> float:
        """Return the messages per second of the fleet; infinity if there is no limit."""
        if self.rate is None:
            return self.nodes / self.interval
        return self.rate or float("inf")

    def due_count(self, elapsed: float) -> int:
        """Return the number of messages that must have been published `elapsed` seconds after the start."""
        limit = self.count if self.count is not None else 2**62
        return int(min(limit, 1 + elapsed * self.messages_per_second()))

    def is_over(self, published: int, elapsed: float) -> bool:
        timed_out = self.duration is not None and elapsed >= self.duration
        return timed_out or (self.count is not None and published >= self.count)


class Emulator:
    """One fleet that publishes into one stream: node n through the client with the number n modulo their number.

    `subject` contains `{sender}` in the place of the node's name. `published`, `elapsed`: the outcomes so far, and the
    seconds since the start; read while it runs.
    """

    def __init__(
        self,
        clients: Sequence[FloeClient],
        fleet: Fleet,
        schedule: PublishSchedule,
        clock: Clock,
        *,
        subject: str = DEFAULT_SUBJECT,
    ) -> None:
        self.published, self.elapsed = PublishCounts(), 0.0
        self._clients, self._fleet, self._schedule, self._clock = clients, fleet, schedule, clock
        self._subject = subject
        self._documents = self._iter_documents()

    async def run(self, stop: Stop) -> None:
        """Publish until the schedule is over or `stop` is set; return when no message is in flight."""
        started = self._clock.monotonic()
        async with AsyncExitStack() as stack:
            publishers = [await stack.enter_async_context(AckedPublisher(client)) for client in self._clients]
            for publisher in publishers:
                publisher.published = self.published
            while not stop.is_set:
                elapsed = self.elapsed = self._clock.monotonic() - started
                if self._schedule.is_over(self.published.sent, elapsed):
                    break
                await self._publish_due(publishers, elapsed, stop)
            self.elapsed = self._clock.monotonic() - started

    def rate(self) -> float:
        """Return the messages per second so far."""
        return self.published.sent / self.elapsed if self.elapsed else 0.0

    async def _publish_due(self, publishers: list[AckedPublisher], elapsed: float, stop: Stop) -> None:
        """Publish what is due now; then sleep for `DUE_CHECK_INTERVAL_S`, or not if there is no limit."""
        due = min(self._schedule.due_count(elapsed) - self.published.sent, MAX_BURST_MESSAGES)
        used = set()
        for _ in range(due):
            if stop.is_set:
                return
            node, subject, document = next(self._documents)
            used.add(number := node % len(publishers))
            await publishers[number].publish(subject, document)
        for number in used:
            await publishers[number].flush()
        await self._clock.sleep(DUE_CHECK_INTERVAL_S if self._schedule.messages_per_second() != float("inf") else 0)

    def _iter_documents(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield number, subject and document, node after node, turn after turn."""
        before, _, after = self._subject.encode().partition(b"{sender}")
        turn = 0
        while True:
            for node in range(self._fleet.nodes):
                subject = before + self._fleet.sender(node).encode() + after
                yield node, subject, self._fleet.document(node, turn, self._clock.now())
            turn += 1


def subject_filter(subject: str) -> str:
    """Return the subject filter of a stream that stores the messages published under `subject`.

    Raises UsageError if `subject` does not contain `{sender}` after a first token, or no message can have it.
    """
    before, sender, _ = subject.partition("{sender}")
    if not sender or "." not in before or not is_subject(subject.replace("{sender}", "node")):
        expected = f"expected a first token, then {{sender}}, such as {DEFAULT_SUBJECT}"
        raise UsageError(f"--subject: {expected}, found {subject!r:.80}")
    return before.rpartition(".")[0] + ".>"


async def open_stream(client: FloeClient, stream: str, subject: str, *, create: bool) -> StreamInfo:
    """Return the stream, created if it is missing and `create` is true. Raises ConfigError if it is still missing."""
    info = await stream_info(client, stream)
    if info is None and create:
        subjects = [subject_filter(subject)]
        info = await create_stream(client, {"name": stream, "subjects": subjects, "storage": "file"})
    if info is None:
        line = f"nats stream add {stream} --subjects '{subject_filter(subject)}' --defaults"
        raise ConfigError(f"stream {stream}: expected to exist, found none", hint=f"add --create, or run: {line}")
    return info


async def check_stored(client: FloeClient, before: StreamInfo, published: PublishCounts) -> None:
    """Raise DataError if the stream grew by fewer messages than acknowledged, or any is refused or unknown."""
    after = await stream_info(client, before.name)
    grown = after.last_sequence - before.last_sequence if after else 0
    if grown < published.stored or published.refused or published.unknown:
        raise DataError(
            f"stream {before.name}: expected {published.sent} more messages, found {grown}",
            hint=published.summary(),
            code="E-NOT-STORED",
        )


LOG_INTERVAL_S = 10.0


async def run_emulation(
    settings: NatsSettings,
    schedule: PublishSchedule,
    sizes: Sizes,
    *,
    stream: str,
    subject: str,
    create: bool,
    seed: int,
    connections: int = 1,
    subscriptions: int = 0,
    listen: tuple[str, int] | None = None,
) -> dict[str, object]:
    """Publish until the schedule is over or a signal comes; return the result, with a sentence under `line`.

    `create`: create the stream if it is missing. `listen`: host and port of a listener for `/metrics`; None: none.
    Raises UsageError for a stream or a subject that cannot be, DataError if the stream does not hold all messages sent,
    ConfigError if it does not exist.
    """
    check_stream_name("--stream", stream)
    subject_filter(subject)
    clock, facts = SystemClock(), read_facts()
    fleet = Fleet(facts, seed=seed, nodes=schedule.nodes, interval=schedule.interval, sizes=sizes)
    nodes = Connections(fleet, connections, subscriptions)
    async with nodes.open(settings, clock) as client:
        emulator = Emulator(nodes.clients, fleet, schedule, clock, subject=subject)
        before = await open_stream(client, stream, subject, create=create)
        serve_figures(emulator, nodes, listen)
        context = {"machine": describe(facts), "nodes": fleet.nodes, "connections": connections, "seed": seed}
        log.info("emulation started", action="emulation_started", **context)
        async with stop_on_signals() as stop, asyncio.TaskGroup() as group:
            watching = group.create_task(_log_progress(emulator, stop))
            await emulator.run(stop)
            watching.cancel()
        await check_stored(client, before, emulator.published)
    published, elapsed = emulator.published, emulator.elapsed
    pace = f"in {elapsed:.1f} s, {emulator.rate():,.0f} a second"
    return {
        "line": f"{published.summary()} {pace}, seed {seed}",
        "stream": stream,
        "seed": seed,
        "connections": connections,
        "pings": nodes.pings,
        "sent": published.sent,
        "stored": published.stored,
        "bytes": published.bytes,
        "seconds": round(elapsed, 3),
    }


def serve_figures(emulator: Emulator, nodes: Connections, listen: tuple[str, int] | None) -> None:
    """Serve the figures in the form of Prometheus at `listen`, host and port, in a thread; None: nothing.

    Raises UsageError for an address that cannot be used.
    """
    if listen is None:
        return
    figures = {
        "connections_up": ("Connections that are up.", lambda: sum(client.is_up for client in nodes.clients)),
        "sent": ("Messages published.", lambda: emulator.published.sent),
        "stored": ("Messages that the stream acknowledged.", lambda: emulator.published.stored),
        "pings": ("Requests that connections received.", lambda: nodes.pings),
    }
    registry = CollectorRegistry()
    for name, (text, figure) in figures.items():
        Gauge(f"floe_emulator_{name}", text, registry=registry).set_function(figure)
    host, port = listen
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        found = f"found {host} port {port}: {error.strerror}"
        raise UsageError(f"--listen: expected a free address such as 127.0.0.1:9470, {found}") from None


async def _log_progress(emulator: Emulator, stop: Stop) -> None:
    while not await wait_for(stop, LOG_INTERVAL_S):
        counts = {"published": emulator.published.summary(), "per_second": round(emulator.rate())}
        log.info("emulation progressed", action="emulation_progressed", **counts)
