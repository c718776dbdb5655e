"""Search in the archive for a chain: its beginning, the stretches that continue at its position, its holes."""

from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import UTC, datetime

from common.chain import Chain
from common.clock import NS_PER_S, Clock, parse_time
from common.errors import FloeError, Stopped
from common.exits import ways
from common.logs import get_logger
from common.segments import documents
from common.segments.documents import MAX_TEXT, AcceptedGap, ChainStore
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from common.service.process import Threads
from common.settings.ingress import SourceSettings
from ingress import errors, metrics
from ingress.chains.chain_state import NOT_THERE, ChainRegistry, ChainState
from ingress.chains.plan import ChainPlan, GapDecision, Phase, decide, first_position
from ingress.chains.search import LISTED, StoreClock, has_news, look, survey
from ingress.chains.starts import Starts
from ingress.errors import LOOK_AT_STOPPED, SHOWN, passes_by_itself
from ingress.rows.decoder import Relays

log = get_logger(__name__)


BY = "ingress"
WATCHED = 10  # skipped gaps of a chain that one check covers; the next check takes others


class GapSkipper:
    """Decisions of one target about the sequences that it skips, and the records of them. Blocking."""

    def __init__(self, target: str, store: SegmentStore, documents: ChainStore, clock: Clock) -> None:
        self._target, self._store, self._documents = target, store, documents
        self.clock = StoreClock(documents.objects, documents.layout.ingress_clock(target), clock)
        self._passed: dict[Chain, deque[AcceptedGap]] = {}
        self._reported: set[str] = set()

    def decide(self, chain: Chain, plan: ChainPlan, source: SourceSettings) -> GapDecision | None:
        """Decide about the hole of `plan`; None: it may still be filled. Raises as the store does."""
        assert plan.hole is not None, "only holes are decided about"
        first = plan.hole.first
        gaps = self._documents.gaps(chain, position=first)
        gaps += self._documents.passed_gaps(self._target, chain, position=first)
        return decide(plan, gaps, self.clock.now(plan.waiting_since or 0.0), source)

    def give_up(self, chain: Chain, decision: GapDecision, damaged: AbstractSet[str]) -> SegmentRef | SequenceRange:
        """Survey the hole and return as `survey`; a range that no segment covers is recorded as skipped.

        `damaged`: keys of segments that do not count. Raises as the store does.
        """
        found = survey(self._store, chain, decision.part, damaged)
        if isinstance(found, SequenceRange) and found not in [gap.range for gap in self._gaps(chain).copy()]:
            self._pass(chain, AcceptedGap(found, decision.why[:MAX_TEXT], BY, self._now()))
            context = {"gap": str(found), "error": decision.why, "target": self._target}
            log.warning("gap passed", action="gap_passed", **context, **chain.log_context())
        return found

    def pass_missing(self, chain: Chain, part: SequenceRange, missing: int, why: str) -> None:
        """Record, count and log that the target continues although `missing` sequences of `part` are gone.

        Done once for each range: a start inside it skips it again without a new record.
        """
        if any(gap.range.encloses(part) for gap in self._gaps(chain).copy()):
            return
        self._pass(chain, AcceptedGap(part, why[:MAX_TEXT], BY, self._now(), from_hole=True), missing)
        what, context = (
            "missing sequences of a filled hole passed",
            {"gap": str(part), "missing": missing, "error": why},
        )
        log.warning(what, action="gone_from_hole_passed", **context, target=self._target, **chain.log_context())

    def _pass(self, chain: Chain, gap: AcceptedGap, lost: int | None = None) -> None:
        """Record a skipped gap. `lost`: the number of its sequences that are lost; None: all."""
        self._gaps(chain).append(self._documents.pass_gap(self._target, chain, gap))
        labels = self._target, chain.site, chain.feed, str(chain.partition)
        metrics.lost_sequences.labels(*labels).inc(len(gap.range) if lost is None else lost)

    def arrived(self, chain: Chain, position: int) -> list[tuple[AcceptedGap, SegmentRef]]:
        """Return the segments that arrived in skipped gaps (gaps that end before `position`), each once. Raises as the
        store does.
        """
        gaps = self._gaps(chain)
        found = []
        for _ in range(min(WATCHED, len(gaps))):
            gap = gaps[0]
            gaps.rotate(-1)
            # Merges also cover the range of a filled hole; `verify` finds rows that arrive there.
            if gap.range.last < position and not gap.from_hole:
                found += [(gap, ref) for ref in self._behind(chain, gap)]
        return found

    def _behind(self, chain: Chain, gap: AcceptedGap) -> Iterator[SegmentRef]:
        since = parse_time(gap.at) / NS_PER_S if gap.at else 0.0
        for ref in self._store.list(chain, position=gap.range.first, limit=LISTED):
            # A segment that existed before is damaged: otherwise it would have been replayed.
            is_new = ref.modified >= since and ref.key not in self._reported
            if is_new and ref.coverage.overlaps(gap.range):
                self._reported.add(ref.key)
                yield ref

    def _gaps(self, chain: Chain) -> deque[AcceptedGap]:
        if chain not in self._passed:
            self._passed[chain] = deque(self._documents.passed_gaps(self._target, chain))
        return self._passed[chain]

    def _now(self) -> str:
        """Return the time by the store's clock, in whole seconds: some stores keep no finer LastModified."""
        now = datetime.fromtimestamp(int(self.clock.stamp()), UTC)
        return now.isoformat().replace("+00:00", "Z")


