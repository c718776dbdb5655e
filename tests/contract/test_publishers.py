"""The contract of every publisher on a real server: rows after an expected sequence, and only certain answers."""

import asyncio
import json
from pathlib import Path

import pytest

from common.nats.client import FloeClient, frame
from infra.local.nats import NatsServer, nats_server_binary
from ingress.publishers.batches import (
    MAX_FLOW_MESSAGES,
    MAX_OPEN_ACKS,
    PUBLISHERS,
    WINDOW_BYTES,
    ack_interval_for,
    choose_publisher,
    objections,
)
from ingress.publishers.publisher import Expected, Outcome, UnknownOutcome, judge_ack
from ingress.rows.prepare import PUBLISHER_LINES_BYTES
from tests.support.basics import PATIENCE, soon, unique
from tests.support.ingress import arrived, client_of
from tests.support.proxies import TcpProxy
from tests.support.publishers import carry, check, check_row, last_of, new_stream, publisher, quiet, rows_for

pytestmark = pytest.mark.servers
COUNTS = {"fast": 2500, "atomic": 2500, "single": 60}


async def test_rows_are_stored_in_order_with_their_provenance(kind: str, client: FloeClient, stream: str) -> None:
    count, sender = COUNTS[kind], await publisher(kind, client, stream)
    for number in range(1, 6):
        assert await sender.publish(rows_for(stream, 1, first=number), number - 1, 0) == Outcome(1)
    # It continues after the given number of stored rows.
    assert await sender.publish(rows_for(stream, count), 0, 5) == Outcome(count)
    await check(client, stream, count)

    refused = await sender.publish(rows_for(stream, 5), count + 3, 0)
    assert (refused.stored, refused.unclear.err_code, await last_of(client, stream)) == (0, 10071, count)

    nowhere = await sender.publish(rows_for(unique("nowhere"), 5), count, 0)
    # Rows never given to the connection are not stored.
    assert nowhere.handed_upto == (5 if kind == "atomic" else 1)
    assert nowhere == Outcome(0, UnknownOutcome("no stream takes the subject, or the stream has no leader"))
    await sender.aclose()


@pytest.mark.parametrize("sizes", [(1, 1, 1, 900_000, 1), (900_000,)])
async def test_messages_of_any_size_are_stored(
    kind: str, client: FloeClient, stream: str, sizes: tuple[int, ...]
) -> None:
    sender = await publisher(kind, client, stream)
    assert await sender.publish(rows_for(stream, 20, sizes), 0, 0) == Outcome(20)
    await check(client, stream, 20, sizes)
    await sender.aclose()


async def test_a_foreign_message_stops_the_sending_with_all_before_it_stored(kind: str, client: FloeClient) -> None:
    async def is_stopped() -> bool:
        """True if the message came before the last row."""
        stream = await new_stream(client)
        rows, sender = rows_for(stream, COUNTS[kind]), await publisher(kind, client, stream)
        sending = asyncio.create_task(sender.publish(rows, 0, 0))
        await soon(lambda: last_of(client, stream), every=0.001)
        client.send(frame(f"{stream}.foreign".encode(), b"x"))
        outcome = await sending
        await sender.aclose()
        if outcome.unclear is None:
            assert outcome.stored == rows.count
            return False
        *ours, foreign = await arrived(client, stream)
        assert foreign.provenance is None
        for number, row in enumerate(ours, 1):
            check_row(stream, row, number)
        assert outcome.stored <= len(ours)
        assert kind == "fast" or outcome.stored == len(ours)
        return True

    await soon(is_stopped)


async def test_the_targets_reason_is_returned_and_it_takes_the_rest_once_it_may(kind: str, client: FloeClient) -> None:
    stream = await new_stream(client, discard="new", max_msgs=20, max_msg_size=400)
    large, sender = rows_for(stream, 30, 500), await publisher(kind, client, stream)
    outcomes = [await sender.publish(large, 0, 0) for _ in range(2)]
    assert [outcome.stored for outcome in outcomes] == [0, 0]
    assert outcomes[-1].unclear == UnknownOutcome("message size exceeds maximum allowed", 10054)

    await sender.publish(rows_for(stream, 20), 0, 0)
    more = rows_for(stream, 10)
    outcome = await sender.publish(more, 20, 0)
    assert outcome.unclear == UnknownOutcome("maximum messages exceeded", 10077)
    await client.api(f"STREAM.PURGE.{stream}")
    assert await sender.publish(more, 20, 0) == Outcome(10)
    await sender.aclose()


