"""The NATS protocol: checks before writing, splitting of any bytes that are read, replies and status frames."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.imports import load_compiled
from common.nats import protocol
from common.nats.protocol import ConsumerError, FrameParser, IdleHeartbeat, PullEnd, WireError, frame, parse_replies
from tests.support.basics import AckReply, parse_ack

BLOCK = b"NATS/1.0\r\nA: 1\r\n\r\n"
ROOT = Path(__file__).parents[2]


@cache
def compiled(name: str) -> Any:
    """Build the compiled module of a C file and load it. Skips the test if no compiler is here."""
    with TemporaryDirectory() as folder:
        output = subprocess.check_output(["bash", "infra/build_native.sh", sys.executable, folder], cwd=ROOT, text=True)
        if (found := next(Path(folder).glob(f"_{name}.*"), None)) is None:
            pytest.skip(output.strip())
        spec: Any = spec_from_file_location(f"native._{name}", found)
        spec.loader.exec_module(module := module_from_spec(spec))
        return module


@pytest.fixture(autouse=True, params=["python", "compiled"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_frames", compiled("frames") if request.param == "compiled" else None)


def test_writes_messages_with_and_without_headers_and_reply():
    assert frame(b"a.b", b"hello") == b"PUB a.b 5\r\nhello\r\n"
    assert frame(b"a", b"xy", BLOCK, b"r.1") == b"HPUB a r.1 %d %d\r\n%bxy\r\n" % (len(BLOCK), len(BLOCK) + 2, BLOCK)
    assert frame(b"a", b"", b"NATS/1.0\r\n\r\n") == b"HPUB a 12 12\r\nNATS/1.0\r\n\r\n\r\n"


BAD_MESSAGES = [
    *(((b"a.%cb" % byte, b""), "expected no space, tab, CR, LF or NUL") for byte in b" \t\r\n\0"),
    ((b"a", b"", None, b"r\n"), "expected no space, tab, CR, LF or NUL"),
    ((b"a 0\r\n\r\nPUB b", b""), "subject"),
    ((b"", b"x"), "at least one byte"),
    ((b"a" * 4057, b""), "at most 4056 bytes, found 4057"),  # the server would close the connection for it
    *(((b"a", b"", each), "header block") for each in (b"", b"A: 1\r\n\r\n", b"NATS/1.0\r\nA: 1\r\n")),
    *(((b"a", b"", b"NATS/1.0" + each), "header block") for each in (b" 503\r\n\r\n", b"\r\n\r\nA: 1\r\n\r\n")),
]


@pytest.mark.parametrize(("message", "why"), BAD_MESSAGES)
def test_refuses_what_the_server_would_take_for_something_else(message: tuple[bytes, ...], why: str):
    with pytest.raises(ValueError, match=why):
        frame(*message)


class Received:
    """The messages and lines that a parser hands out."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes | None, ...]] = []
        self.others: list[bytes] = []
        self.lines: list[bytes] = []
        self.broken: list[tuple[bytes, str]] = []
        self.calls: list[object] = []
        self.kept = protocol.message_list(lambda: self.calls.append("first"), self.calls.append)
        sinks = {b"1": lambda *message: self.messages.append(message), b"8": self.kept, b"9": self.fail}
        note = lambda sid, error: self.broken.append((sid, str(error)))  # noqa: E731
        self.parser = FrameParser(sinks, self.other, self.line, note)

    def fail(self, *_: bytes | None) -> None:
        raise MemoryError("no room")

    async def other(self, sid: bytes, *_: bytes | None) -> None:
        self.others.append(sid)

    async def line(self, line: bytes) -> None:
        self.lines.append(line)

    def feed(self, *chunks: bytes) -> Received:
        async def run() -> None:
            for chunk in chunks:
                await self.parser.parse(chunk)

        asyncio.run(run())
        return self


