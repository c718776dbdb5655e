"""Publishers `fast` and `atomic`, which send batches (ADR-50), one in flight; and the choice of a target's publisher.

`fast`: fast-ingest batches. Each message names its expected sequence. So for every fate of a batch, and however late
its messages arrive, the server accepts row n only at base + n. A gap, a foreign message or another leader ends the
batch. The messages of an abandoned batch are exactly the messages that are sent again, at the same sequences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError, Unavailable
from common.exits import choices, nats_command
from common.failpoints import failpoint
from common.imports import load_compiled
from common.nats.protocol import WRONG_LAST_SEQUENCE_CODES
from common.tasks import wait_for
from ingress.publishers.publisher import (
    BasePublisher,
    Expected,
    Outcome,
    Reply,
    SinglePublisher,
    UnknownOutcome,
    judge_ack,
    parse_answer,
    refused,
)
from ingress.rows.rows import Rows

# Fast-ingest batches

START, APPEND, FINAL = 0, 1, 2  # operations
OWN_LINES = len(b"NATS/1.0\r\nNats-Expected-Last-Sequence: \r\n")  # without the digits
MAX_FLOW_MESSAGES = 500  # messages from one acknowledgement to the next; the server allows no more
MAX_OPEN_ACKS = 2  # acknowledgements that may be outstanding; more is not faster
WINDOW_BYTES = 8 * 1024 * 1024  # bytes in flight without an acknowledgement
LAST_ANSWER_TIMEOUT_S = 1.0  # seconds for the last answer to a batch that the server has already refused
MAX_SINGLE_ROWS = 1024  # rows that are sent one by one after failures, at most

_compose = load_compiled("ingress.publishers._compose")


@dataclass(slots=True)
class FastBatch:
    """One batch: the rows from `start` on of an intent that begins after `base`; `sent`: the number of sent rows."""

    rows: Rows
    base: int
    start: int
    flow: int
    answers: BatchReply
    expected: Expected
    sent: int = 0

    @property
    def count(self) -> int:
        return self.rows.count - self.start

    def compose(self, begin: int, end: int) -> bytes:
        """Return the messages from index `begin` to `end` (exclusive) for the wire. The first message is sent alone.

        This loop is most of the cost of a fast target: it makes one bytes object for each row, and none for its size.
        `compose.c` does the same for ordinary rows where it is built.
        """
        if _compose is not None and (compiled := self._compose_compiled(begin, end)) is not None:
            return compiled
        after = self.base + self.start + begin
        width, longer = len(b"%d" % after), 10 ** len(b"%d" % after)
        reply, operation = b"%b%d.fail." % (self.answers.batch, self.flow), APPEND if begin else START
        frames: list[bytes | memoryview] = []
        rows, last = self.rows.messages(self.start + begin, self.start + end), self.count
        for number, (subject, tail, payload) in enumerate(rows, begin + 1):
            if number == last:
                operation = FINAL
            if after == longer:
                width, longer = width + 1, longer * 10
            size = OWN_LINES + width + len(tail)
            frames += (
                b"HPUB %b %b%d.%d.$FI %d %d\r\nNATS/1.0\r\nNats-Expected-Last-Sequence: %d\r\n%b"
                % (subject, reply, number, operation, size, size + len(payload), after, tail),
                payload,
                b"\r\n",
            )
            after += 1
        return b"".join(frames)

    def _compose_compiled(self, begin: int, end: int) -> bytes | None:
        """Return what `compose` returns; None if one of the messages is not ordinary."""
        reply, parts = b"%b%d.fail." % (self.answers.batch, self.flow), list[bytes]()
        operation = APPEND if begin else START
        for batch, row, stop in self.rows.runs(self.start + begin, self.start + end):
            columns = batch.subjects, batch.sequences, batch.timestamps_ns, batch.header_tails
            payloads = *batch.payloads.buffers()[1:], batch.payloads.offset
            lines = batch.origin, batch.header_end, reply
            place = operation, begin + 1, self.count, self.base + self.start + begin
            if (part := _compose.compose(*columns, *payloads, *lines, row, stop, *place)) is None:
                return None
            parts.append(part)
            begin += stop - row
        return b"".join(parts)


class BatchReply(Reply):
    """The answers to one batch.

    `acked_count`: messages that the server reports as stored, in the batch's own count. It paces the sending and proves
    nothing, because it names neither stream nor sequence. `ack_interval`: messages to the next such answer. `refusal`:
    the server stopped the batch; the decisive answer is still to come.
    """

    def __init__(self, subject: bytes, batch_id: str) -> None:
        super().__init__(subject)
        self.batch, self.acked_count, self.ack_interval = self.prefix + batch_id.encode() + b".", 0, 0
        self.changed = asyncio.Event()
        self.decisive.add_done_callback(lambda _: self.changed.set())

    @property
    def has_ended(self) -> bool:
        return self.refusal is not None or self.decisive.done()

    def take(self, _subject: bytes, payload: bytes, headers: bytes | None) -> None:
        answer = (None if headers else parse_answer(payload)) or {}
        kind = answer.get("type")
        acked, every = answer.get("seq"), answer.get("msgs")
        if kind == "ack" and type(acked) is int and type(every) is int and acked >= 0 and every >= 1:
            self.acked_count, self.ack_interval = max(self.acked_count, acked), every
        elif kind in ("err", "gap"):
            self.refusal = self.refusal or _reason(answer)
        else:
            self._decide((payload, headers))
        self.changed.set()


class FastPublisher(SinglePublisher):
    """Publisher of fast-ingest batches, one in flight: with two, a message would be lost.

    After a batch that failed, the next rows are sent one by one (as with `single`), more of them after each further
    failure. So rows are still stored if the target accepts no batch at the moment (too many are open, the leader has
    another version), and a refusal of the row itself costs no batch.
    """

    name = "fast"
    _single_rows = 0

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        outcome = await self.publish_to(rows, base, stored, min(rows.count, stored + self._single_rows))
        if outcome.unclear is not None or outcome.stored == rows.count:
            return outcome
        start, batch_id = outcome.stored, self._new_batch_id()
        answers = BatchReply(self._replies.subject(), batch_id)
        expected = Expected(self._stream, base + rows.count, batch_id, rows.count - start)
        batch = FastBatch(rows, base, start, ack_interval_for(rows, start, rows.count), answers, expected)
        unclear = await self._publish(batch)
        self._single_rows = 0 if unclear is None else min(MAX_SINGLE_ROWS, 2 * self._single_rows or 1)
        return Outcome(batch.start, unclear, batch.start + batch.sent) if unclear else Outcome(rows.count)

    async def _publish(self, batch: FastBatch) -> UnknownOutcome | None:
        self._replies.listen(batch.answers)
        try:
            unclear = await self._send_batch(batch)
        except Unavailable as error:
            return UnknownOutcome(error.message)
        return unclear or await self._end(batch)

    async def _send_batch(self, batch: FastBatch) -> UnknownOutcome | None:
        """Send all messages, at the server's pace, up to an answer that ends the batch early.

        The first is sent alone: its answer shows if such batches are possible here, and the pace. While the server
        works on one stretch the next one is composed. Raises Unavailable.
        """
        answers, end = batch.answers, 1
        while batch.sent < batch.count:
            frames = batch.compose(batch.sent, end)
            if unclear := await self._wait_for_room(batch, end - batch.sent):
                return unclear
            if answers.has_ended:
                return None
            self.client.send(frames)
            batch.sent = end
            await self.client.flush_writes()
            failpoint("ingress.mid_batch")
            while end == 1 < batch.count and not (answers.ack_interval or answers.has_ended):
                if unclear := await self._wait_for_answer(answers):
                    return unclear
            end = min(batch.count, batch.sent + max(1, min(answers.ack_interval, batch.flow)))
        return None

    async def _wait_for_room(self, batch: FastBatch, more: int) -> UnknownOutcome | None:
        """Wait until `more` messages may be sent, or the server has stopped the batch.

        An answer is certain only if `ack_interval` messages are in flight.
        """
        answers = batch.answers
        while not answers.has_ended:
            in_flight = batch.sent - answers.acked_count
            if in_flight < max(1, answers.ack_interval) or in_flight + more <= MAX_OPEN_ACKS * answers.ack_interval:
                return None
            if unclear := await self._wait_for_answer(answers):
                return unclear
        return None

    async def _end(self, batch: FastBatch) -> UnknownOutcome | None:
        """Wait for the decisive answer and judge it; None if it acknowledges exactly the batch."""
        answers = batch.answers
        while not answers.decisive.done():
            timeout = LAST_ANSWER_TIMEOUT_S if answers.refusal else self._ack_timeout
            if unclear := await self._wait_for_answer(answers, timeout):
                return answers.refusal or unclear
        if (answer := answers.decisive.result()) is None:
            return UnknownOutcome("the connection was lost before the acknowledgement")
        return answers.refusal or judge_ack(*answer, batch.expected)

    async def _wait_for_answer(self, answers: BatchReply, timeout: float = 0.0) -> UnknownOutcome | None:
        """Wait for any answer; return the problem if none comes in time. Every answer restarts the timeout."""
        timeout = timeout or self._ack_timeout
        answers.changed.clear()
        if not await wait_for(answers.changed, timeout):
            return UnknownOutcome(f"no acknowledgement within {timeout:g} s")
        return None


def ack_interval_for(rows: Rows, start: int, stop: int) -> int:
    """Return the messages from one acknowledgement to the next, so that the bytes in flight stay within WINDOW_BYTES.

    At least 1: a message that is larger than the window is sent all the same.
    """
    flow, at = MAX_FLOW_MESSAGES, start
    while at < stop and flow > 1:
        fits = rows.batch_end(at, MAX_OPEN_ACKS * flow, WINDOW_BYTES) - at
        if fits < min(MAX_OPEN_ACKS * flow, stop - at):
            flow = max(1, fits // MAX_OPEN_ACKS)
        at += flow
    return flow


def _reason(answer: dict[str, Any]) -> UnknownOutcome:
    error = answer.get("error")
    if isinstance(error, dict):
        return refused(error)
    return UnknownOutcome(f"the server missed messages of the batch: {answer!r:.200}")


# Atomic batches

MAX_BATCH_MESSAGES = 1000  # messages of an atomic batch; the server's own limit
MAX_BATCH_BYTES = 8 * 1024 * 1024  # bytes of an atomic batch
BATCH_TOO_LARGE_CODE = 10199
# A smaller batch is not faster: its time is the round trip to the server.
SHARED_MIN_MESSAGES = 32  # messages
SHARED_MIN_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class AtomicBatch:
    """One atomic batch on the wire, in two parts; `stop`: the index of the row after it."""

    parts: tuple[bytes, bytes]
    stop: int
    reply: Reply
    expected: Expected


class AtomicPublisher(BasePublisher):
    """Atomic batches (ADR-50): all messages of a batch are stored together, or none.

    If other publishers write to the stream too, a batch is halved after a foreign message came first, and doubled
    after it was stored. So small batches still succeed under heavy foreign traffic.
    """

    name = "atomic"
    _limit = batch_size = MAX_BATCH_MESSAGES
    _requests_all_acks = False

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        batch = self._compose(rows, base, stored)
        while batch is not None:
            unclear, following = await self._send(batch, rows, base)
            self._requests_all_acks = unclear is not None
            self._adapt_batch_size(unclear, sum(map(len, batch.parts)))
            if unclear is not None:
                return Outcome(stored, unclear, batch.stop)
            stored, batch = batch.stop, following
        return Outcome(stored)

    async def _send(
        self, batch: AtomicBatch, rows: Rows, base: int
    ) -> tuple[UnknownOutcome | None, AtomicBatch | None]:
        self._replies.listen(batch.reply)
        try:
            self.client.send(batch.parts[0])
            await self.client.flush_writes()
            failpoint("ingress.mid_batch")
            self.client.send(batch.parts[1])
            await self.client.flush_writes()
        except Unavailable as error:
            return UnknownOutcome(error.message), None
        following = self._compose(rows, base, batch.stop)
        return await self._replies.wait_for_ack(batch.reply, batch.expected, self._ack_timeout), following

    def _compose(self, rows: Rows, base: int, start: int) -> AtomicBatch | None:
        if start >= rows.count:
            return None
        stop = rows.batch_end(start, self.batch_size, MAX_BATCH_BYTES)
        batch_id, reply = self._new_batch_id(), Reply(self._replies.subject())
        frames = self._frames(rows, base, start, stop, batch_id.encode(), reply)
        # Split between two messages: other traffic on the connection may come between the parts.
        half = len(frames) // 6 * 3
        parts = b"".join(frames[:half]), b"".join(frames[half:])
        return AtomicBatch(parts, stop, reply, Expected(self._stream, base + stop, batch_id, stop - start))

    def _frames(
        self, rows: Rows, base: int, start: int, stop: int, batch_id: bytes, reply: Reply
    ) -> list[bytes | memoryview]:
        frames: list[bytes | memoryview] = []
        last = stop - start
        lines = b"Nats-Expected-Last-Sequence: %d\r\nNats-Batch-Id: %b\r\n" % (base + start, batch_id)
        answer_to, commit = b" " + reply.early, b""
        for number, (subject, tail, payload) in enumerate(rows.messages(start, stop), 1):
            if number == last:
                answer_to, commit = b" " + reply.last, b"Nats-Batch-Commit: 1\r\n"
            own = b"%bNats-Batch-Sequence: %d\r\n%b" % (lines, number, commit)
            size = len(b"NATS/1.0\r\n") + len(own) + len(tail)
            frames.append(
                b"HPUB %b%b %d %d\r\nNATS/1.0\r\n%b%b" % (subject, answer_to, size, size + len(payload), own, tail)
            )
            frames += payload, b"\r\n"
            if number == 1:
                lines = b"Nats-Batch-Id: %b\r\n" % batch_id
                # An answer to each message costs time. It is requested only to find the reason of a failure.
                answer_to = answer_to if self._requests_all_acks else b""
        return frames

    def _adapt_batch_size(self, unclear: UnknownOutcome | None, size: int) -> None:
        if unclear is None:
            self.batch_size = min(self._limit, self.batch_size * 2)
        elif unclear.err_code == BATCH_TOO_LARGE_CODE:
            self.batch_size = self._limit = max(1, self.batch_size // 2)
        elif not self._exclusive and unclear.err_code in WRONG_LAST_SEQUENCE_CODES:
            self.batch_size = max(1 if size > SHARED_MIN_BYTES else SHARED_MIN_MESSAGES, self.batch_size // 2)


# Choice

Version = tuple[int, int, int]

FAST_SINCE: Version = (2, 14, 0)
ATOMIC_SINCE: Version = (2, 12, 0)
# Headers that an atomic batch accepts at some places only; in a fast batch each message is independent.
NOT_IN_ATOMIC = frozenset({b"nats-rollup"})
STREAM_EDIT_FLAGS = {"fast": "--allow-fast", "atomic": "--allow-batch"}  # options of the command `nats stream edit`


def objections(
    version: Version, config: Mapping[str, Any], control_headers: frozenset[bytes], *, exclusive: bool = True
) -> dict[str, str]:
    """Return the reason against each publisher, by name, the best first; an empty text if there is none.

    `config`: as the server echoes it: an older server silently drops settings it does not know, and would store the
    messages of a batch one by one. `exclusive`: no other publisher writes to the stream.
    """
    taking_effect = sorted(name.decode() for name in control_headers & NOT_IN_ATOMIC)
    fast = _against_server(version, FAST_SINCE, config, "allow_batched")
    atomic = _against_server(version, ATOMIC_SINCE, config, "allow_atomic")
    return {
        "fast": fast or ("" if exclusive else "exclusive is false, and a foreign message ends a whole batch"),
        "atomic": atomic or (f"{taking_effect[0]} is among control_headers" if taking_effect else ""),
        "single": "",
    }


def _against_server(version: Version, since: Version, config: Mapping[str, Any], key: str) -> str:
    if version < since:
        return f"nats-server {'.'.join(map(str, version))} is older than {since[0]}.{since[1]}"
    return "" if config.get(key) is True else f"the stream has {key} false"


def choose_publisher(target: str, setting: str, against: Mapping[str, str]) -> str:
    """Return the publisher for `setting` (`auto` or a name). Raises ConfigError if it is not offered."""
    if setting == "auto":
        return next(name for name, reason in against.items() if not reason)
    if against[setting]:
        message = f"target {target}: publisher: expected a supported one, found {setting}: {against[setting]}"
        edit = ("or, if only the stream lacks it", nats_command("stream edit", target, STREAM_EDIT_FLAGS[setting]))
        raise ConfigError(message, hint=choices("set `publisher: auto`", edit), code="E-PUBLISHER")
    return setting


PUBLISHERS: Mapping[str, type[FastPublisher | AtomicPublisher | SinglePublisher]] = {
    each.name: each for each in (FastPublisher, AtomicPublisher, SinglePublisher)
}
