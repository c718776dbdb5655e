"""The harness of the benchmarks: paired runs, tables, servers and processes, data, and the floors of plain clients."""

import asyncio
import json
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from common.archive.documents import ChainDocument, StreamDocument
from common.archive.scan import ChainArchive
from common.archive.segment import Message
from common.archive.store import SegmentStore
from common.chain import Chain
from common.nats.api import create_consumer, create_stream, delete_consumer, stream_info
from common.nats.client import FloeClient, connect, frame
from common.open import load_settings, open_chains, open_store
from common.settings.service import NatsSettings
from infra.local.nats import NatsServer
from infra.local.s3 import SeaweedFS
from tests.scenarios.processes import Service
from tests.support.basics import SharedS3
from tests.support.segments import write_segment

RESULTS = Path(__file__).with_name("results.json")
REPEATS = 3


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The values of a figure. `floor`: in the same unit, None if nothing compares; `ratio`: value / floor."""

    value: float
    floor: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """A figure, its unit and its `requirement`: the least ratio, or a bound of the value if there is no floor."""

    name: str
    unit: str
    requirement: str
    run: Callable[[], BenchResult]


def measure_paired(*, floor: Callable[[], float], value: Callable[[], float]) -> BenchResult:
    """Measure floor and value in turn, so that a machine that changes speed affects both; return the medians."""
    pairs = [(floor(), value()) for _ in range(REPEATS)]
    floors, values = zip(*pairs, strict=True)
    ratios = [v / f for f, v in pairs]
    medians = round(statistics.median(values), 1), round(statistics.median(floors), 1)
    return BenchResult(*medians, round(statistics.median(ratios), 3))


def memory_mb(field: str, pid: int | str = "self") -> float:
    """Return the resident size of a running process (`field` VmRSS), or its peak so far (VmHWM), in MB (10^6 bytes)."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))
    return round(kib * 1024 / 1e6, 1)


def run_in_child(module: str, *words: str) -> dict[str, float]:
    """Run a module of the benchmarks in a process of its own; return the figures that it prints as JSON."""
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def print_table(results: Iterable[tuple[Bench, BenchResult]]) -> None:
    table = Table("name", "value", "unit", "floor", "ratio", "requirement")
    for bench, result in results:
        floor = "–" if result.floor is None else f"{result.floor:,.0f}"
        ratio = "–" if result.ratio is None else f"{result.ratio:.2f}"
        table.add_row(bench.name, _shown(result.value), bench.unit, floor, ratio, bench.requirement)
    Console().print(table)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def save(results: Iterable[tuple[Bench, BenchResult]]) -> None:
    """Save the figures: replace those of the same names, keep those of other names (`ONLY=` runs one)."""
    kept = {r["name"]: r for r in (json.loads(RESULTS.read_text()) if RESULTS.exists() else [])}
    kept |= {bench.name: {"name": bench.name, "unit": bench.unit, **asdict(result)} for bench, result in results}
    RESULTS.write_text(json.dumps(sorted(kept.values(), key=lambda r: r["name"]), indent=1) + "\n")


STREAM = "BENCH"
CHAIN = Chain("bench", STREAM)
TARGET = "TARGET"
SEGMENT_MESSAGES = 50_000  # messages; a run has a multiple of it, so that the last segment closes by itself


@dataclass(frozen=True)
class BenchEnvironment:
    """A server, an S3 server and a folder."""

    folder: Path
    nats: NatsServer
    s3: SharedS3

    def config(self, bucket: str, feed: Mapping[str, Any] | None = None, **more: Any) -> Path:
        """Write a configuration for both services; each bucket has lease and state buckets of its own.

        `feed`: further keys of the feed.
        """
        names = {"lease_bucket": f"L_{bucket}", "state_bucket": f"S_{bucket}"}
        target = {
            "stream": f"{TARGET}_{bucket}",
            "create": {"replicas": 1, "storage": "file", "subjects": [f"{bucket}.>"]},
            "sources": [{"site": CHAIN.site, "feed": STREAM, "subject_prefix": bucket}],
        }
        document = {
            "site": CHAIN.site,
            "nats": {"url": self.nats.url},
            "store": {
                "url": f"s3://{bucket}",
                "endpoint_url": self.s3.endpoint_url,
                "access_key_id": self.s3.access_key,
                "secret_access_key": self.s3.secret_key,
            },
            "log": {"level": "warning"},
            "egress": {
                **names,
                "monitor": {"listen": ""},
                "feeds": [{"stream": STREAM, "segment": {"max_messages": SEGMENT_MESSAGES}, **(feed or {})}],
            },
            "ingress": {**names, "monitor": {"listen": ""}, "poll_interval": "1s", "targets": [target]},
            **more,
        }
        path = self.folder / f"{bucket}.yaml"
        path.write_text(yaml.safe_dump(document))
        path.chmod(0o600)
        return path

    def service(self, name: str, *command: str) -> Service:
        return Service(self.folder, name, *command).start()


