"""One stretch of reading: a reader bound to one history, a segment being built, segments being put.

Three loops run side by side: encoding what the reader handed over, putting finished segments strictly one
after the other, and checking every now and then that the stream is still the same. None is cancelled in the
middle of a step: whatever ends the session is noted, each loop finishes its step and returns. So what was
received and not put is whole, and can still be put into the history that it came from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.clock import first_of, wait_for
from common.errors import FloeError, LeaseLost, OutcomeUnknown, Unavailable
from common.failpoints import failpoint
from common.jetstream.lease import Lease
from common.segments.parquet import SpooledSegment
from common.segments.segment import SegmentRef, Tip
from common.service.logs import get_logger
from common.settings.egress import FeedSettings
from egress.archive import Archive
from egress.backoff import Backoff
from egress.builder import Builder, Close, Closing, Emitted, Piece
from egress.draft import Draft
from egress.history import Incarnation
from egress.identity import Source
from egress.inquiry import Inquiry
from egress.ledger import before_first_gap, gone_before_read
from egress.parts import Parts, Pools
from egress.position import Position
from egress.reader import SECOND, DoubtError, Reader
from egress.report import FeedReport
from egress.tasks import end

T = TypeVar("T")

log = get_logger("egress.session")

QUEUE_BYTES = 24 * 2**20  # of memory waiting to be encoded; more would not make anything faster
AHEAD = 2  # finished segments waiting in the spool, the one being put included; then encoding waits


class RetakeError(Exception):
    """The position must be taken from the listing again; `reason` says why."""


class Session:
    """Reads `archive`'s chain from `place` on, until `stop` is set and everything is put, or it is ended.

    Used once. `source`: the stream as it was judged to be the same; `hurry`: as in `Builder`.
    """

    def __init__(
        self,
        parts: Parts,
        feed: FeedSettings,
        pools: Pools,
        report: FeedReport,
        inquiry: Inquiry,
        lease: Lease,
        archive: Archive,
        current: Incarnation,
        source: Source,
        place: Position,
        hurry: float | None = None,
    ) -> None:
        self._parts, self._feed, self._report = parts, feed, report
        self._pools, self._encoder = pools, pools.encoder
        self._inquiry, self._lease, self._archive, self._current = inquiry, lease, archive, current
        self._backoff = Backoff(parts.rng)
        self._fills_hole = place.until is not None
        self._known_source_first = source.first
        self._outbox: deque[Emitted] = deque()
        self._queued = 0
        self._sealed: deque[SpooledSegment] = deque()
        self._draft: Draft | None = None
        self._draft_charge = 0
        self._encoder_wake, self._putter_wake = asyncio.Event(), asyncio.Event()
        self._ended = asyncio.Event()
        self._end: BaseException | None = None
        self._is_all_sealed = False
        self.puts = 0
        self._account = parts.budget.account(lambda: self._reader.pull())
        self._builder = self._make_builder(source, place, hurry)
        self._reader = self._make_reader(source, place)

    def _make_builder(self, source: Source, place: Position, hurry: float | None) -> Builder:
        segment = self._feed.segment
        builder = Builder(
            Closing(segment.max_messages, segment.max_size, segment.max_age),
            self._parts.clock,
            self._account,
            self._emit,
            first=place.first,
            until=place.until,
            keep_ns=round(self._feed.max_age * SECOND),
            hurry=hurry,
        )
        builder.saw(source.last_timestamp_ns or 0)
        return builder

    def _make_reader(self, source: Source, place: Position) -> Reader:
        parts = self._parts
        return Reader(
            parts.client,
            self._feed.stream,
            source.created,
            self._builder,
            self._end_with,
            first=place.first,
            clock=parts.clock,
            window=parts.budget.window,
            has_room=self._has_room,
            filter_subject=self._feed.filter_subject,
            pulling=parts.tuning.pulling,
        )

    def _make_draft(self) -> Draft:
        return Draft(
            self._archive.chain,
            self._parts.store.new_spool,
            writer=self._parts.writer,
            compression_level=self._feed.segment.compression_level,
            filtered=bool(self._feed.filter_subject),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when all is put after `stop`. Raises what ended it: DoubtError, RetakeError, LeaseLost."""
        try:
            await self._reader.open()
            async with asyncio.TaskGroup() as tasks:
                side = [
                    tasks.create_task(self._watch(stop), name="watch"),
                    tasks.create_task(self._check_loop(), name="check"),
                ]
                working = [
                    tasks.create_task(self._encode_loop(stop), name="encode"),
                    tasks.create_task(self._put_loop(), name="put"),
                ]
                await asyncio.wait(working)
                await end(*side)
        finally:
            await self._reader.close()
        if self._end is not None:
            raise self._end

    def _end_with(self, cause: BaseException) -> None:
        """End the session; the first cause counts."""
        if self._end is None:
            self._end = cause
        self._ended.set()
        self._encoder_wake.set()
        self._putter_wake.set()

    # What is left after the end

    @property
    def received(self) -> Tip | None:
        """The tip of the last message received; None if there was none."""
        return None if self._builder.last is None else Tip.of(self._builder.last)

    async def seal(self) -> deque[SpooledSegment]:
        """Close what is open and hand over all that was received and not put. After `run` only."""
        await self._encoder.idle()
        self._builder.close(Close.DOUBT)
        while self._outbox:
            await self._encode_next()
        sealed, self._sealed = self._sealed, deque()
        return sealed

    async def close(self) -> None:
        """Give back memory and spool files. After `run` only."""
        self._account.close()
        await self._pools.idle()
        if self._draft is not None:
            self._draft.abort()
        for spooled in self._sealed:
            spooled.path.unlink(missing_ok=True)

    # Encoding

    def _has_room(self, size: int) -> bool:
        return self._queued < QUEUE_BYTES and self._parts.budget.has_room(size)

    def _emit(self, item: Emitted) -> None:
        self._queued += item.memory if isinstance(item, Piece) else 0
        self._outbox.append(item)
        self._encoder_wake.set()

    async def _encode_loop(self, stop: asyncio.Event) -> None:
        try:
            while not (self._ended.is_set() or self._is_all_sealed):
                self._encoder_wake.clear()
                if self._outbox and len(self._sealed) < AHEAD:
                    await self._encode_next()
                elif not self._outbox and (stop.is_set() or self._builder.is_done):
                    await self._drain()
                else:
                    self._tick()
                    await wait_for(self._encoder_wake, self._parts.tuning.pace.tick)
        except (FloeError, DoubtError) as error:
            self._end_with(error)

    async def _drain(self) -> None:
        """Stop reading and close the open segment; tell the putting when nothing is left to encode."""
        await self._reader.stop()
        self._builder.close(Close.DRAIN)
        if not self._outbox:
            self._all_is_sealed()

    def _all_is_sealed(self) -> None:
        self._is_all_sealed = True
        self._putter_wake.set()

    def _tick(self) -> None:
        self._builder.tick()
        self._reader.tick()
        if not self._outbox and self._account.is_largest() and not self._reader.has_room:
            # Nobody can ask for more, and nothing is on its way out of memory: let this segment go.
            self._builder.close(Close.MEMORY)

    async def _encode_next(self) -> None:
        item = self._outbox[0]
        first = await self._source_first() if isinstance(item, Piece) and item.missing else 1
        # Only now: what raises above must not lose the piece.
        self._outbox.popleft()
        self._queued -= item.memory if isinstance(item, Piece) else 0
        if isinstance(item, Close):
            await self._finish(item)
        elif self._fills_hole and gone_before_read(item, first):
            await self._cut(item)
        else:
            await self._add(item, first)
            self._account.release(item.memory)

    async def _cut(self, piece: Piece) -> None:
        """End the segment before what the source no longer holds.

        Under existing coverage nothing may be covered as gone: it was archived once.
        """
        await self._reader.stop()
        self._outbox.clear()
        leading = before_first_gap(piece)
        if leading is not None:
            await self._add(leading, 1)
        if self._draft is not None:
            await self._finish(Close.HOLE)
        self._all_is_sealed()

    async def _add(self, piece: Piece, source_first: int) -> None:
        if self._draft is None:
            self._draft = await self._encoder.run(self._make_draft)
        await self._encoder.run(self._draft.add, piece, source_first)
        self._charge_draft(self._draft.held)

    async def _source_first(self) -> int:
        """Asked anew for each piece with gaps; what is sealed after the end goes by the last answer."""
        if not self._ended.is_set():
            try:
                self._known_source_first = await self._inquiry.first()
            except (Unavailable, OutcomeUnknown) as error:
                raise DoubtError("unreachable", error.message) from error
        return self._known_source_first

    def _charge_draft(self, held: int) -> None:
        self._account.charge(held - self._draft_charge)
        self._draft_charge = held

    async def _finish(self, why: Close) -> None:
        assert self._draft is not None, "a segment closes behind its pieces"
        spooled = await self._encoder.run(self._draft.finish)
        self._draft = None
        self._charge_draft(0)
        failpoint("egress.sealed")
        self._sealed.append(spooled)
        self._report.sealed(spooled, why)
        self._putter_wake.set()

    # Putting

    async def _put_loop(self) -> None:
        try:
            while not self._ended.is_set():
                self._putter_wake.clear()
                if self._sealed:
                    await self._put(self._sealed[0])
                    self._sealed.popleft().path.unlink(missing_ok=True)
                    self._encoder_wake.set()
                elif self._is_all_sealed:
                    return
                else:
                    await self._putter_wake.wait()
        except (FloeError, DoubtError, RetakeError) as error:
            self._end_with(error)

    async def _put(self, spooled: SpooledSegment) -> None:
        started = self._parts.clock.monotonic()
        ref = await self._persist(lambda: self._put_checked(spooled))
        self._require_lease()
        await self._persist(self._archive.write_tail)
        await self._persist(self._archive.raise_mark)
        self.puts += 1
        self._report.put(spooled, self._parts.clock.monotonic() - started)
        log.info("segment put", action="segment_put", rows=spooled.footer.rows, **ref.log_context())

    async def _put_checked(self, spooled: SpooledSegment) -> SegmentRef:
        """Put what still belongs into this history, is not there yet, and is this instance's to put."""
        await self._reader.check()
        if await self._archive.is_covered(spooled.footer.coverage.first):
            raise RetakeError("another instance has covered it")
        self._require_lease()
        return await self._archive.put(spooled)

    def _require_lease(self) -> None:
        if not self._lease.is_usable():
            raise LeaseLost(f"lease of {self._archive.chain}: not renewed in time")

    async def _persist(self, step: Callable[[], Awaitable[T]]) -> T:
        """Do the step until it is done or the session ends; then raises what the step raised last."""
        while True:
            try:
                result = await step()
            except LeaseLost:
                raise
            except (Unavailable, OutcomeUnknown) as error:
                self._report.waits(error)
                if await wait_for(self._ended, self._backoff.next()):
                    raise
            else:
                self._backoff.reset()
                self._report.works()
                return result

    # Watching

    async def _watch(self, stop: asyncio.Event) -> None:
        await first_of(stop.wait(), self._lease.lost.wait())
        self._encoder_wake.set()
        await self._lease.lost.wait()
        self._end_with(
            LeaseLost(f"lease of {self._archive.chain}: another instance holds it, or it was not renewed")
        )

    async def _check_loop(self) -> None:
        while True:
            await self._parts.clock.sleep(self._parts.tuning.pace.check)
            try:
                evidence, verdict = await self._inquiry.look(self._current, self._archive, self.received)
                if not verdict.is_same:
                    self._end_with(DoubtError("identity", verdict.why))
                    return
                self._report.judged(evidence, verdict)
            except (Unavailable, OutcomeUnknown) as error:
                log.info("check put off", action="check_put_off", error=str(error))
