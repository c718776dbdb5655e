"""Checks that a segment file must pass before its rows are trusted. Each of them raises SegmentCorrupt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.archive.columns import SCHEMA, TEXT_COLUMNS, is_text, microseconds
from common.archive.guard import Chunk, Metadata, ParquetLimits, bomb_error, chunk
from common.archive.keys import Layout, SegmentName
from common.archive.segment import FOOTER_KEY, Footer, decode_subject
from common.chain import Chain
from common.errors import SegmentCorrupt
from common.logs import escape
from common.objects.port import ObjectInfo, ObjectStore, PagedStore
from common.sequences import SequenceRange

PARQUET_MAGIC, ENCRYPTED_MAGIC = b"PAR1", b"PARE"
TRAILER_BYTES = 8  # length of the metadata in four bytes, then the magic
_INT64_BYTES = 8


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group, as claimed by the file's metadata.

    `range`: from the least to the greatest sequence of its rows. `rows`: at least 1. `raw_bytes`: decoded
    size of its pages. All are claims until the row group is read.
    """

    index: int
    range: SequenceRange
    rows: int
    raw_bytes: int


def check_trailer(trailer: bytes, size: int, limits: ParquetLimits) -> int:
    """Return the stored size of the Parquet metadata, from the last eight bytes of a file of `size` bytes."""
    if (magic := trailer[4:]) == ENCRYPTED_MAGIC:
        raise SegmentCorrupt("expected plain Parquet metadata, found an encrypted footer", code="E-SEG-CODEC")
    if size < 2 * TRAILER_BYTES or magic != PARQUET_MAGIC:
        ends = f", ends in {magic!r}" if magic else ""
        raise SegmentCorrupt(f"not a Parquet file ({size} bytes{ends})")
    if (stored := int.from_bytes(trailer[:4], "little")) > size - TRAILER_BYTES - len(PARQUET_MAGIC):
        raise SegmentCorrupt(f"not a Parquet file (metadata of {stored} bytes in a file of {size} bytes)")
    if stored > limits.footer_bytes:
        raise bomb_error(f"expected metadata of at most {limits.footer_bytes} bytes, found {stored}")
    return stored


def check_schema(found: pa.Schema) -> None:
    """Require all columns of `SCHEMA` with type and nullability; further columns are allowed if they are nullable."""
    if found.equals(SCHEMA):  # the common case, and ten times faster
        return
    wrong = [problem for field in SCHEMA if (problem := _field_problem(field, found))]
    extra = [field for field in found if field.name not in SCHEMA.names and not field.nullable]
    wrong += [f"column {field.name}: expected no such column or a nullable one" for field in extra]
    if wrong:
        raise SegmentCorrupt("; ".join(wrong), code="E-SEG-SCHEMA")


def _field_problem(expected: pa.Field[Any], schema: pa.Schema) -> str:
    # A reader names columns by paths, so `payload.x` would be read along with `payload`.
    fields = [field for field in schema if field.name.split(".")[0] == expected.name]
    if len(fields) > 1:
        return f"column {expected.name}: expected once, found {len(fields)} times"
    if not fields or fields[0].name != expected.name:
        return f"column {expected.name}: expected {_describe(expected)}, found none"
    if (fields[0].type, fields[0].nullable) != (expected.type, expected.nullable):
        return f"column {expected.name}: expected {_describe(expected)}, found {_describe(fields[0])}"
    return ""


def _describe(field: pa.Field[Any]) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"


def read_footer(metadata: Metadata, expected: SegmentName) -> Footer:
    """Return Floe's footer if it agrees with the key `expected`, the number of rows and itself (I7)."""
    if (raw := metadata.values.get(FOOTER_KEY)) is None:
        raise _meta_error("footer floe.segment: expected one, found none")
    try:
        footer = Footer.from_json(raw)
    except SegmentCorrupt as error:
        code = "E-SEG-META" if error.code == SegmentCorrupt.default_code else error.code
        raise SegmentCorrupt(error.message, hint=error.hint, code=code) from error
    for what in ("chain", "level", "coverage"):
        found, wanted = getattr(footer, what), getattr(expected, what)
        if found != wanted:
            raise _meta_error(f"footer {what}: expected {wanted} as in the key, found {found}")
    _check_counts(footer, metadata.rows)
    return footer


