"""The sessions of one partition, one after the other: what each begins with, and what it leaves behind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from common.clock import wait_for
from common.errors import FloeError, LeaseLost
from common.jetstream.lease import Lease
from common.service.logs import get_logger
from common.tasks import again, either, end, orphaned, unless, watched
from egress.advisories.loop import look_for_loop
from egress.archive import Archive
from egress.backoff import Backoff
from egress.deps import Parts, Pools
from egress.doubt import DoubtError
from egress.handover import Succession
from egress.held import Held
from egress.identity import Source
from egress.incarnations import Incarnation
from egress.inquiry import Inquiry
from egress.partition import Slice
from egress.position import Position
from egress.report import FeedReport
from egress.sampling.resume import Resumed, resume
from egress.sampling.settings import Sampling
from egress.sampling.snapshot_store import Snapshots
from egress.session import Session
from egress.uploader import RetakeError
from egress.walking import Walk

log = get_logger("egress.reading")

# Seconds. Where the line is cut more often than segments are due, nothing would ever be stored: the first
# segment behind a cut is closed after half the time that the line held, but not sooner than this.
MIN_HURRY = 1.0


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a partition stands: its incarnation, what is archived of it, the stream as it was found to be."""

    current: Incarnation
    archive: Archive
    source: Source


class Reading:
    """Reads one partition. `held`: what a session left behind on a doubt, until somebody takes it."""

    def __init__(
        self,
        part: Slice,
        parts: Parts,
        pools: Pools,
        report: FeedReport,
        inquiry: Inquiry,
        succession: Succession,
        walk: Walk | None = None,
    ) -> None:
        self._slice, self._parts, self._pools, self._report = part, parts, pools, report
        self._inquiry, self._succession, self._walk = inquiry, succession, walk
        self._backoff = Backoff(parts.rng)
        self._hurry: float | None = None
        self.held: Held | None = None

    async def run(self, stand: Stand, lease: Lease, stop: asyncio.Event, leaving: asyncio.Event) -> None:
        """One session from the position on, until `stop` is set, it ends, or an operator ends it.

        Nothing is begun once `leaving` is set. Raises LeaseLost and what the servers raise.
        """
        place = await unless(leaving, self._inquiry.place(stand.archive, stand.source))
        if place is not None:
            await stand.archive.mend()
            self._report.lost(sum(map(len, place.lost)))
            async with either(stop) as ending:
                works = {"decisions": lambda: self._watch_decisions(stand, ending)}
                if (walk := self._walk) is not None and place.until is None:
                    works["walk"] = lambda: self._watch_walk(stand, walk, ending)
                watches = [
                    watched(again(name, work, self._parts.clock), orphaned, name=name)
                    for name, work in works.items()
                ]
                try:
                    await self.read(stand, place, lease, ending, leaving)
                finally:
                    await end(*watches)

    async def read(
        self, stand: Stand, place: Position, lease: Lease, stop: asyncio.Event, leaving: asyncio.Event
    ) -> None:
        """One session at `place`. Raises as `run`."""
        resumed, snapshots = None, None
        if Sampling.of(self._slice.settings) is not None:
            layout, chain = self._parts.chains.layout, stand.current.chain
            snapshots = Snapshots(self._parts.objects, layout, chain, clock=self._parts.clock)
            resumed = await unless(leaving, self._resume(stand, place, snapshots))
            if resumed is None:
                return
        session = Session(
            self._parts,
            self._slice,
            self._pools,
            self._report,
            self._inquiry,
            lease,
            stand.archive,
            stand.current,
            stand.source,
            place,
            self._hurry,
            resumed=resumed,
            snapshots=snapshots,
        )
        await self._run(session, stand.archive, stop)

    async def _resume(self, stand: Stand, place: Position, snapshots: Snapshots) -> Resumed:
        await look_for_loop(self._slice, stand.current.chain, self._parts.client)
        return await resume(
            self._slice,
            stand.current.chain,
            stand.archive,
            place,
            stand.source,
            snapshots,
            self._parts.store,
            self._pools.io,
            first=stand.archive.first,
        )

    async def _watch_decisions(self, stand: Stand, ending: asyncio.Event) -> None:
        """End the session where an operator closes the incarnation because of another partition."""
        while len(self._slice.settings.filters()) > 1 and not ending.is_set():
            await self._parts.clock.sleep(self._parts.tuning.pace.check)
            try:
                if await self._succession.is_decided(stand.current.chain, stand.source.created):
                    ending.set()
            except FloeError as error:
                log.info("decisions not read", action="decisions_put_off", error=str(error))

    async def _watch_walk(self, stand: Stand, walk: Walk, ending: asyncio.Event) -> None:
        """End the session where a walk has found a hole that the source still holds: it comes next."""
        while not ending.is_set():
            await walk.news.wait()
            walk.news.clear()
            try:
                walk.tell(stand.archive)
                source = replace(stand.source, first=await self._inquiry.first())
                place = await self._inquiry.place(stand.archive, source)
            except FloeError as error:
                log.info("holes not looked at", action="holes_put_off", error=str(error))
                continue
            self._report.lost(sum(map(len, place.lost)))
            if place.fills_hole:
                log.info("hole to be filled", action="hole_found", first=place.first, last=place.until)
                ending.set()

    async def _run(self, session: Session, archive: Archive, stop: asyncio.Event) -> None:
        started = self._parts.clock.monotonic()
        try:
            await session.run(stop)
        except RetakeError as retake:
            log.info(
                "position taken again", action="retake", reason=str(retake), **archive.chain.log_context()
            )
            await self._pause(session, stop)
        except DoubtError as doubt:
            self._report.doubt(doubt.reason, str(doubt))
            self.held = Held(archive, await session.seal(), session.received)
            lasted = self._parts.clock.monotonic() - started
            self._hurry = None if session.puts else max(MIN_HURRY, min(lasted, self._hurry or lasted) / 2)
            await self._pause(session, stop)
        except LeaseLost:
            # Whoever holds the lease reads it again; if the stream is gone by then, this is the last copy.
            self.held = Held(archive, await session.seal(), session.received)
            raise
        finally:
            await session.close()

    async def _pause(self, session: Session, stop: asyncio.Event) -> None:
        """Wait before the next session where this one stored nothing."""
        if session.puts:
            self._backoff.reset()
        else:
            await wait_for(stop, self._backoff.next())
