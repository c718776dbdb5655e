"""The oracle's readers in one place: of streams, of targets, of the archive."""

from __future__ import annotations

from infra.oracle_archive import archive_holes, archived
from infra.oracle_streams import Arrived, read_stream, source_trace, target_traces

__all__ = ["Arrived", "archive_holes", "archived", "read_stream", "source_trace", "target_traces"]
