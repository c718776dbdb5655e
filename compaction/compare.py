"""Proof of a merge (I5) without Spark: read both sides from the store again, and compare them row by row.

It shares no code with the merge: it walks the *result* row group by row group, and searches it for every row of the
superseded segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from common.archive.columns import CONTENT_COLUMNS, SCHEMA, first_difference
from common.archive.guard import SegmentGone, fork_error
from common.archive.reader import SegmentReader
from common.archive.segment import SegmentRef
from common.archive.store import ONE_FETCH_BYTES, SegmentStore
from common.errors import DataError
from common.sequences import SequenceRange, Stretch, holes
from compaction.plan import SegmentCover, Supersession

IntArray = npt.NDArray[np.int64]
pc: Any = pyarrow.compute  # its stubs do not type kernels

DENSE_SEQUENCES = 1 << 20  # sequences; a coverage up to here is checked as a whole before its rows are read


def prove_by_reading(store: SegmentStore, supersession: Supersession) -> None:
    """Raise an error unless every row of the superseded segments is in the superseding ones, equal in content.

    If the supersession is `is_exact`, no other row may be there either. Raises DataError (E-ROWS-MISSING, E-ROWS-ADDED,
    E-FORK) naming segment and sequence; SegmentCorrupt, SegmentGone, Unavailable from reading. Memory is bounded by one
    row group of each segment.
    """
    covered = [stretch.rows for stretch in supersession.stretches]
    for segment in supersession.superseded:
        if left := holes(covered, segment.coverage):
            raise _missing_row(segment, supersession.stretches[-1].segment, left[0].first)
    with closing(_Readers(store)) as readers:
        for stretch in supersession.stretches:
            with store.open(stretch.segment, rows=stretch.rows) as above:
                for window in _windows(above, stretch.rows):
                    _compare(supersession, readers, stretch, _rows(above, window), window)


class DeletionProof:
    """Proof that the segments that stay hold the rows of those to delete. By sequence only.

    The run that deletes reads again: a tombstone is a proposal, by any writer. Check segments in ascending order.
    Memory is bounded by the sequences of one row group on each side.
    """

    def __init__(self, store: SegmentStore, staying: Sequence[SegmentRef]) -> None:
        self._store, self._staying, self._cover = store, staying, SegmentCover(staying)
        self._above: tuple[SegmentRef, SegmentReader] | None = None
        self._group, self._sequences = -1, np.empty(0, np.int64)

    def check(self, segment: SegmentRef) -> None:
        """Raise DataError (E-ROWS-MISSING) for a row of `segment` that those that stay do not hold; SegmentCorrupt,
        SegmentGone and the errors of the store. A segment that is deleted already is skipped.

        If those that stay hold every sequence of its coverage, the segment need not be read.
        """
        coverage = segment.coverage
        if len(coverage) <= DENSE_SEQUENCES and self._first_missing(coverage.first + np.arange(len(coverage))) is None:
            return
        try:
            opened = self._opened(segment)
        except SegmentGone:
            return
        with opened as below:
            for batch in below.batches(columns=("sequence",)):
                if (absent := self._first_missing(batch.column("sequence").to_numpy())) is not None:
                    raise _missing_row(segment, *absent)

    def _first_missing(self, wanted: IntArray) -> tuple[SegmentRef, int] | None:
        """Return the first of `wanted`, ascending, that those that stay lack, with the segment that covers it."""
        stretches = self._cover.stretches(SequenceRange(int(wanted[0]), int(wanted[-1])))
        for stretch in stretches:
            here = wanted[_slice_within(wanted, stretch.rows)]
            if here.size and (missing := self._first_missing_in(stretch.segment, here)) is not None:
                return stretch.segment, missing
        return None if stretches else (self._staying[-1], int(wanted[0]))

    def _first_missing_in(self, above: SegmentRef, wanted: IntArray) -> int | None:
        reader = self._reader(above)
        for number, group in enumerate(reader.row_groups):
            part = _slice_within(wanted, group.range)
            if part.start:
                return int(wanted[0])
            if part.stop:
                if number != self._group:
                    batches = reader.batches(group.range, ("sequence",))
                    self._sequences = np.concatenate([each.column("sequence").to_numpy() for each in batches])
                    self._group = number
                places = np.searchsorted(self._sequences, wanted[part])
                found = self._sequences[np.minimum(places, self._sequences.size - 1)] == wanted[part]
                if not found.all():
                    return int(wanted[np.argmin(found)])
                wanted = wanted[part.stop :]
        return int(wanted[0]) if wanted.size else None

    def _reader(self, above: SegmentRef) -> SegmentReader:
        if self._above is None or self._above[0] != above:
            self.close()
            self._above, self._group = (above, self._opened(above)), -1
        return self._above[1]

    def _opened(self, segment: SegmentRef) -> SegmentReader:
        """Open a segment; of a large one only the sequences are fetched."""
        return self._store.open(segment) if segment.size <= ONE_FETCH_BYTES else self._store.open_part(segment)

    def close(self) -> None:
        if self._above is not None:
            self._above[1].close()
            self._above = None


def _slice_within(sequences: IntArray, within: SequenceRange) -> slice:
    """Return the slice of ascending `sequences` that is in `within`."""
    begin, end = np.searchsorted(sequences, within.first), np.searchsorted(sequences, within.last, "right")
    return slice(int(begin), int(end))


class _Readers:
    """The open superseded segments: those that the window has reached and not passed."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._open: dict[str, SegmentReader] = {}

    def rows(self, segment: SegmentRef, window: SequenceRange) -> pa.Table:
        """Return the rows of `segment` inside `window`; windows must ascend."""
        if segment.key not in self._open:
            self._open[segment.key] = self._store.open(segment)
        found = _rows(self._open[segment.key], window)
        if segment.coverage.last <= window.last:
            self._open.pop(segment.key).close()
        return found

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()