def test_hands_messages_to_their_sink_and_lines_to_the_connection():
    with_headers = b"HMSG c 1 r.1 %d %d\r\n%bx\r\n" % (len(BLOCK), len(BLOCK) + 1, BLOCK)
    received = Received().feed(b"PING\r\nMSG a 1 2\r\nhi\r\nMSG b 2 r 0\r\n\r\n" + with_headers + b"PONG\r\n")
    assert received.messages == [(b"a", b"", b"hi", None), (b"c", b"r.1", b"x", BLOCK)]
    assert (received.others, received.lines) == ([b"2"], [b"PING", b"PONG"])


def test_a_sink_that_raises_costs_no_other_its_messages():
    received = Received().feed(b"MSG a 9 2\r\nhi\r\nMSG b 1 2\r\nho\r\nPONG\r\n")
    found = (received.broken, received.messages, received.lines)
    assert found == ([(b"9", "no room")], [(b"b", b"", b"ho", None)], [b"PONG"])


def test_keeps_messages_until_they_are_taken_and_passes_on_status_frames():
    status = b"HMSG r 8 12 12\r\nNATS/1.0\r\n\r\n\r\n"
    received = Received().feed(b"MSG a 8 x 1\r\n1\r\nMSG b 8 y 0\r\n\r\n" + status + b"MSG r 8 0\r\n\r\n")
    assert received.calls == ["first", b"NATS/1.0\r\n\r\n", None]
    assert received.kept.take() == ([b"a", b"b"], [b"x", b"y"], [b"1", b""], [None, None])
    received.kept(b"c", b"z", b"2", BLOCK)
    found = received.calls[-1], received.kept.take(), received.kept.take()
    assert found == ("first", ([b"c"], [b"z"], [b"2"], [BLOCK]), ([], [], [], []))


SUBJECT = st.binary(min_size=1, max_size=12).filter(lambda s: not set(s) & set(b" \t\r\n")) | st.sampled_from(
    [b"s.\xff\xfe", b"s.\x0b\x0c", b"s.\x00", b"s.\x1c\x85", b"MSG", b"a\rb"]
)
MESSAGE = st.tuples(SUBJECT, SUBJECT | st.just(b""), st.binary(max_size=40), st.none() | st.binary())
SIZES = [b"0", b"2", b"02", b"+2", b"2_0", b"-1", b"", b"x", b"9999999", b"99999999999999999999"]
HOSTILE = st.tuples(
    st.sampled_from([b"MSG", b"HMSG", b"HMSGX", b"PING", b"hi", b""]),
    st.sampled_from([b"a", b"", b"a\rb"]),
    st.sampled_from([b"1", b"8", b"7", b"9", b""]),
    *(st.sampled_from(SIZES) for _ in range(3)),
).map(lambda words: b" ".join(words) + b"\r\n")
FRAME = st.builds(lambda found, sid: _delivered(*found, sid), MESSAGE, st.sampled_from([b"1", b"8", b"7", b"9"]))


def _cut(data: st.DataObject, wire: bytes) -> list[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    return [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]


@given(messages=st.lists(MESSAGE), data=st.data())
def test_splits_any_bytes_however_they_arrive(messages, data):
    assert Received().feed(*_cut(data, b"".join(_delivered(*message) for message in messages))).messages == messages


def _delivered(subject: bytes, reply: bytes, payload: bytes, headers: bytes | None, sid: bytes = b"1") -> bytes:
    start = subject + b" " + sid + b" " + (reply + b" " if reply else b"")
    if headers is None:
        return b"MSG %b%d\r\n%b\r\n" % (start, len(payload), payload)
    size = len(headers)
    return b"HMSG %b%d %d\r\n%b%b\r\n" % (start, size, size + len(payload), headers, payload)


def in_python(observe: Callable[..., object], *arguments: object) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "_frames", None)
        return observe(*arguments)


def test_a_compiled_module_of_another_source_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    name, source = "common.nats._frames", Path(protocol.__file__).with_name("frames.c")
    digest = sha256(source.read_bytes()).hexdigest()
    built = SimpleNamespace(__file__=str(source.with_name("_frames.so")), SOURCE_SHA256=digest)
    monkeypatch.setitem(sys.modules, name, built)
    monkeypatch.delenv("FLOE_PURE", raising=False)
    assert load_compiled(name) is built
    monkeypatch.setenv("FLOE_PURE", "1")
    assert load_compiled(name) is None
    monkeypatch.delenv("FLOE_PURE")
    built.SOURCE_SHA256 = "0" * 64
    assert load_compiled(name) is None


