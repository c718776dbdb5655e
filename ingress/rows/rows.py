"""Rows that are checked and ready for the wire, held ahead of the publisher within a byte budget."""

import asyncio
import bisect
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from typing import Any

from common.chain import Chain
from common.clock import NS_PER_S
from common.tasks import Stop, first_of
from ingress import checkpoint
from ingress.checkpoint import IntentPiece, merge_pieces

# One message in the form that the publisher needs: subject, its header block after the publisher's own lines, and a
# view of its payload, because a copy would cost as much as everything else.
WireMessage = tuple[bytes, bytes, memoryview]

# Memory of a message besides its bytes, and of a block besides its messages.
ROW_OVERHEAD_BYTES = 96
BLOCK_OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """The messages of one block, column by column, in sequence order.

    `subjects`: those of the target, checked. `origin`: the `Floe-Source` line up to the sequence. `header_tails`: for
    rows with a header block of their own, everything after the publisher's lines; None if no row has one. `payloads`: a
    binary array. `byte_ends`: for each row, the bytes of payloads and header blocks up to and including it.
    `header_end`: the end of the header block of rows without one of their own. `largest_message_bytes`: bytes of the
    largest row.
    """

    sequences: list[int]
    timestamps_ns: list[int]
    subjects: list[bytes]
    origin: bytes
    header_tails: list[bytes | None] | None
    payloads: Any
    byte_ends: list[int]
    header_end: bytes = b"\r\n\r\n"
    largest_message_bytes: int = 0

    @property
    def size(self) -> int:
        """Bytes in memory, approximately."""
        return self.byte_ends[-1] + ROW_OVERHEAD_BYTES * len(self.byte_ends) + BLOCK_OVERHEAD_BYTES

    def messages(self, start: int, stop: int) -> Iterator[WireMessage]:
        """Yield rows `start` to `stop` (exclusive)."""
        rows = zip(
            self.subjects[start:stop],
            self.sequences[start:stop],
            self.timestamps_ns[start:stop],
            repeat(None) if self.header_tails is None else self.header_tails[start:stop],
            views(self.payloads[start:stop]),
            strict=False,
        )
        origin, end = self.origin, self.header_end
        for subject, sequence, timestamp_ns, tail, payload in rows:
            yield subject, tail or b"%b%d %d%b" % (origin, sequence, timestamp_ns, end), payload


def views(values: Any) -> list[memoryview]:
    _, ends, data = values.buffers()
    offsets = memoryview(ends).cast("i")[values.offset : values.offset + len(values) + 1]
    everything = memoryview(b"" if data is None else data)
    return [everything[begin:end] for begin, end in pairwise(offsets.tolist())]


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a chain with its messages. `batch`: None if none are in memory. `size`: bytes in memory."""

    piece: IntentPiece
    batch: PreparedBatch | None = None
    size: int = BLOCK_OVERHEAD_BYTES


@dataclass(slots=True)
class Rows:
    """The messages of an intent: blocks in order, addressed by one index from 0."""

    blocks: Sequence[Block]
    _starts: list[int] = field(init=False)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        *self._starts, self.count = accumulate((block.piece.count for block in self.blocks), initial=0)

    def leading(self, count: int) -> "Rows":
        """Return the messages up to index `count` (exclusive)."""
        found = Rows(self.blocks)
        found.count = min(count, self.count)
        return found

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def largest_message_bytes(self) -> int:
        """Bytes of the largest message in memory."""
        return max((block.batch.largest_message_bytes for block in self.blocks if block.batch), default=0)

    def first_times(self) -> dict[Chain, float]:
        """Return the time at which the source's first message of each chain was published, in seconds since 1970."""
        found: dict[Chain, float] = {}
        for block in self.blocks:
            if block.batch is not None and block.batch.timestamps_ns:
                found.setdefault(block.piece.chain, block.batch.timestamps_ns[0] / NS_PER_S)
        return found

    @property
    def message_bytes(self) -> int:
        """Bytes of payloads and header blocks of the messages in memory."""
        return sum(block.batch.byte_ends[-1] for block in self.blocks if block.batch)

    def first_above(self, limit: int, start: int) -> tuple[Chain, int, int] | None:
        """Return chain, sequence and bytes of the first message above `limit` from index `start` on, or None."""
        for block, begin in zip(self.blocks, self._starts, strict=True):
            if block.batch is None or block.batch.largest_message_bytes <= limit:
                continue
            for row, (before, end) in enumerate(pairwise([0, *block.batch.byte_ends])):
                if end - before > limit and begin + row >= start:
                    return block.piece.chain, block.batch.sequences[row], end - before
        return None

    def pieces(self) -> list[IntentPiece]:
        return merge_pieces([block.piece for block in self.blocks])

    def sequence(self, index: int) -> int | None:
        """Return the sequence, in its chain, of message `index`; None if it is not in memory. Raises IndexError."""
        batch, row = self._block_at(index)
        return None if batch is None else batch.sequences[row]

    def messages(self, start: int, stop: int) -> Iterator[WireMessage]:
        """Yield messages `start` to `stop` (exclusive, at most `count`)."""
        for batch, row, end in self.runs(start, stop):
            yield from batch.messages(row, end)

    def runs(self, start: int, stop: int) -> Iterator[tuple[PreparedBatch, int, int]]:
        """Yield the batches that hold messages `start` to `stop` (exclusive), with the first row and the one after."""
        while start < stop:
            batch, row = self._batch_at(start)
            end = min(row + stop - start, len(batch.sequences))
            yield batch, row, end
            start += end - row

    def batch_end(self, start: int, max_messages: int, max_bytes: int) -> int:
        """Return the end of a batch that begins at `start`: at most `max_messages` and `max_bytes`, at least one."""
        stop, left = start, max_bytes
        while stop < min(self.count, start + max_messages):
            block, row = self._batch_at(stop)
            before = block.byte_ends[row - 1] if row else 0
            fits = bisect.bisect_right(block.byte_ends, before + left, row) - row
            taken = min(fits, start + max_messages - stop)
            stop += taken
            if row + taken < len(block.byte_ends):
                break
            left -= block.byte_ends[-1] - before
        return max(min(stop, self.count), start + 1)

    def _batch_at(self, index: int) -> tuple[PreparedBatch, int]:
        batch, row = self._block_at(index)
        assert batch is not None, "only messages that are not stored yet are asked for"
        return batch, row

    def _block_at(self, index: int) -> tuple[PreparedBatch | None, int]:
        if not 0 <= index < self.count:
            raise IndexError(f"message {index} of {self.count}")
        place = bisect.bisect_right(self._starts, index) - 1
        return self.blocks[place].batch, index - self._starts[place]


