"""One partition of a feed, from the listing to the last put: decide what the stream is, take the position,
read, again.

Start, repair and take-over are one path. What a session leaves behind on a doubt is kept until the stream is
judged: the same, then it is thrown away and read again; another one or gone, then it is put into the history
that it came from, before that history is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from common.clock import Backoff
from common.errors import FloeError, LeaseLost, Stopped
from common.jetstream.lease import Lease
from common.segments.reader import SpooledSegment
from common.segments.segment import Tip
from common.service.logs import get_logger
from common.tasks import Stop, again, either, end, orphaned, unless, wait_for, watched
from egress.acks import ReaderResetError
from egress.advisories.advisory import look_for_loop, refuse_loop
from egress.archive import Archive, ArchiveWalks, HighWaterMarks
from egress.consumers import LIMITS, check_start, first_sequence, hold, is_set
from egress.deps import EgressDeps, Pools
from egress.evidence import Inquiry
from egress.handover import Succession
from egress.identity import (
    Acceptances,
    Evidence,
    SourceStream,
    SourceVerdict,
    VerdictKind,
    never_begun,
    stopped_error,
)
from egress.incarnations import Closing, EndDecision, History, Incarnation
from egress.partition import Partition, Position
from egress.report import FeedReport, watch
from egress.sampling.resume import Resumed, resume
from egress.sampling.settings import Sampling
from egress.sampling.snapshot_store import Snapshots
from egress.session import Session
from egress.uploader import RetakeError, require
from egress.watchdog import Expiry

log = get_logger("egress.worker")


@dataclass(frozen=True, slots=True)
class Unflushed:
    """Sealed segments of one history, not put; `received`: the tip of the last message received."""

    archive: Archive
    sealed: deque[SpooledSegment]
    received: Tip | None

    async def put(self, lease: Lease) -> None:
        """Put them into the history that they came from; each goes as it is put. Raises LeaseLost.

        Into one that has ended meanwhile nothing is put: nobody would deliver it.
        """
        while self.sealed:
            require(lease, self.archive)
            if await self.archive.is_closed():
                await self.drop()
                return
            await self._put_one(self.sealed[0])
            self.sealed.popleft().path.unlink(missing_ok=True)

    async def _put_one(self, spooled: SpooledSegment) -> None:
        coverage = spooled.footer.coverage
        # Another instance may have put a beginning of it alone, and there is no other copy of the rest.
        if await self.archive.is_covered(coverage.first) and not await self.archive.uncovered(coverage):
            return
        ref = await self.archive.put(spooled)
        await self.archive.write_tail()
        await self.archive.raise_mark()
        log.info("held segment put", action="held_put", **ref.log_context())

    async def drop(self) -> None:
        """Throw them away, though they are not read again; says what is archived nowhere."""
        for spooled in self.sealed:
            missing = await self.archive.uncovered(spooled.footer.coverage)
            if missing and (rows := spooled.footer.rows):
                ranges, chain = ", ".join(map(str, missing)), self.archive.chain
                context = {"ranges": ranges, "rows": rows, **chain.log_context()}
                log.error("held rows dropped", action="held_dropped", **context)
        self.discard()

    def discard(self) -> None:
        """Throw them away: they are read again."""
        for spooled in self.sealed:
            spooled.path.unlink(missing_ok=True)


# Seconds. Where the line is cut more often than segments are due, nothing would ever be stored: the first
# segment behind a cut is closed after half the time that the line held, but not sooner than this.
MIN_HURRY = 1.0


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a partition stands: its incarnation, what is archived of it, the stream as it was found to be."""

    current: Incarnation
    archive: Archive
    source: SourceStream


