"""Files that do not match their key: each is refused, with key and cause, in bounded memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from common.archive.columns import SCHEMA
from common.archive.guard import ParquetLimits
from common.archive.keys import Layout, SegmentName
from common.archive.reader import open_file
from common.archive.segment import Footer, Ledger, Reason
from common.chain import Chain
from common.errors import SegmentCorrupt, Unavailable
from common.sequences import SequenceRange
from tests.support.segments import footer_of, forge, message, name_of, read_segment, table_of, write_segment

ROWS = [message(n, b"payload %d" % n) for n in range(1, 41)]
NAME = name_of(footer_of(ROWS))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segment.parquet"


def refusal(path: Path, name: SegmentName = NAME, **options: Any) -> SegmentCorrupt:
    """Return the error from reading the whole file, which must name the key."""
    with pytest.raises(SegmentCorrupt) as caught:
        read_segment(path, name, **options)
    assert caught.value.message.startswith(f"segment {options.get('key', Layout().segment(name))}: ")
    return caught.value


def forged(path: Path, table: pa.Table | None = None, footer: Any = None, **options: Any) -> SegmentCorrupt:
    forge(path, table if table is not None else table_of(ROWS), footer or footer_of(ROWS), **options)
    return refusal(path)


def changed(**fields: Any) -> bytes:
    """Return the footer as JSON with other values; a field that is None is removed."""
    document = {**json.loads(footer_of(ROWS).to_json()), **fields}
    return json.dumps({name: value for name, value in document.items() if value is not None}).encode()


# Not Parquet


NOT_PARQUET = [
    b"",
    b"PAR1PAR1",
    b"<html><body>503 Service Unavailable</body></html>",
    b"PAR1" + b"\x00" * 100 + b"\xff\xff\xff\x7fPAR1",
    b"PAR1" + b"\x00" * 100 + b"\x10\x00\x00\x00PAR1",
    b"PARE" + b"\x00" * 100 + b"\x10\x00\x00\x00PARE",
]


@pytest.mark.parametrize("content", NOT_PARQUET)
def test_what_is_not_parquet_is_refused_and_an_encrypted_footer_is_named(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    error = refusal(path)
    assert error.code == ("E-SEG-CODEC" if content.endswith(b"PARE") else "E-SEG-CORRUPT")
    assert content or "not a Parquet file (0 bytes" in error.message
    assert content or refusal(path, key="data/x").message.startswith("segment data/x: not a Parquet file")


def test_a_file_cut_anywhere_or_with_bytes_behind_it_is_refused(path: Path) -> None:
    name, whole = write_segment(path, ROWS).segment_name, path.read_bytes()
    for content in (*(whole[:n] for n in range(0, len(whole), 7)), whole[:-1], whole + b"\n"):
        path.write_bytes(content)
        refusal(path, name)


def test_a_byte_changed_anywhere_is_refused_or_changes_no_row(path: Path) -> None:
    rows = ROWS[:10]
    name, whole = write_segment(path, rows).segment_name, path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 9):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at // 9 % 8)]) + whole[at + 1 :])
        try:
            assert read_segment(path, name) == rows
        except SegmentCorrupt:
            refused += 1
    assert refused > len(whole) / 27


# Schema


def with_column(name: str, values: Any, kind: pa.DataType, *, nullable: bool = False) -> pa.Table:
    table, field = table_of(ROWS), pa.field(name, kind, nullable)
    return table.set_column(SCHEMA.get_field_index(name), field, pa.array(values, kind))


def stamps(*kind: str) -> pa.Table:
    return with_column("timestamp", [0] * 40, pa.timestamp(*kind))


def more(name: str, values: Any, *, nullable: bool = True) -> pa.Table:
    return table_of(ROWS).append_column(pa.field(name, values.type, nullable), values)


BYTES, NUMBERS = pa.array([b"x"] * 40), pa.array(range(1, 41), pa.int64())
TIME = "column timestamp: expected timestamp[us, tz=UTC] not null, found timestamp"
STRUCT = pa.struct([("a", pa.binary())])


def test_each_wrong_column_is_named(path: Path) -> None:
    for table, cause in (
        (table_of(ROWS).drop_columns(["payload"]), "payload: expected binary not null, found none"),
        (table_of(ROWS).rename_columns(["seq", *SCHEMA.names[1:]]), "sequence: expected int64 not null, found none"),
        (with_column("payload", ["x"] * 40, pa.string()), "payload: expected binary not null, found string not null"),
        (with_column("sequence", range(1, 41), pa.uint64()), "expected int64 not null, found uint64 not null"),
        (with_column("sequence", range(1, 41), pa.int64(), nullable=True), "expected int64 not null, found int64"),
        (stamps("us"), f"{TIME}[us] not null"),
        (more("more", NUMBERS, nullable=False), "column more: expected no such column or a nullable one"),
        (more("payload", BYTES), "column payload: expected once, found 2 times"),
        (with_column("payload", [{"a": b"x"}] * 40, STRUCT), "found struct<a: binary> not null"),
    ):
        error = forged(path, table)
        assert (error.code, cause in error.message) == ("E-SEG-SCHEMA", True), error.message


def test_all_wrong_columns_are_named_at_once_and_an_arrow_schema_in_the_file_cannot_change_a_type(path: Path) -> None:
    error = forged(path, table_of(ROWS).select(["sequence", "timestamp", "subject_raw", "headers"]))
    assert error.message.count("found none") == 4
    table = with_column("payload", [b"x"] * 40, pa.large_binary())
    assert forged(path, table, store_schema=True).code == "E-SEG-SCHEMA"


def test_the_forger_can_make_a_good_file_and_further_columns_that_may_be_null_are_passed_over(path: Path) -> None:
    for table in (table_of(ROWS), more("later", pa.array([{"a": [1]}] * 40))):
        forge(path, table, footer_of(ROWS))
        assert read_segment(path, NAME) == ROWS


# Footer


def test_a_footer_that_is_wrong_is_refused_in_one_line(path: Path) -> None:
    for footer, code, cause in (
        (b"not json", "E-SEG-META", "expected JSON"),
        (b"[]", "E-SEG-META", "expected an object, found list"),
        (b"[" * 100_000, "E-SEG-META", "expected JSON"),
        (b"{}", "E-SEG-META", "footer format_version"),
        (changed(format_version=2), "E-SEG-VERSION", "expected 1, found 2"),
        (changed(site="eu-west"), "E-SEG-META", "footer chain: expected us-east/NODES/0000/0 as in the key"),
        (changed(site="../.."), "E-SEG-META", "site"),
        (changed(site="a\nb"), "E-SEG-META", "site"),
        (changed(level=1), "E-SEG-META", "footer level: expected 0 as in the key, found 1"),
        (changed(last=41), "E-SEG-META", "footer coverage: expected 1..40 as in the key, found 1..41"),
        (changed(first=40, last=1), "E-SEG-META", "range 40..1"),
        (changed(rows=True), "E-SEG-META", "footer rows: expected int, found True"),
        (changed(rows=39), "E-SEG-META", "footer rows: expected 40 as in the file, found 39"),
        (changed(ledger={"deleted": 1}), "E-SEG-META", "expected rows and ledger to sum to 40, found 40 + 1"),
        (changed(ledger={"deleted": -1, "lost": 1}), "E-SEG-META", "ledger deleted: expected a count"),
        (changed(unread=[1, 2]), "E-SEG-META", "footer unread: expected a range inside"),
        (changed(unread=[1, 2, 3]), "E-SEG-META", "unread: expected two sequences"),
        (changed(inputs={"count": float("inf"), "digest": ""}), "E-SEG-META", "footer floe.segment"),
        (changed(raw_bytes=-1), "E-SEG-META", "footer raw_bytes"),
        (changed(first_timestamp_ns=None), "E-SEG-META", "footer timestamps"),
        (changed(raw_bytes=10_000), "E-SEG-META", "footer raw_bytes"),
        (changed(raw_bytes=10), "E-SEG-BOMB", "expected 10 raw bytes as in the footer, found more"),
    ):
        error = forged(path, footer=footer)
        assert "\n" not in error.as_text()
        assert (error.code, cause in error.message) == (code, True), error.message


def test_a_file_without_a_footer_is_refused_and_rows_and_ledger_must_sum_to_the_coverage(path: Path) -> None:
    forge(path, table_of(ROWS), footer_of(ROWS), key="other")
    assert "expected one, found none" in refusal(path).message
    footer = footer_of(ROWS, SequenceRange(1, 50), ledger=Ledger({Reason.DELETED: 9}))
    forge(path, table_of(ROWS), footer)
    assert "to sum to 50, found 40 + 9" in refusal(path, name_of(footer)).message


# Rows


def rows_with(**columns: Any) -> pa.Table:
    table = table_of(ROWS)
    for name, values in columns.items():
        table = table.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), values)
    return table


def sequences(*values: int) -> pa.Array:
    return pa.array([*values, *range(len(values) + 1, 41)], pa.int64())


def test_rows_out_of_order_or_outside_the_coverage_are_refused(path: Path) -> None:
    for values, cause in (
        (sequences(1, 3, 2), "sequence 2 after 3"),
        (sequences(1, 1), "sequence 1 after 1"),
        (sequences(0), "row group 0"),
        (pa.array([*range(1, 40), 2**63 - 1], pa.int64()), "row group 0: expected sequences in 1..40"),
    ):
        error = forged(path, rows_with(sequence=values))
        assert (error.code, cause in error.message) == ("E-SEG-ROWS", True), error.message


def test_order_is_checked_across_row_groups_and_without_the_column_being_asked_for(path: Path) -> None:
    repeated = pa.concat_tables([table_of(ROWS[:20]), table_of(ROWS[10:30])])
    forge(path, repeated, footer_of(ROWS), row_group_size=20)
    assert "row group 1: expected sequences in 21..40, found 11..30" in refusal(path).message
    forge(path, repeated, footer_of(ROWS))
    with pytest.raises(SegmentCorrupt, match="after 20"), open_file(path, NAME) as reader:
        list(reader.batches(columns=["payload"]))


def test_codecs_and_encodings_that_the_writer_does_not_use_are_refused(path: Path) -> None:
    for options, code, cause in (
        *(({"compression": codec}, "E-SEG-CODEC", "") for codec in ("gzip", "snappy")),
        ({"write_statistics": False}, "", "expected statistics"),
        ({"write_page_checksum": False}, "", "has no checksum"),
        ({"column_encoding": {"payload": "DELTA_BYTE_ARRAY"}}, "", ""),
        ({"column_encoding": {"timestamp_ns": "BYTE_STREAM_SPLIT"}}, "", ""),
        *(({"use_dictionary": [column]}, "", "") for column in ("payload", "headers", "sequence")),
        ({"data_page_version": "2.0"}, "", ""),
    ):
        error = forged(path, **options)
        assert (code in error.code, cause in error.message) == (True, True), (options, error.message)


def off_by_a_microsecond() -> pa.Table:
    return rows_with(timestamp=pc.add(table_of(ROWS)["timestamp"].cast(pa.int64()), 1).cast(pa.timestamp("us", "UTC")))


def not_utf8(column: str) -> pa.Table:
    raw = pa.array([b"\xff\xfe"] * 40, pa.binary())
    return rows_with(**{column: pa.Array.from_buffers(pa.string(), 40, raw.buffers())})


def test_columns_that_do_not_agree_or_are_no_text_are_refused(path: Path) -> None:
    for table, cause in (
        (off_by_a_microsecond(), "row 0 of a batch: expected timestamp"),
        *((not_utf8(column), f"column {column}") for column in ("subject", "sample_key")),
        *(
            (rows_with(subject_raw=pa.array([raw] + [None] * 39, pa.binary())), "for subject_raw")
            for raw in (b"nodes.one", b"\xff")
        ),
    ):
        error = forged(path, table, footer_of(ROWS, raw_bytes=10_000))
        assert (error.code, cause in error.message) == ("E-SEG-ROWS", True), error.message


# Encodings, codecs, sizes


def test_a_file_beyond_the_limits_is_refused(path: Path) -> None:
    for limits, cause in (
        (ParquetLimits(row_groups=3), "expected at most 3 row groups, found 4"),
        (ParquetLimits(columns=7), "expected at most 7 columns, found 8"),
        (ParquetLimits(footer_bytes=100), "expected metadata of at most 100 bytes"),
        (ParquetLimits(page_header_bytes=4), "exceeds 4 bytes"),
        (ParquetLimits(footer_value_bytes=4000), ""),
    ):
        forge(path, table_of(ROWS), changed(writer="x" * 5000), row_group_size=10)
        assert read_segment(path, NAME) == ROWS
        assert cause in refusal(path, limits=limits).message


def test_a_page_that_inflates_beyond_the_limit_is_refused_before_it_is_inflated(path: Path) -> None:
    rows = [message(1, b"\0" * (4 << 20))]
    name = write_segment(path, rows).segment_name
    assert path.stat().st_size < 10_000
    assert read_segment(path, name) == rows
    assert refusal(path, name, limits=ParquetLimits(row_group_bytes=1 << 20)).code == "E-SEG-BOMB"


def dictionary_bomb(path: Path, column: str, size: int, rows: int) -> Footer:
    """Write `rows` rows that all use one value of `size` bytes: a file of 3 KB that decodes to size * rows."""
    found, kind = [message(n, b"") for n in range(1, rows + 1)], SCHEMA.field(column).type
    value = pa.array([b"x" * size], pa.binary()).cast(kind)
    values = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), value)
    field = pa.field(column, values.type, SCHEMA.field(column).nullable)
    table = table_of(found).set_column(SCHEMA.get_field_index(column), field, values)
    footer = footer_of(found, raw_bytes=10**12)
    options = {"use_dictionary": [column], "dictionary_pagesize_limit": 2 * size, "write_statistics": ["sequence"]}
    forge(path, table, footer, **options)
    return footer


def _bomb_reader(path: Path, footer: Footer) -> str:
    """Return a program that reads the bomb and prints its peak memory in MiB above its start."""
    return f"""