class SegmentLocator:
    """Reader of documents and listings for the chains of one target."""

    def __init__(
        self,
        chains: ChainRegistry,
        store: SegmentStore,
        documents: ChainStore,
        relays: Relays,
        threads: Threads,
        clock: Clock,
    ) -> None:
        self._chains, self._store, self._documents, self._relays = chains, store, documents, relays
        self._threads, self._clock = threads, clock
        self._listed: dict[tuple[str, str, int], float] = {}
        self.starts = Starts(chains.target, store, documents, clock)
        self.gaps = GapSkipper(chains.target, store, documents, clock)

    async def read_previous(self, state: ChainState) -> None:
        """Read the `stream.json` files that a search for the chain needs and that are not known yet.

        They are read in the chain's own turn, so that the documents of one site delay no other. A file that cannot be
        read delays only its own incarnation. It is logged once for each reason.
        """
        for chain in self._chains.needs_previous(state.chain, again=not state.goes_on):
            try:
                document = await self._threads.run(self._documents.read_stream, chain)
            except FloeError as error:
                if self._chains.cannot_read(chain, f"stream.json cannot be read: {error.message}"):
                    tell = log.warning if passes_by_itself(error) else log.error
                    context = chain.log_context()
                    tell("stream.json unread", action="document_unread", error=str(error), **context)
                continue
            if document is None:
                self._chains.cannot_read(chain, NOT_THERE)
            else:
                self._chains.set_previous(chain, document.previous)

    # Beginning

    async def begin(self, chain: ChainState) -> None:
        """Find the sequence at which the chain begins, and the range that it omits before that.

        Raises Stopped and DataError if only an operator can help, else as the store does.
        """
        archived = chain.archived
        if chain.unreached and chain.unreached == archived:
            return
        chain.waits_for = self._chains.obstacle(chain.chain)
        if chain.waits_for:
            await self._check_named(chain.chain)
            return
        if (document := await self._threads.run(self._documents.read_chain, chain.chain)) is None:
            chain.waits_for = "chain.json is not there yet"
            return
        if chain.chain.partition >= document.partitions:
            feed, most = f"{chain.chain.site}/{chain.chain.feed}", document.partitions
            # The partition is left out of the message, so that any number of them is one line of the log.
            raise Stopped(
                f"incarnation {chain.chain.incarnation:04d} of {feed}: expected partitions below {most}, found others",
                hint="egress wrote no such partition: see who did, and remove it",
                code="E-STATE-JSON",
            )
        self._relays.note(chain.chain, document)
        floor = await self._threads.run(self._documents.read_floor, chain.chain)
        first = first_position(document.first, floor)
        if not self._chains.is_current(chain):
            return  # its state was replaced: an operator may have decided meanwhile
        self._chains.check_may_begin(chain.chain, first)
        source, positions = self._chains.source(chain.chain), self._chains.positions or {}
        start = await self._threads.run(self.starts.resolve, chain.chain, source, first, chain.end, positions)
        if not start:
            chain.unreached = archived
            chain.waits_for = "nothing is archived yet from the moment on at which the copy begins"
            return
        chain.unreached = 0
        chain.begins(first, start)
        log.info("chain begins", action="chain_begins", position=start, **chain.chain.log_context())

    async def _check_named(self, chain: Chain) -> None:
        """Raise Stopped if the incarnation waits for partitions that never existed: they have no `chain.json`."""
        if not self._chains.unknown_before(chain):
            return
        before = chain.site, chain.feed, chain.incarnation - 1
        if self._clock.monotonic() - self._listed.get(before, float("-inf")) >= LOOK_AT_STOPPED:
            for each in await self._threads.run(self._documents.chains, *before):
                self._chains.add(each)
            self._listed[before] = self._clock.monotonic()  # one listing for all chains of the incarnation
        if missing := self._chains.unknown_before(chain):
            missed = "put the chain.json of each back from a copy of the bucket; or begin without what they archived"
            document = await self._threads.run(self._documents.read_chain, chain)
            text = ", ".join(map(str, missing[:SHOWN]))
            more = f" and {len(missing) - SHOWN} more" if missing[SHOWN:] else ""
            raise Stopped(
                f"{self._documents.layout.stream_document(chain)}: previous: expected partitions of incarnation "
                f"{before[2]:04d} that have a chain.json, found {text}{more} without one",
                hint=ways((missed, errors.set_position(self._chains.target, chain, document.first if document else 1))),
                code="E-STATE-JSON",
            )

    # Searching

    async def look(self, state: ChainState) -> None:
        """List from the position. If a hole or damage keeps the chain waiting, decide about it.

        Raises as `begin`.
        """
        if state.is_done:
            state.looked(ChainPlan(Phase.DONE), self._clock.monotonic())
            return
        plan = (await self._standing(state, await self._plan(state))).since(state.plan)
        if not plan.waits:
            state.looked(plan, self._clock.monotonic())
            return
        if plan.waiting_since is None:
            # A hole at the end of an incarnation has waited since the next one began.
            plan = replace(plan, waiting_since=await self._threads.run(self._documents.followed_since, state.chain))
        state.looked(plan, self._clock.monotonic())
        await self._settle(state, plan)

    async def _standing(self, state: ChainState, plan: ChainPlan) -> ChainPlan:
        gone, state.gone = state.gone, None
        if gone is None or not plan.stretches or plan.stretches[0].segment.key != gone.segment.key:
            return plan
        if gone.rows.first != state.position or await self._threads.run(has_news, self._store, gone):
            return plan
        state.gone = gone
        since = state.stands_since[1] if state.stands_since else gone.segment.modified
        return ChainPlan(Phase.LATE, (), gone.rows, since, plan.beyond)

    async def _plan(self, state: ChainState) -> ChainPlan:
        # A request during this search is for the next one; after an error the chain is searched on all levels.
        wanted, state.look_everywhere = state.look_everywhere, False
        plan = await self._threads.run(
            look,
            self._store,
            state.chain,
            state.position,
            state.end,
            frozenset(state.damaged),
            everywhere=wanted or state.stopped is not None or state.plan.waits or state.is_behind,
            search=state.search,
        )
        if wanted and not plan.stretches:
            # If a segment continues the chain, it is found before all levels are listed.
            state.looked_everywhere_at = self._clock.monotonic()
        return plan

    # Holes

    async def _settle(self, state: ChainState, plan: ChainPlan) -> None:
        source = self._chains.source(state.chain)
        decision = await self._threads.run(self.gaps.decide, state.chain, plan, source)
        if decision is None or decision.halts:
            await self._check_floor(state)
        if decision is None or not self._chains.is_current(state):
            return
        if decision.halts:
            await self._halt(state, plan, decision)
        elif state.gone is not None:
            # Continue after the missing sequences of a filled hole; its existing rows are replayed.
            missing = min(state.gone.missing, len(decision.part))
            await self._threads.run(self.gaps.pass_missing, state.chain, decision.part, missing, decision.why)
            state.gone = None
            state.passed.append(decision.part)
            await self.look(state)
        elif state.damaged and state.rechecked != state.position:
            # The damaged segments may be repaired by now: read them once more. After that, the range is skipped.
            state.rechecked = state.position
            state.forget_damage()
            await self.look(state)
        else:
            # Continue after the skipped part, unless a segment covers it after all.
            damaged = frozenset(state.damaged)
            found = await self._threads.run(self.gaps.give_up, state.chain, decision, damaged)
            if isinstance(found, SegmentRef):
                state.leads_on(found)
            else:
                state.gives_up(found)

    async def _check_floor(self, state: ChainState) -> None:
        """Raise Stopped if the next sequences are no hole: they are below the floor. Retention deleted them, because
        the target was released, or was set back after it had passed them.
        """
        chain, position = state.chain, state.position
        if state.gone is None and (await self._threads.run(self._documents.read_floor, chain) or 1) > position:
            floor = await self._threads.run(self._documents.floor, chain)
            raise Stopped(
                f"chain {chain}: position {position}: {floor}",
                hint=ways(errors.go_on_at_floor(self._chains.target, chain, floor.first if floor else position)),
                code="E-FLOOR",
            )

    async def _halt(self, state: ChainState, plan: ChainPlan, decision: GapDecision) -> None:
        """Raise Stopped: the hole is lost, and an operator must decide. If a full listing finds a segment, plan that.

        The whole chain is listed once for each hole; the usual searches find later arrivals.
        """
        chain, gone = state.chain, state.gone
        if gone is not None:
            state.plan = replace(plan, phase=Phase.LOST)
            message = (
                f"chain {chain}: sequences {gone.rows} were archived again after their segment was lost, and "
                f"{gone.missing} of them were gone from the source by then: {decision.why}"
            )
            raise Stopped(message, hint=documents.way_out_filled(chain, gone.rows), code="E-LOST")
        if state.surveyed is None or state.surveyed[0] != decision.part:
            found = await self._threads.run(survey, self._store, chain, decision.part, frozenset(state.damaged))
            if isinstance(found, SegmentRef):
                state.leads_on(found)
                return
            state.surveyed = decision.part, found
        state.plan = replace(plan, phase=Phase.LOST)
        part = state.surveyed[1]
        message = f"chain {chain}: sequences {part} are lost: {decision.why}"
        raise Stopped(message, hint=documents.way_out(chain, part), code="E-LOST")

    async def look_behind(self, state: ChainState) -> None:
        found = await self._threads.run(self.gaps.arrived, state.chain, state.position)
        state.look_behind = False
        for gap, ref in found:
            first = max(gap.range.first, ref.coverage.first)
            metrics.behind_gaps.labels(state.chain.site, state.chain.feed).inc()
            what = "a segment arrived behind a gap that was passed; it is not carried"
            carry = errors.set_position(self._chains.target, state.chain, first)
            log.warning(what, action="arrived_behind", gap=str(gap.range), to_carry_it=carry, **ref.log_context())
