"""The byte budget that decoding ahead, waiting and being published share."""

from __future__ import annotations

import asyncio
from collections import deque


class Budget:
    """At most `limit` bytes at a time, given out in the order they were asked for.

    What is larger than the limit is given out alone, so that a single huge message cannot block for ever.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Wait until `size` bytes are free, and take them."""
        if not self._waiting and self._fits(size):
            self.used += size
            return
        waiting = (size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await waiting[1]
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._serve()
            else:
                self.give(size)
            raise

    def force(self, size: int) -> None:
        """Take `size` bytes whether or not they are free."""
        self.used += size

    def give(self, size: int) -> None:
        """Give back `size` bytes."""
        self.used -= size
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            self.used += size
            if not turn.done():
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return self.used <= 0 or self.used + size <= self.limit
