"""What every publisher does on a real server: rows after an expected sequence, and only sure answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.chain import Chain
from common.jetstream.client import FloeClient, frame
from common.jetstream.streams import create_stream, stream_info
from common.segments.layout import SegmentName
from common.segments.rows import record_batch
from common.sequences import SequenceRange
from infra.local.nats import NatsServer
from ingress.checkpoints.intent import Piece
from ingress.publishing.publisher import PUBLISHERS, Outcome, Publisher
from ingress.publishing.replies import Expected, Replies, Unclear, judge_ack
from ingress.rows.blocks import Block, Rows
from ingress.rows.prepare import PUBLISHER_LINES, Preparer, Shape
from ingress.rows.subjects import Accepting, SubjectRule
from tests.ingress_world import arrived, client_of
from tests.segment_files import START_NS
from tests.support import soon, unique
from tests.tcp_proxy import TcpProxy

pytestmark = pytest.mark.servers
CHAIN = Chain("us-east", "NODES")
COUNTS = {"atomic": 2500, "single": 60}


@pytest.fixture(params=["atomic", "single"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[FloeClient]:
    async with client_of(nats_url) as connected:
        yield connected


@pytest.fixture
async def stream(client: FloeClient) -> str:
    return await new_stream(client)


async def new_stream(client: FloeClient, **config: Any) -> str:
    name = unique("T")
    await create_stream(client, {"name": name, "subjects": [f"{name}.>"], "allow_atomic": True, **config})
    return name


async def publisher(kind: str, client: FloeClient, stream: str, ack_timeout: float = 5.0) -> Publisher:
    return PUBLISHERS[kind](client, stream, await Replies.open(client), ack_timeout=ack_timeout)


def rows_for(stream: str, count: int, size: int = 20) -> Rows:
    """Rows in blocks of 700, so that batches span blocks."""
    preparer = Preparer(CHAIN, SubjectRule(stream.encode()), Shape(Accepting([">"]), 1 << 24))
    blocks = []
    for first in range(1, count + 1, 700):
        taken = list(range(first, min(count, first + 699) + 1))
        batch = record_batch(
            taken, [START_NS + s for s in taken], [b"a.%d" % (s % 9) for s in taken],
            [b"NATS/1.0\r\nNats-Msg-Id: same\r\n\r\n" if s % 3 else None for s in taken],
            [b"%d|" % s + b"x" * size for s in taken],
        )  # fmt: skip
        name = SegmentName(CHAIN, 0, SequenceRange(1, count), "0" * 16)
        piece = Piece(name, SequenceRange(taken[0], taken[-1]), len(taken))
        blocks.append(Block(piece, preparer.prepare(batch).material))
    return Rows(blocks)


async def last_of(client: FloeClient, stream: str) -> int:
    info = await stream_info(client, stream)
    assert info is not None
    return info.last_sequence


async def carry(publisher: Publisher, rows: Rows, client: FloeClient, stream: str, base: int = 0) -> int:
    """Publish until everything is stored, reading after every unclear outcome; how many there were."""
    stored = unclear = 0
    while stored < rows.count:
        outcome = await publisher.publish(rows, base, stored)
        assert stored <= outcome.stored <= rows.count
        stored = outcome.stored
        if outcome.unclear is not None:
            unclear += 1
            assert unclear < 50, outcome.unclear
            await soon(lambda: publisher._client.is_up)  # type: ignore[attr-defined]
            stored = await last_of(client, stream) - base
            assert stored >= outcome.stored
    return unclear


async def check(client: FloeClient, stream: str, count: int) -> None:
    found = await arrived(client, stream)
    assert [m.provenance.sequence for m in found if m.provenance] == list(range(1, count + 1))
    assert [m.sequence for m in found] == list(range(1, count + 1))


async def test_rows_are_stored_in_order_with_their_provenance(
    kind: str, client: FloeClient, stream: str
) -> None:
    count = COUNTS[kind]
    sender = await publisher(kind, client, stream)

    assert await sender.publish(rows_for(stream, count), 0, 0) == Outcome(count)

    await check(client, stream, count)
    assert (await arrived(client, stream))[0].message.headers == b"NATS/1.0\r\nNats-Msg-Id: same\r\n\r\n"
    await sender.aclose()


async def test_sending_goes_on_where_it_is_told(kind: str, client: FloeClient, stream: str) -> None:
    rows, sender = rows_for(stream, COUNTS[kind]), await publisher(kind, client, stream)
    await sender.publish(rows_for(stream, 7), 0, 0)

    assert await sender.publish(rows, 0, 7) == Outcome(rows.count)

    await check(client, stream, rows.count)
    await sender.aclose()


async def test_rows_after_another_sequence_are_refused_and_nothing_is_stored(
    kind: str, client: FloeClient, stream: str
) -> None:
    sender = await publisher(kind, client, stream)

    outcome = await sender.publish(rows_for(stream, 5), 3, 0)

    assert outcome.stored == 0
    assert outcome.unclear is not None
    assert outcome.unclear.err_code == 10071
    assert await last_of(client, stream) == 0
    await sender.aclose()


async def test_a_message_larger_than_all_of_a_batch_is_a_batch_of_its_own(
    kind: str, client: FloeClient, stream: str
) -> None:
    rows, sender = rows_for(stream, 20, 900_000), await publisher(kind, client, stream)

    assert await sender.publish(rows, 0, 0) == Outcome(20)
    await sender.aclose()


async def test_a_foreign_message_stops_the_sending_with_all_before_it_stored(
    kind: str, client: FloeClient, stream: str
) -> None:
    rows, sender = rows_for(stream, COUNTS[kind]), await publisher(kind, client, stream)
    sending = asyncio.create_task(sender.publish(rows, 0, 0))
    await soon(lambda: last_of(client, stream), every=0.001)
    client.send(frame(f"{stream}.foreign".encode(), b"x"))

    outcome = await sending

    if outcome.unclear is None:  # it came after the last
        assert outcome.stored == rows.count
    else:
        found = await arrived(client, stream)
        foreign = [m.sequence for m in found if m.provenance is None]
        assert foreign == [len(found)] == [outcome.stored + 1]
    await sender.aclose()


async def test_a_subject_that_no_stream_takes_is_told_at_once(
    kind: str, client: FloeClient, stream: str
) -> None:
    sender = await publisher(kind, client, stream)

    outcome = await sender.publish(rows_for(unique("nowhere"), 5), 0, 0)

    assert outcome == Outcome(0, Unclear("no stream takes the subject, or the stream has no leader"))
    await sender.aclose()


async def test_the_targets_own_reason_for_a_refusal_is_told(kind: str, client: FloeClient) -> None:
    stream = await new_stream(client, max_msg_size=400)
    rows, sender = rows_for(stream, 30, 500), await publisher(kind, client, stream)

    outcomes = [await sender.publish(rows, 0, 0) for _ in range(2)]

    assert all(outcome.stored == 0 for outcome in outcomes)
    assert outcomes[-1].unclear == Unclear("message size exceeds maximum allowed", 10054)
    await sender.aclose()


async def test_a_full_target_is_told_and_takes_the_rest_once_there_is_room(
    kind: str, client: FloeClient
) -> None:
    stream = await new_stream(client, discard="new", max_msgs=20)
    rows, sender = rows_for(stream, 20), await publisher(kind, client, stream)
    await sender.publish(rows, 0, 0)

    more = rows_for(stream, 10)
    outcome = await sender.publish(more, 20, 0)
    assert outcome.unclear == Unclear("maximum messages exceeded", 10077)
    await client.api(f"STREAM.PURGE.{stream}")

    assert await sender.publish(more, 20, 0) == Outcome(10)
    await sender.aclose()


async def test_answers_that_never_come_are_settled_by_reading(
    kind: str, nats_server: NatsServer, client: FloeClient, stream: str
) -> None:
    async with TcpProxy(nats_server.port) as proxy, client_of(proxy.url) as broken:
        rows, sender = rows_for(stream, COUNTS[kind]), await publisher(kind, broken, stream, 0.3)
        proxy.blackhole("down")
        carrying = asyncio.create_task(carry(sender, rows, client, stream))
        for _ in range(3):
            await asyncio.sleep(0.35)
            proxy.heal()
            await soon(lambda: broken.is_up)
            proxy.blackhole("down")
        proxy.heal()
        unclear = await asyncio.wait_for(carrying, 20)

    assert unclear >= 1
    await check(client, stream, rows.count)


async def test_connections_cut_in_the_middle_lose_and_repeat_nothing(
    kind: str, nats_server: NatsServer, client: FloeClient, stream: str
) -> None:
    async with TcpProxy(nats_server.port) as proxy, client_of(proxy.url) as broken:
        rows, sender = rows_for(stream, COUNTS[kind], 200), await publisher(kind, broken, stream)
        proxy.cut_after("up", 4_000)
        carrying = asyncio.create_task(carry(sender, rows, client, stream))
        for direction, size in (("up", 9_000), ("down", 300), ("up", 30_000), ("down", 900)):
            await asyncio.sleep(0.2)
            proxy.cut_after(direction, size)
        await asyncio.wait_for(carrying, 20)

    await check(client, stream, rows.count)


async def test_a_server_that_takes_smaller_batches_gets_smaller_batches(tmp_path: Path) -> None:
    limits = f'jetstream {{ store_dir: "{tmp_path}/js", limits: {{ batch: {{ max_msgs: 300 }} }} }}'
    with NatsServer(tmp_path / "nats", extra=limits) as server:
        async with client_of(server.url) as client:
            stream = await new_stream(client)
            sender = await publisher("atomic", client, stream)
            unclear = await carry(sender, rows_for(stream, 1000), client, stream)
            await check(client, stream, 1000)

    assert unclear == 2


def test_the_lines_that_publishers_add_fit_what_is_reserved_for_them() -> None:
    longest = [
        b"NATS/1.0", b"Nats-Expected-Last-Sequence: %d" % (2**63 - 1), b"Nats-Batch-Id: " + b"0" * 32,
        b"Nats-Batch-Sequence: 1000", b"Nats-Batch-Commit: 1",
    ]  # fmt: skip

    assert sum(len(line) + 2 for line in longest) <= PUBLISHER_LINES


EXPECTED = Expected("T", 7, "b", 5)
GOOD = {"stream": "T", "seq": 7, "batch": "b", "count": 5}


@pytest.mark.parametrize(
    "answer",
    [
        {**GOOD, "stream": "OTHER"},
        {**GOOD, "seq": 8},
        {**GOOD, "batch": "c"},
        {**GOOD, "count": 4},
        {**GOOD, "duplicate": True},
        {"stream": "T", "seq": 7},
        {},
        [],
        7,
    ],
)
def test_an_acknowledgement_of_anything_else_is_worth_nothing(answer: object) -> None:
    assert judge_ack(json.dumps(answer).encode(), None, EXPECTED) is not None


def test_only_the_exact_acknowledgement_counts() -> None:
    assert judge_ack(json.dumps({**GOOD, "domain": "hub"}).encode(), None, EXPECTED) is None
    for raw in (b"", b"+OK", b"\xff", b'{"error":', b"[" * 5000):
        assert judge_ack(raw, None, EXPECTED) is not None
    assert judge_ack(b"", b"NATS/1.0 503\r\n\r\n", EXPECTED) is not None


def test_a_refusal_keeps_the_servers_words() -> None:
    raw = (
        b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 9"},"stream":"T","seq":0}'
    )

    assert judge_ack(raw, None, EXPECTED) == Unclear("wrong last sequence: 9", 10071)
