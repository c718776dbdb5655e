"""The start of a sampler: from a snapshot that the source can still follow, else from the archive's rows.

    a readable snapshot of the same settings that the stream still follows   the newest is taken
    nothing is covered yet                                                   genesis: an empty state
    nothing is, but another incarnation of the same stream exists            built from its rows
    anything else                                                            built from the chain's rows

A stream with `limits` retention follows a snapshot if it still holds the messages from its position on; any other
stream follows only a snapshot at the position of the chain. A state that does not come from a snapshot is stored as
one before anything is read, so that after a crash the next start has exactly the same state.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from common.archive.documents import SnapshotRef
from common.archive.scan import ChainArchive
from common.archive.store import SegmentStore
from common.errors import DataError
from common.logs import get_logger
from common.sequences import preference
from common.service.process import ThreadPool
from egress import metrics
from egress.advisories.advisory import Advisory
from egress.archive import Archive
from egress.identity import SourceStream
from egress.partition import Partition, Position
from egress.sampling.keys import SamplingSettings
from egress.sampling.rebuild import SamplerRebuild, previous_chains
from egress.sampling.sampler import Sampler
from egress.sampling.snapshot import Snapshot, SnapshotSelector, SnapshotStore, at_or_before, followable, rebuild_reason

log = get_logger(__name__)

_REBUILD_REASONS = {
    "settings": "no snapshot matches the present sampling settings and partitions",
    "damaged": "no snapshot that the stream reaches back to can be read",
    "source": "the stream no longer holds the messages after the last snapshot",
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
        return self._source.first if self._source.retention == "limits" else self._first

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
