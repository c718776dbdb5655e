"""Checks before pyarrow: parse the metadata within limits, and bound the cost of decoding from the page headers.

Sizes in the metadata of a Parquet file are claims. A dictionary of one 10 MiB value, used a hundred times,
decodes to 1 GiB from 700 bytes; an encoding that shares prefixes does worse; a forged count makes a decoder
allocate for it. The page headers are the real input of a decoder, so they are read first. They must have only the
encodings that the writer uses, as many values as the row group has rows, and a checksum on each page. Then decoded
bytes <= page bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from common.archive.columns import DELTA_COLUMNS, TEXT_COLUMNS
from common.archive.segment import SegmentRef
from common.errors import DataError, FloeError, SegmentCorrupt

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_BITS = {_I16: 15, _I32: 31, _I64: 63}  # of an integer, without the sign
_MAX_VARINT_BYTES = 10
_LONG_LIST = 15
_MAX_DEPTH = 8  # of nested structures

Struct = dict[int, Any]


class TruncatedError(ValueError):
    """Bytes that end inside the structure; it may be complete with more bytes."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a structure. `values`: in all, list elements included. `elements`: of one list."""

    values: int
    elements: int


def read_struct(data: bytes, bounds: Bounds) -> tuple[Struct, int]:
    """Return the structure at the start of `data`, and its size in bytes. Raises TruncatedError, ValueError."""
    reader = _Reader(data, bounds)
    try:
        return reader.struct(0), reader.position
    except IndexError:
        raise TruncatedError(f"structure continues after {len(data)} bytes") from None


class _Reader:
    """Reader of the Thrift compact protocol. Raises IndexError at the end of `data`. Most numbers take one byte: they
    are read inline, because calls take most of the time.
    """

    def __init__(self, data: bytes, bounds: Bounds) -> None:
        self._data, self._bounds, self._values_left, self.position = data, bounds, bounds.values, 0

    def struct(self, depth: int) -> Struct:
        data, number, truths = self._data, 0, 0
        fields: Struct = {}
        while head := data[self.position]:
            self.position += 1
            number = number + (head >> 4) if head >> 4 else self._integer(_I16)
            if number in fields:
                raise ValueError(f"field {number} comes twice")
            kind = head & 0x0F
            if kind in _BITS and (coded := data[self.position]) < 0x80:
                self.position += 1
                fields[number] = (coded >> 1) ^ -(coded & 1)
            elif kind in (_TRUE, _FALSE):
                fields[number], truths = kind == _TRUE, truths + 1
            else:
                fields[number] = self._value(kind, depth)
        self.position += 1
        self._count(len(fields) - truths)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth >= _MAX_DEPTH:
            raise ValueError(f"structures nested deeper than {_MAX_DEPTH}")
        if kind in _BITS:
            return self._integer(kind)
        if kind == _BINARY:
            return self._take(self._varint())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind == _LIST:
            return self._list(depth + 1)
        if kind in (_BYTE, _TRUE, _FALSE):  # a Boolean in a list takes one byte, like `_BYTE`
            return self._take(1)[0]
        raise ValueError(f"type {kind}, which Parquet does not use")

    def _list(self, depth: int) -> list[Any]:
        head = self._take(1)[0]
        size = head >> 4 if head >> 4 != _LONG_LIST else self._varint()
        if size > self._bounds.elements:
            raise ValueError(f"list of {size} elements: expected at most {self._bounds.elements}")
        self._count(size)
        return [self._value(head & 0x0F, depth) for _ in range(size)]

    def _count(self, values: int) -> None:
        self._values_left -= values
        if self._values_left < 0:
            raise ValueError(f"more than {self._bounds.values} values")

    def _integer(self, kind: int) -> int:
        coded, bits = self._varint(), _BITS[kind]
        value = (coded >> 1) ^ -(coded & 1)
        if not -(1 << bits) <= value < 1 << bits:
            raise ValueError(f"number {value}: expected {bits + 1} bits")
        return value

    def _varint(self) -> int:
        data, position, value = self._data, self.position, 0
        for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self.position = position
                return value
        raise ValueError(f"number longer than {_MAX_VARINT_BYTES} bytes")

    def _take(self, count: int) -> bytes:
        begin, self.position = self.position, self.position + count
        if self.position > len(self._data):
            raise IndexError
        return self._data[begin : self.position]


