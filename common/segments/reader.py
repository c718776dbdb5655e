"""Reading one segment file, which is untrusted: anybody who can write to the bucket may have made it.

A file is believed in this order: size and magic, size of the metadata, shape, schema, footer against key;
then for each row group its page headers (`pages`), and only then its rows, batch by batch (`scan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from io import IOBase
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from common.segments import checks
from common.segments.faults import explained
from common.segments.keys import Layout, SegmentName
from common.segments.limits import DEFAULT_LIMITS, Limits
from common.segments.metadata import check_no_arrow_schema, check_shape
from common.segments.scan import Opened, Scan
from common.segments.schema import SCHEMA
from common.segments.source import Fetch, Source, all_present, native
from common.sequences import SequenceRange


class SegmentReader:
    """An open segment; a context manager. Made by `open_file`; used by one thread at a time.

    `footer` agrees with the key and the row counts; `row_groups` are the claims of the file's metadata.
    """

    def __init__(self, opened: Opened, rows: SequenceRange | None = None) -> None:
        self.footer = opened.footer
        self.row_groups = checks.row_groups(opened.metadata, opened.leaves["sequence"], opened.footer)
        self._opened = opened
        self._rows = rows

    def batches(
        self, rows: SequenceRange | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows in sequence order, of `columns` in the schema's order; all those inside `rows`.

        Without `rows`: inside those that the segment was opened for, or all of it.

        Row groups outside `rows` are not read. A batch aims at `Limits.batch_bytes` and never passes a row
        group; none is empty. Raises SegmentCorrupt at the first batch that is not as footer, key and order
        say; ValueError for a column that the schema does not have.
        """
        unknown = set(columns or ()) - set(SCHEMA.names)
        if unknown:
            raise ValueError(f"columns {sorted(unknown)}: expected some of {SCHEMA.names}")
        names = [name for name in SCHEMA.names if columns is None or name in columns]
        return Scan(self._opened, names, rows or self._rows).batches(self.row_groups)

    def times(self) -> list[tuple[int, int]]:
        """The least and the greatest timestamp (ns) of each row group, as the file's metadata claims them.

        Raises SegmentCorrupt where there are no such statistics.
        """
        with explained(self._opened.source.key):
            return checks.times(self._opened.metadata, self._opened.leaves["timestamp_ns"])

    def close(self) -> None:
        """Let go of the file; no error if that was done."""
        self._opened.source.cleanup.close()

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_file(
    source: Path | IOBase,
    expected: SegmentName,
    limits: Limits = DEFAULT_LIMITS,
    *,
    key: str | None = None,
    rows: SequenceRange | None = None,
    fetch: Fetch = all_present,
    on_close: Callable[[], None] | None = None,
) -> SegmentReader:
    """Open the segment at `source` whose key says `expected`; `key` is what errors call it.

    `rows` is what `batches` gives out unless it is told otherwise.
    `fetch` is called before bytes are read, for a source of which only parts are present; `on_close` when the
    reader is closed, or when opening fails. Raises SegmentCorrupt naming the cause; what `fetch` raises;
    OSError where the disk under the file fails.
    """
    name = key or Layout().segment(expected)
    with ExitStack() as cleanup, explained(name):
        if on_close is not None:
            cleanup.callback(on_close)
        file = cleanup.enter_context(native(source))
        reader = _open(Source(file, name, limits, fetch, ExitStack()), expected, rows)
        reader._opened.source.cleanup.push(cleanup.pop_all())
    return reader


def _open(source: Source, expected: SegmentName, rows: SequenceRange | None) -> SegmentReader:
    metadata = source.metadata()
    check_no_arrow_schema(metadata)
    file = source.parquet()
    check_shape(metadata, file.metadata.num_columns, source.limits)
    columns = file.metadata.schema
    leaves = {columns.column(index).path: index for index in range(file.metadata.num_columns)}
    opened = Opened(source, file, metadata, leaves, checks.read_footer(metadata, expected))
    return SegmentReader(opened, rows)
