"""One pass over the rows of an open segment: what is decoded is bounded before, and checked after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.errors import SegmentCorrupt
from common.segments import checks, metadata, parquet_guard
from common.segments.checks import RowGroup
from common.segments.faults import bomb, explained
from common.segments.metadata import Metadata
from common.segments.schema import RAW_COLUMNS, SCHEMA, TEXT_COLUMNS, lengths, raw_size, total
from common.segments.segment import Footer
from common.segments.source import Source
from common.sequences import SequenceRange


@dataclass(frozen=True, slots=True)
class Opened:
    """A segment whose metadata are checked. `leaves`: the number that each name has among the columns."""

    source: Source
    file: Any
    metadata: Metadata
    leaves: Mapping[str, int]
    footer: Footer


class Scan:
    """Reads the columns `names` of the rows in `rows` (None: all) once.

    The order of rows is always checked, and a subject is never read without its raw bytes, which say how much
    it counts.
    """

    def __init__(self, opened: Opened, names: list[str], rows: SequenceRange | None) -> None:
        self._opened = opened
        self._source, footer = opened.source, opened.footer
        self._names = names
        self._rows = None if rows is None or rows.encloses(footer.coverage) else rows
        needed = {*names, "sequence"} | ({"subject_raw"} if "subject" in names else set())
        self._schema = pa.schema([field for field in SCHEMA if field.name in needed])
        self._totals = _Totals(footer, set(self._schema.names), opened.source.limits.row_group_bytes)

    def batches(self, groups: Iterable[RowGroup]) -> Iterator[pa.RecordBatch]:
        """The rows of those `groups` that may hold some; raises SegmentCorrupt."""
        with explained(self._source.key):
            for group in groups:
                if self._rows is None or self._rows.overlaps(group.range):
                    yield from self._group(group)
            if self._rows is None:
                self._totals.check_end()

    def _group(self, group: RowGroup) -> Iterator[pa.RecordBatch]:
        counted = 0
        for batch in self._decoded(group):
            plain = self._checked(batch, group)
            counted += plain.num_rows
            wanted = self._selected(plain)
            if wanted.num_rows:
                yield wanted
            if self._rows is not None and self._totals.last_sequence >= self._rows.last:
                return
        if counted != group.rows:
            raise SegmentCorrupt(f"row group {group.index}: expected {group.rows} rows, found {counted}")

    def _decoded(self, group: RowGroup) -> Iterator[pa.RecordBatch]:
        limits = self._source.limits
        rows = limits.batch_bytes * group.rows // max(1, self._decoded_bytes(group))
        batches: Iterator[pa.RecordBatch] = self._opened.file.iter_batches(
            batch_size=max(1, min(limits.batch_rows, rows)),
            row_groups=[group.index],
            columns=self._schema.names,
            use_threads=False,
        )
        return (batch for batch in batches if batch.num_rows)

    def _decoded_bytes(self, group: RowGroup) -> int:
        """What decoding the row group costs at most; known before anything is decoded."""
        claimed = self._opened.metadata.groups[group.index]
        size, most = 0, self._source.limits.row_group_bytes
        for name in self._schema.names:
            chunk = metadata.chunk(name, claimed, self._opened.leaves[name])
            self._source.fetch(chunk.first, chunk.size)
            size += parquet_guard.decoded_bytes(self._source.file, chunk, self._source.limits)
        if size > most:
            raise bomb(f"row group {group.index}: expected at most {most} decoded bytes, found {size}")
        return size

    def _checked(self, batch: pa.RecordBatch, group: RowGroup) -> pa.RecordBatch:
        checks.check_text(batch)
        self._totals.count(batch)
        plain = _expanded(batch, self._schema)
        checks.check_order(plain.column("sequence"), self._totals.last_sequence, group.range)
        checks.check_values(plain)
        self._totals.remember(plain)
        return plain

    def _selected(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._rows is not None:
            sequences = batch.column("sequence")
            first = pc.less(sequences, pa.scalar(self._rows.first, pa.int64())).true_count
            end = pc.less_equal(sequences, pa.scalar(self._rows.last, pa.int64())).true_count
            batch = batch.slice(first, end - first)
        return batch if self._names == self._schema.names else batch.select(self._names)


def _expanded(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """`batch` without dictionaries, in `schema`'s order; their sizes were counted before."""
    plain: dict[str, Any] = {
        name: column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return pa.RecordBatch.from_arrays([plain[name] for name in schema.names], schema=schema)


class _Totals:
    """What a pass has seen so far, against what the footer claims of the whole."""

    def __init__(self, footer: Footer, names: set[str], most_in_a_batch: int) -> None:
        self.last_sequence = 0
        self._footer = footer
        self._names = names
        self._most = most_in_a_batch
        self._raw_bytes = 0
        self._times: tuple[int | None, int | None] = (None, None)

    def count(self, batch: pa.RecordBatch) -> None:
        """Add up raw bytes before dictionaries are expanded: one long text may be used by every row."""
        raw = raw_size(batch)
        self._raw_bytes += raw
        if self._raw_bytes > self._footer.raw_bytes:
            raise bomb(f"expected {self._footer.raw_bytes} raw bytes as in the footer, found more")
        expanded = raw + sum(total(lengths(batch.column(name))) for name in {*TEXT_COLUMNS} & self._names)
        if expanded > self._most:
            raise bomb(f"expected batches of at most {self._most} bytes, found {expanded}")

    def remember(self, batch: pa.RecordBatch) -> None:
        """Take note of where the rows ended."""
        self.last_sequence = batch.column("sequence")[-1].as_py()
        if "timestamp_ns" in self._names:
            times = batch.column("timestamp_ns")
            first = times[0].as_py() if self._times[0] is None else self._times[0]
            self._times = (first, times[-1].as_py())

    def check_end(self) -> None:
        """After the last row of a whole segment: the footer told the truth."""
        footer = self._footer
        if self._names.issuperset(RAW_COLUMNS) and self._raw_bytes != footer.raw_bytes:
            raise _claim("raw_bytes", self._raw_bytes, footer.raw_bytes)
        claimed = (footer.first_timestamp_ns, footer.last_timestamp_ns)
        if "timestamp_ns" in self._names and self._times != claimed:
            raise _claim("timestamps", self._times, claimed)


def _claim(name: str, found: object, claimed: object) -> SegmentCorrupt:
    return SegmentCorrupt(
        f"footer {name}: expected {found} as in the rows, found {claimed}", code="E-SEG-META"
    )
