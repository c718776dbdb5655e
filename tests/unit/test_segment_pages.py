"""Page headers and metadata as a forger would write them, byte by byte."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.archive import guard
from common.archive.guard import Bounds, Chunk, ParquetLimits, TruncatedError, read_struct
from common.archive.reader import open_file
from common.errors import SegmentCorrupt
from tests.support.segments import message, write_segment

BOUNDS = Bounds(values=100, elements=10)
PLAIN, DICTIONARY_CODED, DELTA_BYTE_ARRAY = 0, 8, 7


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def encoded(fields: dict[int, Any]) -> bytes:
    """Return a struct of i32 numbers, strings, nested structs and lists of i32."""
    out, last = bytearray(), 0
    for number, value in fields.items():
        kind = {int: 5, bytes: 8, dict: 12, list: 9}[type(value)]
        step = number - last
        out += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + varint(number << 1)
        out += body(value)
        last = number
    return bytes(out) + b"\0"


def body(value: Any) -> bytes:
    if isinstance(value, dict):
        return encoded(value)
    if isinstance(value, bytes):
        return varint(len(value)) + value
    if isinstance(value, list):
        return bytes([min(len(value), 15) << 4 | 5]) + b"".join(body(v) for v in value)
    return varint(value << 1 if value >= 0 else (-value << 1) - 1)


def page(values: int, *, kind: int = 0, plain: int = 10, stored: int = 10, coding: int = PLAIN, **other: Any) -> bytes:
    fields = {1: kind, 2: plain, 3: stored, 4: 12345, {0: 5, 2: 7, 3: 8}.get(kind, 6): {1: values, 2: coding}, **other}
    return encoded(dict(sorted(fields.items()))) + b"x" * max(0, stored)


def walked(data: bytes, rows: int, column: str = "payload", data_at: int = 0, **limits: int) -> int:
    chunk = Chunk(column, 0, data_at, len(data), rows)
    source = SimpleNamespace(read_at=lambda size, offset: data[offset : offset + size])
    return guard.decoding_cost([guard.pages(source, chunk, ParquetLimits(**limits))], rows, ParquetLimits()).size


def test_pages_add_up_to_what_they_decode_to_or_are_stored_as_and_bytes_behind_them_are_not_read() -> None:
    assert walked(page(3, plain=100) + page(2, plain=50), rows=5) == 150
    assert (walked(page(1, plain=1, stored=90), rows=1), walked(page(1) + b"rubbish", rows=1)) == (90, 10)


def test_pages_that_the_writer_does_not_make_are_refused() -> None:
    for data, rows, cause in (
        (page(2_000_000_000), 5, "expected 5 values, found pages of 2000000000"),
        (page(3), 5, "page header at"),
        (page(0), 5, "a page holds no values"),
        (page(5, coding=DELTA_BYTE_ARRAY), 5, "encoding 7"),
        (page(5, coding=DICTIONARY_CODED), 5, "encoding 8"),
        (page(5, kind=1), 5, "found type 1"),
        (page(5, plain=-1), 5, "field 2: expected a count, found -1"),
        (page(5)[:-1], 5, "ends after the column's end"),
        (page(5)[:6], 5, "page header at 0 exceeds 6 bytes"),
        (page(1, kind=2), 5, "encoding 0 of a dictionary page"),
        (encoded({1: 0, 2: 10, 3: 10, 5: {1: 5, 2: 0}}), 5, "no checksum"),
        (encoded({1: 0, 2: 10, 3: 10, 4: 1}), 5, "expected data or dictionary pages"),
    ):
        with pytest.raises(SegmentCorrupt) as caught:
            walked(data, rows)
        assert cause in caught.value.message


def test_a_subject_may_have_one_dictionary_first_and_the_first_data_page_is_where_metadata_puts_it() -> None:
    """Refuse others: a reader that skips the dictionary would find pages that were not checked."""
    dictionary, coded = page(2, kind=2), page(5, coding=DICTIONARY_CODED)
    assert walked(dictionary + coded, 5, "subject", data_at=len(dictionary)) == 20
    for data, data_at, cause in (
        (dictionary + dictionary + coded, 2 * len(dictionary), "follows other pages"),
        (page(1_000_000, kind=2), 0, "a dictionary of 10 bytes claims 1000000 values"),
        (dictionary + coded, 5000, "expected the first data page at 5000"),
    ):
        with pytest.raises(SegmentCorrupt, match=cause):
            walked(data, 5, "subject", data_at=data_at)


# The cost of decoding

MIB = 2**20


def test_a_batch_costs_the_pages_that_its_rows_may_be_in() -> None:
    for columns, rows, batch_rows, held, batch in (
        ([[(8, 800)]], 8, 8, 800, 800),
        # A column with a dictionary holds both.
        ([[(0, 300), (8, 100)], [(8, 50)]], 8, 8, 450, 150),
        # Batches of 8 MiB: the whole page of the large message counts, with its neighbours.
        ([[(1, 4 * MIB)] * 8], 8, 2, 4 * MIB, 8 * MIB),
        ([[(4, 30 * MIB), (4, 2 * MIB)]], 8, 2, 30 * MIB, 30 * MIB),
        # A batch never has more rows, also if they cost little.
        ([[(40_000, 40_000)]], 40_000, 16_384, 40_000, 40_000),
    ):
        cost = guard.decoding_cost(columns, rows, ParquetLimits())
        assert (cost.rows, cost.held, cost.batch) == (batch_rows, held, batch)
        assert cost.size == sum(size for pages in columns for _, size in pages)
        assert cost.peak_bytes == held + batch + 256 * batch_rows


def test_pages_that_only_cost_time_are_refused() -> None:
    assert walked(page(1) * 64, rows=64) == 640
    with pytest.raises(SegmentCorrupt, match="65 pages hold 65 values in 650 bytes"):
        walked(page(1) * 65, rows=65)
    assert walked(page(256) * 500, rows=500 * 256) == 5000
    assert walked(page(1, plain=64 * 1024, stored=1) * 500, rows=500) == 500 * 64 * 1024
    with pytest.raises(SegmentCorrupt, match="at most 2097152 rows in a row group"):  # two bytes can claim 2**44
        guard.check_shape(guard.Metadata(2**44, (guard.Group(2**44, 10, ()),), {}), 0, ParquetLimits())


# The structures themselves


def test_a_structure_is_read_with_its_size() -> None:
    fields = {1: 5, 2: -7, 4: b"text", 30: {1: 1}, 31: [1, 2, 3]}
    assert read_struct(encoded(fields) + b"more", BOUNDS) == (fields, len(encoded(fields)))


def test_a_structure_that_is_cut_wants_more_bytes() -> None:
    whole = encoded({1: 5, 4: b"text", 5: {1: 1}})
    for length in range(1, len(whole)):
        with pytest.raises(TruncatedError):
            read_struct(whole[:length], BOUNDS)


def test_a_structure_that_readers_would_not_agree_on_or_with_too_many_values_is_refused() -> None:
    for data, cause in (
        (b"\x15\x02\x05\x02\x02\x00", "field 1 comes twice"),
        (b"\x15" + b"\xff" * 9 + b"\x01\x00", "expected 32 bits"),
        (b"\x15" + b"\xff" * 11, "longer than 10 bytes"),
        (b"\x1b\x00\x00", "type 11"),
        (b"\x19\xf5\xff\xff\xff\xff\x0f", "expected at most 10"),
        (b"\x19" + b"\x19" * 20, "nested deeper than 8"),
        (encoded({n: [1] * 10 for n in range(1, 12)}), "more than 100 values"),
    ):
        with pytest.raises(ValueError, match=cause):
            read_struct(data, BOUNDS)


# Metadata that crash the process when pyarrow reads them


GOOD = {1: 6, 4: 6, 5: 1, 7: 10, 9: 4}


@pytest.mark.parametrize("codec", [22, -32])
def test_a_codec_that_there_is_not_is_refused_before_pyarrow_sees_it(codec: int) -> None:
    with pytest.raises(SegmentCorrupt, match="expected compression UNCOMPRESSED or ZSTD") as caught:
        guard.chunk("payload", guard.Group(1, 10, ({3: {**GOOD, 4: codec}},)), 0)
    assert caught.value.code == "E-SEG-CODEC"


def test_a_column_chunk_that_cannot_be_is_refused() -> None:
    wrong = {}, 5, {**GOOD, 1: 0}, {**GOOD, 5: 2}, {**GOOD, 7: -10}, {1: 6, 4: 6, 5: 1, 7: 10}
    for column in ({}, *({3: each} for each in wrong), {1: b"elsewhere", 3: GOOD}, {3: GOOD, 9: b"secret"}):
        with pytest.raises(SegmentCorrupt, match="column payload: "):
            guard.chunk("payload", guard.Group(1, 10, (column,)), 0)


def test_a_file_whose_codec_was_changed_in_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    name = write_segment(path, [message(1)]).segment_name
    whole = path.read_bytes()
    # Field 4 (codec) of the column that comes before `num_values` 1: ZSTD (6) is written as 0x15 0x0c.
    assert b"\x15\x0c\x16\x02" in whole
    path.write_bytes(whole.replace(b"\x15\x0c\x16\x02", b"\x15\x2c\x16\x02"))
    with pytest.raises(SegmentCorrupt, match="found 22"):
        open_file(path, name)
