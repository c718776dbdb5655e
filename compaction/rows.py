"""What a message is in Arrow's terms, and the few kernels that merging and comparing both need."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute

from common.segments.columns import CONTENT_COLUMNS, first_difference
from common.segments.faults import fork

__all__ = ["CONTENT_COLUMNS", "Values", "count_up_to", "first_difference", "fork", "pc"]

# pyarrow's stubs cannot say what its kernels take: arrays and chunked arrays, and the kernels, are not typed.
Values = Any
pc: Any = pyarrow.compute


def count_up_to(sequences: Values, last: int) -> int:
    """How many of the ascending `sequences` are at most `last`."""
    return int(pc.sum(pc.less_equal(sequences, pa.scalar(last, pa.int64()))).as_py() or 0)
