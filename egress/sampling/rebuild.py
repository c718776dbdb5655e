"""The rebuild of a sampler from the archive: which values were copied lately, and when.

The rows of the last `inspect_duration` show when each value was copied last; choices depend on that. They do not
show when a value was seen and left out. So every value counts as just seen, and no doubtful silence is reported.
"""

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from common.archive.columns import columns_of
from common.archive.documents import ChainStore
from common.archive.scan import ChainArchive, Problem, Scan
from common.archive.segment import Footer, SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import around_damage, log_left_out, reading
from common.chain import Chain
from common.logs import get_logger
from common.sequences import SequenceRange, Stretch, cover
from common.subjects import matches
from egress.sampling.keys import KeyReader, SamplingSettings
from egress.sampling.sampler import Sampler
from egress.sampling.snapshot import Snapshot

log = get_logger(__name__)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LookbackRange:
    """The rows to read. `first`: the first sequence, None if no row counts. `is_complete`: True if older rows are known
    not to count; if False, rows of the incarnation before may count too.
    """

    first: int | None
    is_complete: bool


class ArchivedRows:
    """The rows of a listed `archive` up to `last`, by its cover, that match `filter_subject`. Blocking."""

    def __init__(self, archive: ChainArchive, last: int, filter_subject: str = "") -> None:
        self.archive, self.last, self.filter_subject = archive, last, filter_subject
        self._store, self._usable = archive.store, archive.refs
        self._footers: dict[str, Footer] = {}

    def newest_ns(self) -> int:
        """Return the time of the last message examined; 0 if there is none."""

        def newest(stretches: list[Stretch[SegmentRef]]) -> int:
            times = (_newest_time(self._footer(stretch.segment)) for stretch in reversed(stretches))
            return next((time for time in times if time is not None), 0)

        return self._skip_damaged(newest)

    def lookback(self, horizon_ns: int) -> LookbackRange:
        """Return the range of rows not older than `horizon_ns`. It is found by footers; few segments are opened."""
        return self._skip_damaged(lambda stretches: self._lookback(stretches, horizon_ns))

    def _skip_damaged(self, read: Callable[[list[Stretch[SegmentRef]]], T]) -> T:
        usable, last = self._usable, self.last
        return around_damage(usable, lambda: read(cover(usable, 1, last) if last >= 1 else []), log_left_out)

    def _lookback(self, stretches: list[Stretch[SegmentRef]], horizon_ns: int) -> LookbackRange:
        first = None
        for stretch in reversed(stretches):
            footer = self._footer(stretch.segment)
            # Other segments may hold the rows that this one did not read; its footer does not show their age.
            unread = footer.unread and footer.unread.intersection(stretch.rows)
            if (newest := _newest_time(footer)) is not None and newest < horizon_ns:
                return LookbackRange(first, True)
            first = unread.first if unread else first
            if newest is None or footer.first_timestamp_ns is None:
                continue  # nothing was examined for it, or nothing was kept
            within = LookbackRange(stretch.rows.first, False)
            if footer.first_timestamp_ns < horizon_ns:
                within = self._lookback_within(stretch, horizon_ns)
            first = min([r for r in (within.first, unread and unread.first) if r], default=first)
            if within.is_complete:
                return LookbackRange(first, True)
        return LookbackRange(first, False)

    def _footer(self, ref: SegmentRef) -> Footer:
        if ref.key not in self._footers:
            with reading(ref):
                self._footers[ref.key] = self._store.footer(ref)
        return self._footers[ref.key]

    def _lookback_within(self, stretch: Stretch[SegmentRef], horizon_ns: int) -> LookbackRange:
        """Return the same as `lookback`, inside one stretch: its rows may all be older even if its segment has newer.

        Row groups are read from the last to the first, and only their sequences and times.
        """
        first = None
        with reading(stretch.segment), self._store.open(stretch.segment) as reader:
            for group in reversed(reader.row_groups):
                if (rows := stretch.rows.intersection(group.range)) is None:
                    continue
                found, is_all = _first_not_older(reader.batches(rows, ["sequence", "timestamp_ns"]), horizon_ns)
                first = first if found is None else found
                if not is_all:
                    return LookbackRange(first, True)
        return LookbackRange(first, False)


def previous_chains(store: SegmentStore, chain: Chain) -> dict[Chain, int]:
    """Return the last sequences of the chains of the incarnation before, if it archived the same stream; else empty.

    The stream is the same after `floe egress repartition`. A stream that was created again is another one.
    """
    if chain.incarnation == 0:
        return {}
    former = chain.with_incarnation(chain.incarnation - 1)
    chains = ChainStore(store.objects, store.layout)
    now, then = chains.read_stream(chain), chains.read_stream(former)
    if now is None or then is None or not (now.continues or now.created == then.created):
        return {}
    return {former.with_partition(n): end for n, end in sorted((now.previous or {}).items())}