MIB = 2**20

# Raw bytes that the writer puts into one row group: they limit the memory of a reader.
ROW_GROUP_BYTES_LEVEL_0 = 32 * MIB
ROW_GROUP_BYTES_MERGED = 64 * MIB
_ROW_GROUP_BYTES_OLD = 128 * MIB  # of merged segments that former versions wrote
# Counted for the other columns of a row, so that a million empty messages are not one row group.
WRITER_ROW_BYTES = 64
# The largest message that is archived and replayed, subject and headers included; none is split over row groups.
MAX_MESSAGE_BYTES = 64 * MIB
# Memory that a row costs a reader beside its bytes.
READER_ROW_BYTES = 256
# The writer closes a page at 1 MiB. Many tiny pages cost more time than their content.
MIN_FREE_PAGES, MIN_PAGE_ROWS, MIN_PAGE_BYTES = 64, 256, 64 * 1024


def row_group_bytes(level: int) -> int:
    """Return the raw bytes at which the writer closes a row group of a segment of `level`."""
    return ROW_GROUP_BYTES_LEVEL_0 if level == 0 else ROW_GROUP_BYTES_MERGED


@dataclass(frozen=True, slots=True)
class ParquetLimits:
    """Bounds on one file; a file beyond any of them is rejected as corrupt, code E-SEG-BOMB.

    `footer_bytes`: stored size of the Parquet metadata. `row_groups`, `columns`: their number.
    `footer_value_bytes`: one string in the metadata, Floe's own footer included. `metadata_values`: numbers,
    strings and lists in the metadata. `row_group_bytes`: decoded bytes of one row group, of one page and of
    one dictionary; a row group as the writer makes it, with the largest message on top, fits. `row_group_rows`: rows of
    one row group, none smaller than the writer counts it.
    `page_header_bytes`: one page header. `batch_bytes`, `batch_rows`: the intended size of one batch; a large
    message, or rows of very uneven size, make it larger, but never larger than a row group.
    """

    footer_bytes: int = 8 * MIB
    row_groups: int = 4096  # 256 GiB raw
    columns: int = 64
    footer_value_bytes: int = MIB
    metadata_values: int = 1_000_000
    row_group_bytes: int = _ROW_GROUP_BYTES_OLD + MAX_MESSAGE_BYTES + 64 * MIB
    row_group_rows: int = _ROW_GROUP_BYTES_OLD // WRITER_ROW_BYTES
    page_header_bytes: int = 64 * 1024
    batch_bytes: int = 8 * MIB
    batch_rows: int = 16_384


DEFAULT_LIMITS = ParquetLimits()


class SegmentGone(DataError):
    """A segment that is no longer in the store: deleted after it was listed, most likely because it was superseded."""

    default_code = "E-SEG-GONE"


class ForkError(DataError):
    """A fork: two segments hold different messages under one sequence; `keys` names both."""

    default_code = "E-FORK"

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(
            message,
            hint="two histories share one name; neither is merged or deleted; compare them with "
            "`floe segments cat`, then quarantine the wrong one",
        )
        self.keys = keys

    def __reduce__(self) -> tuple[type[ForkError], tuple[str, ...]]:
        return ForkError, (self.message, *self.keys)


def fork_error(one: SegmentRef, other: SegmentRef, sequence: int) -> ForkError:
    message = f"sequence {sequence} of {one.chain} has one content in {one.key} and another in {other.key}"
    return ForkError(message, one.key, other.key)


def bomb_error(cause: str) -> SegmentCorrupt:
    return SegmentCorrupt(cause, code="E-SEG-BOMB")


