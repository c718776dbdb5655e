"""The connection against a real nats-server: what comes in is exact, what is refused says why."""

from __future__ import annotations

import asyncio
import os

import pytest

from common.errors import OutcomeUnknown, Unavailable
from common.jetstream.client import ApiError, FloeClient, frame
from infra.local.nats import NatsServer
from tests.support.basics import PATIENCE, soon, unique

Message = tuple[bytes, bytes, bytes, bytes | None]


async def collect(client: FloeClient, subject: str) -> list[Message]:
    received: list[Message] = []
    await client.subscribe_raw(subject, lambda *message: received.append(message))
    return received


def raw_publish(port: int, command: bytes) -> None:
    """Bytes that no client would send."""

    async def run() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readline()
        writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n' + command + b"PING\r\n")
        while await reader.readline() != b"PONG\r\n":
            pass
        writer.close()

    asyncio.run(run())


# What comes in


async def test_a_subject_of_any_bytes_reaches_the_sink(client: FloeClient, nats_server: NatsServer):
    root = unique("s").encode()
    received = await collect(client, f"{root.decode()}.>")
    tokens = (b"\xff\xfe", b"\x0b\x0c", b"\x00", b"caf\xc3\xa9", b"\x85\x1c", b"'\"", b"a\rb", b"z")
    wire = b"".join(b"PUB %b.%b 2\r\nhi\r\n" % (root, token) for token in tokens)
    await asyncio.to_thread(raw_publish, nats_server.port, wire)
    await soon(lambda: len(received) == len(tokens))
    assert received == [(b"%b.%b" % (root, token), b"", b"hi", None) for token in tokens]
    assert client.generation == 1


async def test_a_sink_that_raises_ends_its_subscription_and_tells_its_owner_not_the_connection(client: FloeClient):
    """Reconnecting would repeat the error for ever, and cost all others on the connection their answers."""
    broken, told, orphans = unique("s"), [], []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: orphans.append(context["exception"]))

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    received = await collect(client, f"{broken}.>")
    await client.subscribe_raw(f"{broken}.a", fail, told.append)
    await client.subscribe_raw(f"{broken}.b", fail)
    client.add_listener(fail)
    for subject in ("a", "a", "b", "c"):
        client.send(frame(f"{broken}.{subject}".encode(), b""))
    await soon(lambda: len(received) == 4)
    assert (len(told), len(orphans)) == (1, 1)
    assert client.generation == 1
    await client.aclose()  # tells the listener, too
    assert len(orphans) == 2
    loop.set_exception_handler(None)


BLOCKS = [
    b"NATS/1.0\r\n\r\n",
    b"NATS/1.0\r\nA:  x  \r\na: 2\r\nA: 1\r\nB:\r\nno colon\r\n: x\r\n\r\n",
    b"NATS/1.0\r\n\xff\xfe: caf\xe9\x00\r\n\r\n",
    b"NATS/1.0\r\nA: " + b"x" * 65536 + b"\r\n\r\n",
    b"NATS/1.0\r\n" + b"".join(b"H%d: %d\r\n" % (i, i) for i in range(1000)) + b"\r\n",
    b"abcd",
]


async def test_headers_come_as_they_were_written(client: FloeClient, nats_server: NatsServer):
    subject = unique("s")
    received = await collect(client, subject)
    for block in BLOCKS:
        wire = b"HPUB %b r.1 %d %d\r\n%bxy\r\n" % (subject.encode(), len(block), len(block) + 2, block)
        await asyncio.to_thread(raw_publish, nats_server.port, wire)
    await soon(lambda: len(received) == len(BLOCKS))
    assert received == [(subject.encode(), b"r.1", b"xy", block) for block in BLOCKS]


async def test_payloads_of_the_greatest_size_pass_until_a_subscription_ends(client: FloeClient):
    subject, received = unique("s"), list[Message]()
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


async def test_tells_apart_no_responder_refusal_and_silence(client: FloeClient):
    with pytest.raises(Unavailable, match="nobody answers"):
        await client.request_raw(b"nobody.here", b"", timeout=2)
    with pytest.raises(ApiError, match="stream not found") as caught:
        await client.api("STREAM.INFO.NONE")
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
        await client.api("STREAM.INFO.NONE")


async def test_many_requests_at_once_get_their_own_answers(client: FloeClient):
    subject = unique("s")

    def echo(_subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        client.send(frame(reply, payload, headers))

    await client.subscribe_raw(subject, echo)
    asked = [client.request_raw(subject.encode(), b"%d" % i, timeout=PATIENCE) for i in range(500)]
    assert await asyncio.gather(*asked) == [(b"%d" % i, None) for i in range(500)]
