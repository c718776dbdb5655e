"""Pure check of the progress of a chain, from the state of its session at each check.

- Something was received, passed or archived since the last check: it moves. Nothing waits: it moves.
- Messages wait in the stream, there is room for them, and nothing came for `timeout` seconds: a stall that a
  fresh reader may heal.
- The same without room, because memory or advisories are held up: a stall; the cause is the part that holds them up.
- Messages received are not archived `timeout` seconds after their segment had to close: a stall; the store is
  the cause.

Only the first kind ends the session: messages that were received and not put are then discarded, and read again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from common.clock import NS_PER_S, Clock, parse_time, sleep_in_step
from common.errors import FloeError
from common.logs import get_logger
from common.nats.api import next_message, stream_info
from egress.consumers import ReaderResetError
from egress.deps import PartitionDeps
from egress.report import FeedReport

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SessionProgress:
    """State of a session at a check.

    `count`: messages received; `received`: the last sequence accounted for; `archived`: the last one put; `source`: the
    last one of the stream. `can_pull`: True if it may request more. `is_done`: True if it has received everything that
    it is to read.
    """

    count: int
    received: int
    archived: int
    source: int
    can_pull: bool = True
    is_done: bool = False

    @property
    def has_pending(self) -> bool:
        return self.source > self.received and not self.is_done

    @property
    def is_open(self) -> bool:
        return self.received > self.archived


@dataclass(frozen=True, slots=True)
class Stall:
    """Stall of a chain. `since`: seconds without progress. `unread`: messages wait in the stream. `is_healable`: True
    if a fresh reader may help.
    """

    pending: str
    since: float
    unread: bool = False
    is_healable: bool = False


class ProgressCheck:
    """Comparison of each session state with the one before; `timeout` and `segment_age` in seconds.

    `is_moving`: True if the last one showed progress, or nothing to do.
    """

    def __init__(self, timeout: float, segment_age: float, now: float) -> None:
        self._timeout, self._segment_age = timeout, segment_age
        self._seen: SessionProgress | None = None
        self.is_moving = False
        self._received_at = self._archived_at = now

    def judge(self, progress: SessionProgress, now: float) -> Stall | None:
        """Return the stall at `now` (monotonic seconds); None while the chain moves or has nothing to do."""
        if (seen := self._seen) is None or _reading(progress) != _reading(seen) or not progress.has_pending:
            self._received_at = now
        if seen is None or progress.archived != seen.archived or not seen.is_open or not progress.is_open:
            self._archived_at = now
        self.is_moving = not (progress.has_pending or progress.is_open) or (
            progress.count > 0 if seen is None else _reading(progress) != _reading(seen)
        )
        self._seen = progress
        return self._unread(progress, now) or self._unarchived(progress, now)

    def _unread(self, progress: SessionProgress, now: float) -> Stall | None:
        since = now - self._received_at
        if since < self._timeout:
            return None
        pending = f"sequences {progress.received + 1}..{progress.source} are not received"
        return Stall(pending, since, unread=True, is_healable=progress.can_pull)

    def _unarchived(self, progress: SessionProgress, now: float) -> Stall | None:
        since = now - self._archived_at
        if since < self._segment_age + self._timeout:
            return None
        pending = f"sequences {progress.archived + 1}..{progress.received} are received and not archived"
        return Stall(pending, since)


def _reading(progress: SessionProgress) -> tuple[int, int, int]:
    # Archiving counts too: memory that is released lets the reader request more.
    return progress.count, progress.received, progress.archived


class Liveness:
    """Check of the progress of one session, which updates its report.

    `has_message_from`: returns True if the stream holds a message of the feed at or after a sequence; called only
    before a stall is reported, because sequences alone may be without messages.
    """

    def __init__(
        self, check: ProgressCheck, has_message_from: Callable[[int], Awaitable[bool]], report: FeedReport, clock: Clock
    ) -> None:
        self._check, self._has_message_from, self._report, self._clock = check, has_message_from, report, clock

    async def check(self, progress: SessionProgress) -> ReaderResetError | None:
        """Return the reason to replace the reader; None if there is none. Raises the errors of `has_message_from`."""
        now = self._clock.monotonic()
        stall = self._check.judge(progress, now)
        if stall is not None and stall.unread and not await self._has_message_from(progress.received + 1):
            # No message waits after all; the chain may have another stall.
            stall = self._check.judge(replace(progress, source=progress.received), now)
        if stall is None:
            if self._check.is_moving:
                self._report.set_moving()
            return None
        self._report.set_stalled(stall.pending, stall.since)
        return ReaderResetError("stalled", f"{stall.pending} for {stall.since:.0f} s") if stall.is_healable else None


RATE_SAMPLES = 10  # samples of the first sequence; the pace is taken from the oldest to the newest


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits of a stream. `max_age_ns`: 0 without one. `by_size`: a number or a size makes it drop its oldest."""

    max_age_ns: int = 0
    by_size: bool = False

    @classmethod
    def of(cls, config: dict[str, Any]) -> StreamLimits:
        limited = int(config.get("max_msgs", -1)) > 0 or int(config.get("max_bytes", -1)) > 0
        drops = config.get("discard", "old") == "old" and config.get("retention", "limits") == "limits"
        return cls(int(config.get("max_age", 0)), limited and drops)


