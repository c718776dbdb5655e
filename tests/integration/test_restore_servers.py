"""The output of the archive writers on every minor version of nats-server that they support: an equal stream."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from common.archive.captures import CapturedConsumer, CapturedConsumers
from common.archive.columns import batch_of
from common.archive.segment import Message
from common.clock import NS_PER_S
from common.nats.api import create_consumer, list_consumers, stream_info
from common.nats.headers import build_block
from common.nats.restore import KEEP_ALIVE_FRAME
from egress.captures import captured_consumers
from infra.local.nats import NatsServer, nats_server_binary
from infra.publish import MAX_HEADERS, delete_message, publish_awkward
from ingress.recovery.files_form import archive_writer
from ingress.recovery.stream_archive import ArchiveWriter, restorable_consumers
from tests.support import restoring as back
from tests.support.basics import PATIENCE, seeded, soon
from tests.support.egress import Bench, bench_of
from tests.support.restore import Captured, captured, send_archive

pytestmark = pytest.mark.servers

STREAM = "ORDERS"
CONFIG = {"name": STREAM, "subjects": [f"{STREAM}.>"], "storage": "file", "num_replicas": 1}
BATCH = 300
#: The server's version, empty for the newest, and the form of the archive.
KINDS = [*((version, "auto") for version in ("2.10", "2.11", "2.12", "2.14", "")), ("", "files")]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0] or 'newest'}-{kind[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def server(kind: tuple[str, str]) -> Iterator[NatsServer]:
    with NatsServer(binary=nats_server_binary(kind[0])) as server:
        yield server


@pytest.fixture
async def bench(server: NatsServer, tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(server.url, tmp_path) as bench:
        yield bench
        await bench.client.api(f"STREAM.DELETE.{STREAM}")


@pytest.fixture
def writer(kind: tuple[str, str], bench: Bench) -> ArchiveWriter:
    return archive_writer(STREAM, ".".join(map(str, bench.client.server_version)), kind[1])


async def fill(bench: Bench) -> None:
    """Rows of every kind between two deleted ends; `first_seq` above 1."""
    client = bench.client
    await client.api(f"STREAM.CREATE.{STREAM}", {**CONFIG, "first_seq": 4001, "duplicate_window": NS_PER_S // 10})
    await bench.publish(STREAM, [b"order %d" % n for n in range(1000)], subject="eu", headers=build_block([b"A:1"]))
    await publish_awkward(client, STREAM, f"{STREAM}.odd", seeded(), 150, max_message_bytes=20_000)
    largest = b"A: " + b"v" * (MAX_HEADERS - len(build_block([b"A: "])))
    await client.request_raw(f"{STREAM}.eu".encode(), b"", build_block([largest]), timeout=PATIENCE)
    await bench.publish(STREAM, [b"order %d" % n for n in range(300)], subject="us")
    await client.api(f"STREAM.PURGE.{STREAM}", {"seq": 4051})
    end = await bench.last(STREAM)
    for sequence in (4060, 4061, 4100, 4101, *range(end - 3, end + 1)):
        await delete_message(client, STREAM, sequence)


async def restore(
    bench: Bench, writer: ArchiveWriter, source: Captured, consumers: Sequence[CapturedConsumer] = ()
) -> None:
    """Restore under a subject that nobody publishes to, then with its own."""
    guarded = {**source.config, "subjects": [f"_floe.restore.{STREAM}"]}

    def archive() -> Iterator[bytes]:
        yield from writer.encode_head(guarded, source.created, source.state, consumers)
        yield KEEP_ALIVE_FRAME
        for start in range(0, len(source.rows), BATCH):
            yield from writer.encode_rows(batch_of(*source.rows[start : start + BATCH]))
            yield KEEP_ALIVE_FRAME
        yield from writer.encode_tail()

    await send_archive(bench.client, STREAM, guarded, source.state, archive())
    await bench.client.api(f"STREAM.UPDATE.{STREAM}", source.config, timeout=PATIENCE)


async def same(bench: Bench, source: Captured, created: str = "") -> None:
    found = await captured(bench.client, STREAM)
    assert (found.first, found.last, found.messages) == (source.first, source.last, source.messages)
    assert found.rows == source.rows
    assert (found.config, found.created) == (source.config, created or found.created)


async def resumes_at(bench: Bench, sequence: int) -> None:
    await bench.publish(STREAM, [b"next"])
    assert await bench.last(STREAM) == sequence


async def test_a_stream_comes_back_as_it_was(server: NatsServer, writer: ArchiveWriter, bench: Bench) -> None:
    await fill(bench)
    client, subjects = bench.client, {"clean": b"", "filtered": f"{STREAM}.us".encode()}
    for name, subject in subjects.items():
        explicit: dict[str, Any] = {"ack_policy": "explicit", "ack_wait": 3600 * NS_PER_S}
        await create_consumer(client, STREAM, {"durable_name": name, "filter_subject": subject.decode(), **explicit})
        await back.consume(bench, STREAM, name, 10)
    source, before_positions = await captured(client, STREAM), await back.positions(bench, STREAM)
    held = captured_consumers(await list_consumers(client, STREAM))
    assert (source.first, source.last - source.rows[-1].sequence) == (4051, 4)
    await bench.client.api(f"STREAM.DELETE.{STREAM}")

    consumers, _ = restorable_consumers(CapturedConsumers(source.created, source.last, held), source.last)
    await restore(bench, writer, source, consumers)

    # Only the files carry the creation time of the stream.
    created = source.created if writer.format == "files" else (await stream_info(client, STREAM)).created
    await same(bench, source, created)
    assert await back.positions(bench, STREAM) == before_positions

    await asyncio.to_thread(server.restart)
    await soon(lambda: client.is_up)
    # Before 2.14, a stream with a changed configuration reports the time of its restore after a restart.
    await same(bench, source, created if client.server_version >= (2, 14, 0) else "")
    assert await back.positions(bench, STREAM) == before_positions
    for name, subject in subjects.items():
        ahead = (m for m in source.rows if m.sequence > before_positions[name][1] and subject in (b"", m.subject))
        assert await back.consume(bench, STREAM, name, 1) == [next(ahead).payload]
    await resumes_at(bench, source.last + 1)


async def test_a_stream_that_is_empty_now_resumes_after_its_end(
    server: NatsServer, writer: ArchiveWriter, bench: Bench
) -> None:
    await bench.client.api(f"STREAM.CREATE.{STREAM}", CONFIG)
    await bench.publish(STREAM, [b"x"] * 5)
    await bench.client.api(f"STREAM.PURGE.{STREAM}")
    source = await captured(bench.client, STREAM)
    assert (source.first, source.last, source.rows) == (6, 5, [])
    await bench.client.api(f"STREAM.DELETE.{STREAM}")

    await restore(bench, writer, source)

    for _ in range(2):
        await same(bench, source)
        await asyncio.to_thread(server.restart)
        await soon(lambda: bench.client.is_up)
    await resumes_at(bench, 6)


async def test_gaps_of_any_width_come_back(writer: ArchiveWriter, bench: Bench) -> None:
    """Gaps within a block and between blocks, and behind the last row."""
    sequences = list(accumulate([7, *[1, 2, 50, 9_999, 10_001, 12_000, 5_000_000] * 20, 5_000_000_000]))
    began = 1_795_000_000_000_000_000
    rows = [Message(number, began + number, b"orders.%d" % (number % 5), None, b"x") for number in sequences]
    last = rows[-1].sequence + 3_000_000_000
    source = Captured(CONFIG, "2026-01-01T00:00:00Z", rows[0].sequence, last, len(rows), rows)

    await restore(bench, writer, source)

    found = await captured(bench.client, STREAM)
    assert (found.first, found.last, found.rows) == (source.first, source.last, source.rows)
    await resumes_at(bench, last + 1)
