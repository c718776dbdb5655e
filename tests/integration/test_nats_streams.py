"""Streams and consumers of a real server; what Floe writes into a target does what Floe wants and no more."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.errors import Unavailable
from common.jetstream.api import consumer_info, create_consumer, create_stream, delete_consumer, stream_info
from common.jetstream.client import ApiError, FloeClient, connect, frame
from common.jetstream.headers import Provenance, restore
from common.jetstream.pull import get_message
from common.segments.segment import Message
from common.settings.service import NatsSettings
from infra.local.nats import NatsCluster, NatsServer
from tests.support.basics import PATIENCE, AckReply, parse_ack, soon, unique
from tests.support.headers import escape
from tests.support.servers import place, placing

HERE = Provenance("us-east", "NODE_DATA", 0, 0, 7, 1_700_000_000_000_000_001)


async def new_stream(client: FloeClient, **config: Any) -> str:
    stream = unique("S")
    await place(client, {"name": stream, "subjects": [f"{stream}.>"], **config})
    return stream


async def publish(
    client: FloeClient, subject: str | bytes, payload: bytes = b"", headers: bytes | None = None
) -> dict[str, Any]:
    """The acknowledgement, or the refusal, as the server words it."""
    raw = subject.encode() if isinstance(subject, str) else subject
    answer, _ = await client.request_raw(raw, payload, headers, timeout=PATIENCE)
    return dict(json.loads(answer))


def block(*lines: bytes) -> bytes:
    return b"".join([b"NATS/1.0\r\n", *(line + b"\r\n" for line in lines), b"\r\n"])


async def test_describes_a_stream(client: FloeClient):
    assert await stream_info(client, "NONE") is None
    stream = await new_stream(client, max_msgs=3)
    info = await stream_info(client, stream)
    assert (info.first_sequence, info.last_sequence, info.messages) == (0, 0, 0)
    for _ in range(5):
        await publish(client, f"{stream}.a")
    info = await stream_info(client, stream)
    assert (info.name, info.first_sequence, info.last_sequence, info.messages) == (stream, 3, 5, 3)
    assert info.config["max_msgs"] == 3
    assert info.created < info.first_timestamp < info.last_timestamp
    await client.api(f"STREAM.PURGE.{stream}")
    info = await stream_info(client, stream)
    assert (info.first_sequence, info.last_sequence, info.messages) == (6, 5, 0)


async def test_creating_a_stream_again_differently_is_refused(client: FloeClient):
    stream = await new_stream(client)
    await create_stream(client, {"name": stream, "subjects": [f"{stream}.>"]})
    with pytest.raises(ApiError, match="stream name already in use"):
        await create_stream(client, {"name": stream, "subjects": [f"{stream}.x"]})


@pytest.mark.parametrize("name", ["", "a.b", "a b", "a*", ">", "a/b"])
async def test_a_name_that_is_no_token_never_reaches_the_api(client: FloeClient, name: str):
    with pytest.raises(ValueError, match="expected no space"):
        await stream_info(client, name)


@pytest.mark.parametrize("headers", [None, block(), block(b"A: 1", b"a:2", b"A: \xff ")])
@pytest.mark.parametrize("payload", [b"", b"\x00\xff"])
async def test_reads_a_message_exactly(client: FloeClient, headers: bytes | None, payload: bytes):
    stream = await new_stream(client)
    await publish(client, f"{stream}.a", payload, headers)
    message = await get_message(client, stream, 1)
    assert message == Message(1, message.timestamp_ns, f"{stream}.a".encode(), headers, payload)
    delivered = await deliver(client, stream)
    assert delivered == [(message.subject, ack_of(message, stream), payload, headers)]


async def test_reads_a_subject_that_is_not_utf8(client: FloeClient):
    stream = await new_stream(client)
    subject = f"{stream}.".encode() + b"\xff\xfe"
    await publish(client, subject, b"x", block(b"A: 1"))
    message = await get_message(client, stream, 1)
    assert (message.subject, message.headers, message.payload) == (subject, block(b"A: 1"), b"x")
    assert (await stream_info(client, stream)).first_timestamp
    assert (await client.api(f"STREAM.INFO.{stream}"))["state"]["consumer_count"] == 0


async def test_a_message_that_is_not_held_is_none(client: FloeClient):
    stream = await new_stream(client)
    await publish(client, f"{stream}.a")
    await client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 1})
    assert await get_message(client, stream, 1) is None
    assert await get_message(client, stream, 2) is None
    with pytest.raises(ApiError, match="stream not found"):
        await get_message(client, "NONE", 1)


async def deliver(client: FloeClient, stream: str) -> list[tuple[bytes, Any, bytes, bytes | None]]:
    """All messages through a consumer, with what their replies say (but for the consumer's name)."""
    consumer = unique("c")
    info = await create_consumer(client, stream, {"name": consumer, "ack_policy": "none"})
    received, inbox = [], client.new_inbox()
    await client.subscribe_raw(inbox, lambda *message: received.append(message))
    ask = client.api_subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}").encode()
    client.send(frame(ask, b'{"batch":100,"no_wait":true}', None, inbox.encode()))
    await soon(lambda: len(received) > info.pending)
    return [
        (subject, parse_ack(reply)._replace(consumer=""), payload, headers)
        for subject, reply, payload, headers in received
        if reply
    ]