@contextmanager
def segment_errors(key: str) -> Iterator[None]:
    """Turn the errors of reading untrusted bytes into SegmentCorrupt that names `key`.

    Other errors of Floe (such as an unreachable store) and of the disk under the file pass unchanged.
    """
    try:
        yield
    except SegmentCorrupt as error:
        raise SegmentCorrupt(f"segment {key}: {error.message}", hint=error.hint, code=error.code) from error
    except FloeError:
        raise
    except MemoryError as error:
        raise bomb_error(f"segment {key}: needs more memory than is available: {_first_line(error)}") from error
    except NotImplementedError as error:
        raise SegmentCorrupt(f"segment {key}: {_first_line(error)}", code="E-SEG-CODEC") from error
    except Exception as error:  # pyarrow raises its own errors and built-in ones
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise SegmentCorrupt(f"segment {key}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]


# Numbers of the format's fields and enumerations.
_INT64, _BYTE_ARRAY = 2, 6
_CODECS = {0: "UNCOMPRESSED", 6: "ZSTD"}
_FOREIGN_CODECS = {1: "SNAPPY", 2: "GZIP", 3: "LZO", 4: "BROTLI", 5: "LZ4", 7: "LZ4_RAW"}
_FILE_ROWS, _FILE_GROUPS, _FILE_KEY_VALUES = 3, 4, 5
_GROUP_COLUMNS, _GROUP_BYTES, _GROUP_ROWS = 1, 2, 3
_CHUNK_PATH, _CHUNK_DATA, _CHUNK_CRYPTO, _CHUNK_ENCRYPTED = 1, 3, 8, 9
_CHUNK_TYPE, _CODEC, _VALUES, _STORED, _DATA_OFFSET, _DICTIONARY_OFFSET, _STATISTICS = 1, 4, 5, 7, 9, 11, 12
_MAX_VALUE, _MIN_VALUE = 5, 6


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of one row group, as claimed by the metadata: `first` offset, `size` in bytes, `rows`.

    `data`: offset of the first data page. `least`, `greatest`: bytes of the statistics, None without.
    """

    name: str
    first: int
    data: int
    size: int
    rows: int
    least: bytes | None = None
    greatest: bytes | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """One row group, as claimed by the metadata. `size`: its pages, decompressed."""

    rows: int
    size: int
    columns: tuple[Struct, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of a file. `values`: its key-value pairs, those without a value left out."""

    rows: int
    groups: tuple[Group, ...]
    values: Mapping[bytes, bytes]


def parse_metadata(raw: bytes, limits: ParquetLimits) -> Metadata:
    """Parse the metadata; `raw` is all of its bytes. Raises SegmentCorrupt.

    The file must not contain an Arrow schema: types come from the Parquet schema alone.
    """
    bounds = Bounds(values=limits.metadata_values, elements=max(limits.row_groups, limits.columns))
    try:
        fields, size = read_struct(raw, bounds)
        if size != len(raw):
            raise ValueError(f"expected {len(raw)} bytes, found {size}")
        rows, groups = _count(fields, _FILE_ROWS), tuple(_group(group) for group in fields.get(_FILE_GROUPS, []))
        values = {pair[1]: pair[2] for pair in fields.get(_FILE_KEY_VALUES, []) if 2 in pair}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SegmentCorrupt(f"Parquet metadata: {error}") from error
    if b"ARROW:schema" in values:
        raise SegmentCorrupt("expected no ARROW:schema, found one", code="E-SEG-SCHEMA")
    return Metadata(rows, groups, values)


def _group(fields: Struct) -> Group:
    columns = tuple(fields[_GROUP_COLUMNS])
    if not all(isinstance(column, dict) for column in columns):
        raise ValueError("expected a list of columns")
    return Group(_count(fields, _GROUP_ROWS), _count(fields, _GROUP_BYTES), columns)


def _count(fields: Struct, number: int) -> int:
    value = fields.get(number)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"field {number}: expected a count, found {value!r:.40}")
    return value


def check_shape(metadata: Metadata, columns: int, limits: ParquetLimits) -> None:
    """Raise SegmentCorrupt for too many row groups, rows in one or `columns`, for empty ones, and for a wrong sum."""
    counts = [group.rows for group in metadata.groups]
    for what, found, most in (
        ("row groups", len(counts), limits.row_groups),
        ("rows in a row group", max(counts, default=0), limits.row_group_rows),
        ("columns", columns, limits.columns),
    ):
        if found > most:
            raise bomb_error(f"expected at most {most} {what}, found {found}")
    if min(counts, default=1) < 1 or sum(counts) != metadata.rows:
        cause = f"expected {metadata.rows} rows in row groups of at least 1, found {counts[:8]}"
        raise SegmentCorrupt(cause, code="E-SEG-META")
    for index, group in enumerate(metadata.groups):
        if len(group.columns) != columns:
            raise SegmentCorrupt(f"row group {index}: expected {columns} columns, found {len(group.columns)}")