def test_the_lines_that_publishers_add_fit_what_is_reserved_for_them() -> None:
    longest = [
        b"NATS/1.0", b"Nats-Expected-Last-Sequence: %d" % (2**63 - 1), b"Nats-Batch-Id: " + b"0" * 32,
        b"Nats-Batch-Sequence: 1000", b"Nats-Batch-Commit: 1",
    ]  # fmt: skip
    assert sum(len(line) + 2 for line in longest) <= PUBLISHER_LINES_BYTES


def test_only_the_exact_acknowledgement_counts() -> None:
    expected, good = Expected("T", 7, "b", 5), {"stream": "T", "seq": 7, "batch": "b", "count": 5}
    assert judge_ack(json.dumps({**good, "domain": "hub"}).encode(), None, expected) is None
    others = [{"stream": "OTHER"}, {"seq": 8}, {"batch": "c"}, {"count": 4}, {"duplicate": True}]
    answers = [*({**good, **other} for other in others), {"stream": "T", "seq": 7}, {}, [], 7]
    for raw in (*(json.dumps(each).encode() for each in answers), b"", b"+OK", b"\xff", b'{"error":', b"[" * 5000):
        assert judge_ack(raw, None, expected) is not None, raw
    assert judge_ack(b"", b"NATS/1.0 503\r\n\r\n", expected) is not None
    raw = b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 9"},"stream":"T","seq":0}'
    assert judge_ack(raw, None, expected) == UnknownOutcome("wrong last sequence: 9", 10071)


# Lines that break, twins, a server that dies