def ack_of(message: Message, stream: str) -> Any:
    return AckReply(stream, "", message.sequence, 1, message.timestamp_ns, 0)


async def test_creates_describes_and_deletes_a_consumer(client: FloeClient):
    stream = await new_stream(client)
    await publish(client, f"{stream}.a")
    await publish(client, f"{stream}.b")
    created = await create_consumer(
        client, stream, {"durable_name": "c", "ack_policy": "none", "filter_subject": f"{stream}.a"}
    )
    assert (created.name, created.pending, created.stream_sequence) == ("c", 1, 0)
    assert await consumer_info(client, stream, "c") == created
    with pytest.raises(ApiError, match="already exists"):
        await create_consumer(client, stream, {"durable_name": "c", "ack_policy": "explicit"})
    assert await delete_consumer(client, stream, "c")
    assert not await delete_consumer(client, stream, "c")
    assert await consumer_info(client, stream, "c") is None
    assert await consumer_info(client, "NONE", "c") is None


async def test_both_layouts_of_replies_are_what_a_server_writes():
    for flag in (False, True):
        extra = f"feature_flags {{ js_ack_fc_v2: {str(flag).lower()} }}"
        with NatsServer(extra=extra) as server:
            client = await connect(NatsSettings(url=server.url), name="test")
            await create_stream(client, {"name": "S", "subjects": ["s"]})
            await publish(client, "s", b"1")
            await publish(client, "s", b"2")
            received, inbox = [], client.new_inbox()
            await client.subscribe_raw(inbox, lambda *message, to=received: to.append(message))
            await create_consumer(
                client,
                "S",
                {"name": "c", "ack_policy": "none", "opt_start_seq": 2, "deliver_policy": "by_start_sequence"},
            )
            client.send(frame(b"$JS.API.CONSUMER.MSG.NEXT.S.c", b"", None, inbox.encode()))
            await soon(lambda got=received: got)
            stored = await get_message(client, "S", 2)
            assert received[0][1].count(b".") == (10 if flag else 8)
            assert parse_ack(received[0][1])[2:5] == (2, 1, stored.timestamp_ns)
            assert parse_ack(received[0][1])[:4] == ("S", "c", 2, 1)
            await client.aclose()


async def test_jetstream_that_is_off_is_unavailable_not_empty():
    with NatsServer(extra="accounts { A { users: [{user: a, password: p}] } }") as server:
        client = await connect(NatsSettings(url=server.url, user="a", password="p"), name="test")
        with pytest.raises((Unavailable, ApiError), match=r"nobody answers|not enabled"):
            await stream_info(client, "S")
        await client.aclose()


async def test_a_cluster_names_its_leader_and_answers_after_it_moved():
    with NatsCluster() as cluster:
        await asyncio.to_thread(placing, cluster)
        client = await connect(NatsSettings(url=cluster.urls), name="test")
        await place(client, {"name": "S", "subjects": ["s"], "num_replicas": 3})
        await publish(client, "s", b"x")
        leader = (await stream_info(client, "S")).leader
        assert leader in ("n1", "n2", "n3")
        await client.api("STREAM.LEADER.STEPDOWN.S")

        async def moved() -> bool:
            try:
                info, message = await stream_info(client, "S"), await get_message(client, "S", 1)
            except Unavailable:
                return False
            return info.leader not in ("", leader) and message.payload == b"x"

        await soon(moved)
        await client.aclose()


# What the target does with headers

