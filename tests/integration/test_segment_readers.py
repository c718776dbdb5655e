"""Other engines read a segment file as Floe does, column by column."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.segments.columns import SCHEMA, record_batch
from common.segments.reader import open_file
from common.segments.segment import Ledger, Reason
from common.segments.writer import SegmentWriter, SpooledSegment
from common.sequences import MAX_SEQUENCE, SequenceRange
from tests.support.segments import footer_of, message

ROWS = 3000  # of odd sequences, and the last one as far away as it can be
HEADERS = [None, b"", b"NATS/1.0\r\nA: 1\r\nA: 1\r\n\r\n", b"NATS/1.0\r\nB: \xff\r\n\r\n"]


def every_kind_of_value() -> pa.RecordBatch:
    """Rows with nulls and empty values, text and bytes, equal times, large payloads."""
    return record_batch(
        [*range(1, 2 * ROWS - 1, 2), MAX_SEQUENCE],
        [1_700_000_000_123_456_789 + n // 3 * 1_001 for n in range(ROWS)],
        [[b"nodes.%d" % (n % 50), "nödes.☃".encode(), b"raw.\xff\xfe"][n % 3] for n in range(ROWS)],
        [HEADERS[n % 4] for n in range(ROWS)],
        [[b"", bytes(range(256)), b'{"n":%d}' % n, b"x" * 50_000][n % 4] for n in range(ROWS)],
        [[None, "", "kéy"][n % 3] for n in range(ROWS)],
    )


@pytest.fixture(scope="module")
def spooled(tmp_path_factory: pytest.TempPathFactory) -> SpooledSegment:
    """A segment of two row groups."""
    batch = every_kind_of_value()
    writer = SegmentWriter(tmp_path_factory.mktemp("readers") / "segment.parquet", level=0, compression_level=1)
    for begin in range(0, ROWS, 700):
        writer.append(batch.slice(begin, 700))
    footer = replace(
        footer_of([message(1)]),
        coverage=SequenceRange(1, MAX_SEQUENCE),
        rows=ROWS,
        ledger=Ledger({Reason.NOT_MATCHED: MAX_SEQUENCE - ROWS}),
    )
    return writer.finish(footer)


@pytest.fixture(scope="module")
def path(spooled: SpooledSegment) -> Path:
    assert pq.read_metadata(spooled.path).num_row_groups == 2
    return spooled.path


@pytest.fixture(scope="module")
def expected(spooled: SpooledSegment) -> pa.Table:
    """What Floe reads, which is what was written."""
    with open_file(spooled.path, spooled.segment_name) as reader:
        table = pa.Table.from_batches(list(reader.batches()), SCHEMA)
    assert table.equals(pa.Table.from_batches([every_kind_of_value()]))
    return table


def offline() -> duckdb.DuckDBPyConnection:
    """DuckDB as it comes, without looking for extensions elsewhere."""
    return duckdb.connect(config={"autoinstall_known_extensions": False, "autoload_known_extensions": False})


def test_pyarrow_reads_the_same(path: Path, expected: pa.Table) -> None:
    assert pq.read_table(path).equals(expected)


@pytest.mark.parametrize("column", SCHEMA.names)
def test_duckdb_reads_the_same(path: Path, expected: pa.Table, column: str) -> None:
    with offline() as connection:
        if column == "timestamp":  # as Python sees it, DuckDB's time would need a library of time zones
            found = connection.execute(f"select epoch_us(timestamp) from '{path}'").fetchall()
            wanted = expected[column].cast(pa.int64()).to_pylist()
        else:
            found = connection.execute(f"select {column} from '{path}'").fetchall()
            wanted = expected[column].to_pylist()
    assert [row[0] for row in found] == wanted


def test_duckdb_sees_the_types_and_the_footer(path: Path) -> None:
    with offline() as connection:
        described = connection.execute(f"describe select * from '{path}'").fetchall()
        [[key]] = connection.execute(f"select key from parquet_kv_metadata('{path}')").fetchall()
    assert {row[0]: row[1] for row in described} == {
        "sequence": "BIGINT",
        "timestamp": "TIMESTAMP WITH TIME ZONE",
        "timestamp_ns": "BIGINT",
        "subject": "VARCHAR",
        "subject_raw": "BLOB",
        "headers": "BLOB",
        "payload": "BLOB",
        "sample_key": "VARCHAR",
    }
    assert bytes(key) == b"floe.segment"


@pytest.mark.parametrize("column", SCHEMA.names)
def test_polars_reads_the_same(path: Path, expected: pa.Table, column: str) -> None:
    found = polars.read_parquet(path)[column]
    if column == "timestamp":
        assert found.dtype == polars.Datetime("us", "UTC")
        assert found.to_physical().to_list() == expected[column].cast(pa.int64()).to_pylist()
    else:
        assert found.to_list() == expected[column].to_pylist()


def test_engines_find_rows_by_their_sequence(path: Path) -> None:
    with offline() as connection:
        query = f"select count(*) from '{path}' where sequence between 1000 and 2999"
        [[count]] = connection.execute(query).fetchall()
    frame = polars.scan_parquet(path).filter(polars.col("sequence").is_between(1000, 2999)).collect()
    assert count == frame.height == 1000
