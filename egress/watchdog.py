"""Does the chain move? A pure judge of what a session says of itself at each check.

- Something was received, passed or archived since the last check: it moves. Nothing waits: it moves.
- Messages wait in the stream, there is room for them, and nothing came for `patience` seconds: a stall that a
  fresh reader may heal.
- The same without room, because memory or advisories are held up: a stall; what holds them up is at fault.
- What was received is not archived `patience` seconds after its segment had to close: a stall; the store is
  at fault.

Only the first kind ends the session: what was received and not put is thrown away with it, and read again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.clock import Clock
from egress.doubt import DoubtError
from egress.report import FeedReport


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a session stands.

    `count`: messages received; `received`: the last sequence accounted for; `archived`: the last one put;
    `source`: the last one of the stream. `asks`: whether it may ask for more. `is_done`: whether it has
    received all that it is to read.
    """

    count: int
    received: int
    archived: int
    source: int
    asks: bool = True
    is_done: bool = False

    @property
    def waits(self) -> bool:
        """Whether the stream holds more to read."""
        return self.source > self.received and not self.is_done

    @property
    def is_open(self) -> bool:
        """Whether something was received and is not archived."""
        return self.received > self.archived


@dataclass(frozen=True, slots=True)
class Stall:
    """`since`: seconds without progress. `unread`: messages wait in the stream. `heals`: whether a fresh
    reader may help.
    """

    pending: str
    since: float
    unread: bool = False
    heals: bool = False


class Progress:
    """Compares each standing with the one before; `patience` and `segment_age` in seconds.

    `moves`: whether the last one showed progress, or nothing to do.
    """

    def __init__(self, patience: float, segment_age: float, now: float) -> None:
        self._patience, self._segment_age = patience, segment_age
        self._seen: Standing | None = None
        self.moves = False
        self._received_at = self._archived_at = now

    def judge(self, standing: Standing, now: float) -> Stall | None:
        """What holds the chain up at `now` (monotonic seconds); None while it moves or has nothing to do."""
        seen = self._seen
        if seen is None or _reading(standing) != _reading(seen) or not standing.waits:
            self._received_at = now
        if seen is None or standing.archived != seen.archived or not seen.is_open or not standing.is_open:
            self._archived_at = now
        self.moves = not (standing.waits or standing.is_open) or (
            standing.count > 0 if seen is None else _reading(standing) != _reading(seen)
        )
        self._seen = standing
        return self._unread(standing, now) or self._unarchived(standing, now)

    def excuse(self, standing: Standing, now: float) -> Stall | None:
        """What seemed to wait does not; whether something else holds the chain up."""
        self._received_at = now
        self.moves = not standing.is_open
        return self._unarchived(standing, now)

    def _unread(self, standing: Standing, now: float) -> Stall | None:
        since = now - self._received_at
        if since < self._patience:
            return None
        pending = f"sequences {standing.received + 1}..{standing.source} are not received"
        return Stall(pending, since, unread=True, heals=standing.asks)

    def _unarchived(self, standing: Standing, now: float) -> Stall | None:
        since = now - self._archived_at
        if since < self._segment_age + self._patience:
            return None
        pending = f"sequences {standing.archived + 1}..{standing.received} are received and not archived"
        return Stall(pending, since)


def _reading(standing: Standing) -> tuple[int, int, int]:
    # What was archived counts too: memory that is given back lets the reader ask again.
    return standing.count, standing.received, standing.archived


class Liveness:
    """Looks at one session at each of its checks, and tells its report.

    `waiting`: whether the stream holds a message of the feed at or after a sequence; asked only before a
    stall is told, because sequences alone may stand for nothing.
    """

    def __init__(
        self,
        patience: float,
        segment_age: float,
        waiting: Callable[[int], Awaitable[bool]],
        report: FeedReport,
        clock: Clock,
    ) -> None:
        self._progress = Progress(patience, segment_age, clock.monotonic())
        self._waiting, self._report, self._clock = waiting, report, clock

    async def look(self, standing: Standing) -> DoubtError | None:
        """Why the reader is to be given up; None where it is not. Raises what `waiting` raises."""
        now = self._clock.monotonic()
        stall = self._progress.judge(standing, now)
        if stall is not None and stall.unread and not await self._waiting(standing.received + 1):
            stall = self._progress.excuse(standing, now)
        if stall is None:
            if self._progress.moves:
                self._report.moves()
            return None
        self._report.stalled(stall.pending, stall.since)
        return DoubtError("stalled", f"{stall.pending} for {stall.since:.0f} s") if stall.heals else None
