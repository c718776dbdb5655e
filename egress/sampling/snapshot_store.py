"""A chain's snapshots in the store: reading and writing them, the choice of one to resume from, and the next save.

A name contains a hash of the content, so nothing is ever overwritten with other bytes, and writes of a late or a
second instance do no harm. Any process that can write to the bucket can write here: a read is bounded and compared
with the name, and a snapshot is used only if its content agrees with its key.
"""

import asyncio
import builtins
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from common.archive.documents import SnapshotRef, list_snapshots, newest_first
from common.archive.keys import DIGEST_LENGTH, StateName
from common.archive.store import SegmentStore
from common.archive.writer import spool_errors
from common.chain import Chain
from common.clock import Clock, SystemClock
from common.errors import DataError, FloeError
from common.failpoints import failpoint
from common.logs import get_logger
from common.objects.port import body_size, sha256_of
from common.service.process import ThreadPool
from egress.report import SamplingReport
from egress.sampling.snapshot import Snapshot, decode, encode

log = get_logger(__name__)


# A larger object is not read. 1,000,000 values of the greatest length allowed stay below this.
MAX_SNAPSHOT_BYTES = 1 << 30
# The key of the settings' digest in the object metadata, read without opening the object: a hint, the content counts.
_SAMPLING = "sampling"
READ_RETRY_PAUSES_S = (0.1, 0.5)  # seconds before a snapshot that arrived damaged is read again


class SnapshotStore:
    """The snapshots of `chain` in `store`. Blocking; safe to use from several threads.

    Every method raises the errors of the object store.
    """

    def __init__(self, store: SegmentStore, chain: Chain, *, clock: Clock | None = None) -> None:
        self.chain, self._store, self._objects = chain, store, store.objects
        self._clock = clock or SystemClock()

    def list(self) -> builtins.list[SnapshotRef]:
        """List the snapshots, newest first: the greatest position, and at one position the one stored last."""
        return list_snapshots(self._objects, self._store.layout, self.chain)

    def stored_digest(self, ref: SnapshotRef) -> str:
        """Return the sampling digest in the object's metadata; empty if it has none or the object does not exist.

        A hint that saves reading a snapshot of other settings.
        """
        info = self._objects.head(ref.key)
        return "" if info is None else info.metadata.get(_SAMPLING, "")

    def read(self, ref: SnapshotRef) -> Snapshot:
        """Read a snapshot. Raises DataError (E-SNAPSHOT) if it is gone, too large, or does not match its name."""
        raw = self._fetch(ref)
        try:
            snapshot = decode(raw)
        except (ValueError, MemoryError) as error:
            raise _corrupt_snapshot(ref, str(error)) from error
        if (snapshot.chain, snapshot.position) != (ref.chain, ref.position):
            found = f"{snapshot.chain} at {snapshot.position}"
            raise _corrupt_snapshot(ref, f"expected {ref.chain} at {ref.position} as in the key, found {found}")
        return snapshot

    def _fetch(self, ref: SnapshotRef) -> bytes:
        if ref.size > MAX_SNAPSHOT_BYTES:
            raise _corrupt_snapshot(ref, f"expected at most {MAX_SNAPSHOT_BYTES} bytes, found {ref.size}")
        found = ""
        for pause in (0.0, *READ_RETRY_PAUSES_S):
            if found:
                # The transfer may have damaged it; the stored object may be intact.
                log.warning("snapshot read retried", action="snapshot_read_retried", **ref.log_context())
                self._clock.block(pause)
            if (raw := self._objects.get(ref.key, length=ref.size + 1)) is None:
                raise _corrupt_snapshot(ref, "no longer in the store")
            digest = sha256_of(raw)
            if len(raw) == ref.size and digest.startswith(ref.state.digest):
                return raw
            found = f"{len(raw)} with {digest[:DIGEST_LENGTH]}…"
        expected = f"{ref.size} bytes with SHA-256 {ref.state.digest}…"
        raise _corrupt_snapshot(ref, f"expected {expected}, found {found}")

    def write(self, position: int, body: Path | bytes, *, sampling_digest: str = "") -> SnapshotRef:
        """Put an encoded snapshot and read it back; after the return the store holds exactly these bytes.

        `sampling_digest`: as in the snapshot; readers find it in the metadata without reading the object. Any instance
        may write the same bytes again. Raises Unavailable, code E-READ-BACK, if reading it back never succeeds.
        """
        sha256 = sha256_of(body)
        name = StateName(self.chain, position, sha256[:DIGEST_LENGTH])
        ref = SnapshotRef(name, self._store.layout.state(name), body_size(body), 0.0)
        metadata = {"format": "1", _SAMPLING: sampling_digest, "sha256": sha256}
        info = self._store.put_verified(ref, body, metadata, point="egress.snapshot_")
        return replace(ref, modified=info.modified)

    def save(self, snapshot: Snapshot) -> SnapshotRef:
        """Encode `snapshot` into a new spool file, step by step, and `write` it.

        Raises Unavailable, code E-SPOOL, if the disk of the spool fails.
        """
        spool = self._store.new_spool()
        try:
            with spool_errors(spool.parent), spool.open("wb") as file:
                file.writelines(encode(snapshot))
            return self.write(snapshot.position, spool, sampling_digest=snapshot.sampling_digest)
        finally:
            spool.unlink(missing_ok=True)


