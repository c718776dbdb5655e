"""Reading a stream from a sequence or a time on, through an ephemeral consumer, in pieces of bounded size."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from common.archive.segment import Message
from common.clock import NS_PER_S, format_time
from common.errors import FloeError, Unavailable
from common.nats import protocol
from common.nats.api import create_ephemeral_consumer, delete_consumer, query_message
from common.nats.client import FloeClient, RawSubscription, frame
from common.nats.protocol import ConsumerError, IdleHeartbeat, PullEnd, parse_replies, parse_status
from common.tasks import PendingError, wait_for

MAX_MISSED_HEARTBEATS = 10  # missing heartbeats after which the consumer is lost
DELIVERY_OVERHEAD_BYTES = 16 * 1024  # bytes of subject and reply, counted on top of a payload
PULL_EXPIRES_S = 30  # seconds that a pull request stays open
NO_RESPONDERS_ATTEMPTS, NO_RESPONDERS_PAUSE_S = 50, 0.1  # pulls while the consumer is new; seconds between them
PLACEMENTS = 60  # attempts to get a consumer on the requested server
INACTIVE_THRESHOLD_S = 60  # seconds without a pull request after which the server removes the consumer


@dataclass(frozen=True, slots=True)
class PullLimits:
    """The limits of a pull request: `batch` messages or `window_bytes` bytes at a time; `heartbeat_s` in seconds."""

    batch: int = 2000
    window_bytes: int = 4 * 1024 * 1024
    heartbeat_s: float = 0.5


@dataclass(frozen=True, slots=True)
class StartAt:
    """The start of a scan: `sequence`, or, if that is 0, the first message stored at `time_ns` or later."""

    sequence: int = 0
    time_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        if self.sequence:
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": self.sequence}
        return {"deliver_policy": "by_start_time", "opt_start_time": format_time(max(0, self.time_ns))}


async def scan(
    client: FloeClient,
    stream: str,
    start: StartAt,
    *,
    until: int | None,
    whole: bool = False,
    subject: str = "",
    headers_only: bool = False,
    limits: PullLimits | None = None,
    server: str = "",
) -> AsyncGenerator[Sequence[Message]]:
    """Yield the messages on `subject` (empty: all) in pieces, up to sequence `until` or for ever.

    An empty piece means that no message arrived. `whole`: further, up to the last message that the consumer counted
    when it was made. `headers_only`: payloads are empty. `server`: the replica of the stream to read from; empty: any.
    Raises Unavailable if the consumer or the connection is lost, ApiError if there is no such stream or no permission.
    The caller must close the generator (`contextlib.aclosing`).
    """
    if until is not None and until < max(1, start.sequence) and not whole:
        return
    reading = _PullReader(client, stream, limits or PullLimits(), server)
    try:
        await reading.open({**start.to_json(), **({"headers_only": True} if headers_only else {})}, subject)
        while until is None or reading.passed_sequence < until or (whole and reading.is_behind):
            piece = await reading.next()
            if until is not None and reading.passed_sequence > until and not whole:
                piece = [message for message in piece if message.sequence <= until]
            yield piece
    finally:
        await reading.close()


async def for_each_message(
    client: FloeClient,
    stream: str,
    until: int,
    on_message: Callable[[Message], None],
    *,
    after: int = 0,
    headers_only: bool = False,
) -> None:
    """Call `on_message` with each message after sequence `after`, up to `until`. Raises its errors and `scan`'s."""
    async with aclosing(scan(client, stream, StartAt(after + 1), until=until, headers_only=headers_only)) as pieces:
        async for piece in pieces:
            for message in piece:
                on_message(message)


async def get_message(client: FloeClient, stream: str, sequence: int) -> Message | None:
    """Return the message of that sequence, read from the leader; None if the stream does not hold it.

    Raises ApiError if there is no such stream.
    """
    message = await query_message(client, stream, {"seq": sequence})
    if message is None or "\ufffd".encode() not in message.subject:
        return message
    # The API's JSON cannot carry a subject that is not UTF-8; a delivered message can.
    delivered: list[Message] = []
    await for_each_message(client, stream, sequence, delivered.append, after=sequence - 1)
    return delivered[0] if delivered else None


