"""Encoding of the builder's pieces into finished segments in the spool, off the event loop."""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import pyarrow as pa

from common.archive.captures import CaptureStore
from common.archive.columns import Columns, record_batch
from common.archive.guard import ROW_GROUP_BYTES_LEVEL_0, WRITER_ROW_BYTES
from common.archive.segment import Footer, Ledger, Message, Reason, Tip
from common.archive.writer import SegmentWriter, SpooledSegment
from common.chain import Chain
from common.errors import DataError, OutcomeUnknown, Unavailable
from common.failpoints import failpoint
from common.nats.api import LIMITS, STREAM_NOT_FOUND, missing_sequences
from common.nats.protocol import ApiError
from common.sequences import SequenceRange
from common.tasks import Stop
from egress.builder import (
    MESSAGE_OVERHEAD_BYTES,
    PIECE_BYTES,
    ClosedBy,
    Emitted,
    Piece,
    before_first_gap,
    gaps,
    gone_before_read,
    ledger_of,
    unread,
)
from egress.consumers import ReaderResetError
from egress.deps import PartitionDeps
from egress.evidence import IdentityCheck
from egress.identity import SourceStream
from egress.loops import LoopFilter
from egress.memory import MemoryAccount
from egress.sampling.keys import SamplingSettings

T = TypeVar("T")

# Least number of rows in one batch. If nearly everything is left out, a piece holds a few rows, and a batch of so few
# costs more memory than the rows.
MIN_BATCH_ROWS = 1024


class SegmentFile:
    """Level-0 segment of `chain` in the spool, written by the settings of the partition."""

    def __init__(self, deps: PartitionDeps, chain: Chain) -> None:
        settings, store = deps.partition.settings, deps.store
        self._chain, self._writer, self._sampling = chain, deps.writer, SamplingSettings.from_feed(settings)
        self._filtered, level = bool(deps.partition.filter_subject), settings.segment.compression_level
        self._file = SegmentWriter(
            store.new_spool(), level=0, compression_level=level, subject_statistics=store.subject_statistics
        )
        self._coverage: SequenceRange | None = None
        self._ledger, self._left_out = Ledger(), Counter[Reason]()
        self._unread: SequenceRange | None = None
        self._last: Message | None = None
        self._pending_rows, self._pending_bytes = Columns.empty(sampled=self._sampling is not None), 0

    @property
    def buffered_bytes(self) -> int:
        """Approximate bytes in memory that wait for a full row group."""
        written = self._file.raw_bytes + self._file.rows * WRITER_ROW_BYTES
        return min(written, ROW_GROUP_BYTES_LEVEL_0) + self._pending_bytes

    def add(self, piece: Piece, source_first: int, from_hole: Sequence[SequenceRange] = (), restored: int = 0) -> None:
        """Append the piece, which follows the one before. Raises Unavailable if the disk is full.

        `source_first`, `from_hole`, `restored`: as in `ledger_of`.
        """
        self._add_rows(piece.rows, piece.size)
        first = self._coverage.first if self._coverage else piece.coverage.first
        self._coverage = SequenceRange(first, piece.coverage.last)
        ledger = ledger_of(piece, source_first, filtered=self._filtered, from_hole=from_hole, restored=restored)
        self._ledger = self._ledger.plus(ledger)
        if (gone := unread(piece, source_first, from_hole, restored)) is not None:
            self._unread = SequenceRange((self._unread or gone).first, gone.last)
        self._last = piece.last or self._last
        self._left_out.update(piece.left_out)
        _release_arrow_memory()

    def _add_rows(self, rows: Columns, size: int) -> None:
        if self._pending_rows.sequences or (len(rows) < MIN_BATCH_ROWS and size < PIECE_BYTES):
            self._pending_rows.extend(rows)
            self._pending_bytes += size + MESSAGE_OVERHEAD_BYTES * len(rows)
            rows = self._pending_rows
        if len(rows) >= MIN_BATCH_ROWS or max(size, self._pending_bytes) >= PIECE_BYTES:
            self._append(rows)

    def _append(self, rows: Columns) -> None:
        if rows:
            self._file.append(
                record_batch(
                    rows.sequences, rows.timestamps_ns, rows.subjects, rows.headers, rows.payloads, rows.sample_keys
                )
            )
        self._pending_rows, self._pending_bytes = Columns.empty(sampled=self._sampling is not None), 0

    def finish(self) -> SpooledSegment:
        """Write the footer and return the spooled segment. Raises ValueError if nothing was added."""
        if self._coverage is None:
            raise ValueError("segment: expected at least one piece")
        self._append(self._pending_rows)
        footer = Footer(
            chain=self._chain,
            level=0,
            coverage=self._coverage,
            rows=self._file.rows,
            ledger=self._ledger,
            raw_bytes=self._file.raw_bytes,
            first_timestamp_ns=None,  # both times come from the rows
            last_timestamp_ns=None,
            tip=Tip.of(self._last) if self._last else None,
            writer=self._writer,
            sampling=self._sampling.to_json() if self._sampling else None,
            sampling_digest=self._sampling.digest if self._sampling else "",
            unread=self._unread,
        )
        spooled = replace(self._file.finish(footer), left_out_bytes=self._left_out)
        _release_arrow_memory()
        return spooled

    def abort(self) -> None:
        self._file.abort()