import resource
from pathlib import Path
import common.archive.reader as parquet
from common.chain import Chain
from common.errors import SegmentCorrupt
from common.archive.keys import SegmentName
from common.sequences import SequenceRange
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
name = SegmentName(Chain("us-east", "NODES"), 0, SequenceRange(1, {footer.rows}), "0" * 16)
try:
    with parquet.open_file(Path({str(path)!r}), name) as reader:
        print(sum(batch.num_rows for batch in reader.batches()))
except SegmentCorrupt as error:
    print(error.code, peak() - before)
"""


@pytest.mark.parametrize(("column", "most"), [("payload", 20), ("subject", 80)])
def test_a_dictionary_bomb_costs_no_more_than_its_dictionary(path: Path, column: str, most: int) -> None:
    footer = dictionary_bomb(path, column, 10 << 20, 100)
    assert path.stat().st_size < 5000
    code, mebibytes = subprocess.check_output([sys.executable, "-c", _bomb_reader(path, footer)], text=True).split()
    assert code == "E-SEG-BOMB"
    assert int(mebibytes) < most


# Errors that are not the file's fault


def test_an_outage_a_missing_file_and_columns_that_there_are_not_are_not_the_file_s_fault(path: Path) -> None:
    def fetch(first: int, length: int) -> None:
        raise Unavailable("store away")

    with pytest.raises(FileNotFoundError):
        open_file(path, NAME)
    name = write_segment(path, ROWS).segment_name
    with pytest.raises(Unavailable, match="store away"):
        open_file(path, name, fetch=fetch)
    with open_file(path, name) as reader, pytest.raises(ValueError, match=r"columns \['seq'\]"):
        reader.batches(columns=["seq"])


def test_what_was_to_be_done_on_closing_is_done_also_when_opening_fails(path: Path) -> None:
    name = write_segment(path, ROWS).segment_name
    closed: list[str] = []
    open_file(path, name, on_close=lambda: closed.append("good")).close()
    with pytest.raises(SegmentCorrupt):
        open_file(path, name._replace(chain=Chain("other", "F")), on_close=lambda: closed.append("bad"))
    assert closed == ["good", "bad"]