class Reading:
    """Reads one partition. `held`: what a session left behind on a doubt, until somebody takes it."""

    def __init__(
        self,
        partition: Partition,
        deps: EgressDeps,
        pools: Pools,
        report: FeedReport,
        inquiry: Inquiry,
        succession: Succession,
        walk: ArchiveWalks | None = None,
    ) -> None:
        self._partition, self._deps, self._pools, self._report = partition, deps, pools, report
        self._inquiry, self._succession, self._walk = inquiry, succession, walk
        self._backoff = Backoff(deps.rng)
        self._hurry: float | None = None
        self.held: Unflushed | None = None

    async def run(self, stand: Stand, lease: Lease, stop: Stop, leaving: Stop) -> None:
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
                    watched(again(name, work, self._deps.clock), orphaned, name=name)
                    for name, work in works.items()
                ]
                try:
                    await self.read(stand, place, lease, ending, leaving)
                finally:
                    await end(*watches)

    async def read(self, stand: Stand, place: Position, lease: Lease, stop: Stop, leaving: Stop) -> None:
        """One session at `place`. Raises as `run`."""
        resumed, snapshots = None, None
        if Sampling.of(self._partition.settings) is not None:
            layout, chain = self._deps.chains.layout, stand.current.chain
            snapshots = Snapshots(self._deps.objects, layout, chain, clock=self._deps.clock)
            resumed = await unless(leaving, self._resume(stand, place, snapshots))
            if resumed is None:
                return
        session = Session(
            self._deps,
            self._partition,
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
        await look_for_loop(self._partition, stand.current.chain, self._deps.client)
        return await resume(
            self._partition,
            stand.current.chain,
            stand.archive,
            place,
            stand.source,
            snapshots,
            self._deps.store,
            self._pools.io,
            first=stand.archive.first,
        )

    async def _watch_decisions(self, stand: Stand, ending: Stop) -> None:
        """End the session where an operator closes the incarnation because of another partition."""
        while len(self._partition.settings.filters()) > 1 and not ending.is_set:
            await self._deps.clock.sleep(self._deps.tuning.pace.check)
            try:
                if await self._succession.is_decided(stand.current.chain, stand.source.created):
                    ending.set()
            except FloeError as error:
                log.info("decisions not read", action="decisions_put_off", error=str(error))

    async def _watch_walk(self, stand: Stand, walk: ArchiveWalks, ending: Stop) -> None:
        """End the session where a walk has found a hole that the source still holds: it comes next."""
        while not ending.is_set:
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

    async def _run(self, session: Session, archive: Archive, stop: Stop) -> None:
        started = self._deps.clock.monotonic()
        try:
            await session.run(stop)
        except RetakeError as retake:
            log.info(
                "position taken again", action="retake", reason=str(retake), **archive.chain.log_context()
            )
            await self._pause(session, stop)
        except ReaderResetError as doubt:
            self._report.doubt(doubt.reason, str(doubt))
            self.held = Unflushed(archive, await session.seal(), session.received)
            lasted = self._deps.clock.monotonic() - started
            self._hurry = None if session.puts else max(MIN_HURRY, min(lasted, self._hurry or lasted) / 2)
            await self._pause(session, stop)
        except LeaseLost:
            # Whoever holds the lease reads it again; if the stream is gone by then, this is the last copy.
            self.held = Unflushed(archive, await session.seal(), session.received)
            raise
        finally:
            await session.close()

    async def _pause(self, session: Session, stop: Stop) -> None:
        """Wait before the next session where this one stored nothing."""
        if session.puts:
            self._backoff.reset()
        else:
            await wait_for(stop, self._backoff.next())


@dataclass(frozen=True, slots=True)
class Findings:
    """What a round found: where the chain is, how far its incarnation is with closing, what the stream is."""

    current: Incarnation
    archive: Archive
    closing: Closing
    evidence: Evidence
    verdict: SourceVerdict

    @property
    def decision(self) -> EndDecision | None:
        """What an operator decided about the stream as it is now."""
        source = self.evidence.source
        return None if source is None else self.closing.decision_for(source.created)


class Worker:
    """Freezes one partition of a feed.

    `run` may be called again after whatever it raised; it goes on from the listing.
    """

    def __init__(self, partition: Partition, deps: EgressDeps, pools: Pools, report: FeedReport) -> None:
        self._partition, self._deps, self._pools, self._report = partition, deps, pools, report
        self._chain = partition.chain
        self._marks, self._acceptances = HighWaterMarks(deps.state), Acceptances(deps.state)
        self._history = History(partition, deps.chains, deps.objects, self._marks, pools.io, deps.clock)
        self._succession = Succession(partition, deps, self._history, report)
        self._inquiry = Inquiry(partition, deps, pools.io)
        self._walk = ArchiveWalks(pools.io, deps.clock, deps.tuning.pace)
        self._reading = Reading(partition, deps, pools, report, self._inquiry, self._succession, self._walk)
        self._expiry = Expiry(partition, deps.client, report, deps.clock)
        self._has_begun = False

    async def run(self, lease: Lease, stop: Stop) -> None:
        """Freeze until `stop` is set or the lease is to be given back, and everything is put.

        Raises Stopped where only an operator can go on, LeaseLost, Unavailable and others for the caller to
        wait.
        """
        await self._deps.state.ensure()
        side = [watched(work, orphaned, name="monitor") for work in self._monitors()]
        try:
            async with either(stop, lease.give_back) as leaving:
                while not leaving.is_set or self._reading.held is not None:
                    await self._round(lease, stop, leaving)
        finally:
            await end(*side)

    def _monitors(self) -> list[Coroutine[Any, Any, None]]:
        """What looks on beside the work, and tells the report; each for itself."""
        deps, clock = self._deps, self._deps.clock
        return [
            again(
                "unmatched",
                lambda: watch(self._partition, deps.client, self._pools.io, self._report, clock),
                clock,
            ),
            again("expiry", lambda: self._expiry.run(deps.tuning.pace.check), clock),
            again("walk", self._walk.run, clock),
        ]

    async def _round(self, lease: Lease, stop: Stop, leaving: Stop) -> None:
        """Judge, then act; once `leaving` is set, only what is held back is still put where it belongs."""
        current = await self._current()
        archive = await self._open_archive(current)
        self._walk.follow(archive)
        self._expiry.position = lambda: max(archive.first, archive.end + 1)
        if self._reading.held is not None and self._reading.held.archive.chain != current.chain:
            await self._reading.held.drop()
            self._reading.held = None
        closing = await self._succession.closing(current)
        if closing.next is not None:
            await self._put_held(lease)
            await self._succession.begin(current, closing)
            return
        await hold(self._deps.client, self._partition)
        found = await self._judge(current, archive, closing, leaving)
        if found is not None and found.verdict.is_same and found.evidence.source is not None:
            await self._go_on(found, found.evidence.source, lease, stop, leaving)
        elif found is not None:
            await self._turn(found, lease, leaving)

    async def _judge(
        self, current: Incarnation, archive: Archive, closing: Closing, leaving: Stop
    ) -> Findings | None:
        """None where `leaving` came first and nothing is held back that would depend on the answer."""
        held = self._reading.held
        self._inquiry.acceptance = await self._acceptances.get(current.chain)
        asking = self._inquiry.judge(current, archive, None if held is None else held.received)
        answer = await (unless(leaving, asking) if held is None else asking)
        if answer is None:
            return None
        evidence, verdict = answer
        verdict = self._succession.adopt(evidence, verdict, closing)
        self._report.judged(evidence, verdict)
        return Findings(current, archive, closing, evidence, verdict)

    async def _go_on(
        self, found: Findings, source: SourceStream, lease: Lease, stop: Stop, leaving: Stop
    ) -> None:
        """The stream is the same: read on, unless an operator lets the incarnation end."""
        if self._reading.held is not None and source.retention != LIMITS:
            # It may be the last copy: who removes the durable of an interest stream removes its messages.
            await self._put_held(lease)
            return
        self._discard_held()
        decision = found.decision
        if decision is not None and self._partition.number not in decision.first:
            await self._close(found, source, decision, lease, leaving)
        elif not leaving.is_set and await self._succession.reopen(found.current, found.closing):
            stand = Stand(found.current, found.archive, source)
            await self._reading.run(stand, lease, stop, leaving)

    async def _turn(self, found: Findings, lease: Lease, leaving: Stop) -> None:
        """The stream is another one, or not what it was: end the incarnation where that may be done."""
        decision, source = found.decision, found.evidence.source
        if found.verdict.kind not in (VerdictKind.RECREATED, VerdictKind.GONE) and decision is None:
            raise await self._stopped(found)
        await self._put_held(lease)
        halts = self._partition.settings.on_recreated == "halt"
        if source is None or (halts and decision is None):
            raise await self._stopped(found)
        if decision is None:
            await self._history.check_interval(found.current.chain, source.first)
        await self._close(found, source, decision, lease, leaving)

    async def _stopped(self, found: Findings) -> Stopped:
        """Why the chain stops, with the choices that there are."""
        proposal = await self._inquiry.proposal(found.current, found.archive, found.evidence, found.verdict)
        current = found.current
        return stopped_error(
            self._partition,
            current.chain,
            found.evidence,
            found.verdict,
            proposal,
            continues=current.stream.continues,
        )

    # What is there

    async def _current(self) -> Incarnation:
        """The newest incarnation; the first one is made if there is none."""
        found = await self._history.load()
        if found is None:
            info = await self._inquiry.info()
            if info is None:
                raise never_begun(self._partition)
            check_start(info, self._partition.settings)
            refuse_loop(self._partition, self._chain, info)
            first = await first_sequence(self._deps.client, info, self._partition.settings, self._deps.clock)
            found = await self._history.begin(info, first)
        elif is_set(self._partition.settings) and not self._has_begun:
            log.info(
                "start keys ignored, the feed has begun", action="start_ignored", **self._chain.log_context()
            )
        self._has_begun = True
        return found

    async def _open_archive(self, current: Incarnation) -> Archive:
        archive = await Archive.of(current, self._deps, self._marks, self._pools.io)
        await archive.load()
        self._report.damaged(archive.damaged)
        return archive

    # What was received and not put

    async def _put_held(self, lease: Lease) -> None:
        """Put what was received through a reader of the history that has ended, into that history."""
        if self._reading.held is not None:
            await self._reading.held.put(lease)
        self._reading.held = None

    def _discard_held(self) -> None:
        if self._reading.held is not None:
            self._reading.held.discard()
        self._reading.held = None

    # The end of an incarnation

    async def _close(
        self,
        found: Findings,
        source: SourceStream,
        decision: EndDecision | None,
        lease: Lease,
        leaving: Stop,
    ) -> None:
        """Note where the partition ends; wait for the others a while, if there are any."""
        info = await self._inquiry.info()
        if info is None or info.created != source.created:
            return
        archive = await self._open_archive(found.current)
        first = self._next_first(archive, found.verdict, decision)
        if first is None:
            raise await self._stopped(found)
        require(lease, archive)
        closing = await self._succession.close(found.current, archive, info, first, decision)
        if closing.next is None:
            await self._succession.wait(found.current, closing, info.created, lease, leaving)

    def _next_first(
        self, archive: Archive, verdict: SourceVerdict, decision: EndDecision | None
    ) -> int | None:
        """Where the partition goes on in the next incarnation; None where an operator has yet to say so."""
        if decision is not None and self._partition.number in decision.first:
            return decision.first[self._partition.number]
        if verdict.is_same:
            return max(archive.end + 1, archive.first)
        return 1 if verdict.kind is VerdictKind.RECREATED else None