async def test_lost_answers_are_settled_by_reading(
    kind: str, nats_server: NatsServer, client: FloeClient, stream: str
) -> None:
    async with TcpProxy(nats_server.port) as proxy, client_of(proxy.url) as broken:
        rows, sender = rows_for(stream, COUNTS[kind]), await publisher(kind, broken, stream, 0.3)
        proxy.blackhole("down")
        carrying = asyncio.create_task(carry(sender, rows, client, stream))
        await asyncio.sleep(0.35)
        proxy.heal()
        unclear = await asyncio.wait_for(carrying, PATIENCE)

    assert unclear >= 1
    await check(client, stream, rows.count)


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_connection_that_is_cut_loses_nothing(
    kind: str, nats_server: NatsServer, client: FloeClient, direction: str
) -> None:
    count = COUNTS[kind] // 3
    whole = {"up": count * 260, "down": {"fast": 900, "atomic": 400, "single": count * 110}[kind]}[direction]
    async with TcpProxy(nats_server.port) as proxy, client_of(proxy.url) as broken:
        for part in range(1, 4):
            stream = await new_stream(client)
            sender = await publisher(kind, broken, stream, 1.0)
            proxy.cut_after(direction, whole * part // 4)
            await asyncio.wait_for(carry(sender, rows_for(stream, count), client, stream), PATIENCE)
            await check(client, stream, count)
            await soon(lambda: broken.is_up)
            await sender.aclose()


async def test_late_messages_of_a_twin_do_no_harm(
    kind: str, nats_server: NatsServer, client: FloeClient, stream: str
) -> None:
    rows = rows_for(stream, COUNTS[kind])
    async with TcpProxy(nats_server.port) as proxy, client_of(proxy.url) as slow:
        late, sender = await publisher(kind, slow, stream, 0.5), await publisher(kind, client, stream)
        proxy.delay = 0.15
        sending = asyncio.create_task(late.publish(rows, 0, 0))
        await soon(lambda: last_of(client, stream), every=0.001)
        await carry(sender, rows, client, stream)
        outcome = await sending
        proxy.delay = 0.0

    assert outcome.stored <= rows.count
    assert await quiet(client, stream) == rows.count
    await check(client, stream, rows.count)


async def test_a_server_killed_in_the_middle_and_started_again_goes_on(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as server:
        async with client_of(server.url) as client:
            carrying = {}
            for kind in PUBLISHERS:
                stream = await new_stream(client)
                rows, sender = rows_for(stream, 2 * COUNTS[kind]), await publisher(kind, client, stream, 1.0)
                carrying[stream] = rows.count, asyncio.create_task(carry(sender, rows, client, stream))
            await soon(lambda: last_of(client, stream), every=0.001)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            for stream, (count, task) in carrying.items():
                await asyncio.wait_for(task, PATIENCE)
                await check(client, stream, count)


# Fast batches


async def test_a_batch_that_the_server_gave_up_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with limited(tmp_path, 'timeout: "200ms"') as server:
        async with client_of(server.url) as client:
            stream = await new_stream(client)
            rows, sender = rows_for(stream, 2500), await publisher("fast", client, stream)
            flush, pauses = client.flush_writes, [0.0, 0.0, 0.5]  # like a process that is stopped between writes

            async def slow() -> None:
                await asyncio.sleep(pauses.pop(0) if pauses else 0)
                await flush()

            monkeypatch.setattr(client, "flush_writes", slow)
            assert await carry(sender, rows, client, stream) >= 1
            await check(client, stream, 2500)


def limited(folder: Path, batches: str) -> NatsServer:
    """Return a server with these limits of batches."""
    limits = f'jetstream {{ store_dir: "{folder}/js", limits: {{ batch: {{ {batches} }} }} }}'
    return NatsServer(folder / "nats", extra=limits)


async def test_a_target_that_takes_no_more_batches_gets_rows_one_by_one(tmp_path: Path) -> None:
    with limited(tmp_path, "max_inflight_per_stream: 1") as server:
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
    await carry(sender, rows_for(stream, 40, first=stored + 1), client, stream, base=stored)

    assert outcome.unclear is None or outcome.unclear.err_code in (10205, 10208)
    assert await last_of(client, stream) == stored + 40


async def test_a_server_that_knows_no_batches_gets_single_messages() -> None:
    with NatsServer(binary=nats_server_binary("2.10")) as server:
        async with client_of(server.url) as client:
            stream = await new_stream(client)
            info = await client.api(f"STREAM.INFO.{stream}")
            against = objections(client.server_version, info["config"], frozenset())
            # Even if it was chosen wrongly, the server takes no row at another sequence than its own.
            await carry(await publisher("fast", client, stream), rows_for(stream, 60), client, stream)
            await check(client, stream, 60)

    assert choose_publisher(stream, "auto", against) == "single"
    older = f"nats-server {'.'.join(map(str, client.server_version))} is older than"
    assert (against["fast"], against["atomic"]) == (f"{older} 2.14", f"{older} 2.12")


async def test_an_answer_that_is_not_known_ends_a_fast_batch(client: FloeClient, nats_url: str) -> None:
    """Answer in place of a stream with messages that the protocol does not define."""
    answers = [
        b"", b"+OK", b"[]", b'{"type":"ack","seq":0}', b'{"type":"ack","seq":0,"msgs":0}',
        b'{"type":"ack","seq":-1,"msgs":5}', b'{"type":"ack","seq":true,"msgs":5}',
        b'{"type":"ack","seq":"0","msgs":500}', b'{"type":"other"}', b'{"stream":"T","seq":1}',
    ]  # fmt: skip
    subject, answer = unique("T"), b""
    async with client_of(nats_url) as impostor:

        def reply(_subject: bytes, to: bytes, _payload: bytes, _headers: bytes | None) -> None:
            impostor.send(frame(to, answer))

        await impostor.subscribe_raw(f"{subject}.>", reply)
        for answer in answers:
            sender = await publisher("fast", client, subject, 1.0)
            outcome = await sender.publish(rows_for(subject, 50), 0, 0)
            assert outcome.stored == 0, answer
            assert outcome.unclear is not None, answer


@pytest.mark.parametrize(
    ("count", "sizes", "flow"),
    [(1500, (100,), MAX_FLOW_MESSAGES), (20, (1_000_000,), 4), (80, (1, 1, 1, 1_000_000), 16), (2, (9_000_000,), 1)],
)
def test_what_is_on_the_way_fits_the_window(count: int, sizes: tuple[int, ...], flow: int) -> None:
    rows = rows_for("T", count, sizes)
    found = ack_interval_for(rows, 0, rows.count)
    lengths = [len(payload) for _, _, payload in rows.messages(0, rows.count)]
    most = max(sum(lengths[n : n + MAX_OPEN_ACKS * found]) for n in range(0, rows.count, found))
    assert found == 1 or most <= WINDOW_BYTES
    assert flow / 2 <= found <= flow * 2


# Atomic batches


async def test_a_server_that_takes_smaller_batches_gets_smaller_batches(tmp_path: Path) -> None:
    with limited(tmp_path, "max_msgs: 300") as server:
        async with client_of(server.url) as client:
            stream = await new_stream(client)
            sender = await publisher("atomic", client, stream)
            unclear = await carry(sender, rows_for(stream, 1000), client, stream)
            await check(client, stream, 1000)

    assert 2 <= unclear < 8, "a size that is too large is tried once"


async def test_batches_shrink_under_foreign_traffic_and_grow_again(client: FloeClient, stream: str) -> None:
    shared, own = [await publisher("atomic", client, stream, exclusive=exclusive) for exclusive in (False, True)]
    rows, sizes = rows_for(stream, 5000), []
    for sender in (shared, shared, own):
        assert (await sender.publish(rows, 7, 0)).unclear is not None  # refused: the base is 0
        sizes.append(sender.batch_size)  # type: ignore[attr-defined]
    assert await shared.publish(rows, 0, 0) == Outcome(5000)

    assert [*sizes[1:], shared.batch_size] == [250, 1000, 1000]  # type: ignore[attr-defined]
    await shared.aclose()
    await own.aclose()
