"""Rows of a stretch of a cover: those of its own segment, and those of other segments for its unread sequences.

The cover follows from names alone. The writer of a segment may never have received some sequences of its coverage (they
had left the source by then): the footer records them in `unread`. A segment that arrives later, from a slower writer,
may hold their messages. So readers of a stretch open it here: for the unread sequences, the rows of all undamaged
segments count. For the other sequences, no other segment is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar

import pyarrow as pa

from common.archive.columns import CONTENT_COLUMNS, SCHEMA, first_difference
from common.archive.guard import SegmentGone, fork_error
from common.archive.reader import RowFilter, SegmentReader
from common.archive.segment import Footer, SegmentRef
from common.archive.store import SegmentStore
from common.errors import DataError, SegmentCorrupt
from common.logs import get_logger
from common.sequences import CoverageSet, SequenceRange, Stretch, preference

log = get_logger(__name__)

NO_KEYS: frozenset[str] = frozenset()
T = TypeVar("T")


class UnreadableSegmentError(Exception):
    """Failure to read one segment of several, with its error."""

    def __init__(self, segment: SegmentRef, error: DataError) -> None:
        super().__init__(segment.key)
        self.segment, self.error = segment, error


Report = Callable[[UnreadableSegmentError], None]


@contextmanager
def reading(segment: SegmentRef, *kinds: type[DataError]) -> Iterator[None]:
    """Convert errors of `kinds` (none: SegmentCorrupt and SegmentGone) into UnreadableSegmentError."""
    kinds = kinds or (SegmentCorrupt, SegmentGone)
    try:
        yield
    except kinds as error:
        raise UnreadableSegmentError(segment, error) from error


def around_damage(usable: list[SegmentRef], work: Callable[[], T], report: Report = lambda _: None) -> T:
    """Return the result of `work`; repeat it for each segment that it cannot read, and remove that from `usable`."""
    while True:
        try:
            return work()
        except UnreadableSegmentError as error:
            report(error)
            usable.remove(error.segment)


def log_left_out(error: UnreadableSegmentError) -> None:
    context = error.segment.log_context()
    log.warning("segment left out", action="segment_left_out", error=str(error.error), **context)


@dataclass(frozen=True, slots=True)
class UnreadPart:
    """Some rows of a stretch, ascending, all from `segment`.

    Between the part before (or `since`, if that is greater) and the last of these rows, `segment` has no other rows. So
    its name and a range are enough to find exactly the same rows again.
    """

    segment: SegmentRef
    since: int
    batch: pa.RecordBatch


class StretchReader(AbstractContextManager["StretchReader"]):
    """An open stretch; a context manager. Created by `open_stretch`; for one thread at a time.

    `footer`: that of the stretch's own segment.
    """

    def __init__(
        self,
        store: SegmentStore,
        stretch: Stretch[SegmentRef],
        reader: SegmentReader,
        refs: Sequence[SegmentRef] | None,
        excluded: AbstractSet[str],
    ) -> None:
        self.footer: Footer = reader.footer
        self._store, self._stretch, self._reader = store, stretch, reader
        self._refs, self._excluded = refs, {*excluded, stretch.segment.key}
        self.left_out: list[UnreadableSegmentError] = []  # damaged segments that may hold rows of `unread`

    @property
    def unread(self) -> SequenceRange | None:
        """The part of the stretch for which other segments may hold rows; None if all of it was read."""
        return self.footer.unread and self.footer.unread.intersection(self._stretch.rows)

    @property
    def others(self) -> Sequence[SegmentRef]:
        """The other segments that may hold rows of `unread`. Raises the errors of the store."""
        if (unread := self.unread) is None:
            return []
        if self._refs is None:  # no `cached_property`: in Python 3.11 one computation blocks all instances
            pages = self._store.pages(self._stretch.segment.chain, position=unread.first)
            self._refs = [ref for page in pages for ref in page if ref.coverage.overlaps(unread)]
        return [ref for ref in self._refs if ref.coverage.overlaps(unread) and ref.key not in self._excluded]

    def batches(
        self, rows: SequenceRange | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        for part in self.parts(rows, columns):
            yield part.batch

    def parts(self, rows: SequenceRange | None = None, columns: Sequence[str] | None = None) -> Iterator[UnreadPart]:
        """Yield the same as `batches`, each with its segment.

        Raises SegmentCorrupt and SegmentGone for the stretch's own segment, DataError (E-FORK) if two
        segments have different messages under one sequence; other segments that cannot be read are left out.
        """
        wanted = rows or self._stretch.rows
        unread = self.unread and self.unread.intersection(wanted)
        if unread is None or not self.others:
            yield from self._read_own(wanted, columns)
            return
        if unread.first > wanted.first:
            yield from self._read_own(SequenceRange(wanted.first, unread.first - 1), columns)
        yield from self._merge(unread, columns)
        if unread.last < wanted.last:
            yield from self._read_own(SequenceRange(unread.last + 1, wanted.last), columns)

    def ranges(self, wanted: RowFilter) -> list[SequenceRange]:
        """Return the ranges of the stretch that may hold rows of `wanted`, ascending. Raises SegmentCorrupt."""
        found = CoverageSet()
        for each in [*self._reader.ranges(wanted), *filter(None, [self.unread])]:
            if (part := each.intersection(self._stretch.rows)) is not None:
                found.add(part)
        return found.stretches()

    def late_parts(self) -> Iterator[UnreadPart]:
        """Yield the rows of other segments for `unread`, only their sequences. Raises as `parts`."""
        for part in self.parts(self.unread, ("sequence",)) if self.others else ():
            if part.segment.key != self._stretch.segment.key:
                yield part

    def max_missing(self, within: SequenceRange) -> int:
        """Return the greatest number of sequences in `within` that may still be missing: the segment's ledger counts
        them as gone, and no segment has their rows.

        The ledger has only numbers, not sequences: if other reasons apply in the same range, rows that are missing
        for those reasons count too.
        """
        unread = self.unread and self.unread.intersection(within)
        if unread is None:
            return 0
        found = sum(batch.num_rows for batch in self.batches(unread, ("sequence",)))
        return min(self.footer.ledger.unread(), len(unread) - found)

    def _read_own(self, rows: SequenceRange, columns: Sequence[str] | None) -> Iterator[UnreadPart]:
        segment, since = self._stretch.segment, self._stretch.rows.first
        for batch in self._reader.batches(rows, columns):
            yield UnreadPart(segment, since, batch)

    def _merge(self, within: SequenceRange, columns: Sequence[str] | None) -> Iterator[UnreadPart]:
        names = [name for name in SCHEMA.names if columns is None or name in columns]
        own = self._stretch.segment
        position = within.first
        while position <= within.last:
            usable = [ref for ref in self.others if ref.key not in self._excluded]
            merge = _RowMerge(self._store, own, self._reader, usable, SequenceRange(position, within.last))
            try:
                for segment, batch in merge.parts():
                    begins = self._stretch.rows if segment is own else within
                    since = max(begins.first, segment.coverage.first)
                    yield UnreadPart(segment, since, batch.select(names))
                    position = batch.column("sequence")[-1].as_py() + 1
                return
            except UnreadableSegmentError as error:
                log_left_out(error)
                self._excluded.add(error.segment.key)
                if isinstance(error.error, SegmentGone):
                    self._refs = None  # merged since it was listed
                else:
                    self.left_out.append(error)
            finally:
                merge.close()

    def close(self) -> None:
        self._reader.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def open_stretch(
    store: SegmentStore,
    stretch: Stretch[SegmentRef],
    *,
    refs: Sequence[SegmentRef] | None = None,
    excluded: AbstractSet[str] = NO_KEYS,
) -> StretchReader:
    """Open a stretch of a cover.

    `refs`: the segments of the chain, if they are listed already (None: listed when needed). `excluded`: keys of
    segments that do not count. Raises SegmentCorrupt, SegmentGone, and the errors of the store.
    """
    reader = store.open(stretch.segment, rows=stretch.rows)
    return StretchReader(store, stretch, reader, refs, excluded)


_Batches = list[tuple[SegmentRef, pa.RecordBatch]]


class _RowMerge:
    """A merge of the rows of `own` and of `others` inside `within`, each sequence once. It is used once.

    Of equal rows it takes the one from the segment of the row before, so that the segment changes rarely.
    """

    def __init__(
        self,
        store: SegmentStore,
        own: SegmentRef,
        reader: SegmentReader,
        others: Sequence[SegmentRef],
        within: SequenceRange,
    ) -> None:
        self._store, self._own, self._within = store, own, within
        self._runs = [_Run(own, reader.batches(within))]
        self._waiting = deque(sorted(others, key=lambda ref: (ref.coverage, ref.name)))
        self._open: list[SegmentReader] = []
        self._current = own

    def parts(self) -> Iterator[tuple[SegmentRef, pa.RecordBatch]]:
        for run in self._runs:
            self._advance(run)
        while True:
            self._open_reached()
            self._runs = [run for run in self._runs if run.head is not None]
            if not self._runs:
                return
            last = min(run.last for run in self._runs)
            taken = [(run.segment, self._take(run, last)) for run in self._runs]
            yield from self._choose([each for each in taken if each[1].num_rows])

    def close(self) -> None:
        for reader in self._open:
            reader.close()

    def _open_reached(self) -> None:
        while self._waiting:
            open_ends = [run.last for run in self._runs if run.head is not None]
            if open_ends and self._waiting[0].coverage.first > min(open_ends):
                return
            ref = self._waiting.popleft()
            with reading(ref):
                reader = self._store.open(ref, rows=self._within)
            self._open.append(reader)
            run = _Run(ref, reader.batches(self._within))
            self._advance(run)
            self._runs.append(run)
            self._runs.sort(key=lambda each: (each.segment is self._own, preference(each.segment)), reverse=True)

    def _advance(self, run: _Run) -> None:
        with nullcontext() if run.segment is self._own else reading(run.segment):
            run.head = next(run.batches, None)

    def _take(self, run: _Run, last: int) -> pa.RecordBatch:
        assert run.head is not None
        count = bisect_right(_sequences(run.head), last)
        taken, run.head = run.head.slice(0, count), run.head.slice(count)
        if not run.head.num_rows:
            self._advance(run)
        return taken

    def _choose(self, taken: _Batches) -> Iterator[tuple[SegmentRef, pa.RecordBatch]]:
        row_maps = [{sequence: row for row, sequence in enumerate(_sequences(batch))} for _, batch in taken]
        _check_forks(taken, row_maps)
        number = next((n for n, (segment, _) in enumerate(taken) if segment is self._current), 0)
        begin, end = 0, 0  # of the rows that are taken from `number` and not yet yielded
        for sequence in sorted(set().union(*row_maps)):
            if sequence not in row_maps[number]:
                if end > begin:
                    yield taken[number][0], taken[number][1].slice(begin, end - begin)
                number = next(n for n, each in enumerate(row_maps) if sequence in each)
                begin = end = row_maps[number][sequence]
            elif end == begin:
                begin = end = row_maps[number][sequence]
            end += 1
        self._current = taken[number][0]
        yield taken[number][0], taken[number][1].slice(begin, end - begin)


class _Run:
    """One open segment and its next rows; `head` None: there are no more."""

    def __init__(self, segment: SegmentRef, batches: Iterator[pa.RecordBatch]) -> None:
        self.segment, self.batches = segment, batches
        self.head: pa.RecordBatch | None = None

    @property
    def last(self) -> int:
        assert self.head is not None
        return int(self.head.column("sequence")[-1].as_py())


def _sequences(batch: pa.RecordBatch) -> list[int]:
    column: Any = batch.column("sequence")
    found: list[int] = column.to_pylist()
    return found


def _check_forks(taken: _Batches, row_maps: Sequence[dict[int, int]]) -> None:
    for (one, other), (here, there) in zip(combinations(taken, 2), combinations(row_maps, 2), strict=True):
        if not (common := sorted(here.keys() & there.keys())):
            continue
        left = one[1].take(pa.array([here[sequence] for sequence in common]))
        right = other[1].take(pa.array([there[sequence] for sequence in common]))
        for name in CONTENT_COLUMNS:
            if (row := first_difference(left.column(name), right.column(name))) is not None:
                raise fork_error(one[0], other[0], common[row])
