"""Segments to blocks of rows that may be published, in threads, one chunk at a time."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Protocol

import pyarrow as pa

from common.chain import Chain
from common.errors import Stopped
from common.segments.layout import SegmentName
from common.segments.reader import SegmentReader
from common.segments.schema import raw_size
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from common.service.threads import Threads
from ingress.checkpoints.intent import Piece
from ingress.rows.blocks import Block
from ingress.rows.budget import Budget
from ingress.rows.prepare import Prepared, Preparer
from ingress.rows.refusals import Oversize

# Of a chunk: its raw bytes (a single larger message is a chunk of its own) and its rows. Making Python
# objects of
# a column holds the interpreter, and a publisher that waits for an acknowledgement should not wait for that
# too.
CHUNK_BYTES = 4 * 1024 * 1024
CHUNK_ROWS = 2048

Emit = Callable[[Block], None]


class Parking(Protocol):
    """Who keeps the messages that are too large for the target (`ingress.parked.store.ParkedStore`)."""

    def park(self, chain: Chain, oversize: Oversize) -> None:
        """Return once the message is durable and read back. Blocking; the same one may be put again."""
        ...


class Decoder:
    """Opens segments and hands out their rows, ready to be published, as blocks.

    `parking`: where the messages go that a block leaves out, before the block is handed out.
    """

    def __init__(
        self, store: SegmentStore, threads: Threads, budget: Budget, parking: Parking | None = None
    ) -> None:
        self._store, self._threads, self._budget, self._parking = store, threads, budget, parking

    async def read(
        self, ref: SegmentRef, rows: SequenceRange, preparer: Preparer, emit: Emit, *, wait: bool = True
    ) -> Stopped | None:
        """Hand the rows `rows` of `ref` to `emit`, in blocks that together account for all of them.

        The bytes of a block are taken from the budget before it is decoded (with `wait` false:
        whatever is left) and belong to whoever got it. Returns the problem of the first row that
        must not be published, None if there is none. Raises SegmentCorrupt (blocks handed out
        before are good), SegmentGone, what the store raises, and what `emit` raises.
        """
        begin = rows.first
        async with self._open(ref, rows, preparer) as source:
            while (prepared := await self._next(source, wait)) is not None:
                if _has_rows(prepared):
                    begin = self._hand_out(_block(ref.segment, begin, prepared), emit)
                if prepared.problem is not None:
                    return prepared.problem
        if begin <= rows.last:
            self._budget.force(CHUNK_BYTES)
            self._hand_out(Block(Piece(ref.segment, SequenceRange(begin, rows.last), 0)), emit)
        return None

    def _hand_out(self, block: Block, emit: Emit) -> int:
        """The sequence behind the block, once its bytes belong to whoever took it."""
        self._budget.give(CHUNK_BYTES - block.size)
        try:
            emit(block)
        except BaseException:
            self._budget.give(block.size)
            raise
        return block.piece.rows.last + 1

    async def _next(self, source: _Source, wait: bool) -> Prepared | None:
        """The next rows, for which CHUNK_BYTES of the budget are then taken; None behind the last."""
        if wait:
            await self._budget.take(CHUNK_BYTES)
        else:
            self._budget.force(CHUNK_BYTES)
        prepared = None
        try:
            prepared = await self._threads.run(source.next)
        finally:
            if prepared is None or not _has_rows(prepared):
                self._budget.give(CHUNK_BYTES)
        return prepared

    @asynccontextmanager
    async def _open(self, ref: SegmentRef, rows: SequenceRange, preparer: Preparer) -> AsyncIterator[_Source]:
        source = _Source(self._store, ref, rows, preparer, self._parking)
        try:
            yield source
        finally:
            # In a thread, because it waits for a chunk that is being decoded for nobody any more.
            await self._threads.run(source.close)


def _has_rows(prepared: Prepared) -> bool:
    return prepared.material is not None or bool(prepared.left_out)


def _block(segment: SegmentName, begin: int, prepared: Prepared) -> Block:
    """The block from `begin` to the last row that is in it or left out of it."""
    material, left_out = prepared.material, prepared.left_out
    last = max([*left_out[-1:], *(material.sequences[-1:] if material else [])])
    count = len(material.sequences) if material else 0
    piece = Piece(segment, SequenceRange(begin, last), count, left_out)
    return Block(piece, material, material.size) if material else Block(piece)


class _Source:
    """One open segment, used by one thread at a time and closed when none uses it."""

    def __init__(
        self,
        store: SegmentStore,
        ref: SegmentRef,
        rows: SequenceRange,
        preparer: Preparer,
        parking: Parking | None,
    ) -> None:
        self._store, self._ref, self._rows, self._preparer = store, ref, rows, preparer
        self._parking = parking
        self._lock = threading.Lock()
        self._reader: SegmentReader | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._closed = False

    def next(self) -> Prepared | None:
        """The next rows; None behind the last."""
        with self._lock:
            if self._closed:
                return None
            if self._reader is None:
                self._reader = self._store.open(self._ref, rows=self._rows)
                self._batches = _chunked(self._reader.batches(self._rows))
            batch = next(self._batches, None)
            return None if batch is None else self._prepared(batch)

    def _prepared(self, batch: pa.RecordBatch) -> Prepared:
        prepared = self._preparer.prepare(batch)
        for oversize in prepared.oversize:
            assert self._parking is not None, "only who parks has messages to park"
            self._parking.park(self._ref.chain, oversize)
        return prepared

    def close(self) -> None:
        """Let go of the segment; `next` then gives None."""
        with self._lock:
            self._closed = True
            if self._reader is not None:
                self._reader.close()


def _chunked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield from _halved(batch)


def _halved(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    fits = batch.num_rows <= CHUNK_ROWS and raw_size(batch) <= CHUNK_BYTES
    if fits or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _halved(batch.slice(0, half))
    yield from _halved(batch.slice(half))