class ByteBudget:
    """Budget of `limit` bytes at a time, granted in the order of the requests.

    A request larger than the limit is granted alone, so that a single huge message cannot block forever.
    `oversize_lock`: the lock that is held while more than the limit is decoded; shared by the budgets of a process
    (None: its own).
    """

    def __init__(self, limit: int, oversize_lock: asyncio.Lock | None = None) -> None:
        self.limit, self.used, self._oversize_lock = limit, 0, oversize_lock or asyncio.Lock()
        self._turn, self._released = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def reserve_for_decoding(self, size: int, *, wait: bool) -> AsyncIterator[None]:
        """Hold `size` bytes within the block: taken before it with `wait`, forced without.

        Only one decoding above the limit runs in the process at a time. Nothing in the block may wait for others.
        """
        if wait and size:
            await self.acquire(size)
        else:
            self.acquire_unchecked(size)
        try:
            async with self._oversize_lock if size > self.limit else nullcontext():
                yield
        finally:
            self.release(size)

    async def acquire(self, size: int) -> None:
        async with self._turn:  # in the order of the requests
            while self.used > 0 and self.used + size > self.limit:
                self._released.clear()
                await self._released.wait()
            self.used += size

    def acquire_unchecked(self, size: int) -> None:
        """Take `size` bytes, even if they are not free."""
        self.used += size

    def release(self, size: int) -> None:
        self.used -= size
        self._released.set()


class ReadyBlocks:
    """Blocks in the order in which they are published; `budget` holds their bytes until they are released.

    `memory_limit`: bytes; half of it is for rows and the memory that decodes them, a quarter for segments that stay
    open between turns, the rest for bytes in flight and the allocator's reserve. `max_rows`: of one intent.
    `oversize_lock`: as in `ByteBudget`.
    """

    def __init__(
        self, memory_limit: int, max_rows: int = checkpoint.MAX_INTENT_ROWS, oversize_lock: asyncio.Lock | None = None
    ) -> None:
        self.budget, self._max_rows = ByteBudget(memory_limit // 2, oversize_lock), max_rows
        self._blocks: deque[Block] = deque()
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Block]:
        return iter(tuple(self._blocks))

    def resize(self, memory_limit: int) -> None:
        """Divide another limit from now on."""
        self.budget.limit = memory_limit // 2

    def append(self, block: Block) -> None:
        """Append a block. Its bytes must be on the budget already."""
        self._blocks.append(block)
        self._changed.set()

    def wake(self) -> None:
        self._changed.set()

    async def take(self, stop: Stop, seconds: float) -> Rows | None:
        """Return ready blocks, at most those of one intent; None if `stop` is set, or nothing arrives in `seconds`."""
        if not self._blocks and not stop.is_set:
            self._changed.clear()
            await first_of(self._changed.wait(), stop.wait(), seconds=seconds)
        return None if stop.is_set or not self._blocks else Rows(list(self._next_blocks()))

    def _next_blocks(self) -> Iterator[Block]:
        rows = size = pieces = left_out = 0
        max_bytes = min(checkpoint.MAX_INTENT_BYTES, self.budget.limit // 4)
        while self._blocks and pieces < checkpoint.MAX_INTENT_PIECES:
            block = self._blocks[0]
            rows, size, pieces = rows + block.piece.count, size + block.size, pieces + 1
            left_out += len(block.piece.parked)
            full = rows > self._max_rows or size > max_bytes or left_out > checkpoint.MAX_INTENT_PARKED
            if pieces > 1 and full:
                return
            yield self._blocks.popleft()

    def release(self, rows: Rows) -> None:
        self.budget.release(rows.size)

    def drop(self, is_dropped: Callable[[Block], bool] = lambda _: True) -> None:
        dropped = [block for block in self._blocks if is_dropped(block)]
        self._blocks = deque(block for block in self._blocks if not is_dropped(block))
        self.budget.release(sum(block.size for block in dropped))
