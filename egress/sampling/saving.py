"""Writes snapshots beside the data: frozen between two batches, stored once the archive reaches them.

Neither puts nor acknowledgements wait for a snapshot; a restart without one only reads more again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from common.clock import Clock
from common.errors import FloeError
from common.failpoints import failpoint
from common.segments.snapshots import SnapshotRef
from common.service.logs import get_logger
from common.service.threads import Threads
from egress.sampling.snapshot import Snapshot
from egress.sampling.snapshot_store import Snapshots
from egress.sampling.telling import SamplingReport

log = get_logger("egress.sampling")


class Saving:
    """Holds one frozen snapshot at most. `interval`: seconds from one to the next."""

    def __init__(
        self,
        snapshots: Snapshots,
        new_spool: Callable[[], Path],
        threads: Threads,
        clock: Clock,
        interval: float,
        report: SamplingReport,
    ) -> None:
        self._snapshots, self._new_spool, self._threads = snapshots, new_spool, threads
        self._clock, self._interval, self._report = clock, interval, report
        self._frozen: Snapshot | None = None
        self._frozen_at = clock.monotonic()
        self._segments = 0
        self._reached, self._free = asyncio.Event(), asyncio.Event()
        self._free.set()

    def is_due(self, segments: int) -> bool:
        """Whether to freeze now, when so many segments were closed.

        Only behind one that was closed since the last time: then the snapshot mostly stands where a segment
        ends, and little is to be read again.
        """
        is_time = self._clock.monotonic() - self._frozen_at >= self._interval
        return self._frozen is None and is_time and segments > self._segments

    def hold(self, snapshot: Snapshot, segments: int) -> None:
        """Keep it until `covered` says that it may be stored. To be called while none is held."""
        self._frozen, self._frozen_at, self._segments = snapshot, self._clock.monotonic(), segments
        self._free.clear()

    def covered(self, last: int) -> None:
        """The archive holds everything up to `last`."""
        if self._frozen is not None and self._frozen.position - 1 <= last:
            self._reached.set()

    async def free(self) -> None:
        """Return when none is held: the last one is stored, or has failed."""
        await self._free.wait()

    async def run(self) -> None:
        """Store what is held and covered, until cancelled."""
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
            self._report.failed(snapshot.position, error)
        else:
            self._report.written(ref, self._clock.monotonic() - started)

    def _write(self, snapshot: Snapshot) -> SnapshotRef:
        failpoint("egress.before_snapshot")
        spool = self._new_spool()
        try:
            ref = self._snapshots.save(snapshot, spool)
        finally:
            spool.unlink(missing_ok=True)
        failpoint("egress.after_snapshot")
        return ref
