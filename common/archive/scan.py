"""Reading of a chain: a range of sequences, in order, each row once, over all levels, around damage.

`ChainArchive` chooses the next segment, and lists again when the listing may be out of date. `Scan` reads the rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import pyarrow as pa

from common.archive.guard import SegmentGone
from common.archive.reader import RowFilter
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import StretchReader, UnreadableSegment, open_stretch, reading
from common.chain import Chain
from common.errors import DataError, Unavailable
from common.exits import choices, verify_command
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch, cover, holes

T = TypeVar("T")

RELIST_ATTEMPTS = 3  # listings without progress: compaction may delete a segment after it was listed
EVERY_ROW = RowFilter()
WHOLE = SequenceRange(1, MAX_SEQUENCE)


@dataclass(frozen=True, slots=True)
class Hole:
    """Sequences that no readable segment covers, in a listing made for them.

    `causes`: the errors of the segments that cover some of them and cannot be read.
    """

    rows: SequenceRange
    causes: tuple[DataError, ...] = ()

    def __str__(self) -> str:
        return f"no segment covers {self.rows}"


Problem = Hole | UnreadableSegment  # if no other segment covers the rows of an unreadable one, a hole follows
OnProblem = Callable[[Problem], None]  # returns to continue, or raises to end the scan


def with_current_listing(
    store: SegmentStore,
    chain: Chain,
    work: Callable[[list[SegmentRef]], T],
    position: int = 1,
    level: int | None = None,
) -> T:
    """Return the result of `work` for the segments that reach `position`, listed again if `work` raises SegmentGone.

    `level` None: all levels. Raises Unavailable (E-SEG-GONE) after `RELIST_ATTEMPTS`, and the errors of the store.
    """
    for _ in range(RELIST_ATTEMPTS):
        with suppress(SegmentGone):
            return work(store.list(chain, position=position, level=level))
    raise vanishing_error(chain)


def vanishing_error(chain: Chain) -> Unavailable:
    then = "run the same command again when compaction is done; if it fails again, check the store"
    return Unavailable(
        f"chain {chain}: segments vanish while they are read, in {RELIST_ATTEMPTS} listings",
        hint=choices((then, verify_command(f"{chain.site}/{chain.feed}"))),
        code="E-SEG-GONE",
    )


class ChainArchive:
    """The segments of `chain`, without those that could not be read. Blocking; for one thread at a time.

    `refs`: a listing that was just made; None: listed when needed. `is_fixed`: no other segments count, and nothing is
    listed again.
    """

    def __init__(
        self, store: SegmentStore, chain: Chain, refs: Iterable[SegmentRef] | None = None, *, is_fixed: bool = False
    ) -> None:
        self.store, self.chain = store, chain
        self._refs = None if refs is None else list(refs)
        self._is_fixed, self._is_listed, self._listed_at = is_fixed, refs is not None, 0
        self._position, self._attempts = 0, 0
        self._errors: dict[str, UnreadableSegment] = {}
        self._avoided: dict[str, SegmentRef] = {}
        self._stretches: deque[Stretch[SegmentRef]] | None = None

    @classmethod
    def planned(cls, store: SegmentStore, stretch: Stretch[SegmentRef]) -> ChainArchive:
        """Return an archive that begins with `stretch`, chosen earlier; the chain is listed only if it fails."""
        archive = cls(store, stretch.segment.chain, (stretch.segment,))
        archive._is_listed = False
        return archive

    @classmethod
    def listed(
        cls, store: SegmentStore, chain: Chain, position: int = 1, *, level: int | None = None, limit: int | None = None
    ) -> ChainArchive:
        """Return the archive of the segments that reach `position`, listed now. The rest as in `SegmentStore.list`."""
        return cls(store, chain, store.list(chain, position=position, level=level, limit=limit))

    @property
    def refs(self) -> list[SegmentRef]:
        """The listed segments without those that are left out, by level and within a level by their end."""
        return [ref for ref in self._refs or () if ref.key not in self._avoided]

    @property
    def end(self) -> int:
        """The last sequence that a listed segment covers; 0 if there is none."""
        return max((ref.coverage.last for ref in self.refs), default=0)

    def overlapping(self, rows: SequenceRange) -> list[SegmentRef]:
        """Return the listed segments that cover some of `rows`."""
        return [ref for ref in self.refs if ref.coverage.overlaps(rows)]

    def covers(self, rows: SequenceRange = WHOLE) -> list[Stretch[SegmentRef]]:
        """Return the stretches of listed segments that account once for each covered sequence of `rows`, ascending."""
        return cover(self.refs, rows.first, rows.last)

    def holes(self, rows: SequenceRange, accepted: Iterable[SequenceRange] = ()) -> list[SequenceRange]:
        """Return the parts of `rows` that no listed segment covers, without the `accepted` gaps, ascending."""
        return holes([*(ref.coverage for ref in self.refs), *accepted], rows)

    def next(self, position: int, last: int) -> Stretch[SegmentRef] | Hole | None:
        """Return the stretch or the hole that begins at `position`, up to `last`; None if `position` is after `last`.

        A hole counts only if a listing made at this position has it. Raises the errors of the store.
        """
        if position > last:
            return None
        if position != self._position:
            self._position, self._attempts = position, 0
        while True:
            stretches = self._cover(position, last)
            begin = stretches[0].rows.first if stretches else last + 1
            if begin <= position:
                stretches[0] = Stretch(stretches[0].segment, SequenceRange(position, stretches[0].rows.last))
                return stretches[0]
            if self._is_fixed or self._listed_at == position:
                rows = SequenceRange(position, begin - 1)
                found = (each.error for each in self._errors.values() if each.segment.coverage.overlaps(rows))
                return Hole(rows, tuple(found))
            self._refs = self._stretches = None

    def upcoming(self) -> Iterable[Stretch[SegmentRef]]:
        """Return the stretches of the present cover; the first is the one that `next` returned.

        It is the same object until there is another cover.
        """
        return self._stretches or ()

    def opener(self, stretch: Stretch[SegmentRef]) -> Callable[[], StretchReader]:
        """Return a function, for any thread, that opens a stretch of `upcoming`, and raises as `open_stretch`."""
        refs = self._refs if self._is_listed else None
        return partial(open_stretch, self.store, stretch, refs=refs, excluded=self.avoided)

    @property
    def avoided(self) -> frozenset[str]:
        """The keys of the segments that are left out."""
        return frozenset(self._avoided)

    def avoid(self, found: UnreadableSegment) -> bool:
        """Leave out a segment, and return True. A segment that is gone is listed again first: return False then."""
        if found.is_gone and not self._is_fixed and self._attempts < RELIST_ATTEMPTS - 1:
            self._attempts += 1
            self._errors[found.segment.key] = found
            self._refs = self._stretches = None
            return False
        self.leave_out(found)
        return True

    def leave_out(self, found: UnreadableSegment) -> None:
        """Leave out a segment from now on."""
        self._errors[found.segment.key] = found
        self._avoided[found.segment.key] = found.segment
        self._stretches = None

    def _cover(self, position: int, last: int) -> deque[Stretch[SegmentRef]]:
        if self._refs is None:
            self._refs = self.store.list(self.chain, position=position)
            self._is_listed, self._listed_at = True, position
            # A segment that was put back has another time, and counts again.
            self._avoided = {ref.key: ref for ref in self._refs if self._avoided.get(ref.key) == ref}
        if self._stretches is None:
            self._stretches = deque(cover(self.refs, position, last))
        while self._stretches and self._stretches[0].rows.last < position:
            self._stretches.popleft()
        return self._stretches


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Prefetch of segments by the threads of `pool`: at most `count` segments for one reader, and `size` stored bytes,
    or one larger segment.
    """

    pool: Executor
    size: int
    count: int = 8

    def has_room(self, fetched: Iterable[SegmentRef], more: SegmentRef) -> bool:
        sizes = [ref.size for ref in fetched]
        return not sizes or (len(sizes) < self.count and sum(sizes) + more.size <= self.size)


