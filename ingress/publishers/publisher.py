"""Interface and base of the publishers, the judgement of acknowledgements, and publisher `single`.

An acknowledgement counts only if stream, sequence and count are exactly as expected. No other answer, not even a
refusal, shows how much is stored: a read of the target settles that.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from asyncio import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.errors import Unavailable
from common.failpoints import failpoint
from common.nats.client import FloeClient, RawSubscription
from common.tasks import report_errors, wait_result
from ingress.rows.rows import Rows

NO_RESPONDERS_STATUS = b"NATS/1.0 503"
BATCH_INCOMPLETE_CODE = 10176

Answer = tuple[bytes, bytes | None]  # payload, header block


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """Reason why the number of stored rows is not known. `err_code`: JetStream's number of a refusal, 0 for none."""

    reason: str
    err_code: int = 0


@dataclass(frozen=True, slots=True)
class Expected:
    """The required content of a batch's acknowledgement; `batch` is empty for a single message."""

    stream: str
    sequence: int
    batch: str = ""
    count: int = 0


def judge_ack(payload: bytes, headers: bytes | None, expected: Expected) -> UnknownOutcome | None:
    """Judge an acknowledgement; None if it acknowledges exactly `expected`."""
    if headers is not None and headers.startswith(NO_RESPONDERS_STATUS):
        return UnknownOutcome("no stream takes the subject, or the stream has no leader")
    if (ack := parse_answer(payload)) is None:
        return UnknownOutcome(f"acknowledgement: expected JSON, found {payload[:60]!r}")
    if isinstance(ack.get("error"), dict):
        return refused(ack["error"])
    found = Expected(ack.get("stream", ""), ack.get("seq", 0), ack.get("batch", ""), ack.get("count", 0))
    if found != expected or ack.get("duplicate"):
        return UnknownOutcome(f"acknowledgement: expected {expected}, found {ack!r:.200}")
    return None


def parse_answer(payload: bytes) -> dict[str, Any] | None:
    """Parse an answer of JetStream; None if it is no JSON object."""
    try:
        answer = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def refused(error: dict[str, Any]) -> UnknownOutcome:
    code = error.get("err_code")
    return UnknownOutcome(str(error.get("description", "refused")), code if isinstance(code, int) else 0)


class Reply:
    """The answers to one batch: the decisive one, and the first refusal of a message before it.

    `decisive` gives payload and header block of the answer; None if the connection was lost first.
    """

    def __init__(self, subject: bytes) -> None:
        self.prefix = subject + b"."
        self.early, self.last = self.prefix + b"e", self.prefix + b"c"
        self.decisive: Future[Answer | None] = asyncio.get_running_loop().create_future()
        self.refusal: UnknownOutcome | None = None

    def take(self, subject: bytes, payload: bytes, headers: bytes | None) -> None:
        if subject == self.last:
            self._decide((payload, headers))
        elif payload or headers:  # an empty answer: the message is staged
            self.refusal = self.refusal or judge_ack(payload, headers, Expected("", 0))

    def mark_lost(self) -> None:
        self._decide(None)

    def fail(self, error: Exception) -> None:
        """Raise `error` in the caller that waits: answers can no longer be received."""
        if not self.decisive.done():
            self.decisive.set_exception(error)
            self.decisive.exception()  # mark it as retrieved: without a waiting caller, the next batch raises it

    def _decide(self, answer: Answer | None) -> None:
        if not self.decisive.done():
            self.decisive.set_result(answer)