def observed(chunks: list[bytes]) -> tuple[object, ...]:
    seen, error = Received(), ""
    try:
        seen.feed(*chunks)
    except WireError as found:
        error = str(found)
    return error, seen.messages, seen.others, seen.lines, seen.broken, seen.calls, seen.kept.take()


@given(st.lists(FRAME | HOSTILE | st.binary(max_size=9)), st.data())
def test_compiled_frames_are_those_of_python_for_hostile_bytes_too(parts: list[bytes], data: st.DataObject) -> None:
    wire = bytearray(b"".join(parts))
    for place in data.draw(st.lists(st.integers(0, len(wire) - 1), max_size=2)) if wire else ():
        wire[place : place + 1] = data.draw(st.sampled_from([b"", b" ", b"\r", b"\n", b"\r\n", b"0", b"\xff"]))
    chunks = _cut(data, bytes(wire))
    assert observed(chunks) == in_python(observed, chunks)


@pytest.mark.parametrize("line", [b"MSG a 1 x", b"MSG a", b"MSG a 1 -5", b"HMSG a 1 9 2\r\nhi", b"HMSG a 1 -2 2\r\nhi"])
def test_refuses_what_is_not_the_protocol(line: bytes):
    for wire in (line + b"\r\n", b"MSG a 1 2\r\nhixx", b"x" * (5 << 20)):
        with pytest.raises(WireError):
            Received().feed(wire)


def test_a_reset_within_a_chunk_drops_the_rest_of_the_old_connection():
    class Resetting(Received):
        async def line(self, line: bytes) -> None:
            self.parser.reset()

    received = Resetting().feed(b"-ERR 'x'\r\nMSG a 1 1\r\nz\r\nMSG", b"MSG b 1 1\r\ny\r\n")
    assert received.messages == [(b"b", b"", b"y", None)]


@pytest.mark.parametrize("line", [b"MSG s 1 %d", b"MSG s 1 r %d", b"HMSG s 1 12 %d", b"HMSG s 1 r 12 %d"])
async def test_a_message_that_no_server_could_have_stored_ends_the_connection_at_once(line: bytes) -> None:
    """End the connection: the largest possible message is an API answer with a message of 64 MiB in base64."""
    most = protocol.SERVER_MESSAGE_BYTES
    assert len(base64.b64encode(bytes(64 << 20))) < most <= (64 << 20) * 4 / 3 + (1 << 20)
    await Received().parser.parse(line % most + b"\r\n")
    with pytest.raises(WireError, match="a message of 90527062 bytes, more than 90527061"):
        await Received().parser.parse(line % (most + 1) + b"\r\n")


# Replies and status frames as nats-server writes them


PENDING = b"Nats-Pending-Messages: 4\r\n\r\n"


def reply(
    sequence: int | str, number: int | str, *, consumer: str = "c1", domain: bool = False, time: str = "7"
) -> bytes:
    front, end = ("_.hash.", ".token") if domain else ("", "")
    return f"$JS.ACK.{front}S.{consumer}.1.{sequence}.{number}.{time}.5{end}".encode()


@pytest.mark.parametrize(("front", "end"), [("", ""), ("_.hash.", ""), ("hub.hash.", ".token"), ("d.h.", ".a.b")])
def test_reads_sequences_and_times_of_both_layouts(front: str, end: str) -> None:
    replies = [f"$JS.ACK.{front}S.c1.1.{sequence}.{sequence - 4}.1{sequence}.5{end}".encode() for sequence in (7, 8)]
    assert parse_ack(replies[0]) == AckReply("S", "c1", 7, 3, 17, 5)
    acks = parse_replies(replies, b"c1", 3)
    assert (acks.sequences, acks.timestamps_ns, acks.contiguous) == ([7, 8], [17, 18], 2)