_Fetched = deque[tuple[Stretch[SegmentRef], Future[StretchReader]]]  # the leading stretches of the present cover


class Scan:
    """The rows of `rows` of a chain, in sequence order, each once. Blocking; for one thread at a time.

    `on_problem` gets each hole and each damaged segment. `columns`: those of the batches, None for all. After an error,
    `batches` may be called again, and continues at `position`, the first sequence not yet read.
    """

    def __init__(
        self,
        archive: ChainArchive,
        rows: SequenceRange,
        on_problem: OnProblem,
        *,
        columns: Sequence[str] | None = None,
        row_filter: RowFilter = EVERY_ROW,
        ahead: ReadAhead | None = None,
    ) -> None:
        self._archive, self.position, self._last, self._on_problem = archive, rows.first, rows.last, on_problem
        self._columns, self._filter, self._ahead = columns, row_filter, ahead
        self._cover: Iterable[Stretch[SegmentRef]] = ()  # whose leading stretches are fetched

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows that match the filter. No batch is empty.

        Raises the errors of the store, those of `on_problem`, and DataError (E-FORK).
        """
        fetched = _Fetched()
        try:
            while (part := self._archive.next(self.position, self._last)) is not None:
                if isinstance(part, Hole):
                    self._on_problem(part)
                    self.position = part.rows.last + 1
                    continue
                try:
                    with reading(part.segment), self._open(part, fetched) as reader:
                        yield from self._rows(reader, part)
                    self.position = part.rows.last + 1
                    for other in reader.left_out:
                        self._archive.leave_out(other)
                        self._on_problem(other)
                except UnreadableSegment as found:
                    if self._archive.avoid(found):
                        self._on_problem(found)
        finally:
            _close(fetched)

    def _rows(self, reader: StretchReader, part: Stretch[SegmentRef]) -> Iterator[pa.RecordBatch]:
        read = None if self._columns is None else [*{"sequence", *self._columns, *self._filter.columns}]
        for rows in reader.ranges(self._filter) if self._filter != EVERY_ROW else [part.rows]:
            for batch in reader.batches(rows, read):
                if (found := self._filter.select(batch)).num_rows:
                    yield found
                self.position = batch.column("sequence")[-1].as_py() + 1

    @contextmanager
    def _open(self, part: Stretch[SegmentRef], fetched: _Fetched) -> Iterator[StretchReader]:
        if self._ahead is None:
            with self._archive.opener(part)() as reader:
                yield reader
            return
        if (upcoming := self._archive.upcoming()) is not self._cover:
            _close(fetched)
            self._cover = upcoming
        for each in islice(upcoming, len(fetched), None):
            if not self._ahead.has_room((stretch.segment for stretch, _ in fetched), each.segment):
                break
            fetched.append((each, self._ahead.pool.submit(self._archive.opener(each))))
        with fetched[0][1].result() as reader:
            yield reader
        fetched.popleft()


def _close(fetched: _Fetched) -> None:
    for _, future in fetched:
        if not future.cancel():
            future.add_done_callback(lambda done: done.exception() or done.result().close())  # type: ignore[func-returns-value]
    fetched.clear()
