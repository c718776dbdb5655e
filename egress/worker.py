"""Worker of one partition, from the listing to the last put: judge the stream, take the position, read, repeat.

Start, repair and take-over are one path. A session that ends in doubt may leave the only copy of its messages. If the
stream still has all of them, they are discarded and read again; otherwise they are put at once into the history that
they came from, before the stream is judged.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from common.clock import Backoff
from common.errors import FloeError, LeaseLost, Stopped, Unavailable
from common.jetstream.durables import LIMITS
from common.jetstream.lease import Lease
from common.logs import get_logger
from common.tasks import Stop, StopReason, again, end, orphaned, unless, wait_for, watched
from egress.acks import ReaderResetError
from egress.advisories.advisory import look_for_loop, refuse_loop
from egress.archive import Archive, ArchiveWalks
from egress.captures import Captures
from egress.consumers import check_start, first_sequence, hold
from egress.deps import PartitionDeps
from egress.evidence import Inquiry
from egress.handover import Handover
from egress.identity import Evidence, SourceVerdict, VerdictKind, acceptance_of, never_begun, stopped_error
from egress.incarnations import Closing, EndDecision, History, Incarnation
from egress.partition import Position
from egress.report import watch
from egress.sampling.resume import Resumed, Resuming
from egress.sampling.snapshot_store import Snapshots
from egress.session import Flush, Session, Stand
from egress.uploader import RetakeError, Unflushed, log_left, require
from egress.watchdog import Expiry

log = get_logger(__name__)

# Seconds. If the connection breaks more often than segments are due, nothing would ever be stored: the first
# segment after a break is closed after half the time that the connection held, but not sooner than this.
MIN_HURRY = 1.0


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of a round: the incarnation, its archive, the progress of its closing, the evidence, the verdict."""

    current: Incarnation
    archive: Archive
    closing: Closing
    evidence: Evidence
    verdict: SourceVerdict

    @property
    def decision(self) -> EndDecision | None:
        source = self.evidence.source
        return None if source is None else self.closing.decision_for(source.created)


