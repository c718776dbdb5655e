"""From what the builder emits to finished segments in the spool, in the feed's encoder thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pyarrow as pa

from common.chain import Chain
from common.failpoints import failpoint
from common.segments.columns import Columns
from common.segments.parquet_guard import ROW_GROUP_BYTES_LEVEL_0, ROW_OVERHEAD_BYTES
from common.segments.reader import SegmentWriter, SpooledSegment, record_batch
from common.segments.segment import Footer, Ledger, Message, Tip
from common.sequences import SequenceRange
from common.service.process import Threads
from egress.batch import empty, extend
from egress.builder import (
    MESSAGE_OVERHEAD,
    PIECE_BYTES,
    Close,
    Emitted,
    Piece,
    attribute,
    before_first_gap,
    gaps,
    gone_before_read,
    unread,
)
from egress.memory import MemoryAccount
from egress.report import FeedReport
from egress.sampling.settings import Sampling

# Rows of one batch at least: where nearly everything is left out, a piece holds a few, and a batch of those
# costs more memory than they do.
BATCH_ROWS = 1024


class SegmentFile:
    """One level-0 segment of `chain`.

    `new_spool`: makes an empty file for it. `writer`: who writes, for the footer. `sampling`: by what its
    pieces were sampled, None for a whole copy. `subject_statistics`: as `SegmentWriter` has it.
    """

    def __init__(
        self,
        chain: Chain,
        new_spool: Callable[[], Path],
        *,
        writer: str,
        compression_level: int,
        filtered: bool,
        sampling: Sampling | None = None,
        subject_statistics: bool = True,
    ) -> None:
        self._chain, self._writer, self._filtered, self._sampling = chain, writer, filtered, sampling
        self._file = SegmentWriter(
            new_spool(),
            level=0,
            compression_level=compression_level,
            subject_statistics=subject_statistics,
        )
        self._coverage: SequenceRange | None = None
        self._ledger = Ledger()
        self._unread: SequenceRange | None = None
        self._last: Message | None = None
        self._few = empty(sampled=sampling is not None)
        self._few_bytes = 0

    @property
    def held(self) -> int:
        """About how many bytes wait in memory for a row group to be full."""
        written = self._file.raw_bytes + self._file.rows * ROW_OVERHEAD_BYTES
        return min(written, ROW_GROUP_BYTES_LEVEL_0) + self._few_bytes

    def add(self, piece: Piece, source_first: int, from_hole: Sequence[SequenceRange] = ()) -> None:
        """Append the piece, which follows the one before. Raises Unavailable where the disk is full.

        `source_first`, `from_hole`: as in `attribute`.
        """
        self._add_rows(piece.rows, piece.size)
        first = self._coverage.first if self._coverage else piece.coverage.first
        self._coverage = SequenceRange(first, piece.coverage.last)
        ledger = attribute(piece, source_first, filtered=self._filtered, from_hole=from_hole)
        self._ledger = self._ledger.plus(ledger)
        if (gone := unread(piece, source_first, from_hole)) is not None:
            self._unread = SequenceRange((self._unread or gone).first, gone.last)
        self._last = piece.last or self._last
        _let_go()

    def _add_rows(self, rows: Columns, size: int) -> None:
        if self._few.sequences or (len(rows.sequences) < BATCH_ROWS and size < PIECE_BYTES):
            extend(self._few, rows)
            self._few_bytes += size + MESSAGE_OVERHEAD * len(rows.sequences)
            rows = self._few
        if len(rows.sequences) >= BATCH_ROWS or max(size, self._few_bytes) >= PIECE_BYTES:
            self._append(rows)

    def _append(self, rows: Columns) -> None:
        """Append `rows`, the few among them."""
        if rows.sequences:
            self._file.append(
                record_batch(
                    rows.sequences,
                    rows.timestamps_ns,
                    rows.subjects,
                    rows.headers,
                    rows.payloads,
                    rows.sample_keys,
                )
            )
        self._few, self._few_bytes = empty(sampled=self._sampling is not None), 0

    def finish(self) -> SpooledSegment:
        """Close and hash the file. Raises ValueError if nothing was added."""
        if self._coverage is None:
            raise ValueError("segment: expected at least one piece")
        self._append(self._few)
        spooled = self._file.finish(self._footer(self._coverage))
        _let_go()
        return spooled

    def _footer(self, coverage: SequenceRange) -> Footer:
        return Footer(
            chain=self._chain,
            level=0,
            coverage=coverage,
            rows=self._file.rows,
            ledger=self._ledger,
            raw_bytes=self._file.raw_bytes,
            first_timestamp_ns=None,  # it and the next come from the rows
            last_timestamp_ns=None,
            tip=Tip.of(self._last) if self._last else None,
            writer=self._writer,
            sampling=self._sampling.to_json() if self._sampling else None,
            sampling_digest=self._sampling.digest if self._sampling else "",
            unread=self._unread,
        )

    def abort(self) -> None:
        """Remove the file."""
        self._file.abort()


def _let_go() -> None:
    """Return freed memory: the allocator keeps what this thread has freed, a row group or two, until told."""
    pa.default_memory_pool().release_unused()


QUEUE_BYTES = 24 * 2**20  # of memory waiting to be encoded; more would not make anything faster
AHEAD = 2  # finished segments waiting in the spool, the one being put included; then encoding waits


# Which of the sequences that were not received the source holds no more.
AskGone = Callable[[Sequence[SequenceRange]], Awaitable[Sequence[SequenceRange]]]


class Encoder:
    """Encodes in order. `sealed`: the finished segments, oldest first; whoever put one removes it.

    `source_first` is asked for the source's first sequence once for each piece with gaps. `fills_hole`: the
    segments stand under existing coverage: what was archived once may be gone from the source now. What lies
    below its first sequence is not covered again; of a gap above, `gone` says what the source holds no more.
    `without_looped`: a piece as it is to be encoded; None: as it comes.
    """

    def __init__(
        self,
        thread: Threads,
        account: MemoryAccount,
        report: FeedReport,
        make_draft: Callable[[], SegmentFile],
        source_first: Callable[[], Awaitable[int]],
        gone: AskGone,
        *,
        fills_hole: bool,
        without_looped: Callable[[Piece], Awaitable[Piece]] | None = None,
    ) -> None:
        self._without_looped = without_looped
        self._thread, self._account, self._report, self._gone = thread, account, report, gone
        self._make_draft, self._source_first, self._fills_hole = make_draft, source_first, fills_hole
        self._outbox: deque[Emitted] = deque()
        self._queued = 0
        self._draft: SegmentFile | None = None
        self._draft_charge = 0
        self._is_cut = False
        self._is_torn = False
        self.sealed: deque[SpooledSegment] = deque()
        self.wake = asyncio.Event()
        self.on_sealed = asyncio.Event()

    def emit(self, item: Emitted) -> None:
        """Take the builder's next item."""
        if self._is_cut:
            return
        self._queued += item.memory if isinstance(item, Piece) else 0
        self._outbox.append(item)
        self.wake.set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be encoded."""
        return not self._outbox

    @property
    def is_ahead(self) -> bool:
        """Whether enough finished segments wait to be put."""
        return len(self.sealed) >= AHEAD

    @property
    def has_room(self) -> bool:
        """Whether more should be read."""
        return self._queued < QUEUE_BYTES

    async def next(self) -> bool:
        """Encode the next item; False where the segment was ended because the source moved on in a hole."""
        item = self._outbox[0]
        if isinstance(item, Piece) and self._without_looped is not None:
            item = await self._without_looped(item)
        first = await self._source_first() if isinstance(item, Piece) and item.missing else 1
        from_hole: Sequence[SequenceRange] = ()
        if self._fills_hole and isinstance(item, Piece) and item.missing:
            from_hole = () if gone_before_read(item, first) else await self._gone(list(gaps(item)))
        # Only now: what raises above must not lose the piece. What raises below has: what follows it would
        # cover its sequences without its rows.
        self._outbox.popleft()
        self._is_torn = True
        goes_on = await self._encode(item, first, from_hole)
        self._is_torn = False
        return goes_on

    async def _encode(self, item: Emitted, first: int, from_hole: Sequence[SequenceRange]) -> bool:
        if isinstance(item, Close):
            await self._finish(item)
            return True
        self._queued -= item.memory
        if self._fills_hole and gone_before_read(item, first):
            await self._cut(item)
            return False
        await self._add(item, first, from_hole)
        self._account.release(item.memory)
        return True

    async def all(self) -> None:
        """Encode everything that was emitted; nothing more behind a piece that was lost to an error."""
        while self._outbox and not self._is_torn and await self.next():
            pass

    def close(self) -> None:
        """Drop what is not finished, and remove what is from the spool."""
        self._outbox.clear()
        if self._draft is not None:
            self._draft.abort()
        for spooled in self.sealed:
            spooled.path.unlink(missing_ok=True)

    async def _cut(self, piece: Piece) -> None:
        """End the segment before the first gap, and drop whatever comes behind it."""
        leading = before_first_gap(piece)
        if leading is not None:
            await self._add(leading, 1)
        if self._draft is not None:
            await self._finish(Close.HOLE)
        self._outbox.clear()
        self._is_cut = True

    async def _add(self, piece: Piece, source_first: int, from_hole: Sequence[SequenceRange] = ()) -> None:
        if self._draft is None:
            self._draft = await self._thread.run(self._make_draft)
        await self._thread.run(self._draft.add, piece, source_first, from_hole)
        self._charge_draft(self._draft.held)

    async def _finish(self, why: Close) -> None:
        assert self._draft is not None, "a segment closes behind its pieces"
        spooled = await self._thread.run(self._draft.finish)
        self._draft = None
        self._charge_draft(0)
        failpoint("egress.sealed")
        self.sealed.append(spooled)
        self._report.sealed(spooled, why)
        self.on_sealed.set()

    def _charge_draft(self, held: int) -> None:
        more, self._draft_charge = held - self._draft_charge, held
        if more < 0:
            self._account.release(-more)
        else:
            self._account.charge(more)
