"""The connection, streams and consumers of a real server: reads are exact, and writes have no other effect."""

import asyncio
import os

import pytest

from common.archive.segment import Message
from common.errors import OutcomeUnknown, Unavailable
from common.nats.api import create_consumer, create_stream, stream_info
from common.nats.client import ApiError, FloeClient, frame
from common.nats.pull import get_message
from infra.local.nats import NatsServer
from infra.publish import KINDS, REQUIRED_SETTINGS, publish_awkward
from tests.support.basics import PATIENCE, AckReply, parse_ack, seeded, soon, unique
from tests.support.ingress import client_of
from tests.support.servers import place

Received = tuple[bytes, bytes, bytes, bytes | None]


async def collect(client: FloeClient, subject: str) -> list[Received]:
    received: list[Received] = []
    await client.subscribe_raw(subject, lambda *message: received.append(message))
    return received


# Receiving


async def test_a_failing_sink_ends_its_subscription_and_reaches_its_owner_not_the_connection(client: FloeClient):
    """Reconnecting would repeat the error for ever, and cost all others on the connection their answers."""
    broken, notified, orphans = unique("s"), [], []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: orphans.append(context["exception"]))

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    received = await collect(client, f"{broken}.>")
    await client.subscribe_raw(f"{broken}.a", fail, notified.append)
    await client.subscribe_raw(f"{broken}.b", fail)
    client.add_listener(fail)
    for subject in ("a", "a", "b", "c"):
        client.send(frame(f"{broken}.{subject}".encode(), b""))
    await soon(lambda: len(received) == 4)
    assert (len(notified), len(orphans), client.generation) == (1, 1, 1)
    await client.aclose()  # notifies the listener, too
    assert len(orphans) == 2
    loop.set_exception_handler(None)


async def test_payloads_of_the_greatest_size_pass_until_a_subscription_ends(client: FloeClient):
    subject, received = unique("s"), list[Received]()
    subscription = await client.subscribe_raw(subject, lambda *message: received.append(message))
    payload = os.urandom(client.max_payload)
    client.send(frame(subject.encode(), payload) + frame(subject.encode(), b""))
    await client.flush_writes()
    await soon(lambda: len(received) == 2)
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    client.send(frame(subject.encode(), b"x"))
    await collect(client, unique("s"))  # a round trip
    assert [m[2] for m in received] == [payload, b""]


# Requests


async def test_no_responder_refusal_and_silence_differ(client: FloeClient):
    with pytest.raises(Unavailable, match="no server answers"):
        await client.request_raw(b"nobody.here", b"", timeout=PATIENCE)
    with pytest.raises(ApiError, match="stream not found") as caught:
        await client.api("STREAM.INFO.NONE", timeout=PATIENCE)
    assert (caught.value.status, caught.value.err_code, caught.value.code) == (404, 10059, "E-JS-10059")
    silent = unique("s")
    await collect(client, silent)
    with pytest.raises(OutcomeUnknown, match=r"no answer to s_\w+ within 0.1 s"):
        await client.request_raw(silent.encode(), b"", timeout=0.1)


async def test_an_answer_that_is_no_json_is_an_unknown_outcome(client: FloeClient, monkeypatch: pytest.MonkeyPatch):
    subject = unique("s")
    await client.subscribe_raw(subject, lambda _s, reply, _p, _h: client.send(frame(reply, b"<html>")))
    monkeypatch.setattr(client, "api_subject", lambda _: subject)
    with pytest.raises(OutcomeUnknown, match="expected a JSON object"):
        await client.api("STREAM.INFO.NONE", timeout=PATIENCE)


def block(*lines: bytes) -> bytes:
    return b"".join([b"NATS/1.0\r\n", *(line + b"\r\n" for line in lines), b"\r\n"])


async def test_a_name_that_is_no_token_never_reaches_the_api(client: FloeClient):
    for name in ("", "a.b", "a b", "a*", ">", "a/b"):
        with pytest.raises(ValueError, match="expected no space"):
            await stream_info(client, name)


async def test_reads_messages_exactly(client: FloeClient):
    stream = unique("S")
    await place(client, {"name": stream, "subjects": [f"{stream}.>"]})
    blocks, payloads = [None, block(), block(b"A: 1", b"a:2", b"A: \xff ")], [b"", b"\x00\xff"]
    sent = [(f"{stream}.".encode() + b"\xff\xfe", headers, payload) for headers in blocks for payload in payloads]
    for subject, headers, payload in sent:
        await client.request_raw(subject, payload, headers, timeout=PATIENCE)
    found = [await get_message(client, stream, number) for number in range(1, len(sent) + 1)]
    assert found == [Message(number, found[number - 1].timestamp_ns, *each) for number, each in enumerate(sent, 1)]
    delivered = await deliver(client, stream)
    assert [(subject, headers, payload) for subject, _, payload, headers in delivered] == sent
    acks = [AckReply(stream, "", n, n, m.timestamp_ns, len(sent) - n) for n, m in enumerate(found, 1)]
    assert [parse_ack(reply)._replace(consumer="") for _, reply, _, _ in delivered] == acks
    await client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 1})
    assert await get_message(client, stream, 1) is await get_message(client, stream, 99) is None
    with pytest.raises(ApiError, match="stream not found"):
        await get_message(client, "NONE", 1)


async def deliver(client: FloeClient, stream: str) -> list[tuple[bytes, bytes, bytes, bytes | None]]:
    """Deliver all messages through a consumer, each with its reply subject."""
    consumer = unique("c")
    info = await create_consumer(client, stream, {"name": consumer, "ack_policy": "none"})
    received, inbox = [], client.new_inbox()
    await client.subscribe_raw(inbox, lambda *message: received.append(message))
    ask = client.api_subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}").encode()
    client.send(frame(ask, b'{"batch":100,"no_wait":true}', None, inbox.encode()))
    await soon(lambda: len(received) > info.pending)
    return [message for message in received if message[1]]


async def test_both_layouts_of_replies_are_those_of_a_server():
    for flag, dots in (("false", 8), ("true", 10)):
        with NatsServer(extra=f"feature_flags {{ js_ack_fc_v2: {flag} }}") as server:
            async with client_of(server.url) as client:
                await create_stream(client, {"name": "S", "subjects": ["s"], "first_seq": 7})
                await client.request_raw(b"s", b"1", timeout=PATIENCE)
                [(_, reply, _, _)] = await deliver(client, "S")
                stored, ack = await get_message(client, "S", 7), parse_ack(reply)
                assert (reply.count(b"."), ack) == (dots, AckReply("S", ack.consumer, 7, 1, stored.timestamp_ns, 0))


@pytest.mark.parametrize("features", [{}, dict.fromkeys(REQUIRED_SETTINGS.values(), True)], ids=["without", "with"])
async def test_the_server_takes_every_kind_of_odd_message_that_its_stream_allows(client, features: dict[str, bool]):
    """Other tests publish them to see them carried: a kind that is refused would be tested by none."""
    stream, kinds = unique("ODD"), {*KINDS} - (set() if features else {*REQUIRED_SETTINGS})
    config = {"name": stream, "subjects": [f"{stream}.>"], "duplicate_window": 200_000_000, **features}
    await create_stream(client, config)
    report = await publish_awkward(client, stream, stream, seeded(), 2 * len(kinds), deleted_share=0)
    assert ({*report.stored}, report.published.refused, report.published.unknown) == (kinds, {}, 0)
