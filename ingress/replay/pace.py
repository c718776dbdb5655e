"""How fast a replay goes: pure deciders over a monotonic clock."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from common.clock import Clock
from common.errors import UsageError
from common.settings.types import parse_size
from common.tasks import Stop, wait_for
from ingress.publishers.publisher import Outcome, Publisher
from ingress.rows.rows import Ready, Rows

BURST = 0.25  # seconds of the rate that may go at once after a pause
LONGEST_WAIT = 0.5  # seconds; then the question is asked again


@dataclass
class Pace:
    """A token bucket that one message may take below zero, so that a huge message is sent at all."""

    rate: float
    tokens: float = 0.0
    at: float | None = None

    def allowed(self, now: float, sizes: Sequence[int]) -> tuple[int, float]:
        """How many of the next messages, of so many bytes, may go at `now` (monotonic seconds); if none, how many
        seconds to wait. What is allowed counts as sent. `sizes` is not empty.
        """
        return self.take(now, sizes)

    def take(self, now: float, costs: Sequence[int]) -> tuple[int, float]:
        first, before = self.at is None, now if self.at is None else self.at
        self.tokens, self.at = min(self.rate * BURST, self.tokens + self.rate * (now - before)), now
        if self.tokens <= 0 and not first:
            return 0, min(LONGEST_WAIT, max(0.001, (min(1, self.rate * BURST) - self.tokens) / self.rate))
        count = max(1, bisect_right(list(accumulate(costs)), self.tokens))
        self.tokens -= sum(costs[:count])
        return count, 0.0


class MessageRate(Pace):
    """At most `rate` messages a second."""

    def allowed(self, now: float, sizes: Sequence[int]) -> tuple[int, float]:
        return self.take(now, [1] * min(len(sizes), int(self.rate * BURST) + 1))


class ByteRate(Pace):
    """At most `rate` bytes a second, of payloads and header blocks."""


def pace_of(rate: str) -> Pace | None:
    """The pace of `--rate`; None: as fast as the target takes. Raises UsageError."""
    if not rate:
        return None
    number, value = rate.removesuffix("/s"), 0
    with suppress(ValueError):
        value = parse_size(number)
    if not rate.endswith("/s") or value <= 0:
        raise UsageError(f"--rate: expected messages such as 5000/s or bytes such as 20M/s, found {rate!r:.40}")
    return MessageRate(value) if number.isdigit() else ByteRate(value)


LOOK_AHEAD = 5_000  # messages that a pace is asked about at a time


class Interrupted(Exception):
    """The replay is to stop; the next run finishes its open intent."""


class PacedPublisher:
    """Sends as many of the rows as `pace` allows now, and waits where it allows none.

    Raises Interrupted once `stop` is set, so that a slow replay need not finish its intent first.
    """

    def __init__(self, inner: Publisher, pace: Pace, clock: Clock, stop: Stop) -> None:
        self.name = inner.name
        self._inner, self._pace, self._clock, self._stop = inner, pace, clock, stop

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        sizes = upcoming(rows, stored)
        while True:
            if self._stop.is_set:
                raise Interrupted
            count, wait = self._pace.allowed(self._clock.monotonic(), sizes)
            if count:
                return await self._inner.publish(Head(rows, stored + count), base, stored)
            await wait_for(self._stop, wait)

    async def aclose(self) -> None:
        await self._inner.aclose()


class Head(Rows):
    """The messages of `rows` up to index `count` (exclusive)."""

    def __init__(self, rows: Rows, count: int) -> None:
        super().__init__(rows.blocks)
        self.count = min(count, rows.count)

    def messages(self, start: int, stop: int) -> Iterator[Ready]:
        return super().messages(start, min(stop, self.count))

    def stop(self, start: int, most: int, most_bytes: int) -> int:
        return min(self.count, super().stop(start, most, most_bytes))


def upcoming(rows: Rows, start: int) -> list[int]:
    """Bytes of the next messages."""
    sizes: list[int] = []
    before = 0
    for block in rows.blocks:
        skip, before = max(0, start - before), before + block.piece.count
        if (batch := block.batch) is None or skip >= len(batch.sequences):
            continue
        ends = [0, *batch.ends]
        sizes += [end - begin for begin, end in zip(ends[skip:], ends[skip + 1 :], strict=False)]
        if len(sizes) >= LOOK_AHEAD:
            break
    return sizes[:LOOK_AHEAD]