def _release_arrow_memory() -> None:
    """Return freed memory to the system: the allocator keeps a row group or two that this thread has freed."""
    pa.default_memory_pool().release_unused()


QUEUE_BYTES = 24 * 2**20  # bytes of memory that wait to be encoded; more would not make anything faster
MAX_SEALED = 2  # finished segments in the spool, including the one being put; then encoding waits


class SourceQueries:
    """Queries of the encoder to the stream. Once the session has `ended`, an answer that is no longer available is
    replaced by the least that is known.
    """

    def __init__(
        self, deps: PartitionDeps, chain: Chain, source: SourceStream, identity: IdentityCheck, ended: Stop
    ) -> None:
        self._deps, self._identity, self._ended = deps, identity, ended
        self._first, self._is_kept = source.first, source.retention == LIMITS
        self._loop_filter, self._chain, self._created = LoopFilter(deps, chain), chain, source.created
        self._skipped: tuple[SequenceRange, ...] | None = None  # filled at the first query

    async def first(self) -> int:
        if self._deps.partition.filter_subject and not self._is_kept:
            return 1  # everything below was acknowledged, perhaps by another partition: that cannot be known
        if not self._ended.is_set:
            self._first = await self._answer_or(self._identity.first_sequence(), self._first)
        return self._first

    async def restored_first(self, piece: Piece) -> int:
        """Return the argument `restored` of `ledger_of` for the piece."""
        if self._skipped is None:
            self._skipped = await self._answer_or(self._deps.pools.io.run(self._read_skipped), ())
        return max((each.last + 1 for each in self._skipped if piece.coverage.first in each), default=0)

    def _read_skipped(self) -> tuple[SequenceRange, ...]:
        with suppress(DataError):  # an unreadable document proves nothing
            found = CaptureStore(self._deps.chains.layout, self._deps.chains.objects).restored(self._chain)
            if found is not None and found.skipped_to > found.end and found.has_created(self._created):
                return (SequenceRange(found.end + 1, found.skipped_to),)
        return ()

    async def remove_looped(self, piece: Piece) -> Piece:
        """Return the piece without looped messages; messages that cannot be compared are archived as they are."""
        return await self._answer_or(self._loop_filter.remove_looped(piece), piece)

    async def absent_of(self, missing: Sequence[SequenceRange]) -> Sequence[SequenceRange]:
        """Return the parts of `missing` (ranges not received) that the stream no longer holds.

        A filtered consumer skips messages that it does not match, so the stream is queried for each of them.
        """
        return await self._answer_or(self._absent(missing), missing)

    async def _absent(self, missing: Sequence[SequenceRange]) -> Sequence[SequenceRange]:
        partition = self._deps.partition
        if not partition.filter_subject:
            return missing
        return [each for gap in missing for each in await missing_sequences(self._deps.client, partition.stream, gap)]

    async def _answer_or(self, query: Awaitable[T], fallback: T) -> T:
        try:
            return await query
        except (Unavailable, OutcomeUnknown) as error:
            if self._ended.is_set:
                return fallback
            raise ReaderResetError("unreachable", error.message) from error
        except ApiError as error:  # a missing stream holds nothing; any other refusal proves nothing
            if self._ended.is_set and error.err_code == STREAM_NOT_FOUND:
                return fallback
            raise


