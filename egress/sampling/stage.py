"""The sampling part of a session: it filters messages, tracks keys, sends advisories, and writes snapshots.

It starts with the result of `resume`. The session runs its loops (`background_loops`), checks for room, reports the
sequences that were put, and at a clean end lets it write the last snapshot.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from common.chain import Chain
from common.clock import NS_PER_S
from common.errors import FloeError
from common.logs import get_logger
from common.nats.api import ready_stream_info
from common.nats.lease import Lease
from egress.advisories.senders import sender_class
from egress.builder import SegmentBuilder
from egress.deps import PartitionDeps
from egress.evidence import source_of
from egress.identity import SourceStream
from egress.loops import LoopMarkers
from egress.partition import Position
from egress.report import SamplingReport
from egress.sampling.filters import AdvisoryTracker, FeedFilter, SamplingStage
from egress.sampling.keys import SamplingSettings
from egress.sampling.resume import ResumedSampler
from egress.sampling.snapshot import Snapshot, SnapshotStore, SnapshotWriter

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
                    writer.mark_put(self.stage.last_sequence)
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
