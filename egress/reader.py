"""Reader of one stream in order, through a consumer of its own, bound to one history of the stream.

The consumer depends on the stream's retention (`egress.consumers`). One inbox subscription remains open and is re-armed
with big pull requests before the last one is used up. All received messages go to a sink that is called from the
connection's read loop. All messages of a burst are parsed together, in the next turn of the event loop.

Any uncertainty ends the reader with a ReaderResetError: a gap in the consumer sequences, a consumer that is gone, no
idle heartbeat, a reconnect. Its owner then checks that the stream is still the same, and makes a new reader. An error
while messages are handed over ends it too: messages that did not arrive count as not received.
"""

import asyncio
import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from common.archive.columns import Columns
from common.archive.guard import MAX_MESSAGE_BYTES
from common.clock import NS_PER_S
from common.errors import FloeError, Refused, Stopped, Unavailable, UnexpectedError
from common.exits import choices, nats_command
from common.logs import get_logger
from common.nats import protocol
from common.nats.api import INTEREST, ConsumerInfo, StreamInfo, delete_consumer, stream_info
from common.nats.client import RawSubscription, frame
from common.nats.protocol import ConsumerError, IdleHeartbeat, ParsedReplies, PullEnd, parse_replies, parse_status
from common.sequences import SequenceRange
from common.settings.types import size_words
from common.tasks import cancel, record_unexpected, spawn
from egress.consumers import (
    Acknowledger,
    ReaderResetError,
    WantedMessages,
    current_consumer,
    delete_stray_durables,
    open_consumer,
)
from egress.deps import PartitionDeps
from egress.identity import SourceStream
from egress.memory import MemoryAccount

log = get_logger(__name__)

ESTIMATED_OVERHEAD_BYTES = 256  # bytes of subject, reply and headers: an estimate for the size of a batch
# Bytes of subject and reply that a pull request's max_bytes counts on top of a payload.
PULL_OVERHEAD_BYTES = 16 * 1024
PULL_CHECK_TIMEOUT_S = 5.0  # seconds
SILENT_HEARTBEATS = 2.5  # missed ones, after which a consumer counts as silent
MAX_MISSES = 4  # requests that ended without a message because the next one did not fit


class ReaderTarget(Protocol):
    """Receiver of messages and positions that a reader is sure of; called from the event loop, synchronously."""

    def add_messages(self, columns: Columns) -> None:
        """Take the next messages of the consumer, in order and without a gap in the consumer sequences."""

    def skip_to(self, sequence: int) -> None:
        """Note that everything up to `sequence` that the consumer delivers has been handed over."""


