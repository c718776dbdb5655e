"""The Parquet metadata of a segment file, read and checked before pyarrow sees it.

pyarrow ends the process, not the call, where a column chunk names a codec or a type that does not exist. So
everything it will look up is checked here, from the same bytes; its own accessors are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import SegmentCorrupt
from common.segments.faults import bomb
from common.segments.limits import Limits
from common.segments.schema import DELTA_COLUMNS
from common.segments.thrift import Bounds, Struct, read_struct

# Numbers of the format's fields and enumerations.
_INT64, _BYTE_ARRAY = 2, 6
_CODECS = {0: "UNCOMPRESSED", 6: "ZSTD"}
_FOREIGN_CODECS = {1: "SNAPPY", 2: "GZIP", 3: "LZO", 4: "BROTLI", 5: "LZ4", 7: "LZ4_RAW"}
_FILE_ROWS, _FILE_GROUPS, _FILE_KEY_VALUES = 3, 4, 5
_GROUP_COLUMNS, _GROUP_BYTES, _GROUP_ROWS = 1, 2, 3
_CHUNK_PATH, _CHUNK_DATA, _CHUNK_CRYPTO, _CHUNK_ENCRYPTED = 1, 3, 8, 9
_TYPE, _CODEC, _VALUES, _STORED, _DATA_OFFSET, _DICTIONARY_OFFSET, _STATISTICS = 1, 4, 5, 7, 9, 11, 12
_MAX_VALUE, _MIN_VALUE = 5, 6
_ARROW_SCHEMA = b"ARROW:schema"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of one row group, as the metadata claims it: `first` offset, `size` in bytes, `rows`.

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
    """One row group, as the metadata claims it. `size`: its pages, decompressed."""

    rows: int
    size: int
    columns: tuple[Struct, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of a file. `values`: its key-value pairs, those without a value left out."""

    rows: int
    groups: tuple[Group, ...]
    values: Mapping[bytes, bytes]


def parse(raw: bytes, limits: Limits) -> Metadata:
    """Read the metadata, `raw` from the first to the last byte. Raises SegmentCorrupt."""
    bounds = Bounds(values=limits.metadata_values, elements=max(limits.row_groups, limits.columns))
    try:
        fields, size = read_struct(raw, bounds)
        if size != len(raw):
            raise ValueError(f"expected {len(raw)} bytes, found {size}")
        return Metadata(
            _count(fields, _FILE_ROWS),
            tuple(_group(group) for group in fields.get(_FILE_GROUPS, [])),
            {pair[1]: pair[2] for pair in fields.get(_FILE_KEY_VALUES, []) if 2 in pair},
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SegmentCorrupt(f"Parquet metadata: {error}") from error


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


def check_no_arrow_schema(metadata: Metadata) -> None:
    """That no Arrow schema comes with the file: types come from the Parquet schema alone."""
    if _ARROW_SCHEMA in metadata.values:
        raise SegmentCorrupt("expected no ARROW:schema, found one", code="E-SEG-SCHEMA")


def check_shape(metadata: Metadata, columns: int, limits: Limits) -> None:
    """The number of row groups and of `columns` in the schema; that row groups have both rows and columns."""
    for what, found, most in (
        ("row groups", len(metadata.groups), limits.row_groups),
        ("columns", columns, limits.columns),
    ):
        if found > most:
            raise bomb(f"expected at most {most} {what}, found {found}")
    counts = [group.rows for group in metadata.groups]
    if min(counts, default=1) < 1 or sum(counts) != metadata.rows:
        raise SegmentCorrupt(
            f"expected {metadata.rows} rows in row groups of at least 1, found {counts[:8]}",
            code="E-SEG-META",
        )
    for index, group in enumerate(metadata.groups):
        if len(group.columns) != columns:
            raise SegmentCorrupt(f"row group {index}: expected {columns} columns, found {len(group.columns)}")


def chunk(name: str, group: Group, index: int) -> Chunk:
    """What `group` claims of column `name`, number `index` of the schema. Raises SegmentCorrupt."""
    try:
        return _chunk(name, group, index)
    except (ValueError, TypeError, AttributeError) as error:
        raise SegmentCorrupt(f"column {name}: {error}") from error


def _chunk(name: str, group: Group, index: int) -> Chunk:
    column = group.columns[index]
    data = column.get(_CHUNK_DATA)
    if not isinstance(data, dict) or {_CHUNK_PATH, _CHUNK_CRYPTO, _CHUNK_ENCRYPTED} & column.keys():
        raise ValueError("expected plain data in this file, found it encrypted or elsewhere")
    _check_codec(name, data.get(_CODEC))
    kind = _INT64 if name in DELTA_COLUMNS else _BYTE_ARRAY
    if data.get(_TYPE) != kind or _count(data, _VALUES) != group.rows:
        found = f"{data.get(_VALUES)} of {data.get(_TYPE)}"
        raise ValueError(f"expected {group.rows} values of type {kind}, found {found}")
    # The same start that pyarrow takes, whatever order the two offsets come in.
    pages, dictionary = _count(data, _DATA_OFFSET), data.get(_DICTIONARY_OFFSET, 0)
    first = dictionary if 0 < dictionary < pages else pages
    bounds = data.get(_STATISTICS, {})
    return Chunk(
        name,
        first,
        pages,
        _count(data, _STORED),
        group.rows,
        bounds.get(_MIN_VALUE),
        bounds.get(_MAX_VALUE),
    )


def _check_codec(name: str, codec: Any) -> None:
    if codec not in _CODECS:
        found = _FOREIGN_CODECS.get(codec, codec)
        wanted = " or ".join(_CODECS.values())
        raise SegmentCorrupt(
            f"column {name}: expected compression {wanted}, found {found}", code="E-SEG-CODEC"
        )
