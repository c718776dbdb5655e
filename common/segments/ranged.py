"""A large object of which only the parts that are read are brought here, into a sparse file."""

from __future__ import annotations

from pathlib import Path

from common.errors import SegmentCorrupt
from common.objects.port import ObjectStore
from common.segments.faults import SegmentGone
from common.segments.limits import MIB
from common.segments.spool import spool_error

BLOCK_BYTES = 32 * 1024  # the footer of most segments fits
_MAX_GET_BYTES = 32 * MIB


class SparseCopy:
    """The file `path` of `size` bytes, into which blocks of the object `key` are copied when wanted.

    Blocks are counted from the end, so that the last bytes, which are read first, come with the footer.
    """

    def __init__(self, objects: ObjectStore, key: str, size: int, path: Path) -> None:
        self._objects = objects
        self._key = key
        self._size = size
        self._shift = -size % BLOCK_BYTES
        self._present: set[int] = set()
        self._folder = path.parent
        self._file = path.open("r+b", buffering=0)
        self._file.truncate(size)

    def fetch(self, first: int, length: int) -> None:
        """Make `length` bytes from offset `first` readable, as far as the object reaches.

        Raises SegmentGone, SegmentCorrupt where the object is shorter than listed, Unavailable (E-SPOOL too).
        """
        last = min(first + length, self._size) - 1
        if first < 0 or last < first:
            return
        wanted = range((first + self._shift) // BLOCK_BYTES, (last + self._shift) // BLOCK_BYTES + 1)
        for run in _runs([block for block in wanted if block not in self._present]):
            self._copy(run)

    def _copy(self, run: range) -> None:
        begin = max(0, run.start * BLOCK_BYTES - self._shift)
        length = run.stop * BLOCK_BYTES - self._shift - begin
        data = self._objects.get(self._key, first=begin, length=length)
        if data is None:
            raise SegmentGone(f"segment {self._key}: not in the store any more")
        if len(data) != length:
            raise SegmentCorrupt(f"expected {length} bytes at {begin}, found {len(data)}")
        self._write(begin, data)
        self._present.update(run)

    def _write(self, begin: int, data: bytes) -> None:
        try:
            self._file.seek(begin)
            self._file.write(data)
        except OSError as error:
            raise spool_error(self._folder, error) from error

    def close(self) -> None:
        """Close the file; it is not removed here."""
        self._file.close()


def _runs(blocks: list[int]) -> list[range]:
    """Adjacent blocks together, as far as one request should carry."""
    runs: list[range] = []
    for block in blocks:
        if runs and runs[-1].stop == block and len(runs[-1]) * BLOCK_BYTES < _MAX_GET_BYTES:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs
