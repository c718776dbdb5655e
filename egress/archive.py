"""Segments of one chain in the object store, and its high-water mark in the state bucket.

The listing names the archived segments; the mark detects a listing that omits a segment put before.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.archive.documents import ChainStore
from common.archive.guard import SegmentGone
from common.archive.keys import MAX_LEVEL
from common.archive.reader import SegmentReader, open_file
from common.archive.scan import ChainArchive
from common.archive.segment import SegmentRef
from common.archive.store import Check, SegmentStore
from common.archive.writer import SpooledSegment
from common.chain import Chain
from common.clock import Clock
from common.errors import DataError, FloeError, Stopped, Unavailable
from common.exits import believe_command
from common.failpoints import failpoint
from common.logs import get_logger
from common.sequences import CoverageSet, SequenceRange
from common.service.process import ThreadPool
from common.tasks import first_of
from egress.deps import LARGE_PUT_BYTES, Intervals, PartitionDeps, Pools
from egress.incarnations import HighWaterMarks, Incarnation

log = get_logger(__name__)


VIEW_SEGMENTS = 1000  # segments kept by a view: those that reach furthest
LOOKUP_SEGMENTS = 100  # segments to list if a handful are wanted
WIDEN_FACTOR = 4  # factor by which a search back widens if it has not found enough


class ListingView:
    """Result of a listing. `covered`: by all segments; `newest`: those that reach furthest, newest first."""

    def __init__(self, pages: Iterable[Sequence[SegmentRef]] = ()) -> None:
        self.covered = CoverageSet()
        self.newest: list[SegmentRef] = []
        for page in pages:
            self.add(page)

    def add(self, page: Sequence[SegmentRef]) -> None:
        for ref in page:
            self.covered.add(ref.coverage)
        found = sorted([*self.newest, *page], key=lambda ref: (ref.coverage.last, ref.coverage.first), reverse=True)
        self.newest = found[:VIEW_SEGMENTS]


NEWER_VERSION_CODE = "E-SEG-VERSION"  # written by a newer Floe; its segment names are as reliable as ours


class Archive:
    """Archived segments of one chain, and the steps that add to them. It keeps no list of all segments.

    `end`: the last sequence covered, 0 if none is. `holes`: known holes below it, ascending; only a walk finds those
    before the high-water mark. `newest`: the segments that reach furthest, newest first, complete from some sequence
    on; empty only if nothing is archived. `damaged`: by key, the error of each segment that reaches beyond the mark and
    does not match its name. Such a segment does not count: the range that it claims to cover is read again.
    `missing_key`: the key of the newest segment, once it is found to be gone; empty before.
    """

    def __init__(
        self, chain: Chain, first: int, store: SegmentStore, chains: ChainStore, marks: HighWaterMarks, pools: Pools
    ) -> None:
        self.chain, self.first, self.end = chain, first, 0
        self.holes: tuple[SequenceRange, ...] = ()
        self.newest: Sequence[SegmentRef] = ()
        self.damaged: dict[str, str] = {}
        self.missing_key = ""
        self._has_older = False
        self._recent_lookups: deque[tuple[int, Sequence[SegmentRef]]] = deque(maxlen=2)  # (sequence, segments) of `at`
        self._valid_keys: set[str] = set()  # keys of segments that were put here, or that match their names
        self._mark: int | None = None
        self._store, self._chains, self._marks, self._pools, self._threads = store, chains, marks, pools, pools.io

    @classmethod
    async def open(cls, current: Incarnation, deps: PartitionDeps) -> Archive:
        chain, marks = current.chain, HighWaterMarks(deps.state)
        archive = cls(chain, current.document.first, deps.store, deps.chains, marks, deps.pools)
        await archive.raise_first_to_floor()
        return archive

    async def load(self) -> None:
        """List the chain from the mark on, or all of it if there is no mark.

        Raises Unavailable, E-LISTING, if no listed segment contains the mark.
        """
        self._mark = mark = await self._marks.get(self.chain)
        if mark is None:
            await self.load_all()
            return
        since = max(mark, self.first)
        view = await self._load_valid(lambda: self._reaching(since), mark, since)
        if mark >= self.first and mark not in view.covered:
            raise Unavailable(
                f"listing of {self.chain}: expected a segment that contains the high-water mark {mark}, found none",
                hint="egress lists again until it finds one; if the objects are lost:\n" + believe_command(self.chain),
                code="E-LISTING",
            )

    async def load_from(self, position: int) -> None:
        view = await self._threads.run(self._reaching, position)
        self.end, self.newest, self._has_older = view.covered.end, view.newest, True

    async def load_all(self) -> None:
        """List the whole chain, and trust the listing regardless of the mark."""
        await self._load_valid(lambda: ListingView(self.pages()), None, self.first)

    async def _load_valid(self, listing: Callable[[], ListingView], mark: int | None, since: int) -> ListingView:
        view = await self._threads.run(listing)
        while not await self._threads.run(self._are_valid, view, mark):
            view = await self._threads.run(listing)
        self.end, self.newest, self._has_older = view.covered.end, view.newest, False
        self.holes = tuple(view.covered.holes(SequenceRange(since, self.end))) if self.end >= since else ()
        return view

    def _are_valid(self, view: ListingView, mark: int | None) -> bool:
        """True if the segments beyond the mark match their names.

        Without a mark only the end counts: it is the end of the first sound segment, from the top down.
        """
        are_valid = True
        for ref in view.newest:
            if ref.coverage.last <= (mark or 0):
                break
            is_valid = self._is_valid(ref)
            are_valid &= is_valid
            if is_valid and mark is None:
                break
        return are_valid

    def _is_valid(self, ref: SegmentRef) -> bool:
        if ref.key not in self._valid_keys and ref.key not in self.damaged:
            found = self._store.inspect(ref)
            if isinstance(found, SegmentGone):
                raise Unavailable(f"{found.message}: deleted since it was listed")
            if isinstance(found, DataError) and found.code != NEWER_VERSION_CODE:
                self.damaged[ref.key] = found.message
                return False
            self._valid_keys.add(ref.key)
        return ref.key in self._valid_keys

    # Further lookups

    async def load_older(self, first: int) -> Sequence[SegmentRef]:
        if not self._has_older and self.newest and self.end >= first:
            width = len(self.newest[0].coverage) * LOOKUP_SEGMENTS
            found = await self._threads.run(self._newest, SequenceRange(max(first, 1), self.end), width)
            self.newest = found or self.newest
            self._has_older = True
        return self.newest

    async def segments_at(self, sequence: int) -> Sequence[SegmentRef]:
        sequence = max(sequence, self.first)
        if sequence > self.end:
            return ()
        for at, known in ((0, self.newest), *self._recent_lookups):
            if at == sequence or any(sequence in ref.coverage for ref in known):
                return known
        found = await self._threads.run(self._segments_at, sequence)
        self._recent_lookups.append((sequence, found))
        return found

    async def raise_first_to_floor(self) -> None:
        floor = await self._threads.run(self._chains.read_floor, self.chain)
        self.first = max(self.first, floor or 0)

    async def uncovered(self, within: SequenceRange) -> list[SequenceRange]:
        return await self._threads.run(self._uncovered, within)

    # Blocking calls

    def pages(self) -> Iterator[list[SegmentRef]]:
        return map(self._undamaged, self._store.walk(self.chain))

    def refs(self, position: int = 1) -> list[SegmentRef]:
        return self._undamaged(ChainArchive.listed(self._store, self.chain, position).refs)

    def _undamaged(self, refs: Iterable[SegmentRef]) -> list[SegmentRef]:
        return [ref for ref in refs if ref.key not in self.damaged]

    def _reaching(self, position: int) -> ListingView:
        """List the segments that reach `position`: level 0, and the other levels if level 0 does not contain it.

        The segment that reaches the end of a chain remains in level 0 until there is a newer one.
        """
        view = ListingView()
        for level in range(MAX_LEVEL + 1):
            for page in self._store.pages(self.chain, level, position=position):
                view.add(self._undamaged(page))
            if position in view.covered and not level:
                break
        return view

    def _newest(self, within: SequenceRange, width: int) -> list[SegmentRef]:
        """Return the LOOKUP_SEGMENTS that reach furthest, newest first, or all that reach `within` if these are fewer.

        `width`: the number of sequences at the end of `within` to search first.
        """
        while True:
            position = max(within.first, within.last + 1 - width)
            found = self._reaching(position).newest
            if len(found) >= LOOKUP_SEGMENTS or position <= within.first:
                return found[:LOOKUP_SEGMENTS]
            width *= WIDEN_FACTOR

    def _segments_at(self, position: int) -> Sequence[SegmentRef]:
        found: list[SegmentRef] = []
        for level in range(MAX_LEVEL + 1):
            page = ChainArchive.listed(self._store, self.chain, position, level=level, limit=LOOKUP_SEGMENTS)
            found += self._undamaged(page.refs)
            if any(position in ref.coverage for ref in found):
                break
        return found

    def _uncovered(self, within: SequenceRange) -> list[SequenceRange]:
        covered = CoverageSet()
        for ref in self._overlapping(within):
            covered.add(ref.coverage)
            if not covered.holes(within):
                break
        return covered.holes(within)

    def may_be_wiped(self, source_first: int) -> bool:
        """True if an empty listing may hide an archive: there is no mark to prove that nothing was put, and the source
        no longer holds everything from the chain's beginning on.
        """
        return not self.end and self._mark is None and source_first > self.first

    def wiped_error(self, source_first: int) -> Stopped:
        return Stopped(
            f"{self.chain}: no segment and no high-water mark; the source begins at {source_first}, "
            f"but the chain at {self.first}",
            hint=f"restore the objects; if nothing was ever archived:\n{believe_command(self.chain)}",
            code="E-EMPTY-ARCHIVE",
        )

    async def repair_tail(self) -> None:
        end = max(self.end, self.first - 1)
        if self._mark is None or self._mark < end:
            await self._marks.raise_to(self.chain, end)
            self._mark = end
        if self.end and await self._threads.run(self._chains.read_tail, self.chain) != self.end:
            await self._threads.run(self._chains.write_tail, self.chain, self.end)

    async def is_covered(self, sequence: int) -> bool:
        """True if a sound segment that egress wrote covers `sequence`. Lists from there; sets `missing_key`."""
        return await self._threads.run(self._is_covered, sequence)

    def _is_covered(self, sequence: int) -> bool:
        # The listing begins at the newest segment, which remains in level 0 until there is a newer one.
        newest = next((ref for ref in self.newest[:1] if not ref.level and ref.coverage.last == sequence - 1), None)
        position = sequence if newest is None else newest.coverage.last
        refs = ChainArchive.listed(self._store, self.chain, position, level=0, limit=LOOKUP_SEGMENTS).refs
        if newest is not None and all(ref.key != newest.key for ref in refs):
            self.missing_key = newest.key
        return any(sequence in ref.coverage and self._is_valid(ref) for ref in refs)

    async def check_newest(self) -> None:
        """Set `missing_key` if the newest segment is gone. Raises the errors of the store."""
        if self.newest and await self._threads.run(self._store.objects.head, self.newest[0].key) is None:
            self.missing_key = self.newest[0].key

    async def count_conflicting(self, spooled: SpooledSegment) -> int:
        """Count the rows of `spooled` that existing segments cover, but do not hold: messages of another incarnation of
        the stream, or messages that were gone when the segments were read. Of a sampled feed, count only rows for which
        a segment holds another row.
        """
        return await self._threads.run(self._count_conflicting, spooled)

    def _count_conflicting(self, spooled: SpooledSegment) -> int:
        within, is_sampled = spooled.footer.coverage, spooled.footer.sampling is not None
        if not (refs := [*self._overlapping(within)]):
            return 0
        with open_file(spooled.path, spooled.segment_name) as reader:
            sequences, times = _times(reader)
        is_same = is_there = pa.array([False] * len(sequences), pa.bool_())
        for ref in refs:
            with self._store.open(ref, rows=ref.coverage.intersection(within)) as reader:
                others, other_times = _times(reader)
            indexes = pc.index_in(sequences, value_set=others)
            is_same = pc.or_(is_same, pc.fill_null(pc.equal(other_times.take(indexes), times), pa.scalar(False)))
            first, last = (pa.scalar(n, pa.int64()) for n in (ref.coverage.first, ref.coverage.last))
            covered = pc.and_(pc.greater_equal(sequences, first), pc.less_equal(sequences, last))
            is_there = pc.or_(is_there, pc.is_valid(indexes) if is_sampled else covered)
        return int(pc.and_(is_there, pc.invert(is_same)).true_count)

    def _overlapping(self, within: SequenceRange) -> Iterator[SegmentRef]:
        for level in range(MAX_LEVEL + 1):
            for page in self._store.pages(self.chain, level, position=within.first):
                yield from (ref for ref in self._undamaged(page) if ref.coverage.overlaps(within))
                if page[-1].coverage.first > within.last:
                    break

    async def has_successor(self) -> bool:
        """True if the next incarnation exists: segments put into this one would not be delivered."""
        return await self._threads.run(self._chains.has_next_incarnation, self.chain)

    # Order of a put: the object, read back; then the tail, by which readers notice it; then the mark, from which on the
    # listing must show the segment. A crash in between leaves an old tail or mark; `repair_tail` raises them.

    async def put(self, spooled: SpooledSegment, may_put: Check) -> SegmentRef:
        """Put the segment as `SegmentStore.put`. May be called again after any error."""
        failpoint("egress.before_put")
        threads = self._pools.large_puts if spooled.size >= LARGE_PUT_BYTES else self._threads
        ref = await threads.run(self._store.put, spooled, may_put)
        self._valid_keys.add(ref.key)
        if ref.coverage.last > self.end:  # a segment that fills a hole is followed by others
            self.newest = [ref, *self.newest[: LOOKUP_SEGMENTS - 1]]
            self.end = ref.coverage.last
        self.damaged.pop(ref.key, None)  # put again, it matches its name
        failpoint("egress.after_put")
        return ref

    async def write_tail(self) -> None:
        await self._threads.run(self._chains.write_tail, self.chain, self.end)
        failpoint("egress.after_tail")

    async def raise_mark(self) -> None:
        await self._marks.raise_to(self.chain, self.end)
        failpoint("egress.after_mark")


def _times(reader: SegmentReader) -> tuple[Any, Any]:
    """Return the sequences and their times (ns)."""
    found = [*reader.batches(columns=["sequence", "timestamp_ns"])]
    sequences, times = (pa.chunked_array([batch.column(n) for batch in found], pa.int64()) for n in (0, 1))
    return sequences.combine_chunks(), times.combine_chunks()


class _Walk:
    """Progress of one walk."""

    def __init__(self, archive: Archive) -> None:
        self.archive, self.end, self.covered = archive, archive.end, CoverageSet()
        self._pages = archive.pages()
        self._lock = threading.Lock()  # a call that is no longer awaited may still be running

    def read_page(self) -> bool:
        """Read the next page; return False if there is none. Blocking."""
        with self._lock:
            page = next(self._pages, None)
            for ref in page or ():
                self.covered.add(ref.coverage)
            return page is not None

    def holes(self) -> list[SequenceRange]:
        first = self.archive.first
        return self.covered.holes(SequenceRange(first, self.end)) if self.end >= first else []


class ArchiveWalks:
    """Walks of one partition. `walk_ended`: set when a walk has ended, for the reader; `holes`: the holes that it
    found, ascending, each checked twice.
    """

    def __init__(self, threads: ThreadPool, clock: Clock, intervals: Intervals) -> None:
        self._threads, self._clock, self._intervals = threads, clock, intervals
        self._archive: Archive | None = None
        self._progress: _Walk | None = None
        self._changed = asyncio.Event()
        self._due = 0.0  # by the monotonic clock
        self._checked_key = self._missing_key = ""  # of newest segments: the last checked, the last one that was gone
        self.walk_ended = asyncio.Event()
        self.holes: tuple[SequenceRange, ...] = ()

    def follow(self, archive: Archive) -> None:
        if self._archive is None or self._archive.chain != archive.chain:
            self.holes, self._progress, self._due = (), None, 0.0
            self._changed.set()
        self._archive = archive
        self.add_holes(archive)

    def add_holes(self, archive: Archive) -> None:
        known = CoverageSet()
        for hole in (*archive.holes, *self.holes):
            known.add(hole)
        archive.holes = tuple(known.stretches())

    async def run(self) -> None:
        """Walk until cancelled; a later call continues the walk. A failed listing is retried later."""
        while True:
            self._changed.clear()
            left = self._due - self._clock.monotonic()
            if self._archive is None or left > 0:
                pause = min(max(left, self._intervals.check), self._intervals.newest)
                await first_of(self._changed.wait(), seconds=pause)
                await self._check_newest()
                continue
            chain = self._archive.chain
            try:
                await self._walk(self._archive)
                pause = self._intervals.walk
            except FloeError as error:
                log.info("walk deferred", action="walk_deferred", error=str(error))
                pause = self._intervals.walk_retry
            except Exception:
                self._progress = None  # the error has ended its listing
                raise
            if self._archive.chain == chain:
                self._progress = None
                self._due = self._clock.monotonic() + pause

    async def _check_newest(self) -> None:
        """Make the next walk due now if the newest segment is gone, as in a bucket that was set back to an older copy.

        A put checks for the segment before it; if nothing was put since the last check, this one checks for the newest.
        """
        if (archive := self._archive) is None or not archive.newest:
            return
        newest = archive.newest[0].key
        try:
            if newest == self._checked_key and not archive.missing_key:
                await archive.check_newest()
        except FloeError as error:
            log.info("newest segment check deferred", action="newest_check_deferred", error=str(error))
            return
        self._checked_key = newest
        if archive.missing_key not in ("", self._missing_key):
            context = {"key": archive.missing_key, **archive.chain.log_context()}
            log.warning("newest segment lost", action="segment_missing", **context)
            self._missing_key, self._progress, self._due = archive.missing_key, None, 0.0

    async def _walk(self, archive: Archive) -> None:
        progress = self._progress = self._progress or _Walk(archive)
        while await self._threads.run(progress.read_page):
            await self._clock.sleep(self._intervals.page)
        await archive.raise_first_to_floor()
        found: list[SequenceRange] = []
        for hole in progress.holes():
            # Check again, because the pages of a listing are from different moments.
            found += await archive.uncovered(hole)
        if self._archive is not None and self._archive.chain == archive.chain:
            self.holes = tuple(found)
            self.walk_ended.set()
