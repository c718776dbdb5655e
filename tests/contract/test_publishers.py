"""What every publisher does on a real server: rows after an expected sequence, and only sure answers."""

from __future__ import annotations

import asyncio
import json

import pytest

from common.jetstream.client import FloeClient, frame
from ingress.publishers.publisher import Expected, Outcome, UnknownOutcome, judge_ack
from ingress.rows.prepare import PUBLISHER_LINES
from tests.support.basics import soon, unique
from tests.support.ingress import arrived
from tests.support.publishers import check, check_row, last_of, new_stream, publisher, rows_for

pytestmark = pytest.mark.servers
COUNTS = {"fast": 2500, "atomic": 2500, "single": 60}


async def test_rows_are_stored_in_order_with_their_provenance(kind: str, client: FloeClient, stream: str) -> None:
    count = COUNTS[kind]
    sender = await publisher(kind, client, stream)

    assert await sender.publish(rows_for(stream, count), 0, 0) == Outcome(count)

    await check(client, stream, count)
    await sender.aclose()


async def test_an_intent_of_one_row_is_a_batch_of_one(kind: str, client: FloeClient, stream: str) -> None:
    sender = await publisher(kind, client, stream)

    for number in range(1, 6):
        rows = rows_for(stream, 1, first=number)
        assert await sender.publish(rows, number - 1, 0) == Outcome(1)

    await check(client, stream, 5)
    await sender.aclose()


async def test_messages_of_one_byte_and_of_a_megabyte_go_together(kind: str, client: FloeClient, stream: str) -> None:
    sizes, sender = (1, 1, 1, 900_000, 1), await publisher(kind, client, stream)

    assert await sender.publish(rows_for(stream, 60, sizes), 0, 0) == Outcome(60)

    await check(client, stream, 60, sizes)
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
        *ours, foreign = await arrived(client, stream)
        assert foreign.provenance is None
        for number, row in enumerate(ours, 1):
            check_row(stream, row, number)
        assert outcome.stored <= len(ours)
        assert kind == "fast" or outcome.stored == len(ours)
    await sender.aclose()


async def test_a_subject_that_no_stream_takes_is_told_at_once(kind: str, client: FloeClient, stream: str) -> None:
    sender = await publisher(kind, client, stream)

    outcome = await sender.publish(rows_for(unique("nowhere"), 5), 0, 0)

    # What was never given to the connection was stored by nobody.
    assert outcome.handed == (5 if kind == "atomic" else 1)
    assert outcome == Outcome(0, UnknownOutcome("no stream takes the subject, or the stream has no leader"))
    await sender.aclose()


async def test_the_targets_own_reason_for_a_refusal_is_told(kind: str, client: FloeClient) -> None:
    stream = await new_stream(client, max_msg_size=400)
    rows, sender = rows_for(stream, 30, 500), await publisher(kind, client, stream)

    outcomes = [await sender.publish(rows, 0, 0) for _ in range(2)]

    assert all(outcome.stored == 0 for outcome in outcomes)
    assert outcomes[-1].unclear == UnknownOutcome("message size exceeds maximum allowed", 10054)
    await sender.aclose()


async def test_a_full_target_is_told_and_takes_the_rest_once_there_is_room(kind: str, client: FloeClient) -> None:
    stream = await new_stream(client, discard="new", max_msgs=20)
    rows, sender = rows_for(stream, 20), await publisher(kind, client, stream)
    await sender.publish(rows, 0, 0)

    more = rows_for(stream, 10)
    outcome = await sender.publish(more, 20, 0)
    assert outcome.unclear == UnknownOutcome("maximum messages exceeded", 10077)
    await client.api(f"STREAM.PURGE.{stream}")

    assert await sender.publish(more, 20, 0) == Outcome(10)
    await sender.aclose()


async def test_a_sealed_target_says_so(kind: str, client: FloeClient, stream: str) -> None:
    sender = await publisher(kind, client, stream)
    await sender.publish(rows_for(stream, 5), 0, 0)
    config = {"name": stream, "subjects": [f"{stream}.>"], "allow_atomic": True, "allow_batched": True}
    await client.api(f"STREAM.UPDATE.{stream}", {**config, "sealed": True})

    outcome = await sender.publish(rows_for(stream, 9, first=6), 5, 0)

    assert outcome == Outcome(0, UnknownOutcome("invalid operation on sealed stream", 10109))
    await check(client, stream, 5)
    await sender.aclose()


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
    raw = b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 9"},"stream":"T","seq":0}'

    assert judge_ack(raw, None, EXPECTED) == UnknownOutcome("wrong last sequence: 9", 10071)
