"""The sampling part of a session: it filters messages, tracks keys, sends advisories, and writes snapshots.

It starts with the result of `resume`. The session runs its loops (`side`), checks for room, reports the sequences
that were put, and at a clean end lets it write the last snapshot.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from common.chain import Chain
from common.clock import NS_PER_S
from common.errors import FloeError
from common.jetstream.api import StreamInfo
from common.jetstream.lease import Lease
from common.logs import get_logger
from egress.advisories.senders import sender_kind
from egress.builder import Builder
from egress.deps import PartitionDeps
from egress.evidence import source_of
from egress.identity import SourceStream
from egress.loops import Claims
from egress.partition import Position
from egress.report import SamplingReport
from egress.sampling.filters import PreFilter, SampledStretch, SamplingStage, Tracking
from egress.sampling.resume import Resumed
from egress.sampling.settings import Sampling
from egress.sampling.snapshot import Snapshot
from egress.sampling.snapshot_store import Saving, Snapshots

log = get_logger(__name__)


class Quiet:
    """The answers about the state of one stream, in the order in which they came."""

    def __init__(self) -> None:
        self._times: list[int] = []
        self._last = 0

    def waits(self, end: int) -> bool:
        return self._last > end

    def heard(self, last: int, now_ns: int) -> None:
        self._times, self._last = [*self._times[-1:], now_ns], last

    def forget(self) -> None:
        self._times, self._last = [], 0

    def until(self, end: int) -> int | None:
        """Return the time (ns) up to which all messages are folded in, if all up to `end` are; None if unknown."""
        return self._times[0] if len(self._times) > 1 and not self.waits(end) else None


# Seconds at a clean end: for the queued advisories, and for the last snapshot.
DRAIN_ADVISORIES = 3.0
LAST_SNAPSHOT = 5.0


class Sampled:
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
        resumed: Resumed,
        builder: Builder,
    ) -> None:
        feed = deps.partition.settings
        sampling = Sampling.of(feed)
        assert sampling is not None, "resumed is what is sampled"
        self._clock, self._pace = deps.clock, deps.tuning.pace
        self._chain, self._digest = chain, sampling.digest
        self._sampler, self._builder, self._source = resumed.sampler, builder, source
        self._report, self._advisories = SamplingReport(chain), None
        if feed.advisory.subject:
            self._advisories = sender_kind(deps.partition)(
                deps.partition, chain, deps.client, deps.clock, deps.rng, resumed.outbox, lease.is_usable
            )
        self._sieve = PreFilter(
            chain.site,
            relay=sampling.relay,
            keep_ns=sampling.max_age_ns,
            newest_ns=resumed.newest_ns,
            sampler=resumed.sampler,
            claims=Claims(chain),
        )
        # A former session may have read more than it put, and sent advisories for it. Reliable advisories in doubt
        # are compared with those stored, so the doubt covers all that the source holds; others in doubt are dropped,
        # so it covers only the archive.
        again = position.first - 1, 0
        if feed.advisory.reliable:
            again = max(position.first - 1, source.last), source.asked_ns or 0
        self._tracking = Tracking(resumed.sampler, self._advisories, *again)
        # A segment that fills a hole is below existing snapshots: no snapshot is written for it.
        self._saving = None
        if not position.fills_hole:
            snapshots = Snapshots(deps.store, chain, clock=deps.clock)
            interval, io = feed.snapshot_interval, deps.pools.io
            self._saving = Saving(snapshots, io, deps.clock, interval, self._report)
        self.target = SamplingStage(
            builder,
            self._sieve,
            self._tracking,
            SampledStretch(resumed.read_from, position.first, position.until, source.last_timestamp_ns or 0),
            on_writing=self._on_writing,
            on_batch=self._freeze_if_due,
            on_choices=lambda found: self._report.chose(found.missing, found.forced),
        )
        # Servers before 2.10 do not report their time: then the silence that a former session reported is unknown.
        self._doubts_silence = feed.advisory.reliable and not source.asked_ns
        self._advanced, self._is_opening = deps.clock.monotonic(), False
        self.target.begin()

    @property
    def has_room(self) -> bool:
        """True if more may be read; False while too many advisories wait to be stored (stop, don't skip)."""
        return self._advisories is None or self._advisories.has_room

    def tick(self) -> None:
        """Freeze a snapshot and advance time if they are due. Call it regularly, between two batches."""
        self._freeze_if_due()
        if self._clock.monotonic() - self._advanced >= self._pace.advance:
            self._advanced = self._clock.monotonic()
            self._tracking.advance(self._sampler.watermark_ns)
            self._report.tracks(self._sampler.values)

    # Snapshots

    def _freeze(self) -> Snapshot:
        position, newest_ns, state = self.target.end + 1, self._sieve.newest_ns, self._sampler.freeze()
        outbox = () if self._advisories is None else self._advisories.pending()
        return Snapshot(self._chain, position, self._digest, newest_ns, state, outbox)

    def _freeze_if_due(self) -> None:
        if self._saving is not None and self._saving.is_due(self._builder.closed):
            self._saving.hold(self._freeze(), self._builder.closed)

    def flush(self) -> None:
        """Request a snapshot of the current state, because the open segment was closed on request."""
        if self._saving is not None:
            self._saving.ask()
            self._freeze_if_due()

    def _on_writing(self, is_news: bool) -> None:
        if is_news and self._saving is not None:
            self._is_opening = True
            self._saving.hold(self._freeze(), self._builder.closed)
            self._saving.covered(self.target.end)

    async def before_first_put(self) -> None:
        """Wait for the snapshot that must be stored before the first segment; return also if it failed."""
        if self._is_opening and self._saving is not None:
            await self._saving.free()
            self._is_opening = False

    def covered(self, last: int) -> None:
        if self._saving is not None:
            self._saving.covered(last)

    async def finish(self) -> None:
        """Send the queued advisories and store a last snapshot: after the last put of a clean end, while loops run."""
        if self._advisories is not None and not self._tracking.is_again:
            await self._advisories.drain(DRAIN_ADVISORIES)
        if (saving := self._saving) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_SNAPSHOT):
                    saving.covered(self.target.end)
                    await saving.free()
                    saving.hold(self._freeze(), self._builder.closed)
                    saving.covered(self.target.end)
                    await saving.free()

    # Loops

    def side(self, ask: Callable[[], Awaitable[StreamInfo | None]]) -> list[Coroutine[Any, Any, None]]:
        """Return the loops that run beside reading until cancelled. `ask`: returns the state of the stream."""
        loops = [] if self._saving is None else [self._saving.run()]
        if self._advisories is not None:
            loops += [self._advisories.run(), self._let_time_pass(ask)]
        return loops

    async def _let_time_pass(self, ask: Callable[[], Awaitable[StreamInfo | None]]) -> None:
        quiet = Quiet()
        while True:
            await self._clock.sleep(self._pace.idle)
            if (until_ns := quiet.until(self.target.end)) is not None:
                self._tracking.advance(until_ns, again=self._doubts_silence)
            if quiet.waits(self.target.end):
                continue
            asked_ns = round(self._clock.now() * NS_PER_S)
            try:
                info = await ask()
            except FloeError:
                info = None
            source = None if info is None else source_of(info)
            if source is None or source.created != self._source.created:
                quiet.forget()
            else:
                quiet.heard(source.last, source.asked_ns or asked_ns)
