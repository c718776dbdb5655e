"""The snapshots of one chain, read until one of the present settings is found."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import DataError
from common.service.logs import get_logger
from egress.sampling.choose import may_be_of
from egress.sampling.snapshot import Snapshot
from egress.sampling.snapshot_store import SnapshotRef, Snapshots

log = get_logger("egress.sampling")

ASKED = 200  # snapshots that are looked at before the archive is asked instead


class Candidates:
    """For settings with `digest`. Blocking; raises what the store raises.

    One that turns out to be damaged is told once and left out.
    """

    def __init__(self, snapshots: Snapshots, digest: str) -> None:
        self._snapshots, self._digest = snapshots, digest
        self._labels: dict[str, str] = {}
        self._damaged: set[str] = set()

    def newest(self, refs: Sequence[SnapshotRef]) -> tuple[SnapshotRef, Snapshot] | None:
        """The first readable one of the settings among `refs`, newest first; None if there is none.

        Of several at one position the one that knows of the newest message: a store's clock ticks in seconds.
        """
        found: tuple[SnapshotRef, Snapshot] | None = None
        for ref in refs[:ASKED]:
            if found is not None and ref.position < found[0].position:
                break
            snapshot = self._open(ref) if may_be_of(self._label(ref), self._digest) else None
            if snapshot is None or snapshot.sampling_digest != self._digest:
                continue
            if found is None or snapshot.newest_ns > found[1].newest_ns:
                found = ref, snapshot
        return found

    def newest_of_any(self, refs: Sequence[SnapshotRef]) -> Snapshot | None:
        """The first readable one, whatever its settings."""
        return next((found for ref in refs[:ASKED] if (found := self._open(ref)) is not None), None)

    def known(self, refs: Sequence[SnapshotRef]) -> list[SnapshotRef]:
        """Those that were found, or say without being read, to be of the settings."""
        return [ref for ref in refs if self._labels.get(ref.key) == self._digest]

    def _label(self, ref: SnapshotRef) -> str:
        """By what settings it was made, as far as the object says."""
        if ref.key not in self._labels:
            self._labels[ref.key] = self._snapshots.label(ref)
        return self._labels[ref.key]

    def _open(self, ref: SnapshotRef) -> Snapshot | None:
        """None where it cannot be read."""
        if ref.key in self._damaged:
            return None
        try:
            snapshot = self._snapshots.read(ref)
        except DataError as error:
            self._damaged.add(ref.key)
            told = {"code": error.code, "error": str(error), **ref.log_context()}
            log.warning("snapshot left out", action="snapshot_left_out", **told)
            return None
        self._labels[ref.key] = snapshot.sampling_digest
        return snapshot
