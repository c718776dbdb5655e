"""Reads one stream in order through a consumer of its own, bound to one history of the stream.

The consumer is ephemeral, takes no acknowledgements and lives in memory. One inbox subscription stays open
and is re-armed with big pull requests before the last one is used up. Everything received goes to a sink that
is called from the connection's read loop; what a burst left there is parsed at once, in the next turn of the
event loop.

Whatever is not certain ends the reader with a doubt: a gap in the consumer's numbers, a consumer that is
gone, no heartbeat, a reconnect. Its owner then asks whether the stream is still the same, and makes a new
reader.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from common.clock import Clock
from common.errors import FloeError, Unavailable
from common.jetstream.client import FloeClient, RawSubscription, frame
from common.jetstream.streams import (
    ConsumerInfo,
    consumer_info,
    create_consumer,
    delete_consumer,
    stream_info,
)
from common.segments.rows import Columns
from egress.builder import part
from egress.frames import Acks, ConsumerTrouble, Heartbeat, RequestOver, parse_acks, parse_status
from egress.parts import Pulling

SECOND = 1_000_000_000  # nanoseconds
MESSAGE_OVERHEAD = 256  # bytes of subject, reply and headers, guessed for the size of a batch
MESSAGE_ROOM = (
    16 * 1024
)  # bytes of subject and reply that a pull request's max_bytes counts on top of a payload
MISSES = 4  # requests that ended without a message because the next one did not fit


class DoubtError(Exception):
    """The consumer or the stream behind it may not be what it was; `reason` is one of a small set for
    metrics.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Target(Protocol):
    """Where a reader hands over what it is sure of; called from the event loop, synchronously."""

    def messages(self, columns: Columns) -> None:
        """The next messages of the consumer, in order and without a gap in its numbers."""
        ...

    def passed(self, sequence: int) -> None:
        """Everything up to `sequence` that the consumer delivers has been handed over."""
        ...


