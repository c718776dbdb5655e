"""How long until the source expires what is not archived: what an operator has when egress stands still.

By age: the time of the first message that waits, plus the stream's `max_age`, less the server's time. By
number and size, where the stream removes its oldest (`discard: old`): how far its first sequence is from what
waits, at the pace at which it rises. Limits by subject remove here and there, and are not foreseen; nor is
what other consumers of an interest stream or a work queue acknowledge.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.clock import NS_PER_S, Clock
from common.errors import FloeError
from common.jetstream.api import StreamInfo, next_message, parse_time, stream_info
from common.jetstream.client import FloeClient
from common.service.logs import get_logger
from egress.partition import Slice
from egress.report import FeedReport

log = get_logger("egress.expiry")

LOOKS = 10  # of the first sequence; the pace is taken from the oldest to the newest


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_age_ns`: 0 without one. `by_size`: whether a number or a size makes the stream drop its oldest."""

    max_age_ns: int = 0
    by_size: bool = False

    @classmethod
    def of(cls, config: dict[str, Any]) -> Limits:
        """Those of a stream's configuration as STREAM.INFO gives it."""
        limited = int(config.get("max_msgs", -1)) > 0 or int(config.get("max_bytes", -1)) > 0
        drops = config.get("discard", "old") == "old" and config.get("retention", "limits") == "limits"
        return cls(int(config.get("max_age", 0)), limited and drops)


def left_by_age(limits: Limits, waiting_since_ns: int, server_ns: int) -> float:
    """Seconds until a message of that time expires, not below 0; infinite without a limit."""
    if not limits.max_age_ns:
        return math.inf
    return max(0.0, (waiting_since_ns + limits.max_age_ns - server_ns) / NS_PER_S)


def left_by_size(limits: Limits, waiting: int, first: int, pace: float) -> float:
    """Seconds until the stream's first sequence has risen from `first` to above `waiting`, at `pace`
    sequences a second; infinite where it does not rise.
    """
    if not limits.by_size or pace <= 0:
        return math.inf
    return max(0.0, (waiting - first) / pace)


class Rise:
    """How fast the first sequence of a stream rises."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque(maxlen=LOOKS)

    def look(self, now: float, first: int) -> float:
        """Sequences a second up to `now` (monotonic seconds); 0 at the first look, or after a fall."""
        if self._looks and first < self._looks[-1][1]:
            self._looks.clear()
        self._looks.append((now, first))
        then, former = self._looks[0]
        return (first - former) / (now - then) if now > then else 0.0


class Expiry:
    """Looks every now and then, and tells the report. `position`: the first sequence not archived."""

    def __init__(self, part: Slice, client: FloeClient, report: FeedReport, clock: Clock) -> None:
        self._slice, self._client, self._report, self._clock = part, client, report, clock
        self._rise = Rise()
        self.position: Callable[[], int] | None = None

    async def run(self, every: float) -> None:
        """Look every `every` seconds until cancelled; what cannot be asked leaves the last answer standing,
        and its time running out.
        """
        while True:
            try:
                if self.position is not None:
                    self._tell(await self._left(self.position()))
            except FloeError as error:
                log.info("expiry not known", action="expiry_unknown", error=str(error))
            await self._clock.sleep(every)

    def _tell(self, left: float) -> None:
        """Time goes on while nobody can be asked."""
        at = self._clock.monotonic() + left
        self._report.expires(lambda: max(0.0, at - self._clock.monotonic()))

    async def _left(self, position: int) -> float:
        info = await stream_info(self._client, self._slice.stream)
        if info is None:
            return math.inf
        pace = self._rise.look(self._clock.monotonic(), info.first_sequence)
        limits = Limits.of(info.config)
        if limits == Limits() or position > info.last_sequence:
            return math.inf
        part = self._slice
        waiting = await next_message(self._client, part.stream, max(1, position), part.filter_subject)
        if waiting is None:
            return math.inf
        by_age = left_by_age(limits, waiting.timestamp_ns, self._server_ns(info))
        return min(by_age, left_by_size(limits, waiting.sequence, info.first_sequence, pace))

    def _server_ns(self, info: StreamInfo) -> int:
        """The server's time; this host's, where the server does not tell (before 2.10)."""
        return parse_time(info.time) if info.time else int(self._clock.now() * NS_PER_S)