def _check_counts(footer: Footer, rows: int) -> None:
    if footer.rows != rows:
        raise _meta_error(f"footer rows: expected {rows} as in the file, found {footer.rows}")
    if not footer.is_balanced():
        raise _meta_error(
            f"footer ledger: expected rows and ledger to sum to {len(footer.coverage)}, "
            f"found {footer.rows} + {footer.ledger.total()}"
        )
    if not footer.has_valid_unread():
        raise _meta_error(
            f"footer unread: expected a range inside {footer.coverage} that holds the "
            f"{footer.ledger.unread()} sequences counted as gone, found {footer.unread}"
        )
    if footer.raw_bytes < 0:
        raise _meta_error(f"footer raw_bytes: expected a size, found {footer.raw_bytes}")
    times = (footer.first_timestamp_ns, footer.last_timestamp_ns)
    if any((timestamp is None) != (rows == 0) for timestamp in times):
        raise _meta_error(f"footer timestamps: expected them with rows and only then, found {times} and {rows} rows")


def row_groups(metadata: Metadata, sequence_column: int, footer: Footer) -> tuple[RowGroup, ...]:
    """Return the row groups if their statistics of `sequence` ascend within the coverage."""
    groups: list[RowGroup] = []
    after = footer.coverage.first - 1
    for index, group in enumerate(metadata.groups):
        bounds = _bounds(index, chunk("sequence", group, sequence_column))
        try:
            found = SequenceRange(*bounds)
        except ValueError as error:
            raise _row_error(f"row group {index}: statistics of sequence: {error}") from error
        if found.first <= after or found.last > footer.coverage.last:
            wanted = f"{after + 1}..{footer.coverage.last}"
            raise _row_error(f"row group {index}: expected sequences in {wanted}, found {found}")
        groups.append(RowGroup(index, found, group.rows, group.size))
        after = found.last
    return tuple(groups)


def timestamp_bounds(metadata: Metadata, timestamp_column: int) -> list[tuple[int, int]]:
    chunks = [chunk("timestamp_ns", group, timestamp_column) for group in metadata.groups]
    return [_bounds(index, found) for index, found in enumerate(chunks)]


def _bounds(index: int, column: Chunk) -> tuple[int, int]:
    least, greatest = column.least, column.greatest
    if not all(isinstance(bound, bytes) and len(bound) == _INT64_BYTES for bound in (least, greatest)):
        raise _meta_error(f"row group {index}: expected statistics of {column.name}, found none")
    first, last = (int.from_bytes(bound or b"", "little", signed=True) for bound in (least, greatest))
    return first, last


def check_order(sequences: pa.Array[Any], after: int, within: SequenceRange) -> None:
    """Require sequences that ascend strictly, are greater than `after` and are inside `within`."""
    if not len(sequences):
        return
    first, last = sequences[0].as_py(), sequences[-1].as_py()
    if first <= after:
        raise _row_error(f"sequence {first} after {after}")
    if (row := pc.index(pc.less(sequences[:-1], sequences[1:]), False).as_py()) >= 0:
        raise _row_error(f"row {row + 1} of a batch: sequence {sequences[row + 1]} after {sequences[row]}")
    if first not in within or last not in within:
        raise _row_error(f"expected sequences in {within}, found {first}..{last}")


def check_text(batch: pa.RecordBatch) -> None:
    for name in {*TEXT_COLUMNS} & {*batch.schema.names}:
        column = batch.column(name)
        try:
            column.validate(full=True)
            if isinstance(column, pa.DictionaryArray):
                column.dictionary.validate(full=True)
        except pa.ArrowInvalid as error:
            raise _row_error(f"column {name}: {error}") from error


