"""Publisher `single`: one message in flight, for servers and streams that take no batches."""

from __future__ import annotations

from common.errors import Unavailable
from common.failpoints import failpoint
from common.jetstream.client import FloeClient
from ingress.publishers.publisher import Expected, Replies, Unclear
from ingress.publishing.publisher import ACK_TIMEOUT, Outcome
from ingress.rows.rows import Rows


class SinglePublisher:
    """One message in flight. Never pipelined: with expected sequences, one foreign write in between would
    make one message vanish and the next be accepted."""

    name = "single"

    def __init__(
        self, client: FloeClient, stream: str, replies: Replies, *, ack_timeout: float = ACK_TIMEOUT
    ) -> None:
        self._client, self._stream, self._replies = client, stream, replies
        self._ack_timeout = ack_timeout

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        return await self.publish_to(rows, base, stored, rows.count)

    async def publish_to(self, rows: Rows, base: int, stored: int, stop: int) -> Outcome:
        """`publish`, for rows up to index `stop` (exclusive)."""
        for subject, tail, payload in rows.messages(stored, stop):
            unclear = await self._send(subject, tail, payload, base + stored)
            if unclear is not None:
                return Outcome(stored, unclear, stored + 1)
            stored += 1
        return Outcome(stored)

    async def _send(self, subject: bytes, tail: bytes, payload: memoryview, after: int) -> Unclear | None:
        reply = self._replies.make()
        self._replies.listen(reply)
        block = b"NATS/1.0\r\nNats-Expected-Last-Sequence: %d\r\n%b" % (after, tail)
        try:
            self._client.send(_hpub(subject, reply.last, block, payload))
            await self._client.flush_writes()
        except Unavailable as error:
            return Unclear(error.message)
        failpoint("ingress.mid_batch")
        return await self._replies.judged(reply, Expected(self._stream, after + 1), self._ack_timeout)

    async def aclose(self) -> None:
        await self._replies.aclose()


def _hpub(subject: bytes, reply: bytes, block: bytes, payload: memoryview) -> bytes:
    """One message on the wire; subject and header block were checked when the row was prepared."""
    size = len(block)
    line = b"HPUB %b %b %d %d\r\n" % (subject, reply, size, size + len(payload))
    return b"".join((line, block, payload, b"\r\n"))
