"""Decoding of segments into blocks of rows that may be published: in threads, one chunk at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import pyarrow as pa

from common.archive.checks import RowGroup
from common.archive.columns import raw_size
from common.archive.documents import ChainDocument, ChainStore
from common.archive.guard import DEFAULT_LIMITS, MAX_MESSAGE_BYTES, DecodingCost
from common.archive.keys import SegmentName
from common.archive.segment import Reason, SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import NO_KEYS, StretchReader, UnreadPart, open_stretch, reading
from common.chain import Chain
from common.errors import DataError, FloeError, Stopped, Unavailable
from common.sequences import SequenceRange, Stretch, holes
from common.service.process import ThreadPool
from ingress.checkpoint import IntentPiece
from ingress.rows.prepare import Oversize, Prepared, Preparer
from ingress.rows.rows import Block, ByteBudget

# Limits of a chunk: its raw bytes (a single larger message is a chunk of its own) and its rows. Creating Python
# objects from a column holds the interpreter, and a publisher that waits for an acknowledgement should not also wait
# for that.
CHUNK_BYTES = 4 * 1024 * 1024
CHUNK_ROWS = 2048

# Limits of one turn of a chain; the next turn continues in the same open segment.
TURN_ROWS, TURN_BYTES = 16_384, 8 * 1024 * 1024
# Bytes that segments which are read together may take at a time. One alone takes less.
MAX_DECODED_BYTES = 3 * DEFAULT_LIMITS.row_group_bytes
_PAGE_OVERHEAD_BYTES = 1024  # bytes of pages for a row besides its message, at most

MAX_OPEN_SEGMENTS = 8  # segments that stay open between turns
Key = TypeVar("Key")

Emit = Callable[[Block], None]
# Stores a message that is too large for the target (`ParkedStore.park`). Blocking; the same one may be stored again.
Park = Callable[[Chain, Oversize], None]


@dataclass(frozen=True, slots=True)
class IncompleteFill:
    """A filled hole in which messages are still missing that may have been archived once.

    `rows`: the range that `segment` does not hold completely; `missing`: the number of its sequences that no segment
    holds. `known`: keys of the segments that were checked.
    """

    segment: SegmentRef
    rows: SequenceRange
    missing: int
    known: frozenset[str]


def check_filled_hole(
    store: SegmentStore, stretch: Stretch[SegmentRef], damaged_keys: AbstractSet[str], skipped: Sequence[SequenceRange]
) -> IncompleteFill | None:
    """Return the filled hole at which ingress blocks in the stretch, because sequences are missing; None without one.

    `damaged_keys`, `skipped`: as in `DecodeOptions`. Reads the footer, and more only if its ledger counts sequences
    that are gone. Blocking. Raises UnreadableSegment, ForkError and the errors of the store.
    """
    with reading(stretch.segment):
        if not store.footer(stretch.segment).ledger.counts.get(Reason.GONE_FROM_HOLE):
            return None
        with open_stretch(store, stretch, excluded=damaged_keys) as reader:
            return _find_fill(reader, stretch, damaged_keys, skipped)


def _find_fill(
    reader: StretchReader, stretch: Stretch[SegmentRef], damaged: AbstractSet[str], skipped: Sequence[SequenceRange]
) -> IncompleteFill | None:
    """Return the first filled hole with missing rows that are not skipped; None if there is none."""
    if reader.unread is None or not reader.footer.ledger.counts.get(Reason.GONE_FROM_HOLE):
        return None
    for left in holes(skipped, reader.unread):
        if missing := reader.max_missing(left):
            known = {stretch.segment.key, *damaged, *(other.key for other in reader.others)}
            return IncompleteFill(stretch.segment, left, missing, frozenset(known))
    return None


class Decoder:
    """Decoder of segments: it hands out their rows, ready to be published, as blocks.

    A block names the segment that holds its rows. Other segments may hold rows that this one left unread, and an open
    intent is finished from the segments that it names, even if others were added since.

    `park`: stores the messages that a block leaves out, before the block is handed out.
    """

    def __init__(self, store: SegmentStore, threads: ThreadPool, budget: ByteBudget, park: Park | None = None) -> None:
        self._store, self._threads, self._budget, self._park = store, threads, budget, park

    def open(self, ref: SegmentRef, rows: SequenceRange, options: DecodeOptions | None = None) -> SegmentRows:
        """Return the rows `rows` of `ref`, not read yet; the caller closes them."""
        return SegmentRows(self._store, Stretch(ref, rows), self._park, options or DecodeOptions())

    async def turn(self, source: SegmentRows, preparer: Preparer, emit: Emit, *, wait: bool = True) -> Stopped | None:
        """Hand rows of `source` to `emit` until a turn is over or `source` is done, in blocks that account for them.

        The memory for decoding is taken from the budget first (with `wait` false: even if it is not free), and the
        bytes of a block belong to its receiver. Return the problem of the first row that must not be published, None
        if there is none. Raises UnreadableSegment (blocks handed out before are good), errors of the store and of
        `emit`.
        """
        source.preparer, source.refuse_oversize, problem, began = preparer, wait, None, source.next_sequence
        while problem is None and not source.is_done and source.next_sequence == began:
            granted = source.needed_bytes
            async with self._budget.reserve_for_decoding(granted, wait=wait):
                try:
                    with reading(source.segment):
                        problem = await self._decode(source, granted, emit)
                except BaseException:
                    await self.close(source)  # no decoding may continue once the bytes are given back
                    raise
        if problem is not None:
            source.is_done = True
        elif source.is_done:
            self._account(source, source.end, emit)
        return problem

    async def _decode(self, source: SegmentRows, granted: int, emit: Emit) -> Stopped | None:
        """Decode as `turn`, but also end if more than `granted` bytes are needed."""
        rows = size = 0
        while (found := await self._threads.run(source.next, granted)) is not None:
            part, prepared, ends_batch = found
            if prepared.has_rows:
                self._account(source, part.since - 1, emit)
                block = _block(part.segment.segment, source.next_sequence, prepared)
                self._hand_out(source, block, emit)
                size += block.size
            rows += part.batch.num_rows
            is_over = ends_batch and (rows >= TURN_ROWS or size >= TURN_BYTES) and source.next_sequence <= source.end
            if prepared.problem is not None or is_over:
                return prepared.problem
        return source.preparer.too_large(*source.oversize_message) if source.oversize_message else None

    async def read(self, source: SegmentRows, preparer: Preparer, emit: Emit, *, wait: bool = True) -> Stopped | None:
        """Hand out all rows of `source`, turn after turn, and close it; otherwise as `turn`."""
        problem = None
        try:
            while not source.is_done:
                problem = await self.turn(source, preparer, emit, wait=wait)
        finally:
            await self.close(source)
        return problem

    async def close(self, source: SegmentRows) -> None:
        """Close in a thread, because it waits for a chunk that is still being decoded and is no longer needed."""
        await self._threads.run(source.close)

    def _account(self, source: SegmentRows, last: int, emit: Emit) -> None:
        if source.next_sequence <= last:
            rows = SequenceRange(source.next_sequence, last)
            self._hand_out(source, Block(IntentPiece(source.segment.segment, rows, 0)), emit)

    def _hand_out(self, source: SegmentRows, block: Block, emit: Emit) -> None:
        self._budget.acquire_unchecked(block.size)
        try:
            emit(block)
        except BaseException:
            self._budget.release(block.size)
            raise
        source.next_sequence = block.piece.rows.last + 1


def _block(segment: SegmentName, begin: int, prepared: Prepared) -> Block:
    batch, left_out = prepared.batch, prepared.excluded
    sequences = batch.sequences if batch else []
    rows = SequenceRange(begin, max([*left_out[-1:], *sequences[-1:]]))
    piece = IntentPiece(segment, rows, len(sequences), left_out)
    return Block(piece, batch, batch.size) if batch else Block(piece)


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Options of a read. Rows that a segment left unread are taken from other segments, except those with keys in
    `damaged_keys`; `own_rows_only`: only its own rows. `skipped_ranges`: ranges of filled holes that are skipped (None:
    all). `is_reopened`: the segment was open before, and only the parts that are read are fetched.
    """

    own_rows_only: bool = False
    damaged_keys: AbstractSet[str] = NO_KEYS
    skipped_ranges: Sequence[SequenceRange] | None = None
    is_reopened: bool = False


