"""Finds out what there is of a chain: where it begins, which stretches continue from where it stands, and
what becomes of its holes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import UTC, datetime

from common.chain import Chain
from common.clock import NS_PER_S, Clock
from common.errors import FloeError, Stopped
from common.segments.documents import MAX_TEXT, AcceptedGap, ChainDocument, ChainStore
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, Stretch
from common.service.logs import get_logger
from common.service.process import Threads
from common.settings.types import parse_time
from ingress import hints, metrics
from ingress.chains.chain_state import ChainRegistry, ChainState
from ingress.chains.plan import ChainPlan, GapAction, GapDecision, GapPolicy, Phase, decide, first_position
from ingress.chains.search import LISTED, StoreClock, Surveyed, has_news, look, survey
from ingress.chains.starts import Beginning, Starts
from ingress.errors import passes_by_itself
from ingress.rows.decoder import FromHole, Relays

log = get_logger("ingress.chains.locate")


BY = "ingress"
WATCHED = 10  # gaps of a chain that one look behind it takes; the others have their turn next time


class GivingUp:
    """What one target gives up. Blocking."""

    def __init__(self, target: str, store: SegmentStore, documents: ChainStore, clock: Clock) -> None:
        self._target, self._store, self._documents = target, store, documents
        self._clock = StoreClock(documents.objects, documents.layout.ingress_clock(target), clock)
        self._passed: dict[Chain, deque[AcceptedGap]] = {}
        self._reported: set[str] = set()

    def decide(self, chain: Chain, plan: ChainPlan, patience: GapPolicy) -> GapDecision:
        """What becomes of the hole of `plan`. Raises what the store raises."""
        assert plan.hole is not None, "only holes are decided about"
        first = plan.hole.first
        gaps = self._documents.gaps(chain, position=first)
        gaps += self._documents.passed_gaps(self._target, chain, position=first)
        return decide(plan, gaps, self._clock.now(plan.waiting_since or 0.0), patience)

    def give_up(self, chain: Chain, decision: GapDecision, damaged: AbstractSet[str]) -> Surveyed:
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


class SegmentLocator:
    """Reads documents and listings for the lanes of one target. `positions`: what is stored for good, now."""

    def __init__(
        self,
        target: str,
        roster: ChainRegistry,
        store: SegmentStore,
        documents: ChainStore,
        relays: Relays,
        threads: Threads,
        clock: Clock,
        positions: Callable[[], Mapping[Chain, int]],
    ) -> None:
        self._target, self._positions = target, positions
        self._roster, self._store, self._documents, self._relays = roster, store, documents, relays
        self._threads, self._clock = threads, clock
        self._starts = Starts(target, store, documents, clock)
        self.giving_up = GivingUp(target, store, documents, clock)

    async def finds(self, lane: ChainState) -> bool:
        """Whether there is a stretch to read next, or one to pass.

        Raises Stopped and DataError where only an operator can help the chain, and what the store raises.
        """
        if not lane.has_begun and not await self._begin(lane):
            return False
        if lane.look_behind:
            await self._look_behind(lane)
        if not lane.has_begun:
            return False  # it was made to begin anew meanwhile
        if not lane.stretches and lane.given_up is None:
            await self._look(lane)
        return bool(lane.stretches) or lane.given_up is not None

    async def read_previous(self) -> None:
        """Read the `stream.json` of incarnations of which it is not known yet.

        One that cannot be read keeps back its own incarnation only; told once for each reason.
        """
        for chain in self._roster.needs_previous():
            try:
                document = await self._threads.run(self._documents.read_stream, chain)
            except FloeError as error:
                self._unread(chain, error)
                continue
            if document is not None:
                self._roster.set_previous(chain, document.previous, self._positions())

    def _unread(self, chain: Chain, error: FloeError) -> None:
        if self._roster.cannot_read(chain, f"stream.json cannot be read: {error.message}"):
            tell = log.warning if passes_by_itself(error) else log.error
            tell("stream.json unread", action="document_unread", error=str(error), **chain.log_context())

    # Beginning

    async def _begin(self, lane: ChainState) -> bool:
        """Find out where the chain begins, and what it leaves out before that; whether it is known."""
        archived = lane.archived
        if lane.unreached and lane.unreached == archived:
            return False
        lane.waits_for = self._roster.obstacle(lane, self._positions())
        document = None if lane.waits_for else await self._read_chain(lane)
        if document is None:
            return False
        floor = await self._threads.run(self._documents.read_floor, lane.chain)
        first = first_position(document.first, floor)
        if not self._is_current(lane):
            return False  # the positions are others now: where it stands is no question, perhaps
        self._roster.check_may_begin(lane.chain, first)
        start = await self._resolved(lane, first)
        lane.waits_for, lane.unreached = start.waits_for, archived if start.waits_for else 0
        if start.sequence:
            lane.begins(first, start.sequence)
            context = lane.chain.log_context()
            log.info("chain begins", action="chain_begins", position=start.sequence, **context)
        return lane.has_begun

    async def _resolved(self, lane: ChainState, first: int) -> Beginning:
        source, positions = self._roster.source(lane.chain), dict(self._positions())
        return await self._threads.run(self._starts.resolve, lane.chain, source, first, lane.end, positions)

    def _is_current(self, lane: ChainState) -> bool:
        """Whether the lane was not made anew meanwhile: what was found for it counts for nobody then."""
        return self._roster.get(lane.chain) is lane

    async def _read_chain(self, lane: ChainState) -> ChainDocument | None:
        document = await self._threads.run(self._documents.read_chain, lane.chain)
        if document is None:
            lane.waits_for = "chain.json is not there yet"
        else:
            self._relays.note(lane.chain, document)
        return document

    # Looking

    async def _look(self, lane: ChainState) -> None:
        """List from the position; where a hole or damage keeps the chain waiting, see what becomes of it."""
        if lane.is_done:
            lane.looked(ChainPlan(Phase.DONE), self._clock.monotonic())
            return
        plan = (await self._standing(lane, await self._plan(lane))).since(lane.plan)
        if not plan.waits:
            lane.looked(plan, self._clock.monotonic())
            return
        plan = await self._with_end(lane, plan)
        lane.looked(plan, self._clock.monotonic())
        await self._settle(lane, plan)

    async def _standing(self, lane: ChainState, plan: ChainPlan) -> ChainPlan:
        """`plan`; late where the lane stands at a hole filled in part, as long as nothing has come."""
        gone, lane.gone = lane.gone, None
        if gone is None or not plan.stretches or plan.stretches[0].segment.key != gone.segment.key:
            return plan
        if gone.rows.first != lane.position or await self._threads.run(has_news, self._store, gone):
            return plan
        lane.gone = gone
        since = lane.stands_since[1] if lane.stands_since else gone.segment.modified
        return ChainPlan(Phase.LATE, (), gone.rows, since, plan.beyond)

    async def _plan(self, lane: ChainState) -> ChainPlan:
        # Whoever asks for it meanwhile asks for another look; one that fails is made again everywhere.
        wanted, lane.look_everywhere = lane.look_everywhere, False
        plan = await self._threads.run(
            look,
            self._store,
            lane.chain,
            lane.position,
            lane.end,
            frozenset(lane.damaged),
            everywhere=wanted or lane.waits or lane.is_retried,
            search=lane.search,
        )
        if wanted and not plan.stretches:
            # What leads on is found before all levels are listed.
            lane.looked_everywhere_at = self._clock.monotonic()
        return plan

    async def _with_end(self, lane: ChainState, plan: ChainPlan) -> ChainPlan:
        """A hole at the end of an incarnation has waited since the next one began."""
        if plan.waiting_since is not None:
            return plan
        since = await self._threads.run(self._next_began, lane.chain)
        return replace(plan, waiting_since=since)

    def _next_began(self, chain: Chain) -> float | None:
        key = self._documents.layout.stream_document(chain.next_incarnation())
        info = self._documents.objects.head(key)
        return None if info is None else info.modified

    # Holes

    async def _settle(self, lane: ChainState, plan: ChainPlan) -> None:
        source = self._roster.source(lane.chain)
        patience = GapPolicy(source.lost_segment_timeout, source.on_lost == "skip")
        decision = await self._threads.run(self.giving_up.decide, lane.chain, plan, patience)
        if not self._is_current(lane):
            return
        if lane.gone is not None and decision.fate is GapAction.GIVE_UP:
            await self._pass_missing(lane, lane.gone, decision)
        elif decision.fate is GapAction.HALT:
            await self._halt(lane, plan, decision)
        elif decision.fate is GapAction.GIVE_UP and lane.damaged and lane.rechecked != lane.position:
            # Somebody may have put them right meanwhile; what is read and still damaged is given up then.
            lane.rechecked = lane.position
            lane.forget_damage()
            await self._look(lane)
        elif decision.fate is GapAction.GIVE_UP:
            await self._pass(lane, decision)

    async def _pass(self, lane: ChainState, decision: GapDecision) -> None:
        """Go on behind what is given up, as far as nothing covers it after all."""
        damaged = frozenset(lane.damaged)
        found = await self._threads.run(self.giving_up.give_up, lane.chain, decision, damaged)
        if found.leads_on is not None:
            _leads_on(lane, found.leads_on)
        elif found.free is not None:
            lane.given_up = found.free

    async def _pass_missing(self, lane: ChainState, gone: FromHole, decision: GapDecision) -> None:
        """Go on behind what is missing of a filled hole; the rows that are there are carried."""
        assert decision.part is not None, "what is given up is named"
        part, missing = decision.part, min(gone.missing, len(decision.part))
        await self._threads.run(self.giving_up.pass_missing, lane.chain, part, missing, decision.why)
        lane.gone = None
        lane.passed.append(part)
        await self._look(lane)

    async def _halt(self, lane: ChainState, plan: ChainPlan, decision: GapDecision) -> None:
        """The hole is lost, and somebody has to decide; unless all there is of the chain says otherwise.

        Looked through once for each hole: from then on the usual looks find what arrives.
        """
        assert decision.part is not None, "what is lost is named"
        if lane.gone is not None:
            lane.plan = replace(plan, phase=Phase.LOST)
            raise _missing(lane.chain, lane.gone, decision.why)
        if lane.surveyed is None or lane.surveyed[0] != decision.part:
            damaged = frozenset(lane.damaged)
            found = await self._threads.run(survey, self._store, lane.chain, decision.part, damaged)
            if found.leads_on is not None:
                _leads_on(lane, found.leads_on)
                return
            lane.surveyed = decision.part, found.free or decision.part
        lane.plan = replace(plan, phase=Phase.LOST)
        raise _lost(lane.chain, lane.surveyed[1], decision.why)

    async def _look_behind(self, lane: ChainState) -> None:
        """Tell what arrived behind gaps that were passed: it is not carried."""
        found = await self._threads.run(self.giving_up.arrived, lane.chain, lane.position)
        lane.look_behind = False
        for gap, ref in found:
            first = max(gap.range.first, ref.coverage.first)
            metrics.behind_gaps.labels(lane.chain.site, lane.chain.feed).inc()
            log.warning(
                "a segment arrived behind a gap that was passed; it is not carried",
                action="arrived_behind",
                gap=str(gap.range),
                to_carry_it=hints.set_position(self._target, lane.chain, first),
                **ref.log_context(),
            )


def _lost(chain: Chain, part: SequenceRange, why: str) -> Stopped:
    return Stopped(
        f"chain {chain}: sequences {part} are lost: {why}",
        hint=hints.way_out(chain, part),
        code="E-LOST",
    )


def _missing(chain: Chain, gone: FromHole, why: str) -> Stopped:
    return Stopped(
        f"chain {chain}: sequences {gone.rows} were archived again after their segment was lost, and "
        f"{gone.missing} of them were gone from the source by then: {why}",
        hint=hints.way_out_filled(chain, gone.rows),
        code="E-LOST",
    )


def _leads_on(lane: ChainState, ref: SegmentRef) -> None:
    """The segment continues after all."""
    lane.stretches.append(_stretch(ref, lane))
    lane.plan = ChainPlan(Phase.READY, tuple(lane.stretches))


def _stretch(ref: SegmentRef, lane: ChainState) -> Stretch[SegmentRef]:
    last = ref.coverage.last if lane.end is None else min(ref.coverage.last, lane.end)
    return Stretch(ref, SequenceRange(lane.position, last))