def _newest_time(footer: Footer) -> int | None:
    """Return the time of the last message examined or of the last row, the later one; None if there is neither."""
    tip = footer.tip.timestamp_ns if footer.tip else None
    return max((time for time in (tip, footer.last_timestamp_ns) if time is not None), default=None)


def _first_not_older(batches: Iterable[pa.RecordBatch], horizon_ns: int) -> tuple[int | None, bool]:
    """Return the first sequence not older than `horizon_ns`, None if there is none; and True if no row precedes it."""
    is_all = True
    for batch in batches:
        young = pc.greater_equal(batch.column("timestamp_ns"), pa.scalar(horizon_ns, pa.int64()))
        if (index := pc.index(young, pa.scalar(True)).as_py()) >= 0:
            return batch.column("sequence")[index].as_py(), is_all and index == 0
        is_all = False
    return None, is_all


PROGRESS_ROWS = 1_000_000  # rows between two progress lines in the log
_CHUNK_ROWS = 8192

Row = tuple[int, str, int, int]  # sequence, value, nanoseconds since 1970, bytes of payload


class RebuildCancelledError(Exception):
    """The rebuild was cancelled: its result is no longer needed."""


@dataclass(frozen=True, slots=True)
class RebuildResult:
    """A rebuilt sampler. `newest_ns`: the newest message time of the archive, 0 if none. `rows`: how many were read."""

    sampler: Sampler
    newest_ns: int
    rows: int


@dataclass(eq=False)
class SamplerRebuild:
    """The rebuild of the sampler of one chain. Blocks for a long time; used once.

    `archive`: the listed segments of the chain. `last`: the last sequence that counts. `filter_subject`: selects the
    rows that the chain takes from the incarnations before, of the same stream with other partitions; empty: all.
    `cancelled` ends it with RebuildCancelledError.
    """

    archive: ChainArchive
    sampling: SamplingSettings
    last: int
    filter_subject: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._current = ArchivedRows(self.archive, self.last)
        self._keys, self._rows = KeyReader(self.sampling), 0

    def run(self, base: Snapshot | None = None, *, makes_advisories: bool = True) -> RebuildResult:
        """Build the sampler, which is not settled yet. `base`: a snapshot of the same settings to build upon."""
        sampler = Sampler(self.sampling, base.state if base else None, makes_advisories=makes_advisories)
        newest_ns, groups = self._plan(base)
        for group in groups:
            rows = heapq.merge(*(self.iter_rows(past, within) for past, within in group))
            while chunk := list(islice(rows, _CHUNK_ROWS)):
                _sequences, keys, timestamps_ns, sizes = zip(*chunk, strict=True)
                sampler.learn(keys, timestamps_ns, sizes)
        return RebuildResult(sampler, newest_ns, self._rows)

    def _plan(self, base: Snapshot | None) -> tuple[int, list[list[tuple[ArchivedRows, SequenceRange]]]]:
        newest_ns, position = (base.newest_ns, base.position) if base else (0, 1)
        groups, group = [], [self._current]
        while group:
            newest_ns = max(newest_ns, *(past.newest_ns() for past in group))
            reaches = [(past, past.lookback(newest_ns - self.sampling.duration_ns)) for past in group]
            groups.append(
                [
                    (past, SequenceRange(first, past.last))
                    for past, reach in reaches
                    if reach.first and (first := max(reach.first, position)) <= past.last
                ]
            )
            if base or all(reach.is_complete for _, reach in reaches):
                break
            # Only up to `last`: the chain still reads the rows after it, and they would count twice.
            store = self.archive.store
            group = [
                ArchivedRows(ChainArchive.listed(store, former), min(end, self.last), self.filter_subject)
                for former, end in previous_chains(store, group[0].archive.chain).items()
            ]
        return newest_ns, groups[::-1]

    def iter_rows(self, past: ArchivedRows, within: SequenceRange) -> Iterator[Row]:
        for batch in Scan(past.archive, within, _log_missing).batches():
            if self.cancelled.is_set():
                raise RebuildCancelledError
            lists = columns_of(batch)
            keys, _forced = self._keys.read(lists)
            self.record_progress(len(keys), lists.sequences[-1], past.archive.chain)
            rows = zip(lists.sequences, keys, lists.timestamps_ns, lists.payloads, lists.subjects, strict=True)
            for sequence, key, timestamp_ns, payload, subject in rows:
                if key is not None and matches(past.filter_subject, subject):
                    yield sequence, key, timestamp_ns, len(payload)

    def record_progress(self, rows: int, sequence: int, chain: Chain) -> None:
        before, self._rows = self._rows, self._rows + rows
        if before // PROGRESS_ROWS != self._rows // PROGRESS_ROWS:
            fields = {"rows": self._rows, "sequence": sequence, "end": self.last}
            log.info("sampler rebuild progressed", action="sampler_rebuild_progressed", **fields, **chain.log_context())


def _log_missing(problem: Problem) -> None:
    log.info("rows missing", action="rows_missing", error=str(problem))
