"""`latency.poll` and `latency.events`: seconds from published at the site to stored at the centre."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.floors import client_of
from bench.harness import Bench, Figure
from bench.place import STREAM, TARGET, BenchPlace, place, run
from common.jetstream.api import create_stream, stream_info
from common.jetstream.client import FloeClient, frame
from tests.notifying import Notifying
from tests.support import soon

MESSAGES = 32
GAPS = (1.1, 2.2)  # seconds between two messages: each is alone in its segment
SUBJECT = "minio.events"
SEED = 20_000


class Clocked:
    """When each message was published and when the target had stored it."""

    def __init__(self, client: FloeClient, stream: str) -> None:
        self._client, self._stream = client, stream
        self.published: dict[bytes, float] = {}
        self.stored: dict[bytes, float] = {}

    async def follow(self) -> None:
        """A consumer of the target hands over what is stored, as it is stored."""
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
    client = await client_of(url)
    await soon(lambda: stream_info(client, stream), seconds=30)
    clocked = Clocked(client, stream)
    await clocked.follow()
    await clocked.send(b"warm")
    await soon(lambda: b"warm" in clocked.stored, seconds=70, every=0.1)
    clocked.published.clear()
    for number in range(MESSAGES):
        await asyncio.sleep(rng.uniform(*GAPS))
        await clocked.send(b"%d" % number)
    await soon(lambda: clocked.stored.keys() >= clocked.published.keys(), seconds=70, every=0.1)
    await client.aclose()
    return clocked.seconds()


async def _prepare(url: str) -> None:
    client = await client_of(url)
    await create_stream(client, {"name": STREAM, "subjects": ["bench.>"], "storage": "file"})
    await client.aclose()


def _configs(at: BenchPlace, bucket: str, endpoint_url: str, ingress: Mapping[str, Any]) -> tuple[Path, Path]:
    """One for each service: egress writes through `endpoint_url`."""
    central = at.config(bucket, {"segment": {"max_age": "1s"}})
    document = yaml.safe_load(central.read_text())
    document["ingress"] = {
        **{k: v for k, v in document["ingress"].items() if k != "poll_interval"},
        **ingress,
    }
    central.write_text(yaml.safe_dump(document))
    document["store"]["endpoint_url"] = endpoint_url
    site = central.with_name("site.yaml")
    site.touch(mode=0o600)
    site.write_text(yaml.safe_dump(document))
    return site, central


def latencies(at: BenchPlace, endpoint_url: str, ingress: Mapping[str, Any]) -> list[float]:
    """Seconds of each message, in the order in which they were published."""
    bucket = at.s3.new_bucket()
    site, central = _configs(at, bucket, endpoint_url, ingress)
    run(_prepare(at.nats.url))
    services = [
        at.service("egress", "egress", "run", "-c", str(site)),
        at.service("ingress", "ingress", "run", "-c", str(central)),
    ]
    try:
        return run(_measure(at.nats.url, f"{TARGET}_{bucket}", random.Random(SEED)))
    except AssertionError:
        print(*(service.tail() for service in services), sep="\n")
        raise
    finally:
        for service in services:
            service.kill()


def poll() -> Figure:
    with place() as at:
        found = latencies(at, at.s3.endpoint_url, {"poll_interval": "1s"})
    return Figure("latency.poll", round(statistics.median(found), 3), "s")


def events() -> Figure:
    with place() as at, Notifying(at.s3.endpoint_url, at.nats.url, SUBJECT) as s3:
        found = latencies(at, s3.url, {"events": f"nats://{SUBJECT}"})
    return Figure("latency.events", round(statistics.median(found), 3), "s")


BENCHES = [
    Bench("latency.poll", "s", "value <= 2.5", poll),
    Bench("latency.events", "s", "value <= 1.8", events),
]
