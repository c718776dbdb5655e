"""Senders of the advisories of one chain: reliable, until a stream has stored each, or plain, once.

The outbox has the advisories that are not stored yet: which to send now, which are late, which are stored already. A
doubtful advisory may have been sent already: by a process that ended, or by this one, which lost the answer. It is not
sent before it has been looked up in the stream, and neither are those behind it for the same value.
"""

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import InitVar, dataclass
from enum import StrEnum
from itertools import chain, islice

from common.chain import Chain
from common.clock import NS_PER_S, Backoff, Clock, parse_time
from common.errors import FloeError, OutcomeUnknown, Refused, Unavailable
from common.exits import nats_command
from common.logs import get_logger
from common.metrics import show_zeros
from common.nats.api import query, stream_info
from common.nats.client import FloeClient
from common.nats.headers import build_block, header_value
from common.nats.protocol import NO_RESPONDERS_CODE, ApiError, api_answer, frame
from common.nats.pull import PullLimits, StartAt, scan
from common.tasks import wait_for
from egress import metrics
from egress.advisories.advisory import (
    Advisory,
    AdvisoryEvent,
    advisory_subject,
    build_document,
    event_id,
    key_name,
    subject_filter,
)
from egress.partition import Partition

log = get_logger(__name__)


MAX_WAITING_ADVISORIES = 100_000  # advisories
# Reading stops here. A batch requested before still comes, with up to three advisories a message.
HIGH_WATER_ADVISORIES = MAX_WAITING_ADVISORIES - 3 * 10_000
MAX_IN_FLIGHT = 256  # advisories in flight at once


class Outbox:
    """The advisories by value, in order for each value. Each stays until it is stored or dropped."""

    def __init__(self) -> None:
        self._queues: dict[str, list[Advisory]] = {}
        self._doubtful: dict[Advisory, None] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def has_room(self) -> bool:
        """True if reading should continue. `add` takes advisories even if not: they cannot be found again."""
        return self._count < HIGH_WATER_ADVISORIES

    @property
    def doubtful(self) -> Collection[Advisory]:
        return self._doubtful.keys()

    def add(self, advisories: Iterable[Advisory], *, doubtful: bool = False) -> None:
        """Add these behind the others of the same value. One that is in the outbox as doubtful is not added again."""
        for advisory in advisories:
            if self._doubtful and advisory in self._doubtful:
                continue
            self._queues.setdefault(advisory.value, []).append(advisory)
            self._count += 1
            if doubtful:
                self._doubtful[advisory] = None

    def next_batch(self, max_count: int = MAX_IN_FLIGHT) -> list[Advisory]:
        """Return the advisories to send now: the first of each value, unless it is doubtful; `max_count` at most."""
        heads = (queue[0] for queue in self._queues.values())
        return list(islice((head for head in heads if head not in self._doubtful), max_count))

    def remove(self, advisory: Advisory) -> None:
        self._doubtful.pop(advisory, None)
        queue = self._queues.get(advisory.value, [])
        if advisory not in queue:
            return
        queue.remove(advisory)
        self._count -= 1
        self._move_to_end(advisory.value)

    def requeue(self, advisory: Advisory, *, doubtful: bool) -> None:
        self._move_to_end(advisory.value)
        if doubtful:
            self._doubtful[advisory] = None

    def _move_to_end(self, value: str) -> None:
        if queue := self._queues.pop(value):
            self._queues[value] = queue

    def mark_not_stored(self, advisories: Iterable[Advisory]) -> None:
        """Mark these as not stored, as far as is known: they may be sent."""
        for advisory in advisories:
            self._doubtful.pop(advisory, None)

    def pending(self) -> tuple[Advisory, ...]:
        return tuple(chain.from_iterable(self._queues.values()))


LATE_AFTER_DURATIONS = 2  # inspect_durations
MIN_LATE_NS = 300 * NS_PER_S  # so that a restart or a take-over loses none if inspect_duration is short
SERVER_TIME_INTERVAL_S = 60.0  # seconds


def is_late(advisory: Advisory, now_ns: int, duration_ns: int) -> bool:
    limit = max(LATE_AFTER_DURATIONS * duration_ns, MIN_LATE_NS)
    return advisory.event is not AdvisoryEvent.NEW and now_ns - advisory.event_time_ns > limit


