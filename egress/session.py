"""Session of reading: a reader bound to one history, a segment being built, segments being put.

    reader → filter → builder → encoder → uploader

Encoding, uploading and a check that the stream is still the same run side by side; `egress.sampling.filters` adds the
parts for a sampled feed. None of them is cancelled in the middle of a step: the cause that ends the session is noted,
and each loop finishes its step and returns. So the messages that were received and not put are complete, and can still
be put into the history that they came from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from common.archive.segment import Tip
from common.archive.writer import SpooledSegment
from common.chain import Chain
from common.clock import NS_PER_S, sleep_in_step
from common.errors import FloeError, LeaseLost, Stopped, UnexpectedError
from common.logs import get_logger
from common.nats.api import next_message
from common.nats.lease import Lease
from common.tasks import Stop, StopReason, cancel, record_unexpected, report_errors
from egress.archive import Archive
from egress.builder import ClosedBy, SegmentBuilder
from egress.consumers import ReaderResetError, archived_ranges
from egress.deps import PartitionDeps
from egress.encoder import Encoder, SourceQueries
from egress.evidence import IdentityCheck
from egress.identity import SourceStream
from egress.incarnations import Incarnation
from egress.partition import Position
from egress.reader import Reader, ReaderTarget
from egress.sampling.filters import FeedFilter, FilterStage, SamplingSession
from egress.sampling.resume import ResumedSampler
from egress.uploader import StalePositionError, UnputSegments, Uploader, closed_error
from egress.watchdog import Liveness, ProgressCheck, SessionProgress

log = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadContext:
    """Basis of a session: the incarnation, its archive, and the stream as it was judged."""

    current: Incarnation
    archive: Archive
    source: SourceStream


@dataclass(frozen=True, slots=True)
class SessionFlush:
    """State of a session when it was flushed. `last`: the last sequence it had accounted for."""

    session: Session
    chain: Chain
    last: int

    @property
    def is_stored(self) -> bool:
        """True if everything that it held is put."""
        return self.session.last_put >= self.last

    @property
    def is_over(self) -> bool:
        """True if the session puts nothing any more; the rest is read again, or put by its successor."""
        return self.session.has_ended


class Session:
    """Reading from `position` on, until `stop` is set and everything is put, or it is ended. Used once.

    `max_age`: as in `SegmentBuilder`. `resumed`: the sampler of a sampled feed, None for others.
    """

    def __init__(
        self,
        deps: PartitionDeps,
        identity: IdentityCheck,
        context: ReadContext,
        position: Position,
        lease: Lease,
        max_age: float | None = None,
        resumed: ResumedSampler | None = None,
    ) -> None:
        self._deps, self._identity, self._context, self._lease = deps, identity, context, lease
        self._partition, self._report, self._archive = deps.partition, deps.report, context.archive
        self._position, self._ended = position, Stop()
        self._cause: BaseException | None = None
        self._unarchivable: Stopped | None = None  # a message that cannot be archived: the messages before it are put
        self._is_all_sealed, self.has_ended = False, False
        self._puts_at_hand_over: int | None = None  # number of puts when others began to wait
        # A release of bytes makes other readers pull: an error of one of them ends its own session.
        pull = report_errors(lambda: self._reader.pull(), self._end_with)
        self._account = account = deps.budget.account(pull, self._wake)
        chain, segment, sampled = context.archive.chain, self._partition.settings.segment, resumed is not None
        queries = SourceQueries(deps, chain, context.source, identity, self._ended)
        self._encoder = Encoder(deps, chain, account, queries, fills_hole=position.fills_hole)
        emit, wake = self._encoder.emit, self._wake
        self._builder = SegmentBuilder(
            segment, deps.clock, account, emit, position, sampled=sampled, max_age=max_age, on_due=wake
        )
        self._sampled = None
        if resumed is not None:
            self._sampled = SamplingSession(deps, chain, lease, context.source, position, resumed, self._builder)
        self._reader = Reader(
            deps,
            context.source,
            self._target(),
            self._reader_ended,
            first=resumed.read_from if resumed else position.first,
            archived=archived_ranges(context.current.document.first, position),
            account=account,
            has_room=self._has_room,
        )
        self._uploader = Uploader(deps, self._archive, lease, self._reader, self._ended)
        progress = ProgressCheck(deps.tuning.intervals.stalled, segment.max_age, deps.clock.monotonic())
        self._liveness = Liveness(progress, self._has_message_from, deps.report, deps.clock)

    def _target(self) -> ReaderTarget:
        feed = self._partition.settings
        if self._sampled is not None:
            return self._sampled.stage
        if not (feed.max_age or feed.relay):
            return self._builder
        max_age_ns, newest_ns = round(feed.max_age * NS_PER_S), self._context.source.last_timestamp_ns or 0
        feed_filter = FeedFilter(self._partition.site, relay=feed.relay, max_age_ns=max_age_ns, newest_ns=newest_ns)
        return FilterStage(self._builder, feed_filter)

    def _has_room(self, size: int) -> bool:
        is_held_up = self._sampled is not None and not self._sampled.has_room
        return not is_held_up and self._encoder.has_room and self._account.has_room(size)

    async def run(self, stop: Stop) -> None:
        """Read until `stop` is set and everything is put. Raises the cause of another end: ReaderResetError,
        StalePositionError, LeaseLost, or Stopped before a message that cannot be archived.

        Raises unexpected errors too, as a group or as UnexpectedError. Then nothing more is put, and the messages
        received are read again from the archive's position on.
        """
        first, end_before = self._position.first, self._archive.end
        forget = self._deps.client.add_listener(lambda _is_up: self._wake())
        try:
            await self._reader.open()
            if self._reader.is_durable:
                has_begun = end_before > 0 or self._archive.chain.incarnation > 0
                self._report.record_durable(self._reader.interest_lapse, first, has_begun=has_begun)
            self._report.set_open_segment(lambda: self._builder.open_segment)
            self._report.set_reading(self._archive.chain, first, end_before, self._archive.first)
            async with asyncio.TaskGroup() as tasks:
                sampling = [] if self._sampled is None else self._sampled.background_loops()
                works = self._wake_on_stop(stop), self._watch_lease(), self._check(), *sampling
                side_tasks = [tasks.create_task(work) for work in works]
                encoding = tasks.create_task(self._encode(stop), name="encode")
                uploading = tasks.create_task(self._upload(), name="put")
                await asyncio.wait((encoding, uploading))
                if self._sampled is not None and self._cause is None and self._lease.is_usable():
                    await self._sampled.finish()
                await cancel(*side_tasks)
        finally:
            self.has_ended = True
            forget()
            self._report.set_open_segment()
            await self._reader.close()
        if (cause := self._cause or self._unarchivable) is not None:
            raise cause

    async def _encode(self, stop: Stop) -> None:
        encoder = self._encoder
        try:
            while not (self._ended.is_set or self._is_all_sealed):
                encoder.wake_event.clear()
                self._tick()
                if not encoder.is_idle and not encoder.is_spool_full:
                    if not await encoder.encode_next():
                        await self._stop_reading()
                elif encoder.is_idle and (self._builder.is_done or self._unarchivable or self._drains(stop)):
                    await self._stop_reading()
                else:
                    # A timer that sets the event costs a tenth of a task that waits for a while.
                    timer = asyncio.get_running_loop().call_later(self._due_in(stop), self._wake)
                    await encoder.wake_event.wait()
                    timer.cancel()
        except (FloeError, ReaderResetError) as error:
            self._end_with(error)

    def _due_in(self, stop: Stop) -> float:
        """Return the seconds until something is due that does not wake this session, so that an idle one needs no tick.

        A segment closes by age at its moment: with ticks it would be late by half a tick on average.
        """
        ticks = self._sampled is not None or stop.is_set
        return min(self._builder.due_in, self._deps.tuning.intervals.tick if ticks else self._reader.silent_in)

    def _wake(self) -> None:
        self._encoder.wake_event.set()

    def _tick(self) -> None:
        self._builder.tick()
        self._reader.tick()
        if self._sampled is not None:
            self._sampled.tick()
            if not self._sampled.has_room:
                return
        if self._encoder.is_idle and not self._reader.has_room and self._account.is_largest():
            # No reader can request more, and nothing is leaving memory: close this segment.
            self._builder.close(ClosedBy.MEMORY)

    def flush(self, incarnation: int | None, least: int) -> SessionFlush | None:
        """Close the open segment now, as its age would; a range that it covers without rows becomes a segment too.

        Return None, and close nothing, while this is the incarnation and `least` is not received yet.
        """
        if self._archive.chain.incarnation == incarnation and self._builder.end < least:
            return None
        flush = SessionFlush(self, self._archive.chain, self._builder.end)
        self._builder.close(ClosedBy.FLUSH)
        if self._sampled is not None:
            self._sampled.flush()
        return flush

    def _drains(self, stop: Stop) -> bool:
        if stop.reason is None or stop.reason is StopReason.LEASE_LOST:
            return False
        if stop.reason is not StopReason.GIVE_BACK:
            return True
        if self._puts_at_hand_over is None:
            self._puts_at_hand_over = self.put_count
        return self.put_count > self._puts_at_hand_over or not (self._builder.is_open or self._encoder.sealed)

    async def _stop_reading(self) -> None:
        await self._reader.stop()
        self._builder.close(ClosedBy.DRAIN)
        if self._encoder.is_idle:
            self._is_all_sealed = True
            self._encoder.sealed_event.set()

    async def _upload(self) -> None:
        sealed, sealed_event = self._encoder.sealed, self._encoder.sealed_event
        try:
            while not self._ended.is_set:
                sealed_event.clear()
                if sealed:
                    await self._put(sealed[0])
                    sealed.popleft().path.unlink(missing_ok=True)
                    self._wake()
                elif self._is_all_sealed:
                    return
                else:
                    await sealed_event.wait()
        except (FloeError, ReaderResetError, StalePositionError) as error:
            self._end_with(error)

    async def _put(self, spooled: SpooledSegment) -> None:
        if self._sampled is not None:
            await self._sampled.wait_before_first_put()
        await self._uploader.put(spooled)
        if self._sampled is not None:
            self._sampled.mark_put(spooled.footer.coverage.last)

    # Ends of the session

    async def _wake_on_stop(self, stop: Stop) -> None:
        await stop.wait()
        self._wake()

    async def _watch_lease(self) -> None:
        await self._lease.lost.wait()
        chain = self._archive.chain
        self._end_with(LeaseLost(f"lease of {chain}: another process holds it, or it was not renewed"))

    async def _check(self) -> None:
        while not self._ended.is_set:
            await sleep_in_step(self._deps.clock, self._deps.tuning.intervals.check)
            if (source := await self._none_on_error(self._check_stream())) is not None:
                if await self._none_on_error(self._archive.has_successor()):  # another instance has begun the next one
                    self._end_with(closed_error(self._archive))
                await self._none_on_error(self._check_progress(source))

    async def _none_on_error(self, check: Awaitable[T]) -> T | None:
        """Return the result of `check`; None also if it is not available now: it is retried later."""
        try:
            return await check
        except FloeError as error:
            log.info("stream check deferred", action="check_deferred", error=str(error))
            return None

    async def _check_stream(self) -> SourceStream | None:
        """Return the stream; None if the session ends because it is another one."""
        evidence, verdict = await self._identity.judge_once(self._context.current, self._archive, self.received)
        self._report.record_verdict(evidence, verdict)
        if verdict.is_same:
            return evidence.source
        self._end_with(ReaderResetError("identity", verdict.reason))
        return None

    async def _check_progress(self, source: SourceStream) -> None:
        reached = self._reader.count, self._builder.end, self._archive.end
        progress = SessionProgress(*reached, source.last, self._reader.has_room, self._builder.is_done)
        if (reset := await self._liveness.check(progress)) is not None:
            self._end_with(reset)

    async def _has_message_from(self, sequence: int) -> bool:
        stream, filter_subject = self._partition.stream, self._partition.filter_subject
        return await next_message(self._deps.client, stream, sequence, filter_subject) is not None

    def _reader_ended(self, cause: Exception) -> None:
        self._unarchivable = cause if isinstance(cause, Stopped) else None
        if self._unarchivable is None:
            self._end_with(cause)
        self._wake()

    def _end_with(self, cause: BaseException) -> None:
        if self._cause is None:
            self._cause = cause
        elif isinstance(cause, UnexpectedError):
            record_unexpected(cause, "feed", f"chain {self._archive.chain}")
        self._ended.set(StopReason.RESET)
        self._wake()
        self._encoder.sealed_event.set()

    # After the end

    @property
    def last_put(self) -> int:
        """Last sequence put of those that this session reads."""
        return max(self._position.first - 1, self._uploader.last_put)

    @property
    def put_count(self) -> int:
        return self._uploader.put_count

    @property
    def received(self) -> Tip | None:
        """Tip of the last message received; None if there was none."""
        return None if self._builder.last is None else Tip.of(self._builder.last)

    async def take_unput(self) -> UnputSegments:
        """Close the open segment and return everything that was received and not put. After `run` only.

        If an error left the builder inconsistent, only the segments finished before are returned.
        """
        await self._deps.pools.idle()
        self._builder.close(ClosedBy.RESET)
        await self._encoder.encode_all()
        sealed, self._encoder.sealed = self._encoder.sealed, deque()
        return UnputSegments(self._archive, sealed, self.received)

    async def close(self) -> None:
        """Release memory and spool files. After `run` only."""
        self._account.close()
        await self._deps.pools.idle()
        self._encoder.close()
