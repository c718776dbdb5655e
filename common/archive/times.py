"""The segments of a chain by time: the first row at or after a moment, and the segments of a range of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.archive.scan import with_current_listing
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import UnreadableSegment, around_damage, open_stretch, reading
from common.chain import Chain
from common.errors import SegmentCorrupt
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch, cover, holes

SKEW_MARGIN_NS = 60_000_000_000
_TIME_COLUMNS = ("sequence", "timestamp_ns")


def search(store: SegmentStore, chain: Chain, moment_ns: int, position: int = 1) -> tuple[int | None, int]:
    """Return the sequence of the first row at or after `moment_ns` (ns since 1970 UTC), among the segments that reach
    `position` only; and the position for the next search. The position is for a search after the chain has grown, if
    nothing was found: earlier segments are not listed again.

    None: all rows of the archive are earlier, or there are none. If damaged segments lie right before that row, return
    the first sequence that they hide: a reader from there on finds the damage. Blocking. Raises Unavailable
    (E-SEG-GONE) if segments vanish repeatedly, and the errors of the store.
    """

    def find(refs: list[SegmentRef]) -> tuple[int | None, int]:
        timeline = Timeline(store, refs, position)
        return timeline.start_sequence_at(moment_ns, only_damage=True), timeline.next_position

    return with_current_listing(store, chain, find, position)


@dataclass(frozen=True, slots=True)
class _Times:
    """The first and last time in one segment, inclusive; without rows, the time of its last examined message.

    `is_mixed`: some of the rows come from other segments, because this one did not read them.
    """

    first: int
    last: int
    has_rows: bool
    is_mixed: bool = False


class Timeline:
    """The segments `refs` of one chain by time, from sequence `first` on. Keeps the times it has read. Blocking."""

    def __init__(self, store: SegmentStore, refs: Iterable[SegmentRef], first: int = 1) -> None:
        self._store, self._usable, self._first = store, list(refs), first
        self._listed = len(self._usable)
        self._times: dict[str, _Times | None] = {}

    def first_sequence_at(self, moment_ns: int) -> int | None:
        """Return the sequence of the first row at or after `moment_ns`, without the damaged segments; None if there is
        none. Raises SegmentGone for a segment that no longer exists.
        """
        return around_damage(self._usable, lambda: self._first_sequence_at(cover(self._usable, self._first), moment_ns))

    def start_sequence_at(self, moment_ns: int, *, only_damage: bool = False) -> int | None:
        """Return the same as `first_sequence_at`; but if messages are missing right before that row, the first of
        these, which may be as late. `only_damage`: only if some segments could not be read.
        """
        if (found := self.first_sequence_at(moment_ns)) is None or (only_damage and len(self._usable) == self._listed):
            return found
        timed = self.last_timed_stretch(found)
        assert timed is not None, "it was found by the time of its row"
        stretch, (least, _) = timed
        before = self.last_timed_stretch(stretch.rows.first - 1)
        start = before[0].rows.last + 1 if before else self._first
        return start if least >= moment_ns and start < stretch.rows.first else found

    def last_timed_stretch(self, upto: int) -> tuple[Stretch[SegmentRef], tuple[int, int]] | None:
        """Return the last stretch of the cover up to sequence `upto` that holds times, and its least and greatest (ns);
        None if none does. A damaged segment holds none.
        """
        refs = list(self._usable)
        while found := cover(refs, self._first, upto)[-1:]:
            with suppress(UnreadableSegment):
                if (times := self._times_of(found[0].segment)) is not None:
                    return found[0], (times.first, times.last)
            refs.remove(found[0].segment)
        return None

    @property
    def next_position(self) -> int:
        return max((ref.coverage.last + 1 for ref in self._usable), default=self._first)

    def between(
        self, begin: int | None, end: int | None, last: int = MAX_SEQUENCE, margin_ns: int = SKEW_MARGIN_NS
    ) -> list[Stretch[SegmentRef]]:
        """Return the stretches of the cover up to sequence `last` that may hold rows of `begin` <= time < `end` (ns;
        None: no such bound), ascending.

        The result is complete as long as no message is more than `margin_ns` earlier than one before it in the chain.
        Stretches that only a damaged segment covers are always included. Raises SegmentGone as `first_sequence_at`.
        """
        all_refs = list(self._usable)

        def select() -> tuple[list[Stretch[SegmentRef]], int, int]:
            stretches = cover(self._usable, self._first, last)
            first, end_index = 0, len(stretches)
            if begin is not None:
                first = self._bisect(stretches, lambda times: times.last >= begin)
                first = self._step_back(stretches, first, begin - margin_ns)
            if end is not None:
                end_index = self._bisect(stretches, lambda times: times.first >= end + margin_ns)
            return stretches, first, end_index

        stretches, first, end_index = around_damage(self._usable, select)
        taken = stretches[first:end_index]
        if len(all_refs) > len(self._usable):
            for hole in holes([each.rows for each in stretches], SequenceRange(self._first, last)):
                taken += cover(all_refs, hole.first, hole.last)
        return sorted(taken, key=lambda each: each.rows)

    def is_at_edge(self, ref: SegmentRef, begin: int | None, end: int | None) -> bool:
        """True if the times of the segment were looked up, and not all are in `begin` <= time < `end`."""
        if (times := self._times.get(ref.key)) is None:
            return False
        return (begin is not None and times.first < begin) or (end is not None and times.last >= end)

    def _first_sequence_at(self, stretches: list[Stretch[SegmentRef]], moment_ns: int) -> int | None:
        begin = self._bisect(stretches, lambda times: times.last >= moment_ns)
        begin = self._step_back(stretches, begin, moment_ns - SKEW_MARGIN_NS)
        for stretch in stretches[begin:]:
            if (times := self._times_of(stretch.segment)) is None or not times.has_rows or times.last < moment_ns:
                continue
            if (sequence := self._row_sequence(stretch, moment_ns)) is not None:
                return sequence
        return None

    def _bisect(self, stretches: list[Stretch[SegmentRef]], is_reached: Callable[[_Times], bool]) -> int:
        """Return the first index from which on `is_reached` is true for all stretches with times. It must be false for
        all before.
        """
        low, high = 0, len(stretches)
        while low < high:
            middle = probe = (low + high) // 2
            while probe < high and self._times_of(stretches[probe].segment) is None:
                probe += 1
            times = self._times_of(stretches[probe].segment) if probe < high else None
            if times is None or is_reached(times):
                high = middle
            else:
                low = probe + 1
        return low

    def _step_back(self, stretches: list[Stretch[SegmentRef]], begin: int, earliest_ns: int) -> int:
        while begin > 0:
            times = self._times_of(stretches[begin - 1].segment)
            if times is not None and times.last < earliest_ns:
                break
            begin -= 1
        return begin

    def _times_of(self, ref: SegmentRef) -> _Times | None:
        """Return the times of a segment; None if it holds none, because no message was examined for it."""
        if ref.key not in self._times:
            with reading(ref, SegmentCorrupt):
                self._times[ref.key] = self._read(ref)
        return self._times[ref.key]

    def _read(self, ref: SegmentRef) -> _Times | None:
        with self._store.open_part(ref) as reader:
            times = reader.timestamp_bounds()
            mixed = self._mixed_times(ref, reader.footer.unread) if reader.footer.unread else []
            if found := [*times, *mixed]:
                return _Times(min(low for low, _ in found), max(high for _, high in found), True, bool(mixed))
            tip = reader.footer.tip
            return None if tip is None else _Times(tip.timestamp_ns, tip.timestamp_ns, False)

    def _mixed_times(self, ref: SegmentRef, unread: SequenceRange) -> list[tuple[int, int]]:
        with open_stretch(self._store.with_partial_reads(), Stretch(ref, unread), refs=self._usable) as reader:
            batches = reader.batches(columns=_TIME_COLUMNS) if reader.others else ()
            columns: list[list[Any]] = [batch.column("timestamp_ns").to_pylist() for batch in batches]
            return [(min(times), max(times)) for times in columns]

    def _row_sequence(self, stretch: Stretch[SegmentRef], moment_ns: int) -> int | None:
        times = self._times_of(stretch.segment)
        with reading(stretch.segment, SegmentCorrupt):
            if times is not None and times.is_mixed:
                with open_stretch(self._store.with_partial_reads(), stretch, refs=self._usable) as whole:
                    return _first_row_sequence(whole.batches(columns=_TIME_COLUMNS), moment_ns)
            with self._store.open_part(stretch.segment) as reader:
                bounds = zip(reader.row_groups, reader.timestamp_bounds(), strict=True)
                late = (group.range.intersection(stretch.rows) for group, (_, last) in bounds if last >= moment_ns)
                batches = (batch for rows in late if rows for batch in reader.batches(rows, _TIME_COLUMNS))
                return _first_row_sequence(batches, moment_ns)


def _first_row_sequence(batches: Iterable[pa.RecordBatch], moment_ns: int) -> int | None:
    for batch in batches:
        late = pc.greater_equal(batch.column("timestamp_ns"), pa.scalar(moment_ns, pa.int64()))
        if (row := pc.index(late, True).as_py()) >= 0:
            sequence: int = batch.column("sequence")[row].as_py()
            return sequence
    return None
