"""Publishes advisories once, without asking whether anybody took them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from common.clock import Clock, wait_for
from common.errors import FloeError, Unavailable
from common.jetstream.client import FloeClient
from egress.advisories.event import Advisory
from egress.advisories.lateness import Lateness
from egress.advisories.message import Letters
from egress.advisories.outbox import LIMIT, WAVE
from egress.advisories.tally import Result, Tally

TICK = 0.5  # seconds between looks at what nobody wakes us for


class PlainSender:
    """Sends what it takes as soon as it can; drops it, and counts it, where the connection is down."""

    def __init__(
        self,
        client: FloeClient,
        letters: Letters,
        tally: Tally,
        lateness: Lateness,
        clock: Clock,
        may_send: Callable[[], bool],
    ) -> None:
        self._client, self._letters, self._tally = client, letters, tally
        self._lateness, self._clock, self._may_send = lateness, clock, may_send
        self._queue: deque[Advisory] = deque()
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    def take(self, advisories: Sequence[Advisory], *, doubtful: bool) -> None:
        """Send these too, unless they may have been sent already."""
        if doubtful:
            return
        room = LIMIT - len(self._queue)
        self._queue.extend(advisories[:room])
        for advisory in advisories[room:]:
            self._tally.count(advisory, Result.DROPPED)
        if self._queue:
            self._idle.clear()
        self._wake.set()

    def settle(self) -> None:
        """Nothing waits for it."""

    @property
    def has_room(self) -> bool:
        """Always: what does not fit is dropped."""
        return True

    def pending(self) -> tuple[Advisory, ...]:
        """Nothing is owed to anybody."""
        return ()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            while self._queue and self._may_send():
                await self._send([self._queue.popleft() for _ in range(min(WAVE, len(self._queue)))])
            if not self._queue:
                self._idle.set()
            await wait_for(self._wake, TICK)

    async def drain(self, timeout: float) -> None:
        """Return when nothing waits, or after `timeout` seconds."""
        await wait_for(self._idle, timeout)

    async def _send(self, wave: list[Advisory]) -> None:
        late = await self._late(wave)
        frames = {each: frame for each in wave if each not in late and (frame := self._frame(each))}
        try:
            self._client.send(b"".join(frames.values()))
            await self._client.flush_writes()
            result = Result.PUBLISHED
        except Unavailable:
            result = Result.DROPPED
        for advisory in frames:
            self._tally.count(advisory, result)
        for advisory in late:
            self._tally.count(advisory, Result.STALE)

    def _frame(self, advisory: Advisory) -> bytes:
        """Empty for what can never be sent."""
        try:
            return self._letters.message(advisory).checked(self._client.max_payload).frame()
        except ValueError as error:
            self._tally.refused(advisory, error)
            return b""

    async def _late(self, wave: list[Advisory]) -> set[Advisory]:
        try:
            return await self._lateness.late(wave)
        except FloeError:
            return set()
