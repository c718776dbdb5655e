"""The pages of a column chunk, walked before they are decoded: what decoding them can cost at most.

Sizes in the metadata of a Parquet file are claims. A dictionary of one 10 MiB value, used a hundred times,
decodes to 1 GiB from 700 bytes; an encoding that shares prefixes does worse; a forged count makes a decoder
allocate for it. The page headers say what a decoder will really meet, so they are read first: only the
encodings the writer uses, as many values as the row group has rows, a checksum on each page. Then decoded
bytes <= page bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from common.errors import SegmentCorrupt
from common.segments.faults import bomb
from common.segments.limits import Limits
from common.segments.metadata import Chunk
from common.segments.schema import DELTA_COLUMNS, TEXT_COLUMNS
from common.segments.thrift import Bounds, Struct, TruncatedError, read_struct


class Source(Protocol):
    """Bytes at offsets: what pyarrow calls a NativeFile."""

    def read_at(self, nbytes: int, offset: int) -> bytes: ...


class PageType(IntEnum):
    """Kinds of pages that the writer uses, by their number in the format."""

    DATA = 0
    DICTIONARY = 2


class Encoding(IntEnum):
    """Encodings that the writer uses, by their number in the format."""

    PLAIN = 0
    PLAIN_DICTIONARY = 2
    DELTA_BINARY_PACKED = 5
    RLE_DICTIONARY = 8


_DICTIONARY = {Encoding.PLAIN_DICTIONARY, Encoding.RLE_DICTIONARY}
_HEADER_BOUNDS = Bounds(values=64, elements=0)
_FIRST_READ = 512  # bytes; page headers as written here take 20 to 100

# Field numbers of the format's PageHeader, DataPageHeader and DictionaryPageHeader.
_TYPE, _UNCOMPRESSED, _COMPRESSED, _CRC, _DATA_HEADER, _DICTIONARY_HEADER = 1, 2, 3, 4, 5, 7
_NUM_VALUES, _ENCODING = 1, 2


@dataclass(frozen=True, slots=True)
class _Page:
    kind: int
    uncompressed: int
    compressed: int
    values: int
    encoding: int
    header_size: int


def decoded_bytes(source: Source, chunk: Chunk, limits: Limits) -> int:
    """The most bytes that decoding `chunk` yields, dictionary included but not expanded.

    Raises SegmentCorrupt where a page is not one the writer makes, or the limits are passed.
    """
    total = values = 0
    position, end = chunk.first, chunk.first + chunk.size
    while values < chunk.rows:
        page = _read_page(source, chunk, position, end, limits)
        _check_page(chunk, page, position, is_first_data=values == 0)
        total += max(page.uncompressed, page.compressed)
        values += page.values if page.kind == PageType.DATA else 0
        position += page.header_size + page.compressed
        if total > limits.row_group_bytes:
            raise _bomb(chunk, f"expected at most {limits.row_group_bytes} decoded bytes, found {total}")
    if values != chunk.rows:
        raise _bomb(chunk, f"expected {chunk.rows} values, found pages of {values}")
    return total


def _read_page(source: Source, chunk: Chunk, position: int, end: int, limits: Limits) -> _Page:
    fields, size = _read_header(source, chunk, position, end, limits)
    kind = _number(chunk, fields, _TYPE)
    inner = fields.get(_DATA_HEADER if kind == PageType.DATA else _DICTIONARY_HEADER)
    if kind not in (PageType.DATA, PageType.DICTIONARY) or not isinstance(inner, dict):
        raise SegmentCorrupt(f"column {chunk.name}: expected data or dictionary pages, found type {kind}")
    if _CRC not in fields:
        raise SegmentCorrupt(f"column {chunk.name}: page at {position} has no checksum")
    page = _Page(
        kind,
        _number(chunk, fields, _UNCOMPRESSED),
        _number(chunk, fields, _COMPRESSED),
        _number(chunk, inner, _NUM_VALUES),
        _number(chunk, inner, _ENCODING),
        size,
    )
    if position + size + page.compressed > end:
        raise SegmentCorrupt(f"column {chunk.name}: page at {position} ends behind the column's end {end}")
    return page


def _read_header(source: Source, chunk: Chunk, position: int, end: int, limits: Limits) -> tuple[Struct, int]:
    available = max(0, min(limits.page_header_bytes, end - position))
    for length in (min(_FIRST_READ, available), available):
        try:
            return read_struct(source.read_at(length, position), _HEADER_BOUNDS)
        except TruncatedError:
            continue
        except ValueError as error:
            raise SegmentCorrupt(f"column {chunk.name}: page header at {position}: {error}") from error
    raise SegmentCorrupt(f"column {chunk.name}: page header at {position} passes {available} bytes")


def _number(chunk: Chunk, fields: Struct, field: int) -> int:
    value = fields.get(field)
    if not isinstance(value, int) or value < 0:
        raise SegmentCorrupt(
            f"column {chunk.name}: page header field {field}: expected a count, found {value!r:.40}"
        )
    return value


def _check_page(chunk: Chunk, page: _Page, position: int, *, is_first_data: bool) -> None:
    if page.encoding not in _allowed(chunk.name, page.kind):
        raise _bomb(
            chunk,
            f"encoding {page.encoding} of a {PageType(page.kind).name.lower()} page is not one of Floe's",
        )
    if page.kind == PageType.DICTIONARY:
        if position != chunk.first:
            raise _bomb(chunk, "a dictionary stands behind other pages")
        # Each text of a plain dictionary begins with its length in four bytes.
        if page.values * 4 > page.uncompressed:
            raise _bomb(chunk, f"a dictionary of {page.uncompressed} bytes claims {page.values} values")
    elif page.values == 0:
        raise _bomb(chunk, "a page holds no values")
    elif is_first_data and position != chunk.data:
        # A reader that leaves the dictionary out begins here: it must not meet other pages than these.
        raise _bomb(chunk, f"expected the first data page at {chunk.data}, found it at {position}")


def _allowed(column: str, kind: int) -> set[Encoding]:
    if kind == PageType.DICTIONARY:
        return {Encoding.PLAIN, Encoding.PLAIN_DICTIONARY} if column in TEXT_COLUMNS else set()
    if column in DELTA_COLUMNS:
        return {Encoding.PLAIN, Encoding.DELTA_BINARY_PACKED}
    return {Encoding.PLAIN, *_DICTIONARY} if column in TEXT_COLUMNS else {Encoding.PLAIN}


def _bomb(chunk: Chunk, cause: str) -> SegmentCorrupt:
    return bomb(f"column {chunk.name}: {cause}")
