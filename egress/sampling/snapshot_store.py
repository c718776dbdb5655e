"""A chain's snapshots in the object store: listed, read, put and read back.

A name carries its content, so nothing is ever overwritten with other bytes, and what a late or a second
instance writes harms nobody. Whoever can write to the bucket can write here: what is read is bounded, held
against its name, and used only if it says of itself what its key says.
"""

from __future__ import annotations

import builtins
import hashlib
from pathlib import Path

from common.chain import Chain
from common.clock import Clock, SystemClock
from common.errors import DataError, OutcomeUnknown, Unavailable
from common.failpoints import failpoint
from common.objects.checksums import ChecksumMismatch, sha256_of, size_of
from common.objects.port import ObjectInfo, ObjectStore
from common.objects.probe import is_verifying
from common.segments.keys import DIGEST_LENGTH, Layout, StateName
from common.segments.snapshots import SnapshotRef, list_snapshots, sampling_of, snapshot_metadata
from common.segments.spool import spool_error
from common.service.logs import get_logger
from egress.sampling.snapshot import Snapshot, decode, encode

__all__ = ["SnapshotRef", "Snapshots"]

log = get_logger("egress.snapshots")

# Beyond this an object is not read: 1,000,000 values of the greatest length allowed stay below.
MAX_SNAPSHOT_BYTES = 1 << 30
PAUSES = (0.2, 1.0, 5.0)  # seconds before a snapshot that did not read back is put again
READ_PAUSES = (0.1, 0.5)  # seconds before one that arrived damaged is fetched again


class Snapshots:
    """The snapshots of `chain`. Blocking; safe to use from several threads.

    Every method raises what the object store raises.
    """

    def __init__(
        self, objects: ObjectStore, layout: Layout, chain: Chain, *, clock: Clock | None = None
    ) -> None:
        self.chain = chain
        self._objects, self._layout = objects, layout
        self._clock = clock or SystemClock()

    def list(self) -> builtins.list[SnapshotRef]:
        """All of them, newest first: the greatest position, and of one position what was stored last."""
        return list_snapshots(self._objects, self._layout, self.chain)

    def label(self, ref: SnapshotRef) -> str:
        """The digest of the settings that the object says it was made by; empty where it does not say.

        A hint that saves reading a snapshot of other settings.
        """
        info = self._objects.head(ref.key)
        return "" if info is None else sampling_of(info.metadata)

    def read(self, ref: SnapshotRef) -> Snapshot:
        """The snapshot. Raises DataError (E-SNAPSHOT) where it is gone or not what its name promises."""
        raw = self._fetch(ref)
        try:
            snapshot = decode(raw)
        except (ValueError, MemoryError) as error:
            raise _spoiled(ref, str(error)) from error
        if (snapshot.chain, snapshot.position) != (ref.chain, ref.position):
            found = f"{snapshot.chain} at {snapshot.position}"
            raise _spoiled(ref, f"expected {ref.chain} at {ref.position} as in the key, found {found}")
        return snapshot

    def _fetch(self, ref: SnapshotRef) -> bytes:
        """The bytes that the name promises."""
        if ref.size > MAX_SNAPSHOT_BYTES:
            raise _spoiled(ref, f"expected at most {MAX_SNAPSHOT_BYTES} bytes, found {ref.size}")
        for pause in READ_PAUSES:
            raw = self._get(ref)
            if _is_promised(ref, raw):
                return raw
            # The line may have damaged what the store keeps well.
            log.warning("snapshot read damaged", action="read_damaged", **ref.log_context())
            self._clock.pause(pause)
        raw = self._get(ref)
        if not _is_promised(ref, raw):
            found = f"{len(raw)} with {hashlib.sha256(raw).hexdigest()[:DIGEST_LENGTH]}…"
            expected = f"{ref.size} bytes with SHA-256 {ref.state.digest}…"
            raise _spoiled(ref, f"expected {expected}, found {found}")
        return raw

    def _get(self, ref: SnapshotRef) -> bytes:
        raw = self._objects.get(ref.key, length=ref.size + 1)
        if raw is None:
            raise _spoiled(ref, "not in the store any more")
        return raw

    def write(self, position: int, body: Path | bytes, *, sampling_digest: str = "") -> SnapshotRef:
        """Put an encoded snapshot and read it back; returning means that the store holds these very bytes.

        `sampling_digest`: as in the snapshot; others read it without opening the object. The same bytes may
        be written again, by anybody. Raises Unavailable, code E-READ-BACK, where it never reads back.
        """
        sha256 = sha256_of(body)
        name = StateName(self.chain, position, sha256[:DIGEST_LENGTH])
        ref = SnapshotRef(name, self._layout.state(name), size_of(body), 0.0)
        for number, pause in enumerate((*PAUSES, 0.0)):
            self._put(ref, body, sha256, sampling_digest, repair=number > 0)
            failpoint("egress.snapshot_read_back")
            info = self._read_back(ref, sha256)
            if info is not None:
                return SnapshotRef(name, ref.key, ref.size, info.modified)
            log.warning("snapshot did not read back", action="read_back_failed", **ref.log_context())
            self._clock.pause(pause)
        raise Unavailable(
            f"snapshot {ref.key}: put {len(PAUSES) + 1} times and never read back as it was sent",
            hint="look at the store: it accepts what it does not keep",
            code="E-READ-BACK",
        )

    def save(self, snapshot: Snapshot, spool: Path) -> SnapshotRef:
        """Encode `snapshot` into the file `spool`, step by step, and `write` it; the file stays.

        Raises Unavailable, code E-SPOOL, where the disk under `spool` fails.
        """
        try:
            with spool.open("wb") as file:
                file.writelines(encode(snapshot))
        except OSError as error:
            raise spool_error(spool.parent, error) from error
        return self.write(snapshot.position, spool, sampling_digest=snapshot.sampling_digest)

    def _put(
        self, ref: SnapshotRef, body: Path | bytes, sha256: str, sampling_digest: str, *, repair: bool
    ) -> None:
        """Ask the store to keep the bytes; what came of it is found out by reading back."""
        put = self._objects.put if repair else self._objects.put_if_absent
        failpoint("egress.snapshot_put")
        try:
            put(ref.key, body, sha256=sha256, metadata=snapshot_metadata(sampling_digest, sha256))
        except (OutcomeUnknown, ChecksumMismatch) as error:
            log.warning("snapshot in doubt", action="put_in_doubt", error=str(error), **ref.log_context())

    def _read_back(self, ref: SnapshotRef, sha256: str) -> ObjectInfo | None:
        """What the store says of the object, if it holds the bytes that were sent."""
        info = self._objects.head(ref.key)
        if info is None or info.size != ref.size:
            return None
        if info.sha256 is not None and is_verifying(self._objects, self._probe_prefix()):
            return info if info.sha256 == sha256 else None
        raw = self._objects.get(ref.key, length=ref.size + 1)
        return info if raw is not None and sha256_of(raw) == sha256 else None

    def _probe_prefix(self) -> str:
        return f"{self._layout.documents_prefix(self.chain.site, self.chain.feed)}probe/"


def _is_promised(ref: SnapshotRef, raw: bytes) -> bool:
    """Whether `raw` is as long as it was listed and has the SHA-256 that the name begins."""
    return len(raw) == ref.size and hashlib.sha256(raw).hexdigest().startswith(ref.state.digest)


def _spoiled(ref: SnapshotRef, cause: str) -> DataError:
    return DataError(
        f"snapshot {ref.key}: {cause}",
        hint="nothing to do: an older one is used, or the state is built again from the segments",
        code="E-SNAPSHOT",
    )