class _PullReader:
    """One consumer and the open pull request on it."""

    def __init__(self, client: FloeClient, stream: str, limits: PullLimits, server: str) -> None:
        self._client, self._stream, self._limits, self._server = client, stream, limits, server
        self._name = f"floe-{secrets.token_hex(8)}"
        self._generation, self._inbox = client.generation, client.new_inbox()
        self._subscription = RawSubscription(client)  # of nothing until `open`
        self._arrived, self._statuses = asyncio.Event(), list[bytes | None]()
        self._messages = protocol.message_list(self._arrived.set, self._keep_status)
        self._error, self._next_number, self._pending = PendingError(self._arrived), 1, 0
        self._unanswered: int | None = 0  # pulls without responder; None once the consumer has answered
        self._batch, self._held = limits.batch, 0
        self._window = max(limits.window_bytes, client.max_payload + DELIVERY_OVERHEAD_BYTES)
        #: Every message up to this sequence was returned, or is not on the subject.
        self.passed_sequence = 0

    async def open(self, config: dict[str, Any], subject: str) -> None:
        config |= {
            "name": self._name,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": INACTIVE_THRESHOLD_S * NS_PER_S,
            "mem_storage": True,  # the server chooses the replicas: one, except on an interest stream
        }
        if subject:
            config["filter_subject"] = subject
        self._subscription = await self._client.subscribe_raw(self._inbox, self._messages, self._error.set)
        for _ in range(PLACEMENTS):
            consumer = await create_ephemeral_consumer(self._client, self._stream, config)
            if self._server in ("", consumer.leader):
                self._held = consumer.pending
                self._batch = min(self._batch, consumer.max_batch or self._batch)
                self._pull()
                return
            # The cluster places it on any of the replicas.
            await delete_consumer(self._client, self._stream, self._name)
            self._name = config["name"] = f"floe-{secrets.token_hex(8)}"
        raise Unavailable(f"stream {self._stream}: no consumer was placed on {self._server} in {PLACEMENTS} tries")

    @property
    def is_behind(self) -> bool:
        """True if not all messages have arrived that the consumer counted when it was made."""
        return self._next_number <= self._held

    async def close(self) -> None:
        await self._subscription.unsubscribe()
        with suppress(FloeError):
            if self._client.is_up:
                await delete_consumer(self._client, self._stream, self._name)

    def _keep_status(self, headers: bytes | None) -> None:
        self._statuses.append(headers)
        self._arrived.set()

    def _pull(self) -> None:
        request = {
            "batch": self._batch,
            "max_bytes": self._window,
            "expires": PULL_EXPIRES_S * NS_PER_S,
            "idle_heartbeat": int(self._limits.heartbeat_s * NS_PER_S),
        }
        self._client.send(frame(self._pull_subject, json.dumps(request).encode(), None, self._inbox.encode()))
        self._pending = self._batch

    @property
    def _pull_subject(self) -> bytes:
        return self._client.api_subject(f"CONSUMER.MSG.NEXT.{self._stream}.{self._name}").encode()

    async def next(self) -> list[Message]:
        if not await wait_for(self._arrived, MAX_MISSED_HEARTBEATS * self._limits.heartbeat_s):
            silent = Unavailable(f"stream {self._stream}: no message or heartbeat from the consumer")
            raise self._client.permission_error(self._pull_subject) or silent
        self._error.raise_if_set()
        if self._client.generation != self._generation:
            raise Unavailable(f"stream {self._stream}: the connection was lost while reading")
        self._arrived.clear()
        statuses, self._statuses = self._statuses, []
        found = self._to_messages(self._messages.take())
        for headers in statuses:
            self._on_status(headers)
        if self._pending <= 0:
            if self._unanswered:
                await self._client.clock.sleep(NO_RESPONDERS_PAUSE_S)
            self._pull()
        return found

    def _to_messages(self, arrived: protocol.Messages) -> list[Message]:
        subjects, replies, payloads, headers = arrived
        if not replies:
            return []
        try:
            acks = parse_replies(replies, self._name.encode(), self._next_number)
        except ValueError as error:
            raise Unavailable(f"stream {self._stream}: {error}") from None
        if acks.contiguous < len(replies):
            missing = self._next_number + acks.contiguous
            raise Unavailable(f"stream {self._stream}: expected message {missing}, found another")
        self._next_number += len(replies)
        self._pending, self._unanswered = self._pending - len(replies), None
        self.passed_sequence = acks.sequences[-1]
        return list(map(Message, acks.sequences, acks.timestamps_ns, subjects, headers, payloads))

    def _on_status(self, headers: bytes | None) -> None:
        status = parse_status(headers)
        if isinstance(status, ConsumerError):
            if self._unanswered is None or self._unanswered >= NO_RESPONDERS_ATTEMPTS or not status.has_no_responders:
                raise Unavailable(f"stream {self._stream}: the server reports: {status.text}")
            # A cluster confirms a new consumer before its server listens.
            self._unanswered, self._pending = self._unanswered + 1, 0
            return
        self._unanswered = None
        if isinstance(status, IdleHeartbeat) and status.consumer_sequence == self._next_number - 1:
            self.passed_sequence = max(self.passed_sequence, status.sequence)
            self._held = 0  # nothing is left to come; messages that it counted may be gone since
        elif isinstance(status, PullEnd):
            if status.max_batch >= self._batch:
                raise Unavailable(f"stream {self._stream}: the server refuses a pull of {self._batch} messages")
            self._batch, self._pending = min(self._batch, status.max_batch or self._batch), 0
            self._window *= 2 if status.is_too_small and status.undelivered == self._batch else 1
