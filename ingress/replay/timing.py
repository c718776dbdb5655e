"""Times to sequences: what of a chain lies between two moments, and from when to when its archive goes.

A segment that cannot be read, or says nothing of time, may hold anything: what only such ones cover belongs
to a range that reaches it, so that it is told as a hole instead of being left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import SegmentCorrupt
from common.segments.moments import Timeline
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import Stretch, cover
from ingress.replay.bounds import Moments


class Timing:
    """The segments `refs` of one chain that begins at `begins`. Blocking; raises SegmentGone."""

    def __init__(self, store: SegmentStore, refs: Sequence[SegmentRef], begins: int) -> None:
        self._store, self._refs, self._begins = store, list(refs), begins
        self._timeline = Timeline(store, refs)
        self._covered = max((ref.coverage.last for ref in refs), default=0)

    def between(self, moments: Moments) -> tuple[int, int] | None:
        """First and last sequence from the one moment up to, and without, the other; None: nothing is."""
        begin_ns, end_ns = moments
        first, last = self._begins, self._covered
        if begin_ns is not None:
            first = self._from(begin_ns)
        if end_ns is not None and (found := self._timeline.first_at(end_ns)) is not None:
            last = found - 1
        return (first, last) if first <= last else None

    def extent(self) -> Moments:
        """The least and the greatest time (ns) that the archive goes from and to; None: nobody can tell."""
        first, last = self._first_telling(), self._last_telling(self._covered)
        first_ns = None if first is None else self._times(first)[0]
        if last is None or last.rows.last < self._covered:
            return first_ns, None
        return first_ns, max(self._times(last)[1], self._tip_of(last))

    # The first sequence

    def _from(self, moment_ns: int) -> int:
        """Where what may be at or after the moment begins; behind the end where nothing may."""
        found = self._timeline.first_at(moment_ns)
        if found is None:
            return self._behind_telling(self._covered)
        stretch = self._holding(found)
        if self._times(stretch)[0] < moment_ns:
            return found
        # What is missing right before may be as new.
        behind = self._behind_telling(stretch.rows.first - 1)
        return behind if behind < stretch.rows.first else found

    def _holding(self, sequence: int) -> Stretch[SegmentRef]:
        """The stretch around a row that was found by its time."""
        refs = list(self._refs)
        while True:
            stretch = next(s for s in cover(refs, self._begins) if sequence in s.rows)
            if self._tells(stretch):
                return stretch
            refs.remove(stretch.segment)

    def _behind_telling(self, upto: int) -> int:
        last = self._last_telling(upto)
        return self._begins if last is None else last.rows.last + 1

    # Segments that tell

    def _first_telling(self) -> Stretch[SegmentRef] | None:
        """Whose segment begins the archive; None where something before it cannot be read."""
        refs = list(self._refs)
        begin = min((s.rows.first for s in cover(refs, self._begins)[:1]), default=0)
        while found := cover(refs, self._begins)[:1]:
            if found[0].rows.first > begin:
                return None
            if self._tells(found[0]):
                return found[0]
            refs.remove(found[0].segment)
        return None

    def _last_telling(self, upto: int) -> Stretch[SegmentRef] | None:
        """The last stretch up to the sequence `upto` that tells of time."""
        refs = list(self._refs)
        while upto >= self._begins and (found := cover(refs, self._begins, upto)[-1:]):
            if self._tells(found[0]):
                return found[0]
            refs.remove(found[0].segment)
        return None

    def _tells(self, stretch: Stretch[SegmentRef]) -> bool:
        return self._timeline.times_of(stretch.segment) is not None

    def _times(self, stretch: Stretch[SegmentRef]) -> tuple[int, int]:
        times = self._timeline.times_of(stretch.segment)
        assert times is not None, "only of stretches that tell"
        return times

    def _tip_of(self, stretch: Stretch[SegmentRef]) -> int:
        """The time of the last message that was examined, which need not have become a row."""
        try:
            tip = self._store.footer(stretch.segment).tip
        except SegmentCorrupt:
            return 0
        return 0 if tip is None else tip.timestamp_ns
