"""A publisher that is held back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from common.clock import Clock, wait_for
from ingress.publishing.publisher import Outcome, Publisher
from ingress.replay.pace import Pace
from ingress.rows.rows import Ready, Rows

LOOK_AHEAD = 5_000  # messages that a pace is asked about at a time


class Interrupted(Exception):
    """The replay is to stop; its open intent is finished by whoever goes on."""


class PacedPublisher:
    """Sends as many of the rows as `pace` allows now, and waits where it allows none.

    Raises Interrupted once `stop` is set, so that a slow replay need not finish its intent first.
    """

    def __init__(self, inner: Publisher, pace: Pace, clock: Clock, stop: asyncio.Event) -> None:
        self.name = inner.name
        self._inner, self._pace, self._clock, self._stop = inner, pace, clock, stop

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        """As `Publisher.publish`, but returns after a part of the rows."""
        times, sizes = upcoming(rows, stored)
        while True:
            if self._stop.is_set():
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
    """Timestamps (ns) and sizes of the messages from index `start` on; some of them."""
    times: list[int] = []
    sizes: list[int] = []
    before = 0
    for block in rows.blocks:
        skip, before = max(0, start - before), before + block.piece.count
        material = block.material
        if material is None or skip >= len(material.sequences):
            continue
        times += material.timestamps_ns[skip:]
        ends = [0, *material.ends]
        sizes += [end - begin for begin, end in zip(ends[skip:], ends[skip + 1 :], strict=False)]
        if len(times) >= LOOK_AHEAD:
            break
    return times[:LOOK_AHEAD], sizes[:LOOK_AHEAD]