class _BudgetExceededError(FloeError):
    """More bytes are needed than were granted. It is a FloeError, because other errors of a read count as damage."""


class SegmentRows:
    """The rows of one stretch, used by one thread at a time.

    `next_sequence`: the first sequence not handed out yet. `incomplete_fill`: the filled hole before which its rows
    end, once that is known. `oversize_message`: sequence and bytes of a message that is too large, after which nothing
    is read. `preparer`, and `refuse_oversize` (messages that are too large): to be set before each turn.
    """

    preparer: Preparer

    def __init__(
        self, store: SegmentStore, stretch: Stretch[SegmentRef], park: Park | None, options: DecodeOptions
    ) -> None:
        self.segment, self.next_sequence = stretch.segment, stretch.rows.first
        self.is_done, self.refuse_oversize = False, True
        self.incomplete_fill: IncompleteFill | None = None
        self.oversize_message: tuple[int, int] | None = None
        self._store = (store.with_partial_reads() if options.is_reopened else store).with_admission(self._admit)
        self._stretch, self._park, self._options = stretch, park, options
        self._lock, self._closed, self._position = threading.Lock(), False, stretch.rows.first
        self._reader: StretchReader | None = None
        self._batches: Iterator[tuple[UnreadPart, bool]] | None = None
        # Of all segments that are read for it: their memory, the granted bytes, the bytes needed next.
        self._costs, self._granted, self._wanted = WeakKeyDictionary[object, DecodingCost](), 0, 0

    @property
    def end(self) -> int:
        """The last sequence that it accounts for."""
        return self._stretch.rows.last if self.incomplete_fill is None else self.incomplete_fill.rows.first - 1

    @property
    def needed_bytes(self) -> int:
        """Bytes that the next turn takes, as far as is known; 0 before the segment is open."""
        return self._wanted or sum(cost.peak_bytes for cost in self._costs.values())

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds between two turns, approximately."""
        return sum(cost.held for cost in self._costs.values())

    def _admit(self, scan: object, group: RowGroup, cost: DecodingCost) -> None:
        if self.refuse_oversize and group.rows == 1 and cost.size - _PAGE_OVERHEAD_BYTES > MAX_MESSAGE_BYTES:
            self.oversize_message = group.range.first, cost.size
            raise _BudgetExceededError(f"message {group.range.first} is too large")
        self._costs[scan] = cost
        if (need := self.needed_bytes) > MAX_DECODED_BYTES:
            raise DataError(f"expected to decode at most {MAX_DECODED_BYTES} bytes at a time, found {need}")
        if need > self._granted:
            # Segments that are read together open one by one: request more, so that not each of them restarts all.
            self._wanted = need if len(self._costs) == 1 else min(MAX_DECODED_BYTES, max(need, 2 * self._granted))
            raise _BudgetExceededError(f"{need} bytes are needed")

    def next(self, granted: int) -> tuple[UnreadPart, Prepared, bool] | None:
        """Return the next rows, prepared, and True if they end a batch that was decoded at once; None after the last
        rows, and if more than `granted` bytes are needed.
        """
        with self._lock, suppress(_BudgetExceededError):
            if self._closed:
                return None
            self._granted, self._wanted = granted, 0
            # If more is needed, the next call restarts at the position.
            batches, self._batches = self._batches or self._open(), None
            if (found := next(batches, None)) is None:
                self.is_done = True
                return None
            part, prepared = found[0], self.preparer.prepare(found[0].batch)
            for oversize in prepared.oversize:
                assert self._park is not None, "only a target that parks has messages to park"
                self._park(part.segment.chain, oversize)
            self._position, self._batches = part.batch.column("sequence")[-1].as_py() + 1, batches
            return part, prepared, found[1]
        return None

    def _open(self) -> Iterator[tuple[UnreadPart, bool]]:
        options, refs = self._options, () if self._options.own_rows_only else None
        if self._reader is None:
            self._reader = open_stretch(self._store, self._stretch, refs=refs, excluded=options.damaged_keys)
        if options.skipped_ranges is not None and self._position == self._stretch.rows.first:
            self.incomplete_fill = _find_fill(self._reader, self._stretch, options.damaged_keys, options.skipped_ranges)
        if self._position > self.end:
            return iter(())
        return _split_parts(self._reader.parts(SequenceRange(self._position, self.end)))

    def close(self) -> None:
        with self._lock:
            # Their memory is free at once, not when a garbage collector runs.
            self._closed, self._batches, reader, self._reader = True, None, self._reader, None
            if reader is not None:
                reader.close()


class OpenSegments(Generic[Key]):
    """Segments that stay open from one turn of a chain to the next: at most `MAX_OPEN_SEGMENTS`, with at most half of
    the limit of `budget` together, in addition to it.

    Above that, a segment of the site that has most of them is closed.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._budget, self.segments = budget, dict[Key, tuple[object, SegmentRows]]()

    def take(self, key: Key, plan: object) -> SegmentRows | None:
        """Return the rows that `key` kept; None without any, or if they are not of the same `plan`."""
        if key in self.segments and self.segments[key][0] is not plan:
            self._close(key)
        return self.segments.pop(key, (None, None))[1]

    def keep(self, key: Key, plan: object, source: SegmentRows) -> None:
        kept, limit = self.segments, self._budget.limit // 2
        kept[key] = (plan, source)
        while len(kept) > MAX_OPEN_SEGMENTS or sum(each.held_bytes for _, each in kept.values()) > limit:
            shares = Counter[str]()
            for _, each in reversed(kept.values()):
                shares[each.segment.chain.site] += 1 if len(kept) > MAX_OPEN_SEGMENTS else each.held_bytes
            site, _ = shares.most_common(1)[0]
            self._close(next(key for key, (_, each) in reversed(kept.items()) if each.segment.chain.site == site))

    def drop(self, is_dropped: Callable[[Key], bool] = lambda _: True) -> None:
        for key in filter(is_dropped, list(self.segments)):
            self._close(key)

    def _close(self, key: Key) -> None:
        self.segments.pop(key)[1].close()


