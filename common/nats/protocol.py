"""NATS protocol messages as bytes, built and parsed without a connection; requests that wait, and their answers.

Out: `frame` builds one PUB or HPUB. It checks every byte that the protocol would act on, because subjects and headers
come from segment files and from publishers. In: `FrameParser` splits the bytes from the server; it accepts any bytes
that a subject may carry (nats-py's own parser treats `\\s` as a separator and fails on bytes that are not UTF-8).

`frames.c` does the same for ordinary frames and replies where it is built (`make native`). It leaves all others to the
Python code here, which is the reference for both.
"""

import json
import re
from asyncio import Future
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import lt
from typing import Any

from common.errors import FloeError, OutcomeUnknown, Unavailable
from common.imports import load_compiled

# Called synchronously with subject, reply (b"" if none), payload and raw header block (None if none). An error that it
# raises goes to its owner and never affects the connection.
Sink = Callable[[bytes, bytes, bytes, bytes | None], None]
# Subjects, replies, payloads and header blocks of messages: lists of equal length.
Messages = tuple[list[bytes], list[bytes], list[bytes], list[bytes | None]]

CONTROL_LINE_BYTES = 4096  # bytes; the server's default, beyond which it closes the connection
SERVER_LINE_BYTES = 4 << 20  # bytes; the longest line is an INFO that names many servers
# Bytes of one message from the server. It may be larger than the current max_payload: a stored message has up to
# 64 MiB, and an answer of the JetStream API holds it in base64.
SERVER_MESSAGE_BYTES = (64 << 20) * 4 // 3 + (1 << 20)
HEADER_START, HEADER_END = b"NATS/1.0\r\n", b"\r\n\r\n"

_frames = load_compiled("common.nats._frames")
_UNSAFE_IN_SUBJECT = re.compile(rb"[\x00\t\n\r ]")


class WireError(Exception):
    """The server sent bytes that do not follow its protocol; the connection cannot be used further."""


def check_subject(subject: bytes) -> None:
    """Raise ValueError if `subject` is empty or contains a byte that would end it on the wire."""
    if not subject:
        raise ValueError("subject: expected at least one byte, found none")
    if (found := _UNSAFE_IN_SUBJECT.search(subject)) is not None:
        raise ValueError(f"subject {subject!r:.80}: expected no space, tab, CR, LF or NUL, found {found[0]!r}")


def check_headers(headers: bytes) -> None:
    """Raise ValueError if `headers` is not one header block: version, lines, an empty line."""
    if not headers.startswith(HEADER_START) or not headers.endswith(HEADER_END):
        raise ValueError(f"header block {headers[:40]!r}: expected NATS/1.0 first and an empty line last")
    if headers.find(HEADER_END) != len(headers) - 4:
        raise ValueError("header block: expected no empty line before its end, found one")


def frame(subject: bytes, payload: bytes, headers: bytes | None = None, reply: bytes | None = None) -> bytes:
    """Return the bytes that publish one message; `headers` is a whole block, None for none.

    Raises ValueError for a message that the wire cannot carry. The caller checks that header block and payload together
    fit the server's max_payload: `FloeClient.max_payload`.
    """
    if _UNSAFE_IN_SUBJECT.search(subject) is not None or not subject:
        check_subject(subject)
    if reply:
        check_subject(reply)
        subject = subject + b" " + reply
    if len(subject) > CONTROL_LINE_BYTES - 40:
        raise ValueError(f"subject and reply: expected at most {CONTROL_LINE_BYTES - 40} bytes, found {len(subject)}")
    if headers is None:
        return b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload)
    check_headers(headers)
    size = len(headers)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, size, size + len(payload), headers, payload)


