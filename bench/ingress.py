"""`ingress.atomic` and `memory.ingress`: segments in the store to messages stored in the target."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from bench.floors import client_of, fill, raw_atomic
from bench.harness import Bench, Result, paired
from bench.place import STREAM, TARGET, Place, archive_end, peak_mb, place, run, store_of, until
from common.jetstream.streams import stream_info
from tests.support import unique

COUNT = 400_000
# As long as the provenance line of the messages that Floe stores.
PROVENANCE = b"Floe-Source: bench BENCH 0 0 200000 1700000000000000000\r\n"


def frozen(at: Place) -> tuple[str, Path]:
    """A bucket with all messages, and its configuration."""
    bucket = at.s3.new_bucket()
    config = at.config(bucket)
    store = store_of(config)
    service = at.service("egress", "egress", "run", "-c", str(config))
    until(lambda: archive_end(store) >= COUNT, service, every=0.2)
    assert service.drain() == 0, service.tail()
    return bucket, config


def melt(at: Place, bucket: str, config: Path) -> tuple[float, float]:
    """Messages a second from the first stored in the target to the last, and the peak resident size in MB.

    Each run has a target of its own and state of its own, so every run carries everything.
    """
    fresh = unique("T")
    text = config.read_text().replace(f"{TARGET}_{bucket}", fresh).replace(f"S_{bucket}", f"S_{fresh}")
    own = config.with_name(f"{fresh}.yaml")
    own.write_text(text.replace(f"subjects:\n      - {bucket}.>", f"subjects:\n      - {fresh}.>"))
    own.write_text(own.read_text().replace(f"subject_prefix: {bucket}", f"subject_prefix: {fresh}"))
    own.chmod(0o600)
    service = at.service("ingress", "ingress", "run", "-c", str(own))
    try:
        rate = run(_watch(at.nats.url, fresh))
        return rate, peak_mb(service)
    finally:
        service.drain()
        run(_delete(at.nats.url, fresh))


async def _watch(url: str, stream: str) -> float:
    client = await client_of(url)
    first, started, deadline = 0, 0.0, time.perf_counter() + 120
    while True:
        info = await stream_info(client, stream)
        now = time.perf_counter()
        assert now < deadline, f"{stream} did not fill"
        if info and info.messages and not first:
            first, started = info.messages, now
        if info and info.messages >= COUNT:
            await client.aclose()
            return (COUNT - first) / (now - started)
        await asyncio.sleep(0.02)


async def _delete(url: str, stream: str) -> None:
    client = await client_of(url)
    await client.api(f"STREAM.DELETE.{stream}")
    await client.aclose()


async def _floor(url: str) -> float:
    stream = unique("F")
    rate = await raw_atomic(url, stream, stream, COUNT, PROVENANCE)
    await _delete(url, stream)
    return rate


def atomic() -> Result:
    with place() as at:
        run(fill(at.nats.url, STREAM, COUNT))
        bucket, config = frozen(at)
        return paired(
            "ingress.atomic",
            "msg/s",
            floor=lambda: run(_floor(at.nats.url)),
            value=lambda: melt(at, bucket, config)[0],
        )


def memory() -> Result:
    with place() as at:
        run(fill(at.nats.url, STREAM, COUNT))
        return Result("memory.ingress", melt(at, *frozen(at))[1], "MB")


BENCHES = [
    Bench("ingress.atomic", "msg/s", "ratio >= 0.7", atomic),
    Bench("memory.ingress", "MB", "<= 300", memory),
]