class Worker:
    """Worker that archives one partition of a feed.

    `run` may be called again after any error; it continues from the listing.
    """

    def __init__(self, deps: PartitionDeps) -> None:
        self._deps, self._partition, self._report = deps, deps.partition, deps.report
        self._history = History(deps)
        self.handover, self.inquiry = Handover(deps, self._history), Inquiry(deps)
        self._captures = Captures(deps)
        self._walk, self._expiry = ArchiveWalks(deps.pools.io, deps.clock, deps.tuning.pace), Expiry(deps)
        self._backoff = Backoff(deps.rng)
        self._hurry: float | None = None
        self._unflushed: Unflushed | None = None
        self._has_begun = False
        self._session: Session | None = None

    def flush(self, incarnation: int = 0, least: int = 0) -> Flush | None:
        """Flush as `Session.flush`; return None also if nothing is being read."""
        return None if self._session is None else self._session.flush(incarnation, least)

    async def run(self, lease: Lease, stop: Stop) -> None:
        """Archive until `stop` is set and everything is put.

        Raises Stopped if only an operator can resolve the cause, LeaseLost, Unavailable and others after which the
        caller waits.
        """
        await self._deps.state.ensure()
        deps, every = self._deps, self._deps.tuning.pace.check
        looked = deps.partition, deps.client, deps.pools.io, deps.report, deps.clock
        side = self._beside(
            unmatched=lambda: watch(*looked), expiry=lambda: self._expiry.run(every), walk=self._walk.run
        )
        try:
            while not stop.is_set or self._unflushed is not None:
                await self._round(lease, stop)
        finally:
            await end(*side)

    def _beside(self, **works: Callable[[], Coroutine[Any, Any, None]]) -> list[asyncio.Task[None]]:
        return [watched(again(name, work, self._deps.clock), orphaned, name=name) for name, work in works.items()]

    async def _round(self, lease: Lease, stop: Stop) -> None:
        """Judge, then act. Once `stop` is set, only put the segments that are left into their history."""
        current = await self._current()
        self._report.follow(current.chain)
        archive = await self._open_archive(current)
        self._walk.follow(archive)
        self._expiry.position = lambda: max(archive.first, archive.end + 1)
        if self._unflushed is not None and self._unflushed.archive.chain != current.chain:
            await self._unflushed.drop()
            self._unflushed = None
        closing = await self.handover.closing(current)
        if closing.next is not None:
            await self._flush(lease)
            await self.handover.begin(current, closing)
            return
        if not await self._can_read_again():
            await self._flush(lease)
            return
        await hold(self._deps.client, self._partition)
        if (found := await self._judge(current, archive, closing, stop)) is None:
            return
        if found.verdict.is_same:
            await self._go_on(found, lease, stop)
        elif found.verdict.kind in (VerdictKind.RECREATED, VerdictKind.GONE) or found.decision is not None:
            await self._flush(lease)  # into the history that it came from, before that is closed
            await self._turn(found, lease, stop)
        else:
            raise await self.stopped(found.current, found.archive, found.evidence, found.verdict)

    async def _judge(self, current: Incarnation, archive: Archive, closing: Closing, stop: Stop) -> Findings | None:
        """Judge the stream. None if `stop` came first and no segment is left that would depend on the verdict."""
        judging = self.judge(current, archive)
        answer = await (unless(stop, judging) if self._unflushed is None else judging)
        if answer is None:
            return None
        evidence, verdict = answer
        verdict = self.handover.adopt(evidence, verdict, closing)
        self._report.judged(evidence, verdict)
        return Findings(current, archive, closing, evidence, verdict)

    async def judge(self, current: Incarnation, archive: Archive) -> tuple[Evidence, SourceVerdict]:
        self.inquiry.acceptance, _ = await acceptance_of(self._deps.state, current.chain).get()
        received = None if self._unflushed is None else self._unflushed.received
        return await self.inquiry.judge(current, archive, received, self._report.confirms)

    async def _go_on(self, found: Findings, lease: Lease, stop: Stop) -> None:
        source, decision = found.evidence.source, found.decision
        assert source is not None, "what is the same is there"
        if self._unflushed is not None and source.retention != LIMITS:
            # It may be the last copy: deleting the durable of an interest stream removes its messages.
            await self._flush(lease)
            return
        self.discard()
        if decision is not None and self._partition.number not in decision.first:
            await self._close(found, lease, stop)
        elif not stop.is_set and await self.handover.reopen(found.current, found.closing):
            await self._read(Stand(found.current, found.archive, source), lease, stop)

    async def _turn(self, found: Findings, lease: Lease, stop: Stop) -> None:
        decision, source = found.decision, found.evidence.source
        halts = self._partition.settings.on_recreated == "halt"
        if source is None or (halts and decision is None):
            raise await self.stopped(found.current, found.archive, found.evidence, found.verdict)
        if decision is None:
            await self._history.check_interval(found.current.chain, source.first)
        await self._close(found, lease, stop)

    # Reading

    async def _read(self, stand: Stand, lease: Lease, stop: Stop) -> None:
        """Run sessions from the position on, until `stop` is set, one ends, or an operator ends it.

        Holes that a walk found are filled before the archive is listed again: if its newest segment is gone, that
        listing is refused (E-LISTING). Raises LeaseLost and the errors of the servers.
        """
        position, before = await unless(stop, self.inquiry.place(stand.archive, stand.source)), None
        while position is not None and position != before:
            is_ended = await self._read_from(position, stand, lease, stop)
            if stop.is_set or self._unflushed is not None or not (is_ended or position.fills_hole):
                return
            source = replace(stand.source, first=await self.inquiry.first())
            before, position = position, await unless(stop, self.inquiry.place(stand.archive, source))
            if position is not None and not position.fills_hole:
                return

    async def _read_from(self, position: Position, stand: Stand, lease: Lease, stop: Stop) -> bool:
        """Run one session. Return True if it was ended to fill a hole."""
        await stand.archive.mend()
        self._report.lost(sum(map(len, position.lost)))
        leave = Stop(stop)
        works = {"decisions": lambda: self._watch_decisions(stand, leave)}
        if self._partition.number == 0:
            self._captures.follow(stand.archive, stand.source.created, lease)
            works["captures"] = self._captures.run
        if position.until is None:
            works["walk"] = lambda: self._watch_walk(stand, leave)
        watches = self._beside(**works)
        try:
            await self.read_at(position, stand, lease, leave)
            if self._partition.number == 0 and stop.is_set:
                await self._captures.drain()
        finally:
            await end(*watches)
        return leave.reason is StopReason.RESET

    async def _watch_decisions(self, stand: Stand, leave: Stop) -> None:
        while len(self._partition.settings.filters()) > 1 and not leave.is_set:
            await self._deps.clock.sleep(self._deps.tuning.pace.check)
            try:
                if await self.handover.is_decided(stand.current.chain, stand.source.created):
                    leave.set(StopReason.DECISION)
            except FloeError as error:
                log.info("decisions not read", action="decisions_put_off", error=str(error))

    async def _watch_walk(self, stand: Stand, leave: Stop) -> None:
        while not leave.is_set:
            await self._walk.news.wait()
            self._walk.news.clear()
            try:
                self._walk.tell(stand.archive)
                source = replace(stand.source, first=await self.inquiry.first())
                position = await self.inquiry.place(stand.archive, source)
            except FloeError as error:
                log.info("holes not looked at", action="holes_put_off", error=str(error))
                await self._deps.clock.sleep(self._deps.tuning.pace.check)
                self._walk.news.set()
                continue
            self._report.lost(sum(map(len, position.lost)))
            if position.fills_hole:
                log.info("hole to be filled", action="hole_found", first=position.first, last=position.until)
                leave.set(StopReason.RESET)

    async def read_at(self, position: Position, stand: Stand, lease: Lease, stop: Stop) -> None:
        resumed = None
        if self._partition.settings.sampling_key:
            resumed = await unless(stop, self._resume(position, stand))
            if resumed is None:
                return
        session = self._session = Session(self._deps, self.inquiry, stand, position, lease, self._hurry, resumed)
        started = self._deps.clock.monotonic()
        try:
            await session.run(stop)
        except RetakeError as retake:
            context = stand.archive.chain.log_context()
            log.info("position taken again", action="retake", error=str(retake), **context)
            await self._pause(session, stop)
        except ReaderResetError as doubt:
            self._report.doubt(doubt.reason, str(doubt))
            self._unflushed = await session.unflushed()
            lasted = self._deps.clock.monotonic() - started
            self._hurry = None if session.puts else max(MIN_HURRY, min(lasted, self._hurry or lasted) / 2)
            await self._pause(session, stop)
        except asyncio.CancelledError:  # the drain took too long
            if session.received is not None and session.received.sequence > session.end:
                log_left(stand.archive, session.end + 1, session.received.sequence)
            raise
        except LeaseLost:
            # The holder of the lease reads the messages again; if the stream is gone by then, this is the last copy.
            self._unflushed = await session.unflushed()
            raise
        finally:
            self._session = None
            await session.close()

    async def _resume(self, position: Position, stand: Stand) -> Resumed:
        deps, chain = self._deps, stand.current.chain
        await look_for_loop(self._partition, chain, deps.client)
        snapshots = Snapshots(deps.store, chain, clock=deps.clock)
        resuming = Resuming(self._partition, stand.archive, position, stand.source, snapshots, deps.store)
        return await resuming.run(deps.pools.io)

    async def _pause(self, session: Session, stop: Stop) -> None:
        if session.puts:
            self._backoff.reset()
        else:
            await wait_for(stop, self._backoff.next())

    async def stopped(
        self, current: Incarnation, archive: Archive, evidence: Evidence, verdict: SourceVerdict
    ) -> Stopped:
        proposal = await self.inquiry.proposal(current, archive, evidence, verdict)
        return stopped_error(self._partition, current.chain, evidence, verdict, proposal and proposal.first)

    # The current incarnation

    async def _current(self) -> Incarnation:
        if (found := await self._history.load()) is None:
            if (info := await self.inquiry.info()) is None:
                raise never_begun(self._partition)
            check_start(info, self._partition.settings)
            refuse_loop(self._partition, self._partition.chain, info)
            first = await first_sequence(self._deps.client, info, self._partition.settings, self._deps.clock)
            found = await self._history.begin(info, first)
        elif self._partition.settings.is_set and not self._has_begun:
            context = self._partition.chain.log_context()
            log.info("start keys ignored, the feed has begun", action="start_ignored", **context)
        self._has_begun = True
        return found

    async def _open_archive(self, current: Incarnation) -> Archive:
        archive = await Archive.of(current, self._deps)
        await archive.load()
        self._report.damaged(archive.damaged)
        return archive

    @property
    def is_holding(self) -> bool:
        """True if rows are left that were received and not put."""
        return self._unflushed is not None and self._unflushed.rows > 0

    async def _can_read_again(self) -> bool:
        """True if the stream still has the messages left of a session, or if none are left."""
        if (left := self._unflushed) is None or not left.rows or left.received is None:
            return True
        return await self.inquiry.can_read_again(left.received, left.first)

    async def needs_nothing(self) -> bool:
        """True if the messages left of a session are archived, or still in the stream. Raises the errors of both."""
        return await self._can_read_again() or (self._unflushed is not None and await self._unflushed.is_archived())

    async def rescue(self) -> FloeError | None:
        """Put the messages left of a session if the stream is gone, without a lease: its holder reads nothing, and
        there may be no other copy. Raises the errors of the servers.

        Return the error that prevents it; None if nothing is left, or all of it is archived or in the stream.
        """
        while (left := self._unflushed) is not None and left.rows and await self.inquiry.is_gone():
            await self._deps.state.ensure()
            await left.put_first()
        if left is None or not left.rows or await self.needs_nothing():
            return None
        # The stream is another one now, or was restored without them; its reader may be about to put others there.
        return Unavailable(
            f"{left.archive.chain}: {left.rows} messages of {left.first}..{left.last} were received here, and are "
            "neither archived nor in the stream; another instance holds the lease",
            hint="stop that one: this one puts them where the archive has no others, and says what comes next",
            code="E-HELD",
        )

    def end(self) -> None:
        """Log the messages that are left and remove them; this process ends."""
        if self._unflushed is not None and self.is_holding:
            self._unflushed.log_left()
        self.discard()

    async def _flush(self, lease: Lease) -> None:
        if self._unflushed is not None:
            await self._unflushed.put(lease)
        self._unflushed = None

    def discard(self) -> None:
        if self._unflushed is not None:
            self._unflushed.discard()
        self._unflushed = None

    # The end of an incarnation

    async def _close(self, found: Findings, lease: Lease, stop: Stop) -> None:
        source, decision = found.evidence.source, found.decision
        if (info := await self.inquiry.info()) is None or source is None or info.created != source.created:
            return
        archive = await self._open_archive(found.current)
        if (first := self._next_first(archive, found.verdict, decision)) is None:
            raise await self.stopped(found.current, found.archive, found.evidence, found.verdict)
        require(lease, archive)
        closing = await self.handover.close(found.current, archive, info, first, decision)
        if closing.next is None:
            await self.handover.wait(found.current, closing, info.created, lease, stop)

    def _next_first(self, archive: Archive, verdict: SourceVerdict, decision: EndDecision | None) -> int | None:
        """Return the partition's first sequence in the next incarnation; None if an operator must decide."""
        if decision is not None and self._partition.number in decision.first:
            return decision.first[self._partition.number]
        if verdict.is_same:
            return max(archive.end + 1, archive.first)
        return 1 if verdict.kind is VerdictKind.RECREATED else None