EVERYTHING = {
    "allow_rollup_hdrs": True,
    "allow_msg_ttl": True,
    "allow_msg_schedules": True,
    "allow_atomic": True,
    "allow_batched": True,
    "allow_direct": True,
}
# Lines that change what the server does with a message, and how that shows where they are not escaped.
ACTING = {
    "expected stream": ([b"Nats-Expected-Stream: OTHER"], "error"),
    "expected last sequence": ([b"Nats-Expected-Last-Sequence: 9999"], "error"),
    "expected last by subject": ([b"Nats-Expected-Last-Subject-Sequence: 9999"], "error"),
    "expected subject": ([b"Nats-Expected-Last-Subject-Sequence-Subject: x"], "error"),
    "expected last id": ([b"Nats-Expected-Last-Msg-Id: other"], "error"),
    "message id": ([b"Nats-Msg-Id: first"], "duplicate"),
    "rollup of all": ([b"Nats-Rollup: all"], "purged"),
    "rollup of the subject": ([b"Nats-Rollup: sub"], "purged"),
    "wrong rollup": ([b"Nats-Rollup: other"], "error"),
    "wrong time to live": ([b"Nats-TTL: soon"], "error"),
    "time to live": ([b"Nats-TTL: 1s"], "expired"),
    "schedule": ([b"Nats-Schedule: @at 2099-01-01T00:00:00Z", b"Nats-Schedule-Target: x"], "error"),
    "next schedule": ([b"Nats-Schedule-Next: purge"], "error"),
    "batch": ([b"Nats-Batch-Id: b", b"Nats-Batch-Sequence: 2"], "error"),
    "whole batch": ([b"Nats-Batch-Id: b", b"Nats-Batch-Sequence: 1", b"Nats-Batch-Commit: 1"], "batch"),
    "increment": ([b"Nats-Incr: +1"], "error"),
    "trace only": ([b"Nats-Trace-Dest: trace.here", b"Nats-Trace-Only: true"], "missing"),
}
PLAIN = {
    "marker": [b"Nats-Marker-Reason: MaxAge"],
    "source": [b"Nats-Stream-Source: OTHER 1 > >"],
    "counters": [b'Nats-Counter-Sources: {"a":{"b":"1"}}'],
    "api level": [b"Nats-Required-Api-Level: 99"],
    "request info": [b"Nats-Request-Info: {}"],
    "direct get": [b"Nats-Sequence: 1", b"Nats-Subject: x", b"Nats-Time-Stamp: x"],
    "key-value": [b"KV-Operation: PURGE"],
    "trace parent": [b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"],
}


async def filled(client: FloeClient) -> str:
    """A stream that allows everything, with three messages, two of them on the subject `.x`."""
    stream = await new_stream(client, **EVERYTHING)
    await publish(client, f"{stream}.x", b"1", block(b"Nats-Msg-Id: first"))
    await publish(client, f"{stream}.y", b"2")
    await publish(client, f"{stream}.x", b"3")
    return stream


@pytest.mark.parametrize("name", [*ACTING, *PLAIN])
async def test_what_is_escaped_is_stored_and_does_nothing(client: FloeClient, name: str):
    lines = PLAIN[name] if name in PLAIN else ACTING[name][0]
    stream, original = await filled(client), block(b"A: 1", *lines, b"B: 2")
    escaped = escape(original, HERE, first_lines=(b"Nats-Expected-Last-Sequence: 3",))
    answer = await publish(client, f"{stream}.x", b"4", escaped)
    assert answer == {"stream": stream, "seq": 4}
    assert (await stream_info(client, stream)).messages == 4
    stored = await get_message(client, stream, 4)
    assert stored.headers == escaped
    assert restore(stored.headers) == (HERE, original)


@pytest.mark.parametrize("name", ACTING)
async def test_the_same_unescaped_does_act(client: FloeClient, name: str):
    """Else the test above would prove nothing."""
    lines, effect = ACTING[name]
    stream = await filled(client)
    subject = f"{stream}.x".encode()
    inbox, answers = client.new_inbox(), []
    await client.subscribe_raw(inbox, lambda *message: answers.append(message[2]))
    client.send(frame(subject, b"4", block(*lines), inbox.encode()))
    if effect == "expired":
        await soon(lambda: gone(client, stream, 4))
        return
    await client.round_trip(5)
    await soon(lambda: answers or effect == "missing")
    info, answer = await stream_info(client, stream), json.loads(answers[0]) if answers else {}
    assert effect == (
        "error"
        if "error" in answer
        else "duplicate"
        if answer.get("duplicate")
        else "batch"
        if "batch" in answer
        else "missing"
        if info.last_sequence == 3
        else "purged"
        if info.messages < 4
        else "nothing"
    )


async def gone(client: FloeClient, stream: str, sequence: int) -> bool:
    info = await stream_info(client, stream)
    return info.last_sequence >= sequence and await get_message(client, stream, sequence) is None


async def test_a_message_that_expired_at_its_source_stays_in_the_target(client: FloeClient):
    stream = await filled(client)
    await publish(client, f"{stream}.x", b"4", escape(block(b"Nats-TTL: 1s"), HERE))
    await publish(client, f"{stream}.x", b"5", escape(block(b"Nats-TTL: 1s"), HERE, frozenset({b"nats-ttl"})))
    await soon(lambda: gone(client, stream, 5))
    assert (await get_message(client, stream, 4)).payload == b"4"


async def test_floes_own_condition_is_found_whatever_the_publisher_wrote(client: FloeClient):
    stream = await filled(client)
    original = block(b"Nats-Expected-Last-Sequence: 3", b"X: Nats-Expected-Last-Sequence: 3")
    wrong = escape(original, HERE, first_lines=(b"Nats-Expected-Last-Sequence: 2",))
    assert (await publish(client, f"{stream}.x", b"", wrong))["error"]["err_code"] == 10071
    right = escape(original, HERE, first_lines=(b"Nats-Expected-Last-Sequence: 3",))
    assert (await publish(client, f"{stream}.x", b"", right))["seq"] == 4


async def test_lone_line_breaks_start_no_header_at_the_target(client: FloeClient):
    stream = await filled(client)
    for lone in (b"A: 1\nNats-Rollup: all", b"A: 1\rNats-Rollup: all", b"A: 1\r\r\nNats-Rollup: all"):
        original = b"NATS/1.0\r\n" + lone + b"\r\n\r\n"
        answer = await publish(client, f"{stream}.x", b"", escape(original, HERE))
        assert restore((await get_message(client, stream, answer["seq"])).headers) == (HERE, original)
    assert (await stream_info(client, stream)).messages == 6