@contextmanager
def bench_environment() -> Iterator[BenchEnvironment]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder, NatsServer() as nats, SeaweedFS() as s3:
        yield BenchEnvironment(Path(folder), nats, SharedS3(s3))


def open_bench_store(config: Path) -> SegmentStore:
    return open_store(load_settings(str(config)))


def archived_end(store: SegmentStore) -> int:
    """Return the last archived sequence of `CHAIN`; 0 if there is none."""
    return ChainArchive.listed(store, CHAIN).end


def wait_until(check: Callable[[], bool], service: Service, seconds: float = 120, every: float = 0.02) -> float:
    """Poll until `check` is true; return the time of it. Times in seconds."""
    deadline = time.perf_counter() + seconds
    while not check():
        assert service.runs(), service.tail()
        assert time.perf_counter() < deadline, f"not within {seconds} s\n{service.tail()}"
        time.sleep(every)
    return time.perf_counter()


def archive_chain(
    config: Path, chain: Chain, stream: StreamDocument, make: Callable[[int], Message], count: int, segment: int
) -> None:
    """Archive messages of the sequences 1 to `count` as `chain`, `segment` of them in each segment."""
    store, documents = open_bench_store(config), open_chains(load_settings(str(config)))
    documents.create_stream(chain, stream)
    documents.create_chain(chain, ChainDocument((), 1, 1))
    for first in range(1, count + 1, segment):
        path = store.new_spool()
        rows = [make(sequence) for sequence in range(first, min(count, first + segment - 1) + 1)]
        store.put(write_segment(path, rows, chain=chain))
        path.unlink()
    documents.write_tail(chain, count)


MESSAGE_BYTES = 1000  # of payload
PULL_BATCH = 10_000
PULL_BYTES = 16 * 2**20
MAX_FILL_IN_FLIGHT = 3_000  # messages that may be in flight to a stream
ATOMIC_BATCH = 1000
FAST_ACK_MESSAGES = 500  # messages from one acknowledgement to the next; the server gives no more
MAX_FAST_ACKS = 2  # acknowledgements that may be outstanding


async def connect_bench(url: str) -> FloeClient:
    return await connect(NatsSettings(url=url), name="bench")


