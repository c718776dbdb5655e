"""Benchmarks of ingress: segments in the store to messages in the target, and the latency from site to target."""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from uvloop import run

from bench.harness import (
    STREAM,
    TARGET,
    Bench,
    BenchEnvironment,
    BenchResult,
    archive_chain,
    archived_end,
    bench_environment,
    connect_bench,
    fill_stream,
    measure_paired,
    measure_raw_atomic,
    measure_raw_fast,
    memory_mb,
    open_bench_store,
    payloads,
    wait_until,
)
from common.archive.documents import StreamDocument
from common.archive.segment import Message
from common.chain import Chain
from common.nats.api import create_stream, stream_info
from common.nats.client import FloeClient, frame
from tests.scenarios.processes import Service
from tests.support.basics import soon, unique
from tests.support.segments import message
from tests.support.servers import Notifying

MESSAGE_COUNT = 400_000
CHAIN_COUNT = 10
RUN_TIMEOUT_S = 60  # seconds for one run
SEGMENT_MESSAGES = 20_000  # messages of the segments that are written here
# As long as the provenance line of the messages that Floe stores
PROVENANCE = b"Floe-Source: bench BENCH 0 0 200000 1700000000000000000\r\n"

Raw = Callable[[str, str, str, int, bytes], Awaitable[float]]


def archive_with_egress(at: BenchEnvironment) -> Path:
    """Have egress fill a new bucket with all messages, as one chain; return its configuration."""
    config = at.config(at.s3.new_bucket())
    store, service = open_bench_store(config), at.service("egress", "egress", "run", "-c", str(config))
    wait_until(lambda: archived_end(store) >= MESSAGE_COUNT, service, every=0.2)
    assert service.drain(is_known_to_work=True) == 0, service.tail()
    return config