class Encoder:
    """Encoder of the segments of `chain`, in order. `sealed`: the finished ones, oldest first; the uploader removes
    each one after putting it.

    `fills_hole`: the segments are under existing coverage: messages archived once may be gone from the source now. The
    part below the source's first sequence is not covered again; for a gap above it, the source is queried for the
    sequences that it no longer holds.
    """

    def __init__(
        self, deps: PartitionDeps, chain: Chain, account: MemoryAccount, source: SourceQueries, *, fills_hole: bool
    ) -> None:
        self._deps, self._chain, self._thread = deps, chain, deps.pools.encoder
        self._account, self._source, self._fills_hole = account, source, fills_hole
        self._outbox: deque[Emitted] = deque()
        self._queued = 0
        self._open_file: SegmentFile | None = None
        self._charged, self._is_truncated, self._is_inconsistent = 0, False, False
        self.sealed: deque[SpooledSegment] = deque()
        self.wake_event, self.sealed_event = asyncio.Event(), asyncio.Event()

    def emit(self, item: Emitted) -> None:
        if self._is_truncated:
            return
        self._queued += item.memory if isinstance(item, Piece) else 0
        self._outbox.append(item)
        self.wake_event.set()

    @property
    def is_idle(self) -> bool:
        return not self._outbox

    @property
    def is_spool_full(self) -> bool:
        return len(self.sealed) >= MAX_SEALED

    @property
    def has_room(self) -> bool:
        return self._queued < QUEUE_BYTES

    async def encode_next(self) -> bool:
        """Encode the next item. Return False if the segment was ended because the source moved on in a hole."""
        item, first, restored = self._outbox[0], 1, 0
        from_hole: Sequence[SequenceRange] = ()
        if isinstance(item, Piece):
            item = await self._source.remove_looped(item)
            first = await self._source.first() if item.missing else 1
            restored = await self._source.restored_first(item) if item.coverage.first < first else 0
            if self._fills_hole and item.missing and not gone_before_read(item, first):
                from_hole = await self._source.absent_of(list(gaps(item)))
        # Only now: an error above must not lose the piece. An error below does lose it: the next piece would
        # cover its sequences without its rows.
        self._outbox.popleft()
        self._is_inconsistent = True
        continues = await self._encode(item, first, from_hole, restored)
        self._is_inconsistent = False
        return continues

    async def _encode(self, item: Emitted, first: int, from_hole: Sequence[SequenceRange], restored: int) -> bool:
        if isinstance(item, ClosedBy):
            await self._finish(item)
            return True
        self._queued -= item.memory
        if self._fills_hole and gone_before_read(item, first):
            await self._truncate(item)
            return False
        await self._add(item, first, from_hole, restored)
        self._account.release(item.memory)
        return True

    async def encode_all(self) -> None:
        while self._outbox and not self._is_inconsistent and await self.encode_next():
            pass

    def close(self) -> None:
        self._outbox.clear()
        if self._open_file is not None:
            self._open_file.abort()
        for spooled in self.sealed:
            spooled.path.unlink(missing_ok=True)

    async def _truncate(self, piece: Piece) -> None:
        if (leading := before_first_gap(piece)) is not None:
            await self._add(leading, 1)
        if self._open_file is not None:
            await self._finish(ClosedBy.HOLE)
        self._outbox.clear()
        self._is_truncated = True

    async def _add(
        self, piece: Piece, source_first: int, from_hole: Sequence[SequenceRange] = (), restored: int = 0
    ) -> None:
        if self._open_file is None:
            self._open_file = await self._thread.run(SegmentFile, self._deps, self._chain)
        await self._thread.run(self._open_file.add, piece, source_first, from_hole, restored)
        self._charge_file(self._open_file.buffered_bytes)

    async def _finish(self, reason: ClosedBy) -> None:
        assert self._open_file is not None, "a segment closes after its pieces"
        spooled = await self._thread.run(self._open_file.finish)
        self._open_file = None
        self._charge_file(0)
        failpoint("egress.sealed")
        self.sealed.append(spooled)
        self._deps.report.count_sealed(spooled, reason)
        self.sealed_event.set()

    def _charge_file(self, buffered: int) -> None:
        more, self._charged = buffered - self._charged, buffered
        if more < 0:
            self._account.release(-more)
        else:
            self._account.charge(more)
