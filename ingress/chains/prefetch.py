"""Decoding ahead: the chains of a target take fair turns, each for a stretch of a segment, within a byte budget."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from common.archive.documents import ChainStore
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import UnreadableSegment
from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError, OutcomeUnknown, Stopped, Unavailable
from common.exits import choices, resume_command
from common.logs import get_logger
from common.sequences import Stretch
from common.service.process import ThreadPool
from common.settings.ingress import TargetSettings
from common.tasks import PendingError, Stop, run_all
from ingress import metrics
from ingress.chains.chain_state import ChainRegistry, ChainState, Turn
from ingress.chains.locate import SegmentLocator
from ingress.chains.plan import Phase
from ingress.chains.recall import Recall
from ingress.chains.sources import Pauses, PauseStore
from ingress.checkpoint import Gap, IntentPiece
from ingress.errors import CHAIN_ERRORS, STOPPED_RECHECK_S
from ingress.parked import ParkedStore
from ingress.rows.decoder import DecodeOptions, Decoder, OpenSegments, RelayFlags
from ingress.rows.rows import Block, ReadyBlocks, Rows

log = get_logger(__name__)

PARALLEL_TURNS = 4  # chains that are read at the same time; one site has at most all but one of these turns
DAMAGE_RECHECK_S = 300.0  # seconds until damaged segments are read again: they may be repaired
DECISIONS_INTERVAL_S = 2.0  # seconds between two reads of the operators' decisions


class _StaleError(Exception):
    """A chain's state that was replaced while its rows were read: the rows are discarded."""


Item = TypeVar("Item")


class TurnQueue(Generic[Item]):
    """Queue of turns, fair by site and then in order. `max_per_site`: turns of one site at a time; fewer than there
    are, so that a site that begins to wait finds one.
    """

    def __init__(self, max_per_site: int) -> None:
        self._max_per_site, self._changed = max_per_site, asyncio.Event()
        self.waiting: dict[str, list[Item]] = {}  # first the site that has waited longest for a turn
        self._active = Counter[str]()

    def put(self, site: str, waiting: Item) -> None:
        self.waiting.setdefault(site, []).append(waiting)
        self._changed.set()

    async def begin_turn(self) -> tuple[str, Item]:
        """Wait for the next turn and begin it; `end_turn` ends it."""
        while (site := next((site for site in self.waiting if self._active[site] < self._max_per_site), None)) is None:
            self._changed.clear()
            await self._changed.wait()
        self._active[site] += 1
        first, *rest = self.waiting.pop(site)
        if rest:
            self.waiting[site] = rest
        return site, first

    def end_turn(self, site: str) -> None:
        self._active[site] -= 1
        self._changed.set()