class Reader:
    """Reader through a consumer from `first` on, of the stream with the `created` of `source`.

    If the stream keeps messages until they are acknowledged, messages before `first` are not handed over: those in
    `archived` are acknowledged at once, the others are left in the stream. `account`: charged for the sequences kept
    until then. `has_room`: called before each pull request, with its bytes. `on_end` is called at most once: with a
    ReaderResetError, with Stopped before a message too large to archive, or with the error of handing over. Nothing is
    handed to `target` afterwards.
    """

    def __init__(
        self,
        deps: PartitionDeps,
        source: SourceStream,
        target: ReaderTarget,
        on_end: Callable[[Exception], None],
        *,
        first: int,
        archived: Sequence[SequenceRange],
        account: MemoryAccount,
        has_room: Callable[[int], bool],
    ) -> None:
        client = deps.client
        self._client, self._stream, self._created = client, deps.partition.stream, source.created
        self._target, self._on_end, self._has_room = target, on_end, has_room
        self._first, self._archived, self._account, self._clock = first, archived, account, deps.clock
        self._pulling = deps.tuning.pulling
        self._silence = SILENT_HEARTBEATS * self._pulling.heartbeat  # seconds
        self._max_batch = self._pulling.batch  # greatest number of messages in a pull request
        begin = archived[0].first if archived else first
        self._wanted = WantedMessages(deps.partition, source.retention, first, begin, self._pulling.inactive)
        self._largest = MAX_MESSAGE_BYTES + PULL_OVERHEAD_BYTES
        # The server never sends a message that does not fit into the largest window: it is not archived anyway.
        self._window = min(max(deps.budget.window_bytes, client.max_payload + PULL_OVERHEAD_BYTES), self._largest)
        self._consumer: ConsumerInfo | None = None
        self._former: list[str] = []
        self._acks: Acknowledger | None = None
        self._catching_up: asyncio.Task[None] | None = None
        self._below_first, self._last = asyncio.Event(), 0
        self._subscription: RawSubscription | None = None
        self._generation, self._outstanding, self._next, self._received_bytes = client.generation, 0, 1, 0
        self._missed_requests, self._gap_suspected_at, self._last_received_at = 0, 0, deps.clock.monotonic()
        self._is_open = False
        self._messages = protocol.message_list(lambda: self._loop.call_soon(self._flush), self.receive_status)

    async def open(self) -> None:
        """Create the consumer and begin to pull. Raises ReaderResetError if the stream's `created` differs, Refused
        without a right.

        Checked before and after the creation: a stream deleted and recreated in between has no such consumer.
        """
        self._generation = self._client.generation
        self._loop = asyncio.get_running_loop()
        await self._check_stream()
        consumer, self._former = await open_consumer(self._client, self._wanted)
        self._consumer = consumer
        self._source = await self._check_stream()
        self._max_batch = min(self._max_batch, consumer.max_batch or self._max_batch)
        inbox = self._client.new_inbox()
        self._pull_subject = self._client.api_subject(f"CONSUMER.MSG.NEXT.{self._stream}.{consumer.name}").encode()
        self._inbox = inbox.encode()
        self._is_open = True
        if self._wanted.is_durable:
            self._acks = Acknowledger(
                self._client, self._stream, consumer, self._account, first=self._first, archived=self._archived
            )
            self._catching_up = spawn(self._catch_up(self._acks), self._fail, name="acknowledge")
        self._subscription = await self._client.subscribe_raw(inbox, self._messages, self._fail)
        self._last_received_at = self._clock.monotonic()
        self.pull()
        await self._client.round_trip(PULL_CHECK_TIMEOUT_S)  # a refusal of the pull request precedes the answer
        if refused := self._client.permission_error(self._pull_subject):
            text = refused.message.replace(consumer.name, "*")  # one error, though each consumer has another name
            raise Refused(text, hint=refused.hint, code=refused.code)

    @property
    def is_durable(self) -> bool:
        return self._wanted.is_durable

    @property
    def interest_lapse(self) -> StreamInfo | None:
        """State of the stream if an interest stream had no durable of the partition when this one was made: messages
        published before, and not wanted by others, were not kept. Else None. After `open` only.
        """
        if self._consumer is None or self._former or self._wanted.retention != INTEREST:
            return None
        return self._source

    async def _check_stream(self) -> StreamInfo:
        if (info := await stream_info(self._client, self._stream)) is None or info.created != self._created:
            found = "no such stream" if info is None else f"one created at {info.created}"
            raise ReaderResetError("stream_changed", f"expected the stream created at {self._created}, found {found}")
        return info

    async def check(self) -> None:
        """Raise ReaderResetError unless the consumer exists with the same creation time, on the same connection."""
        self._check_generation()
        assert self._consumer is not None, "only an open reader is checked"
        await current_consumer(self._client, self._stream, self._consumer)
        self._check_generation()

    async def acknowledge(self, last: int, check_lease: Callable[[], None]) -> None:
        """Acknowledge everything received up to `last`, if the stream keeps messages until then.

        Returns once the server has applied it. Raises Unavailable, OutcomeUnknown (it may be called again),
        ReaderResetError if the consumer or the connection is gone, Refused without the right, the error of
        `check_lease`.
        """
        if self._acks is None or self._consumer is None:
            return
        self._check_generation()
        await self._acks.acknowledge_up_to(last)
        if self._wanted.retention == INTEREST:
            await delete_stray_durables(self._client, self._wanted, self._consumer.name, check_lease)

    async def _catch_up(self, acks: Acknowledger) -> None:
        is_failing = False
        while True:
            await self._below_first.wait()
            self._below_first.clear()
            try:
                await acks.acknowledge_up_to(self._first - 1)
            except ReaderResetError as reset:
                self._reset(reset.reason, str(reset))
            except FloeError as error:
                log.warning("acknowledgement deferred", action="acks_deferred", code=error.code, error=str(error))
                is_failing = True
                self._below_first.set()
                await self._clock.sleep(1.0)
            else:
                if is_failing:
                    is_failing = False
                    log.info("acknowledgement recovered", action="acks_recovered", stream=self._stream)
            if left := acks.unacknowledged:
                log.warning("messages left in the stream", action="messages_left", stream=self._stream, messages=left)

    def _check_generation(self) -> None:
        if self._client.generation != self._generation:
            raise ReaderResetError("reconnect", "the connection was lost meanwhile")

    async def stop(self) -> None:
        """Hand over the messages that have arrived, then take nothing more. Errors of handing over go to `on_end`."""
        self._flush()
        self._is_open = False
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def close(self) -> None:
        """Stop, and delete a consumer that is not durable if the server can be reached; raises nothing."""
        self._is_open = False
        if self._catching_up is not None:
            await cancel(self._catching_up)
        with suppress(FloeError):
            await self.stop()
            if self._consumer is not None and not self._wanted.is_durable and self._client.is_up:
                await delete_consumer(self._client, self._stream, self._consumer.name)

    # Pulling

    def pull(self) -> None:
        batch = self._batch()
        wanted = batch - self._outstanding
        if not self._is_open or wanted * 2 < batch or not self.has_room:
            return
        request = {
            "batch": wanted,
            "max_bytes": self._window,
            "expires": int(self._pulling.expires * NS_PER_S),
            "idle_heartbeat": int(self._pulling.heartbeat * NS_PER_S),
        }
        try:
            self._client.send(frame(self._pull_subject, json.dumps(request).encode(), None, self._inbox))
        except Unavailable:
            self._reset("reconnect", "the connection is down")
            return
        if not self._outstanding:
            self._last_received_at = self._clock.monotonic()
        self._outstanding += wanted

    @property
    def count(self) -> int:
        return self._next - 1

    @property
    def has_room(self) -> bool:
        return self._has_room(self._window)

    def _batch(self) -> int:
        average = self._received_bytes // max(1, self._next - 1)
        return min(self._max_batch, max(2, self._window // (average + ESTIMATED_OVERHEAD_BYTES)))

    @property
    def silent_in(self) -> float:
        """Seconds until its consumer counts as silent, if it sends nothing; a reader that has ended expects nothing."""
        is_expecting = self._is_open and self._outstanding
        silent = self._clock.monotonic() - self._last_received_at if is_expecting else 0.0
        return max(0.0, self._silence - silent)

    def tick(self) -> None:
        """Pull if there is room again; end the reader if its consumer sends nothing, not even an idle heartbeat."""
        if not self._is_open:
            return
        silent = self._clock.monotonic() - self._last_received_at
        if self._client.generation != self._generation:
            self._reset("reconnect", "the connection was lost meanwhile")
        elif self._outstanding and silent >= self._silence:
            self._reset("silent", f"expected an idle heartbeat, received nothing for {silent:.1f} s")
        else:
            self.pull()

    # Receiving

    def _flush(self) -> None:
        """Take the messages. Raises nothing: the event loop would only log it, and other callbacks would continue."""
        try:
            self._take()
        except Exception as error:
            self._fail(error)

    def _take(self) -> None:
        """Hand over the messages that have arrived.

        Messages count as received only after that: then the counters advance, and acknowledgements are prepared.
        """
        subjects, replies, payloads, headers = self._messages.take()
        if not replies or not self._is_open or self._consumer is None:
            return
        self._last_received_at = self._clock.monotonic()
        try:
            acks = parse_replies(replies, self._consumer.name.encode(), self._next)
        except ValueError as error:
            self._reset("malformed", str(error))
            return
        if acks.sequences[0] <= self._last:
            self._reset("redelivered", f"sequence {acks.sequences[0]} was delivered again, after {self._last}")
            return
        large = first_too_large(subjects, headers, payloads)
        if is_too_large := large < acks.contiguous:
            acks = replace(acks, contiguous=large)
        if acks.contiguous:
            self._hand_over(acks, subjects, headers, payloads)
            if self._acks is not None:
                self._acks.record_delivered(replies[0], acks.sequences[: acks.contiguous])
            self._received(acks, payloads)
        if is_too_large:
            self._end(self._too_large(acks.sequences[large]))
        elif acks.contiguous < len(replies):
            self._reset("gap", f"expected consumer sequence {self._next}, found a later one")
        else:
            self.pull()

    def _hand_over(
        self, acks: ParsedReplies, subjects: list[bytes], headers: list[bytes | None], payloads: list[bytes]
    ) -> None:
        columns = Columns(acks.sequences, acks.timestamps_ns, subjects, headers, payloads)
        if acks.contiguous < len(subjects):
            columns = columns.part(0, acks.contiguous)
        if columns.sequences[0] < self._first:
            # Delivered again: it was archived, and its acknowledgement was lost.
            columns = columns.part(bisect_left(columns.sequences, self._first), len(columns))
        if columns:
            self._target.add_messages(columns)

    def _received(self, acks: ParsedReplies, payloads: list[bytes]) -> None:
        count = acks.contiguous
        self._next += count
        self._outstanding = max(0, self._outstanding - count)
        self._received_bytes += sum(map(len, payloads[:count]))
        self._missed_requests, self._last = 0, acks.sequences[count - 1]
        if acks.sequences[0] < self._first:
            self._below_first.set()

    def receive_status(self, headers: bytes | None) -> None:
        self._flush()
        if not self._is_open:
            return
        self._last_received_at = self._clock.monotonic()
        status = parse_status(headers)
        if isinstance(status, IdleHeartbeat):
            self._on_heartbeat(status)
        elif isinstance(status, PullEnd):
            self._on_request_over(status)
        elif isinstance(status, ConsumerError):
            self._reset("consumer_gone", f"the server answered: {status.text}")

    def _on_heartbeat(self, heartbeat: IdleHeartbeat) -> None:
        if (sent := heartbeat.consumer_sequence) == self._next - 1:
            self._target.skip_to(heartbeat.sequence)
        elif sent > self._next - 1:
            # The first heartbeat may have overtaken messages in flight; a second one has not.
            if self._gap_suspected_at == self._next:
                self._reset("gap", f"the consumer sent {sent} messages, received {self._next - 1}")
            self._gap_suspected_at = self._next

    def _on_request_over(self, over: PullEnd) -> None:
        if 0 < over.max_batch < self._max_batch:  # later ones answer requests that were sent before the limit was known
            self._max_batch, self._outstanding = over.max_batch, 0
        self._missed_requests += over.is_too_small
        if self._missed_requests > MAX_MISSES:
            # Not the end of a window: a message stored under a larger max_payload than this server's.
            if self._window >= self._largest:
                self._end(self._too_large())
            self._window, self._missed_requests = min(self._window * 2, self._largest), 0
        self._outstanding = max(0, self._outstanding - over.undelivered)
        self.pull()

    def _too_large(self, sequence: int = 0) -> Stopped:
        """Return the error. `sequence`: of the message; 0 if it is not known, because the server does not send it."""
        message = f"message {sequence}" if sequence else f"the message after {max(self._last, self._first - 1)}"
        text = f"stream {self._stream}: {message}: expected at most {size_words(MAX_MESSAGE_BYTES)} in all, found more"
        remove = "keep a copy of it elsewhere and remove it: egress then archives the messages after it"
        hint = choices((remove, nats_command("stream rmm", self._stream, sequence or "SEQUENCE")))
        return Stopped(text, hint=hint, code="E-MSG-TOO-LARGE")

    def _reset(self, reason: str, text: str) -> None:
        self._end(ReaderResetError(reason, text))

    def _fail(self, error: Exception) -> None:
        """End the reader: messages that were received did not reach the target, so the next reader reads them again."""
        if self._is_open:
            self._end(UnexpectedError.wrap(error))
        else:
            record_unexpected(error, "feed", f"reading {self._stream}")

    def _end(self, cause: Exception) -> None:
        if self._is_open:
            self._is_open = False
            self._on_end(cause)


def first_too_large(subjects: list[bytes], headers: list[bytes | None], payloads: list[bytes]) -> int:
    """Return the index of the first message above `MAX_MESSAGE_BYTES`, or the number of messages."""
    if max(map(len, payloads)) <= MAX_MESSAGE_BYTES // 2:  # headers are far smaller than that
        return len(payloads)
    sizes = (len(s) + len(h or b"") + len(p) for s, h, p in zip(subjects, headers, payloads, strict=True))
    return next((index for index, size in enumerate(sizes) if size > MAX_MESSAGE_BYTES), len(payloads))
