"""What only publishers of batches meet: limits, batches that were given up, servers that know none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.jetstream.client import FloeClient, frame
from infra.local.nats import NatsServer, nats_server_binary
from ingress.publishers.choose import choose, offered
from ingress.publishers.fast import AHEAD, MOST_FLOW, WINDOW_BYTES, FastPublisher, flow_of
from ingress.publishers.publisher import Outcome, UnknownOutcome
from tests.support.basics import soon, unique
from tests.support.ingress import arrived, client_of
from tests.support.publishers import carry, check, last_of, new_stream, publisher, rows_for

pytestmark = pytest.mark.servers


# Fast batches


async def test_a_batch_that_the_server_gave_up_is_sent_again(tmp_path: Path) -> None:
    limits = f'jetstream {{ store_dir: "{tmp_path}/js", limits: {{ batch: {{ timeout: "200ms" }} }} }}'
    with NatsServer(tmp_path / "nats", extra=limits) as server:
        async with client_of(server.url) as client:
            stream = await new_stream(client)
            rows, sender = rows_for(stream, 2500), await publisher("fast", client, stream)
            stop_once(client, after=3, seconds=0.5)
            unclear = await carry(sender, rows, client, stream)
            await check(client, stream, 2500)

    assert unclear >= 1


def stop_once(client: FloeClient, after: int, seconds: float) -> None:
    """Stop for so long in the middle of sending, as a stopped process does."""
    flush, count = client.flush_writes, 0

    async def slow() -> None:
        nonlocal count
        count += 1
        await asyncio.sleep(seconds if count == after else 0)
        await flush()

    client.flush_writes = slow  # type: ignore[method-assign]


async def test_a_target_that_takes_no_more_batches_gets_rows_one_by_one(tmp_path: Path) -> None:
    limits = f'jetstream {{ store_dir: "{tmp_path}/js", limits: {{ batch: {{ max_inflight_per_stream: 1 }} }} }}'
    with NatsServer(tmp_path / "nats", extra=limits) as server:
        async with client_of(server.url) as client:
            stream = await new_stream(client)
            client.send(frame(f"{stream}.a".encode(), b"x", reply=b"_INBOX.other.b.10.fail.1.0.$FI"))
            await soon(lambda: last_of(client, stream))
            sender = await publisher("fast", client, stream)
            first = await sender.publish(rows_for(stream, 200), 1, 0)
            unclear = await carry(sender, rows_for(stream, 200), client, stream, base=1)
            found = await arrived(client, stream)

    assert first == Outcome(0, UnknownOutcome("batch publish too many inflight", 10211))
    assert 5 <= unclear <= 10
    assert [m.provenance and m.provenance.sequence for m in found] == [None, *range(1, 201)]


async def test_batches_that_are_forbidden_in_the_middle_stop_nothing(client: FloeClient) -> None:
    stream = await new_stream(client)
    rows, sender = rows_for(stream, 20_000), await publisher("fast", client, stream)
    sending = asyncio.create_task(sender.publish(rows, 0, 0))
    await soon(lambda: last_of(client, stream), every=0.001)
    await client.api(f"STREAM.UPDATE.{stream}", {"name": stream, "subjects": [f"{stream}.>"]})
    outcome = await sending
    stored = await last_of(client, stream)

    rest = rows_for(stream, 40, first=stored + 1)
    await carry(sender, rest, client, stream, base=stored)

    assert outcome.unclear is None or outcome.unclear.err_code in (10205, 10208)
    assert await last_of(client, stream) == stored + 40
    assert isinstance(sender, FastPublisher)


async def test_a_server_that_knows_no_batches_gets_single_messages() -> None:
    with NatsServer(binary=nats_server_binary("2.10")) as server:
        async with client_of(server.url) as client:
            stream = await new_stream(client)
            info = await client.api(f"STREAM.INFO.{stream}")
            against = offered(client.server_version, info["config"], frozenset())
            chosen = choose(stream, "auto", against)
            # Even where it was chosen wrongly: the server takes no row at a place that is not its own.
            wrong = await publisher("fast", client, stream)
            await carry(wrong, rows_for(stream, 60), client, stream)
            await check(client, stream, 60)

    assert chosen == "single"
    assert against["fast"] == "nats-server 2.10.26 is older than 2.14"
    assert against["atomic"] == "nats-server 2.10.26 is older than 2.12"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"+OK",
        b"[]",
        b'{"type":"ack","seq":0}',
        b'{"type":"ack","seq":0,"msgs":0}',
        b'{"type":"ack","seq":-1,"msgs":5}',
        b'{"type":"ack","seq":true,"msgs":5}',
        b'{"type":"ack","seq":"0","msgs":500}',
        b'{"type":"other"}',
        b'{"stream":"T","seq":1}',
    ],
)
async def test_an_answer_that_is_not_known_ends_a_fast_batch(client: FloeClient, nats_url: str, answer: bytes) -> None:
    """A server that says something else than the protocol does, in place of a stream."""
    subject = unique("T")
    async with client_of(nats_url) as impostor:

        def reply(_subject: bytes, to: bytes, _payload: bytes, _headers: bytes | None) -> None:
            impostor.send(frame(to, answer))

        await impostor.subscribe_raw(f"{subject}.>", reply)
        sender = await publisher("fast", client, subject, 1.0)
        outcome = await sender.publish(rows_for(subject, 50), 0, 0)

    assert outcome.stored == 0
    assert outcome.unclear is not None


@pytest.mark.parametrize(
    ("count", "sizes", "flow"),
    [(1500, (100,), MOST_FLOW), (20, (1_000_000,), 4), (80, (1, 1, 1, 1_000_000), 16), (2, (9_000_000,), 1)],
)
def test_what_is_on_the_way_fits_the_window(count: int, sizes: tuple[int, ...], flow: int) -> None:
    rows = rows_for("T", count, sizes)

    found = flow_of(rows, 0, rows.count)

    lengths = [len(payload) for _, _, payload in rows.messages(0, rows.count)]
    most = max(sum(lengths[n : n + AHEAD * found]) for n in range(0, rows.count, found))
    assert found == 1 or most <= WINDOW_BYTES
    assert flow / 2 <= found <= flow * 2


# Atomic batches


async def test_a_server_that_takes_smaller_batches_gets_smaller_batches(tmp_path: Path) -> None:
    limits = f'jetstream {{ store_dir: "{tmp_path}/js", limits: {{ batch: {{ max_msgs: 300 }} }} }}'
    with NatsServer(tmp_path / "nats", extra=limits) as server:
        async with client_of(server.url) as client:
            stream = await new_stream(client)
            sender = await publisher("atomic", client, stream)
            unclear = await carry(sender, rows_for(stream, 1000), client, stream)
            await check(client, stream, 1000)

    assert 2 <= unclear < 8, "a size that is too large is tried once"


async def test_batches_shrink_under_foreign_traffic_and_grow_again(client: FloeClient, stream: str) -> None:
    sender = await publisher("atomic", client, stream, exclusive=False)
    rows, sizes = rows_for(stream, 5000), []

    assert (await sender.publish(rows, 7, 0)).unclear is not None  # refused: base is 0
    assert (await sender.publish(rows, 7, 0)).unclear is not None
    sizes.append(sender.batch_size)  # type: ignore[attr-defined]
    assert await sender.publish(rows, 0, 0) == Outcome(5000)
    sizes.append(sender.batch_size)  # type: ignore[attr-defined]

    assert sizes == [250, 1000]
    await sender.aclose()


async def test_batches_of_an_exclusive_target_keep_their_size(client: FloeClient, stream: str) -> None:
    sender = await publisher("atomic", client, stream)

    await sender.publish(rows_for(stream, 50), 7, 0)

    assert sender.batch_size == 1000  # type: ignore[attr-defined]
    await sender.aclose()
