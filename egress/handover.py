"""Handover of one partition from one incarnation to the next, together with the other partitions of the feed."""

from common.chain import Chain
from common.failpoints import failpoint
from common.logs import get_logger
from common.nats.api import StreamInfo
from common.nats.lease import Lease
from common.tasks import Stop, wait_for
from egress.archive import Archive
from egress.deps import PartitionDeps
from egress.identity import Evidence, SourceVerdict, VerdictKind, is_any_equal
from egress.incarnations import Closing, Closings, End, EndDecision, Incarnation, Incarnations, NextStream

log = get_logger(__name__)

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
        stream = NextStream(info.created, info.config)

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
