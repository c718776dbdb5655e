"""The start of a sampler: from a snapshot that the source can still follow, else from the archive's rows.

    a readable snapshot of the same settings that the stream still follows   the newest is taken
    nothing is covered yet                                                   genesis: an empty state
    nothing is, but another incarnation of the same stream exists            rebuilt from its rows
    anything else                                                            rebuilt from the chain's rows

A stream with `limits` retention follows a snapshot if it still holds the messages from its position on. Any other
stream, and one that has lost single messages, follows only a snapshot at the position of the chain. A state that does
not come from a snapshot is stored as one before anything is read, so that after a crash the next start has exactly the
same state.

A rebuild reads which values were copied lately, and when: the rows of the last `inspect_duration` show it, and choices
depend on that. They do not show when a value was seen and left out. So every value counts as just seen, and no doubtful
silence is reported.
"""

import asyncio
import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from common.archive.columns import columns_of
from common.archive.documents import ChainStore, SnapshotRef
from common.archive.scan import ChainArchive, Problem, Scan
from common.archive.segment import Footer, SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import around_damage, log_left_out, reading
from common.chain import Chain
from common.errors import DataError
from common.logs import get_logger
from common.nats.api import LIMITS
from common.sequences import SequenceRange, Stretch, cover, preference
from common.service.process import ThreadPool
from common.subjects import matches
from egress import metrics
from egress.advisories.advisory import Advisory
from egress.archive import Archive
from egress.identity import SourceStream
from egress.partition import Partition, Position
from egress.sampling.keys import KeyReader, SamplingSettings
from egress.sampling.sampler import Sampler
from egress.sampling.snapshot import Snapshot, SnapshotSelector, SnapshotStore, at_or_before, followable, rebuild_reason

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


_REBUILD_REASONS = {
    "settings": "no snapshot matches the present sampling settings and partitions",
    "damaged": "no snapshot that the stream reaches back to can be read",
    "source": "the stream no longer holds all messages after the last snapshot",
}


@dataclass(frozen=True, slots=True)
class ResumedSampler:
    """A sampler, and the first sequence to read for it.

    `sampler`: everything below `read_from` is folded in. `read_from`: at most the position; messages between the two
    are only folded in, not written. `newest_ns`: the newest message time seen, 0 if none was. `outbox`: advisories
    that may not be stored yet. `is_rebuilt`: the state was built from the archive, not by the fold. `snapshot_key`: of
    the snapshot that it was taken from; empty if there was none.
    """

    sampler: Sampler
    newest_ns: int
    read_from: int
    outbox: tuple[Advisory, ...] = ()
    is_rebuilt: bool = False
    snapshot_key: str = ""


class SamplerResume:
    """The search for the sampler that continues at `position`, after the coverage of `archive`; used once.

    Raises ValueError for a feed that is not sampled.
    """

    def __init__(
        self,
        partition: Partition,
        archive: Archive,
        position: Position,
        source: SourceStream,
        snapshots: SnapshotStore,
        store: SegmentStore,
    ) -> None:
        if (sampling := SamplingSettings.from_feed(partition.settings)) is None:
            raise ValueError(f"feed {partition.settings.name}: expected one that is sampled")
        self._partition, self._chain, self._archive = partition, archive.chain, archive
        self._first, self._source = position.first, source
        self._snapshots, self._store, self._cancelled = snapshots, store, threading.Event()
        self._sampling, self._makes_advisories = sampling, bool(partition.settings.advisory.subject)
        self._selector = SnapshotSelector(snapshots, sampling.digest)

    async def run(self, threads: ThreadPool) -> ResumedSampler:
        """Return the sampler; blocking work runs in one thread. Raises the errors of the store.

        A chain without coverage gets its genesis here: a snapshot at its position, before its first segment.
        """
        try:
            return await threads.run(self._run)
        except asyncio.CancelledError:
            self._cancelled.set()
            raise

    def _run(self) -> ResumedSampler:
        listed = at_or_before(self._snapshots.list(), self._first)
        found = self._selector.select_newest(followable(listed, self._first, self._first_followable()))
        if found is not None:
            ref, snapshot = found
            reread = self._first - ref.position
            log.info("sampler resumed", action="sampler_resumed", reread=reread, **ref.log_context())
            sampler = Sampler(self._sampling, snapshot.state, makes_advisories=self._makes_advisories)
            return ResumedSampler(sampler, snapshot.newest_ns, ref.position, snapshot.outbox, snapshot_key=ref.key)
        if self._first > self._archive.first or previous_chains(self._store, self._chain):
            return self._rebuild(listed)
        sampler = Sampler(self._sampling, makes_advisories=self._makes_advisories)
        self._store_state(sampler, 0, ())
        log.info("sampler created", action="sampler_created", **self._chain.log_context())
        return ResumedSampler(sampler, 0, self._first)

    def _first_followable(self) -> int:
        """Return the first sequence from which the stream is known to hold every message that it had."""
        is_whole = self._source.retention == LIMITS and not self._source.deleted
        return self._source.first if is_whole else self._first

    def _store_state(self, sampler: Sampler, newest_ns: int, outbox: tuple[Advisory, ...]) -> None:
        digest = self._sampling.digest
        self._snapshots.save(Snapshot(self._chain, self._first, digest, newest_ns, sampler.freeze(), outbox))

    def _rebuild(self, listed: Sequence[SnapshotRef]) -> ResumedSampler:
        base = self._selector.select_newest(listed)
        last = base[1] if base else self._selector.select_any(listed)
        outbox = last.outbox if last else ()
        known = self._selector.matching(listed)
        followed = followable(known, self._first, self._first_followable())
        reason = rebuild_reason(bool(known), bool(followed), self._newest_digest(), self._sampling.digest)
        chain = self._chain
        log.info("sampler rebuild started", action="sampler_rebuild_started", reason=reason, **chain.log_context())
        refs = self._archive.refs(base[1].position if base else 1)
        rebuilt = SamplerRebuild(
            ChainArchive(self._store, chain, refs),
            self._sampling,
            self._first - 1,
            filter_subject=self._partition.filter_subject,
            cancelled=self._cancelled,
        ).run(base[1] if base else None, makes_advisories=self._makes_advisories)
        settled_ns = rebuilt.newest_ns
        if self._source.first > self._first:
            # The time of deleted messages must not count as silence: silence starts with the next message read.
            settled_ns = max(settled_ns, self._source.first_timestamp_ns or 0)
        rebuilt.sampler.mark_all_seen(settled_ns)
        self._store_state(rebuilt.sampler, rebuilt.newest_ns, outbox)
        metrics.sampler_rebuilt.labels(chain.site, chain.feed, chain.partition, reason).inc()
        log.warning(
            "sampler rebuilt",
            action="sampler_rebuilt",
            code="E-SAMPLER-REBUILT",
            hint=f"{_REBUILD_REASONS[reason]}; values may be copied once more than configured, "
            "and silence counts from now on",
            reason=reason,
            rows=rebuilt.rows,
            values=rebuilt.sampler.value_count,
            **chain.log_context(),
        )
        return ResumedSampler(rebuilt.sampler, rebuilt.newest_ns, self._first, outbox, is_rebuilt=True)

    def _newest_digest(self) -> str:
        newest = max(self._archive.newest, key=preference, default=None)
        try:
            return "" if newest is None else self._store.footer(newest).sampling_digest
        except DataError:
            return ""
