"""Union of the rows of several segments: in sequence order, each sequence once, in bounded memory.

Segments that do not overlap are passed through batch by batch. If segments overlap, the rows up to the sequence that
every open segment has reached are merged, one batch of each at a time. Equal sequences must have equal content;
otherwise two histories share one name (a fork), and no output is written.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute

from common.archive.columns import CONTENT_COLUMNS, first_difference
from common.archive.guard import fork_error
from common.archive.reader import SegmentReader
from common.archive.segment import SegmentRef
from common.sequences import preference
from compaction.failures import as_unreadable_input

# pyarrow's stubs do not type its kernels, nor the arrays and chunked arrays that these accept.
Values = Any
pc: Any = pyarrow.compute


def count_up_to(sequences: Values, last: int) -> int:
    return int(pc.sum(pc.less_equal(sequences, pa.scalar(last, pa.int64()))).as_py() or 0)


OpenSegment = Callable[[SegmentRef], SegmentReader]
_SegmentBatches = list[tuple[SegmentRef, pa.RecordBatch]]


def union(segments: Iterable[SegmentRef], open_segment: OpenSegment) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rows of `segments` in ascending order; rows of one sequence in several segments once.

    A segment is opened when its coverage is reached and closed after its last row. Raises DataError (E-FORK) that names
    two segments with different rows of one sequence, and the errors of `open_segment` and of reading.
    """
    waiting = deque(sorted(segments, key=lambda s: (s.coverage, s.name)))
    cursors: list[_Cursor] = []
    try:
        while cursors or waiting:
            _open_reached(waiting, cursors, open_segment)
            cursors = [cursor for cursor in cursors if cursor.head is not None]
            if cursors:
                yield _next_batch(cursors)
    finally:
        for cursor in cursors:
            cursor.reader.close()


class _Cursor:
    """One open segment and its next rows; `head` is None after the last row."""

    def __init__(self, segment: SegmentRef, reader: SegmentReader) -> None:
        self.segment, self.reader, self._batches = segment, reader, reader.batches()
        self.head: pa.RecordBatch | None = None

    @property
    def last(self) -> int:
        assert self.head is not None
        return int(self.head.column("sequence")[-1].as_py())

    def advance(self) -> None:
        with as_unreadable_input(self.segment):
            self.head = next(self._batches, None)
        if self.head is None:
            self.reader.close()

    def take(self, last: int) -> pa.RecordBatch:
        assert self.head is not None
        count = self.head.num_rows if self.last <= last else count_up_to(self.head.column("sequence"), last)
        taken, self.head = self.head.slice(0, count), self.head.slice(count)
        if not self.head.num_rows:
            self.advance()
        return taken


def _open_reached(waiting: deque[SegmentRef], cursors: list[_Cursor], open_segment: OpenSegment) -> None:
    """Open each waiting segment that begins at or below the least end of the open batches, or else the next one."""
    while waiting:
        at_hand = [cursor.last for cursor in cursors if cursor.head is not None]
        if at_hand and waiting[0].coverage.first > min(at_hand):
            return
        segment = waiting.popleft()
        with as_unreadable_input(segment):
            cursors.append(_Cursor(segment, open_segment(segment)))
        cursors[-1].advance()


def _next_batch(cursors: list[_Cursor]) -> pa.RecordBatch:
    last = min(cursor.last for cursor in cursors)
    # Of equal rows the first is kept: the row of the segment that the cover rule prefers.
    ordered = sorted(cursors, key=lambda cursor: preference(cursor.segment), reverse=True)
    taken = [(cursor.segment, cursor.take(last)) for cursor in ordered]
    parts = [(segment, batch) for segment, batch in taken if batch.num_rows]
    return parts[0][1] if len(parts) == 1 else _merge_batches(parts)


def _merge_batches(parts: _SegmentBatches) -> pa.RecordBatch:
    """Return the rows of overlapping batches, sorted, the first row of each sequence. Raises DataError for a fork."""
    table = pa.Table.from_batches([batch for _, batch in parts])
    order: Values = pc.sort_indices(table.column("sequence"))  # stable: equal sequences keep the order of the parts
    merged = table.take(order)
    sequences: Values = merged.column("sequence").combine_chunks()
    repeats: Values = pc.equal(sequences[1:], sequences[:-1])
    if pc.any(repeats).as_py():
        _check_fork(merged, order, repeats, parts)
        merged = merged.filter(pa.concat_arrays([pa.array([True]), pc.invert(repeats)]))
    [batch] = merged.combine_chunks().to_batches()
    return batch


def _check_fork(merged: pa.Table, order: Values, repeats: Values, parts: _SegmentBatches) -> None:
    later = pc.add(pc.indices_nonzero(repeats), 1)
    earlier = pc.subtract(later, 1)
    for name in CONTENT_COLUMNS:
        values = merged.column(name)
        if (found := first_difference(values.take(earlier), values.take(later))) is not None:
            row = later[found].as_py()
            ends = list(accumulate(batch.num_rows for _, batch in parts))
            (one, _), (other, _) = (parts[bisect_right(ends, order[row - n].as_py())] for n in (1, 0))
            raise fork_error(one, other, merged.column("sequence")[row].as_py())
