"""One stretch of reading: a reader bound to one history, a segment being built, segments being put.

Three loops run side by side: encoding what the reader handed over, putting finished segments, and checking
every now and then that the stream is still the same; `egress.sampling.stage` adds those of a sampled feed.
None of the three is cancelled in the middle of a step: whatever ends the session is noted, each loop finishes
its step and returns. So what was received and not put is whole, and can still be put into the history that it
came from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from common.chain import Chain
from common.clock import NS_PER_S, Backoff, Clock
from common.errors import FloeError, LeaseLost, OutcomeUnknown, Unavailable, Unforeseen
from common.jetstream.api import absent, next_message
from common.jetstream.lease import Lease
from common.segments.reader import SpooledSegment
from common.segments.segment import Tip
from common.sequences import SequenceRange
from common.service.logs import get_logger
from common.tasks import Stop, end, first_of, guarded, told, wait_for
from egress.acks import archived
from egress.archive import Archive
from egress.builder import Builder, Close, Emitted, Piece, SegmentLimits
from egress.deps import EgressDeps, Pools
from egress.encoder import Encoder, SegmentFile
from egress.evidence import Inquiry
from egress.identity import SourceStream
from egress.incarnations import Incarnation
from egress.loops import Loops
from egress.memory import MemoryAccount
from egress.partition import Partition, Position
from egress.reader import Reader, ReaderResetError, ReaderTarget
from egress.report import FeedReport
from egress.sampling.filters import PreFilter, Sifting
from egress.sampling.resume import Resumed
from egress.sampling.settings import Sampling
from egress.sampling.snapshot_store import Snapshots
from egress.sampling.stage import Sampled
from egress.uploader import RetakeError, Uploader, closed
from egress.watchdog import Liveness, SessionStanding

log = get_logger("egress.session")


def make_draft(deps: EgressDeps, partition: Partition, chain: Chain) -> SegmentFile:
    """The next segment of `chain`."""
    return SegmentFile(
        chain,
        deps.store.new_spool,
        writer=deps.writer,
        compression_level=partition.settings.segment.compression_level,
        filtered=bool(partition.filter_subject),
        sampling=Sampling.of(partition.settings),
        subject_statistics=deps.store.subject_statistics,
    )


def make_builder(
    partition: Partition,
    clock: Clock,
    account: MemoryAccount,
    emit: Callable[[Emitted], None],
    place: Position,
    hurry: float | None,
) -> Builder:
    """What builds segments from `place` on."""
    segment = partition.settings.segment
    return Builder(
        SegmentLimits(segment.max_messages, segment.max_size, segment.max_age),
        clock,
        account,
        emit,
        first=place.first,
        until=place.until,
        sampled=bool(partition.settings.sampling_key),
        hurry=hurry,
    )


def make_target(
    partition: Partition, source: SourceStream, builder: Builder, sampled: Sampled | None
) -> ReaderTarget:
    """Where received messages go: to the builder, through a sieve where some may be left out."""
    feed = partition.settings
    if sampled is not None:
        return sampled.target
    if not (feed.max_age or feed.relay):
        return builder
    keep_ns = round(feed.max_age * NS_PER_S)
    newest_ns = source.last_timestamp_ns or 0
    return Sifting(builder, PreFilter(partition.site, relay=feed.relay, keep_ns=keep_ns, newest_ns=newest_ns))


class Session:
    """Reads `archive`'s chain from `place` on, until `stop` is set and everything is put, or it is ended.

    Used once. `source`: the stream as it was judged to be the same; `hurry`: as in `Builder`. `resumed`,
    `snapshots`: of a sampled feed, which needs both; None for others.
    """

    def __init__(
        self,
        deps: EgressDeps,
        partition: Partition,
        pools: Pools,
        report: FeedReport,
        inquiry: Inquiry,
        lease: Lease,
        archive: Archive,
        current: Incarnation,
        source: SourceStream,
        place: Position,
        hurry: float | None = None,
        *,
        resumed: Resumed | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._deps, self._partition, self._pools, self._report = deps, partition, pools, report
        self._feed = partition.settings
        self._inquiry, self._lease, self._archive, self._current = inquiry, lease, archive, current
        self._first, self._known_source_first = place.first, source.first
        self._ended = Stop()
        self._end: BaseException | None = None
        self._is_all_sealed = False
        self._surplus_at: int | None = None
        self._loops = Loops(archive.chain, deps.client, partition.stream, deps.store, pools.io, report)
        # Whoever gives bytes back has all readers ask: what one of them raises ends its own session.
        pull = guarded(lambda: self._reader.pull(), self._end_with)
        self._account = deps.budget.account(pull)
        self._encoder = Encoder(
            pools.encoder,
            self._account,
            report,
            lambda: make_draft(deps, partition, archive.chain),
            self._source_first,
            self._gone,
            fills_hole=place.fills_hole,
            without_looped=self._without_looped,
        )
        self._builder = make_builder(partition, deps.clock, self._account, self._encoder.emit, place, hurry)
        self._sampled = None
        if partition.settings.sampling_key:
            assert resumed is not None, "a sampled feed goes on with its sampler"
            assert snapshots is not None, "and writes what becomes of it"
            self._sampled = Sampled(
                deps, partition, pools, lease, source, place, resumed, snapshots, self._builder
            )
        self._reader = self._make_reader(source, place, resumed.read_from if resumed else place.first)
        self._putter = Uploader(
            archive, lease, self._reader, self._ended, report, deps.clock, Backoff(deps.rng)
        )
        patience, segment_age = deps.tuning.pace.stalled, self._feed.segment.max_age
        self._liveness = Liveness(patience, segment_age, self._is_waiting, report, deps.clock)

    def _make_reader(self, source: SourceStream, place: Position, first: int) -> Reader:
        budget = self._deps.budget
        return Reader(
            self._deps.client,
            source.created,
            make_target(self._partition, source, self._builder, self._sampled),
            self._end_with,
            first=first,
            clock=self._deps.clock,
            window=budget.window,
            has_room=self._has_room,
            partition=self._partition,
            retention=source.retention,
            archived=archived(self._current.document.first, place),
            account=self._account,
            pulling=self._deps.tuning.pulling,
        )

    def _has_room(self, size: int) -> bool:
        """Whether `size` more bytes may be asked for."""
        is_held_up = self._sampled is not None and not self._sampled.has_room
        return not is_held_up and self._encoder.has_room and self._deps.budget.has_room(size)

    async def run(self, stop: Stop) -> None:
        """Returns when all is put after `stop`. Raises what ended it: ReaderResetError, RetakeError,
        LeaseLost.

        What nobody foresaw is raised too, as a group or as Unforeseen: nothing more is put then, and what was
        received is read again from the archive's position on.
        """
        try:
            await self._reader.open()
            if self._reader.is_durable:
                has_begun = self._archive.end > 0 or self._archive.chain.incarnation > 0
                self._report.durable(self._reader.lapsed, self._first, has_begun=has_begun)
            self._report.reading(self._archive.chain, self._first, self._archive.end)
            async with asyncio.TaskGroup() as tasks:
                side = [
                    tasks.create_task(self._watch(stop), name="watch"),
                    tasks.create_task(self._check_loop(), name="check"),
                    *(tasks.create_task(each, name="sampling") for each in self._side_of_sampling()),
                ]
                working = [
                    tasks.create_task(self._encode_loop(stop), name="encode"),
                    tasks.create_task(self._put_loop(), name="put"),
                ]
                await asyncio.wait(working)
                if self._sampled is not None and self._end is None and self._lease.is_usable():
                    await self._sampled.finish()
                await end(*side)
        finally:
            await self._reader.close()
        if self._end is not None:
            raise self._end

    def _side_of_sampling(self) -> list[Coroutine[Any, Any, None]]:
        return [] if self._sampled is None else self._sampled.side(self._inquiry.info)

    def _end_with(self, cause: BaseException) -> None:
        """End the session; the first cause counts."""
        if self._end is None:
            self._end = cause
        elif isinstance(cause, Unforeseen):
            told(cause, "feed", f"chain {self._archive.chain}")
        self._ended.set()
        self._encoder.wake.set()
        self._encoder.on_sealed.set()

    # What is left after the end

    @property
    def puts(self) -> int:
        """How many segments were put."""
        return self._putter.puts

    @property
    def received(self) -> Tip | None:
        """The tip of the last message received; None if there was none."""
        return None if self._builder.last is None else Tip.of(self._builder.last)

    async def seal(self) -> deque[SpooledSegment]:
        """Close what is open and hand over all that was received and not put. After `run` only.

        Of a builder that an error tore only what was finished before.
        """
        await self._pools.idle()
        self._builder.close(Close.DOUBT)
        await self._encoder.all()
        sealed, self._encoder.sealed = self._encoder.sealed, deque()
        return sealed

    async def close(self) -> None:
        """Give back memory and spool files. After `run` only."""
        self._account.close()
        await self._pools.idle()
        self._encoder.close()

    # The loops

    async def _encode_loop(self, stop: Stop) -> None:
        encoder = self._encoder
        try:
            while not (self._ended.is_set or self._is_all_sealed):
                encoder.wake.clear()
                self._tick()
                if not encoder.is_idle and not encoder.is_ahead:
                    if not await encoder.next():
                        await self._stop_reading()
                elif encoder.is_idle and (stop.is_set or self._builder.is_done or self._gives_back()):
                    await self._stop_reading()
                else:
                    # To the moment a segment closes by age: a tick later would be late on average by half.
                    await wait_for(encoder.wake, min(self._builder.due_in, self._deps.tuning.pace.tick))
        except (FloeError, ReaderResetError) as error:
            self._end_with(error)

    async def _stop_reading(self) -> None:
        """Stop reading and close the open segment; tell the putting when nothing is left to encode."""
        await self._reader.stop()
        self._builder.close(Close.DRAIN)
        if self._encoder.is_idle:
            self._is_all_sealed = True
            self._encoder.on_sealed.set()

    def _gives_back(self) -> bool:
        """Whether others wait for the lease, and a segment was put since or there is none to wait for."""
        if not self._lease.give_back.is_set:
            return False
        if self._surplus_at is None:
            self._surplus_at = self.puts
        return self.puts > self._surplus_at or not (self._builder.is_open or self._encoder.sealed)

    def _tick(self) -> None:
        self._builder.tick()
        self._reader.tick()
        if self._sampled is not None:
            self._sampled.tick()
            if not self._sampled.has_room:
                return
        if self._encoder.is_idle and self._account.is_largest() and not self._reader.has_room:
            # Nobody can ask for more, and nothing is on its way out of memory: let this segment go.
            self._builder.close(Close.MEMORY)

    async def _source_first(self) -> int:
        """Asked anew while the session runs; what is sealed after its end goes by the last answer."""
        if self._partition.filter_subject and self._reader.is_durable:
            return 1  # what lies below was acknowledged, by another partition perhaps: nobody can tell
        if not self._ended.is_set:
            try:
                self._known_source_first = await self._inquiry.first()
            except (Unavailable, OutcomeUnknown) as error:
                raise ReaderResetError("unreachable", error.message) from error
        return self._known_source_first

    async def _without_looped(self, piece: Piece) -> Piece:
        """Once the session has ended, what cannot be compared is archived as it is."""
        try:
            return await self._loops.without(piece)
        except FloeError as error:
            if self._ended.is_set:
                return piece
            if isinstance(error, Unavailable | OutcomeUnknown):
                raise ReaderResetError("unreachable", error.message) from error
            raise

    async def _gone(self, missing: Sequence[SequenceRange]) -> Sequence[SequenceRange]:
        """Which of the sequences that were not received the stream holds no more.

        A filtered consumer passes what it does not match, so the stream is asked for each of them; once the
        session has ended, what it does not answer is held to be gone.
        """
        if not self._partition.filter_subject:
            return missing
        gone: list[SequenceRange] = []
        try:
            for gap in missing:
                gone += await absent(self._deps.client, self._partition.stream, gap)
        except (Unavailable, OutcomeUnknown) as error:
            if self._ended.is_set:
                return missing
            raise ReaderResetError("unreachable", error.message) from error
        return gone

    async def _put_loop(self) -> None:
        sealed, on_sealed = self._encoder.sealed, self._encoder.on_sealed
        try:
            while not self._ended.is_set:
                on_sealed.clear()
                if sealed:
                    await self._put(sealed[0])
                    sealed.popleft().path.unlink(missing_ok=True)
                    self._encoder.wake.set()
                elif self._is_all_sealed:
                    return
                else:
                    await on_sealed.wait()
        except (FloeError, ReaderResetError, RetakeError) as error:
            self._end_with(error)

    async def _put(self, spooled: SpooledSegment) -> None:
        if self._sampled is not None:
            await self._sampled.before_first_put()
        await self._putter.put(spooled)
        if self._sampled is not None:
            self._sampled.covered(spooled.footer.coverage.last)

    async def _watch(self, stop: Stop) -> None:
        await first_of(stop.wait(), self._lease.lost.wait(), self._lease.give_back.wait())
        self._encoder.wake.set()
        await self._lease.lost.wait()
        chain = self._archive.chain
        self._end_with(LeaseLost(f"lease of {chain}: another instance holds it, or it was not renewed"))

    async def _check_loop(self) -> None:
        while not self._ended.is_set:
            await self._deps.clock.sleep(self._deps.tuning.pace.check)
            try:
                evidence, verdict = await self._inquiry.look(self._current, self._archive, self.received)
            except FloeError as error:
                log.info("check put off", action="check_put_off", error=str(error))
                continue
            self._report.judged(evidence, verdict)
            if not verdict.is_same:
                self._end_with(ReaderResetError("identity", verdict.why))
            elif (doubt := await self._look_for_next() or await self._look(evidence.source)) is not None:
                self._end_with(doubt)

    async def _look_for_next(self) -> ReaderResetError | None:
        """Whether somebody has begun the next incarnation; None too where that cannot be told."""
        try:
            return closed(self._archive) if await self._archive.is_closed() else None
        except FloeError as error:
            log.info("check put off", action="check_put_off", error=str(error))
            return None

    async def _look(self, source: SourceStream | None) -> ReaderResetError | None:
        """Whether the chain moves; None too where that cannot be told."""
        if source is None:
            return None
        standing = SessionStanding(
            self._reader.count,
            self._builder.end,
            self._archive.end,
            source.last,
            asks=self._reader.has_room,
            is_done=self._builder.is_done,
        )
        try:
            return await self._liveness.look(standing)
        except FloeError as error:
            log.info("check put off", action="check_put_off", error=str(error))
            return None

    async def _is_waiting(self, sequence: int) -> bool:
        """Whether the stream holds a message for the chain at or after `sequence`."""
        stream, filter_subject = self._partition.stream, self._partition.filter_subject
        return await next_message(self._deps.client, stream, sequence, filter_subject) is not None
