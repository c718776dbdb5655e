"""Worker of one partition, from the listing to the last put: judge the stream, take the position, read, repeat.

Start, repair and take-over are one path. A session that ends in doubt may leave the only copy of its messages. If the
stream still has all of them, they are discarded and read again; otherwise they are put at once into the history that
they came from, before the stream is judged. `Handover` leads a partition from one incarnation to the next, together
with the other partitions of the feed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from common.chain import Chain
from common.clock import Backoff
from common.errors import FloeError, LeaseLost, Stopped, Unavailable
from common.failpoints import failpoint
from common.logs import get_logger
from common.nats.api import LIMITS, StreamInfo
from common.nats.lease import Lease
from common.tasks import Stop, StopReason, cancel, raise_fatal, restart_on_error, run_until_stopped, spawn, wait_for
from egress.advisories.advisory import check_loop, raise_if_loop
from egress.archive import Archive, ArchiveWalks
from egress.captures import StreamCapturer
from egress.consumers import ReaderResetError, check_start, ensure_durable, first_sequence
from egress.deps import PartitionDeps
from egress.evidence import IdentityCheck
from egress.identity import (
    Evidence,
    SourceVerdict,
    VerdictKind,
    identity_of,
    is_any_equal,
    no_stream_error,
    remember,
    verdict_error,
)
from egress.incarnations import Closing, Closings, End, EndDecision, Incarnation, Incarnations, NextStream
from egress.partition import Position
from egress.sampling.resume import ResumedSampler, SamplerResume
from egress.sampling.snapshot import SnapshotStore
from egress.session import ReadContext, Session, SessionFlush
from egress.uploader import StalePositionError, UnputSegments, log_unarchived, require_lease
from egress.watchdog import ExpiryEstimate

log = get_logger(__name__)

GONE_FRESH_S = 5.0  # seconds for which a stream that was found gone counts as gone
HANDOVER_POLL_S = 2.0  # seconds between two checks of the progress of the other partitions, at most


class Handover:
    """Closing of one partition's incarnations, and beginning of the next once all partitions are closed."""

    def __init__(self, deps: PartitionDeps, incarnations: Incarnations) -> None:
        self._deps, self._number, self._incarnations = deps, deps.partition.number, incarnations
        self._count, self._closings = len(deps.partition.settings.filters()), Closings(deps.state)

    async def closing(self, current: Incarnation) -> Closing:
        return await self._closings.get(current.chain)

    async def begin_next(self, current: Incarnation, closing: Closing) -> None:
        """Begin the incarnation after `current`, which is closed. Raises Stopped."""
        begun = await self._incarnations.create_next(current, closing)
        context = {"first": begun.document.first, **begun.chain.log_context()}
        log.warning("incarnation closed", action="incarnation_closed", **context)
        self._deps.report.count_recreated()

    async def reopen(self, current: Incarnation, closing: Closing) -> bool:
        """Withdraw this partition's noted end, so that it reads on. Return False if it is too late.

        A decision about a partition that continues by itself again is void.
        """
        number, decision = self._number, closing.decision

        def step(found: Closing) -> Closing:
            if decision is not None and number in decision.first and found.decision == decision:
                found = Closing(found.ends, None, found.next)
            return found.without_end(number)

        if closing == Closing():
            return True
        return (await self._closings.change(current.chain, step)).next is None

    async def close(
        self, current: Incarnation, archive: Archive, info: StreamInfo, first: int, decision: EndDecision | None
    ) -> Closing:
        """Note that the partition ends at the end of `archive`, and continues at `first` of the stream `info`.

        Begins the next incarnation if this is the last partition to end. Nothing is noted if `decision` is no longer
        the current one.
        """
        end = End(archive.end, first, info.created)
        stream = NextStream(info.created, info.config, max(1, info.first_sequence))

        def step(found: Closing) -> Closing:
            if found.decision_for(info.created) != decision:
                return found
            return found.with_end(self._number, end, self._count, stream)

        closing = await self._closings.change(current.chain, step)
        failpoint("egress.after_end_noted")
        if closing.next is not None:
            await self.begin_next(current, closing)
        return closing

    async def wait(self, current: Incarnation, closing: Closing, created: str, lease: Lease, stop: Stop) -> None:
        """Wait for the other partitions, until this one's own verdict has to be checked again."""
        self._deps.report.set_closing(closing.missing(self._count, created))
        clock, check = self._deps.clock, self._deps.tuning.intervals.check
        until = clock.monotonic() + check
        while not stop.is_set and lease.is_usable() and clock.monotonic() < until:
            await wait_for(stop, min(HANDOVER_POLL_S, check))
            if await self.closing(current) != closing:
                return

    async def is_decided(self, chain: Chain, created: str) -> bool:
        return (await self._closings.get(chain)).decision_for(created) is not None

    def adopt_sibling_verdict(self, evidence: Evidence, verdict: SourceVerdict, closing: Closing) -> SourceVerdict:
        """Return the verdict of another partition of the same stream if this one's own evidence decides nothing.

        A partition without messages has none to compare.
        """
        source = evidence.source
        if verdict.kind is not VerdictKind.UNKNOWN or source is None or source.created == evidence.created:
            return verdict
        if closing.decision is not None or is_any_equal(evidence.tips):
            return verdict
        others = [n for n, end in closing.ends.items() if n != self._number and end.created == source.created]
        if not others:
            return verdict
        return SourceVerdict(VerdictKind.RECREATED, f"found by partition {min(others)}; {verdict.reason}")


