"""One site's egress inside the test's own event loop, over a real nats-server and a folder as its store."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.archive.documents import ChainStore
from common.archive.keys import Layout
from common.archive.segment import Footer, Ledger, Message, SegmentRef
from common.archive.store import SegmentStore
from common.chain import Chain
from common.clock import Clock, SystemClock
from common.errors import FloeError, Unavailable
from common.nats.api import stream_info
from common.nats.client import FloeClient, frame
from common.nats.kv import KeyValue
from common.objects.open import open_objects
from common.objects.port import ObjectStore
from common.observe.monitor import Health
from common.sequences import SequenceRange, cover
from common.settings.root import Settings, StoreSettings
from common.tasks import Stop
from egress.deps import ConfirmSettings, Intervals, PullSettings, Tuning
from egress.feed import lease_key
from egress.incarnations import Closings, HighWaterMarks
from egress.service import EgressService
from infra.oracle import OracleResult, Trace, archived_messages, compare, read_stream
from tests.support.basics import PATIENCE, SharedS3, answered, cancelled, is_gapless, soon, unique
from tests.support.servers import connected, place

SITE = "site"
QUICK = Tuning(
    pulling=PullSettings(batch=500, heartbeat=0.3, expires=5.0, inactive=60.0),
    intervals=Intervals(tick=0.05, check=0.3, advance=0.1, idle=0.3, alive=3600.0, reexamine=0.3),
    confirming=ConfirmSettings(times=3, span=0.3, attempts=12),
)


@dataclass
class Running:
    """A running egress: its health, and the way to stop it."""

    health: Health
    stop: Stop
    task: asyncio.Task[bool]
    service: EgressService

    def status(self, feed: str) -> dict[str, Any]:
        """Return the entry of a feed in /status; empty before its first report."""
        return self.health.status()["parts"].get(f"egress {feed}", {})

    def state(self, feed: str) -> str:
        return self.status(feed).get("state", "")

    async def stopped(self, feed: str) -> dict[str, Any]:
        """Return the entry of a feed in /status as soon as it has stopped."""
        await soon(lambda: self.state(feed) == "stopped")
        return self.status(feed)

    async def received(self, feed: str, last: int) -> None:
        """Wait until all up to `last` is in the open segment."""
        await soon(lambda: (self.status(feed).get("open_segment") or {}).get("last") == last)

    async def drain(self) -> None:
        """Stop it as SIGTERM does; fail if it does not drain."""
        self.stop.set()
        assert await self.task, "not drained in time"

    async def crash(self) -> None:
        """End it as suddenly as a task can be ended."""
        await cancelled(self.task)


@dataclass
class Bench:
    """A server, a bucket, and access to both for the test."""

    url: str | list[str]
    root: Path
    client: FloeClient
    lease_bucket: str = field(default_factory=lambda: unique("L"))
    state_bucket: str = field(default_factory=lambda: unique("S"))

    s3: SharedS3 | None = None

    def __post_init__(self) -> None:
        self.store_config = self.s3.store() if self.s3 else {"url": f"file://{self.root / 'bucket'}"}
        self.objects = open_objects(StoreSettings.model_validate(self.store_config))
        self.store = SegmentStore(self.objects, Layout("data"), spool_dir=self.root / "spool")
        self.chains = ChainStore(self.objects, Layout("data"))

    def document(self, *feeds: dict[str, Any], **egress: Any) -> dict[str, Any]:
        """Return a configuration with these feeds, as a file has it."""
        own = {"feeds": [*feeds], "lease_bucket": self.lease_bucket, "state_bucket": self.state_bucket}
        # Of the streams of other tests on this server nothing is logged.
        others = {} if any("streams" in feed for feed in feeds) else {"not_archived": ["*"]}
        egress = {**own, "lease_ttl": "2s", "shutdown_timeout": "1m", **others, **egress}
        store = {"store": self.store_config, "spool_dir": str(self.root / "spool")}
        return {"site": SITE, "nats": {"url": self.url}, **store, "egress": egress}

    def settings(self, *feeds: dict[str, Any], **egress: Any) -> Settings:
        """Return settings with these feeds. Segments close sooner than users may configure."""
        settings = Settings.model_validate(self.document(*feeds, **egress))
        hurried = tuple(
            feed
            if "max_age" in raw.get("segment", {})
            else feed.model_copy(update={"segment": feed.segment.model_copy(update={"max_age": 0.15})})
            for feed, raw in zip(settings.egress.feeds_, feeds, strict=True)
        )
        return settings.model_copy(update={"egress": settings.egress.model_copy(update={"feeds_": hurried})})

    def start(
        self,
        settings: Settings,
        tuning: Tuning = QUICK,
        reexamine: float = 0.3,
        objects: ObjectStore | None = None,
        clock: Clock | None = None,
    ) -> Running:
        """Run egress as a task, over `objects` instead of the bench's own and by `clock`, if given."""
        clock = clock or SystemClock()
        health, stop = Health(clock), Stop()
        patient = replace(tuning, intervals=replace(tuning.intervals, reexamine=reexamine))
        service = EgressService(settings, patient, clock, health, stop, objects)
        return Running(health, stop, asyncio.create_task(service.run()), service)

    @asynccontextmanager
    async def egress(
        self,
        *feeds: dict[str, Any],
        tuning: Tuning = QUICK,
        objects: ObjectStore | None = None,
        clock: Clock | None = None,
        **egress: Any,
    ) -> AsyncIterator[Running]:
        """Run egress for the length of a block, and drain it at its end."""
        running = self.start(self.settings(*feeds, **egress), tuning, objects=objects, clock=clock)
        try:
            yield running
            await running.drain()
        finally:
            await running.crash()

    # The source

    async def make_stream(self, name: str, **config: Any) -> str:
        """Create a memory stream on `{name}.>`; return its name."""
        await place(
            self.client, {"name": name, "subjects": [f"{name}.>"], "storage": "memory", "retention": "limits", **config}
        )
        return name

    async def make_replicated(self, retention: str = "limits") -> str:
        """Create a stream of three replicas, as soon as the cluster can; return its name."""
        stream, config = unique("T"), {"num_replicas": 3, "storage": "file", "retention": retention}
        return await answered(lambda: self.make_stream(stream, **config), FloeError)

    async def delete_stream(self, name: str) -> None:
        await self.client.api(f"STREAM.DELETE.{name}")

    async def recreate(self, name: str, payloads: Iterable[bytes] = (), **config: Any) -> None:
        """Delete the stream, make it again and publish."""
        await self.delete_stream(name)
        await self.make_stream(name, **config)
        await self.publish(name, payloads)

    async def filled(self, payloads: Iterable[bytes], *, subject: str = "a", **config: Any) -> str:
        """Create a stream of these payloads; return its name."""
        stream = await self.make_stream(unique("T"), **config)
        await self.publish(stream, payloads, subject=subject)
        return stream

    async def begun(self, payloads: Iterable[bytes], segment: dict[str, Any] | None = None, **config: Any) -> str:
        """Create a stream of these payloads, all archived by a feed of its name; return its name."""
        stream = await self.filled(payloads, **config)
        await self.freeze({"stream": stream, "segment": segment or {}})
        return stream

    async def freeze(self, feed: dict[str, Any], **egress: Any) -> None:
        """Run egress until the feed has archived all that its stream holds, and drain it."""
        async with self.egress(feed, **egress):
            await self.archived_to(feed.get("name", feed["stream"]), await self.last(feed["stream"]))

    async def publish(
        self, stream: str, payloads: Iterable[bytes], *, subject: str = "a", headers: bytes | None = None
    ) -> None:
        """Publish and wait until all are stored. A cluster that changes its leader drops messages in flight: as many
        are sent again.
        """
        before, sent, stored = await self.last(stream), [*payloads], 0
        for _ in range(len(sent) // 4000 + 4):
            chunk = sent[stored : stored + 4000]  # a server drops messages that it cannot queue
            for payload in chunk:
                self.client.send(frame(f"{stream}.{subject}".encode(), payload, headers))
            with suppress(AssertionError):
                await soon(lambda: self.reaches(stream, before + stored + len(chunk)), PATIENCE / 4)  # noqa: B023
            if (stored := await self.last(stream) - before) >= len(sent):
                return
        raise AssertionError(f"{stream}: expected {len(sent)} messages more, found {stored}")

    async def reaches(self, stream: str, last: int) -> bool:
        return await self.last(stream) >= last

    async def held(self, stream: str) -> int:
        """Return the number of messages that the stream holds."""
        return (await stream_info(self.client, stream)).messages

    async def last(self, stream: str) -> int:
        """Return the last sequence of the stream. Waits while its cluster has no leader."""
        info = await answered(lambda: stream_info(self.client, stream), Unavailable)
        return info.last_sequence if info else 0

    # The archive

    def chain(self, feed: str, incarnation: int = 0) -> Chain:
        return Chain(SITE, feed, incarnation)

    def refs(self, feed: str, incarnation: int = 0) -> list[SegmentRef]:
        return self.store.list(self.chain(feed, incarnation))

    def end(self, feed: str, incarnation: int = 0) -> int:
        """Return the end of the coverage; 0 without any."""
        return self.end_of(self.chain(feed, incarnation))

    def end_of(self, chain: Chain) -> int:
        return max((ref.coverage.last for ref in self.store.list(chain)), default=0)

    def messages(self, feed: str, incarnation: int = 0) -> list[Message]:
        return list(archived_messages(self.store, self.chain(feed, incarnation)))

    def footers(self, feed: str, incarnation: int = 0) -> list[Footer]:
        return [self.store.footer(ref) for ref in self.refs(feed, incarnation)]

    def ledger(self, feed: str, incarnation: int = 0) -> dict[str, int]:
        """Return the sums over all segments, by reason."""
        total = Ledger()
        for footer in self.footers(feed, incarnation):
            total = total.plus(footer.ledger)
        return total.to_json()

    async def archived_to(self, feed: str, last: int, incarnation: int = 0) -> None:
        """Wait until coverage reaches `last`."""
        await soon(lambda: self.end(feed, incarnation) >= last)

    async def archive(self, stream: str, payloads: Iterable[bytes], last: int, incarnation: int = 0) -> None:
        """Publish, and wait until the feed of the stream's name has archived up to `last`."""
        await self.publish(stream, payloads)
        await self.archived_to(stream, last, incarnation)

    async def mark(self, feed: str, incarnation: int = 0) -> int | None:
        state = await KeyValue(self.client, self.state_bucket).ensure()
        return await HighWaterMarks(state).get(self.chain(feed, incarnation))

    def check(self, feed: str, incarnation: int = 0, first: int = 1) -> None:
        """Check that the archive accounts once for every sequence from `first` on; segments balance (I5, I7)."""
        self.check_chain(self.chain(feed, incarnation), first)

    def check_chain(self, chain: Chain, first: int) -> None:
        refs = self.store.list(chain)
        stretches = cover(refs, first)
        assert is_gapless(stretch.rows for stretch in stretches), chain
        assert not stretches or stretches[0].rows.first == first, chain
        for footer in map(self.store.footer, refs):
            assert footer.is_balanced(), footer
            assert footer.has_valid_unread(), footer

    async def compare(
        self, feed: str, stream: str, incarnation: int = 0, *, may_be_gone: bool = False, first: int = 1
    ) -> OracleResult:
        """Compare the archive with the present messages of the stream from `first` on, one by one."""
        source = await source_from(self.client, stream, first)
        return compare(source, Trace.of(self.messages(feed, incarnation)), may_be_gone=may_be_gone)

    async def same(self, feed: str, stream: str, incarnation: int = 0) -> None:
        """Fail unless the archive holds exactly the messages of the stream, and accounts for all of them."""
        self.check(feed, incarnation, self.chains.read_chain(self.chain(feed, incarnation)).first)  # type: ignore[union-attr]
        found = await self.compare(feed, stream, incarnation)
        assert found.is_ok, found.report()

    async def same_at_last(self, feed: str, stream: str) -> None:
        """Check `same` of a stream while its cluster may have no leader."""
        await answered(lambda: self.same(feed, stream), Unavailable)


@asynccontextmanager
async def bench_of(url: str | list[str], root: Path, *buckets: str, **login: str) -> AsyncIterator[Bench]:
    """A bench with a connection of its own; `buckets`: those of its leases and its state."""
    async with aclosing(await connected(url, **login)) as client:
        yield Bench(url, root, client, *buckets)


async def source_from(client: FloeClient, stream: str, first: int) -> Trace:
    """Return the messages of the stream from `first` on."""
    source = Trace()

    def take(message: Message) -> None:
        if message.sequence >= first:
            source.add(message)

    source.last_accounted = await read_stream(client, stream, take)
    return source


def covered(refs: Iterable[SegmentRef]) -> list[SequenceRange]:
    return [ref.coverage for ref in refs]


@dataclass(frozen=True)
class Partitioned:
    """The partitions of one feed on a bench."""

    bench: Bench
    feed: str
    count: int

    def chain(self, partition: int, incarnation: int = 0) -> Chain:
        return Chain(SITE, self.feed, incarnation, partition)

    def end(self, partition: int, incarnation: int = 0) -> int:
        """Return the end of the coverage; 0 without any."""
        return self.bench.end_of(self.chain(partition, incarnation))

    async def archived_to(self, last: int, incarnation: int = 0, seconds: float = PATIENCE) -> None:
        """Wait until every partition's coverage reaches `last`."""
        await soon(lambda: all(self.end(p, incarnation) >= last for p in range(self.count)), seconds)

    async def freeze(self, last: int, incarnation: int = 0) -> None:
        """Run egress of all partitions until their coverage reaches `last`, and drain it."""
        async with self.bench.egress(feed_of(self.feed, self.count)):
            await self.archived_to(last, incarnation)

    def messages(self, incarnation: int = 0, count: int | None = None) -> list[Message]:
        """Return the messages of all partitions, in sequence order; a repeated one twice."""
        chains = [self.chain(p, incarnation) for p in range(count or self.count)]
        found = [m for chain in chains for m in archived_messages(self.bench.store, chain)]
        return sorted(found, key=lambda message: message.sequence)

    def ends(self, incarnation: int = 0) -> dict[int, int]:
        return {p: self.end(p, incarnation) for p in range(self.count)}

    def previous(self, incarnation: int) -> dict[int, int] | None:
        """Return the ends of the previous incarnation in `stream.json` of this one."""
        document = self.bench.chains.read_stream(self.chain(0, incarnation))
        return None if document is None or document.previous is None else dict(document.previous)

    def check(self, incarnation: int = 0) -> None:
        """Check that each partition accounts once for every sequence from its first on; segments balance."""
        for partition in range(self.count):
            chain = self.chain(partition, incarnation)
            document = self.bench.chains.read_chain(chain)
            assert document is not None, chain
            self.bench.check_chain(chain, document.first)

    async def same(self, stream: str, incarnation: int = 0, first: int = 1) -> None:
        """Fail unless the partitions together hold exactly the messages of the stream from `first` on."""
        self.check(incarnation)
        source = await source_from(self.bench.client, stream, first)
        found = compare(source, Trace.of(self.messages(incarnation)), may_be_gone=False)
        assert found.is_ok, found.report()

    # Playing another instance

    async def closings(self) -> Closings:
        return Closings(await KeyValue(self.bench.client, self.bench.state_bucket).ensure())

    @asynccontextmanager
    async def away(self, partition: int, ttl: float) -> AsyncIterator[None]:
        """Hold the lease of the partition as another instance that does nothing, in a thread of its own: so that it
        works on a busy machine too.
        """
        bucket = await KeyValue(self.bench.client, self.bench.lease_bucket, ttl=ttl).ensure()
        key = lease_key(self.chain(partition))
        revision, is_over = await bucket.create(key, b"another"), threading.Event()
        assert revision is not None

        async def keep(current: int | None) -> None:
            client = await connected(self.bench.url)
            own = await KeyValue(client, self.bench.lease_bucket, ttl=ttl).ensure()
            while current is not None and not is_over.is_set():
                current = await own.update(key, b"another", current)
                await asyncio.sleep(ttl / 8)
            await client.aclose()

        keeping = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(keep(revision))))
        try:
            yield
        finally:
            is_over.set()
            await keeping
            await bucket.delete(key)


async def publish_over(bench: Bench, stream: str, subjects: Sequence[str], count: int, text: str) -> None:
    """Publish `count` messages, the subjects in turn."""
    for number, subject in enumerate(subjects):
        mine = [f"{text} {i}".encode() for i in range(count) if i % len(subjects) == number]
        await bench.publish(stream, mine, subject=subject)


def feed_of(stream: str, count: int = 3, **keys: Any) -> dict[str, Any]:
    """Return a feed that a template splits into partitions."""
    return {"stream": stream, "partitions": {"count": count, "subject": f"{stream}.{{partition}}.>"}, **keys}


async def begun_parts(
    bench: Bench, count: int, messages: int, subjects: Sequence[str] = ("0.a", "1.a"), **config: Any
) -> tuple[str, Partitioned]:
    """Create a stream of so many messages, all archived by the partitions of a feed of its name; return both."""
    stream = await bench.make_stream(unique("T"), **config)
    parts = Partitioned(bench, stream, count)
    await publish_over(bench, stream, subjects, messages, "first")
    await parts.freeze(messages)
    return stream, parts