class LatenessCheck:
    """The check for late advisories: by this host's clock and, before any is dropped, by that of `stream`'s server.

    The times of advisories are times of messages, which the server set: a host with a fast clock, or one that is set
    ahead, must not drop them.
    """

    def __init__(self, client: FloeClient, stream: str, duration_ns: int, clock: Clock) -> None:
        self._client, self._stream, self._clock, self._duration_ns = client, stream, clock, duration_ns
        self._server_ns: int | None = None
        self._read_at = float("-inf")

    async def find_late(self, advisories: list[Advisory]) -> set[Advisory]:
        """Return the late ones. Raises Unavailable if the server's time is needed and the server does not answer."""
        is_old = self._clock.monotonic() - self._read_at > SERVER_TIME_INTERVAL_S
        if is_old and self._select_late(advisories, max(self._now_ns(), self._server_now_ns())):
            await self._read_server_time()
        return self._select_late(advisories, self._server_now_ns())

    def _select_late(self, advisories: list[Advisory], now_ns: int) -> set[Advisory]:
        return {each for each in advisories if is_late(each, now_ns, self._duration_ns)}

    async def _read_server_time(self) -> None:
        try:
            info = await stream_info(self._client, self._stream)
        except (ApiError, Refused):
            info = None
        # A server before 2.10 does not report its time: this host's is used instead.
        self._server_ns = parse_time(info.time) if info is not None and info.time else None
        self._read_at = self._clock.monotonic()

    def _now_ns(self) -> int:
        return int(self._clock.now() * NS_PER_S)

    def _server_now_ns(self) -> int:
        """Return the server's time, by its last answer; this host's without one."""
        if self._server_ns is None:
            return self._now_ns()
        return self._server_ns + int((self._clock.monotonic() - self._read_at) * NS_PER_S)


MESSAGE_ID = b"Nats-Msg-Id"
CLOCK_MARGIN_NS = 60 * NS_PER_S  # by which the clocks of servers may differ
# Only headers are requested, so that many fit into little memory.
SCAN_LIMITS = PullLimits(batch=5000, window_bytes=2 * 1024 * 1024)


async def find_stored_ids(
    client: FloeClient, subject: str, ids: Collection[str], since_ns: int, limits: PullLimits = SCAN_LIMITS
) -> set[str] | None:
    """Return those of `ids` that messages on `subject` stored since `since_ns` carry; None if no stream is visible.

    Raises Unavailable if a stream cannot be read now, ApiError or Refused if it may not be read.
    """
    names = (await query(client, "STREAM.NAMES", {"subject": subject})).get("streams") or ()
    wanted = {each.encode() for each in ids}
    start, found = StartAt(time_ns=since_ns - CLOCK_MARGIN_NS), set[str]()
    for name in names:
        if (info := await stream_info(client, name)) is None:
            raise Unavailable(f"stream {name} no longer exists")
        # The consumer may be on a replica that lags: it must pass the last sequence of the leader. And the answer may
        # be of a former leader, and old: it must pass all that the consumer counted.
        last = info.last_sequence
        pieces = scan(client, name, start, until=last, whole=True, subject=subject, headers_only=True, limits=limits)
        async with aclosing(pieces):
            async for piece in pieces:
                stored = (header_value(each.headers, MESSAGE_ID) for each in piece)
                found.update(each.decode() for each in stored if each is not None and each in wanted)
    return found if names else None


ERROR_CODE = "E-ADVISORIES"


