"""Snapshots of samplers, as the object store shows them: what egress reads again and compaction clears away.

What is in them is egress's own affair (`egress.sampling`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.chain import Chain
from common.objects.port import ObjectStore
from common.segments.keys import Layout, StateName
from common.service.logs import get_logger

log = get_logger("segments.snapshots")

_SAMPLING = "sampling"


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A snapshot that a listing shows.

    `size`: stored bytes. `modified`: seconds since 1970 UTC by the *store's* clock, 0.0 where it was put and
    not listed.
    """

    state: StateName
    key: str
    size: int
    modified: float

    @property
    def chain(self) -> Chain:
        return self.state.chain

    @property
    def position(self) -> int:
        """The first sequence that is not folded into it."""
        return self.state.position

    def log_context(self) -> dict[str, object]:
        return {**self.chain.log_context(), "snapshot": self.key.rpartition("/")[2]}


def newest_first(ref: SnapshotRef) -> tuple[int, float, str]:
    """What to sort by: the greatest position first; of one position, the one that was stored last."""
    return -ref.position, -ref.modified, ref.key


def list_snapshots(objects: ObjectStore, layout: Layout, chain: Chain) -> list[SnapshotRef]:
    """The snapshots of a chain, newest first. Foreign keys are passed over; raises what the store raises."""
    found = []
    for info in objects.list(layout.states_prefix(chain)):
        name = layout.parse_state(info.key)
        if name is None:
            log.debug("foreign key", action="foreign_key", key=info.key)
        else:
            found.append(SnapshotRef(name, info.key, info.size, info.modified))
    return sorted(found, key=newest_first)


def snapshot_metadata(sampling_digest: str, sha256: str) -> dict[str, str]:
    """What the object says of itself without being opened. A hint only: what counts is in the snapshot."""
    return {"format": "1", _SAMPLING: sampling_digest, "sha256": sha256}


def sampling_of(metadata: Mapping[str, str]) -> str:
    """The digest of the settings by which the snapshot was made; empty where the object does not say."""
    return metadata.get(_SAMPLING, "")
