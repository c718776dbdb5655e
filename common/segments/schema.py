"""The columns of a segment file, how each is encoded, and what a row weighs.

| column       | type               | holds |
|--------------|--------------------|-------|
| sequence     | int64              | the JetStream sequence; strictly ascending |
| timestamp    | timestamp[us, UTC] | `timestamp_ns` cut to microseconds, which every engine reads as a time |
| timestamp_ns | int64              | nanoseconds since 1970 UTC |
| subject      | string             | the subject; bytes that are not UTF-8 as `\\xNN` |
| subject_raw  | binary, null       | the subject's bytes, only where they are not UTF-8 |
| headers      | binary, null       | the raw NATS header block; null if the message has none |
| payload      | binary             | the payload; empty is not null |
| sample_key   | string, null       | by what the sampler told messages apart |
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def _field(number: int, name: str, kind: pa.DataType, *, nullable: bool = False) -> pa.Field[Any]:
    return pa.field(name, kind, nullable, metadata={"PARQUET:field_id": str(number)})


# Ids are for ever: a new column gets the next number, stands last and may be null.
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
# Least and greatest payload and header block in the metadata would show contents to whoever reads only that.
STATISTICS_COLUMNS = (*DELTA_COLUMNS, "subject")
TEXT_COLUMNS = ("subject", "sample_key")
RAW_COLUMNS = ("subject", "subject_raw", "headers", "payload")

_THOUSAND = pa.scalar(1_000, pa.int64())  # nanoseconds in a microsecond
_ROUND_DOWN = pa.scalar(999, pa.int64())
_ZERO = pa.scalar(0, pa.int64())


def microseconds(timestamps_ns: pa.Array[Any]) -> pa.Array[Any]:
    """Whole microseconds, rounded down (before 1970 too, where integer division would round up)."""
    negative = pc.less(timestamps_ns, _ZERO)
    if negative.true_count:
        timestamps_ns = pc.if_else(negative, pc.subtract(timestamps_ns, _ROUND_DOWN), timestamps_ns)
    return pc.divide(timestamps_ns, _THOUSAND)


def row_sizes(batch: pa.RecordBatch) -> pa.Array[Any]:
    """Raw bytes of each row: its subject, header block and payload, as the footer's `raw_bytes` counts them.

    A column that `batch` lacks counts as nothing.
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
    """Bytes of each value, null where it is null; of a dictionary's values without expanding them."""
    if isinstance(values, pa.DictionaryArray):
        return pc.take(lengths(values.dictionary), values.indices)
    sizes: pa.Array[Any] = pc.binary_length(values)  # type: ignore[call-overload]
    return sizes.cast(pa.int64())


def total(sizes: pa.Array[Any]) -> int:
    """The sum, 0 of nothing."""
    return int(pc.sum(sizes).as_py() or 0)


def raw_size(batch: pa.RecordBatch) -> int:
    """Raw bytes of all rows of `batch`: what a segment's `max_size` and the footer's `raw_bytes` count."""
    return total(row_sizes(batch))