def seconds_left_by_age(limits: StreamLimits, waiting_since_ns: int, server_ns: int) -> float:
    """Return the seconds until a message of that time expires, at least 0; infinite without a limit."""
    if not limits.max_age_ns:
        return math.inf
    return max(0.0, (waiting_since_ns + limits.max_age_ns - server_ns) / NS_PER_S)


def seconds_left_by_size(limits: StreamLimits, waiting: int, first: int, rate: float) -> float:
    """Return the seconds until the stream's first sequence has risen from `first` to above `waiting`, at `rate`
    sequences per second; infinite if it does not rise.
    """
    if not limits.by_size or rate <= 0:
        return math.inf
    return max(0.0, (waiting - first) / rate)


class FirstSequenceRate:
    """Pace at which the first sequence of a stream rises."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=RATE_SAMPLES)

    def add_sample(self, now: float, first: int) -> float:
        """Return the sequences per second up to `now` (monotonic seconds); 0 for the first sample, or after a fall."""
        if self._samples and first < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, first))
        then, former = self._samples[0]
        return (first - former) / (now - then) if now > then else 0.0


class ExpiryEstimate:
    """Periodic estimate of the expiry, for the report. `position`: returns the first sequence not archived."""

    def __init__(self, deps: PartitionDeps) -> None:
        self._partition, self._client = deps.partition, deps.client
        self._report, self._clock, self._rate = deps.report, deps.clock, FirstSequenceRate()
        self.position: Callable[[], int] | None = None

    async def run(self, interval: float) -> None:
        """Estimate every `interval` seconds until cancelled. If the stream cannot be read, the last estimate remains,
        and its time runs out.
        """
        while True:
            try:
                if self.position is not None:
                    self._set(await self._seconds_left(self.position()))
            except FloeError as error:
                log.info("expiry check deferred", action="expiry_check_deferred", error=str(error))
            await sleep_in_step(self._clock, interval)

    def _set(self, left: float) -> None:
        at = self._clock.monotonic() + left
        self._report.set_expiry(lambda: max(0.0, at - self._clock.monotonic()))

    async def _seconds_left(self, position: int) -> float:
        if (info := await stream_info(self._client, self._partition.stream)) is None:
            return math.inf
        rate = self._rate.add_sample(self._clock.monotonic(), info.first_sequence)
        if (limits := StreamLimits.of(info.config)) == StreamLimits() or position > info.last_sequence:
            return math.inf
        partition = self._partition
        waiting = await next_message(self._client, partition.stream, max(1, position), partition.filter_subject)
        if waiting is None:
            return math.inf
        # This host's time, if the server's answer has none (before 2.10).
        server_ns = parse_time(info.time) if info.time else int(self._clock.now() * NS_PER_S)
        by_age = seconds_left_by_age(limits, waiting.timestamp_ns, server_ns)
        return min(by_age, seconds_left_by_size(limits, waiting.sequence, info.first_sequence, rate))