def payloads(count: int = 500) -> list[bytes]:
    """Return documents of 1 KB that compress about as well as JSON does: half repeating text, half noise."""
    rng = random.Random(1)
    text = json.dumps({"facts": {f"key{n}": n for n in range(40)}}).encode()[: MESSAGE_BYTES // 2]
    return [text + rng.randbytes(MESSAGE_BYTES // 2).hex().encode()[: MESSAGE_BYTES // 2] for _ in range(count)]


def documents(size: int, senders: int) -> Callable[[int], bytes]:
    """Return a function that makes registrations of about `size` bytes, by `senders` nodes in turn.

    The sender comes first, as in Choria's.
    """
    rng = random.Random(1)
    bodies = [
        json.dumps({"facts": {f"key{n}": rng.randbytes(9).hex() for n in range(size // 31)}}).encode()[1:]
        for _ in range(50)
    ]

    def document(number: int) -> bytes:
        sender = number % senders
        return b'{"sender":"node%06d.location.example.net",%b' % (sender, bodies[sender % len(bodies)])

    return document


async def fill_stream(url: str, stream: str, count: int, payload: Callable[[int], bytes] | None = None) -> None:
    client = await connect_bench(url)
    bodies = payloads()
    make = payload or (lambda number: bodies[number % len(bodies)])
    await create_stream(client, {"name": stream, "subjects": [f"{stream}.>"], "storage": "file", "retention": "limits"})
    for start in range(0, count, 1000):
        numbers = range(start, min(count, start + 1000))
        client.send(b"".join(frame(f"{stream}.{n % 1000}".encode(), make(n)) for n in numbers))
        await client.flush_writes()
        await wait_stored(client, stream, start - MAX_FILL_IN_FLIGHT)
    await wait_stored(client, stream, count)
    await client.aclose()


async def wait_stored(client: FloeClient, stream: str, count: int) -> None:
    """Wait until the stream holds `count` messages. A server drops messages that come faster than it stores."""
    while count > 0 and ((info := await stream_info(client, stream)) is None or info.messages < count):
        await asyncio.sleep(0.005)


async def measure_raw_read(url: str, stream: str, count: int, size: int = MESSAGE_BYTES) -> float:
    """Return the messages per second that one client reads with large pull requests into a sink that only counts.

    `size`: bytes of a message; a server disconnects a client for which more than 64 MiB are waiting.
    """
    batch = min(PULL_BATCH // 2, PULL_BYTES // size)
    client, done, seen = await connect_bench(url), asyncio.Event(), 0
    consumer = await create_consumer(
        client, stream, {"name": f"b{secrets.token_hex(4)}", "ack_policy": "none", "mem_storage": True}
    )
    inbox = client.new_inbox()
    pull_request = frame(
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer.name}".encode(),
        json.dumps({"batch": batch, "expires": 60_000_000_000}).encode(),
        reply=inbox.encode(),
    )

    def sink(_subject: bytes, _reply: bytes, _payload: bytes, _headers: bytes | None) -> None:
        nonlocal seen
        seen += 1
        if seen % batch == 0:
            client.send(pull_request)
        if seen == count:
            done.set()

    await client.subscribe_raw(inbox, sink)
    started = time.perf_counter()
    client.send(pull_request + pull_request)
    await done.wait()
    elapsed = time.perf_counter() - started
    await delete_consumer(client, stream, consumer.name)
    await client.aclose()
    return count / elapsed


async def measure_raw_atomic(url: str, stream: str, subject: str, count: int, header: bytes = b"") -> float:
    """Return the messages per second that one client stores in atomic batches of 1,000, one in flight.

    `header`: a line that each message carries besides those of the batch, so that sizes are those of Floe.
    """
    client, bodies = await connect_bench(url), payloads()
    await create_stream(client, {"name": stream, "subjects": [subject + ".>"], "storage": "file", "allow_atomic": True})
    inbox, answers = client.new_inbox(), asyncio.Queue[bytes]()
    await client.subscribe_raw(inbox, lambda _s, _r, payload, _h: answers.put_nowait(payload))
    started = time.perf_counter()
    for base in range(0, count, ATOMIC_BATCH):
        batch = secrets.token_hex(8).encode()
        for number in range(1, ATOMIC_BATCH + 1):
            lines = b"NATS/1.0\r\nNats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n" % (batch, number)
            lines += b"Nats-Expected-Last-Sequence: %d\r\n" % base if number == 1 else b""
            lines += b"Nats-Batch-Commit: 1\r\n" if number == ATOMIC_BATCH else b""
            block = lines + header + b"\r\n"
            body = bodies[number % len(bodies)]
            reply = inbox.encode() if number == ATOMIC_BATCH else b""
            client.send(
                b"HPUB %b.%d %b %d %d\r\n%b%b\r\n"
                % (subject.encode(), number, reply, len(block), len(block) + len(body), block, body)
            )
        await client.flush_writes()
        ack = json.loads(await asyncio.wait_for(answers.get(), 10))
        assert ack.get("seq") == base + ATOMIC_BATCH, ack
    elapsed = time.perf_counter() - started
    await client.aclose()
    return count / elapsed


async def measure_raw_fast(url: str, stream: str, subject: str, count: int, header: bytes = b"") -> float:
    """Return the messages per second that one client stores in one fast-ingest batch, at the server's pace.

    The expected sequence is on every message. `header`: a line that each message carries besides it, so that sizes are
    those of Floe.
    """
    client, bodies = await connect_bench(url), payloads()
    await create_stream(
        client, {"name": stream, "subjects": [subject + ".>"], "storage": "file", "allow_batched": True}
    )
    inbox, answers = client.new_inbox(), asyncio.Queue[bytes]()
    await client.subscribe_raw(f"{inbox}.>", lambda _s, _r, payload, _h: answers.put_nowait(payload))
    to = f"{inbox}.{secrets.token_hex(8)}.{FAST_ACK_MESSAGES}.fail".encode()
    name, acked, every, sent = subject.encode(), 0, 1, 0

    def frames(start: int, stop: int) -> bytes:
        made: list[bytes] = []
        for number in range(start + 1, stop + 1):
            operation = 2 if number == count else 1 if number > 1 else 0
            block = b"NATS/1.0\r\nNats-Expected-Last-Sequence: %d\r\n%b\r\n" % (number - 1, header)
            body = bodies[number % len(bodies)]
            made.append(
                b"HPUB %b.%d %b.%d.%d.$FI %d %d\r\n%b%b\r\n"
                % (name, number, to, number, operation, len(block), len(block) + len(body), block, body)
            )
        return b"".join(made)

    started = time.perf_counter()
    while sent < count:
        stop = min(count, sent + every)
        ready = frames(sent, stop)
        while (sent and sent + every > acked + MAX_FAST_ACKS * every) or not answers.empty():
            ack = json.loads(await asyncio.wait_for(answers.get(), 10))
            assert ack.get("type") == "ack", ack
            acked, every = ack["seq"], ack["msgs"]
        client.send(ready)
        await client.flush_writes()
        if not sent:
            every = json.loads(await asyncio.wait_for(answers.get(), 10))["msgs"]
        sent = stop
    while (ack := json.loads(await asyncio.wait_for(answers.get(), 10))).get("type") == "ack":
        pass
    elapsed = time.perf_counter() - started
    assert ack.get("seq") == count, ack
    await client.aclose()
    return count / elapsed
