"""Segment files: columns, rows, writer, reader. The public names in one place."""

from __future__ import annotations

from common.segments.checks import RowGroup
from common.segments.columns import Columns, columns, messages, record_batch
from common.segments.limits import DEFAULT_LIMITS, Limits
from common.segments.reader import SegmentReader, open_file
from common.segments.schema import SCHEMA, raw_size, row_sizes
from common.segments.writer import SegmentWriter, SpooledSegment, hash_file

__all__ = [
    "DEFAULT_LIMITS",
    "SCHEMA",
    "Columns",
    "Limits",
    "RowGroup",
    "SegmentReader",
    "SegmentWriter",
    "SpooledSegment",
    "columns",
    "hash_file",
    "messages",
    "open_file",
    "raw_size",
    "record_batch",
    "row_sizes",
]