def _corrupt_snapshot(ref: SnapshotRef, cause: str) -> DataError:
    return DataError(
        f"snapshot {ref.key}: {cause}",
        hint="nothing to do: an older one is used, or the state is built again from the segments",
        code="E-SNAPSHOT",
    )


def followable(refs: Iterable[SnapshotRef], position: int, source_first: int) -> list[SnapshotRef]:
    """Return the snapshots from which reading can resume at `position` as if it had never stopped; newest first.

    `source_first`: the first sequence that the source holds.
    """
    return [ref for ref in at_or_before(refs, position) if ref.position >= source_first]


def at_or_before(refs: Iterable[SnapshotRef], position: int) -> list[SnapshotRef]:
    """Return the snapshots that hold the state at `position` or earlier, not after it; newest first."""
    return sorted((ref for ref in refs if ref.position <= position), key=newest_first)


def may_match_digest(stored_digest: str, digest: str) -> bool:
    return stored_digest in ("", digest)


def rebuild_reason(is_known: bool, is_followed: bool, written_by: str, digest: str) -> str:
    """Return the reason why no snapshot could be resumed from: `settings`, `damaged` or `source`.

    `is_known`: True if any snapshot is known to be of the settings `digest`. `is_followed`: True if the source still
    follows one of those. `written_by`: the digest of the settings of the newest segment.
    """
    if is_known:
        return "damaged" if is_followed else "source"
    return "damaged" if written_by == digest else "settings"


MAX_CHECKED_SNAPSHOTS = 200  # snapshots that are checked before the archive is used instead


