"""What a message is in Arrow's terms, and the few kernels that merging and comparing both need."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute

from common.errors import DataError
from common.segments.segment import SegmentRef

# What a message is. `timestamp` follows from `timestamp_ns`; `sample_key` from the settings it was read with.
CONTENT_COLUMNS = ("timestamp_ns", "subject", "subject_raw", "headers", "payload")

# pyarrow's stubs cannot say what its kernels take: arrays and chunked arrays, and the kernels, are not typed.
Values = Any
pc: Any = pyarrow.compute


def count_up_to(sequences: Values, last: int) -> int:
    """How many of the ascending `sequences` are at most `last`."""
    return int(pc.sum(pc.less_equal(sequences, pa.scalar(last, pa.int64()))).as_py() or 0)


def first_difference(left: Values, right: Values) -> int | None:
    """The first row in which two columns differ, null being equal to null only; None if none does."""
    if left.equals(right):
        return None
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    same = pc.or_(pc.fill_null(pc.equal(left, right), False), both_null)
    row = pc.index(same, False).as_py()
    return None if row < 0 else row


def fork(one: SegmentRef, other: SegmentRef, sequence: int) -> DataError:
    """The error for two segments that hold different messages under one sequence."""
    return DataError(
        f"sequence {sequence} of {one.chain} has one content in {one.key} and another in {other.key}",
        hint="two histories met under one name; nothing is merged or deleted; see `floe segments cat`",
        code="E-FORK",
    )
