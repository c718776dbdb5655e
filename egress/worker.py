"""One partition of a feed, from the listing to the last put: decide what the stream is, take the position,
read, again.

Start, repair and take-over are one path. What a session leaves behind on a doubt is kept until the stream is
judged: the same, then it is thrown away and read again; another one or gone, then it is put into the history
that it came from, before that history is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from common.errors import Stopped
from common.jetstream.lease import Lease
from common.service.logs import get_logger
from common.tasks import again, either, end, orphaned, unless, watched
from egress.advisories.loop import refuse_loop
from egress.archive import Archive, Marks
from egress.consumers import LIMITS, check_start, hold
from egress.deps import Parts, Pools
from egress.expiry import Expiry
from egress.handover import Succession
from egress.identity import Evidence, Kind, Source, Verdict
from egress.incarnations import History, Incarnation
from egress.inquiry import Inquiry
from egress.partition import Slice
from egress.partitions.closing import Closing, Decision
from egress.partitions.unmatched import watch
from egress.reading import Reading, Stand
from egress.report import FeedReport
from egress.resolve.choices import never_begun, stopped_error
from egress.resolve.decisions import Acceptances
from egress.start import first_sequence, is_set
from egress.uploader import require
from egress.walking import Walk

log = get_logger("egress.worker")


@dataclass(frozen=True, slots=True)
class Found:
    """What a round found: where the chain is, how far its incarnation is with closing, what the stream is."""

    current: Incarnation
    archive: Archive
    closing: Closing
    evidence: Evidence
    verdict: Verdict

    @property
    def decision(self) -> Decision | None:
        """What an operator decided about the stream as it is now."""
        source = self.evidence.source
        return None if source is None else self.closing.decision_for(source.created)


class Worker:
    """Freezes one partition of a feed.

    `run` may be called again after whatever it raised; it goes on from the listing.
    """

    def __init__(self, part: Slice, parts: Parts, pools: Pools, report: FeedReport) -> None:
        self._slice, self._parts, self._pools, self._report = part, parts, pools, report
        self._chain = part.chain
        self._marks, self._acceptances = Marks(parts.state), Acceptances(parts.state)
        self._history = History(part, parts.chains, parts.objects, self._marks, pools.io, parts.clock)
        self._succession = Succession(part, parts, self._history, report)
        self._inquiry = Inquiry(part, parts, pools.io)
        self._walk = Walk(pools.io, parts.clock, parts.tuning.pace)
        self._reading = Reading(part, parts, pools, report, self._inquiry, self._succession, self._walk)
        self._expiry = Expiry(part, parts.client, report, parts.clock)
        self._has_begun = False

    async def run(self, lease: Lease, stop: asyncio.Event) -> None:
        """Freeze until `stop` is set or the lease is to be given back, and everything is put.

        Raises Stopped where only an operator can go on, LeaseLost, Unavailable and others for the caller to
        wait.
        """
        await self._parts.state.ensure()
        side = [watched(work, orphaned, name="monitor") for work in self._monitors()]
        try:
            async with either(stop, lease.give_back) as leaving:
                while not leaving.is_set() or self._reading.held is not None:
                    await self._round(lease, stop, leaving)
        finally:
            await end(*side)

    def _monitors(self) -> list[Coroutine[Any, Any, None]]:
        """What looks on beside the work, and tells the report; each for itself."""
        parts, clock = self._parts, self._parts.clock
        return [
            again(
                "unmatched",
                lambda: watch(self._slice, parts.client, self._pools.io, self._report, clock),
                clock,
            ),
            again("expiry", lambda: self._expiry.run(parts.tuning.pace.check), clock),
            again("walk", self._walk.run, clock),
        ]

    async def _round(self, lease: Lease, stop: asyncio.Event, leaving: asyncio.Event) -> None:
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
        await hold(self._parts.client, self._slice)
        found = await self._judge(current, archive, closing, leaving)
        if found is not None and found.verdict.is_same and found.evidence.source is not None:
            await self._go_on(found, found.evidence.source, lease, stop, leaving)
        elif found is not None:
            await self._turn(found, lease, leaving)

    async def _judge(
        self, current: Incarnation, archive: Archive, closing: Closing, leaving: asyncio.Event
    ) -> Found | None:
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
        return Found(current, archive, closing, evidence, verdict)

    async def _go_on(
        self, found: Found, source: Source, lease: Lease, stop: asyncio.Event, leaving: asyncio.Event
    ) -> None:
        """The stream is the same: read on, unless an operator lets the incarnation end."""
        if self._reading.held is not None and source.retention != LIMITS:
            # It may be the last copy: who removes the durable of an interest stream removes its messages.
            await self._put_held(lease)
            return
        self._discard_held()
        decision = found.decision
        if decision is not None and self._slice.partition not in decision.first:
            await self._close(found, source, decision, lease, leaving)
        elif not leaving.is_set() and await self._succession.reopen(found.current, found.closing):
            stand = Stand(found.current, found.archive, source)
            await self._reading.run(stand, lease, stop, leaving)

    async def _turn(self, found: Found, lease: Lease, leaving: asyncio.Event) -> None:
        """The stream is another one, or not what it was: end the incarnation where that may be done."""
        decision, source = found.decision, found.evidence.source
        if found.verdict.kind not in (Kind.RECREATED, Kind.GONE) and decision is None:
            raise await self._stopped(found)
        await self._put_held(lease)
        halts = self._slice.settings.on_recreated == "halt"
        if source is None or (halts and decision is None):
            raise await self._stopped(found)
        if decision is None:
            await self._history.check_interval(found.current.chain, source.first)
        await self._close(found, source, decision, lease, leaving)

    async def _stopped(self, found: Found) -> Stopped:
        """Why the chain stops, with the choices that there are."""
        proposal = await self._inquiry.proposal(found.current, found.archive, found.evidence, found.verdict)
        current = found.current
        return stopped_error(
            self._slice,
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
                raise never_begun(self._slice)
            check_start(info, self._slice.settings)
            refuse_loop(self._slice, self._chain, info)
            first = await first_sequence(self._parts.client, info, self._slice.settings, self._parts.clock)
            found = await self._history.begin(info, first)
        elif is_set(self._slice.settings) and not self._has_begun:
            log.info(
                "start keys ignored, the feed has begun", action="start_ignored", **self._chain.log_context()
            )
        self._has_begun = True
        return found

    async def _open_archive(self, current: Incarnation) -> Archive:
        archive = await Archive.of(current, self._parts, self._marks, self._pools.io)
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
        self, found: Found, source: Source, decision: Decision | None, lease: Lease, leaving: asyncio.Event
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

    def _next_first(self, archive: Archive, verdict: Verdict, decision: Decision | None) -> int | None:
        """Where the partition goes on in the next incarnation; None where an operator has yet to say so."""
        if decision is not None and self._slice.partition in decision.first:
            return decision.first[self._slice.partition]
        if verdict.is_same:
            return max(archive.end + 1, archive.first)
        return 1 if verdict.kind is Kind.RECREATED else None
