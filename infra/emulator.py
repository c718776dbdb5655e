"""The fleet emulator: publishes the messages of a fleet into a stream, and checks that they were stored."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

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
from infra.acked import AckedPublisher, PublishCounts
from infra.fleet import Fleet, Sizes, describe, read_facts

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

    async def run(self, stop: Stop) -> PublishCounts:
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
        return self.published

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