class SendResult(StrEnum):
    """The outcome of an advisory, or of one attempt to send it."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    PUBLISHED = "published"
    UNKNOWN = "unknown"
    FAILED = "failed"
    STALE = "stale"
    DROPPED = "dropped"


class AdvisoryReport:
    """The outcomes of the advisories of one chain, in metrics and log."""

    def __init__(self, chain: Chain, template: str) -> None:
        self._chain, self._template = chain, template
        self._labels = chain.site, chain.feed, str(chain.partition)
        #: Error code of the last attempts; empty while they succeed.
        self.failing_code = ""
        show_zeros("egress_", "advisories", site=chain.site, feed=chain.feed, partition=str(chain.partition))
        self.set_waiting(0)
        metrics.advisories_failing.labels(*self._labels).set(0)

    def count(self, advisory: Advisory, result: SendResult) -> None:
        metrics.advisories.labels(*self._labels, advisory.event.value, result.value).inc()

    def set_waiting(self, count: int) -> None:
        metrics.advisories_waiting.labels(*self._labels).set(count)

    def record_failure(self, error: FloeError) -> None:
        metrics.advisories_failing.labels(*self._labels).set(1)
        if error.code != self.failing_code:
            self.failing_code = error.code
            reason, hint = error.message, error.hint
            if error.code == NO_RESPONDERS_CODE:
                reason = f"no stream takes {self._template}"
                add = nats_command("stream add", "NAME", "--subjects", subject_filter(self._template), "--defaults")
                hint = f"create one, and sending continues by itself: {add}"
            context = {"code": ERROR_CODE, "error": reason, "hint": hint, **self._chain.log_context()}
            log.error("advisories not stored", action="advisories_failed", **context)

    def record_recovery(self) -> None:
        if self.failing_code:
            self.failing_code = ""
            metrics.advisories_failing.labels(*self._labels).set(0)
            log.info("advisories recovered", action="advisories_recovered", **self._chain.log_context())

    def warn_not_compared(self, reason: str) -> None:
        """Warn that doubtful advisories cannot be looked up: only the stream's duplicate window avoids duplicates."""
        log.warning(
            "advisory check skipped",
            action="advisory_check_skipped",
            error=reason,
            hint="allow STREAM.NAMES, STREAM.INFO and CONSUMER.CREATE on the stream; until then only its duplicate "
            "window prevents duplicates",
            **self._chain.log_context(),
        )

    def record_dropped(self, advisory: Advisory, error: ValueError) -> None:
        self.count(advisory, SendResult.DROPPED)
        context = {"code": ERROR_CODE, "error": str(error), "value": advisory.value[:200], **self._chain.log_context()}
        log.error("advisory dropped", action="advisory_dropped", **context)


def parse_ack(subject: str, payload: bytes) -> SendResult:
    """Return STORED or DUPLICATE if `payload` is the acknowledgement of a stream.

    Raises ApiError or Unavailable if the stream refuses, so nothing is stored; OutcomeUnknown for anything else, such
    as an answer that is not from a stream.
    """
    ack = api_answer(subject, payload)
    stream, sequence, duplicate = ack.get("stream"), ack.get("seq"), ack.get("duplicate", False)
    is_sequence = isinstance(sequence, int) and not isinstance(sequence, bool) and sequence > 0
    if not stream or not isinstance(stream, str) or not is_sequence or not isinstance(duplicate, bool):
        raise OutcomeUnknown(f"answer to {subject}: expected a stream's acknowledgement, found {json.dumps(ack):.80}")
    return SendResult.DUPLICATE if duplicate else SendResult.STORED


ADVISORY_ACK_TIMEOUT_S = 5.0  # seconds
SEND_CHECK_INTERVAL_S = 0.5  # seconds between checks of conditions that have no event
PROBE_ADVISORIES = 4  # sent at once while the permission to send is missing: the connection logs each subject
IDS_PER_TURN = 1000  # made in one turn of the event loop


