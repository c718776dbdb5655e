"""What the archive writers make, taken by every minor of nats-server that they are for: a stream as it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest

from common.clock import NS_PER_S, SystemClock
from common.jetstream.api import create_consumer, stream_info
from common.jetstream.client import FloeClient, frame
from common.jetstream.headers import build_block
from common.segments.columns import batch_of
from common.segments.segment import Message
from infra.awkward import MAX_HEADERS, delete, publish_awkward
from infra.local.nats import NatsServer, nats_server_binary
from ingress.restore.archive import KEEP_ALIVE, ArchiveConsumer, ArchiveWriter, archive_writer
from tests.support.basics import PATIENCE, parse_ack, seeded, soon
from tests.support.egress import connected
from tests.support.restore import Captured, captured, send_archive

pytestmark = pytest.mark.servers

STREAM = "ORDERS"
WIDE = 11_000  # sequences that are gone in one stretch: a block of its own follows
BATCH = 300
HOUR = 3600 * NS_PER_S


KINDS = [*((version, "auto") for version in ("2.10", "2.11", "2.12", "2.14", "")), ("", "files")]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0] or 'newest'}-{kind[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The server's version, empty for the newest, and the form of the archive."""
    version, form = request.param
    return version, form


@pytest.fixture
def server(kind: tuple[str, str]) -> Iterator[NatsServer]:
    with NatsServer(binary=nats_server_binary(kind[0])) as server:
        yield server


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[FloeClient]:
    async with aclosing(await connected(server.url)) as client:
        yield client


def writer_for(client: FloeClient, kind: tuple[str, str]) -> ArchiveWriter:
    return archive_writer(STREAM, ".".join(map(str, client.server_version)), kind[1])