def _split_parts(parts: Iterable[UnreadPart]) -> Iterator[tuple[UnreadPart, bool]]:
    for part in parts:
        halves = list(_split_batch(part.batch))
        for batch in halves:
            yield UnreadPart(part.segment, part.since, batch), batch is halves[-1]


def _split_batch(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    fits = batch.num_rows <= CHUNK_ROWS and raw_size(batch) <= CHUNK_BYTES
    if fits or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _split_batch(batch.slice(0, half))
    yield from _split_batch(batch.slice(half))


class RelayFlags:
    """The `relay` flag in the `chain.json` of each chain, read once: it never changes."""

    def __init__(self, documents: ChainStore, threads: ThreadPool) -> None:
        self._documents, self._threads = documents, threads
        self._known: dict[Chain, bool] = {}

    def record(self, chain: Chain, document: ChainDocument) -> None:
        self._known[chain] = document.relay

    async def is_relay(self, chain: Chain) -> bool:
        """Return True if the chain is a relay's.

        It is never guessed: rows that are published a second time must be the same bytes. Raises Unavailable if there
        is no `chain.json`, DataError if it is damaged, else as the store does.
        """
        if chain not in self._known:
            if (document := await self._threads.run(self._documents.read_chain, chain)) is None:
                raise Unavailable(f"chain {chain}: expected its chain.json, found none")
            self.record(chain, document)
        return self._known[chain]
