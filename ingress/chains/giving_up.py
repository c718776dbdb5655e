"""Gaps that a target goes on behind: decided, written down before its position moves, and watched for what
arrives behind them later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime

from common.chain import Chain
from common.clock import NS_PER_S, Clock
from common.segments.documents import ChainStore
from common.segments.gaps import MAX_TEXT, AcceptedGap
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from common.service.logs import get_logger
from common.settings.units import parse_time
from ingress import metrics
from ingress.chains.late import Decision, Patience, decide
from ingress.chains.plan import ChainPlan
from ingress.chains.search import LISTED, Surveyed, survey
from ingress.chains.store_clock import StoreClock

log = get_logger("ingress.chains.giving_up")

BY = "ingress"
WATCHED = 10  # gaps of a chain that one look behind it takes; the others have their turn next time


class GivingUp:
    """What one target gives up. Blocking."""

    def __init__(self, target: str, store: SegmentStore, documents: ChainStore, clock: Clock) -> None:
        self._target, self._store, self._documents = target, store, documents
        self._clock = StoreClock(documents.objects, documents.layout.ingress_clock(target), clock)
        self._passed: dict[Chain, deque[AcceptedGap]] = {}
        self._reported: set[str] = set()

    def decide(self, chain: Chain, plan: ChainPlan, patience: Patience) -> Decision:
        """What becomes of the hole of `plan`. Raises what the store raises."""
        assert plan.hole is not None, "only holes are decided about"
        first = plan.hole.first
        gaps = self._documents.gaps(chain, position=first)
        gaps += self._documents.passed_gaps(self._target, chain, position=first)
        return decide(plan, gaps, self._clock.now(plan.waiting_since or 0.0), patience)

    def give_up(self, chain: Chain, decision: Decision, damaged: AbstractSet[str]) -> Surveyed:
        """Look at everything once more, and write down what of the decision's part nothing covers.

        `damaged`: keys of segments that do not count. Raises what the store raises.
        """
        assert decision.part is not None, "what is given up is named"
        found = survey(self._store, chain, decision.part, damaged)
        if found.free is not None:
            self._pass(chain, found.free, decision.why)
        return found

    def _pass(self, chain: Chain, part: SequenceRange, why: str) -> None:
        """Write it down, count it and tell it, unless that was done before the position was stored."""
        gaps = self._gaps(chain)
        if any(gap.range == part for gap in gaps.copy()):
            return
        gap = AcceptedGap(part, why[:MAX_TEXT], BY, self._now())
        gaps.append(self._documents.pass_gap(self._target, chain, gap))
        metrics.lost_sequences.labels(self._target, chain.site, chain.feed, str(chain.partition)).inc(
            len(part)
        )
        context = chain.log_context()
        log.warning("gap passed", action="gap_passed", gap=str(part), why=why, target=self._target, **context)

    def pass_missing(self, chain: Chain, part: SequenceRange, missing: int, why: str) -> None:
        """Write down, count and tell that the target goes on though `missing` sequences of `part` are gone,
        unless that was done before: whoever begins again inside of it passes it again.
        """
        gaps = self._gaps(chain)
        if any(gap.range.encloses(part) for gap in gaps.copy()):
            return
        gap = AcceptedGap(part, why[:MAX_TEXT], BY, self._now(), from_hole=True)
        gaps.append(self._documents.pass_gap(self._target, chain, gap))
        metrics.lost_sequences.labels(self._target, chain.site, chain.feed, str(chain.partition)).inc(missing)
        log.warning(
            "missing sequences of a filled hole passed",
            action="gone_from_hole_passed",
            gap=str(part),
            missing=missing,
            why=why,
            target=self._target,
            **chain.log_context(),
        )

    def arrived(self, chain: Chain, position: int) -> list[tuple[AcceptedGap, SegmentRef]]:
        """Segments that arrived behind gaps of the chain that are passed (they end before `position`), each
        told once. Raises what the store raises.
        """
        gaps = self._gaps(chain)
        found = []
        for _ in range(min(WATCHED, len(gaps))):
            gap = gaps[0]
            gaps.rotate(-1)
            # In the range of one that was filled any merge stands; rows that come are `verify`'s to find.
            if gap.range.last < position and not gap.from_hole:
                found += [(gap, ref) for ref in self._behind(chain, gap) if self._is_news(ref)]
        return found

    def _behind(self, chain: Chain, gap: AcceptedGap) -> Iterator[SegmentRef]:
        since = parse_time(gap.at) / NS_PER_S if gap.at else 0.0
        for ref in self._store.list(chain, position=gap.range.first, limit=LISTED):
            # What was there before is damaged: otherwise it would have been carried.
            if ref.coverage.overlaps(gap.range) and ref.modified >= since:
                yield ref

    def _is_news(self, ref: SegmentRef) -> bool:
        is_news = ref.key not in self._reported
        self._reported.add(ref.key)
        return is_news

    def _gaps(self, chain: Chain) -> deque[AcceptedGap]:
        if chain not in self._passed:
            self._passed[chain] = deque(self._documents.passed_gaps(self._target, chain))
        return self._passed[chain]

    def _now(self) -> str:
        """By the store's clock, down to the second: some stores keep no more of when an object was stored."""
        now = datetime.fromtimestamp(int(self._clock.stamp()), UTC)
        return now.isoformat().replace("+00:00", "Z")
