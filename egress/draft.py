"""A segment file being written: pieces in, a spooled segment out. Runs in threads, one call at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from common.chain import Chain
from common.segments.columns import Columns
from common.segments.limits import ROW_GROUP_BYTES_LEVEL_0, ROW_OVERHEAD_BYTES
from common.segments.parquet import SegmentWriter, SpooledSegment, record_batch
from common.segments.segment import Footer, Ledger, Message, Tip
from common.sequences import SequenceRange
from egress.batch import empty, extend
from egress.builder import MESSAGE_OVERHEAD, PIECE_BYTES, Piece
from egress.ledger import attribute, unread
from egress.sampling.settings import Sampling

# Rows of one batch at least: where nearly everything is left out, a piece holds a few, and a batch of those
# costs more memory than they do.
BATCH_ROWS = 1024


class Draft:
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
