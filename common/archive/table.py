"""Table of very many segments in little memory: 40 bytes for each; a SegmentRef takes about 690.

A chain may have a million segments. A caller that needs all of them keeps one listing in this form, and creates
references for one *window* of it at a time. Segments of different windows never overlap. So a result for a window (the
segments that are outstanding, contained, damaged or not covered by others) is valid for the whole chain.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from common.archive.keys import DIGEST_LENGTH, SegmentName
from common.archive.segment import SegmentRef
from common.chain import Chain
from common.sequences import MAX_SEQUENCE, SequenceRange

WINDOW_SEGMENTS = 2000  # segments of a window, at least; more if they overlap at its end

Window = list[range]


class _Folder:
    """The segments of one chain and level: their common values, and a column for each other value."""

    def __init__(self, prefix: str, chain: Chain, level: int) -> None:
        self.prefix, self.chain, self.level = prefix, chain, level
        self.firsts, self.lasts, self.sizes = array("q"), array("q"), array("q")
        self.digests, self.modified = array("Q"), array("d")

    def __len__(self) -> int:
        return len(self.lasts)

    def add(self, ref: SegmentRef) -> None:
        (_, _, coverage, digest), _, size, modified = ref
        self.firsts.append(coverage.first)
        self.lasts.append(coverage.last)
        self.digests.append(int(digest, 16))
        self.sizes.append(size)
        self.modified.append(modified)

    def ref(self, row: int) -> SegmentRef:
        first, last, digest = self.firsts[row], self.lasts[row], f"{self.digests[row]:0{DIGEST_LENGTH}x}"
        name = SegmentName(self.chain, self.level, SequenceRange(first, last), digest)
        key = f"{self.prefix}{last:020d}-{first:020d}-{digest}.parquet"
        return SegmentRef(name, key, self.sizes[row], self.modified[row])

    def find(self, name: SegmentName) -> int | None:
        """Return the row of `name`; None if it is not here. The rows must ascend by name."""
        digest = int(name.digest, 16)
        begin, end = (side(self.lasts, name.coverage.last) for side in (bisect_left, bisect_right))
        same = (row for row in range(begin, end) if self.firsts[row] == name.coverage.first)
        return next((row for row in same if self.digests[row] == digest), None)


class SegmentTable(Sequence[SegmentRef]):
    """Segments, grouped by chain and level in the order of their first appearance. References are created on access.

    Searching and cutting windows require the segments of one chain, each level ascending by name, as a listing
    returns them.
    """

    def __init__(self, refs: Iterable[SegmentRef] = ()) -> None:
        self._folders: dict[str, _Folder] = {}
        self.extend(refs)

    def extend(self, refs: Iterable[SegmentRef]) -> None:
        for ref in refs:
            prefix = ref.key[: ref.key.rindex("/") + 1]
            if (folder := self._folders.get(prefix)) is None:
                folder = self._folders[prefix] = _Folder(prefix, ref.chain, ref.level)
            folder.add(ref)

    def move_from(self, other: SegmentTable) -> None:
        """Take all of `other`, which must not be used any more: a chain and level that is new here is only moved."""
        for prefix, folder in other._folders.items():
            if self._folders.setdefault(prefix, folder) is not folder:
                self.extend(map(folder.ref, range(len(folder))))

    def __len__(self) -> int:
        return sum(map(len, self._folders.values()))

    @overload
    def __getitem__(self, index: int) -> SegmentRef: ...
    @overload
    def __getitem__(self, index: slice) -> list[SegmentRef]: ...
    def __getitem__(self, index: int | slice) -> SegmentRef | list[SegmentRef]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        folder, row = self._locate(index)
        return folder.ref(row)

    def __iter__(self) -> Iterator[SegmentRef]:
        for folder in self._folders.values():
            yield from map(folder.ref, range(len(folder)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SegmentTable({len(self)} segments)"

    def iter_refs(self, window: Window) -> Iterator[SegmentRef]:
        for indices in filter(None, window):
            folder, row = self._locate(indices.start)
            yield from map(folder.ref, range(row, row + len(indices)))

    @property
    def size(self) -> int:
        """Stored bytes of all segments."""
        return sum(sum(folder.sizes) for folder in self._folders.values())

    def size_at(self, index: int) -> int:
        folder, row = self._locate(index)
        return folder.sizes[row]

    def end_at(self, index: int) -> int:
        folder, row = self._locate(index)
        return folder.lasts[row]

    @property
    def end(self) -> int:
        """The last sequence that any segment covers; 0 without segments."""
        return max((max(folder.lasts) for folder in self._folders.values()), default=0)

    def index_of(self, ref: SegmentRef) -> int | None:
        """Return the index of `ref`; None if it is not here."""
        prefix, offset = ref.key[: -len(ref.name)], 0
        for folder in self._folders.values():
            if folder.prefix == prefix:
                row = folder.find(ref.segment)
                return None if row is None else offset + row
            offset += len(folder)
        return None

    def windows(self, size: int = WINDOW_SEGMENTS) -> Iterator[Window]:
        """Yield the indices of all segments, window by window, ascending; a window has a range for each level.

        A window holds `size` segments and those that overlap them: if overlaps connect all segments,
        there is one window, as large as the chain.
        """
        begins = dict.fromkeys(self._folders, 0)
        for cut in [*reversed(self._cuts(size)), MAX_SEQUENCE]:
            window, offset = [], 0
            for prefix, folder in self._folders.items():
                begin, end = begins[prefix], bisect_right(folder.lasts, cut)
                window.append(range(offset + begin, offset + end))
                begins[prefix] = end
                offset += len(folder)
            if any(window):
                yield window

    def _cuts(self, size: int) -> list[int]:
        """Return sequences, descending, that no segment covers together with the next sequence. At least `size`
        segments end between two of them.
        """
        cuts: list[int] = []
        if len(self) <= size:
            return cuts
        count, least = 0, MAX_SEQUENCE + 1  # `least`: the first sequence of the later segments
        # From the end: the first sequences of all later segments are known there.
        descending = (zip(reversed(f.lasts), reversed(f.firsts), strict=True) for f in self._folders.values())
        for last, first in heapq.merge(*descending, reverse=True):
            if count >= size and last < least:
                cuts.append(last)
                count = 0
            count, least = count + 1, min(least, first)
        return cuts

    def _locate(self, index: int) -> tuple[_Folder, int]:
        row = index if index >= 0 else index + len(self)
        for folder in self._folders.values():
            if 0 <= row < len(folder):
                return folder, row
            row -= len(folder)
        raise IndexError(f"place {index}: expected one of {len(self)}")
