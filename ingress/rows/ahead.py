"""Rows that are decoded ahead of whoever publishes them, within a byte budget."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from common.tasks import Stop, first_of
from ingress.checkpoint import MAX_BYTES, MAX_LEFT_OUT, MAX_PIECES, MAX_ROWS
from ingress.rows.rows import Block, Rows


class ByteBudget:
    """At most `limit` bytes at a time, given out in the order they were asked for.

    What is larger than the limit is given out alone, so that a single huge message cannot block for ever.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
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


class DecodedAhead:
    """Blocks in the order in which they are published; `budget` holds their bytes until they are released.

    `memory_limit`: bytes; the rest is for what decoding needs beside the rows, for what is on the wire, and
    for what the allocator keeps. `max_rows`: of one intent.
    """

    def __init__(self, memory_limit: int, max_rows: int = MAX_ROWS) -> None:
        self.budget = ByteBudget(memory_limit // 4)
        self._max_rows, self._max_bytes = max_rows, min(MAX_BYTES, memory_limit // 8)
        self._blocks: deque[Block] = deque()
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Block]:
        return iter(tuple(self._blocks))

    def append(self, block: Block) -> None:
        """It is ready; its bytes are on the budget already."""
        self._blocks.append(block)
        self._changed.set()

    def wake(self) -> None:
        """Have whoever waits in `take` look again."""
        self._changed.set()

    async def take(self, stop: Stop, seconds: float) -> Rows | None:
        """Everything that is ready, as far as one intent holds it; None where `stop` is set, or nothing came
        in `seconds`.
        """
        if not self._blocks and not stop.is_set:
            self._changed.clear()
            await first_of(self._changed.wait(), stop.wait(), seconds=seconds)
        return None if stop.is_set or not self._blocks else Rows(list(self._taken()))

    def _taken(self) -> Iterator[Block]:
        rows = size = pieces = left_out = 0
        while self._blocks and pieces < MAX_PIECES:
            block = self._blocks[0]
            rows, size, pieces = rows + block.piece.count, size + block.size, pieces + 1
            left_out += len(block.piece.left_out)
            full = rows > self._max_rows or size > self._max_bytes or left_out > MAX_LEFT_OUT
            if pieces > 1 and full:
                return
            yield self._blocks.popleft()

    def release(self, rows: Rows) -> None:
        """Rows are done with: their memory may be used again."""
        self.budget.give(rows.size)

    def drop(self, is_dropped: Callable[[Block], bool] = lambda _: True) -> None:
        """Forget blocks that were not taken."""
        dropped = [block for block in self._blocks if is_dropped(block)]
        self._blocks = deque(block for block in self._blocks if not is_dropped(block))
        self.budget.give(sum(block.size for block in dropped))
