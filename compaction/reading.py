"""Reading stretches of a cover: what is deleted or found damaged meanwhile is read elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import pyarrow as pa

from common.errors import DataError, SegmentCorrupt
from common.segments.parquet import SCHEMA
from common.segments.segment import SegmentRef
from common.segments.store import SegmentGone, SegmentStore
from common.segments.unread import open_stretch
from common.sequences import SequenceRange, Stretch, cover, holes


def read_stretch(
    store: SegmentStore, stretch: Stretch[SegmentRef], columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of `stretch` in order: `columns` of the segment schema, or all.

    With what others have of what its segment did not read (`common.segments.unread`). Where the segment is
    gone or cannot be read, the rest is read through the cover of what else is there. Raises the segment's own
    error (SegmentGone, SegmentCorrupt) where nothing else accounts for the rows.
    """
    wanted = [name for name in SCHEMA.names if columns is None or name in columns]
    for batch in _Reading(store, stretch).batches([*{"sequence", *wanted}]):
        yield batch.select(wanted)


def read_segment(
    store: SegmentStore, stretch: Stretch[SegmentRef], columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of `stretch` from its own segment and no other. Raises SegmentGone, SegmentCorrupt."""
    with store.open(stretch.segment, rows=stretch.rows) as reader:
        yield from reader.batches(rows=stretch.rows, columns=columns)


class _Reading:
    """One stretch being read. `_avoided`: keys of segments that failed."""

    def __init__(self, store: SegmentStore, stretch: Stretch[SegmentRef]) -> None:
        self._store = store
        self._pending = [stretch]
        self._avoided: set[str] = set()

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        while self._pending:
            stretch = self._pending.pop(0)
            position = stretch.rows.first
            try:
                with open_stretch(self._store, stretch, avoided=self._avoided) as reader:
                    for batch in reader.batches(columns=columns):
                        yield batch
                        position = batch.column("sequence")[-1].as_py() + 1
            except (SegmentGone, SegmentCorrupt) as error:
                with suppress(ValueError):  # nothing of the stretch is left to read
                    rest = SequenceRange(position, stretch.rows.last)
                    self._pending[:0] = self._elsewhere(stretch.segment, rest, error)

    def _elsewhere(
        self, failed: SegmentRef, rows: SequenceRange, error: DataError
    ) -> list[Stretch[SegmentRef]]:
        self._avoided.add(failed.key)
        listed = self._store.list(failed.chain, position=rows.first)
        stretches = cover([s for s in listed if s.key not in self._avoided], rows.first, rows.last)
        if holes([s.rows for s in stretches], rows):
            raise error
        return stretches