def _windows(reader: SegmentReader, rows: SequenceRange) -> Iterator[SequenceRange]:
    first = rows.first
    for group in reader.row_groups:
        if group.range.last >= rows.last:
            break
        if group.range.last >= first:
            yield SequenceRange(first, group.range.last)
            first = group.range.last + 1
    yield SequenceRange(first, rows.last)


def _rows(reader: SegmentReader, window: SequenceRange) -> pa.Table:
    return pa.Table.from_batches(list(reader.batches(rows=window)), SCHEMA).combine_chunks()


def _compare(
    supersession: Supersession, readers: _Readers, stretch: Stretch[SegmentRef], above: pa.Table, window: SequenceRange
) -> None:
    # The sample keys of overlapping rows may come from different settings.
    is_whole = supersession.is_exact and supersession.is_disjoint
    names = SCHEMA.names[1:] if is_whole else CONTENT_COLUMNS
    sequences: IntArray = above.column("sequence").to_numpy()
    found = np.zeros(sequences.size, np.bool_)
    for segment in supersession.superseded:
        if segment.coverage.overlaps(window):
            within = _slice_within(sequences, segment.coverage)
            hits = _find(segment, stretch.segment, readers.rows(segment, window), above[within], names)
            found[within] |= hits.to_numpy()
    if supersession.is_exact and not found.all():
        raise _added_row(stretch.segment, int(sequences[np.argmin(found)]))


def _find(segment: SegmentRef, above_ref: SegmentRef, below: pa.Table, above: pa.Table, names: Sequence[str]) -> Any:
    """Return a mask of the rows of `above` that are in `below`. Raises DataError if one is missing or different."""
    wanted = below.column("sequence")
    present = pc.is_in(above.column("sequence"), value_set=wanted)
    matching = above if pc.all(present).as_py() else above.filter(present)
    if matching.num_rows < below.num_rows:
        missing = pc.index(pc.is_in(wanted, value_set=matching.column("sequence")), pa.scalar(False)).as_py()
        raise _missing_row(segment, above_ref, wanted[missing].as_py())
    for name in names:
        if (row := first_difference(below.column(name), matching.column(name))) is not None:
            raise fork_error(segment, above_ref, wanted[row].as_py())
    return present


def _missing_row(segment: SegmentRef, above: SegmentRef, sequence: int) -> DataError:
    return DataError(
        f"sequence {sequence} of {segment.key} has no row in {above.key}, which covers it",
        hint="no segment is deleted for it; compare both with `floe segments cat`",
        code="E-ROWS-MISSING",
    )


def _added_row(above: SegmentRef, sequence: int) -> DataError:
    return DataError(
        f"sequence {sequence} of {above.key} is in none of the segments that it was merged from",
        hint="no segment was deleted; keep the segments and report this",
        code="E-ROWS-ADDED",
    )
