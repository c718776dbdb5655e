"""Clears away the snapshots of samplers that egress will not go back to: it has no right to delete them.

What is kept of each chain: the newest few by position, the one that was stored last, and everything younger
than the grace. Egress stores snapshots by its present settings only, so the newest one of these settings is
always among them. A snapshot that is missed costs reading again, never a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.chain import Chain
from common.errors import FloeError
from common.failpoints import failpoint
from common.segments.snapshots import SnapshotRef, list_snapshots, newest_first
from common.segments.store import SegmentStore
from common.service.logs import get_logger
from compaction.failures import Failure

log = get_logger("compaction.snapshots")

KEPT = 3


def outdated(refs: Sequence[SnapshotRef], now: float, grace: float) -> list[SnapshotRef]:
    """Which of one chain's snapshots may go, the oldest position first.

    `now`: seconds since 1970 by the store's clock. `grace`: seconds.
    """
    last_stored = max((ref.modified for ref in refs), default=0.0)
    behind = sorted(refs, key=newest_first)[KEPT:]
    return [ref for ref in reversed(behind) if ref.modified < min(last_stored, now - grace)]


@dataclass(slots=True)
class Pruned:
    """What was done in one chain, or is to be: `refs` went, or are to go."""

    refs: list[SnapshotRef] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class Pruning:
    """Clears away the snapshots of single chains. `grace`: seconds."""

    def __init__(self, store: SegmentStore, grace: float) -> None:
        self._store, self._grace = store, grace

    def due(self, chain: Chain, now: float) -> Pruned:
        """What may go; a listing that fails is a failure of this chain alone."""
        try:
            refs = list_snapshots(self._store.objects, self._store.layout, chain)
        except FloeError as error:
            return Pruned(failures=[Failure.of(f"snapshots of {chain}", error)])
        return Pruned(outdated(refs, now or max((ref.modified for ref in refs), default=0.0), self._grace))

    def prune(self, chain: Chain, now: float) -> Pruned:
        """Delete what may go."""
        due = self.due(chain, now)
        done = Pruned(failures=due.failures)
        for ref in due.refs:
            failpoint("compaction.delete_snapshot")
            try:
                self._store.objects.delete(ref.key)
                done.refs.append(ref)
            except FloeError as error:
                done.failures.append(Failure.of(f"delete of {ref.key}", error))
                break
        if done.refs:
            log.info(
                "snapshots pruned",
                action="snapshots_pruned",
                **chain.log_context(),
                snapshots=len(done.refs),
            )
        return done
