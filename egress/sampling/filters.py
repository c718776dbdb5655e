"""The filters between reading and the builder: they leave out messages, and report the advisories of their keys.

Reasons for leaving out, in this order: looped, too old, sampled out. A message that is looped or too old never
reaches the sampler. Nor does one that claims to be a copy (`egress.loops`): it passes, and is compared before it is
written.

`SamplingSession` is the sampling part of a session: it filters messages, tracks keys, sends advisories, and writes
snapshots. It starts with the result of `resume`. The session runs its loops (`background_loops`), checks for room,
reports the sequences that were put, and at a clean end lets it write the last snapshot.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate
from typing import Any

from common.archive.columns import Columns
from common.chain import Chain
from common.clock import NS_PER_S
from common.errors import FloeError
from common.logs import get_logger
from common.nats.api import ready_stream_info
from common.nats.headers import REPLAY_HEADER, SOURCE_HEADER, is_replayed, parse_provenances
from common.nats.lease import Lease
from common.sequences import MAX_SEQUENCE
from egress.advisories.advisory import Advisory
from egress.advisories.senders import AdvisorySender, sender_class
from egress.builder import CODE_LOOPED, CODE_SAMPLED_OUT, CODE_TOO_OLD, MessageBatch, SegmentBuilder
from egress.deps import PartitionDeps
from egress.evidence import source_of
from egress.identity import SourceStream
from egress.loops import LoopMarkers
from egress.partition import Position
from egress.report import SamplingReport
from egress.sampling.keys import SamplingSettings
from egress.sampling.resume import ResumedSampler
from egress.sampling.sampler import SampledBatch, Sampler
from egress.sampling.snapshot import Snapshot, SnapshotStore, SnapshotWriter

# Maps "is kept" (1 or 0) to the code of a message, and its code to 1 if it is still undecided.
_CODE_OF_KEPT = bytes([CODE_SAMPLED_OUT, 0]) + bytes(254)
_UNDECIDED = bytes([1]) + bytes(255)


@dataclass(eq=False)
class FeedFilter:
    """The filter of a feed that has `max_age`, is a relay or is sampled.

    `site`: messages that came through it are left out if `relay` is true. `max_age_ns`: messages older than this before
    the newest one seen are left out; 0 keeps all. `newest_ns`: the newest time seen so far, 0 if none was. `sampler`:
    None keeps all messages that the other filters pass. `loop_markers`: finds those that the sampler does not get.
    `sampled`: the sampler's result for the last batch, None if it was not called.
    """

    site: str
    _: KW_ONLY
    relay: bool = False
    max_age_ns: int = 0
    newest_ns: int = 0
    sampler: Sampler | None = None
    loop_markers: LoopMarkers | None = None
    sampled: SampledBatch | None = field(init=False, default=None)

    def observe_source_time(self, timestamp_ns: int) -> bool:
        """Record that the source holds a message as new as this. True if `max_age_ns` leaves out all seen before."""
        older = self.newest_ns
        self.newest_ns = max(older, timestamp_ns)
        return bool(self.max_age_ns) and timestamp_ns - self.max_age_ns > older

    def filter(self, columns: Columns) -> MessageBatch:
        """Filter received messages, at least one, in sequence order and after those of the last call."""
        codes, self.sampled = self._reject_codes(columns), None
        if codes is None:
            return self._apply_sampler(columns)
        rest = columns.select(codes.translate(_UNDECIDED))
        if self.sampler is None or not rest:
            return MessageBatch(columns, codes, rest)
        sampled = self._apply_sampler(rest)
        following = iter(sampled.codes)  # they take the places of zeros
        return MessageBatch(columns, bytearray(code or next(following) for code in codes), sampled.kept)

    def _reject_codes(self, columns: Columns) -> bytearray | None:
        """Return a code for each message, nonzero if it is left out before sampling; None if all are zero."""
        old = self._too_old_rows(columns)
        looped = self._looped_rows(columns)
        if not old and not looped:
            return None
        codes = bytearray(len(columns))
        for rows, code in ((old, CODE_TOO_OLD), (looped, CODE_LOOPED)):
            for row in rows:
                codes[row] = code
        return codes

    def _looped_rows(self, columns: Columns) -> list[int]:
        rows: list[int] = []
        for row, block in enumerate(columns.headers if self.relay else ()):
            if block is not None and SOURCE_HEADER in block:
                sites = [hop.site for hop in parse_provenances(block)]
                is_back = REPLAY_HEADER in block and is_replayed(block) and sites[:1] == [self.site]
                if self.site in sites and not is_back:
                    rows.append(row)
        return rows

    def _too_old_rows(self, columns: Columns) -> list[int]:
        times = columns.timestamps_ns
        before, self.newest_ns = self.newest_ns, max(self.newest_ns, max(times))
        if not self.max_age_ns or min(times) >= self.newest_ns - self.max_age_ns:
            return []
        newest = accumulate(times, max, initial=before)
        next(newest)
        pairs = enumerate(zip(times, newest, strict=True))
        return [row for row, (time, seen) in pairs if time < seen - self.max_age_ns]

    def _apply_sampler(self, columns: Columns) -> MessageBatch:
        if self.sampler is None:
            return MessageBatch.keep_all(columns)
        claiming_rows = [] if self.loop_markers is None else self.loop_markers.indexes(columns)
        self.sampled = sampled = _fold_without_claims(self.sampler, columns, claiming_rows)
        codes = bytes(sampled.kept).translate(_CODE_OF_KEPT)
        return MessageBatch(columns, codes, columns.select(sampled.kept, sampled.keys))


def _fold_without_claims(sampler: Sampler, columns: Columns, claiming_rows: list[int]) -> SampledBatch:
    if not claiming_rows:
        return sampler.fold(columns)
    shown = bytearray(b"\1") * len(columns)
    for row in claiming_rows:
        shown[row] = 0
    sampled = sampler.fold(columns.select(shown))
    kept, keys = iter(sampled.kept), iter(sampled.keys)
    return replace(
        sampled,
        kept=bytearray(next(kept) if each else 1 for each in shown),
        keys=[next(keys) if each else None for each in shown],
    )


class AdvisoryTracker:
    """The reporter of the sampler's advisories, which also advances the sampler's time.

    `advisories`: None if the feed has none; then the passing of time only makes the sampler forget keys.
    `reread_last`: a former session may have found the same advisories up to this sequence. `reread_until_ns`: after it
    had folded in all messages up to `reread_last`, that session may have advanced to this time; 0 if it had not.
    """

    def __init__(
        self, sampler: Sampler, advisories: AdvisorySender | None, reread_last: int, reread_until_ns: int = 0
    ) -> None:
        self._sampler, self._advisories = sampler, advisories
        self._reread_last, self._reread_until_ns, self._advanced_ns = reread_last, reread_until_ns, 0
        self.is_rereading = True

    def report(self, advisories: list[Advisory], *, may_be_sent: bool = False) -> None:
        if self._advisories is not None and advisories:
            self._advisories.enqueue(advisories, may_be_sent=may_be_sent or self.is_rereading)

    def advance_sequence(self, sequence: int) -> None:
        if self.is_rereading and sequence >= self._reread_last:
            self.advance(max(self._sampler.watermark_ns, self._reread_until_ns))
            self.is_rereading = False
            if self._advisories is not None:
                self._advisories.finish_reread()

    def advance(self, now_ns: int, *, may_be_sent: bool = False) -> None:
        """Advance the sampler to `now_ns`: no older message is still to come. `may_be_sent`: as in `report`."""
        if now_ns > self._advanced_ns:
            self._advanced_ns = now_ns
            self.report(self._sampler.advance(now_ns), may_be_sent=may_be_sent)


class FilterStage:
    """The filter stage of a feed that is not sampled, but has `max_age` or is a relay."""

    def __init__(self, builder: SegmentBuilder, feed_filter: FeedFilter) -> None:
        self._builder, self._feed_filter = builder, feed_filter

    def add_messages(self, columns: Columns) -> None:
        if not self._builder.is_done:
            self._builder.add_batch(self._feed_filter.filter(columns))

    def skip_to(self, sequence: int) -> None:
        self._builder.skip_to(sequence)


class SamplingStage:
    """The filter stage of a sampled feed, which writes from `position` on.

    `read_from`: messages from there up to the position are archived already, and are only folded in. `on_writing`:
    called once, when writing begins. `on_batch`: called before each batch that is written is filtered; `on_sampled`:
    after that.
    """

    def __init__(
        self,
        builder: SegmentBuilder,
        feed_filter: FeedFilter,
        tracker: AdvisoryTracker,
        position: Position,
        *,
        read_from: int,
        on_writing: Callable[[], None],
        on_batch: Callable[[], None],
        on_sampled: Callable[[SampledBatch], None],
    ) -> None:
        self._builder, self._feed_filter, self._tracker = builder, feed_filter, tracker
        self._on_writing, self._on_batch, self._on_sampled = on_writing, on_batch, on_sampled
        self._write_from, self._is_writing = position.first, False
        self._until = MAX_SEQUENCE if position.until is None else position.until
        #: The last sequence folded in, or known to hold nothing to fold.
        self.last_sequence = read_from - 1

    def begin(self) -> None:
        """Start the stage. Call it once, before the first message."""
        self._advance(self.last_sequence)

    def add_messages(self, columns: Columns) -> None:
        if count := bisect_left(columns.sequences, self._write_from):
            self._filter(columns.part(0, count))
            self._advance(columns.sequences[count - 1])
            columns = columns.part(count, len(columns))
        if columns and not self._builder.is_done:
            self._write(columns)

    def skip_to(self, sequence: int) -> None:
        self._builder.skip_to(sequence)
        self._advance(max(self.last_sequence, min(sequence, self._until)))

    def _filter(self, columns: Columns) -> MessageBatch:
        batch = self._feed_filter.filter(columns)
        if self._feed_filter.sampled is not None:
            self._tracker.report(self._feed_filter.sampled.advisories)
        return batch

    def _write(self, columns: Columns) -> None:
        self._begin_writing()
        last = min(columns.sequences[-1], self._until)
        if inside := columns.part(0, bisect_right(columns.sequences, last)):
            self._on_batch()
            batch = self._filter(inside)
            if self._feed_filter.sampled is not None:
                self._on_sampled(self._feed_filter.sampled)
            self._builder.add_batch(batch)
        if last < columns.sequences[-1]:
            self._builder.skip_to(last)
        self._advance(last)

    def _advance(self, sequence: int) -> None:
        if sequence >= self._write_from - 1:
            self._begin_writing()
        self.last_sequence = sequence
        self._tracker.advance_sequence(sequence)

    def _begin_writing(self) -> None:
        if not self._is_writing:
            self._is_writing = True
            self.last_sequence = self._write_from - 1
            self._on_writing()


log = get_logger(__name__)


class IdleClock:
    """The answers about the state of one stream, in the order in which they came."""

    def __init__(self) -> None:
        self._times: list[int] = []
        self._last = 0

    def has_unread(self, end: int) -> bool:
        return self._last > end

    def record_answer(self, last: int, now_ns: int) -> None:
        self._times, self._last = [*self._times[-1:], now_ns], last

    def forget(self) -> None:
        self._times, self._last = [], 0

    def idle_until(self, end: int) -> int | None:
        """Return the time (ns) up to which all messages are folded in, if all up to `end` are; None if unknown."""
        return self._times[0] if len(self._times) > 1 and not self.has_unread(end) else None


# Seconds at a clean end: for the queued advisories, and for the last snapshot.
ADVISORY_DRAIN_S = 3.0
LAST_SNAPSHOT_TIMEOUT_S = 5.0


class SamplingSession:
    """The sampling part of a session, which continues at `position` and fills `builder`. `source`: the stream in the
    state that was judged.
    """

    def __init__(
        self,
        deps: PartitionDeps,
        chain: Chain,
        lease: Lease,
        source: SourceStream,
        position: Position,
        resumed: ResumedSampler,
        builder: SegmentBuilder,
    ) -> None:
        feed = deps.partition.settings
        sampling = SamplingSettings.from_feed(feed)
        assert sampling is not None, "only a sampled feed is resumed"
        self._client, self._stream = deps.client, feed.stream
        self._clock, self._pace = deps.clock, deps.tuning.intervals
        self._chain, self._digest = chain, sampling.digest
        self._sampler, self._builder, self._source = resumed.sampler, builder, source
        self._report, self._advisories = SamplingReport(chain), None
        if feed.advisory.subject:
            self._advisories = sender_class(deps.partition)(
                deps.partition, chain, deps.client, deps.clock, deps.rng, resumed.outbox, lease.is_usable
            )
        self._feed_filter = FeedFilter(
            chain.site,
            relay=sampling.relay,
            max_age_ns=sampling.max_age_ns,
            newest_ns=resumed.newest_ns,
            sampler=resumed.sampler,
            loop_markers=LoopMarkers(chain),
        )
        # A former session may have read more than it put, and sent advisories for it. Reliable advisories in doubt
        # are compared with those stored, so the doubt covers all that the source holds; others in doubt are dropped,
        # so it covers only the archive.
        reread = position.first - 1, 0
        if feed.advisory.reliable:
            reread = max(position.first - 1, source.last), source.server_time_ns or 0
        self._tracker = AdvisoryTracker(resumed.sampler, self._advisories, *reread)
        # A segment that fills a hole is below existing snapshots: no snapshot is written for it.
        self._snapshot_writer = None
        if not position.fills_hole:
            snapshots = SnapshotStore(deps.store, chain, clock=deps.clock)
            interval, io = feed.snapshot_interval, deps.pools.io
            self._snapshot_writer = SnapshotWriter(snapshots, io, deps.clock, interval, self._report)
        self.stage = SamplingStage(
            builder,
            self._feed_filter,
            self._tracker,
            position,
            read_from=resumed.read_from,
            on_writing=self._on_writing,
            on_batch=self._freeze_if_due,
            on_sampled=lambda found: self._report.count_choices(found.missing, found.forced),
        )
        # Servers before 2.10 do not report their time: then the silence that a former session reported is unknown.
        self._doubts_silence = feed.advisory.reliable and not source.server_time_ns
        self._advanced_at, self._is_opening = deps.clock.monotonic(), False
        self.stage.begin()

    @property
    def has_room(self) -> bool:
        """True if more may be read; False while too many advisories wait to be stored (stop, don't skip)."""
        return self._advisories is None or self._advisories.has_room

    def tick(self) -> None:
        """Freeze a snapshot and advance time if they are due. Call it regularly, between two batches."""
        self._freeze_if_due()
        if self._clock.monotonic() - self._advanced_at >= self._pace.advance:
            self._advanced_at = self._clock.monotonic()
            self._tracker.advance(self._sampler.watermark_ns)
            self._report.set_tracked(self._sampler.value_count)

    # Snapshots

    def _freeze(self) -> Snapshot:
        position, newest_ns, state = self.stage.last_sequence + 1, self._feed_filter.newest_ns, self._sampler.freeze()
        outbox = () if self._advisories is None else self._advisories.pending()
        return Snapshot(self._chain, position, self._digest, newest_ns, state, outbox)

    def _freeze_if_due(self) -> None:
        if self._snapshot_writer is not None and self._snapshot_writer.is_due(self._builder.closed):
            self._snapshot_writer.schedule(self._freeze(), self._builder.closed)

    def flush(self) -> None:
        """Request a snapshot of the current state, because the open segment was closed on request."""
        if self._snapshot_writer is not None:
            self._snapshot_writer.request()
            self._freeze_if_due()

    def _on_writing(self) -> None:
        # Only from here on, so that a second reading filters as the first did.
        is_new_time = self._feed_filter.observe_source_time(self._source.last_timestamp_ns or 0)
        if is_new_time and self._snapshot_writer is not None:  # a time that no snapshot holds decides for `max_age`
            self._is_opening = True
            self._snapshot_writer.schedule(self._freeze(), self._builder.closed)
            self._snapshot_writer.mark_put(self.stage.last_sequence)

    async def wait_before_first_put(self) -> None:
        """Wait for the snapshot that must be stored before the first segment; return also if it failed."""
        if self._is_opening and self._snapshot_writer is not None:
            await self._snapshot_writer.wait_until_written()
            self._is_opening = False

    def mark_put(self, last: int) -> None:
        if self._snapshot_writer is not None:
            self._snapshot_writer.mark_put(last)

    async def finish(self) -> None:
        """Send the queued advisories and store a last snapshot: after the last put of a clean end, while loops run."""
        if self._advisories is not None and not self._tracker.is_rereading:
            await self._advisories.drain(ADVISORY_DRAIN_S)
        if (writer := self._snapshot_writer) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_SNAPSHOT_TIMEOUT_S):
                    writer.mark_put(self.stage.last_sequence)
                    await writer.wait_until_written()
                    writer.schedule(self._freeze(), self._builder.closed)
                    await writer.wait_until_written()

    # Loops

    def background_loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops that run beside reading until cancelled."""
        loops = [] if self._snapshot_writer is None else [self._snapshot_writer.run()]
        if self._advisories is not None:
            loops += [self._advisories.run(), self._advance_when_idle()]
        return loops

    async def _advance_when_idle(self) -> None:
        idle_clock = IdleClock()
        while True:
            await self._clock.sleep(self._pace.idle)
            if (until_ns := idle_clock.idle_until(self.stage.last_sequence)) is not None:
                self._tracker.advance(until_ns, may_be_sent=self._doubts_silence)
            if idle_clock.has_unread(self.stage.last_sequence):
                continue
            asked_ns = round(self._clock.now() * NS_PER_S)
            try:
                info = await ready_stream_info(self._client, self._stream)
            except FloeError:
                info = None
            source = None if info is None else source_of(info)
            if source is None or source.created != self._source.created:
                idle_clock.forget()
            else:
                idle_clock.record_answer(source.last, source.server_time_ns or asked_ns)
