"""Rows in memory: conversion of lists of a stream's messages to record batches, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.archive.segment import Message, decode_subject


def _field(number: int, name: str, kind: pa.DataType, *, nullable: bool = False) -> pa.Field[Any]:
    return pa.field(name, kind, nullable, metadata={"PARQUET:field_id": str(number)})


# Ids never change: a new column gets the next number, comes last and is nullable.
SCHEMA: pa.Schema = pa.schema(
    [
        _field(1, "sequence", pa.int64()),
        _field(2, "timestamp", pa.timestamp("us", tz="UTC")),
        _field(3, "timestamp_ns", pa.int64()),
        _field(4, "subject", pa.string()),
        _field(5, "subject_raw", pa.binary(), nullable=True),
        _field(6, "headers", pa.binary(), nullable=True),
        _field(7, "payload", pa.binary()),
        _field(8, "sample_key", pa.string(), nullable=True),
    ]
)

DELTA_COLUMNS = ("sequence", "timestamp", "timestamp_ns")
DICTIONARY_COLUMNS = ("subject",)
# Statistics of payloads and header blocks would show contents to readers of the metadata alone.
STATISTICS_COLUMNS = (*DELTA_COLUMNS, "subject")
TEXT_COLUMNS = ("subject", "sample_key")
RAW_COLUMNS = ("subject", "subject_raw", "headers", "payload")

_NS_PER_US = pa.scalar(1_000, pa.int64())  # nanoseconds in a microsecond
_ROUND_DOWN = pa.scalar(999, pa.int64())
_ZERO = pa.scalar(0, pa.int64())


def microseconds(timestamps_ns: pa.Array[Any]) -> pa.Array[Any]:
    """Return whole microseconds, rounded down (also before 1970, when integer division would round up)."""
    negative = pc.less(timestamps_ns, _ZERO)
    if negative.true_count:
        timestamps_ns = pc.if_else(negative, pc.subtract(timestamps_ns, _ROUND_DOWN), timestamps_ns)
    return pc.divide(timestamps_ns, _NS_PER_US)


def row_sizes(batch: pa.RecordBatch) -> pa.Array[Any]:
    """Return the bytes of each row: its subject, header block and payload, as the footer's `raw_bytes` counts them.

    A missing column counts as 0.
    """
    names = set(batch.schema.names)
    sizes: pa.Array[Any] = pa.repeat(_ZERO, batch.num_rows)
    if "subject" in names:
        sizes = pc.add(sizes, _subject_sizes(batch))
    for name in {"headers", "payload"} & names:
        sizes = pc.add(sizes, lengths(batch.column(name)).fill_null(0))
    return sizes


def _subject_sizes(batch: pa.RecordBatch) -> pa.Array[Any]:
    sizes = lengths(batch.column("subject"))
    if "subject_raw" in batch.schema.names and batch.column("subject_raw").null_count < batch.num_rows:
        return pc.coalesce(lengths(batch.column("subject_raw")), sizes)
    return sizes


def lengths(values: pa.Array[Any]) -> pa.Array[Any]:
    """Return the bytes of each value, null for a null; a dictionary's values are not expanded."""
    if isinstance(values, pa.DictionaryArray):
        return pc.take(lengths(values.dictionary), values.indices)
    sizes: pa.Array[Any] = pc.binary_length(values)  # type: ignore[call-overload]
    return sizes


def count_up_to(sequences: Any, last: int) -> int:
    """Return the number of `sequences`, an array, that are at most `last`."""
    return int(pc.less_equal(sequences, pa.scalar(last, pa.int64())).true_count)


def total(sizes: pa.Array[Any]) -> int:
    return int(pc.sum(sizes).as_py() or 0)


def text_size(values: pa.Array[Any]) -> int:
    """Return the bytes of all values, those of a dictionary as often as they occur."""
    return 0 if values.null_count == len(values) else total(lengths(values))


def raw_size(batch: pa.RecordBatch) -> int:
    """Return the sum of `row_sizes`, with fewer calls of kernels: they take most of the time for a few rows."""
    names = set(batch.schema.names)
    size = sum(text_size(batch.column(name)) for name in {"headers", "payload"} & names)
    if "subject_raw" in names and batch.column("subject_raw").null_count < batch.num_rows:
        return size + total(_subject_sizes(batch))
    return size + (text_size(batch.column("subject")) if "subject" in names else 0)


# The content of a message. `timestamp` derives from `timestamp_ns`, `sample_key` from the settings at the read.
CONTENT_COLUMNS = ("timestamp_ns", "subject", "subject_raw", "headers", "payload")


def record_batch(
    sequences: Sequence[int],
    timestamps_ns: Sequence[int],
    subjects: Sequence[bytes],
    headers: Sequence[bytes | None],
    payloads: Sequence[bytes],
    sample_keys: Sequence[str | None] | None = None,
) -> pa.RecordBatch:
    """Return one batch of `SCHEMA` from lists of equal length; without `sample_keys` every key is null.

    Raises ValueError if a list has another length, a subject or payload is None, or one column exceeds 2 GiB.
    """
    nanoseconds = pa.array(timestamps_ns, pa.int64())
    text, raw = _subjects(subjects)
    columns = {
        "sequence": pa.array(sequences, pa.int64()),
        "timestamp": microseconds(nanoseconds).cast(pa.timestamp("us", tz="UTC")),
        "timestamp_ns": nanoseconds,
        "subject": text,
        "subject_raw": raw,
        "headers": pa.array(headers, pa.binary()),
        "payload": pa.array(payloads, pa.binary()),
        "sample_key": (
            pa.nulls(len(sequences), pa.string()) if sample_keys is None else pa.array(sample_keys, pa.string())
        ),
    }
    _check(columns, len(sequences))
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=SCHEMA)


