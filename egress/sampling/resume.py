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

from common.errors import DataError
from common.logs import get_logger
from common.segments.store import SegmentStore
from common.sequences import preference
from common.service.process import Threads
from egress import metrics
from egress.advisories.advisory import Advisory
from egress.archive import Archive
from egress.identity import SourceStream
from egress.partition import Partition, Position
from egress.sampling.rebuild import Rebuilding, continued
from egress.sampling.sampler import Sampler
from egress.sampling.settings import Sampling
from egress.sampling.snapshot import Snapshot
from egress.sampling.snapshot_store import Candidates, SnapshotRef, Snapshots, reason, to_build_upon, to_follow

log = get_logger(__name__)

_WHY = {
    "settings": "no snapshot is of the sampling settings and partitions as they are now",
    "damaged": "no snapshot that the stream still follows can be read",
    "source": "the stream no longer holds what came behind the last snapshot",
}


@dataclass(frozen=True, slots=True)
class Resumed:
    """A sampler, and the first sequence to read for it.

    `sampler`: everything below `read_from` is folded in. `read_from`: at most the position; messages between the two
    are only folded in, not written. `newest_ns`: the newest message time seen, 0 if none was. `outbox`: advisories
    that may not be stored yet. `rebuilt`: the state was built from the archive, not by the fold. `taken`: the key of
    the snapshot that it was taken from; empty if there was none.
    """

    sampler: Sampler
    newest_ns: int
    read_from: int
    outbox: tuple[Advisory, ...] = ()
    rebuilt: bool = False
    taken: str = ""


class Resuming:
    """The search for the sampler that continues at `position`, after the coverage of `archive`; used once.

    Raises ValueError for a feed that is not sampled.
    """

    def __init__(
        self,
        partition: Partition,
        archive: Archive,
        position: Position,
        source: SourceStream,
        snapshots: Snapshots,
        store: SegmentStore,
    ) -> None:
        if (sampling := Sampling.of(partition.settings)) is None:
            raise ValueError(f"feed {partition.settings.name}: expected one that is sampled")
        self._partition, self._chain, self._archive = partition, archive.chain, archive
        self._first, self._source = position.first, source
        self._snapshots, self._store, self._abandoned = snapshots, store, threading.Event()
        self._sampling, self._tracks = sampling, bool(partition.settings.advisory.subject)
        self._candidates = Candidates(snapshots, sampling.digest)

    async def run(self, threads: Threads) -> Resumed:
        """Return the sampler; blocking work runs in one thread. Raises the errors of the store.

        A chain without coverage gets its genesis here: a snapshot at its position, before its first segment.
        """
        try:
            return await threads.run(self._run)
        except asyncio.CancelledError:
            self._abandoned.set()
            raise

    def _run(self) -> Resumed:
        listed = to_build_upon(self._snapshots.list(), self._first)
        taken = self._candidates.newest(to_follow(listed, self._first, self._held_from()))
        if taken is not None:
            ref, snapshot = taken
            again = self._first - ref.position
            log.info("sampler resumed", action="sampler_resumed", again=again, **ref.log_context())
            sampler = Sampler(self._sampling, snapshot.state, tracks=self._tracks)
            return Resumed(sampler, snapshot.newest_ns, ref.position, snapshot.outbox, taken=ref.key)
        if self._first > self._archive.first or continued(self._store, self._chain):
            return self._rebuild(listed)
        sampler = Sampler(self._sampling, tracks=self._tracks)
        self._store_state(sampler, 0, ())
        log.info("sampler begins", action="sampler_begins", **self._chain.log_context())
        return Resumed(sampler, 0, self._first)

    def _held_from(self) -> int:
        return self._source.first if self._source.retention == "limits" else self._first

    def _store_state(self, sampler: Sampler, newest_ns: int, outbox: tuple[Advisory, ...]) -> None:
        digest = self._sampling.digest
        self._snapshots.save(Snapshot(self._chain, self._first, digest, newest_ns, sampler.freeze(), outbox))

    def _rebuild(self, listed: Sequence[SnapshotRef]) -> Resumed:
        base = self._candidates.newest(listed)
        last = base[1] if base else self._candidates.newest_of_any(listed)
        outbox = last.outbox if last else ()
        known = self._candidates.known(listed)
        followed = to_follow(known, self._first, self._held_from())
        why = reason(bool(known), bool(followed), self._written_by(), self._sampling.digest)
        log.info("building the sampler again", action="rebuild_started", reason=why, **self._chain.log_context())
        rebuilt = Rebuilding(
            self._store,
            self._sampling,
            self._chain,
            self._archive.refs(base[1].position if base else 1),
            self._first - 1,
            filter_subject=self._partition.filter_subject,
            abandoned=self._abandoned,
        ).run(base[1] if base else None, tracks=self._tracks)
        settled_ns = rebuilt.newest_ns
        if self._source.first > self._first:
            # The time of deleted messages must not count as silence: silence starts with the next message read.
            settled_ns = max(settled_ns, self._source.first_timestamp_ns or 0)
        rebuilt.sampler.settle(settled_ns)
        self._store_state(rebuilt.sampler, rebuilt.newest_ns, outbox)
        chain = self._chain
        metrics.sampler_rebuilt.labels(chain.site, chain.feed, chain.partition, why).inc()
        log.warning(
            f"sampler built again: {_WHY[why]}; values may be copied once more than the settings say, "
            "and silence counts from now on",
            action="sampler_rebuilt",
            code="E-SAMPLER-REBUILT",
            reason=why,
            rows=rebuilt.rows,
            values=rebuilt.sampler.values,
            **chain.log_context(),
        )
        return Resumed(rebuilt.sampler, rebuilt.newest_ns, self._first, outbox, rebuilt=True)

    def _written_by(self) -> str:
        newest = max(self._archive.newest, key=preference, default=None)
        try:
            return "" if newest is None else self._store.footer(newest).sampling_digest
        except DataError:
            return ""