class MessageList:
    """Sink that keeps messages with a reply until they are taken. Make one with `message_list`.

    `on_first`: called when it holds a message again. `on_status`: called with the header block of each message without
    a reply; None if it has none.
    """

    def __init__(self, on_first: Callable[[], object], on_status: Callable[[bytes | None], object]) -> None:
        self._on_first, self._on_status = on_first, on_status
        self._kept: Messages = ([], [], [], [])

    def __call__(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if not reply:
            self._on_status(headers)
            return
        subjects, replies, payloads, blocks = self._kept
        subjects.append(subject)
        replies.append(reply)
        payloads.append(payload)
        blocks.append(headers)
        if len(subjects) == 1:
            self._on_first()

    def take(self) -> Messages:
        """Return the messages, and forget them."""
        taken, self._kept = self._kept, ([], [], [], [])
        return taken


def message_list(on_first: Callable[[], object], on_status: Callable[[bytes | None], object]) -> MessageList:
    """Return an empty `MessageList`; a compiled one, filled without a call of Python, if there is one."""
    made: MessageList = (MessageList if _frames is None else _frames.MessageList)(on_first, on_status)
    return made


class FrameParser:
    """A parser that splits the server's bytes into messages and protocol lines.

    A message of a subscription in `sinks` (by sid in ASCII digits) goes to its sink at once, without a turn of the
    event loop. Every other message goes to `on_message`, and every other line to `on_line`. If a sink raises,
    `on_sink_error` is called with its sid and the error.
    """

    def __init__(
        self,
        sinks: dict[bytes, Sink],
        on_message: Callable[[bytes, bytes, bytes, bytes, bytes | None], Awaitable[None]],
        on_line: Callable[[bytes], Awaitable[None]],
        on_sink_error: Callable[[bytes, Exception], None],
    ) -> None:
        self._sinks, self._on_message, self._on_line = sinks, on_message, on_line
        self._on_sink_error = on_sink_error
        self.reset()

    def reset(self) -> None:
        self._parts: list[bytes] = []
        self._buffered, self._needed = 0, 1
        self._epoch = object()

    async def parse(self, data: bytes) -> None:
        """Process the next bytes of the connection. Raises WireError."""
        self._parts.append(data)
        self._buffered += len(data)
        if self._buffered < self._needed:
            return
        epoch = self._epoch
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        used, need = await self._split(data)
        if epoch is not self._epoch:
            return  # a line ended this connection; the rest is dropped
        rest = data[used:]
        self._parts, self._buffered, self._needed = ([rest] if rest else [], len(rest), max(need, len(rest) + 1))

    async def _split(self, data: bytes) -> tuple[int, int]:
        """Return the number of bytes used, and the bytes after these that the next whole message needs (0: unknown)."""
        sinks, epoch, position, size = self._sinks, self._epoch, 0, len(data)
        while True:
            if _frames is not None:
                position = _frames.take_frames(data, position, sinks, self._on_sink_error)
            if (end := data.find(b"\r\n", position)) < 0:
                break
            if (kind := data[position : position + 4]) == b"HMSG" or kind == b"MSG ":
                words = data[position:end].split(b" ")
                start = end + 2
                try:
                    body = start + (int(words[-2]) if kind == b"HMSG" else 0)
                    stop = start + int(words[-1])
                except (ValueError, IndexError) as error:
                    raise WireError(f"malformed line {data[position:end]!r:.200}") from error
                if stop - start > SERVER_MESSAGE_BYTES:
                    raise WireError(f"a message of {stop - start} bytes, more than {SERVER_MESSAGE_BYTES}")
                if size < stop + 2:
                    return position, stop + 2 - position
                if data[stop : stop + 2] != b"\r\n" or not start <= body <= stop:
                    raise WireError(f"malformed message {data[position:end]!r:.200}")
                # MSG subject sid [reply] size, HMSG subject sid [reply] header-size size: a reply is one more word
                reply = words[3] if len(words) == (6 if kind == b"HMSG" else 5) else b""
                headers = data[start:body] if kind == b"HMSG" else None
                position = stop + 2
                if (sink := sinks.get(words[2])) is not None:
                    try:
                        sink(words[1], reply, data[body:stop], headers)
                    except Exception as error:
                        self._on_sink_error(words[2], error)
                    continue
                await self._on_message(words[2], words[1], reply, data[body:stop], headers)
            else:
                line, position = data[position:end], end + 2
                await self._on_line(line)
            if epoch is not self._epoch:
                break
        if size - position > SERVER_LINE_BYTES:
            raise WireError(f"a line of more than {SERVER_LINE_BYTES} bytes")
        return position, 0


_ACK_WORDS = (b"$JS", b"ACK")


def reply_layout(reply: bytes) -> tuple[int, int]:
    """Return the number of words in a consumer's replies, and the index of the first of: stream, consumer, deliveries,
    sequence, consumer sequence, timestamp, pending count. The layout is with or without a domain (ADR-15).

    Raises ValueError for another form of reply.
    """
    words = reply.split(b".")
    if tuple(words[:2]) == _ACK_WORDS and len(words) == 9:
        return 9, 2
    if tuple(words[:2]) == _ACK_WORDS and len(words) >= 11:
        return len(words), 4
    raise ValueError(f"reply {reply!r:.200}: expected $JS.ACK with 9, or 11 and more, words")


@dataclass(frozen=True, slots=True)
class ParsedReplies:
    """The content of consecutive replies; the first `contiguous` of them continue the consumer's sequence."""

    sequences: list[int]
    timestamps_ns: list[int]
    contiguous: int


def parse_replies(replies: Sequence[bytes], consumer: bytes, first_number: int) -> ParsedReplies:
    """Return sequences and times of the messages with `replies`, the first of which `consumer` should have numbered
    `first_number`.

    All at once, because this runs for every message. Raises ValueError for a reply of another form or consumer, and for
    sequences that do not ascend.
    """
    if _frames is not None and (found := _frames.read_replies(replies, consumer, first_number)) is not None:
        return ParsedReplies(*found)
    count, (step, begin) = len(replies), reply_layout(replies[0])
    # Names of streams and consumers contain no dot, so one split separates the words of all replies.
    words = b".".join(replies).split(b".")
    if len(words) != step * count or words[begin + 1 :: step].count(consumer) != count:
        raise ValueError(f"replies such as {replies[0]!r:.200}: expected all of consumer {consumer.decode()}")
    sequences = list(map(int, words[begin + 3 :: step]))
    numbers = list(map(int, words[begin + 4 :: step]))
    timestamps = list(map(int, words[begin + 5 :: step]))
    if not all(map(lt, sequences, sequences[1:])):
        raise ValueError(f"sequences {sequences[0]}..{sequences[-1]}: expected them to ascend")
    return ParsedReplies(sequences, timestamps, _contiguous(numbers, first_number))


def _contiguous(numbers: list[int], first_number: int) -> int:
    if numbers[0] == first_number and numbers == list(range(first_number, first_number + len(numbers))):
        return len(numbers)
    return next(i for i, number in enumerate(numbers) if number != first_number + i)


@dataclass(frozen=True, slots=True)
class IdleHeartbeat:
    """An idle heartbeat: the consumer had sent `consumer_sequence` messages when it had passed `sequence`."""

    consumer_sequence: int
    sequence: int


@dataclass(frozen=True, slots=True)
class PullEnd:
    """A pull request ended with `undelivered` messages to go; `is_too_small`: the next message did not fit.

    `max_batch`: the request was refused because it asked for more messages than this; 0: it was not refused.
    """

    undelivered: int
    is_too_small: bool = False
    max_batch: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerError:
    """The consumer or its leader is gone, or refuses to deliver; `text` is the server's."""

    text: str

    @property
    def has_no_responders(self) -> bool:
        """True if no one listens on the consumer's subject: it is gone, or its server is not ready for it yet."""
        return self.text.startswith("503")


Status = IdleHeartbeat | PullEnd | ConsumerError
_BATCH_EXCEEDED = re.compile(r"409 Exceeded MaxRequestBatch of ([1-9][0-9]{0,17})")


def parse_status(block: bytes | None) -> Status:
    first, *rest = (block or b"").split(b"\r\n")
    text = first.removeprefix(b"NATS/1.0").strip().decode("utf-8", "backslashreplace")
    values = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in rest)}
    if text.startswith("100"):
        number, sequence = values.get(b"nats-last-consumer"), values.get(b"nats-last-stream")
        if number is not None and sequence is not None and number.isdigit() and sequence.isdigit():
            return IdleHeartbeat(int(number), int(sequence))
    undelivered = values.get(b"nats-pending-messages", b"")
    if undelivered.isdigit() and text[:3] in ("408", "409"):
        return PullEnd(int(undelivered), "Exceeds MaxBytes" in text)
    if limit := _BATCH_EXCEEDED.match(text):
        return PullEnd(0, max_batch=int(limit[1]))
    return ConsumerError(text or "an empty status")


