"""The outbox of advisories that are not stored yet: which to send now, which are late, which are stored already.

A doubtful advisory may have been sent already: by a process that ended, or by this one, which lost the answer.
It is not sent before it has been looked up in the stream, and neither are those behind it for the same value.
"""

import json
from collections.abc import Collection, Iterable
from contextlib import aclosing
from enum import StrEnum
from itertools import chain, islice

from common.chain import Chain
from common.clock import NS_PER_S, Clock, parse_time
from common.errors import FloeError, OutcomeUnknown, Refused, Unavailable
from common.logs import get_logger
from common.metrics import show_zeros
from common.nats.api import query, stream_info
from common.nats.client import FloeClient
from common.nats.headers import header_value
from common.nats.pull import PullLimits, StartAt, scan
from common.nats.requests import NO_RESPONDERS_CODE, ApiError, api_answer
from egress import metrics
from egress.advisories.advisory import Advisory, AdvisoryEvent, subject_filter

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

    The times of advisories are times of messages, which the server set: a host with a fast clock must not drop them.
    """

    def __init__(self, client: FloeClient, stream: str, duration_ns: int, clock: Clock) -> None:
        self._client, self._stream, self._clock, self._duration_ns = client, stream, clock, duration_ns
        self._clock_lead_ns, self._read_at = 0, float("-inf")

    async def find_late(self, advisories: list[Advisory]) -> set[Advisory]:
        """Return the late ones. Raises Unavailable if the server's time is needed and the server does not answer."""
        if (late := self._select_late(advisories)) and self._clock.monotonic() - self._read_at > SERVER_TIME_INTERVAL_S:
            await self._read_server_time()
            late = self._select_late(advisories)
        return late

    def _select_late(self, advisories: list[Advisory]) -> set[Advisory]:
        now_ns = self._now_ns() - self._clock_lead_ns
        return {each for each in advisories if is_late(each, now_ns, self._duration_ns)}

    async def _read_server_time(self) -> None:
        try:
            info = await stream_info(self._client, self._stream)
        except (ApiError, Refused):
            info = None
        # A server before 2.10 does not report its time: this host's is used instead.
        server_ns = parse_time(info.time) if info is not None and info.time else self._now_ns()
        self._clock_lead_ns, self._read_at = self._now_ns() - server_ns, self._clock.monotonic()

    def _now_ns(self) -> int:
        return int(self._clock.now() * NS_PER_S)


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
        # The consumer may be on a replica that lags: it must pass the last sequence of the leader.
        last = info.last_sequence
        pieces = scan(client, name, start, until=last, subject=subject, headers_only=True, limits=limits)
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
                add = f"nats stream add NAME --subjects '{subject_filter(self._template)}' --defaults"
                hint = f"create one, and sending continues by itself: {add}"
            log.error(
                "advisories not stored",
                action="advisories_failed",
                code=ERROR_CODE,
                error=reason,
                hint=hint,
                **self._chain.log_context(),
            )

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
        log.error(
            "advisory dropped",
            action="advisory_dropped",
            code=ERROR_CODE,
            error=str(error),
            value=advisory.value[:200],
            **self._chain.log_context(),
        )


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