class Replies:
    """One inbox for all messages that a publisher sends; one batch waits at a time. Created by `open`."""

    def __init__(self, client: FloeClient, inbox: str) -> None:
        self._client, self.inbox = client, inbox
        self._waiting: Reply | None = None
        self._count = 0
        self._subscription: RawSubscription | None = None
        self._remove_listener = client.add_listener(report_errors(self._on_connection, self._fail))
        self._failure: Exception | None = None

    @classmethod
    async def open(cls, client: FloeClient) -> Replies:
        """Subscribe to a new inbox. Raises Unavailable, Refused."""
        replies = cls(client, client.new_inbox())
        inbox = f"{replies.inbox}.>"
        replies._subscription = await client.subscribe_raw(inbox, replies._sink, replies._fail)
        return replies

    async def aclose(self) -> None:
        self._remove_listener()
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def subject(self) -> bytes:
        self._count += 1
        return b"%b.%x" % (self.inbox.encode(), self._count)

    def listen(self, reply: Reply) -> None:
        self._waiting = reply
        if self._failure is not None:
            reply.fail(self._failure)

    async def wait_for_ack(self, reply: Reply, expected: Expected, timeout: float) -> UnknownOutcome | None:
        """Wait for an answer; None once `expected` is acknowledged, else the reason after `timeout` seconds at most."""
        try:
            answer = await wait_result(reply.decisive, timeout)
        except TimeoutError:
            return reply.refusal or UnknownOutcome(f"no acknowledgement within {timeout:g} s")
        if answer is None:
            return UnknownOutcome("the connection was lost before the acknowledgement")
        unclear = judge_ack(*answer, expected)
        incomplete = unclear is not None and unclear.err_code == BATCH_INCOMPLETE_CODE
        return reply.refusal or unclear if incomplete else unclear

    def _sink(self, subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if self._waiting is not None and subject.startswith(self._waiting.prefix):
            self._waiting.take(subject, payload, headers)

    def _fail(self, error: Exception) -> None:
        """Raise an error in an answer's handler in the waiting caller, now or next. The connection continues."""
        self._failure = error
        if self._waiting is not None:
            self._waiting.fail(error)

    def _on_connection(self, up: bool) -> None:
        if not up and self._waiting is not None:
            self._waiting.mark_lost()


PUBLISH_ACK_TIMEOUT_S = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """Number of rows of the intent that are certainly stored, and the reason why more of them may be.

    `handed_upto`: this call gave no row from this index on to the connection. It may be too high, never too low.
    """

    stored: int
    unclear: UnknownOutcome | None = None
    handed_upto: int = field(default=0, compare=False)


class Publisher(Protocol):
    """Publisher of rows, for which the server accepts row n only at base + n."""

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        """Send the rows from index `stored` on, the first at target sequence base + stored + 1.

        Return when all are stored, or at the first answer that is not exactly the expected one. Raises nothing for
        errors of the server or the connection.
        """

    async def aclose(self) -> None:
        """Release the inbox."""


class BasePublisher:
    """Base of the publishers: a connection, a stream, an inbox. `exclusive`: no other publisher writes to the stream.
    `ack_timeout`: seconds.
    """

    def __init__(
        self,
        client: FloeClient,
        stream: str,
        replies: Replies,
        *,
        exclusive: bool = True,
        ack_timeout: float = PUBLISH_ACK_TIMEOUT_S,
    ) -> None:
        self.client, self._stream, self._replies, self._exclusive = client, stream, replies, exclusive
        self._ack_timeout, self._writer, self._count = ack_timeout, secrets.token_hex(8), 0

    def _new_batch_id(self) -> str:
        self._count += 1
        return f"{self._writer}-{self._count:x}"

    async def aclose(self) -> None:
        await self._replies.aclose()


class SinglePublisher(BasePublisher):
    """Publisher with one message in flight. Never pipelined: with expected sequences, one foreign write in between
    would lose one message and let the next be accepted.
    """

    name = "single"

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        return await self.publish_to(rows, base, stored, rows.count)

    async def publish_to(self, rows: Rows, base: int, stored: int, stop: int) -> Outcome:
        """Publish rows up to index `stop` (exclusive). Otherwise as `publish`."""
        for subject, tail, payload in rows.messages(stored, stop):
            if (unclear := await self._send(subject, tail, payload, base + stored)) is not None:
                return Outcome(stored, unclear, stored + 1)
            stored += 1
        return Outcome(stored)

    async def _send(self, subject: bytes, tail: bytes, payload: memoryview, after: int) -> UnknownOutcome | None:
        reply = Reply(self._replies.subject())
        self._replies.listen(reply)
        block = b"NATS/1.0\r\nNats-Expected-Last-Sequence: %d\r\n%b" % (after, tail)
        try:
            line = b"HPUB %b %b %d %d\r\n" % (subject, reply.last, len(block), len(block) + len(payload))
            self.client.send(b"".join((line, block, payload, b"\r\n")))
            await self.client.flush_writes()
        except Unavailable as error:
            return UnknownOutcome(error.message)
        failpoint("ingress.mid_batch")
        return await self._replies.wait_for_ack(reply, Expected(self._stream, after + 1), self._ack_timeout)
