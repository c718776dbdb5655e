"""How fast a replay goes: pure deciders over a monotonic clock."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from common.clock import NS_PER_S, Clock
from common.errors import UsageError
from common.settings.types import parse_size
from common.tasks import Stop, wait_for
from ingress.publishers.publisher import Outcome, Publisher
from ingress.rows.rows import Ready, Rows

BURST = 0.25  # seconds of the rate that may go at once after a pause
LONGEST_WAIT = 0.5  # seconds; then the question is asked again


class Pace(Protocol):
    """Decides how many of the next messages may go."""

    def allowed(self, now: float, times_ns: Sequence[int], sizes: Sequence[int]) -> tuple[int, float]:
        """How many of the next messages may go at `now` (monotonic seconds); if none, how many seconds to wait.

        What is allowed counts as sent. `times_ns` and `sizes` are of equal length, not empty.
        """


@dataclass
class _Bucket:
    """A token bucket that one message may take below zero, so that a huge message is sent at all."""

    rate: float
    tokens: float = 0.0
    at: float | None = None

    def take(self, now: float, costs: Sequence[int]) -> tuple[int, float]:
        first, before = self.at is None, now if self.at is None else self.at
        self.tokens, self.at = min(self.rate * BURST, self.tokens + self.rate * (now - before)), now
        if self.tokens <= 0 and not first:
            return 0, min(LONGEST_WAIT, max(0.001, (min(1, self.rate * BURST) - self.tokens) / self.rate))
        count = max(1, bisect_right(list(accumulate(costs)), self.tokens))
        self.tokens -= sum(costs[:count])
        return count, 0.0


class MessageRate(_Bucket):
    """At most `rate` messages a second."""

    def allowed(self, now: float, times_ns: Sequence[int], sizes: Sequence[int]) -> tuple[int, float]:  # noqa: ARG002
        return self.take(now, [1] * min(len(times_ns), int(self.rate * BURST) + 1))


class ByteRate(_Bucket):
    """At most `rate` bytes a second, of payloads and header blocks."""

    def allowed(self, now: float, times_ns: Sequence[int], sizes: Sequence[int]) -> tuple[int, float]:  # noqa: ARG002
        return self.take(now, sizes)


class Speed:
    """The original time between messages, divided by `factor`, from the first message on."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._anchor: tuple[float, int] | None = None

    def allowed(self, now: float, times_ns: Sequence[int], sizes: Sequence[int]) -> tuple[int, float]:  # noqa: ARG002
        if self._anchor is None:
            self._anchor = (now, times_ns[0])
        begun, first_ns = self._anchor
        reached = first_ns + (now - begun) * self._factor * NS_PER_S
        # A message that is older than the one before it goes together with it.
        newest = list(accumulate(times_ns, max))
        if count := bisect_right(newest, reached):
            return count, 0.0
        return 0, min(LONGEST_WAIT, (newest[0] - reached) / NS_PER_S / self._factor + 0.001)


@dataclass(frozen=True, slots=True)
class Both:
    """As many as both allow: a rate that must not be exceeded, at a speed."""

    speed: Pace
    rate: Pace

    def allowed(self, now: float, times_ns: Sequence[int], sizes: Sequence[int]) -> tuple[int, float]:
        count, wait = self.speed.allowed(now, times_ns, sizes)
        return self.rate.allowed(now, times_ns[:count], sizes[:count]) if count else (0, wait)


def pace_of(rate: str, speed: str) -> Pace | None:
    """The pace of `--rate` and `--speed`; None: as fast as the target takes. Raises UsageError."""
    paces = [pace for pace in (_speed(speed), _rate(rate)) if pace is not None]
    return Both(*paces) if len(paces) == 2 else next(iter(paces), None)


def paced_words(rate: str, speed: str) -> tuple[str, ...]:
    found = [f"--rate={rate}"] if rate else []
    return (*found, f"--speed={speed}") if speed != "max" else tuple(found)


def _speed(text: str) -> Pace | None:
    if text == "max":
        return None
    if not (match := re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)x", text)) or float(match[1]) <= 0:
        raise UsageError(f"--speed: expected max or a factor such as 1x or 10x, found {text!r:.40}")
    return Speed(float(match[1]))


def _rate(text: str) -> Pace | None:
    if not text:
        return None
    number, value = text.removesuffix("/s"), 0
    with suppress(ValueError):
        value = parse_size(number)
    if not text.endswith("/s") or value <= 0:
        raise UsageError(f"--rate: expected messages such as 5000/s or bytes such as 20M/s, found {text!r:.40}")
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
        times, sizes = upcoming(rows, stored)
        while True:
            if self._stop.is_set:
                raise Interrupted
            count, wait = self._pace.allowed(self._clock.monotonic(), times, sizes)
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


def upcoming(rows: Rows, start: int) -> tuple[list[int], list[int]]:
    times: list[int] = []
    sizes: list[int] = []
    before = 0
    for block in rows.blocks:
        skip, before = max(0, start - before), before + block.piece.count
        if (batch := block.batch) is None or skip >= len(batch.sequences):
            continue
        times += batch.timestamps_ns[skip:]
        ends = [0, *batch.ends]
        sizes += [end - begin for begin, end in zip(ends[skip:], ends[skip + 1 :], strict=False)]
        if len(times) >= LOOK_AHEAD:
            break
    return times[:LOOK_AHEAD], sizes[:LOOK_AHEAD]
