"""Publisher `atomic`: atomic batches, one in flight."""

from dataclasses import dataclass

from common.errors import Unavailable
from common.failpoints import failpoint
from common.nats.requests import WRONG_LAST_SEQUENCE_CODES
from ingress.publishers.publisher import BasePublisher, Expected, Outcome, Reply, UnknownOutcome
from ingress.rows.rows import Rows

MAX_BATCH_MESSAGES = 1000  # messages; the server's own limit
MAX_BATCH_BYTES = 8 * 1024 * 1024
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