class SnapshotSelector:
    """The snapshots that may be used with the settings of `digest`. Blocking; raises the errors of the store.

    A damaged snapshot is logged once and left out.
    """

    def __init__(self, snapshots: SnapshotStore, digest: str) -> None:
        self._snapshots, self._digest = snapshots, digest
        self._stored_digests: dict[str, str] = {}
        self._damaged: set[str] = set()

    def select_newest(self, refs: Sequence[SnapshotRef]) -> tuple[SnapshotRef, Snapshot] | None:
        """Return the newest of `refs`, which are newest first, that is of the settings and readable; None if none is.
        Of several at one position, it is the one with the newest message: a store's clock has a resolution of seconds.
        """
        found: tuple[SnapshotRef, Snapshot] | None = None
        for ref in refs[:MAX_CHECKED_SNAPSHOTS]:
            if found is not None and ref.position < found[0].position:
                break
            snapshot = self._read_or_skip(ref) if may_match_digest(self._stored_digest(ref), self._digest) else None
            if snapshot is None or snapshot.sampling_digest != self._digest:
                continue
            if found is None or snapshot.newest_ns > found[1].newest_ns:
                found = ref, snapshot
        return found

    def select_any(self, refs: Sequence[SnapshotRef]) -> Snapshot | None:
        return next(filter(None, map(self._read_or_skip, refs[:MAX_CHECKED_SNAPSHOTS])), None)

    def matching(self, refs: Sequence[SnapshotRef]) -> list[SnapshotRef]:
        return [ref for ref in refs if self._stored_digests.get(ref.key) == self._digest]

    def _stored_digest(self, ref: SnapshotRef) -> str:
        if ref.key not in self._stored_digests:
            self._stored_digests[ref.key] = self._snapshots.stored_digest(ref)
        return self._stored_digests[ref.key]

    def _read_or_skip(self, ref: SnapshotRef) -> Snapshot | None:
        if ref.key in self._damaged:
            return None
        try:
            snapshot = self._snapshots.read(ref)
        except DataError as error:
            self._damaged.add(ref.key)
            fields = {"code": error.code, "error": str(error), **ref.log_context()}
            log.warning("snapshot left out", action="snapshot_left_out", **fields)
            return None
        self._stored_digests[ref.key] = snapshot.sampling_digest
        return snapshot


class SnapshotWriter:
    """The schedule and the writer of snapshots; holds one at most. `interval`: seconds from one to the next."""

    def __init__(
        self, snapshots: SnapshotStore, threads: ThreadPool, clock: Clock, interval: float, report: SamplingReport
    ) -> None:
        self._snapshots, self._threads = snapshots, threads
        self._clock, self._interval, self._report = clock, interval, report
        self._frozen: Snapshot | None = None
        self._last = 0  # last sequence that `mark_put` reported as put
        self._frozen_at, self._segments, self._is_requested = clock.monotonic(), 0, False
        self._reached, self._free = asyncio.Event(), asyncio.Event()
        self._free.set()

    def is_due(self, segments: int) -> bool:
        """True if the state is to be frozen now, after `segments` segments have been closed.

        That needs a closed segment since the last time: then the position is mostly the end of a segment, and little
        has to be read again.
        """
        is_time = self._is_requested or self._clock.monotonic() - self._frozen_at >= self._interval
        return self._frozen is None and is_time and segments > self._segments

    def request(self) -> None:
        """Make the next one due as soon as a segment has been closed, even before `interval` has passed."""
        self._is_requested = True

    def schedule(self, snapshot: Snapshot, segments: int) -> None:
        """Keep `snapshot` until `mark_put` reports that it may be stored. Call it only while none is held."""
        self._is_requested = False
        self._frozen, self._frozen_at, self._segments = snapshot, self._clock.monotonic(), segments
        self._free.clear()
        self.mark_put(self._last)  # a quiet feed puts nothing else, so `mark_put` may not be called again

    def mark_put(self, last: int) -> None:
        self._last = max(self._last, last)
        if self._frozen is not None and self._frozen.position - 1 <= last:
            self._reached.set()

    async def wait_until_written(self) -> None:
        """Wait until none is held: the last one is stored, or has failed."""
        await self._free.wait()

    async def run(self) -> None:
        while True:
            await self._reached.wait()
            self._reached.clear()
            if self._frozen is not None:
                await self._save(self._frozen)
            self._frozen = None
            self._free.set()

    async def _save(self, snapshot: Snapshot) -> None:
        started = self._clock.monotonic()
        try:
            ref = await self._threads.run(self._write, snapshot)
        except (FloeError, OSError) as error:
            self._report.record_failure(snapshot.position, error)
        else:
            self._report.record_snapshot(ref, self._clock.monotonic() - started)

    def _write(self, snapshot: Snapshot) -> SnapshotRef:
        failpoint("egress.before_snapshot")
        ref = self._snapshots.save(snapshot)
        failpoint("egress.after_snapshot")
        return ref