def write_archive(at: BenchEnvironment, chains: int) -> Path:
    config = at.config(at.s3.new_bucket())
    sites = [f"bench-{number}" for number in range(chains)]
    document = yaml.safe_load(config.read_text())
    document["ingress"]["targets"][0]["sources"] = [{"site": sites, "feed": STREAM}]
    config.write_text(yaml.safe_dump(document))
    bodies, stream = payloads(), StreamDocument({"name": STREAM}, "t0", None)

    def make(sequence: int) -> Message:
        return message(sequence, bodies[sequence % len(bodies)], subject=b"%d" % (sequence % 1000))

    for site in sites:
        archive_chain(config, Chain(site, STREAM), stream, make, MESSAGE_COUNT // chains, SEGMENT_MESSAGES)
    return config


def measure_ingress(at: BenchEnvironment, config: Path, publisher: str) -> tuple[float, float]:
    """Return the messages per second from the first stored in the target to the last, and the peak resident MB.

    Each run has its own target and state, so every run carries everything.
    """
    fresh = unique("T")
    own = config.with_name(f"{fresh}.yaml")
    own.touch(mode=0o600)
    document = yaml.safe_load(config.read_text())
    target = document["ingress"]["targets"][0]
    target |= {"stream": fresh, "publisher": publisher}
    target["create"]["subjects"] = [f"{fresh}.>"]
    target["sources"][0]["subject_prefix"] = fresh
    own.write_text(yaml.safe_dump(document))
    service = at.service("ingress", "ingress", "run", "-c", str(own))
    try:
        rate = run(_watch(at.nats.url, fresh, service))
        return rate, memory_mb("VmHWM", service.pid)
    finally:
        service.drain(is_known_to_work=True)
        run(_delete(at.nats.url, fresh))


async def _watch(url: str, stream: str, service: Service) -> float:
    client = await connect_bench(url)
    first, started, deadline = 0, 0.0, time.perf_counter() + RUN_TIMEOUT_S
    while True:
        info = await stream_info(client, stream)
        now = time.perf_counter()
        assert now < deadline, f"{stream} did not fill\n{service.tail()}"
        assert service.runs(), service.tail()
        if info and info.messages and not first:
            first, started = info.messages, now
        if info and info.messages >= MESSAGE_COUNT:
            await client.aclose()
            return (MESSAGE_COUNT - first) / (now - started)
        await asyncio.sleep(0.02)


async def _delete(url: str, stream: str) -> None:
    client = await connect_bench(url)
    await client.api(f"STREAM.DELETE.{stream}")
    await client.aclose()


async def _floor(url: str, raw: Raw) -> float:
    stream = unique("F")
    rate = await raw(url, stream, stream, MESSAGE_COUNT, PROVENANCE)
    await _delete(url, stream)
    return rate


def bench_publisher(publisher: str, raw: Raw) -> BenchResult:
    with bench_environment() as at:
        run(fill_stream(at.nats.url, STREAM, MESSAGE_COUNT))
        config = archive_with_egress(at)
        return measure_paired(
            floor=lambda: run(_floor(at.nats.url, raw)), value=lambda: measure_ingress(at, config, publisher)[0]
        )


def bench_ten_chains() -> BenchResult:
    with bench_environment() as at:
        one, ten = write_archive(at, 1), write_archive(at, CHAIN_COUNT)
        return measure_paired(
            floor=lambda: measure_ingress(at, one, "fast")[0], value=lambda: measure_ingress(at, ten, "fast")[0]
        )


def bench_memory() -> BenchResult:
    with bench_environment() as at:
        run(fill_stream(at.nats.url, STREAM, MESSAGE_COUNT))
        return BenchResult(measure_ingress(at, archive_with_egress(at), "auto")[1])


LATENCY_MESSAGES = 32
PAUSES_S = (1.1, 2.2)  # seconds between two messages: each is alone in its segment
SUBJECT = "minio.events"
RANDOM_SEED = 20_000


class LatencyProbe:
    """The times at which each message was published, and received from a consumer of the target."""

    def __init__(self, client: FloeClient, stream: str) -> None:
        self._client, self._stream = client, stream
        self.published: dict[bytes, float] = {}
        self.stored: dict[bytes, float] = {}

    async def follow(self) -> None:
        inbox = self._client.new_inbox()
        await self._client.subscribe_raw(inbox, self._sink)
        config = {"deliver_subject": inbox, "ack_policy": "none", "deliver_policy": "all"}
        request = {"stream_name": self._stream, "config": config}
        await self._client.api(f"CONSUMER.CREATE.{self._stream}", request)

    def _sink(self, _subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        self.stored.setdefault(payload, time.perf_counter())

    async def send(self, payload: bytes) -> None:
        self.published[payload] = time.perf_counter()
        self._client.send(frame(b"bench.a", payload))
        await self._client.flush_writes()

    def seconds(self) -> list[float]:
        return [self.stored[payload] - at for payload, at in self.published.items()]


async def _measure(url: str, stream: str, rng: random.Random) -> list[float]:
    client = await connect_bench(url)
    await soon(lambda: stream_info(client, stream), seconds=30)
    probe = LatencyProbe(client, stream)
    await probe.follow()
    await probe.send(b"warm")
    await soon(lambda: b"warm" in probe.stored, seconds=70, every=0.1)
    probe.published.clear()
    for number in range(LATENCY_MESSAGES):
        await asyncio.sleep(rng.uniform(*PAUSES_S))
        await probe.send(b"%d" % number)
    await soon(lambda: probe.stored.keys() >= probe.published.keys(), seconds=70, every=0.1)
    await client.aclose()
    return probe.seconds()


async def _prepare(url: str) -> None:
    client = await connect_bench(url)
    await create_stream(client, {"name": STREAM, "subjects": ["bench.>"], "storage": "file"})
    await client.aclose()


def _configs(at: BenchEnvironment, bucket: str, endpoint_url: str, ingress: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write one configuration for each service; egress writes through `endpoint_url`."""
    central = at.config(bucket, {"segment": {"max_age": "1s"}})
    document = yaml.safe_load(central.read_text())
    document["ingress"] = {**{k: v for k, v in document["ingress"].items() if k != "poll_interval"}, **ingress}
    central.write_text(yaml.safe_dump(document))
    document["store"]["endpoint_url"] = endpoint_url
    site = central.with_name("site.yaml")
    site.touch(mode=0o600)
    site.write_text(yaml.safe_dump(document))
    return site, central


def measure_latencies(at: BenchEnvironment, endpoint_url: str, ingress: Mapping[str, Any]) -> list[float]:
    """Return the seconds of each message, in the order in which they were published."""
    bucket = at.s3.new_bucket()
    site, central = _configs(at, bucket, endpoint_url, ingress)
    run(_prepare(at.nats.url))
    services = [
        at.service("egress", "egress", "run", "-c", str(site)),
        at.service("ingress", "ingress", "run", "-c", str(central)),
    ]
    try:
        return run(_measure(at.nats.url, f"{TARGET}_{bucket}", random.Random(RANDOM_SEED)))
    except AssertionError:
        print(*(service.tail() for service in services), sep="\n")
        raise
    finally:
        for service in services:
            service.kill()


def bench_poll() -> BenchResult:
    with bench_environment() as at:
        found = measure_latencies(at, at.s3.endpoint_url, {"poll_interval": "1s"})
    return BenchResult(round(statistics.median(found), 3))


def bench_events() -> BenchResult:
    with bench_environment() as at, Notifying(at.s3.endpoint_url, at.nats.url, SUBJECT) as s3:
        found = measure_latencies(at, s3.url, {"events": f"nats://{SUBJECT}"})
    return BenchResult(round(statistics.median(found), 3))


BENCHES = [
    Bench("ingress.fast", "msg/s", "ratio >= 0.7", partial(bench_publisher, "fast", measure_raw_fast)),
    Bench("ingress.atomic", "msg/s", "ratio >= 0.8", partial(bench_publisher, "atomic", measure_raw_atomic)),
    Bench("ingress.ten_chains", "msg/s", "ratio >= 0.9", bench_ten_chains),
    Bench("memory.ingress", "MB", "<= 300", bench_memory),
    Bench("latency.poll", "s", "value <= 2.5", bench_poll),
    Bench("latency.events", "s", "value <= 1.8", bench_events),
]
