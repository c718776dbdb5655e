"""Rows of a stretch of a cover: those of its own segment, and those of other segments for its unread sequences.

The cover follows from names alone. The writer of a segment may never have received some sequences of its coverage (they
had left the source by then): the footer records them in `unread`. A segment that arrives later, from a slower writer,
may hold their messages. So readers of a stretch open it here: for the unread sequences, the rows of all undamaged
segments count. For the other sequences, no other segment is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from common.archive.columns import CONTENT_COLUMNS, SCHEMA, count_up_to, first_difference
from common.archive.guard import SegmentGone, fork_error
from common.archive.reader import RowFilter, SegmentReader
from common.archive.segment import Footer, SegmentRef
from common.archive.store import SegmentStore
from common.errors import DataError, SegmentCorrupt
from common.logs import get_logger
from common.sequences import CoverageSet, SequenceRange, Stretch, preference

log = get_logger(__name__)

Batches = Generator[pa.RecordBatch, None, None]
SegmentBatches = list[tuple[SegmentRef, pa.RecordBatch]]

NO_KEYS: frozenset[str] = frozenset()
T = TypeVar("T")


class UnreadableSegment(Exception):
    """A segment that cannot be read, with the error. Other segments may cover its rows.

    Raised by `reading`; a scan hands it to its caller as a value.
    """

    def __init__(self, segment: SegmentRef, error: DataError) -> None:
        super().__init__(segment, error)
        self.segment, self.error = segment, error

    def __str__(self) -> str:
        return str(self.error)

    @property
    def is_gone(self) -> bool:
        """True if it was deleted after it was listed, False if it is damaged."""
        return isinstance(self.error, SegmentGone)


OnUnreadable = Callable[[UnreadableSegment], None]


@contextmanager
def reading(segment: SegmentRef, *kinds: type[DataError]) -> Iterator[None]:
    """Convert errors of `kinds` (none: SegmentCorrupt and SegmentGone) into UnreadableSegment."""
    kinds = kinds or (SegmentCorrupt, SegmentGone)
    try:
        yield
    except kinds as error:
        raise UnreadableSegment(segment, error) from error


def around_damage(usable: list[SegmentRef], work: Callable[[], T], report: OnUnreadable = lambda _: None) -> T:
    """Return the result of `work`; repeat it for each segment that it cannot read, and remove that from `usable`."""
    while True:
        try:
            return work()
        except UnreadableSegment as found:
            report(found)
            usable.remove(found.segment)


def log_left_out(found: UnreadableSegment) -> None:
    log.warning("segment left out", action="segment_left_out", error=str(found), **found.segment.log_context())


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
        self.left_out: list[UnreadableSegment] = []  # damaged segments that may hold rows of `unread`

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
            read, current = partial(self._read_within, SequenceRange(position, within.last)), own
            try:
                with closing(merge_windows([own, *usable], read, lambda ref: (ref is own, preference(ref)))) as windows:
                    for window in windows:
                        for segment, batch in _choose(window, current):
                            begins = self._stretch.rows if segment is own else within
                            since = max(begins.first, segment.coverage.first)
                            yield UnreadPart(segment, since, batch.select(names))
                            position, current = batch.column("sequence")[-1].as_py() + 1, segment
                return
            except UnreadableSegment as found:
                if found.segment is own:
                    raise found.error from None
                log_left_out(found)
                self._excluded.add(found.segment.key)
                if found.is_gone:
                    self._refs = None  # merged since it was listed
                else:
                    self.left_out.append(found)

    def _read_within(self, rows: SequenceRange, segment: SegmentRef) -> Batches:
        if segment is self._stretch.segment:
            yield from self._reader.batches(rows)
            return
        with self._store.open(segment, rows=rows) as reader:
            yield from reader.batches(rows)

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
    return StretchReader(store, stretch, store.open(stretch.segment, rows=stretch.rows), refs, excluded)


def merge_windows(
    segments: Iterable[SegmentRef],
    read: Callable[[SegmentRef], Batches],
    rank: Callable[[SegmentRef], Any] = preference,
) -> Generator[SegmentBatches, None, None]:
    """Yield the rows of `segments`, ascending, in windows: each up to the sequence that every open segment has reached.

    A window has the rows of each segment with rows there, that of the highest `rank` first; several may have the same
    sequence. `read` returns the batches of a segment; it is called when the coverage of the segment is reached.
    Memory is bounded by one batch of each segment that overlaps. Raises UnreadableSegment and the errors of the store.
    """
    waiting = deque(sorted(segments, key=lambda ref: (ref.coverage, ref.name)))
    runs: list[_Run] = []
    try:
        while waiting or runs:
            while waiting and all(waiting[0].coverage.first <= run.last for run in runs):
                segment = waiting.popleft()
                runs.append(_Run(segment, read(segment)))
                runs[-1].advance()
                runs = [run for run in runs if run.head is not None]
            if runs:
                last = min(run.last for run in runs)
                runs.sort(key=lambda run: rank(run.segment), reverse=True)
                taken = [(run.segment, run.take(last)) for run in runs]
                runs = [run for run in runs if run.head is not None]
                yield [each for each in taken if each[1].num_rows]
    finally:
        for run in runs:
            run.batches.close()


class _Run:
    """One open segment and its next rows; `head` None: there are no more."""

    def __init__(self, segment: SegmentRef, batches: Batches) -> None:
        self.segment, self.batches = segment, batches
        self.head: pa.RecordBatch | None = None

    @property
    def last(self) -> int:
        assert self.head is not None
        return int(self.head.column("sequence")[-1].as_py())

    def advance(self) -> None:
        with reading(self.segment):
            self.head = next(self.batches, None)

    def take(self, last: int) -> pa.RecordBatch:
        """Return the next rows up to the sequence `last`."""
        assert self.head is not None
        count = self.head.num_rows if self.last <= last else count_up_to(self.head.column("sequence"), last)
        taken, self.head = self.head.slice(0, count), self.head.slice(count)
        if not self.head.num_rows:
            self.advance()
        return taken


def _choose(taken: SegmentBatches, current: SegmentRef) -> Iterator[tuple[SegmentRef, pa.RecordBatch]]:
    """Yield the rows of a window, each sequence once.

    Of equal rows it takes the one from the segment of the row before, at first `current`, so that the segment changes
    rarely.
    """
    check_forks(taken)
    columns: list[Any] = [batch.column("sequence").to_pylist() for _, batch in taken]
    row_maps = [{sequence: row for row, sequence in enumerate(column)} for column in columns]
    number = next((n for n, (segment, _) in enumerate(taken) if segment is current), 0)
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
    yield taken[number][0], taken[number][1].slice(begin, end - begin)


def check_forks(parts: SegmentBatches) -> None:
    """Raise ForkError if two segments have different messages under one sequence."""
    for (one, left), (other, right) in combinations(parts, 2):
        places: Any = pc.index_in(left.column("sequence"), value_set=right.column("sequence"))
        is_common: Any = pc.is_valid(places)
        for name in CONTENT_COLUMNS if pc.any(is_common).as_py() else ():
            here, there = left.column(name).filter(is_common), right.column(name).take(places.drop_null())
            if (row := first_difference(here, there)) is not None:
                raise fork_error(one, other, left.column("sequence").filter(is_common)[row].as_py())
