"""Decodes ahead: the chains of a target in fair turns, a stretch of a segment at a time, within a byte
budget.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from common.chain import Chain
from common.clock import Clock
from common.errors import (
    ConfigError,
    DataError,
    FloeError,
    OutcomeUnknown,
    Refused,
    SegmentCorrupt,
    Stopped,
    Unavailable,
)
from common.segments.documents import ChainStore
from common.segments.segment import SegmentRef
from common.segments.store import SegmentGone, SegmentStore
from common.sequences import Stretch
from common.service.logs import get_logger
from common.service.process import Threads
from common.tasks import Stop, Trouble, first_of, together
from ingress import metrics
from ingress.chains.chain_state import (
    AskShape,
    ChainRegistry,
    ChainState,
    Decisions,
    PauseWatcher,
)
from ingress.chains.locate import SegmentLocator
from ingress.chains.recall import Recall
from ingress.checkpoint import MAX_BYTES, MAX_LEFT_OUT, MAX_PIECES, MAX_ROWS, Gap, IntentPiece
from ingress.errors import LOOK_AT_STOPPED
from ingress.parked import ParkedStore
from ingress.rows.decoder import Decoder, FromHoleError, Relays
from ingress.rows.rows import Block, ByteBudget, Rows

log = get_logger("ingress.chains.prefetch")

TURNS = 3  # chains that are read at the same time
LOOK_AGAIN = 300.0  # seconds until a chain is looked at whatever its tail says
LOOK_EVERYWHERE = 3600.0  # seconds until that is at all levels: ten listings, not one


class _StaleError(Exception):
    """The lane was made anew while its rows were read: they belong to nobody."""


class Prefetcher:
    """Rows for one target, decoded ahead of whoever publishes them.

    `shape`, `decisions`, `look_at_stopped`: see `PauseWatcher`.
    """

    def __init__(
        self,
        target: str,
        roster: ChainRegistry,
        store: SegmentStore,
        documents: ChainStore,
        threads: Threads,
        clock: Clock,
        memory_limit: int,
        parked: ParkedStore | None = None,
        *,
        shape: AskShape | None = None,
        decisions: Decisions | None = None,
        look_at_stopped: float = LOOK_AT_STOPPED,
    ) -> None:
        self.target, self.roster = target, roster
        self._clock = clock
        self._relays = Relays(documents, threads)
        self._lookout = SegmentLocator(
            target, roster, store, documents, self._relays, threads, clock, lambda: self.positions
        )
        # The rest is for what decoding needs beside the rows, for what is on the wire, and for what the
        # allocator keeps.
        self._budget = ByteBudget(memory_limit // 4)
        self._decoder = Decoder(store, threads, self._budget, parked)
        self.recall = Recall(store, threads, self._budget, roster, self._relays, parked)
        self._intent_bytes = min(MAX_BYTES, memory_limit // 8)
        self._trouble = Trouble()
        self._turns: asyncio.Queue[ChainState] = asyncio.Queue()
        self._ready: deque[Block] = deque()
        self._filled = asyncio.Event()
        # None until the first `reset`: what has begun and what has not is not known before.
        self._positions: Mapping[Chain, int] | None = None
        # Behind what was taken: where a chain goes on, though that is not stored yet.
        self._taken_to: dict[Chain, int] = {}
        self._attendant = PauseWatcher(
            target, roster, clock, shape, decisions, look_at_stopped, wake=self._wake, hold=self._hold
        )

    @property
    def positions(self) -> Mapping[Chain, int]:
        """What is stored for good, by chain: the next sequence; empty as long as that is not known."""
        return {} if self._positions is None else self._positions

    async def run(self) -> None:
        """Decode for ever, from the first `reset` on.

        Ends only by an error that an operator has to deal with.
        """
        await self._attendant.begin()
        for lane in self.roster:
            # The others are looked at by the next tick, which first reads where incarnations ended.
            if not lane.is_due:
                self._wake(lane)
        turns = (self._take_turns() for _ in range(TURNS))
        await together(self._attendant.run(), self._trouble.wait(), *turns)

    # For whoever publishes

    async def take(self, stop: Stop) -> Rows | None:
        """Everything that is ready, as far as one intent holds it; None when `stop` was set first."""
        while not self._ready and not stop.is_set:
            self._filled.clear()
            await first_of(self._filled.wait(), stop.wait())
        return None if stop.is_set else Rows(list(self._taken()))

    def _taken(self) -> Iterator[Block]:
        rows = size = pieces = left_out = 0
        while self._ready and pieces < MAX_PIECES:
            block = self._ready[0]
            rows, size, pieces = rows + block.piece.count, size + block.size, pieces + 1
            left_out += len(block.piece.left_out)
            full = rows > MAX_ROWS or size > self._intent_bytes or left_out > MAX_LEFT_OUT
            if pieces > 1 and full:
                return
            if not block.piece.out_of_turn:
                self._taken_to[block.piece.chain] = block.piece.rows.last + 1
            yield self._ready.popleft()

    def ready(self) -> Sequence[Block]:
        """What is decoded and not taken yet, in order."""
        return tuple(self._ready)

    def release(self, rows: Rows) -> None:
        """Rows are done with: their memory may be used again."""
        self._budget.give(rows.size)

    def closed(self, positions: Mapping[Chain, int]) -> None:
        """Everything below `positions` is stored; incarnations that waited for it may begin."""
        self._positions = positions
        for lane in self.roster:
            if lane.waits_for:
                self._wake(lane)

    def reset(self, positions: Mapping[Chain, int]) -> None:
        """Drop what was decoded and begin again at `positions`: somebody else has carried meanwhile."""
        self._positions = positions
        self._taken_to.clear()
        self._budget.give(sum(block.size for block in self._ready))
        self._ready.clear()
        while not self._turns.empty():
            self._turns.get_nowait()
        due = self.roster.reset(positions)
        self._attendant.mark(self.roster)
        for lane in due:
            self._wake(lane)

    def offer(self, block: Block) -> None:
        """Publish a block that was made elsewhere (a parked message tried again) in its turn.

        Its bytes are forced onto the budget. A `reset` drops it, as everything that is ready.
        """
        self._budget.force(block.size)
        self._ready.append(block)
        self._filled.set()

    # For discovery

    def pairs(self) -> list[tuple[str, str]]:
        """The (site, feed) that may flow in."""
        return self.roster.pairs()

    def found(self, chain: Chain, end: int | None = None) -> None:
        """The chain exists, or its tail has changed: its coverage ends at `end` (None: not known).

        It is looked at by the next `tick`.
        """
        lane = self.roster.add(chain, self.positions)
        if lane is not None:
            self._attendant.mark([lane])
            lane = self.roster.get(chain) or lane
            lane.is_due = True
            if end is not None:
                self.roster.archive(chain, end)

    def wake(self, chain: Chain) -> None:
        """Look at the chain at once: a notification says that there is more of it."""
        lane = self.roster.get(chain)
        if lane is not None:
            self._wake(lane)

    async def tick(self) -> None:
        """Look at chains that were found or that wait, and now and then at all."""
        # First where incarnations ended: nothing behind may be carried because it was looked at too early.
        await self._lookout.read_previous()
        now = self._clock.monotonic()
        for lane in self.roster:
            if self._is_long_ago(lane, now) or lane.is_due or lane.waits:
                lane.is_due = False
                self._wake(lane)

    @staticmethod
    def _is_long_ago(lane: ChainState, now: float) -> bool:
        """Whether the chain is to be looked at whatever its tail says, and then at more than usual."""
        if now - lane.looked_at < LOOK_AGAIN:
            return False
        lane.forget_damage()
        lane.look_behind = True
        if now - lane.looked_everywhere_at >= LOOK_EVERYWHERE:
            # A segment whose tail was never written may have been compacted since.
            lane.look_everywhere, lane.gone = True, None
        return True

    def fails(self, error: Exception) -> None:
        """What discovery told of led to an error: it ends `run`, and so the target, which begins again."""
        self._trouble.tell(error)

    # Turns

    def _wake(self, lane: ChainState) -> None:
        if self._positions is None or not lane.may_run or not self._attendant.is_informed:
            return
        if lane.is_busy:
            lane.again = True
        elif not lane.is_queued:
            lane.is_queued = True
            self._turns.put_nowait(lane)

    async def _take_turns(self) -> None:
        while True:
            lane = await self._turns.get()
            lane.is_queued, lane.is_busy, lane.again = False, True, False
            try:
                if self._is_current(lane):
                    await self._turn(lane)
            finally:
                lane.is_busy = False
            if lane.again and self._is_current(lane):
                self._wake(lane)

    def _is_current(self, lane: ChainState) -> bool:
        return self.roster.get(lane.chain) is lane

    async def _turn(self, lane: ChainState) -> None:
        """Carry one stretch of the chain into the queue of ready rows."""
        try:
            if await self._lookout.finds(lane):
                lane.again = True
                await self._carry_on(lane)
            else:
                lane.goes_on()
            lane.failed = False
        except _StaleError:
            pass
        except SegmentGone:
            # Compacted meanwhile; a listing that goes on naming it is looked at again only after a while.
            log.info("segment gone", action="segment_gone", **lane.chain.log_context())
            lane.again = not lane.failed
            lane.fail()
        except (Stopped, DataError, Refused, ConfigError) as error:
            # What the store refuses about one chain keeps back no other.
            self._stop(lane, error)
        except (Unavailable, OutcomeUnknown) as error:
            self._failed(lane, error)

    def _stop(self, lane: ChainState, error: FloeError) -> None:
        if self._is_current(lane):
            self._attendant.stop(lane, error)

    def _failed(self, lane: ChainState, error: Unavailable | OutcomeUnknown) -> None:
        """The store did not answer; told once, until the chain goes on."""
        metrics.unreadable.labels(self.target).inc()
        if not lane.failed:
            context = lane.chain.log_context()
            log.warning("store not readable", action="store_error", error=str(error), **context)
        lane.again = False
        lane.fail()

    async def _carry_on(self, lane: ChainState) -> None:
        """The next stretch of the chain, or what is given up before it."""
        if lane.given_up is None:
            await self._decode(lane, lane.stretches.popleft())
            return
        block = Block(IntentPiece(Gap(lane.chain), lane.given_up, 0))
        self._append(lane, block)
        lane.passes()
        self._budget.force(block.size)

    def _append(self, lane: ChainState, block: Block) -> None:
        """The block is ready. Raises _StaleError where it is nobody's any more."""
        if not self._is_current(lane):
            raise _StaleError
        lane.position = block.piece.rows.last + 1
        lane.goes_on()
        self._ready.append(block)
        self._filled.set()

    def _hold(self, lane: ChainState) -> ChainState:
        """Drop what is ready of the chain; the lane that goes on behind what was taken."""
        kept: deque[Block] = deque()
        for block in self._ready:
            if block.piece.chain == lane.chain and not block.piece.out_of_turn:
                self._budget.give(block.size)
            else:
                kept.append(block)
        self._ready = kept
        return self.roster.renew(lane, {**self.positions, **self._taken_to})

    async def _decode(self, lane: ChainState, stretch: Stretch[SegmentRef]) -> None:
        ref = stretch.segment

        def emit(block: Block) -> None:
            self._append(lane, block)

        lane.preparer.relay = await self._relays.of(lane.chain)
        try:
            problem = await self._decoder.read(
                ref,
                stretch.rows,
                lane.preparer,
                emit,
                avoided=frozenset(lane.damaged),
                passed=tuple(lane.passed),
            )
        except FromHoleError as error:
            lane.stands(error.found)
        except SegmentCorrupt as error:
            self._leave_out(lane, ref, error)
        else:
            if problem is not None:
                self._stop(lane, problem)

    def _leave_out(self, lane: ChainState, ref: SegmentRef, error: SegmentCorrupt) -> None:
        lane.damaged.add(ref.key)
        lane.replan(everywhere=True)
        metrics.damaged.labels(lane.chain.site, lane.chain.feed).inc()
        log.error(
            "segment damaged, left out", action="segment_damaged", error=str(error), **ref.log_context()
        )