def chunk(name: str, group: Group, index: int) -> Chunk:
    """Return the claims of `group` about column `name`, number `index` of the schema. Raises SegmentCorrupt."""
    try:
        return _chunk(name, group, index)
    except (ValueError, TypeError, AttributeError) as error:
        raise SegmentCorrupt(f"column {name}: {error}") from error


def _chunk(name: str, group: Group, index: int) -> Chunk:
    column = group.columns[index]
    data = column.get(_CHUNK_DATA)
    if not isinstance(data, dict) or {_CHUNK_PATH, _CHUNK_CRYPTO, _CHUNK_ENCRYPTED} & column.keys():
        raise ValueError("expected plain data in this file, found it encrypted or elsewhere")
    codec: Any = data.get(_CODEC)
    if codec not in _CODECS:
        wanted, found = " or ".join(_CODECS.values()), _FOREIGN_CODECS.get(codec, codec)
        raise SegmentCorrupt(f"column {name}: expected compression {wanted}, found {found}", code="E-SEG-CODEC")
    kind = _INT64 if name in DELTA_COLUMNS else _BYTE_ARRAY
    if data.get(_CHUNK_TYPE) != kind or _count(data, _VALUES) != group.rows:
        found = f"{data.get(_VALUES)} of {data.get(_CHUNK_TYPE)}"
        raise ValueError(f"expected {group.rows} values of type {kind}, found {found}")
    # The same start as in pyarrow, in any order of the two offsets.
    pages, dictionary = _count(data, _DATA_OFFSET), data.get(_DICTIONARY_OFFSET, 0)
    first = dictionary if 0 < dictionary < pages else pages
    bounds = data.get(_STATISTICS, {})
    return Chunk(name, first, pages, _count(data, _STORED), group.rows, bounds.get(_MIN_VALUE), bounds.get(_MAX_VALUE))


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
_PAGE_TYPE, _UNCOMPRESSED, _COMPRESSED, _CRC, _DATA_HEADER, _DICTIONARY_HEADER = 1, 2, 3, 4, 5, 7
_NUM_VALUES, _ENCODING = 1, 2


@dataclass(frozen=True, slots=True)
class _Page:
    kind: int
    uncompressed: int
    compressed: int
    values: int
    encoding: int
    header_size: int


# The pages of one column chunk: for each its values, 0 for a dictionary, and the bytes that decoding it takes.
Pages = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class DecodingCost:
    """Bytes that decoding one row group takes, at most, in batches of `rows` rows.

    `size`: all of its pages, dictionaries included but not expanded. `held`: the largest page and the dictionary of
    each column, in memory while the row group is read. `batch`: the pages of the largest batch. `text`: that of one
    batch, dictionaries expanded.
    """

    rows: int
    size: int
    held: int
    batch: int
    text: int = 0

    @property
    def peak_bytes(self) -> int:
        """Memory for all of it: a row costs READER_ROW_BYTES beside its bytes, or two copies of its text, if more."""
        return self.held + self.batch + max(READER_ROW_BYTES * self.rows, 3 * self.text)