class Prefetcher:
    """Rows for one target, decoded ahead of the publisher.

    `decisions`: the paused chains (None: no chain is ever paused).
    """

    stopped_recheck_s = STOPPED_RECHECK_S

    def __init__(
        self,
        chains: ChainRegistry,
        store: SegmentStore,
        documents: ChainStore,
        threads: ThreadPool,
        clock: Clock,
        ahead: ReadyBlocks,
        parked: ParkedStore | None = None,
        decisions: PauseStore | None = None,
    ) -> None:
        self.chains, self._clock, self.decisions = chains, clock, decisions
        self.ahead, self.open_segments = ahead, OpenSegments[ChainState](ahead.budget)
        relays = RelayFlags(documents, threads)
        self.locator = SegmentLocator(chains, store, documents, relays, threads, clock)
        self.decoder = Decoder(store, threads, self.ahead.budget, parked.park if parked else None)
        self.recall = Recall(store, threads, self.ahead.budget, chains, relays, parked)
        self._relays, self._trouble = relays, PendingError()
        self._turns = TurnQueue[ChainState](PARALLEL_TURNS - 1)
        self._due: set[Chain] = set()  # found by discovery; the next tick wakes them
        # The sequence after the taken rows: a chain continues there, though that is not stored yet.
        self._next_positions: dict[Chain, int] = {}
        self._pauses: Pauses | None = None  # None: not known yet, and no chain may run before
        self._unreadable_chains: set[Chain] = set()
        self._reported: dict[tuple[str, str], tuple[str, float]] = {}  # the last stop of each feed, and its time
        self._decisions_error = ""  # the error of the last read of the decisions

    @property
    def positions(self) -> Mapping[Chain, int]:
        return self.chains.positions or {}

    @property
    def name(self) -> str:
        return self.chains.target

    async def run(self) -> None:
        """Decode after the first `reset`, until an error that needs an operator."""
        await self._read_decisions()
        while self._pauses is None:
            await self._clock.sleep(DECISIONS_INTERVAL_S)
            await self._read_decisions()
        self._wake_all()
        await run_all(self._decisions_loop(), self._trouble.wait(), *(self.take_turns() for _ in range(PARALLEL_TURNS)))

    # For the publisher

    async def take(self, stop: Stop, seconds: float) -> Rows | None:
        rows = await self.ahead.take(stop, seconds)
        for block in rows.blocks if rows else ():
            if not block.piece.is_retry:
                self._next_positions[block.piece.chain] = block.piece.rows.last + 1
        return rows

    def release(self, rows: Rows) -> None:
        self.ahead.release(rows)

    def record_stored(self, positions: Mapping[Chain, int]) -> None:
        """Record that everything below `positions` is stored; incarnations that waited for it may begin."""
        self.chains.positions = positions
        for chain in self.chains.take_released():
            self._wake(chain)

    def reset(self, positions: Mapping[Chain, int]) -> None:
        """Drop the decoded rows and restart at `positions`, because another instance published, or limits changed."""
        self._next_positions.clear()
        self.ahead.drop()
        self._turns.waiting.clear()
        self.open_segments.drop()
        self.chains.reset(positions)
        self._apply_pauses(self.chains)
        self._wake_all()

    def offer(self, block: Block) -> None:
        """Publish a block from elsewhere (a retried parked message), in its turn.

        Its bytes are forced onto the budget. A `reset` drops it, like all rows that are ready.
        """
        self.ahead.budget.acquire_unchecked(block.size)
        self.ahead.append(block)

    def change_sources(self, settings: TargetSettings) -> None:
        """Take over the sources of `settings`; drop the decoded rows of others, which are in no intent yet."""
        self.chains.change_sources(settings)
        self.open_segments.drop(lambda chain: not self.chains.is_current(chain))
        self.ahead.drop(lambda block: not block.piece.is_retry and self.chains.get(block.piece.chain) is None)

    # For discovery

    def pairs(self) -> list[tuple[str, str]]:
        return self.chains.pairs()

    def add_chain(self, chain: Chain, end: int | None = None) -> None:
        """Record that the chain exists, or that its tail has changed. The next `tick` wakes it.

        `end`: the end of its coverage; None: not known.
        """
        is_new = self.chains.get(chain) is None
        if (state := self.chains.add(chain, end)) is not None:
            if is_new and chain in self._next_positions:
                state = self._renew(chain)  # its source came back, and the open intent may hold rows of it
            self._apply_pauses([state])
            self._due.add(chain)

    def wake(self, chain: Chain) -> None:
        """List the chain at once: something else than its tail shows that more is archived."""
        if (state := self.chains.get(chain)) is not None:
            state.listing_due = True
            self._wake(state)

    def search(self, chain: Chain, *, everywhere: bool) -> None:
        """List the chain although nothing shows a change. `everywhere`: on all levels, because a segment that no tail
        ever named may have been compacted since.
        """
        if (state := self.chains.get(chain)) is not None:
            state.check_skipped_gaps = True
            if everywhere:
                state.search_all_levels, state.incomplete_fill = True, None
            self.wake(chain)

    async def tick(self) -> None:
        now, due = self._clock.monotonic(), self._due
        self._due = set()
        for chain in self.chains:
            if now >= chain.reread_at:
                chain.forget_damage()
            is_stopping = chain.stopped is None and self.chains.feed_error(chain.chain) is not None
            if chain.chain in due or chain.is_waiting or is_stopping:
                self._wake(chain)

    def record_error(self, error: Exception) -> None:
        """Report an error in a call by discovery: it ends `run` and so the target, which restarts."""
        self._trouble.set(error)

    # Turns

    def _wake_all(self) -> None:
        # The next tick wakes the others.
        for chain in self.chains:
            if chain.chain not in self._due:
                self._wake(chain)

    def _wake(self, chain: ChainState) -> None:
        """Give a chain a turn. No other method does."""
        # No chain may run before the paused chains are known.
        is_informed = self.decisions is None or self._pauses is not None
        if self.chains.positions is None or not (is_informed and chain.may_run):
            return
        if chain.turn is Turn.ACTIVE:
            chain.turn = Turn.AGAIN
        elif chain.turn is Turn.NONE:
            chain.turn = Turn.QUEUED
            self._turns.put(chain.chain.site, chain)

    async def take_turns(self) -> None:
        while True:
            site, chain = await self._turns.begin_turn()
            chain.turn = Turn.ACTIVE
            try:
                if self.chains.is_current(chain):
                    await self._turn(chain)
            finally:
                self._turns.end_turn(site)
                wants_more, chain.turn = chain.turn is Turn.AGAIN, Turn.NONE
            if wants_more and self.chains.is_current(chain):
                self._wake(chain)

    async def _turn(self, chain: ChainState) -> None:
        had_failed = chain.phase is Phase.FAILED
        chain.wake()
        try:
            await self._advance(chain)
            if chain.chain in self._unreadable_chains:
                self._unreadable_chains.discard(chain.chain)
                log.info("chain read recovered", action="chain_read_recovered", **chain.chain.log_context())
        except _StaleError:
            pass
        except UnreadableSegment:
            # Compacted meanwhile: search again at once, but after two failures in a row only at the next tick.
            log.info("segment gone", action="segment_gone", **chain.chain.log_context())
            chain.fail()
            chain.turn = Turn.ACTIVE if had_failed else Turn.AGAIN
        except CHAIN_ERRORS as error:
            self.stop_chain(chain, error)
        except (Unavailable, OutcomeUnknown) as error:
            metrics.unreadable.labels(self.chains.target).inc()
            if chain.chain not in self._unreadable_chains:  # logged once, until the chain is readable again
                self._unreadable_chains.add(chain.chain)
                context = chain.chain.log_context()
                log.warning("chain read failed", action="chain_read_failed", error=str(error), **context)
            chain.fail()
            chain.turn = Turn.ACTIVE

    async def _advance(self, chain: ChainState) -> None:
        if (stop := self.chains.feed_error(chain.chain)) is not None:  # logged once for the whole feed
            chain.stop(stop, self._clock.monotonic() + self.stopped_recheck_s)
            return
        # First read the ends of incarnations: without them a search could plan rows after an end.
        if chain.phase is not Phase.SEARCHING or chain.needs_listing:
            await self.locator.read_previous(chain)
        if chain.phase is Phase.BEGINNING:
            await self.locator.begin(chain)
        if chain.has_begun and chain.check_skipped_gaps:
            await self.locator.check_skipped_gaps(chain)
        if chain.phase is Phase.SEARCHING:
            await self.locator.search(chain)
        match chain.phase:
            case Phase.READY:
                chain.turn = Turn.AGAIN
                await self._decode(chain, chain.stretches[0])
            case Phase.SKIPPING_START | Phase.SKIPPING_HOLE:
                chain.turn = Turn.AGAIN
                self._append_skip(chain)
            case _:
                chain.mark_resumed()

    async def _decode(self, chain: ChainState, stretch: Stretch[SegmentRef]) -> None:
        ref, decoder = stretch.segment, self.decoder
        chain.preparer.is_relay = await self._relays.is_relay(chain.chain)
        options = DecodeOptions(False, frozenset(chain.damaged), tuple(chain.skipped_ranges), chain.rest is stretch)
        source = self.open_segments.take(chain, stretch) or decoder.open(ref, stretch.rows, options)
        rest = None
        try:
            problem = await decoder.turn(source, chain.preparer, lambda block: self._append(chain, block))
            if problem is None and source.is_done and source.incomplete_fill is not None:
                chain.block(source.incomplete_fill)
            else:
                rest = chain.end_turn(stretch, is_done=source.is_done)
        except UnreadableSegment as found:
            if found.is_gone:
                raise
            chain.damaged.add(ref.key)
            chain.reread_at = min(chain.reread_at, self._clock.monotonic() + DAMAGE_RECHECK_S)
            chain.replan(everywhere=True)
            metrics.damaged.labels(self.chains.target).inc()
            log.error("segment damaged", action="segment_damaged", error=str(found), **ref.log_context())
        else:
            if problem is not None:
                self.stop_chain(chain, problem)
        finally:
            # Replaced states keep nothing open.
            self.open_segments.drop(lambda other: not self.chains.is_current(other))
            if rest is not None and self.chains.is_current(chain):
                self.open_segments.keep(chain, rest, source)
            else:
                await decoder.close(source)

    def _append_skip(self, chain: ChainState) -> None:
        assert chain.range_to_skip is not None, "only a skipped range is passed"
        block = Block(IntentPiece(Gap(chain.chain), chain.range_to_skip, 0))
        self._append(chain, block)
        chain.finish_skip()
        self.ahead.budget.acquire_unchecked(block.size)

    def _append(self, chain: ChainState, block: Block) -> None:
        """Append a block of ready rows. Raises _StaleError if the chain's state was replaced."""
        if not self.chains.is_current(chain):
            raise _StaleError
        chain.position = block.piece.rows.last + 1
        chain.mark_resumed()
        self.ahead.append(block)

    # Decisions of operators, and stopped chains

    async def _decisions_loop(self) -> None:
        while True:
            await self._clock.sleep(DECISIONS_INTERVAL_S)
            await self.apply_decisions()

    async def apply_decisions(self) -> None:
        await self._read_decisions()
        now = self._clock.monotonic()
        await self._retry([chain for chain in self.chains if chain.stopped and now >= chain.retry_at])

    async def _read_decisions(self) -> None:
        """Read the decisions; keep the known ones if they cannot be read now. Raises Stopped if the value is invalid
        and none are known.
        """
        try:
            pauses = await self.decisions.read() if self.decisions else Pauses()
        except FloeError as error:
            if self._pauses is None and isinstance(error, Stopped):
                raise
            if str(error) != self._decisions_error:
                self._decisions_error = str(error)
                target = self.chains.target
                log.warning("decisions read failed", action="decisions_read_failed", target=target, error=str(error))
            return
        if self._decisions_error:
            self._decisions_error = ""
            log.info("decisions read recovered", action="decisions_read_recovered", target=self.chains.target)
        former, self._pauses = self._pauses or Pauses(), pauses
        self._apply_pauses(self.chains.states_of({*pauses.paused, *former.paused}))
        requested = {chain for chain, at in pauses.resumed.items() if at != former.resumed.get(chain)}
        await self._retry(self.chains.states_of(requested))

    def _apply_pauses(self, chains: Iterable[ChainState]) -> None:
        for chain in chains:
            is_paused = self._pauses is not None and chain.chain in self._pauses.paused
            if is_paused is (chain.phase is Phase.PAUSED):
                continue
            context = {"target": self.chains.target, **chain.chain.log_context()}
            if is_paused:
                log.info("chain paused", action="chain_paused", **context)
                self._renew(chain.chain).pause()
            else:
                log.info("chain resumed", action="chain_resumed", **context)
                chain.resume()
                self._wake(chain)

    def _renew(self, chain: Chain) -> ChainState:
        """Replace the state of the chain; it continues after the rows that were taken."""
        self.ahead.drop(lambda block: block.piece.chain == chain and not block.piece.is_retry)
        return self.chains.renew(chain, self._next_positions.get(chain, self.positions.get(chain, 0)))

    def stop_chain(self, chain: ChainState, error: FloeError) -> None:
        """Stop the chain until it is checked again. It is logged once for each reason, and once for all chains of a
        feed that stop for the same one.
        """
        if not self.chains.is_current(chain):
            return
        shown = with_command(error, resume_command(self.chains.target, chain.chain))
        now, feed = self._clock.monotonic(), (chain.chain.site, chain.chain.feed)
        if chain.stop(shown, now + self.stopped_recheck_s):
            reason, since = self._reported.get(feed, ("", now))
            if reason != error.message or now >= since + self.stopped_recheck_s:
                self._reported[feed] = error.message, now
                context = chain.chain.log_context()
                log.error("chain stopped", action="chain_stopped", error=str(shown), code=shown.code, **context)

    async def _retry(self, wanted: list[ChainState]) -> None:
        if any(chain.stopped for chain in wanted):
            try:
                await self.chains.renew_limits()
            except FloeError as error:
                target = self.chains.target
                log.warning("chain retry deferred", action="chain_retry_deferred", target=target, error=str(error))
                return
        for chain in wanted:
            if self.chains.is_current(chain):
                chain.retry(self._clock.monotonic() + self.stopped_recheck_s)
                self._wake(chain)


def with_command(error: FloeError, recheck: str) -> FloeError:
    """Return the error. If its hint names no command, add one that checks the chain at once."""
    if "floe " in error.hint:
        return error
    then = choices(("then, to check it at once", recheck))
    return FloeError(error.message, hint=choices(error.hint, then) if error.hint else then, code=error.code)