@pytest.mark.parametrize(("numbers", "contiguous"), [([3, 4, 6], 2), ([4, 5, 6], 0), ([3, 4, 5], 3), ([3, 3, 4], 1)])
def test_counts_only_messages_that_continue_the_consumer_sequence(numbers: list[int], contiguous: int) -> None:
    assert parse_replies([reply(10 + i, number) for i, number in enumerate(numbers)], b"c1", 3).contiguous == contiguous


BAD_REPLIES = [
    *([each] for each in (b"", b"_INBOX.x", b"$JS.ACK.S.c1.1.7.3", b"$JS.ACK.x.S.c1.1.7.3.70.5")),
    *([each] for each in (b"$JS.FC.S.c1.1.7.3.70.5", b"$JS.ACKS.S.c1.1.7.3.70.5", b"$JS.ACK.S.c1.1.x.3.70.5")),
    [reply(7, 3, consumer="other")],
    [reply(7, 3), reply(8, 4, consumer="other")],
    [reply(7, 3), reply(8, 4, domain=True)],
    [reply(7, 3), b"$JS.ACK.S.c1.1.x.4.70.5"],
    [reply(8, 3), reply(7, 4)],
]


@pytest.mark.parametrize("replies", BAD_REPLIES)
def test_refuses_replies_of_another_form_or_consumer_or_out_of_order(replies: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"expected|reply|replies|sequences|invalid literal"):
        parse_replies(replies, b"c1", 3)


def parsed(replies: list[bytes], first: int) -> object:
    try:
        return parse_replies(replies, b"c1", first)
    except (ValueError, IndexError) as error:
        return type(error), str(error)


NUMBERS = st.integers(0, 20).map(str) | st.sampled_from(
    ["", "-1", "+7", "1_0", "007", str(2**63 - 1), str(2**63), "9" * 40]
)
REPLY = st.builds(reply, NUMBERS, NUMBERS, consumer=st.sampled_from(["c1", "c"]), domain=st.booleans(), time=NUMBERS)
REPLIES = st.lists(REPLY | st.sampled_from([b"", b"$JS.ACK", b"$JS.ACK.1.2.3.4.5.6.7.8"]), max_size=3)
ORDINARY = st.lists(st.integers(1, 2**63 - 2), unique=True).map(lambda found: [reply(n, n) for n in sorted(found)])


@given(REPLIES | ORDINARY, st.integers(0, 20) | st.just(2**63 - 1))
def test_compiled_replies_are_those_of_python(replies: list[bytes], first: int) -> None:
    assert parsed(replies, first) == in_python(parsed, replies, first)


STATUS_FRAMES = [
    (b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 8\r\nNats-Last-Stream: 10\r\n\r\n", IdleHeartbeat(8, 10)),
    (b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 9\r\nNats-Pending-Bytes: 0\r\n\r\n", PullEnd(9)),
    (b"NATS/1.0 409 Message Size Exceeds MaxBytes\r\n" + PENDING, PullEnd(4, is_too_small=True)),
    (b"NATS/1.0 409 Exceeded MaxRequestBatch of 256\r\n\r\n", PullEnd(0, max_batch=256)),
    (b"NATS/1.0 409 Exceeded MaxRequestBatch of 0\r\n\r\n", ConsumerError("409 Exceeded MaxRequestBatch of 0")),
    (b"NATS/1.0 409 Consumer Deleted\r\n\r\n", ConsumerError("409 Consumer Deleted")),
    (b"NATS/1.0 503\r\nNats-Subject: x\r\n\r\n", ConsumerError("503")),
    (b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: x\r\n\r\n", ConsumerError("100 Idle Heartbeat")),
    (b"NATS/1.0\r\n\r\n", ConsumerError("an empty status")),
    (None, ConsumerError("an empty status")),
]


@pytest.mark.parametrize(("block", "status"), STATUS_FRAMES)
def test_separates_status_frames(block: bytes | None, status: object) -> None:
    assert protocol.parse_status(block) == status
