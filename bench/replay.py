"""`replay.bytes_read`: bytes read to replay 1 % of the time of 10,000 segments, over all their bytes."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from pathlib import Path

from bench.harness import Bench, Figure
from common.chain import Chain
from common.clock import SystemClock
from common.jetstream.api import create_stream, stream_info
from common.segments.documents import ChainDocument, ChainStore, StreamDocument
from common.segments.keys import Layout, SegmentName
from common.segments.reader import SegmentWriter, record_batch
from common.segments.segment import Footer, Ledger
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from common.settings.loader import parse
from common.tasks import Stop
from infra.local.nats import NatsServer
from ingress.replay.output import Teller
from ingress.replay.replay import Replay
from ingress.replay.request import ReplayOptions, Request
from tests.counting_store import CountingObjects

CHAIN = Chain("bench", "BENCH")
SEGMENTS, ROWS, PAYLOAD = 10_000, 50, 1000
START = 1_700_000_000  # seconds; one message a second
PARTS = 100  # of the archive, one of which is replayed


def fill(folder: Path) -> int:
    """Segments as egress writes them, straight into the folder; their bytes."""
    layout, noise, total = Layout("data"), random.Random(1).randbytes(PAYLOAD + ROWS * SEGMENTS), 0
    for number in range(SEGMENTS):
        coverage = SequenceRange(number * ROWS + 1, (number + 1) * ROWS)
        sequences = list(range(coverage.first, coverage.last + 1))
        times = [(START + s) * 10**9 for s in sequences]
        batch = record_batch(
            sequences, times, [b"bench.a"] * ROWS, [None] * ROWS, [noise[s : s + PAYLOAD] for s in sequences]
        )
        spool = folder / "spool.parquet"
        writer = SegmentWriter(spool, level=0, compression_level=1)
        writer.append(batch)
        footer = Footer(CHAIN, 0, coverage, ROWS, Ledger(), 0, None, None, None, "bench")
        done = writer.finish(footer)
        path = folder / layout.segment(SegmentName(CHAIN, 0, coverage, done.sha256[:16]))
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(spool, path)
        total += done.size
    return total


async def replayed(folder: Path, url: str) -> int:
    """Replay one part of the time out of the middle; the bytes that were read."""
    objects = CountingObjects(folder)
    store, documents = SegmentStore(objects, Layout("data")), ChainStore(objects, Layout("data"))
    documents.create_stream(CHAIN, StreamDocument({"name": "BENCH"}, "t0"))
    documents.create_chain(CHAIN, ChainDocument((), 1, 1))
    settings = parse(f"nats: {{url: '{url}'}}\nstore: {{url: 'file://{folder}', prefix: data}}\n", "bench")[0]
    whole = SEGMENTS * ROWS
    first = START + whole // 2 + 7
    request = Request("bench", "BENCH", "BACK", from_time=_text(first), to_time=_text(first + whole // PARTS))
    work = Replay(settings, request, ReplayOptions(), store, documents, SystemClock(), Teller())
    objects.read = 0
    async with work.connected() as client:
        await create_stream(
            client, {"name": "BACK", "subjects": ["bench.>"], "allow_batched": True, "allow_atomic": True}
        )
        await work.run(client, Stop())
        info = await stream_info(client, "BACK")
    assert info is not None
    assert info.messages == whole // PARTS, info.messages
    store.close()
    return objects.read


def _text(seconds: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def bytes_read() -> Figure:
    with tempfile.TemporaryDirectory(prefix="floe-bench-") as name, NatsServer() as server:
        folder = Path(name) / "store"
        folder.mkdir()
        total = fill(folder)
        read = asyncio.run(replayed(folder, server.url))
    return Figure("replay.bytes_read", round(read / total, 4), "1")


BENCHES = [Bench("replay.bytes_read", "1", "<= 0.03", bytes_read)]
