"""Segments to blocks of rows that may be published, in threads, one chunk at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import pyarrow as pa

from common.chain import Chain
from common.errors import Stopped, Unavailable
from common.segments.columns import raw_size
from common.segments.documents import ChainDocument, ChainStore
from common.segments.keys import SegmentName
from common.segments.reader import SegmentReader
from common.segments.segment import Reason, SegmentRef
from common.segments.store import SegmentStore
from common.segments.unread import NOTHING, StretchReader, UnreadPart, open_stretch
from common.sequences import SequenceRange, Stretch, holes
from common.service.process import Threads
from ingress.checkpoint import IntentPiece
from ingress.rows.prepare import Oversize, Prepared, Preparer
from ingress.rows.rows import Block, ByteBudget

# Of a chunk: its raw bytes (a single larger message is a chunk of its own) and its rows. Making
# Python objects of a column holds the interpreter, and a publisher that waits for an acknowledgement should not
# also wait for that.
CHUNK_BYTES = 4 * 1024 * 1024
CHUNK_ROWS = 2048

Emit = Callable[[Block], None]
# Keeps a message that is too large for the target (`ParkedStore.park`). Blocking; the same one may be put again.
Park = Callable[[Chain, Oversize], None]


@dataclass(frozen=True, slots=True)
class FromHole:
    """A filled hole in which messages are still missing that may have been archived once.

    `rows`: what `segment` does not completely have; `missing`: how many of them no segment has. `known`: keys of the
    segments that were looked into.
    """

    segment: SegmentRef
    rows: SequenceRange
    missing: int
    known: frozenset[str]


class FromHoleError(Exception):
    """Rows were handed out up to where `found` begins, and no further."""

    def __init__(self, found: FromHole) -> None:
        super().__init__(str(found.rows))
        self.found = found


def standing_in(
    store: SegmentStore, stretch: Stretch[SegmentRef], avoided: AbstractSet[str], passed: Sequence[SequenceRange]
) -> FromHole | None:
    """Where ingress stands in the stretch because a hole was filled in part; None where it does not.

    `avoided`, `passed`: as in `Decoder.read`. Reads the footer, and more only where that says that something is gone.
    Blocking; raises as `open_stretch`, and E-FORK.
    """
    if not store.footer(stretch.segment).ledger.counts.get(Reason.GONE_FROM_HOLE):
        return None
    with open_stretch(store, stretch, avoided=avoided) as reader:
        return _standing(reader, stretch, avoided, passed)


def _standing(
    reader: StretchReader, stretch: Stretch[SegmentRef], avoided: AbstractSet[str], passed: Sequence[SequenceRange]
) -> FromHole | None:
    """Where rows of a filled hole are missing that no operator has given up; None where none are."""
    if reader.unread is None or not reader.footer.ledger.counts.get(Reason.GONE_FROM_HOLE):
        return None
    for left in holes(passed, reader.unread):
        if missing := reader.still_missing(left):
            known = {stretch.segment.key, *avoided, *(other.key for other in reader.others)}
            return FromHole(stretch.segment, left, missing, frozenset(known))
    return None


class Decoder:
    """Opens segments and hands out their rows, ready to be published, as blocks.

    A block names the segment that its rows are of. Other segments may hold what a segment did not read, and an open
    intent is finished from the segments that it names, whatever has been added since.

    `park`: stores the messages that a block leaves out, before the block is handed out.
    """

    def __init__(self, store: SegmentStore, threads: Threads, budget: ByteBudget, park: Park | None = None) -> None:
        self._store, self._threads, self._budget, self._park = store, threads, budget, park

    async def read(
        self,
        ref: SegmentRef,
        rows: SequenceRange,
        preparer: Preparer,
        emit: Emit,
        *,
        wait: bool = True,
        alone: bool = False,
        avoided: AbstractSet[str] = NOTHING,
        passed: Sequence[SequenceRange] | None = None,
    ) -> Stopped | None:
        """Hand the rows `rows` of `ref` to `emit`, in blocks that together account for all of them.

        Rows that `ref` did not read are taken from other segments, except those whose keys are `avoided`; `alone`:
        only its own rows. `passed`: what is given up of filled holes (None: all). FromHoleError is raised where
        something else of a filled hole is missing.

        The bytes of a block are taken from the budget before it is decoded (with `wait` false: as much as is left)
        and then belong to the receiver of the block. Returns the problem of the first row that must not be published,
        None if there is none. Raises SegmentCorrupt (blocks handed out before are good), SegmentGone, what the store
        raises, and what `emit` raises.
        """
        begin = rows.first
        source = _Source(self._store, Stretch(ref, rows), preparer, self._park, alone, avoided, passed)
        try:
            while (chunk := await self._next(source, wait)) is not None:
                part, prepared = chunk
                if prepared.has_rows:
                    begin = self._account(ref, begin, part.since - 1, emit)
                    begin = self._hand_out(_block(part.segment.segment, begin, prepared), emit)
                if prepared.problem is not None:
                    return prepared.problem
        finally:
            # In a thread, because it waits for a chunk that is still being decoded and is not needed any more.
            await self._threads.run(source.close)
        stands = source.stands
        self._account(ref, begin, rows.last if stands is None else stands.rows.first - 1, emit)
        if stands is not None:
            raise FromHoleError(stands)
        return None

    def _account(self, ref: SegmentRef, begin: int, last: int, emit: Emit) -> int:
        if begin > last:
            return begin
        self._budget.force(CHUNK_BYTES)
        return self._hand_out(Block(IntentPiece(ref.segment, SequenceRange(begin, last), 0)), emit)

    def _hand_out(self, block: Block, emit: Emit) -> int:
        self._budget.give(CHUNK_BYTES - block.size)
        try:
            emit(block)
        except BaseException:
            self._budget.give(block.size)
            raise
        return block.piece.rows.last + 1

    async def _next(self, source: _Source, wait: bool) -> tuple[UnreadPart, Prepared] | None:
        """The next rows, for which CHUNK_BYTES of the budget are then taken; None behind the last."""
        if wait:
            await self._budget.take(CHUNK_BYTES)
        else:
            self._budget.force(CHUNK_BYTES)
        chunk = None
        try:
            chunk = await self._threads.run(source.next)
        finally:
            if chunk is None or not chunk[1].has_rows:
                self._budget.give(CHUNK_BYTES)
        return chunk


def _block(segment: SegmentName, begin: int, prepared: Prepared) -> Block:
    batch, left_out = prepared.batch, prepared.left_out
    sequences = batch.sequences if batch else []
    rows = SequenceRange(begin, max([*left_out[-1:], *sequences[-1:]]))
    piece = IntentPiece(segment, rows, len(sequences), left_out)
    return Block(piece, batch, batch.size) if batch else Block(piece)


class _Source:
    """One stretch, used by one thread at a time and closed when no thread uses it; the fields as in `Decoder.read`.

    `stands`: where its rows end before the stretch does, as far as they are read.
    """

    def __init__(
        self,
        store: SegmentStore,
        stretch: Stretch[SegmentRef],
        preparer: Preparer,
        park: Park | None,
        alone: bool,
        avoided: AbstractSet[str],
        passed: Sequence[SequenceRange] | None,
    ) -> None:
        self._store, self._stretch, self._preparer, self._park = store, stretch, preparer, park
        self._alone, self._avoided, self._passed = alone, avoided, passed
        self._lock, self._closed = threading.Lock(), False
        self._reader: SegmentReader | StretchReader | None = None
        self._parts: Iterator[UnreadPart] = iter(())
        self.stands: FromHole | None = None

    def next(self) -> tuple[UnreadPart, Prepared] | None:
        with self._lock:
            if self._closed:
                return None
            if self._reader is None:
                parts = self._open()
                self._parts = (
                    UnreadPart(part.segment, part.since, batch) for part in parts for batch in _halved(part.batch)
                )
            if (part := next(self._parts, None)) is None:
                return None
            prepared = self._preparer.prepare(part.batch)
            for oversize in prepared.oversize:
                assert self._park is not None, "only who parks has messages to park"
                self._park(part.segment.chain, oversize)
            return part, prepared

    def _open(self) -> Iterator[UnreadPart]:
        segment, rows = self._stretch.segment, self._stretch.rows
        if self._alone:
            self._reader = own = self._store.open(segment, rows=rows)
            return (UnreadPart(segment, rows.first, batch) for batch in own.batches(rows))
        self._reader = reader = open_stretch(self._store, self._stretch, avoided=self._avoided)
        if self._passed is not None:
            self.stands = _standing(reader, self._stretch, self._avoided, self._passed)
        if self.stands is None:
            return reader.parts()
        if self.stands.rows.first == rows.first:
            return iter(())
        return reader.parts(SequenceRange(rows.first, self.stands.rows.first - 1))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._reader is not None:
                self._reader.close()


def _halved(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    fits = batch.num_rows <= CHUNK_ROWS and raw_size(batch) <= CHUNK_BYTES
    if fits or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _halved(batch.slice(0, half))
    yield from _halved(batch.slice(half))


class Relays:
    """What `chain.json` says of each chain, read once: it never changes."""

    def __init__(self, documents: ChainStore, threads: Threads) -> None:
        self._documents, self._threads = documents, threads
        self._known: dict[Chain, bool] = {}

    def note(self, chain: Chain, document: ChainDocument) -> None:
        self._known[chain] = document.relay

    async def of(self, chain: Chain) -> bool:
        """Whether the chain is a relay's.

        Never guessed: rows that are published a second time must be the same bytes. Raises Unavailable where there is
        no `chain.json`, DataError where it is damaged, and what the store raises.
        """
        if chain not in self._known:
            if (document := await self._threads.run(self._documents.read_chain, chain)) is None:
                raise Unavailable(f"chain {chain}: expected its chain.json, found none")
            self.note(chain, document)
        return self._known[chain]