def check_values(batch: pa.RecordBatch) -> None:
    """Require nulls only in nullable columns, timestamps that agree, and raw subjects only for invalid UTF-8. Columns
    that `batch` lacks are not checked.
    """
    for name in batch.schema.names:
        if (nulls := batch.column(name).null_count) and not SCHEMA.field(name).nullable:
            raise _row_error(f"column {name}: expected no nulls, found {nulls}")
    if {"timestamp", "timestamp_ns"} <= set(batch.schema.names):
        wanted = microseconds(batch.column("timestamp_ns"))
        row = pc.index(pc.equal(batch.column("timestamp").cast(pa.int64()), wanted), False).as_py()
        if row >= 0:
            found = batch.column("timestamp")[row].value
            raise _row_error(f"row {row} of a batch: expected timestamp {wanted[row]} us, found {found} us")
    if {"subject", "subject_raw"} <= set(batch.schema.names):
        _check_subjects(batch)


def _check_subjects(batch: pa.RecordBatch) -> None:
    raw = batch.column("subject_raw")
    if raw.null_count == len(raw):
        return
    for text, subject in zip(batch.column("subject").to_pylist(), raw.to_pylist(), strict=True):
        if subject is not None and (is_text(subject) or decode_subject(subject) != text):
            raise _row_error(f"expected subject {decode_subject(subject)!r:.80} for subject_raw, found {text!r:.80}")


def _meta_error(cause: str) -> SegmentCorrupt:
    return SegmentCorrupt(cause, code="E-SEG-META")


def _row_error(cause: str) -> SegmentCorrupt:
    return SegmentCorrupt(cause, code="E-SEG-ROWS")


MAX_LISTED_KEYS = 100  # foreign keys that are listed, at most


@dataclass(slots=True)
class ForeignKeys:
    """The number of foreign keys, and the first of them. `examined`: the number of keys examined; `is_complete`: true
    if these were all keys; `chains`: the number of foreign keys among the objects of each chain.
    """

    keys: list[str]
    count: int = 0
    examined: int = 0
    is_complete: bool = True
    chains: Counter[Chain] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Return lines for people; empty if there are no foreign keys."""
        if not self.count:
            return []
        of = "" if self.is_complete else f" among the first {self.examined}; `floe segments verify` checks all"
        more = [f"  and {self.count - len(self.keys)} more"] if self.count > len(self.keys) else []
        head = f"foreign keys, which Floe does not read: {self.count}{of}"
        return [head, *(f"  {escape(key)}" for key in self.keys), *more]


def find_foreign_keys(
    objects: ObjectStore, layout: Layout, prefixes: Iterable[str] | None = None, limit: int | None = None
) -> ForeignKeys:
    """Find the foreign keys under `prefixes` (None: the layout's prefix), among about `limit` keys at most."""
    found = ForeignKeys([])
    for page in _pages(objects, [layout.root] if prefixes is None else prefixes, limit):
        if limit is not None and found.examined >= limit:
            found.is_complete = False
            break
        found.examined += len(page)
        foreign = [info.key for info in page if layout.is_foreign(info.key)]
        found.count += len(foreign)
        found.keys += foreign[: MAX_LISTED_KEYS - len(found.keys)]
        found.chains.update(chain for key in foreign if (chain := layout.chain_of_key(key)) is not None)
    else:
        found.is_complete = limit is None or found.examined < limit  # a folder has one page, of `limit` keys at most
    return found


def _pages(objects: ObjectStore, prefixes: Iterable[str], limit: int | None) -> Iterator[list[ObjectInfo]]:
    for prefix in prefixes:
        yield from objects.pages(prefix) if isinstance(objects, PagedStore) else [objects.list(prefix, limit=limit)]