@dataclass(eq=False)
class AdvisorySender:
    """The plain sender of the advisories of `chain`: publishes each once, as soon as it can; drops and counts them
    while the connection is down. Made only if `partition.settings.advisory.subject` is set.

    `outbox`: the advisories that a snapshot holds as not stored yet; some may have been sent since. `may_send`:
    called before each send, such as to check that the lease is usable. `ack_timeout_s`: seconds.
    """

    partition: Partition
    chain: Chain
    client: FloeClient
    clock: Clock
    rng: random.Random
    outbox: InitVar[Sequence[Advisory]] = ()
    may_send: Callable[[], bool] = lambda: True
    ack_timeout_s: float = ADVISORY_ACK_TIMEOUT_S

    def __post_init__(self, outbox: Sequence[Advisory]) -> None:
        feed = self.partition.settings
        self._template = feed.advisory.subject
        self._report = AdvisoryReport(self.chain, self._template)
        duration_ns = round(feed.inspect_duration * NS_PER_S)
        self._lateness = LatenessCheck(self.client, feed.stream, duration_ns, self.clock)
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._queue: deque[Advisory] = deque()

    def enqueue(self, advisories: Sequence[Advisory], *, may_be_sent: bool) -> None:
        """Send these, in this order for each value. Called from the event loop; never waits, never refuses.

        `may_be_sent`: found while messages are read a second time, so they may have been sent.
        """
        if may_be_sent:
            return
        room = MAX_WAITING_ADVISORIES - len(self._queue)
        self._queue.extend(advisories[:room])
        for advisory in advisories[room:]:
            self._report.count(advisory, SendResult.DROPPED)
        if self._queue:
            self._idle.clear()
        self._wake.set()

    def finish_reread(self) -> None:
        """End the second reading: look up the doubtful advisories in the stream, and send those that are not there."""

    @property
    def has_room(self) -> bool:
        """True if the reader may request more messages; False while too many wait to be stored (stop, don't skip).

        Check it at each tick: there is no event for it.
        """
        return True

    def pending(self) -> tuple[Advisory, ...]:
        """Return those not known to be stored, including those in flight, for snapshots. Empty if not reliable."""
        return ()

    async def run(self) -> None:
        """Send until cancelled. Raises nothing for errors of servers. May be cancelled anywhere."""
        while True:
            self._wake.clear()
            while self._queue and self.may_send():
                await self._send([self._queue.popleft() for _ in range(min(MAX_IN_FLIGHT, len(self._queue)))])
            if not self._queue:
                self._idle.set()
            await wait_for(self._wake, SEND_CHECK_INTERVAL_S)

    async def drain(self, timeout: float) -> None:
        """Wait until nothing is queued, sending fails, or `timeout` seconds have passed. `run` must be running."""
        await wait_for(self._idle, timeout)

    async def _send(self, batch: list[Advisory]) -> None:
        try:
            late = await self._lateness.find_late(batch)
        except FloeError:
            late = set()
        frames: dict[Advisory, bytes] = {}
        for advisory in [each for each in batch if each not in late]:
            try:
                frames[advisory] = frame(*self._build_message(advisory))
            except ValueError as error:
                self._report.record_dropped(advisory, error)
        try:
            self.client.send(b"".join(frames.values()))
            await self.client.flush_writes()
            result = SendResult.PUBLISHED
        except Unavailable:
            result = SendResult.DROPPED
        for advisory in late:
            self._report.count(advisory, SendResult.STALE)
        for advisory in frames:
            self._report.count(advisory, result)

    def _build_message(self, advisory: Advisory) -> tuple[bytes, bytes, bytes]:
        """Return the subject, the payload, and headers with the id by which the stream recognises a duplicate.

        Raises ValueError if it exceeds the server's limit: the server would refuse it and close the connection.
        """
        document = build_document(self.chain, key_name(self.partition.settings), advisory)
        payload, headers = document.to_json(), build_block([b"Nats-Msg-Id: " + document.event_id.encode()])
        if (size := len(headers) + len(payload)) > self.client.max_payload:
            raise ValueError(f"expected at most {self.client.max_payload} bytes, found {size}")
        return advisory_subject(self._template, advisory).encode(), payload, headers


