"""The pace of a replay: pure rate limits over a monotonic clock, and a publisher that keeps to them."""

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from common.clock import Clock
from common.errors import UsageError
from common.settings.types import parse_size
from common.tasks import Stop, wait_for
from ingress.publishers.publisher import Outcome, Publisher
from ingress.rows.rows import Rows

BURST_S = 0.25  # seconds of the rate that may be sent at once after a pause
MAX_WAIT_S = 0.5  # seconds until the next check of the pace


@dataclass
class Pace:
    """A token bucket of `rate` messages a second; with `counts_bytes`, of bytes of payloads and header blocks. One
    message may take it below zero, so that even a huge message can be sent.
    """

    rate: float
    counts_bytes: bool = False
    tokens: float = field(default=0.0, init=False)
    refilled_at: float | None = field(default=None, init=False)

    def admit(self, now: float, sizes: Sequence[int]) -> tuple[int, float]:
        """Return how many of the next messages may be sent at `now` (monotonic seconds); if none, also the seconds to
        wait. These messages count as sent. `sizes`: the bytes of each message, not empty.
        """
        costs = sizes if self.counts_bytes else [1] * min(len(sizes), int(self.rate * BURST_S) + 1)
        first, before = self.refilled_at is None, now if self.refilled_at is None else self.refilled_at
        self.tokens, self.refilled_at = min(self.rate * BURST_S, self.tokens + self.rate * (now - before)), now
        if self.tokens <= 0 and not first:
            return 0, min(MAX_WAIT_S, max(0.001, (min(1, self.rate * BURST_S) - self.tokens) / self.rate))
        count = max(1, bisect_right(list(accumulate(costs)), self.tokens))
        self.tokens -= sum(costs[:count])
        return count, 0.0


def pace_of(rate: str) -> Pace | None:
    """Return the pace of `--rate`; None: as fast as the target accepts. Raises UsageError."""
    if not rate:
        return None
    number, value = rate.removesuffix("/s"), 0
    with suppress(ValueError):
        value = parse_size(number)
    if not rate.endswith("/s") or value <= 0:
        raise UsageError(f"--rate: expected messages such as 5000/s or bytes such as 20M/s, found {rate!r:.40}")
    return Pace(value, counts_bytes=not number.isdigit())


ADMIT_MESSAGES = 5_000  # the most messages in one call of `Pace.admit`


class Interrupted(Exception):
    """The replay is to stop; the next run finishes its open intent."""


class PacedPublisher:
    """A publisher that sends as many of the rows as `pace` allows now, and waits if it allows none.

    Raises Interrupted once `stop` is set, so that a slow replay need not finish its intent first.
    """

    def __init__(self, inner: Publisher, pace: Pace, clock: Clock, stop: Stop) -> None:
        self._inner, self._pace, self._clock, self._stop = inner, pace, clock, stop

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        sizes = next_sizes(rows, stored)
        while True:
            if self._stop.is_set:
                raise Interrupted
            count, wait = self._pace.admit(self._clock.monotonic(), sizes)
            if count:
                return await self._inner.publish(rows.leading(stored + count), base, stored)
            await wait_for(self._stop, wait)

    async def aclose(self) -> None:
        await self._inner.aclose()


def next_sizes(rows: Rows, start: int) -> list[int]:
    """Return the bytes of each of the next messages, at most `ADMIT_MESSAGES` of them."""
    sizes = list[int]()
    for batch, row, end in rows.runs(start, min(rows.count, start + ADMIT_MESSAGES)):
        sizes += [after - before for before, after in pairwise([0, *batch.byte_ends][row : end + 1])]
    return sizes
