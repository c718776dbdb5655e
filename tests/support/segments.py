"""Builders of segments for tests: messages, footers, files, good ones and bad ones."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.archive.columns import SCHEMA, Columns, messages, raw_size, record_batch
from common.archive.keys import SegmentName
from common.archive.reader import SegmentReader, open_file
from common.archive.segment import Footer, Ledger, Message, Reason, Tip
from common.archive.writer import SegmentWriter, SpooledSegment
from common.chain import Chain
from common.sequences import SequenceRange

CHAIN = Chain("us-east", "NODES")
START_NS = 1_700_000_000_123_456_789


def message(sequence: int, payload: bytes = b"payload", **parts: Any) -> Message:
    """Return one message; its time follows from its sequence unless given."""
    fields = {"timestamp_ns": START_NS + sequence * 1_000_001, "subject": b"nodes.one", "headers": None}
    return Message(sequence=sequence, payload=payload, **{**fields, **parts})


def batch_of(rows: Sequence[Message], keys: Sequence[str | None] | None = None) -> pa.RecordBatch:
    """Return one record batch of `rows`. `keys`: of a sampled feed."""
    names = "sequence", "timestamp_ns", "subject", "headers", "payload"
    return record_batch(*([getattr(row, name) for row in rows] for name in names), keys)  # type: ignore[arg-type]


def columns_of(sequences: Iterable[int], payload: bytes = b"x" * 10, keys: list[str | None] | None = None) -> Columns:
    """Return rows of these sequences, a second apart."""
    chosen = list(sequences)
    count = len(chosen)
    times = [sequence * 1_000_000_000 for sequence in chosen]
    return Columns(chosen, times, [b"s"] * count, [None] * count, [payload] * count, keys)


def footer_of(rows: Sequence[Message], coverage: SequenceRange | None = None, **fields: Any) -> Footer:
    """Return a footer that balances and agrees with `rows`."""
    coverage = coverage or SequenceRange(rows[0].sequence, rows[-1].sequence)
    missing = len(coverage) - len(rows)
    values: dict[str, Any] = {
        "chain": CHAIN,
        "level": 0,
        "coverage": coverage,
        "rows": len(rows),
        "ledger": Ledger({Reason.DELETED: missing} if missing else {}),
        "raw_bytes": raw_size(batch_of(rows)),
        "first_timestamp_ns": rows[0].timestamp_ns if rows else None,
        "last_timestamp_ns": rows[-1].timestamp_ns if rows else None,
        "tip": Tip.of(rows[-1]) if rows else None,
        "writer": "tests",
    }
    return Footer(**{**values, **fields})


def write_segment(
    path: Path,
    rows: Sequence[Message],
    coverage: SequenceRange | None = None,
    *,
    batch_rows: int = 1000,
    group_bytes: int = 0,
    **fields: Any,
) -> SpooledSegment:
    """Write a finished segment file, as the services do."""
    footer = footer_of(rows, coverage, **fields)
    writer = SegmentWriter(path, level=footer.level, compression_level=1, group_bytes=group_bytes)
    for begin in range(0, len(rows), batch_rows):
        writer.append(batch_of(rows[begin : begin + batch_rows]))
    return writer.finish(footer)


def read_segment(path: Path, name: SegmentName, **options: Any) -> list[Message]:
    """Return every message of the file."""
    with open_file(path, name, **options) as reader:
        return read_all(reader)


def read_all(reader: SegmentReader, rows: SequenceRange | None = None) -> list[Message]:
    """Return every message inside `rows`."""
    return [m for batch in reader.batches(rows) for m in messages(batch)]


def name_of(footer: Footer) -> SegmentName:
    """Return the name of a file with a digest that nobody checks."""
    return SegmentName(footer.chain, footer.level, footer.coverage, "0" * 16)


def forge(
    path: Path,
    table: pa.Table,
    footer: Footer | bytes | None,
    *,
    key: str = "floe.segment",
    row_group_size: int | None = None,
    **options: Any,
) -> None:
    """Write a Parquet file as anybody could put it into the bucket, as near to a segment as its maker likes."""
    settings: dict[str, Any] = {
        "compression": "zstd",
        "use_dictionary": ["subject"] if "subject" in table.schema.names else False,
        "write_statistics": True,
        "write_page_checksum": True,
        "store_schema": False,
    }
    with pq.ParquetWriter(str(path), table.schema, **{**settings, **options}) as writer:
        if table.num_rows:
            writer.write_table(table, row_group_size=row_group_size)
        if footer is not None:
            text = footer if isinstance(footer, bytes) else footer.to_json()
            writer.add_key_value_metadata({key: text.decode()})


def table_of(rows: Sequence[Message]) -> pa.Table:
    """Return the rows as a table of the segment's schema."""
    return pa.Table.from_batches([batch_of(rows)], SCHEMA)