class ReliableSender(AdvisorySender):
    """The sender of an outbox: for each value one advisory at a time, over all values a wave at a time.

    A lost answer makes an advisory doubtful. A doubtful one is looked up in the stream, and sent if it is not there.
    Only late advisories and those that the server would refuse are dropped.
    """

    def __post_init__(self, outbox: Sequence[Advisory]) -> None:
        super().__post_init__(outbox)
        self._backoff, self._outbox = Backoff(self.rng), Outbox()
        self._failed: set[Advisory] = set()
        self._is_reread_finished, self._is_compared, self._batch_limit = False, True, MAX_IN_FLIGHT
        self.enqueue(outbox, may_be_sent=True)

    # Incoming

    def enqueue(self, advisories: Sequence[Advisory], *, may_be_sent: bool) -> None:
        self._outbox.add(advisories, doubtful=may_be_sent)
        self._update_waiting()

    def finish_reread(self) -> None:
        self._is_reread_finished = True
        self._update_waiting()

    @property
    def has_room(self) -> bool:
        return self._outbox.has_room

    def pending(self) -> tuple[Advisory, ...]:
        return self._outbox.pending()

    def _update_waiting(self) -> None:
        count = len(self._outbox)
        self._report.set_waiting(count)
        if count:
            self._idle.clear()
        else:
            self._idle.set()
        self._wake.set()

    # Sending

    async def run(self) -> None:
        while True:
            self._wake.clear()
            try:
                did_work = self.may_send() and self.client.is_up and await self._step()
            except FloeError as error:
                # A lost connection is reported elsewhere; an advisory with a lost answer is looked up next.
                if self.client.is_up and not isinstance(error, OutcomeUnknown):
                    self._report.record_failure(error)
                await self.clock.sleep(self._backoff.next_delay())
            else:
                if not did_work:
                    await wait_for(self._wake, SEND_CHECK_INTERVAL_S)

    async def drain(self, timeout: float) -> None:
        deadline = self.clock.monotonic() + timeout
        while not (self._idle.is_set() or self._report.failing_code) and self.clock.monotonic() < deadline:
            await wait_for(self._idle, min(0.05, timeout))

    async def _step(self) -> bool:
        """Compare or send once. Return False if there is nothing to do."""
        outbox = self._outbox
        if outbox.doubtful and (self._is_reread_finished or not outbox.has_room):
            await self._resolve_doubtful(list(outbox.doubtful))
        elif batch := outbox.next_batch(self._batch_limit):
            await self._send(await self._drop_late(batch))
        else:
            return False
        self._backoff.reset()
        if not self._failed:
            self._report.record_recovery()
        return True

    async def _drop_late(self, advisories: list[Advisory]) -> list[Advisory]:
        late = await self._lateness.find_late(advisories)
        for advisory in late:
            self._remove(advisory, SendResult.STALE)
        return [each for each in advisories if each not in late]

    async def _send(self, batch: list[Advisory]) -> None:
        errors = await asyncio.gather(*map(self._send_one, batch))
        self._update_waiting()
        failures = [error for error in errors if error is not None]
        refused = sum(isinstance(error, Refused) for error in failures)
        self._batch_limit = PROBE_ADVISORIES if refused and refused == len(batch) else MAX_IN_FLIGHT
        if failures:
            raise failures[0]

    async def _send_one(self, advisory: Advisory) -> FloeError | None:
        """Send one advisory. Return the error if it may not be stored; None if it is stored or was dropped."""
        try:
            subject, payload, headers = self._build_message(advisory)
            answer, _ = await self.client.request_raw(subject, payload, headers, timeout=self.ack_timeout_s)
            self._remove(advisory, parse_ack(subject.decode(), answer))
        except FloeError as error:
            is_unknown = isinstance(error, OutcomeUnknown)
            self._report.count(advisory, SendResult.UNKNOWN if is_unknown else SendResult.FAILED)
            self._outbox.requeue(advisory, doubtful=is_unknown)
            self._failed.add(advisory)
            return error
        except ValueError as error:
            self._report.record_dropped(advisory, error)
            self._forget(advisory)
        return None

    # Doubtful advisories

    async def _resolve_doubtful(self, doubtful: list[Advisory]) -> None:
        advisories, wanted = await self._drop_late(doubtful), dict[str, Advisory]()
        for start in range(0, len(advisories), IDS_PER_TURN):
            some = advisories[start : start + IDS_PER_TURN]
            wanted |= {event_id(self.chain, each): each for each in some}
            await asyncio.sleep(0)  # lets reading continue
        if wanted:
            for event in await self._find_stored(wanted):
                self._remove(wanted.pop(event), SendResult.STORED)
        self._outbox.mark_not_stored(wanted.values())
        self._update_waiting()

    async def _find_stored(self, wanted: dict[str, Advisory]) -> set[str]:
        """Return the ids that are stored; empty if no stream is visible and readable. Raises Unavailable: retry."""
        subject, least_ns = subject_filter(self._template), min(each.event_time_ns for each in wanted.values())
        reason = f"no stream with {subject} is visible"
        try:
            found = await find_stored_ids(self.client, subject, set(wanted), least_ns)
        except (ApiError, Refused) as error:
            found, reason = None, error.message
        if found is None and self._is_compared:
            self._report.warn_not_compared(reason)
        self._is_compared = found is not None
        return found or set()

    # Outcomes

    def _remove(self, advisory: Advisory, result: SendResult) -> None:
        self._report.count(advisory, result)
        self._forget(advisory)

    def _forget(self, advisory: Advisory) -> None:
        self._outbox.remove(advisory)
        self._failed.discard(advisory)


def sender_class(partition: Partition) -> type[AdvisorySender]:
    return ReliableSender if partition.settings.advisory.reliable else AdvisorySender
