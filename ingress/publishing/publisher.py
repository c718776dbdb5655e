"""Publishers: they send rows after an expected target sequence, one batch in flight, and say how far it
is known to have come. What they cannot tell (`Outcome.unclear`) is settled by whoever reads the target.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import ConfigError, Unavailable
from common.failpoints import failpoint
from common.jetstream.client import FloeClient
from ingress.publishing.replies import BATCH_TOO_LARGE, Expected, Replies, Reply, Unclear
from ingress.rows.blocks import Rows

MAX_BATCH = 1000  # messages; the server's own limit
MAX_BATCH_BYTES = 8 * 1024 * 1024
ACK_TIMEOUT = 5.0  # seconds
ATOMIC_SINCE = (2, 12, 0)
# Headers that change what the server makes of the messages of one batch; they need a message of their own.
NOT_IN_BATCHES = frozenset({b"nats-rollup"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many rows of the intent are stored for certain, and why it is not known whether there are more."""

    stored: int
    unclear: Unclear | None = None


class Publisher(Protocol):
    """Sends rows so that the server takes row n only at base + n."""

    name: str

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        """Send the rows from index `stored` on, the first at target sequence base + stored + 1.

        Returns when all are stored, or at the first answer that is not exactly the expected one. Raises
        nothing for what the server or the connection does.
        """
        ...

    async def aclose(self) -> None:
        """Let go of the inbox."""
        ...


class SinglePublisher:
    """One message in flight. Never pipelined: with expected sequences, one foreign write in between
    would make one
    message vanish and the next be accepted."""

    name = "single"

    def __init__(
        self, client: FloeClient, stream: str, replies: Replies, *, ack_timeout: float = ACK_TIMEOUT
    ) -> None:
        self._client, self._stream, self._replies = client, stream, replies
        self._ack_timeout = ack_timeout

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        for subject, tail, payload in rows.messages(stored, rows.count):
            unclear = await self._send(subject, tail, payload, base + stored)
            if unclear is not None:
                return Outcome(stored, unclear)
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


@dataclass(frozen=True, slots=True)
class Batch:
    """One atomic batch on the wire, in two parts; `stop`: the index of the row behind it."""

    parts: tuple[bytes, bytes]
    stop: int
    reply: Reply
    expected: Expected


class AtomicPublisher:
    """Atomic batches (ADR-50): all messages of a batch are stored together, or none."""

    name = "atomic"

    def __init__(
        self, client: FloeClient, stream: str, replies: Replies, *, ack_timeout: float = ACK_TIMEOUT
    ) -> None:
        self._client, self._stream, self._replies = client, stream, replies
        self._ack_timeout = ack_timeout
        self._most = MAX_BATCH
        self._ask_all = False
        self._writer, self._count = secrets.token_hex(8), 0

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        batch = self._compose(rows, base, stored)
        while batch is not None:
            unclear, following = await self._send(batch, rows, base)
            self._ask_all = unclear is not None
            if unclear is not None:
                self._learn(unclear)
                return Outcome(stored, unclear)
            stored, batch = batch.stop, following
        return Outcome(stored)

    async def _send(self, batch: Batch, rows: Rows, base: int) -> tuple[Unclear | None, Batch | None]:
        """Send `batch`; while the server works on it, put the following one together."""
        self._replies.listen(batch.reply)
        try:
            self._client.send(batch.parts[0])
            await self._client.flush_writes()
            failpoint("ingress.mid_batch")
            self._client.send(batch.parts[1])
            await self._client.flush_writes()
        except Unavailable as error:
            return Unclear(error.message), None
        following = self._compose(rows, base, batch.stop)
        return await self._replies.judged(batch.reply, batch.expected, self._ack_timeout), following

    def _compose(self, rows: Rows, base: int, start: int) -> Batch | None:
        """The batch of rows from index `start` on; None where there are none."""
        if start >= rows.count:
            return None
        stop = rows.stop(start, self._most, MAX_BATCH_BYTES)
        self._count += 1
        batch_id = f"{self._writer}-{self._count:x}"
        reply = self._replies.make()
        frames = self._frames(rows, base, start, stop, batch_id.encode(), reply)
        half = len(frames) // 2
        parts = b"".join(frames[:half]), b"".join(frames[half:])
        return Batch(parts, stop, reply, Expected(self._stream, base + stop, batch_id, stop - start))

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
                b"HPUB %b%b %d %d\r\nNATS/1.0\r\n%b%b"
                % (subject, answer_to, size, size + len(payload), own, tail)
            )
            frames += payload, b"\r\n"
            if number == 1:
                lines = b"Nats-Batch-Id: %b\r\n" % batch_id
                # An answer to each message costs time, and is asked for only where the reason is looked for.
                answer_to = answer_to if self._ask_all else b""
        return frames

    def _learn(self, unclear: Unclear) -> None:
        if unclear.err_code == BATCH_TOO_LARGE:
            self._most = max(1, self._most // 2)

    async def aclose(self) -> None:
        await self._replies.aclose()


def _hpub(subject: bytes, reply: bytes, block: bytes, payload: memoryview) -> bytes:
    """One message on the wire; subject and header block were checked when the row was prepared."""
    size = len(block)
    line = b"HPUB %b %b %d %d\r\n" % (subject, reply, size, size + len(payload))
    return b"".join((line, block, payload, b"\r\n"))


def offered(
    version: tuple[int, int, int], config: Mapping[str, Any], control_headers: frozenset[bytes]
) -> dict[str, str]:
    """What speaks against each publisher, by name; empty text where nothing does.

    `config` is what the stream echoes: an older server drops what it does not know without a word,
    and would store the messages of a batch one by one.
    """
    why = ""
    if version < ATOMIC_SINCE:
        why = f"nats-server {'.'.join(map(str, version))} is older than 2.12"
    elif config.get("allow_atomic") is not True:
        why = "the stream says allow_atomic false"
    elif acting := sorted(name.decode() for name in control_headers & NOT_IN_BATCHES):
        why = f"{acting[0]} is among control_headers"
    return {"atomic": why, "single": ""}


def choose(target: str, setting: str, against: Mapping[str, str]) -> str:
    """The name of the publisher that `setting` (`auto` or a name) stands for. Raises ConfigError."""
    if setting == "auto":
        return next(name for name, why in against.items() if not why)
    if against[setting]:
        raise ConfigError(
            f"target {target}: publisher: expected one that it offers, found {setting}: {against[setting]}",
            hint=f"nats stream edit {target} --allow-batch, or publisher: auto",
            code="E-PUBLISHER",
        )
    return setting


PUBLISHERS: Mapping[str, type[AtomicPublisher] | type[SinglePublisher]] = {
    "atomic": AtomicPublisher,
    "single": SinglePublisher,
}
