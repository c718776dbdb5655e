"""An open file that pyarrow reads, and the conditions under which it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from io import IOBase
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.segments.checks import TRAILER_BYTES, check_schema, check_trailer
from common.segments.limits import Limits
from common.segments.metadata import Metadata, parse
from common.segments.schema import TEXT_COLUMNS

# Makes `length` bytes from offset `first` readable in the source; for files of which only parts are here.
Fetch = Callable[[int, int], None]

# The stubs know an older pyarrow.
_ParquetFile: Any = pq.ParquetFile
_READ_AHEAD = 2**20  # bytes of a column chunk that pyarrow holds at a time
_SCHEMA_DEPTH = 8


def native(source: Path | IOBase) -> pa.NativeFile:
    """`source` as pyarrow reads it, without the interpreter where it is a file on disk. Raises OSError."""
    return pa.OSFile(str(source), mode="r") if isinstance(source, Path) else pa.PythonFile(source, mode="r")


def all_present(first: int, length: int) -> None:
    """The fetch of a source that is whole."""


@dataclass(frozen=True, slots=True)
class Source:
    """The bytes of a segment. `key`: what errors call it. `cleanup`: runs when the reader is closed."""

    file: Any
    key: str
    limits: Limits
    fetch: Fetch
    cleanup: ExitStack

    def metadata(self) -> Metadata:
        """The metadata at the end of the bytes. Raises SegmentCorrupt."""
        size = self.file.size()
        tail = min(size, TRAILER_BYTES)
        self.fetch(size - tail, tail)
        stored = check_trailer(self.file.read_at(tail, size - tail), size, self.limits)
        self.fetch(size - tail - stored, stored)
        return parse(self.file.read_at(stored, size - tail - stored), self.limits)

    def parquet(self) -> Any:
        """The pyarrow ParquetFile over the bytes, its schema checked. Raises whatever pyarrow does.

        Only after `metadata`: see there what pyarrow does with bad ones.
        """
        metadata = _ParquetFile(
            self.file,
            thrift_string_size_limit=self.limits.footer_value_bytes,
            thrift_container_size_limit=max(self.limits.row_groups, self.limits.columns),
            schema_depth_limit=_SCHEMA_DEPTH,
            arrow_extensions_enabled=False,
        ).metadata
        check_schema(metadata.schema.to_arrow_schema())
        return _ParquetFile(
            self.file,
            metadata=metadata,
            # Kept as dictionaries until their expanded size is known.
            read_dictionary=list(TEXT_COLUMNS),
            pre_buffer=False,
            buffer_size=_READ_AHEAD,
            # Without them a flipped bit reads back as good data.
            page_checksum_verification=True,
            arrow_extensions_enabled=False,
        )
