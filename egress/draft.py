"""A segment file being written: pieces in, a spooled segment out. Runs in threads, one call at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from common.chain import Chain
from common.segments.limits import ROW_GROUP_BYTES_LEVEL_0, ROW_OVERHEAD_BYTES
from common.segments.parquet import SegmentWriter, SpooledSegment, record_batch
from common.segments.segment import Footer, Ledger, Message, Tip
from common.sequences import SequenceRange
from egress.builder import Piece
from egress.ledger import attribute


class Draft:
    """One level-0 segment of `chain`.

    `new_spool`: makes an empty file for it. `writer`: who writes, for the footer.
    """

    def __init__(
        self,
        chain: Chain,
        new_spool: Callable[[], Path],
        *,
        writer: str,
        compression_level: int,
        filtered: bool,
    ) -> None:
        self._chain, self._writer, self._filtered = chain, writer, filtered
        self._file = SegmentWriter(new_spool(), level=0, compression_level=compression_level)
        self._coverage: SequenceRange | None = None
        self._ledger = Ledger()
        self._last: Message | None = None

    @property
    def held(self) -> int:
        """About how many bytes wait in memory for a row group to be full."""
        return min(self._file.raw_bytes + self._file.rows * ROW_OVERHEAD_BYTES, ROW_GROUP_BYTES_LEVEL_0)

    def add(self, piece: Piece, source_first: int) -> None:
        """Append the piece, which follows the one before. Raises Unavailable where the disk is full."""
        rows = piece.rows
        if rows.sequences:
            self._file.append(
                record_batch(rows.sequences, rows.timestamps_ns, rows.subjects, rows.headers, rows.payloads)
            )
        first = self._coverage.first if self._coverage else piece.coverage.first
        self._coverage = SequenceRange(first, piece.coverage.last)
        self._ledger = self._ledger.plus(attribute(piece, source_first, filtered=self._filtered))
        self._last = piece.last or self._last
        _let_go()

    def finish(self) -> SpooledSegment:
        """Close and hash the file. Raises ValueError if nothing was added."""
        if self._coverage is None:
            raise ValueError("segment: expected at least one piece")
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
        )

    def abort(self) -> None:
        """Remove the file."""
        self._file.abort()


def _let_go() -> None:
    """Return freed memory: the allocator keeps what this thread has freed, a row group or two, until told."""
    pa.default_memory_pool().release_unused()
