"""Reader of one segment file, which is untrusted: any program that can write to the bucket may have made it.

A file is checked in this order: size and magic, size of the metadata, schema, shape, footer against key; then for
each row group its page headers (`common.archive.guard`), and only then its rows, batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from common.archive import checks, guard
from common.archive.checks import TRAILER_BYTES, RowGroup, check_schema, check_trailer
from common.archive.columns import RAW_COLUMNS, SCHEMA, TEXT_COLUMNS, count_up_to, raw_size, subject_bytes, text_size
from common.archive.guard import DEFAULT_LIMITS, Metadata, ParquetLimits, bomb_error, segment_errors
from common.archive.keys import Layout, SegmentName
from common.archive.segment import Footer
from common.errors import SegmentCorrupt
from common.sequences import SequenceRange
from common.subjects import matches

# Makes `length` bytes from offset `first` readable in the source; for files that are present only in parts.
Fetch = Callable[[int, int], None]

# Called with a `ColumnScan` before it decodes a row group, and before it expands the text of a batch, with the memory
# that this takes; an error that it raises ends the read.
Admit = Callable[[object, RowGroup, guard.DecodingCost], None]

# The stubs describe an older pyarrow.
_ParquetFile: Any = pq.ParquetFile
_READ_AHEAD = 2**20  # bytes of a column chunk that pyarrow holds at a time
_SCHEMA_DEPTH = 8


def all_present(first: int, length: int) -> None:
    """`fetch` for a source that is complete."""


def admit_all(scan: object, group: RowGroup, cost: guard.DecodingCost) -> None:
    """`admit` for a caller that reads one segment at a time."""


@dataclass(frozen=True, slots=True)
class OpenedSegment:
    """A segment with checked metadata. `source`: its bytes. `file`: the ParquetFile of pyarrow over them. `key`: its
    name in errors. `leaves`: the number of each column, by name.
    """

    source: Any
    file: Any
    key: str
    limits: ParquetLimits
    fetch: Fetch
    admit: Admit
    metadata: Metadata
    leaves: Mapping[str, int]
    footer: Footer
    row_groups: tuple[RowGroup, ...]


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A filter of rows: `begin` <= `timestamp_ns` < `end` (None: no such bound), and a subject that matches one of
    `subjects`, NATS subject filters (empty: any).
    """

    begin: int | None = None
    end: int | None = None
    subjects: tuple[str, ...] = ()

    @property
    def has_time(self) -> bool:
        return self.begin is not None or self.end is not None

    @property
    def columns(self) -> set[str]:
        """The columns that `select` needs."""
        return {*(("timestamp_ns",) if self.has_time else ()), *(("subject", "subject_raw") if self.subjects else ())}

    def select(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of `batch` that match, maybe none."""
        if self.begin is not None:
            batch = batch.filter(pc.greater_equal(batch.column("timestamp_ns"), pa.scalar(self.begin, pa.int64())))
        if self.end is not None:
            batch = batch.filter(pc.less(batch.column("timestamp_ns"), pa.scalar(self.end, pa.int64())))
        if self.subjects and batch.num_rows:
            coded: Any = subject_bytes(batch).dictionary_encode()
            taken = [any(matches(f, subject) for f in self.subjects) for subject in coded.dictionary.to_pylist()]
            batch = batch.filter(pa.array(taken, pa.bool_()).take(coded.indices))
        return batch

    def may_take(self, times: tuple[int, int], subjects: tuple[bytes, bytes] | None) -> bool:
        """True if a row between the least and greatest time (ns) and subject may match. `subjects` None: unknown."""
        if (self.begin is not None and times[1] < self.begin) or (self.end is not None and times[0] >= self.end):
            return False
        return not self.subjects or subjects is None or any(_may_match(each, *subjects) for each in self.subjects)


def _may_match(subject: str, least: bytes, greatest: bytes) -> bool:
    fixed = subject.encode()
    tokens = fixed.split(b".")
    if wildcards := [index for index, token in enumerate(tokens) if token in (b"*", b">")]:
        fixed = b"".join(token + b"." for token in tokens[: wildcards[0]])
        return least[: len(fixed)] <= fixed <= greatest
    return least <= fixed <= greatest


class ColumnScan:
    """One pass over the columns `names` of the rows in `rows` (None: all).

    The order of rows is always checked. A subject is never read without its raw bytes, which define its size.
    """

    def __init__(self, opened: OpenedSegment, names: list[str], rows: SequenceRange | None) -> None:
        self._opened, self._names = opened, names
        footer = opened.footer
        self._rows = None if rows is None or rows.encloses(footer.coverage) else rows
        needed = {*names, "sequence"} | ({"subject_raw"} if "subject" in names else set())
        self._schema = pa.schema([field for field in SCHEMA if field.name in needed])
        self._totals = _Totals(footer, set(self._schema.names), opened.limits.row_group_bytes)

    def batches(self, groups: Iterable[RowGroup]) -> Iterator[pa.RecordBatch]:
        """Yield the rows in those of `groups` that may hold some. Raises SegmentCorrupt."""
        with segment_errors(self._opened.key):
            for group in groups:
                if self._rows is None or self._rows.overlaps(group.range):
                    yield from self._group(group)
            if self._rows is None:
                self._totals.check_end()

    def _group(self, group: RowGroup) -> Iterator[pa.RecordBatch]:
        counted, cost = 0, self._cost(group)
        names, index = self._schema.names, group.index
        for batch in filter(len, self._opened.file.iter_batches(cost.rows, [index], names, use_threads=False)):
            plain = self._check(batch, group, cost)
            counted += plain.num_rows
            wanted = self._select(plain)
            if wanted.num_rows:
                yield wanted
            if self._rows is not None and self._totals.last_sequence >= self._rows.last:
                return
        if counted != group.rows:
            raise SegmentCorrupt(f"row group {group.index}: expected {group.rows} rows, found {counted}")

    def _cost(self, group: RowGroup) -> guard.DecodingCost:
        claimed, limits = self._opened.metadata.groups[group.index], self._opened.limits
        columns = []
        for name in self._schema.names:
            chunk = guard.chunk(name, claimed, self._opened.leaves[name])
            self._opened.fetch(chunk.first, chunk.size)
            columns.append(guard.pages(self._opened.source, chunk, limits))
        cost = guard.decoding_cost(columns, group.rows, limits)
        self._opened.admit(self, group, cost)
        if cost.size > (most := limits.row_group_bytes):
            raise bomb_error(f"row group {group.index}: expected at most {most} decoded bytes, found {cost.size}")
        return cost

    def _check(self, batch: pa.RecordBatch, group: RowGroup, cost: guard.DecodingCost) -> pa.RecordBatch:
        checks.check_text(batch)
        self._opened.admit(self, group, replace(cost, text=self._totals.count(batch)))
        plain = _expand(batch, self._schema)
        checks.check_order(plain.column("sequence"), self._totals.last_sequence, group.range)
        checks.check_values(plain)
        self._totals.record(plain)
        return plain

    def _select(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._rows is not None:
            sequences = batch.column("sequence")
            first, end = (count_up_to(sequences, last) for last in (self._rows.first - 1, self._rows.last))
            batch = batch.slice(first, end - first)
        return batch if self._names == self._schema.names else batch.select(self._names)


def _expand(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    plain: dict[str, Any] = {
        name: column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return pa.RecordBatch.from_arrays([plain[name] for name in schema.names], schema=schema)


class _Totals:
    """Totals of the rows read so far, to compare with the claims of the footer."""

    def __init__(self, footer: Footer, names: set[str], max_batch_bytes: int) -> None:
        self.last_sequence, self._footer, self._names, self._max_batch_bytes = 0, footer, names, max_batch_bytes
        self._raw_bytes = 0
        self._times: tuple[int | None, int | None] = (None, None)

    def count(self, batch: pa.RecordBatch) -> int:
        """Add up raw bytes before dictionaries are expanded: every row may use one long text. Return the bytes of the
        expanded text. Raises SegmentCorrupt if they exceed the claims or limits.
        """
        raw = raw_size(batch)
        self._raw_bytes += raw
        if self._raw_bytes > self._footer.raw_bytes:
            raise bomb_error(f"expected {self._footer.raw_bytes} raw bytes as in the footer, found more")
        text = sum(text_size(batch.column(name)) for name in {*TEXT_COLUMNS} & self._names)
        if raw + text > self._max_batch_bytes:
            raise bomb_error(f"expected batches of at most {self._max_batch_bytes} bytes, found {raw + text}")
        return text

    def record(self, batch: pa.RecordBatch) -> None:
        self.last_sequence = batch.column("sequence")[-1].as_py()
        if "timestamp_ns" in self._names:
            times = batch.column("timestamp_ns")
            first = times[0].as_py() if self._times[0] is None else self._times[0]
            self._times = (first, times[-1].as_py())

    def check_end(self) -> None:
        footer = self._footer
        if self._names.issuperset(RAW_COLUMNS) and self._raw_bytes != footer.raw_bytes:
            raise _footer_mismatch("raw_bytes", self._raw_bytes, footer.raw_bytes)
        claimed = (footer.first_timestamp_ns, footer.last_timestamp_ns)
        if "timestamp_ns" in self._names and self._times != claimed:
            raise _footer_mismatch("timestamps", self._times, claimed)


def _footer_mismatch(name: str, found: object, claimed: object) -> SegmentCorrupt:
    return SegmentCorrupt(f"footer {name}: expected {found} as in the rows, found {claimed}", code="E-SEG-META")


class SegmentReader(AbstractContextManager["SegmentReader"]):
    """An open segment; a context manager. Created by `open_file`; for one thread at a time.

    `footer` agrees with the key and the row counts; `row_groups` are the claims of the file's metadata.
    """

    def __init__(self, opened: OpenedSegment, rows: SequenceRange | None, cleanup: ExitStack) -> None:
        self.footer, self.row_groups = opened.footer, opened.row_groups
        self._opened, self._rows, self._cleanup = opened, rows, cleanup

    def batches(
        self, rows: SequenceRange | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows inside `rows`, in sequence order, with `columns` in the schema's order.

        Without `rows`: inside those that the segment was opened for, or all of it.

        Row groups outside `rows` are not read. A batch has about `ParquetLimits.batch_bytes`, at most one row group,
        and is never empty. Raises SegmentCorrupt at the first batch that does not agree with footer, key and order;
        ValueError for a column that the schema does not have.
        """
        if unknown := set(columns or ()) - set(SCHEMA.names):
            raise ValueError(f"columns {sorted(unknown)}: expected some of {SCHEMA.names}")
        names = [name for name in SCHEMA.names if columns is None or name in columns]
        return ColumnScan(self._opened, names, rows or self._rows).batches(self.row_groups)

    def timestamp_bounds(self) -> list[tuple[int, int]]:
        """Return the least and the greatest timestamp (ns) of each row group, as claimed by the file's metadata.

        Raises SegmentCorrupt if there are no such statistics.
        """
        with segment_errors(self._opened.key):
            return checks.timestamp_bounds(self._opened.metadata, self._opened.leaves["timestamp_ns"])

    def ranges(self, wanted: RowFilter) -> list[SequenceRange]:
        """Return the ranges that may hold rows of `wanted`, ascending, as claimed by the file's metadata.

        The whole coverage if no row group can be left out. Raises SegmentCorrupt without statistics of times.
        """
        bounds = zip(self.row_groups, self.timestamp_bounds(), self._subjects(), strict=True)
        taken = [group for group, times, subjects in bounds if wanted.may_take(times, subjects)]
        if len(taken) == len(self.row_groups):
            return [self.footer.coverage]
        ranges: list[SequenceRange] = []
        for before, group in zip([None, *taken], taken, strict=False):
            if before is not None and before.index + 1 == group.index:
                ranges[-1] = SequenceRange(ranges[-1].first, group.range.last)
            else:
                ranges.append(group.range)
        return ranges

    def _subjects(self) -> list[tuple[bytes, bytes] | None]:
        """Return the least and the greatest subject of each row group; None for one without such statistics."""
        number = self._opened.leaves["subject"]
        chunks = [guard.chunk("subject", group, number) for group in self._opened.metadata.groups]
        bounds = ((each.least, each.greatest) for each in chunks)
        return [(a, z) if isinstance(a, bytes) and isinstance(z, bytes) else None for a, z in bounds]

    def close(self) -> None:
        self._cleanup.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def open_file(
    source: Path | bytes,
    expected: SegmentName,
    limits: ParquetLimits = DEFAULT_LIMITS,
    *,
    key: str | None = None,
    rows: SequenceRange | None = None,
    fetch: Fetch = all_present,
    on_close: Callable[[], None] | None = None,
    admit: Admit = admit_all,
) -> SegmentReader:
    """Open the segment at `source`, its path or all of its bytes, with the name `expected`; errors name it `key`.

    `rows`: the default of `batches`. `fetch` is called before bytes are read, for a source that is present only in
    parts; `admit` before rows are decoded; `on_close` when the reader is closed, or when opening fails. Raises
    SegmentCorrupt that names the cause; the errors of `fetch` and `admit`; OSError if the disk under the file fails.
    """
    name = key or Layout().segment(expected)
    with ExitStack() as cleanup, segment_errors(name):
        if on_close is not None:
            cleanup.callback(on_close)
        # Native code reads both, without the interpreter.
        native: pa.NativeFile = cleanup.enter_context(
            pa.OSFile(str(source), mode="r") if isinstance(source, Path) else pa.BufferReader(source)
        )
        metadata, file = _read_metadata(native, fetch, limits), _open_parquet(native, limits)
        guard.check_shape(metadata, file.metadata.num_columns, limits)
        columns = file.metadata.schema
        leaves = {columns.column(index).path: index for index in range(file.metadata.num_columns)}
        footer = checks.read_footer(metadata, expected)
        groups = checks.row_groups(metadata, leaves["sequence"], footer)
        opened = OpenedSegment(native, file, name, limits, fetch, admit, metadata, leaves, footer, groups)
        return SegmentReader(opened, rows, cleanup.pop_all())


def _read_metadata(source: Any, fetch: Fetch, limits: ParquetLimits) -> Metadata:
    """Read the metadata at the end of the bytes. Raises SegmentCorrupt."""
    size = source.size()
    tail = min(size, TRAILER_BYTES)
    fetch(size - tail, tail)
    stored = check_trailer(source.read_at(tail, size - tail), size, limits)
    fetch(size - tail - stored, stored)
    return guard.parse_metadata(source.read_at(stored, size - tail - stored), limits)


def _open_parquet(source: Any, limits: ParquetLimits) -> Any:
    """Return the ParquetFile over the bytes, with its schema checked. Raises any error of pyarrow.

    Call it only after `_read_metadata`, which checks that pyarrow can parse the metadata within limits.
    """
    try:
        # Kept as dictionaries until their expanded size is known.
        file = _parquet_file(source, limits, list(TEXT_COLUMNS))
    except Exception:  # perhaps there are no such columns: the check of the schema names the cause
        check_schema(_parquet_file(source, limits, None).metadata.schema.to_arrow_schema())
        raise
    check_schema(file.metadata.schema.to_arrow_schema())
    return file


def _parquet_file(source: Any, limits: ParquetLimits, read_dictionary: list[str] | None) -> Any:
    return _ParquetFile(
        source,
        thrift_string_size_limit=limits.footer_value_bytes,
        thrift_container_size_limit=max(limits.row_groups, limits.columns),
        schema_depth_limit=_SCHEMA_DEPTH,
        read_dictionary=read_dictionary,
        pre_buffer=False,
        buffer_size=_READ_AHEAD,
        # Without checksums a flipped bit reads back as good data.
        page_checksum_verification=True,
        arrow_extensions_enabled=False,
    )
