"""Search in the archive for a chain: its beginning, the stretches that continue at its position, its holes."""

import threading
from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

from common.archive import documents
from common.archive.documents import MAX_TEXT_CHARS, AcceptedGap, ChainStore
from common.archive.scan import ChainArchive
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.chain import Chain
from common.clock import NS_PER_S, Clock, format_time, parse_time
from common.errors import FloeError, OutcomeUnknown, Refused, Stopped, Unavailable
from common.exits import choices, position_command
from common.logs import get_logger
from common.objects.port import ObjectStore, read_store_clock
from common.sequences import SequenceRange
from common.service.process import ThreadPool
from common.settings.ingress import SourceSettings
from ingress import errors, metrics
from ingress.chains.chain_state import STREAM_JSON_MISSING, ChainRegistry, ChainState
from ingress.chains.plan import (
    SEARCH_PAGE,
    ChainPlan,
    GapDecision,
    Phase,
    decide_hole,
    first_position,
    has_new_segments,
    plan_chain,
    plan_from_listings,
    search_whole_chain,
)
from ingress.chains.sources import StartResolver
from ingress.errors import MAX_SHOWN_ITEMS, STOPPED_RECHECK_S, is_transient
from ingress.rows.decoder import RelayFlags

log = get_logger(__name__)

AUTHOR = "ingress"
GAPS_PER_CHECK = 10  # skipped gaps of a chain that one check covers; the next check takes others
STORE_CLOCK_INTERVAL_S = 60.0  # seconds between two requests; in between, the host's monotonic clock is added


class StoreClock:
    """The store's clock, as one target reads it with the object `key`. Blocking; safe to call from several threads."""

    def __init__(self, objects: ObjectStore, key: str, clock: Clock) -> None:
        self.objects, self._key, self._clock = objects, key, clock
        self._known: tuple[float, float] | None = None  # time of the store, time of the host
        self._refused, self._lock = False, threading.Lock()

    def now(self, at_least: float) -> float:
        """Return seconds since 1970 UTC by the store's clock.

        `at_least`: the time of an existing object. It is the result if ingress may not write: holes then only wait
        longer. Otherwise raises as the store does.
        """
        known = self._now()
        return at_least if known is None else max(at_least, known)

    def now_or_host(self) -> float:
        """Return the time as `now`, for records only: by the host's clock if ingress may not write."""
        known = self._now()
        return self._clock.now() if known is None else known

    def _now(self) -> float | None:
        """Return the store's time; None if ingress may not write."""
        # Locked: two threads at once would put the object twice, and neither would know which time it got.
        with self._lock:
            host = self._clock.monotonic()
            if self._known is None or host - self._known[1] >= STORE_CLOCK_INTERVAL_S:
                try:
                    self._known = read_store_clock(self.objects, self._key), host
                except Refused as error:
                    if not self._refused:
                        self._refused = True
                        log.warning("store clock refused", action="store_clock_refused", error=str(error))
                    return None
                except OutcomeUnknown as error:
                    raise Unavailable(error.message, code=error.code) from error
            return self._known[0] + host - self._known[1]