def _check(columns: dict[str, Any], rows: int) -> None:
    for name, values in columns.items():
        if isinstance(values, pa.ChunkedArray):
            raise ValueError(f"column {name}: expected less than 2 GiB in one batch, found {values.nbytes} bytes")
        if len(values) != rows:
            raise ValueError(f"column {name}: expected {rows} values, found {len(values)}")
        if values.null_count and not SCHEMA.field(name).nullable:
            raise ValueError(f"column {name}: expected no nulls, found {values.null_count}")


def _subjects(subjects: Sequence[bytes]) -> tuple[pa.Array[Any], pa.Array[Any]]:
    raw = pa.array(subjects, pa.binary())
    try:
        # The cast checks UTF-8 for all rows at once; an array created as text would accept any bytes.
        return raw.cast(pa.string()), pa.nulls(len(subjects), pa.binary())
    except pa.ArrowInvalid:
        text = pa.array([decode_subject(subject) for subject in subjects], pa.string())
        return text, pa.array([None if is_text(subject) else subject for subject in subjects], pa.binary())


def is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Columns:
    """A batch as lists of equal length, in sequence order: the form that a publisher loops over.

    `sample_keys`: the keys by which the sampler distinguishes messages; None if they were not sampled.
    """

    sequences: list[int]
    timestamps_ns: list[int]
    subjects: list[bytes]
    headers: list[bytes | None]
    payloads: list[bytes]
    sample_keys: list[str | None] | None = None

    @classmethod
    def empty(cls, *, sampled: bool) -> Columns:
        return cls([], [], [], [], [], [] if sampled else None)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def raw_size(self) -> int:
        headers = sum(map(len, filter(None, self.headers)))
        return sum(map(len, self.payloads)) + sum(map(len, self.subjects)) + headers

    @property
    def fields(self) -> tuple[list[Any], ...]:
        """The lists of the fields of a Message, in its order."""
        return self.sequences, self.timestamps_ns, self.subjects, self.headers, self.payloads

    @property
    def last(self) -> Message:
        """The last message. There must be at least one."""
        return Message(*(values[-1] for values in self.fields))

    def part(self, first: int, last: int) -> Columns:
        """Return the messages from index `first` up to, not including, `last`."""
        return self._map(lambda values: values[first:last], self.sample_keys)

    def select(self, selected: Sequence[bool] | bytes | bytearray, keys: list[str | None] | None = None) -> Columns:
        """Return the messages for which `selected` is true, with their part of `keys` as sample keys."""
        return self._map(lambda values: list(compress(values, selected)), keys)

    def _map(self, take: Callable[[list[Any]], list[Any]], keys: list[str | None] | None) -> Columns:
        sequences, times, subjects, headers, payloads = map(take, self.fields)
        return Columns(sequences, times, subjects, headers, payloads, None if keys is None else take(keys))

    def extend(self, more: Columns) -> None:
        """Append `more`; its sample keys only if `sample_keys` is not None."""
        for values, added in zip(self.fields, more.fields, strict=True):
            values.extend(added)
        if self.sample_keys is not None:
            self.sample_keys.extend(more.sample_keys or [None] * len(more))


def columns_of(batch: pa.RecordBatch) -> Columns:
    columns: list[Any] = [batch.column(name) for name in ("sequence", "timestamp_ns", "headers", "payload")]
    sequences, times, headers, payloads = (column.to_pylist() for column in columns)
    return Columns(sequences, times, subject_bytes(batch).to_pylist(), headers, payloads)


def subject_bytes(batch: pa.RecordBatch) -> Any:
    """Return the subjects, byte for byte as in the stream."""
    text: Any = batch.column("subject").cast(pa.binary())
    raw = batch.column("subject_raw") if "subject_raw" in batch.schema.names else None
    return text if raw is None or raw.null_count == len(raw) else pc.coalesce(raw, text)


def messages(batch: pa.RecordBatch) -> Iterator[Message]:
    """Return the messages one by one, byte for byte as they were read; `columns_of` is faster."""
    return map(Message, *columns_of(batch).fields)


def batch_of(*rows: Message) -> pa.RecordBatch:
    return record_batch(
        [row.sequence for row in rows],
        [row.timestamp_ns for row in rows],
        [row.subject for row in rows],
        [row.headers for row in rows],
        [row.payload for row in rows],
    )


def first_difference(left: Any, right: Any) -> int | None:
    """Return the first row in which two columns differ; None if none does. Null equals only null."""
    if left.equals(right):
        return None
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    same = pc.or_(pc.fill_null(pc.equal(left, right), False), both_null)
    row: int = pc.index(same, False).as_py()
    return None if row < 0 else row