# Seconds. If the connection breaks more often than segments are due, nothing would ever be stored: the first
# segment after a break is closed after half the time that the connection held, but not sooner than this.
MIN_MAX_AGE_S = 1.0


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings about the stream of `current`. `closing`: its progress; none for commands, which close nothing."""

    current: Incarnation
    archive: Archive
    evidence: Evidence
    verdict: SourceVerdict
    closing: Closing = field(default_factory=Closing)

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
        self._incarnations = Incarnations(deps)
        self.handover, self.identity = Handover(deps, self._incarnations), IdentityCheck(deps)
        self._captures: StreamCapturer | None = None  # of the last session
        self._walk, self._expiry = ArchiveWalks(deps.pools.io, deps.clock, deps.tuning.intervals), ExpiryEstimate(deps)
        self._backoff = Backoff(deps.rng)
        self._max_age: float | None = None
        self._unput: UnputSegments | None = None
        self._has_begun = False
        self._session: Session | None = None
        self._end_turn: Callable[[], None] = lambda: None

    def flush(self, incarnation: int | None = None, least: int = 0) -> SessionFlush | None:
        """Flush as `Session.flush`; return None also if nothing is being read."""
        return None if self._session is None else self._session.flush(incarnation, least)

    async def run(self, lease: Lease, stop: Stop) -> None:
        """Archive until `stop` is set and everything is put.

        Raises Stopped if only an operator can resolve the cause, LeaseLost, Unavailable and others after which the
        caller waits.
        """
        await self._deps.state.ensure()
        deps, interval = self._deps, self._deps.tuning.intervals.check
        side_tasks = self._start_side_tasks(expiry=lambda: self._expiry.run(interval), walk=self._walk.run)
        try:
            while not stop.is_set or self._unput is not None:
                async with deps.starts.turn(stop) as self._end_turn:
                    await self._round(lease, stop)
            if self._captures is not None and lease.is_usable():
                await self._captures.drain()
        finally:
            self._captures = None
            await cancel(*side_tasks)

    def _start_side_tasks(self, **runs: Callable[[], Coroutine[Any, Any, None]]) -> list[asyncio.Task[None]]:
        clock = self._deps.clock
        return [spawn(restart_on_error(name, run, clock), raise_fatal, name=name) for name, run in runs.items()]

    async def _round(self, lease: Lease, stop: Stop) -> None:
        """Judge, then act. Once `stop` is set, only put the segments that are left into their history."""
        if self._has_begun:  # the store may be away for long, and the stream drops messages meanwhile
            with suppress(FloeError):  # the second call raises it, behind the put of what is left
                await ensure_durable(self._deps.client, self._partition)
        current = await self._current()
        self._report.follow(current.chain)
        archive = await self._open_archive(current)
        self._walk.follow(archive)
        self._expiry.position = lambda: max(archive.first, archive.end + 1)
        if self._unput is not None and self._unput.archive.chain != current.chain:
            await self._unput.log_and_discard()
            self._unput = None
        closing = await self.handover.closing(current)
        if closing.next is not None:
            await self._put_unput(lease)
            await self.handover.begin_next(current, closing)
            return
        if not await self._can_read_again():
            await self._put_unput(lease)
            return
        await ensure_durable(self._deps.client, self._partition)
        if (found := await self._judge(current, archive, closing, stop)) is None:
            return
        if found.verdict.is_same:
            await self._continue(found, lease, stop)
        elif found.verdict.kind in (VerdictKind.RECREATED, VerdictKind.GONE) or found.decision is not None:
            await self._put_unput(lease)  # into the history that it came from, before that is closed
            await self._end_incarnation(found, lease, stop)
        else:
            raise await self._stopped(found)

    async def _judge(self, current: Incarnation, archive: Archive, closing: Closing, stop: Stop) -> Findings | None:
        """Judge the stream. None if `stop` came first and no segment is left that would depend on the verdict."""
        judging = self.judge_stream(current, archive)
        answer = await (run_until_stopped(stop, judging) if self._unput is None else judging)
        if answer is None:
            return None
        evidence, verdict = answer
        verdict = self.handover.adopt_sibling_verdict(evidence, verdict, closing)
        self._report.record_verdict(evidence, verdict)
        return Findings(current, archive, evidence, verdict, closing)

    async def judge_stream(self, current: Incarnation, archive: Archive) -> tuple[Evidence, SourceVerdict]:
        document = identity_of(self._deps.state, current.chain)
        self.identity.record = stored = (await document.get())[0]
        received = None if self._unput is None else self._unput.received
        answer = await self.identity.judge_confirmed(current, archive, received, self._report.set_checking)
        if (record := remember(self.identity.record, *answer)) is not None and record != stored:
            await document.put(record)
        return answer

    async def _continue(self, found: Findings, lease: Lease, stop: Stop) -> None:
        source, decision = found.evidence.source, found.decision
        assert source is not None, "a stream that is the same exists"
        if self._unput is not None and source.retention != LIMITS:
            # It may be the last copy: deleting the durable of an interest stream removes its messages.
            await self._put_unput(lease)
            return
        self.discard()
        if decision is not None and self._partition.number not in decision.first:
            await self._close(found, lease, stop)
        elif not stop.is_set and await self.handover.reopen(found.current, found.closing):
            await self._read(ReadContext(found.current, found.archive, source), lease, stop)

    async def _end_incarnation(self, found: Findings, lease: Lease, stop: Stop) -> None:
        decision, source = found.decision, found.evidence.source
        halts = self._partition.settings.on_recreated == "halt"
        if source is None or (halts and decision is None):
            raise await self._stopped(found)
        if decision is None:
            await self._incarnations.check_interval(found.current.chain, source.first)
        await self._close(found, lease, stop)

    # Reading

    async def _read(self, context: ReadContext, lease: Lease, stop: Stop) -> None:
        """Run sessions from the position on, until `stop` is set, one ends, or an operator ends it.

        Holes that a walk found are filled before the archive is listed again: if its newest segment is gone, that
        listing is refused (E-LISTING). Raises LeaseLost and the errors of the servers.
        """
        find = self.identity.find_position
        position, before = await run_until_stopped(stop, find(context.archive, context.source)), None
        while position is not None and position != before:
            is_ended = await self._read_from(position, context, lease, stop)
            if stop.is_set or self._unput is not None or not (is_ended or position.fills_hole):
                return
            source = replace(await self.identity.source(), created=context.source.created)  # as judged
            context = replace(context, source=source)
            before, position = position, await run_until_stopped(stop, find(context.archive, source))
            if position is not None and not position.fills_hole:
                return

    async def _read_from(self, position: Position, context: ReadContext, lease: Lease, stop: Stop) -> bool:
        """Run one session. Return True if it was ended to fill a hole."""
        await context.archive.repair_tail()
        self._report.set_lost(sum(map(len, position.lost)))
        local_stop = Stop(stop)
        works = {"decisions": lambda: self._watch_decisions(context, local_stop)}
        if self._partition.number == 0:
            self._captures = StreamCapturer(self._deps, context.archive, context.source.created, lease)
            works["captures"] = self._captures.run
        if position.until is None:
            works["walk"] = lambda: self._watch_walk(context, local_stop)
        watches = self._start_side_tasks(**works)
        try:
            await self.read_at(position, context, lease, local_stop)
        finally:
            await cancel(*watches)
        return local_stop.reason is StopReason.RESET

    async def _watch_decisions(self, context: ReadContext, local_stop: Stop) -> None:
        while len(self._partition.settings.filters()) > 1 and not local_stop.is_set:
            await self._deps.clock.sleep(self._deps.tuning.intervals.check)
            try:
                if await self.handover.is_decided(context.current.chain, context.source.created):
                    local_stop.set(StopReason.DECISION)
            except FloeError as error:
                log.info("decision check deferred", action="decision_check_deferred", error=str(error))

    async def _watch_walk(self, context: ReadContext, local_stop: Stop) -> None:
        while not local_stop.is_set:
            await self._walk.walk_ended.wait()
            self._walk.walk_ended.clear()
            try:
                self._walk.add_holes(context.archive)
                source = replace(context.source, first=await self.identity.first_sequence())
                position = await self.identity.find_position(context.archive, source)
            except FloeError as error:
                log.info("hole check deferred", action="hole_check_deferred", error=str(error))
                await self._deps.clock.sleep(self._deps.tuning.intervals.check)
                self._walk.walk_ended.set()
                continue
            self._report.set_lost(sum(map(len, position.lost)))
            if position.fills_hole:
                log.info("hole found", action="hole_found", first=position.first, last=position.until)
                local_stop.set(StopReason.RESET)

    async def read_at(self, position: Position, context: ReadContext, lease: Lease, stop: Stop) -> None:
        resumed = None
        if self._partition.settings.sampling_key:
            resumed = await run_until_stopped(stop, self._resume(position, context))
            if resumed is None:
                return
        session = self._session = Session(self._deps, self.identity, context, position, lease, self._max_age, resumed)
        started = self._deps.clock.monotonic()
        self._end_turn()
        try:
            await session.run(stop)
        except StalePositionError as stale:
            chain_fields = context.archive.chain.log_context()
            log.info("position retaken", action="position_retaken", error=str(stale), **chain_fields)
            await self._pause(session, stop)
        except ReaderResetError as reset:
            self._report.record_reset(reset.reason, str(reset))
            self._unput = await session.take_unput()
            lasted = self._deps.clock.monotonic() - started
            self._max_age = None if session.put_count else max(MIN_MAX_AGE_S, min(lasted, self._max_age or lasted) / 2)
            await self._pause(session, stop)
        except asyncio.CancelledError:  # the drain took too long
            if session.received is not None and session.received.sequence > session.last_put:
                log_unarchived(context.archive, session.last_put + 1, session.received.sequence)
            raise
        except LeaseLost:
            # The holder of the lease reads the messages again; if the stream is gone by then, this is the last copy.
            self._unput = await session.take_unput()
            raise
        finally:
            self._session = None
            await session.close()

    async def read_up_to(
        self, last: int, judge: Callable[[], Awaitable[ReadContext]], lease: Lease, stop: Stop
    ) -> Archive:
        """Cover everything up to `last` that the stream still holds, and nothing after it; for commands. `judge`:
        returns the result of `judge_whole`.

        Raises the errors of `judge`, Unavailable if `stop` comes first or the lease is lost.
        """
        while not stop.is_set and not lease.lost.is_set:
            context = await judge()
            position = await self.identity.find_position(context.archive, context.source)
            if position.first > last:
                await context.archive.repair_tail()
                return context.archive
            until = last if position.until is None else min(position.until, last)
            bounded = Position(position.first, until, position.lost, is_end=position.until is None)
            await self.read_at(bounded, context, lease, stop)
        chain = self._partition.chain
        raise Unavailable(f"{chain}: stopped before it was read up to sequence {last}", hint="try again")

    async def judge_whole(self, current: Incarnation) -> ReadContext:
        """Return the archive with all holes, and the judged source, for `read_up_to`: no later session reads them.

        Raises Stopped if the stream is not the same.
        """
        archive = await self._open_archive(current)
        await archive.load_all()
        evidence, verdict = await self.judge_stream(current, archive)
        if not verdict.is_same or evidence.source is None:
            raise await self._stopped(Findings(current, archive, evidence, verdict))
        self.discard()
        return ReadContext(current, archive, evidence.source)

    async def _resume(self, position: Position, context: ReadContext) -> ResumedSampler:
        deps, chain = self._deps, context.current.chain
        await check_loop(self._partition, chain, deps.client)
        snapshots = SnapshotStore(deps.store, chain, clock=deps.clock)
        resuming = SamplerResume(self._partition, context.archive, position, context.source, snapshots, deps.store)
        return await resuming.run(deps.pools.io)

    async def _pause(self, session: Session, stop: Stop) -> None:
        if session.put_count:
            self._backoff.reset()
        else:
            await wait_for(stop, self._backoff.next_delay())

    async def _stopped(self, found: Findings) -> Stopped:
        proposal = await self.identity.proposal(found.current, found.archive, found.evidence, found.verdict)
        first = proposal and proposal.first
        return verdict_error(self._partition, found.current.chain, found.evidence, found.verdict, first)

    # The current incarnation

    async def _current(self) -> Incarnation:
        try:
            found = await self._incarnations.load()
        except Stopped:
            self._has_begun = False  # after a repartition, no durable of the former partitions is made
            raise
        if found is None:
            if (info := await self.identity.stream_info()) is None:
                raise no_stream_error(self._partition)
            check_start(info, self._partition.settings)
            raise_if_loop(self._partition, self._partition.chain, info)
            first = await first_sequence(self._deps.client, info, self._partition.settings)
            found = await self._incarnations.begin_first(info, first)
        elif self._partition.settings.is_set and not self._has_begun:
            context = self._partition.chain.log_context()
            log.info("start keys ignored", action="start_keys_ignored", hint="the feed has begun", **context)
        self._has_begun = True
        return found

    async def _open_archive(self, current: Incarnation) -> Archive:
        archive = await Archive.open(current, self._deps)
        await archive.load()
        self._report.set_damaged(archive.damaged)
        return archive

    @property
    def has_unput_rows(self) -> bool:
        """True if rows are left that were received and not put."""
        return self._unput is not None and self._unput.rows > 0

    async def _can_read_again(self) -> bool:
        """True if the stream still has the messages left of a session, or if none are left."""
        if (unput := self._unput) is None or not unput.rows or unput.received is None:
            return True
        return await self.identity.can_read_again(unput.received, unput.coverage.first)

    async def can_discard(self) -> bool:
        """True if the messages left of a session are archived, or still in the stream. Raises the errors of both."""
        return await self._can_read_again() or (self._unput is not None and await self._unput.is_archived())

    async def put_if_stream_gone(self) -> FloeError | None:
        """Put the messages left of a session if the stream is gone, without a lease: its holder reads nothing, and
        there may be no other copy. Raises the errors of the servers.

        Return the error that prevents it; None if nothing is left, or all of it is archived or in the stream.
        """
        while (unput := self._unput) is not None and unput.rows and await self.identity.is_gone():
            await self._deps.state.ensure()
            await unput.put_first(self._permit_if_gone)
        if unput is None or not unput.rows or await self.can_discard():
            return None
        # The stream is another one now, or was restored without them; its reader may be about to put others there.
        return Unavailable(
            f"{unput.archive.chain}: {unput.rows} messages of {unput.coverage} were received here, and are "
            "neither archived nor in the stream; another instance holds the lease",
            hint="stop that instance: this one then puts them where no others are archived, and names the next step",
            code="E-ROWS-UNARCHIVED",
        )

    async def _permit_if_gone(self) -> Callable[[], None]:
        """Return a check that raises Unavailable GONE_FRESH_S from now, raise it if the stream exists: a put that comes
        later could find it restored, and its sequences given to other messages.
        """
        until = self._deps.clock.monotonic() + GONE_FRESH_S

        def check(is_gone: bool = True) -> None:
            if not is_gone or self._deps.clock.monotonic() > until:
                raise Unavailable(f"{self._partition.stream} may exist again; nothing is put without the lease")

        check(await self.identity.is_gone())
        return check

    def log_and_discard(self) -> None:
        """Log the messages that are left and remove them; this process ends."""
        if (unput := self._unput) is not None and unput.rows:
            log_unarchived(unput.archive, unput.coverage.first, unput.coverage.last, rows=unput.rows)
        self.discard()

    async def _put_unput(self, lease: Lease) -> None:
        if self._unput is not None:
            await self._unput.put(lease)
            self._report.record_end(self._unput.archive.end)
        self._unput = None

    def discard(self) -> None:
        if self._unput is not None:
            self._unput.discard()
        self._unput = None

    # The end of an incarnation

    async def _close(self, found: Findings, lease: Lease, stop: Stop) -> None:
        source, decision = found.evidence.source, found.decision
        if (info := await self.identity.stream_info()) is None or source is None or info.created != source.created:
            return
        archive = await self._open_archive(found.current)
        if (first := self._next_first(archive, found.verdict, decision)) is None:
            raise await self._stopped(found)
        require_lease(lease, archive)
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