RawAnswer = tuple[bytes, bytes | None]  # payload, raw header block or None

# Error codes of a write that expects another last sequence; the second if another write is in flight.
WRONG_LAST_SEQUENCE_CODES = (10071, 10164)
NO_RESPONDERS_CODE = "E-NO-RESPONDERS"  # the code of Unavailable if no one listens on the subject
# No leader at the moment; a cluster that is incomplete, moves its peers or does not know all of them yet, each for some
# seconds; a write in flight on the same subject.
UNAVAILABLE_CODES = (10004, 10005, 10008, 10075, 10163)


class ApiError(FloeError):
    """JetStream refused a request; nothing was done.

    `status`: as in HTTP, such as 404; `err_code`: JetStream's own number of the cause, such as 10059 (no such stream);
    `description`: the server's words. `code` is `E-JS-` and `err_code`, or the status if there is none.
    """

    def __init__(self, code: int, err_code: int, description: str, *, subject: str = "") -> None:
        where = f" ({subject})" if subject else ""
        message = f"jetstream refused: {description}, error {err_code}{where}"
        super().__init__(message, code=f"E-JS-{err_code or code}")
        self.status, self.err_code, self.description = code, err_code, description


class PendingRequests:
    """The requests that wait for an answer. An inbox is `{prefix}.{token}`; one wildcard subscription feeds `sink`."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, tuple[bytes, Future[RawAnswer]]] = {}
        self._count = 0

    def add(self, subject: bytes, answer: Future[RawAnswer]) -> bytes:
        self._count += 1
        token = b"%x" % self._count
        self._waiting[token] = (subject, answer)
        return token

    def remove(self, token: bytes) -> None:
        self._waiting.pop(token, None)

    def sink(self, subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if (found := self._waiting.get(subject.rpartition(b".")[2])) is not None and not found[1].done():
            found[1].set_result((payload, headers))

    def fail(self, error: FloeError, subject: bytes | None = None) -> None:
        """Raise `error` in all waiting requests, or only in those on `subject`."""
        for requested, answer in self._waiting.values():
            if subject in (None, requested) and not answer.done():
                answer.set_exception(error)
                answer.exception()  # marks it as retrieved; a waiting caller still gets it, a cancelled one needs none


def api_answer(subject: str, payload: bytes) -> dict[str, Any]:
    """Return the document of a JetStream answer. Raises ApiError, Unavailable; OutcomeUnknown if it is invalid."""
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise OutcomeUnknown(f"jetstream answered {subject} with {payload[:60]!r}, expected a JSON object")
    if "error" in document:
        raise api_error(document["error"], subject)
    return document


def api_error(error: Any, subject: str) -> FloeError:
    """Return the error for the `error` object of an answer: ApiError, or Unavailable if the error is temporary."""
    if not isinstance(error, dict):
        error = {}
    code, err_code = error.get("code"), error.get("err_code")
    failure = ApiError(
        code if isinstance(code, int) else 0,
        err_code if isinstance(err_code, int) else 0,
        str(error.get("description", "no description")),
        subject=subject,
    )
    if failure.err_code in UNAVAILABLE_CODES:
        return Unavailable(failure.message, code=failure.code)
    return failure