async def fill(client: FloeClient) -> None:
    """Rows of every kind between two ends that are gone; `first_seq` above 1."""
    config = {"name": STREAM, "subjects": ["orders.>"], "storage": "file", "first_seq": 4001, "num_replicas": 1}
    await client.api(f"STREAM.CREATE.{STREAM}", {**config, "duplicate_window": NS_PER_S // 10})

    async def last() -> int:
        info = await stream_info(client, STREAM)
        assert info is not None
        return info.last_sequence

    async def publish(count: int, subject: bytes) -> None:
        end = await last()
        for begin in range(0, count, 4000):  # the server drops what it cannot queue
            some = range(begin, min(begin + 4000, count))
            for number in some:
                client.send(
                    frame(subject % (number % 7), b"order %d" % number, None if number % 3 else build_block([b"A:1"]))
                )
            end += len(some)
            await soon(partial(is_last, end))

    async def is_last(sequence: int) -> bool:
        return await last() == sequence

    await publish(1000, b"orders.eu.%d")
    await publish_awkward(client, STREAM, "orders.odd", seeded(), 150, largest=20_000)
    largest = b"A: " + b"v" * (MAX_HEADERS - len(build_block([b"A: "])))
    await client.request_raw(b"orders.eu.large", b"", build_block([largest]), timeout=PATIENCE)
    await publish(WIDE, b"orders.gone.%d")
    await client.api(f"STREAM.PURGE.{STREAM}", {"filter": "orders.gone.>"})
    await publish(1000, b"orders.us.%d")
    await client.api(f"STREAM.PURGE.{STREAM}", {"seq": 4051})
    end = await last()
    for sequence in (4060, 4061, 4100, 4101, *range(end - 3, end + 1)):
        await delete(client, STREAM, sequence)


class Pulled:
    """A pull consumer; what is delivered: stream sequence, consumer sequence, ack subject."""

    def __init__(self, client: FloeClient, name: str) -> None:
        self._client, self._name = client, name
        self._arrived: list[tuple[int, int, bytes]] = []

    async def fetch(self, count: int) -> list[tuple[int, int, bytes]]:
        self._arrived.clear()
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe_raw(inbox, self._sink)
        request = json.dumps({"batch": count, "expires": int(PATIENCE * NS_PER_S)}).encode()
        subject = self._client.api_subject(f"CONSUMER.MSG.NEXT.{STREAM}.{self._name}").encode()
        self._client.send(frame(subject, request, None, inbox.encode()))
        await soon(lambda: len(self._arrived) >= count)
        await subscription.unsubscribe()
        return list(self._arrived)

    def _sink(self, _subject: bytes, reply: bytes, _payload: bytes, _headers: bytes | None) -> None:
        if reply:
            found = parse_ack(reply)
            self._arrived.append((found.stream_sequence, found.consumer_sequence, reply))

    async def answer(self, delivered: Sequence[tuple[int, int, bytes]], word: bytes = b"+ACK") -> None:
        for _, _, reply in delivered:
            await self._client.request_raw(reply, word, timeout=PATIENCE)


async def info(client: FloeClient, consumer: str) -> dict[str, Any]:
    return await client.api(f"CONSUMER.INFO.{STREAM}.{consumer}")


async def archived(
    client: FloeClient, name: str, pending: dict[int, tuple[int, int]], redelivered: dict[int, int]
) -> ArchiveConsumer:
    """A consumer as its site's egress captures it, with what only its application knows."""
    found = await info(client, name)
    position = [(found[key]["consumer_seq"], found[key]["stream_seq"]) for key in ("delivered", "ack_floor")]
    return ArchiveConsumer(name, found["config"], found["created"], *position, pending, redelivered)


async def with_consumers(client: FloeClient) -> list[ArchiveConsumer]:
    """Consumers in the middle of their work: clean, with holes, filtered, push."""
    explicit = {"ack_policy": "explicit", "ack_wait": HOUR, "deliver_policy": "all"}
    for config in (
        {"durable_name": "clean", **explicit},
        {"durable_name": "holes", **explicit},
        {"durable_name": "filtered", "filter_subject": "orders.us.3", **explicit},
        {"durable_name": "push", "deliver_subject": "pushed.here", "max_ack_pending": 5, **explicit},
    ):
        await create_consumer(client, STREAM, config)
    for name, count in (("clean", 100), ("filtered", 10)):
        pulled = Pulled(client, name)
        await pulled.answer(await pulled.fetch(count))

    holes = Pulled(client, "holes")
    delivered = await holes.fetch(20)
    left = [delivered[3], delivered[11], delivered[19]]
    await holes.answer([each for each in delivered if each not in left])
    await holes.answer(left[:1], b"-NAK")
    [again] = await holes.fetch(1)
    assert again[0] == left[0][0]
    an_hour_ago = int((SystemClock().now() - 3700) * NS_PER_S)  # so what is pending is due
    pending = {each[0]: (each[1], an_hour_ago + each[0]) for each in left}

    pushed = await receive(client, 5)
    await holes.answer(pushed)
    await soon(lambda: is_clean(client, "push"))
    return [
        await archived(client, "clean", {}, {}),
        await archived(client, "holes", pending, {again[0]: 1}),
        await archived(client, "filtered", {}, {}),
        await archived(client, "push", {}, {}),
    ]


async def is_clean(client: FloeClient, consumer: str) -> bool:
    return not (await info(client, consumer))["num_ack_pending"]


async def receive(client: FloeClient, count: int) -> list[tuple[int, int, bytes]]:
    """What the push consumer delivers as long as somebody listens."""
    found: list[bytes] = []
    subscription = await client.subscribe_raw("pushed.here", lambda _s, reply, _p, _h: found.append(reply))
    await soon(lambda: len(found) >= count)
    await subscription.unsubscribe()
    acks = [parse_ack(reply) for reply in found[:count]]
    return [(ack.stream_sequence, ack.consumer_sequence, reply) for ack, reply in zip(acks, found, strict=False)]


def archive(
    writer: ArchiveWriter, source: Captured, config: dict[str, Any], consumers: Sequence[ArchiveConsumer]
) -> Iterator[bytes]:
    yield from writer.head(config, source.created, source.state, consumers)
    yield KEEP_ALIVE
    for start in range(0, len(source.rows), BATCH):
        yield from writer.rows(batch_of(*source.rows[start : start + BATCH]))
        yield KEEP_ALIVE
    yield from writer.tail()


async def restore(
    client: FloeClient, writer: ArchiveWriter, source: Captured, consumers: Sequence[ArchiveConsumer] = ()
) -> None:
    """Under a subject that nobody publishes to, then with its own."""
    guarded = {**source.config, "subjects": [f"_floe.restore.{STREAM}"]}
    await send_archive(client, STREAM, guarded, source.state, archive(writer, source, guarded, consumers))
    await client.api(f"STREAM.UPDATE.{STREAM}", source.config, timeout=PATIENCE)


async def same(client: FloeClient, source: Captured, created: str = "") -> None:
    found = await captured(client, STREAM)
    assert (found.first, found.last, found.messages) == (source.first, source.last, source.messages)
    assert found.rows == source.rows
    assert (found.config, found.created) == (source.config, created or found.created)


async def positions(client: FloeClient, consumers: Sequence[ArchiveConsumer]) -> dict[str, Any]:
    found = {}
    for each in consumers:
        told = await info(client, each.name)
        at = [(told[key]["consumer_seq"], told[key]["stream_seq"]) for key in ("delivered", "ack_floor")]
        config = {key: value for key, value in told["config"].items() if key != "metadata"}
        found[each.name] = (*at, told["num_ack_pending"], told["num_redelivered"], config)
    return found


async def published(client: FloeClient) -> int:
    answer, _ = await client.request_raw(b"orders.eu.next", b"next", timeout=PATIENCE)
    return int(json.loads(answer)["seq"])


async def test_a_stream_comes_back_as_it_was(kind: tuple[str, str], server: NatsServer, client: FloeClient) -> None:
    await fill(client)
    consumers = await with_consumers(client)
    source = await captured(client, STREAM)
    stood = await positions(client, consumers)
    assert (source.first, source.last - source.rows[-1].sequence) == (4051, 4)
    await client.api(f"STREAM.DELETE.{STREAM}")
    writer = writer_for(client, kind)

    await restore(client, writer, source, consumers)

    # Only the files carry when the stream was made.
    restored = await stream_info(client, STREAM)
    assert restored is not None
    created = source.created if writer.format == "files" else restored.created
    await same(client, source, created)
    assert await positions(client, consumers) == stood
    # A server that makes its index of subjects anew leaves out those with a byte 0x7f, which it still delivers.
    counted = replace(source, rows=[row for row in source.rows if b"\x7f" not in row.subject])
    for each in consumers:
        pending = (await info(client, each.name))["num_pending"]
        assert pending in (len(ahead(source, each)), len(ahead(counted, each)))

    await asyncio.to_thread(server.restart)
    await soon(lambda: client.is_up)
    # Before 2.14, a stream whose configuration was changed tells after a restart when it was restored.
    await same(client, source, created if client.server_version >= (2, 14, 0) else "")
    assert await positions(client, consumers) == stood

    await next_messages(client, source, consumers)
    assert await published(client) == source.last + 1


def ahead(source: Captured, consumer: ArchiveConsumer) -> list[int]:
    """The sequences that it never got."""
    wanted = consumer.config.get("filter_subject", "").encode()
    rows = (row for row in source.rows if row.sequence > consumer.delivered[1])
    return [row.sequence for row in rows if wanted in (b"", row.subject)]


async def next_messages(client: FloeClient, source: Captured, consumers: Sequence[ArchiveConsumer]) -> None:
    """Each consumer goes on where it stood: what is pending and due comes again, then what it never got."""
    clean, holes, filtered, push = consumers
    for consumer in (clean, filtered):
        [found] = await Pulled(client, consumer.name).fetch(1)
        assert found[:2] == (ahead(source, consumer)[0], consumer.delivered[0] + 1)
    [pushed] = await receive(client, 1)
    assert pushed[:2] == (ahead(source, push)[0], push.delivered[0] + 1)

    again = await Pulled(client, holes.name).fetch(len(holes.pending))
    counts = {each[0]: int(each[2].split(b".")[-5]) for each in again}  # how often it was delivered, this time included
    assert counts == {sequence: 2 + holes.redelivered.get(sequence, 0) for sequence in holes.pending}
    [found] = await Pulled(client, holes.name).fetch(1)
    assert found[0] == ahead(source, holes)[0]


async def test_a_stream_that_is_empty_now_goes_on_after_its_end(
    kind: tuple[str, str], server: NatsServer, client: FloeClient
) -> None:
    await client.api(f"STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": ["orders.>"], "storage": "file"})
    for _ in range(5):
        await published(client)
    await client.api(f"STREAM.PURGE.{STREAM}")
    source = await captured(client, STREAM)
    assert (source.first, source.last, source.rows) == (6, 5, [])
    await client.api(f"STREAM.DELETE.{STREAM}")

    await restore(client, writer_for(client, kind), source)

    for _ in range(2):
        found = await captured(client, STREAM)
        assert (found.first, found.last, found.rows) == (6, 5, [])
        await asyncio.to_thread(server.restart)
        await soon(lambda: client.is_up)
    assert await published(client) == 6


async def test_gaps_of_any_width_come_back(kind: tuple[str, str], client: FloeClient) -> None:
    """Within a block and between blocks, and behind the last row."""
    sequences = list(accumulate([7, *[1, 2, 50, 9_999, 10_001, 12_000, 5_000_000] * 20, 5_000_000_000]))
    began = 1_795_000_000_000_000_000
    rows = [Message(number, began + number, b"orders.%d" % (number % 5), None, b"x") for number in sequences]
    config = {"name": STREAM, "subjects": ["orders.>"], "storage": "file", "num_replicas": 1}
    last = rows[-1].sequence + 3_000_000_000
    source = Captured(config, "2026-01-01T00:00:00Z", rows[0].sequence, last, len(rows), rows)

    await restore(client, writer_for(client, kind), source)

    found = await captured(client, STREAM)
    assert (found.first, found.last, found.rows) == (source.first, source.last, source.rows)
    assert await published(client) == last + 1