class GapSkipper:
    """Decisions of one target about the sequences that it skips, and the records of them. Blocking."""

    def __init__(self, target: str, store: SegmentStore, documents: ChainStore, clock: Clock) -> None:
        self._target, self._store, self._documents = target, store, documents
        self.clock = StoreClock(documents.objects, documents.layout.ingress_clock(target), clock)
        self._skipped_gaps: dict[Chain, deque[AcceptedGap]] = {}
        self._recorded_under: set[str] | None = None  # the prefixes with records when it began; None: not listed yet
        self._reported: set[str] = set()

    def decide_hole(self, chain: Chain, plan: ChainPlan, source: SourceSettings) -> GapDecision | None:
        """Decide about the hole of `plan`; None: it may still be filled. Raises as the store does."""
        assert plan.hole is not None, "only holes are decided about"
        first = plan.hole.first
        gaps = self._documents.gaps(chain, position=first)
        gaps += self._documents.skipped_gaps(self._target, chain, position=first)
        return decide_hole(plan, gaps, self.clock.now(plan.waiting_since or 0.0), source)

    def skip_hole(self, chain: Chain, decision: GapDecision, damaged: AbstractSet[str]) -> SegmentRef | SequenceRange:
        """Survey the hole and return as `search_whole_chain`; a range that no segment covers is recorded as skipped.

        `damaged`: keys of segments that do not count. Raises as the store does.
        """
        found = search_whole_chain(self._store, chain, decision.part, damaged)
        if isinstance(found, SequenceRange) and found not in [gap.range for gap in self._gaps(chain).copy()]:
            self._record_skip(chain, found, decision.reason, len(found))
            context = {"gap": str(found), "error": decision.reason, "target": self._target}
            log.warning("gap skipped", action="gap_skipped", **context, **chain.log_context())
        return found

    def skip_missing(self, chain: Chain, part: SequenceRange, lost: int, reason: str) -> None:
        """Record, count and log that the target continues although `lost` sequences of `part` are gone.

        Done once for each range: a start inside it skips it again without a new record.
        """
        if any(gap.range.encloses(part) for gap in self._gaps(chain).copy()):
            return
        self._record_skip(chain, part, reason, lost, from_hole=True)
        context = {"gap": str(part), "missing": lost, "error": reason, "target": self._target, **chain.log_context()}
        log.warning("missing sequences of a filled hole skipped", action="incomplete_fill_skipped", **context)

    def _record_skip(
        self, chain: Chain, part: SequenceRange, reason: str, lost: int, *, from_hole: bool = False
    ) -> None:
        """Record and count a skipped range, of which `lost` sequences are lost. `from_hole`: as in `AcceptedGap`."""
        # Whole seconds by the store's clock: some stores keep no finer LastModified.
        at = format_time(int(self.clock.now_or_host()) * NS_PER_S)
        gap = AcceptedGap(part, reason[:MAX_TEXT_CHARS], AUTHOR, at, from_hole)
        self._gaps(chain).append(self._documents.record_skipped_gap(self._target, chain, gap))
        metrics.lost_sequences.labels(self._target).inc(lost)

    def has_none(self, chain: Chain) -> bool:
        """True if it is known that the target skipped nothing of the chain. Does not block."""
        is_recorded = self._recorded_under is None or self._prefix(chain) in self._recorded_under
        return not is_recorded and not self._skipped_gaps.get(chain)

    def late_segments(self, chain: Chain, position: int) -> list[tuple[AcceptedGap, SegmentRef]]:
        """Return the segments that arrived in skipped gaps (gaps that end before `position`), each once. Raises as the
        store does.
        """
        gaps = self._gaps(chain)
        found = []
        for _ in range(min(GAPS_PER_CHECK, len(gaps))):
            gap = gaps[0]
            gaps.rotate(-1)
            # Merges also cover the range of a filled hole; `verify` finds rows that arrive there.
            if gap.range.last < position and not gap.from_hole:
                found += [(gap, ref) for ref in self._segments_in_gap(chain, gap)]
        return found

    def _segments_in_gap(self, chain: Chain, gap: AcceptedGap) -> Iterator[SegmentRef]:
        since = parse_time(gap.decided_at) / NS_PER_S if gap.decided_at else 0.0
        near = ChainArchive.listed(self._store, chain, gap.range.first, limit=SEARCH_PAGE)
        for ref in near.overlapping(gap.range):
            # A segment that existed before is damaged: otherwise it would have been replayed.
            if ref.modified >= since and ref.key not in self._reported:
                self._reported.add(ref.key)
                yield ref

    def _gaps(self, chain: Chain) -> deque[AcceptedGap]:
        if self._recorded_under is None:  # one listing for all chains: most have none
            listing = self._documents.objects.list(self._documents.layout.skipped_prefix(self._target))
            self._recorded_under = {f"{info.key.rpartition('/')[0]}/" for info in listing}
        if chain not in self._skipped_gaps:
            is_recorded = self._prefix(chain) in self._recorded_under
            recorded = self._documents.skipped_gaps(self._target, chain) if is_recorded else ()
            self._skipped_gaps[chain] = deque(recorded)
        return self._skipped_gaps[chain]

    def _prefix(self, chain: Chain) -> str:
        return self._documents.layout.skipped_prefix(self._target, chain)