class Reader:
    """A consumer from `first` on, of the stream whose `created` is `created` and stays so.

    `retention`: of the stream. `durable`: what the consumer's name begins with where the stream keeps
    messages until they are acknowledged; `archived`: up to here they are acknowledged at once, and not handed
    over.
    `has_room`: asked before each pull request, with its bytes. `on_doubt` is called at most once, and nothing
    is handed to `target` afterwards.
    """

    def __init__(
        self,
        client: FloeClient,
        stream: str,
        created: str,
        target: Target,
        on_doubt: Callable[[DoubtError], None],
        *,
        first: int,
        clock: Clock,
        window: int,
        has_room: Callable[[int], bool],
        filter_subject: str = "",
        retention: str = "limits",
        durable: str = "",
        archived: int = 0,
        pulling: Pulling | None = None,
    ) -> None:
        self._client, self._stream, self._created = client, stream, created
        self._target, self._on_doubt, self._has_room = target, on_doubt, has_room
        self._first, self._filter, self._clock = first, filter_subject, clock
        self._retention, self._durable, self._archived = retention, durable, archived
        self._pulling = pulling or Pulling()
        self._window = max(window, client.max_payload + MESSAGE_ROOM)
        self._consumer: ConsumerInfo | None = None
        self._subscription: RawSubscription | None = None
        self._generation = client.generation
        self._owed = 0
        self._next = 1
        self._received_bytes = 0
        self._misses = 0
        self._behind = 0
        self._heard = clock.monotonic()
        self._is_open = False
        self._scheduled = False
        self._subjects: list[bytes] = []
        self._replies: list[bytes] = []
        self._payloads: list[bytes] = []
        self._headers: list[bytes | None] = []

    async def open(self) -> None:
        """Create the consumer and begin to pull. Raises DoubtError where the stream is not the one bound to.

        Checked before and after creating it: a stream deleted and made again in between has no such consumer.
        """
        self._generation = self._client.generation
        self._loop = asyncio.get_running_loop()
        await self._check_stream()
        self._consumer = await self._create()
        await self._check_stream()
        inbox = self._client.new_inbox()
        self._ask = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer.name}".encode()
        self._inbox = inbox.encode()
        self._is_open = True
        self._subscription = await self._client.subscribe_raw(inbox, self._sink)
        self._heard = self._clock.monotonic()
        self.pull()

    async def _check_stream(self) -> None:
        info = await stream_info(self._client, self._stream)
        if info is None or info.created != self._created:
            found = "no such stream" if info is None else f"one created at {info.created}"
            raise DoubtError(
                "stream_changed", f"expected the stream created at {self._created}, found {found}"
            )

    async def _create(self) -> ConsumerInfo:
        config = {
            "name": f"floe-{secrets.token_hex(8)}",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._first,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": int(self._pulling.inactive * SECOND),
            "mem_storage": True,
            "num_replicas": 1,
        }
        if self._filter:
            config["filter_subject"] = self._filter
        return await create_consumer(self._client, self._stream, config)

    async def check(self) -> None:
        """Raises DoubtError unless the consumer still exists with the same creation time, on the same
        connection.
        """
        self._check_generation()
        consumer = self._consumer
        found = consumer and await consumer_info(self._client, self._stream, consumer.name)
        if consumer is None or found is None or found.created != consumer.created:
            raise DoubtError("consumer_gone", "the consumer does not exist any more")
        self._check_generation()

    async def acknowledge(self, last: int) -> None:
        """Acknowledge everything received up to `last`, where the stream keeps messages until then.

        Returns when the server has taken it. Raises Unavailable, OutcomeUnknown; may be called again.
        """

    def _check_generation(self) -> None:
        if self._client.generation != self._generation:
            raise DoubtError("reconnect", "the connection was lost meanwhile")

    async def stop(self) -> None:
        """Hand over what has arrived, then take nothing more."""
        self._flush()
        self._is_open = False
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def close(self) -> None:
        """Stop, and remove the consumer where the server can be reached; no error where it cannot."""
        self._is_open = False
        with suppress(FloeError):
            await self.stop()
            if self._consumer is not None and self._client.is_up:
                await delete_consumer(self._client, self._stream, self._consumer.name)

    # Pulling

    def pull(self) -> None:
        """Ask for more if half of the batch or more is used up and there is room for it."""
        batch = self._batch()
        wanted = batch - self._owed
        if not self._is_open or wanted * 2 < batch or not self.has_room:
            return
        request = {
            "batch": wanted,
            "max_bytes": self._window,
            "expires": int(self._pulling.expires * SECOND),
            "idle_heartbeat": int(self._pulling.heartbeat * SECOND),
        }
        try:
            self._client.send(frame(self._ask, json.dumps(request).encode(), None, self._inbox))
        except Unavailable:
            self._doubt("reconnect", "the connection is down")
            return
        if not self._owed:
            self._heard = self._clock.monotonic()
        self._owed += wanted

    @property
    def has_room(self) -> bool:
        """Whether what one more pull request may bring fits into memory."""
        return self._has_room(self._window)

    def _batch(self) -> int:
        """As many messages as the window holds, going by those received, so that it is not used up first."""
        average = self._received_bytes // max(1, self._next - 1)
        return max(2, min(self._pulling.batch, self._window // (average + MESSAGE_OVERHEAD)))

    def tick(self) -> None:
        """Pull if there is room again; doubt a consumer from which nothing comes, not even a heartbeat."""
        if not self._is_open:
            return
        silent = self._clock.monotonic() - self._heard
        if self._client.generation != self._generation:
            self._doubt("reconnect", "the connection was lost meanwhile")
        elif self._owed and silent > 2.5 * self._pulling.heartbeat:
            self._doubt("silent", f"nothing heard for {silent:.1f} s, expected a heartbeat")
        else:
            self.pull()

    # Receiving

    def _sink(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if not reply:
            self._on_status(headers)
            return
        self._subjects.append(subject)
        self._replies.append(reply)
        self._payloads.append(payload)
        self._headers.append(headers)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        replies, subjects, payloads, headers = self._replies, self._subjects, self._payloads, self._headers
        self._forget()
        if not replies or not self._is_open or self._consumer is None:
            return
        self._heard = self._clock.monotonic()
        try:
            acks = parse_acks(replies, self._consumer.name.encode(), self._next)
        except ValueError as error:
            self._doubt("malformed", str(error))
        else:
            self._hand_over(acks, subjects, headers, payloads)

    def _forget(self) -> None:
        self._replies, self._subjects, self._payloads, self._headers = [], [], [], []

    def _hand_over(
        self, acks: Acks, subjects: list[bytes], headers: list[bytes | None], payloads: list[bytes]
    ) -> None:
        count = acks.contiguous
        if count:
            columns = Columns(acks.sequences, acks.timestamps_ns, subjects, headers, payloads)
            if count < len(subjects):
                columns = part(columns, 0, count)
            self._next += count
            self._owed = max(0, self._owed - count)
            self._received_bytes += sum(map(len, columns.payloads))
            self._misses = 0
            self._target.messages(columns)
        if count < len(subjects):
            self._doubt("gap", f"consumer sequence {self._next} expected, a later one found")
        else:
            self.pull()

    def _on_status(self, headers: bytes | None) -> None:
        self._flush()
        if not self._is_open:
            return
        self._heard = self._clock.monotonic()
        status = parse_status(headers)
        if isinstance(status, Heartbeat):
            self._on_heartbeat(status)
        elif isinstance(status, RequestOver):
            self._on_request_over(status)
        elif isinstance(status, ConsumerTrouble):
            self._doubt("consumer_gone", f"the server says: {status.text}")

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        sent = heartbeat.consumer_sequence
        if sent == self._next - 1:
            self._target.passed(heartbeat.sequence)
        elif sent > self._next - 1:
            # It may have overtaken messages on their way; a second one has not.
            if self._behind == self._next:
                self._doubt("gap", f"the consumer sent {sent} messages, received {self._next - 1}")
            self._behind = self._next

    def _on_request_over(self, over: RequestOver) -> None:
        self._misses += over.too_small
        if self._misses > MISSES:
            # Not the end of a window: a message stored under a larger max_payload than this server's.
            self._window, self._misses = self._window * 2, 0
        self._owed = max(0, self._owed - over.undelivered)
        self.pull()

    def _doubt(self, reason: str, text: str) -> None:
        if self._is_open:
            self._is_open = False
            self._on_doubt(DoubtError(reason, text))