def decoding_cost(columns: Sequence[Pages], rows: int, limits: ParquetLimits) -> DecodingCost:
    """Return the cost of decoding a row group of `rows` rows, from the page headers of its columns."""
    size = sum(taken for pages in columns for _, taken in pages)
    step = max(1, min(limits.batch_rows, limits.batch_bytes * rows // max(1, size), rows))
    held, batches = 0, [0] * -(-rows // step)
    for pages in columns:
        held += max(taken for values, taken in pages if values) + sum(taken for values, taken in pages if not values)
        begin = 0
        for values, taken in pages:
            # A page that holds one row of a batch may have most of its bytes in that row.
            for batch in range(begin // step, -(-(begin + values) // step) if values else 0):
                batches[batch] += taken
            begin += values
    return DecodingCost(step, size, held, max(batches))


def pages(source: Any, chunk: Chunk, limits: ParquetLimits) -> Pages:
    """Return the pages of `chunk`, from their headers.

    `source`: a NativeFile of pyarrow, or an object with the same `read_at`.
    Raises SegmentCorrupt if a page is not one the writer makes, or there are more than it would make.
    """
    found: Pages = []
    size = values = 0
    position, end = chunk.first, chunk.first + chunk.size
    while values < chunk.rows:
        page = _read_page(source, chunk, position, end, limits)
        _check_page(chunk, page, position, is_first_data=values == 0)
        data = page.values if page.kind == PageType.DATA else 0
        found.append((data, max(page.uncompressed, page.compressed)))
        size, values = size + found[-1][1], values + data
        position += page.header_size + page.compressed
        if len(found) > MIN_FREE_PAGES + values // MIN_PAGE_ROWS + size // MIN_PAGE_BYTES:
            raise _page_error(chunk, f"{len(found)} pages hold {values} values in {size} bytes")
    if values != chunk.rows:
        raise _page_error(chunk, f"expected {chunk.rows} values, found pages of {values}")
    return found


def _read_page(source: Any, chunk: Chunk, position: int, end: int, limits: ParquetLimits) -> _Page:
    fields, size = _read_header(source, chunk, position, end, limits)
    kind = _number(chunk, fields, _PAGE_TYPE)
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
        raise SegmentCorrupt(f"column {chunk.name}: page at {position} ends after the column's end {end}")
    return page


def _read_header(source: Any, chunk: Chunk, position: int, end: int, limits: ParquetLimits) -> tuple[Struct, int]:
    available = max(0, min(limits.page_header_bytes, end - position))
    for length in (min(_FIRST_READ, available), available):
        try:
            return read_struct(source.read_at(length, position), _HEADER_BOUNDS)
        except TruncatedError:
            continue
        except ValueError as error:
            raise SegmentCorrupt(f"column {chunk.name}: page header at {position}: {error}") from error
    raise SegmentCorrupt(f"column {chunk.name}: page header at {position} exceeds {available} bytes")


def _number(chunk: Chunk, fields: Struct, field: int) -> int:
    value = fields.get(field)
    if not isinstance(value, int) or value < 0:
        raise SegmentCorrupt(f"column {chunk.name}: page header field {field}: expected a count, found {value!r:.40}")
    return value


def _check_page(chunk: Chunk, page: _Page, position: int, *, is_first_data: bool) -> None:
    if page.encoding not in _allowed(chunk.name, page.kind):
        kind = PageType(page.kind).name.lower()
        raise _page_error(chunk, f"encoding {page.encoding} of a {kind} page is not one of Floe's")
    if page.kind == PageType.DICTIONARY:
        if position != chunk.first:
            raise _page_error(chunk, "a dictionary follows other pages")
        # Each text of a plain dictionary begins with its length in four bytes.
        if page.values * 4 > page.uncompressed:
            raise _page_error(chunk, f"a dictionary of {page.uncompressed} bytes claims {page.values} values")
    elif page.values == 0:
        raise _page_error(chunk, "a page holds no values")
    elif is_first_data and position != chunk.data:
        # A reader that skips the dictionary begins here: it must find the same pages.
        raise _page_error(chunk, f"expected the first data page at {chunk.data}, found it at {position}")


def _allowed(column: str, kind: int) -> set[Encoding]:
    if kind == PageType.DICTIONARY:
        return {Encoding.PLAIN, Encoding.PLAIN_DICTIONARY} if column in TEXT_COLUMNS else set()
    if column in DELTA_COLUMNS:
        return {Encoding.PLAIN, Encoding.DELTA_BINARY_PACKED}
    return {Encoding.PLAIN, *_DICTIONARY} if column in TEXT_COLUMNS else {Encoding.PLAIN}


def _page_error(chunk: Chunk, cause: str) -> SegmentCorrupt:
    return bomb_error(f"column {chunk.name}: {cause}")