class SegmentLocator:
    """Reader of documents and listings for the chains of one target."""

    def __init__(
        self,
        chains: ChainRegistry,
        store: SegmentStore,
        documents: ChainStore,
        relays: RelayFlags,
        threads: ThreadPool,
        clock: Clock,
    ) -> None:
        self._chains, self._store, self._documents, self._relays = chains, store, documents, relays
        self._threads, self._clock = threads, clock
        self._listed: dict[tuple[str, str, int], float] = {}
        self.starts = StartResolver(chains.target, store, documents, clock)
        self.gaps = GapSkipper(chains.target, store, documents, clock)

    async def read_previous(self, state: ChainState) -> None:
        """Read the `stream.json` files that a search for the chain needs and that are not known yet.

        They are read in the chain's own turn, so that the documents of one site delay no other. A file that cannot be
        read delays only its own incarnation. It is logged once for each reason.
        """
        for chain in self._chains.stream_documents_to_read(state.chain, retry_failed=not state.can_continue):
            try:
                document = await self._threads.run(self._documents.read_stream, chain)
            except FloeError as error:
                if self._chains.record_unread(chain, f"stream.json cannot be read: {error.message}"):
                    log_at = log.warning if is_transient(error) else log.error
                    context = {"document": "stream.json", **chain.log_context()}
                    log_at("document read failed", action="document_read_failed", error=str(error), **context)
                continue
            if document is None:
                self._chains.record_unread(chain, STREAM_JSON_MISSING)
            else:
                self._chains.set_previous_ends(chain, document.previous)

    # Beginning

    async def begin(self, chain: ChainState) -> None:
        """Find the sequence at which the chain begins, and the range that it omits before that.

        Raises Stopped and DataError if only an operator can help, else as the store does.
        """
        archived = chain.archived
        if chain.end_before_start and chain.end_before_start == archived:
            return
        chain.begin_obstacle = self._chains.obstacle(chain.chain)
        if chain.begin_obstacle:
            await self._check_partitions_exist(chain.chain)
            return
        if (document := await self._threads.run(self._documents.read_chain, chain.chain)) is None:
            chain.begin_obstacle = "chain.json does not exist yet"
            return
        if chain.chain.partition >= document.partitions:
            feed, limit = f"{chain.chain.site}/{chain.chain.feed}", document.partitions
            # The partition is left out of the message, so that any number of them is one line of the log.
            raise Stopped(
                f"incarnation {chain.chain.incarnation:04d} of {feed}: expected partitions below {limit}, found others",
                hint="egress wrote no such partition: find its writer, and remove it",
                code="E-STATE-JSON",
            )
        self._relays.record(chain.chain, document)
        if await self._begin_whole(chain, document.first):
            return
        floor = await self._threads.run(self._documents.read_floor, chain.chain)
        first = first_position(document.first, floor)
        if not self._chains.is_current(chain):
            return  # its state was replaced: an operator may have decided meanwhile
        self._chains.check_may_begin(chain.chain, first)
        source, positions = self._chains.source(chain.chain), self._chains.positions or {}
        start = await self._threads.run(self.starts.resolve, chain.chain, source, first, chain.end, positions)
        if not start:
            chain.end_before_start = archived
            chain.begin_obstacle = "nothing is archived yet from its start (start_… keys) on"
            return
        chain.end_before_start = 0
        self._start(chain, first, start)

    async def _begin_whole(self, state: ChainState, first: int) -> bool:
        """Begin the chain at `first` if one page of level 0 holds everything up to the end in its tail, which a floor
        does not change. False if it does not, or if the copy begins elsewhere.
        """
        if self._chains.source(state.chain).is_set or not state.archived:
            return False
        page = await self._threads.run(ChainArchive.listed, self._store, state.chain, first, level=0, limit=SEARCH_PAGE)
        plan = plan_chain(page.refs, first, state.end, frozenset(state.damaged))
        end = state.archived if state.end is None else min(state.archived, state.end)
        if not (plan.stretches and plan.stretches[-1].rows.last >= end and self._chains.is_current(state)):
            return False
        self._chains.check_may_begin(state.chain, first)
        self._start(state, first, first)
        state.adopt_plan(plan)
        return True

    def _start(self, state: ChainState, first: int, start: int) -> None:
        state.begin(first, start)
        log.info("chain started", action="chain_started", position=start, **state.chain.log_context())

    async def _check_partitions_exist(self, chain: Chain) -> None:
        """Raise Stopped if the incarnation waits for partitions that never existed: they have no `chain.json`."""
        if not self._chains.unknown_before(chain):
            return
        before = chain.site, chain.feed, chain.incarnation - 1
        if self._clock.monotonic() - self._listed.get(before, float("-inf")) >= STOPPED_RECHECK_S:
            for each in await self._threads.run(self._documents.chains, *before):
                self._chains.add(each)
            self._listed[before] = self._clock.monotonic()  # one listing for all chains of the incarnation
        if missing := self._chains.unknown_before(chain):
            missed = "put the chain.json of each back from a copy of the bucket; or begin without their messages"
            first = document.first if (document := await self._threads.run(self._documents.read_chain, chain)) else 1
            text = ", ".join(map(str, missing[:MAX_SHOWN_ITEMS]))
            more = f" and {len(missing) - MAX_SHOWN_ITEMS} more" if missing[MAX_SHOWN_ITEMS:] else ""
            raise Stopped(
                f"{self._documents.layout.stream_document(chain)}: previous: expected partitions of incarnation "
                f"{before[2]:04d} that have a chain.json, found {text}{more} without one",
                hint=choices((missed, position_command(self._chains.target, chain, first))),
                code="E-STATE-JSON",
            )

    # Searching

    async def search(self, state: ChainState) -> None:
        """List from the position, if anything may be there. If a hole or damage keeps the chain waiting, decide.

        Raises as `begin`.
        """
        if state.is_done or not state.needs_listing:
            state.adopt_plan(ChainPlan(Phase.DONE if state.is_done else Phase.IDLE))
            return
        plan = (await self._recheck_blocked(state, await self._search_plan(state))).with_wait_of(state.plan)
        if not plan.is_waiting:
            state.adopt_plan(plan)
            return
        if plan.waiting_since is None:
            # A hole at the end of an incarnation has waited since the next one began.
            since = await self._threads.run(self._documents.next_incarnation_start, state.chain)
            plan = replace(plan, waiting_since=since)
        state.adopt_plan(plan)
        await self._decide_hole(state, plan)

    async def _recheck_blocked(self, state: ChainState, plan: ChainPlan) -> ChainPlan:
        fill, state.incomplete_fill = state.incomplete_fill, None
        if fill is None or not plan.stretches or plan.stretches[0].segment.key != fill.segment.key:
            return plan
        if fill.rows.first != state.position or await self._threads.run(has_new_segments, self._store, fill):
            return plan
        state.incomplete_fill = fill
        since = state.blocked_since[1] if state.blocked_since else fill.segment.modified
        return ChainPlan(Phase.LATE, (), fill.rows, since, plan.late_end)

    async def _search_plan(self, state: ChainState) -> ChainPlan:
        # A request during this search is for the next one; after an error the chain is searched on all levels.
        wanted, state.search_all_levels, state.listing_due = state.search_all_levels, False, False
        is_off_tail = 0 < state.archived != state.position - 1 and state.plan.phase is not Phase.DONE
        return await self._threads.run(
            plan_from_listings,
            self._store,
            state.chain,
            state.position,
            state.end,
            frozenset(state.damaged),
            everywhere=wanted or state.stopped is not None or state.plan.is_waiting or is_off_tail,
            search=state.search,
        )

    # Holes

    async def _decide_hole(self, state: ChainState, plan: ChainPlan) -> None:
        source = self._chains.source(state.chain)
        decision = await self._threads.run(self.gaps.decide_hole, state.chain, plan, source)
        if decision is None or not decision.is_recorded:
            await self._check_floor(state)
        if decision is None or not self._chains.is_current(state):
            return
        if decision.needs_operator:
            await self._halt(state, plan, decision)
        elif state.incomplete_fill is not None:
            # Continue after the missing sequences of a filled hole; its existing rows are replayed.
            missing = min(state.incomplete_fill.missing, len(decision.part))
            await self._threads.run(self.gaps.skip_missing, state.chain, decision.part, missing, decision.reason)
            state.incomplete_fill = None
            state.skipped_ranges.append(decision.part)
            await self.search(state)
        elif state.damaged and state.rechecked_position != state.position:
            # The damaged segments may be repaired by now: read them once more. After that, the range is skipped.
            state.rechecked_position = state.position
            state.forget_damage()
            await self.search(state)
        else:
            # Continue after the skipped part, unless a segment covers it after all.
            damaged = frozenset(state.damaged)
            found = await self._threads.run(self.gaps.skip_hole, state.chain, decision, damaged)
            if isinstance(found, SegmentRef):
                state.resume_with(found)
            else:
                state.skip(found)

    async def _check_floor(self, state: ChainState) -> None:
        """Raise Stopped if the next sequences are no hole: they are below the floor. Retention deleted them, because
        the target was released, or was set back after it had passed them.
        """
        chain, position, fill = state.chain, state.position, state.incomplete_fill
        if fill is None and (await self._threads.run(self._documents.read_floor, chain) or 1) > position:
            floor = await self._threads.run(self._documents.floor, chain)
            hint = choices(errors.floor_remedy(self._chains.target, chain, floor.first if floor else position))
            raise Stopped(f"chain {chain}: position {position}: {floor}", hint=hint, code="E-FLOOR")

    async def _halt(self, state: ChainState, plan: ChainPlan, decision: GapDecision) -> None:
        """Raise Stopped: the hole is lost, and an operator must decide. If a full listing finds a segment, plan that.

        The whole chain is listed once for each hole; the usual searches find later arrivals.
        """
        chain, fill, damaged = state.chain, state.incomplete_fill, frozenset(state.damaged)
        if fill is not None:
            state.plan = replace(plan, phase=Phase.LOST)
            message = (
                f"chain {chain}: sequences {fill.rows} were archived again after their segment was lost, and "
                f"{fill.missing} of them were gone from the source by then: {decision.reason}"
            )
            raise Stopped(message, hint=documents.filled_hole_remedies(chain, fill.rows), code="E-LOST")
        if state.searched_hole is None or state.searched_hole[0] != decision.part:
            found = await self._threads.run(search_whole_chain, self._store, chain, decision.part, damaged)
            if isinstance(found, SegmentRef):
                state.resume_with(found)
                return
            state.searched_hole = decision.part, found
        state.plan = replace(plan, phase=Phase.LOST)
        part = state.searched_hole[1]
        message = f"chain {chain}: sequences {part} are lost: {decision.reason}"
        raise Stopped(message, hint=documents.hole_remedies(chain, part), code="E-LOST")

    async def check_skipped_gaps(self, state: ChainState) -> None:
        call, none = self._threads.run, self.gaps.has_none(state.chain)
        found = [] if none else await call(self.gaps.late_segments, state.chain, state.position)
        state.check_skipped_gaps = False
        for gap, ref in found:
            first = max(gap.range.first, ref.coverage.first)
            metrics.behind_gaps.labels(self._chains.target).inc()
            command = position_command(self._chains.target, state.chain, first)
            context = {"gap": str(gap.range), "command": command, **ref.log_context()}
            log.warning("late segment found in a skipped gap", action="late_segment_found", **context)
