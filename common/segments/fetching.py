"""Brings segments from the object store: whole, with the name as proof of the bytes, or part by part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.clock import Clock
from common.errors import SegmentCorrupt
from common.objects.port import ObjectStore
from common.segments.faults import SegmentGone
from common.segments.limits import MIB
from common.segments.ranged import SparseCopy
from common.segments.reader import SegmentReader, open_file
from common.segments.segment import SegmentRef
from common.segments.spool import Spool, spool_error
from common.segments.writer import hash_file
from common.sequences import SequenceRange
from common.service.logs import get_logger

log = get_logger("segments.fetching")

# Up to this size a segment is fetched whole, which lets its name prove its bytes; beyond it, by ranges.
WHOLE_BYTES = 256 * MIB
PAUSES = (0.1, 0.5)  # seconds before what arrived damaged is fetched again


class WrongBytes(SegmentCorrupt):
    """What was fetched is not what the name promises."""


class Fetcher:
    """Opens segments of one object store.

    A file is unlinked as soon as it is open, so that a killed process leaves none.
    """

    def __init__(self, objects: ObjectStore, spool: Spool, clock: Clock) -> None:
        self._objects = objects
        self._spool = spool
        self._clock = clock

    def open(self, ref: SegmentRef, rows: SequenceRange | None) -> SegmentReader:
        """As `SegmentStore.open` says."""
        if ref.size > WHOLE_BYTES:
            return self.open_ranged(ref, rows)
        for pause in PAUSES:
            try:
                return self._open_whole(ref, rows)
            except WrongBytes as error:
                # The line may have damaged what the store keeps well.
                log.warning(
                    "segment read damaged", action="read_damaged", error=str(error), **ref.log_context()
                )
                self._clock.pause(pause)
        return self._open_whole(ref, rows)

    def _open_whole(self, ref: SegmentRef, rows: SequenceRange | None) -> SegmentReader:
        with self._downloaded(ref) as path:
            if path is None:
                raise SegmentGone(f"segment {ref.key}: not in the store any more")
            size, sha256 = hash_file(path)
            if size != ref.size or not sha256.startswith(ref.segment.digest):
                raise WrongBytes(
                    f"segment {ref.key}: expected {ref.size} bytes with SHA-256 {ref.segment.digest}…, "
                    f"found {size} with {sha256[:16]}…"
                )
            return open_file(path, ref.segment, key=ref.key, rows=rows)

    def open_ranged(self, ref: SegmentRef, rows: SequenceRange | None = None) -> SegmentReader:
        """Open the segment with no more of it fetched than what is read."""
        path = self._spool.new_file()
        try:
            copy = SparseCopy(self._objects, ref.key, ref.size, path)
            return open_file(path, ref.segment, key=ref.key, rows=rows, fetch=copy.fetch, on_close=copy.close)
        finally:
            path.unlink(missing_ok=True)

    def stored_sha256(self, ref: SegmentRef) -> str | None:
        """64 hex digits over the bytes that the store gives out; None if there is no such object."""
        with self._downloaded(ref) as path:
            return hash_file(path)[1] if path else None

    @contextmanager
    def _downloaded(self, ref: SegmentRef) -> Iterator[Path | None]:
        path = self._spool.new_file()
        try:
            yield path if self._download(ref, path) else None
        finally:
            path.unlink(missing_ok=True)

    def _download(self, ref: SegmentRef, path: Path) -> bool:
        try:
            return self._objects.download(ref.key, path)
        except OSError as error:
            raise spool_error(path.parent, error) from error
