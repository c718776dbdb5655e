"""Decodes ahead: the chains of a target in fair turns, a stretch of one segment at a time, within a byte
budget.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping

from common.chain import Chain
from common.clock import Clock, first_of
from common.errors import DataError, FloeError, OutcomeUnknown, SegmentCorrupt, Stopped, Unavailable
from common.segments.documents import ChainDocument, ChainStore
from common.segments.segment import SegmentRef
from common.segments.store import SegmentGone, SegmentStore
from common.sequences import Stretch
from common.service.logs import get_logger
from common.service.threads import Threads
from ingress import metrics
from ingress.blocks import Block, Rows
from ingress.budget import Budget
from ingress.decoder import Decoder
from ingress.intent import MAX_BYTES, MAX_PIECES, MAX_ROWS
from ingress.lane import Lane
from ingress.plan import Phase, first_position, plan_chain
from ingress.recall import Recall
from ingress.roster import Roster

log = get_logger("ingress.supply")

TURNS = 3  # chains that are read at the same time
LISTED = 200  # segments of level 0 that one look takes
LOOK_AGAIN = 300.0  # seconds until a chain is looked at whatever its tail says


class _StaleError(Exception):
    """The lane was made anew while its rows were read: they belong to nobody."""


class Supply:
    """Rows for one target, decoded ahead of whoever publishes them."""

    def __init__(
        self,
        target: str,
        roster: Roster,
        store: SegmentStore,
        documents: ChainStore,
        threads: Threads,
        clock: Clock,
        memory_limit: int,
    ) -> None:
        self.target, self.roster = target, roster
        self._store, self._documents, self._threads = store, documents, threads
        self._clock = clock
        # The rest is for what decoding needs beside the rows, for what is on the wire, and for what the
        # allocator keeps.
        self._budget = Budget(memory_limit // 3)
        self._decoder = Decoder(store, threads, self._budget)
        self.recall = Recall(store, threads, self._budget, roster)
        self._intent_bytes = min(MAX_BYTES, memory_limit // 6)
        self._turns: asyncio.Queue[Lane] = asyncio.Queue()
        self._ready: deque[Block] = deque()
        self._filled = asyncio.Event()
        self.positions: Mapping[Chain, int] = {}

    async def run(self) -> None:
        """Decode for ever; ends only by an error that an operator has to deal with."""
        async with asyncio.TaskGroup() as group:
            for number in range(TURNS):
                group.create_task(self._take_turns(), name=f"decode-{self.target}-{number}")

    # For whoever publishes

    async def take(self, stop: asyncio.Event) -> Rows | None:
        """Everything that is ready, as far as one intent holds it; None when `stop` was set first."""
        while not self._ready and not stop.is_set():
            self._filled.clear()
            await first_of(self._filled.wait(), stop.wait())
        return None if stop.is_set() else Rows(list(self._taken()))

    def _taken(self) -> Iterator[Block]:
        rows = size = pieces = 0
        while self._ready and pieces < MAX_PIECES:
            block = self._ready[0]
            rows, size, pieces = rows + block.piece.count, size + block.size, pieces + 1
            if pieces > 1 and (rows > MAX_ROWS or size > self._intent_bytes):
                return
            yield self._ready.popleft()

    def release(self, rows: Rows) -> None:
        """Rows are done with: their memory may be used again."""
        self._budget.give(rows.size)

    def closed(self, positions: Mapping[Chain, int]) -> None:
        """Everything below `positions` is stored; incarnations that waited for it may begin."""
        self.positions = positions
        for lane in self.roster:
            if lane.waits_for:
                self._wake(lane)

    def reset(self, positions: Mapping[Chain, int]) -> None:
        """Drop what was decoded and begin again at `positions`: somebody else has carried meanwhile."""
        self.positions = positions
        self._budget.give(sum(block.size for block in self._ready))
        self._ready.clear()
        while not self._turns.empty():
            self._turns.get_nowait()
        self.roster.reset(positions)
        for lane in self.roster:
            self._wake(lane)

    def measure(self) -> None:
        """Set the gauges of all chains; those of one partition's incarnations are one."""
        lanes = list(self.roster)
        metrics.stopped_chains.labels(self.target).set(sum(lane.stopped is not None for lane in lanes))
        lags: dict[tuple[str, str, int], int] = {}
        waits: dict[tuple[str, str, int], float] = {}
        for lane in lanes:
            whole = (lane.chain.site, lane.chain.feed, lane.chain.partition)
            at = self.positions.get(lane.chain, lane.position or 1)
            since = lane.plan.waiting_since
            waited = 0.0 if since is None else max(0.0, self._clock.now() - since)
            lags[whole] = lags.get(whole, 0) + max(0, lane.archived - at + 1)
            waits[whole] = max(waits.get(whole, 0.0), waited)
        for (site, feed, partition), lag in lags.items():
            labels = (self.target, site, feed, str(partition))
            metrics.lag_sequences.labels(*labels).set(lag)
            metrics.waiting_seconds.labels(*labels).set(waits[site, feed, partition])

    # For discovery

    def pairs(self) -> list[tuple[str, str]]:
        """The (site, feed) that may flow in."""
        return self.roster.pairs()

    def found(self, chain: Chain, end: int | None = None) -> None:
        """The chain exists, or its tail has changed: its coverage ends at `end` (None: not known)."""
        lane = self.roster.add(chain, self.positions)
        if lane is None:
            return
        if end is not None:
            self.roster.archive(chain, end)
        self._wake(lane)

    async def tick(self) -> None:
        """Time has passed: look again at chains that wait, and now and then at all."""
        for chain in self.roster.needs_previous():
            await self._read_previous(chain)
        now = self._clock.monotonic()
        for lane in self.roster:
            long_ago = now - lane.looked_at >= LOOK_AGAIN
            if long_ago:
                lane.forget_damage()
            if long_ago or lane.waits:
                self._wake(lane)

    async def _read_previous(self, chain: Chain) -> None:
        try:
            document = await self._threads.run(self._documents.read_stream, chain)
        except DataError as error:
            log.error(
                "stream.json spoiled", action="document_spoiled", error=str(error), **chain.log_context()
            )
            return
        if document is not None:
            self.roster.set_previous(chain, document.previous, self.positions)

    # Turns

    def _wake(self, lane: Lane) -> None:
        if lane.stopped is not None:
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

    def _is_current(self, lane: Lane) -> bool:
        return self.roster.get(lane.chain) is lane

    async def _turn(self, lane: Lane) -> None:
        """Carry one stretch of the chain into the queue of ready rows."""
        try:
            if await self._has_stretch(lane):
                lane.again = True
                await self._decode(lane, lane.stretches.popleft())
            lane.failed = False
        except _StaleError:
            pass
        except SegmentGone:
            # Compacted meanwhile; a listing that goes on naming it is looked at again only after a while.
            log.info("segment gone", action="segment_gone", **lane.chain.log_context())
            lane.again = not lane.failed
            lane.fail()
        except (Unavailable, OutcomeUnknown) as error:
            lane.again = False
            lane.fail()
            metrics.unreadable.labels(self.target).inc()
            log.warning(
                "store not readable", action="store_error", error=str(error), **lane.chain.log_context()
            )

    async def _has_stretch(self, lane: Lane) -> bool:
        if not lane.has_begun and not await self._begin(lane):
            return False
        if not lane.stretches:
            await self._look(lane)
        return bool(lane.stretches)

    async def _begin(self, lane: Lane) -> bool:
        """Find out where the chain begins; whether that is known."""
        try:
            lane.waits_for = self.roster.obstacle(lane, self.positions)
            document = None if lane.waits_for else await self._read_chain(lane)
            if document is None:
                return False
            floor = await self._threads.run(self._documents.read_floor, lane.chain)
        except (Stopped, DataError) as error:
            self._stop(lane, error)
            return False
        lane.position = first_position(document.first, floor)
        log.info("chain begins", action="chain_begins", position=lane.position, **lane.chain.log_context())
        return True

    async def _read_chain(self, lane: Lane) -> ChainDocument | None:
        document = await self._threads.run(self._documents.read_chain, lane.chain)
        if document is None:
            lane.waits_for = "chain.json is not there yet"
        return document

    async def _look(self, lane: Lane) -> None:
        """List from the position: level 0 first, all levels where that does not lead on but must."""
        refs = await self._list(lane, level=0, limit=LISTED)
        plan = plan_chain(refs, lane.position, lane.end, lane.damaged)
        if plan.phase not in (Phase.READY, Phase.DONE) and (refs or lane.look_everywhere or lane.waits):
            refs = await self._list(lane)
            plan = plan_chain(refs, lane.position, lane.end, lane.damaged)
        lane.looked(plan, self._clock.monotonic())

    async def _list(self, lane: Lane, level: int | None = None, limit: int | None = None) -> list[SegmentRef]:
        call = self._threads.run
        return await call(self._store.list, lane.chain, position=lane.position, level=level, limit=limit)

    async def _decode(self, lane: Lane, stretch: Stretch[SegmentRef]) -> None:
        ref = stretch.segment

        def emit(block: Block) -> None:
            if not self._is_current(lane):
                raise _StaleError
            lane.position = block.piece.rows.last + 1
            self._ready.append(block)
            self._filled.set()

        try:
            problem = await self._decoder.read(ref, stretch.rows, lane.preparer, emit)
        except SegmentCorrupt as error:
            self._leave_out(lane, ref, error)
        else:
            if problem is not None:
                self._stop(lane, problem)

    def _leave_out(self, lane: Lane, ref: SegmentRef, error: SegmentCorrupt) -> None:
        lane.damaged.add(ref.key)
        lane.replan(everywhere=True)
        metrics.damaged.labels(lane.chain.site, lane.chain.feed).inc()
        log.error(
            "segment damaged, left out", action="segment_damaged", error=str(error), **ref.log_context()
        )

    def _stop(self, lane: Lane, error: FloeError) -> None:
        lane.stopped, lane.again = error, False
        lane.replan()
        log.error(
            "chain stopped",
            action="chain_stopped",
            error=str(error),
            code=error.code,
            **lane.chain.log_context(),
        )
