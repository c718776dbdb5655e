"""What is written to the wire is checked byte by byte; what is read from it is split whatever it carries."""

from __future__ import annotations

import asyncio
import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.jetstream.protocol import MAX_SERVER_MESSAGE, FrameParser, WireError, frame

BLOCK = b"NATS/1.0\r\nA: 1\r\n\r\n"


def test_writes_messages_with_and_without_headers_and_reply():
    assert frame(b"a.b", b"hello") == b"PUB a.b 5\r\nhello\r\n"
    assert frame(b"a", b"xy", BLOCK, b"r.1") == b"HPUB a r.1 %d %d\r\n%bxy\r\n" % (len(BLOCK), len(BLOCK) + 2, BLOCK)
    assert frame(b"a", b"", b"NATS/1.0\r\n\r\n") == b"HPUB a 12 12\r\nNATS/1.0\r\n\r\n\r\n"


@pytest.mark.parametrize(
    ("message", "why"),
    [
        *(((b"a.%cb" % byte, b""), "expected no space, tab, CR, LF or NUL") for byte in b" \t\r\n\0"),
        ((b"a", b"", None, b"r\n"), "expected no space, tab, CR, LF or NUL"),
        ((b"a 0\r\n\r\nPUB b", b""), "subject"),
        ((b"", b"x"), "at least one byte"),
        ((b"a" * 4057, b""), "at most 4056 bytes, found 4057"),  # the server would close the connection for it
        ((b"a", b"", b""), "header block"),
        ((b"a", b"", b"A: 1\r\n\r\n"), "header block"),
        ((b"a", b"", b"NATS/1.0\r\nA: 1\r\n"), "header block"),
        ((b"a", b"", b"NATS/1.0 503\r\n\r\n"), "header block"),
        ((b"a", b"", b"NATS/1.0\r\n\r\nA: 1\r\n\r\n"), "header block"),
    ],
)
def test_refuses_what_the_server_would_take_for_something_else(message: tuple[bytes, ...], why: str):
    with pytest.raises(ValueError, match=why):
        frame(*message)


class Received:
    """Collects what a parser hands out."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, bytes, bytes, bytes | None]] = []
        self.others: list[bytes] = []
        self.lines: list[bytes] = []
        self.broken: list[tuple[bytes, str]] = []
        self.parser = FrameParser({b"1": self.sink, b"9": self.fail}, self.other, self.line, self.on_broken)

    def sink(self, *message: bytes | None) -> None:
        self.messages.append(message)

    def fail(self, *_: bytes | None) -> None:
        raise MemoryError("no room")

    def on_broken(self, sid: bytes, error: Exception) -> None:
        self.broken.append((sid, str(error)))

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


SUBJECT = st.binary(min_size=1, max_size=12).filter(lambda s: not set(s) & set(b" \t\r\n")) | st.sampled_from(
    [b"s.\xff\xfe", b"s.\x0b\x0c", b"s.\x00", b"s.\x1c\x85", b"MSG", b"a\rb"]
)
MESSAGES = st.lists(st.tuples(SUBJECT, SUBJECT | st.just(b""), st.binary(max_size=40), st.none() | st.binary()))


@given(messages=MESSAGES, data=st.data())
def test_splits_any_bytes_however_they_arrive(messages, data):
    wire = b"".join(_delivered(*message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    chunks = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert Received().feed(*chunks).messages == messages


def _delivered(subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> bytes:
    start = subject + b" 1 " + (reply + b" " if reply else b"")
    if headers is None:
        return b"MSG %b%d\r\n%b\r\n" % (start, len(payload), payload)
    size = len(headers)
    return b"HMSG %b%d %d\r\n%b%b\r\n" % (start, size, size + len(payload), headers, payload)


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


@pytest.mark.parametrize(
    "line", [b"MSG s 1 %d\r\n", b"MSG s 1 reply %d\r\n", b"HMSG s 1 12 %d\r\n", b"HMSG s 1 r 12 %d\r\n"]
)
async def test_a_message_that_no_server_could_have_stored_ends_the_connection_before_it_is_gathered(
    line: bytes,
) -> None:
    """The largest is an answer of the API that holds a message of 64 MiB in base64."""
    assert len(base64.b64encode(bytes(64 << 20))) < MAX_SERVER_MESSAGE <= (64 << 20) * 4 / 3 + (1 << 20)
    await Received().parser.parse(line % MAX_SERVER_MESSAGE)
    with pytest.raises(WireError, match="a message of 90527062 bytes, more than 90527061"):
        await Received().parser.parse(line % (MAX_SERVER_MESSAGE + 1))
