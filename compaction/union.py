"""Union of the rows of several segments: in sequence order, each sequence once, in bounded memory.

Segments that do not overlap are passed through batch by batch. If segments overlap, the rows up to the sequence that
every open segment has reached are merged, one batch of each at a time. Equal sequences must have equal content;
otherwise two histories share one name (a fork), and no output is written.
"""

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.compute

from common.archive.reader import SegmentReader
from common.archive.segment import SegmentRef
from common.archive.unread import Batches, SegmentBatches, check_forks, merge_windows

# pyarrow's stubs do not type its kernels, nor the arrays and chunked arrays that these accept.
Values = Any
pc: Any = pyarrow.compute


def union(segments: Iterable[SegmentRef], open_segment: Callable[[SegmentRef], SegmentReader]) -> Batches:
    """Yield the rows of `segments` in ascending order; rows of one sequence in several segments once.

    A segment is opened when its coverage is reached and closed after its last row. Raises DataError (E-FORK) that names
    two segments with different rows of one sequence, UnreadableSegment, and the errors of the store.
    """

    def read(segment: SegmentRef) -> Batches:
        with open_segment(segment) as reader:
            yield from reader.batches()

    # Of equal rows the first is kept: the row of the segment that the cover rule prefers.
    with closing(merge_windows(segments, read)) as windows:
        for parts in windows:
            yield parts[0][1] if len(parts) == 1 else _merge_batches(parts)


def _merge_batches(parts: SegmentBatches) -> pa.RecordBatch:
    """Return the rows of overlapping batches, sorted, the first row of each sequence. Raises DataError for a fork."""
    table = pa.Table.from_batches([batch for _, batch in parts])
    order: Values = pc.sort_indices(table.column("sequence"))  # stable: equal sequences keep the order of the parts
    merged = table.take(order)
    sequences: Values = merged.column("sequence").combine_chunks()
    repeats: Values = pc.equal(sequences[1:], sequences[:-1])
    if pc.any(repeats).as_py():
        check_forks(parts)
        merged = merged.filter(pa.concat_arrays([pa.array([True]), pc.invert(repeats)]))
    [batch] = merged.combine_chunks().to_batches()
    return batch
