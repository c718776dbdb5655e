"""Rows for a replay, decoded ahead of whoever publishes them: the planned ranges, in order, and their end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.chain import Chain
from common.errors import SegmentCorrupt, Stopped
from common.jetstream.headers import REPLAY
from common.segments.documents import ChainStore
from common.segments.parquet_guard import SegmentGone
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, Stretch, cover
from common.service.exits import ways
from common.service.logs import get_logger
from common.service.process import Threads
from common.settings.ingress import SourceSettings, TargetSettings
from common.subjects import matches
from common.tasks import Stop, end, first_of
from ingress.chains.chain_state import AskLimits, ChainRegistry
from ingress.chains.recall import Recall
from ingress.checkpoint import MAX_BYTES, MAX_PIECES, MAX_ROWS, Gap, Intent, IntentPiece
from ingress.replay.plan import ChainRange
from ingress.replay.request import Advice, Request
from ingress.rows.ahead import ByteBudget
from ingress.rows.decoder import Decoder, Relays
from ingress.rows.prepare import Prepared, Preparer, TargetLimits
from ingress.rows.rows import Block, Rows
from ingress.rows.subjects import SubjectRule

log = get_logger("ingress.replay.source")


class ReplayPreparer(Preparer):
    """Prepares the rows that the filters `subjects` take (none: all)."""

    def __init__(
        self, chain: Chain, rule: SubjectRule, shape: TargetLimits, extra: bytes, subjects: tuple[str, ...]
    ):
        super().__init__(chain, rule, shape, extra)
        self._subjects_wanted = subjects

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """As `Preparer.prepare`; nothing where no row is wanted."""
        wanted = matching(batch, self._subjects_wanted)
        return super().prepare(wanted) if wanted.num_rows else Prepared(None)


class ReplayRoster(ChainRegistry):
    """Gives out preparers for one request."""

    def __init__(
        self, settings: TargetSettings, limits: TargetLimits, request: Request, ask_limits: AskLimits
    ) -> None:
        super().__init__(settings, limits, ask_limits)
        self._request = request

    def preparer(self, chain: Chain) -> ReplayPreparer:
        """A new one; used by one thread at a time."""
        request = self._request
        mark = b"%b: %b" % (REPLAY, request.digest.encode()) if request.into_source else b""
        rule = SubjectRule(request.prefix.encode())
        return ReplayPreparer(chain, rule, self.limits, mark, request.subjects)


def target_settings(request: Request) -> TargetSettings:
    """The target of a replay as ingress would have it in its configuration."""
    source = SourceSettings(site=(request.site,), feed=(request.feed,), subject_prefix=request.prefix)
    return TargetSettings(stream=request.target, sources=(source,))


def matching(batch: pa.RecordBatch, subjects: tuple[str, ...]) -> pa.RecordBatch:
    """The rows of `batch` whose subject one of the filters takes; all without filters."""
    if not subjects:
        return batch
    text, raw = batch.column("subject").cast(pa.binary()), batch.column("subject_raw")
    found: Any = text if raw.null_count == len(raw) else pc.coalesce(raw, text)
    kept = [s for s in set(found.to_pylist()) if any(matches(each, s) for each in subjects)]
    mask: Any = pc.is_in(found, value_set=pa.array(kept, pa.binary()))
    return batch.filter(mask)


MAY_SKIP = Callable[[Chain, SequenceRange], bool]
VANISHED = 5  # times that a segment may be gone before it is too much
MOST_ROWS = 50_000  # of one intent: progress is told after each


class ReplaySource:
    """The rows of `ranges` (`ingress.interfaces.RowSource`).

    Incarnations one after the other, their partitions in turn, a stretch of a segment at a time. `may_skip`:
    whether a hole is accepted. `memory_limit`: bytes.
    """

    def __init__(
        self,
        ranges: Sequence[ChainRange],
        store: SegmentStore,
        documents: ChainStore,
        threads: Threads,
        roster: ReplayRoster,
        may_skip: MAY_SKIP,
        memory_limit: int,
        advice: Advice,
    ) -> None:
        self._advice = advice
        self._ranges, self._may_skip, self._roster = list(ranges), may_skip, roster
        self._store, self._threads = store.in_parts(), threads
        self._relays = Relays(documents, threads)
        self._budget = ByteBudget(memory_limit // 4)
        self._intent_bytes = min(MAX_BYTES, memory_limit // 8)
        self._decoder = Decoder(self._store, threads, self._budget)
        self.recall = _Recall(Recall(self._store, threads, self._budget, roster, self._relays), advice)
        self._positions: Mapping[Chain, int] | None = None
        self._again, self._changed = asyncio.Event(), asyncio.Event()
        self._ready: deque[Block] = deque()
        self._damaged: set[str] = set()
        self._ended, self._generation = False, 0
        self.bytes_done, self.finished = 0, asyncio.Event()

    async def run(self) -> None:
        """Decode for as long as the replay runs; ends only by an error."""
        while True:
            await self._again.wait()
            self._again.clear()
            work = asyncio.create_task(self._decode_all(), name="replay-decode")
            try:
                await first_of(self._again.wait(), asyncio.wait({work}))
                if work.done():
                    work.result()
                    await self._again.wait()
            finally:
                await end(work)

    # For whoever publishes

    async def take(self, stop: Stop, seconds: float) -> Rows | None:
        """Everything that is ready, as far as one intent holds it; None once `stop` is set, or where nothing
        came in `seconds`.

        At the end of the ranges `finished` is set, and nothing is ready any more.
        """
        if not self._ready and not stop.is_set:
            if self._ended:
                self.finished.set()
            self._changed.clear()
            await first_of(self._changed.wait(), stop.wait(), seconds=seconds)
        return None if stop.is_set or not self._ready else Rows(list(self._taken()))

    def _taken(self) -> Iterator[Block]:
        rows = size = pieces = 0
        while self._ready and pieces < MAX_PIECES:
            block = self._ready[0]
            rows, size, pieces = rows + block.piece.count, size + block.size, pieces + 1
            if pieces > 1 and (rows > min(MAX_ROWS, MOST_ROWS) or size > self._intent_bytes):
                return
            yield self._ready.popleft()

    def release(self, rows: Rows) -> None:
        """Rows are done with: their memory may be used again."""
        self._budget.give(rows.size)
        self.bytes_done += sum(block.material.ends[-1] for block in rows.blocks if block.material)

    def closed(self, positions: Mapping[Chain, int]) -> None:
        """Everything below `positions` is stored."""

    def reset(self, positions: Mapping[Chain, int]) -> None:
        """Begin again at `positions`."""
        self._budget.give(sum(block.size for block in self._ready))
        self._ready.clear()
        self._positions, self._ended = dict(positions), False
        self._generation += 1
        self._again.set()

    # Decoding

    async def _decode_all(self) -> None:
        """Everything from the positions of now on; nothing more once there are others."""
        generation = self._generation
        with suppress(_StaleError):
            await self._decode_from(dict(self._positions or {}), generation)
            self._ended = generation == self._generation
            self._changed.set()

    async def _decode_from(self, positions: Mapping[Chain, int], generation: int) -> None:
        for _, group in groupby(self._ranges, key=lambda each: each.chain.incarnation):
            turns = deque(
                _Turn(each.chain, positions.get(each.chain, each.rows.first), each.rows.last, generation)
                for each in group
            )
            while turns:
                turn = turns.popleft()
                if await self._stretch(turn):
                    turns.append(turn)

    async def _stretch(self, turn: _Turn) -> bool:
        """Read the next stretch of a chain; False where it is at its end."""
        if turn.position > turn.last:
            return False
        stretch = await self._next(turn)
        if stretch is None or stretch.rows.first > turn.position:
            hole = SequenceRange(turn.position, turn.last if stretch is None else stretch.rows.first - 1)
            self._skip_or_look_again(turn, hole)
            return True
        try:
            await self._read(turn, stretch)
        except SegmentGone:
            turn.vanished += 1
            turn.stretches.clear()
            if turn.vanished > VANISHED:
                raise
        except SegmentCorrupt as error:
            self._leave_out(stretch.segment, error)
            turn.stretches.clear()
        return True

    async def _next(self, turn: _Turn) -> Stretch[SegmentRef] | None:
        """The next stretch at or behind the position; None behind the last."""
        if not turn.stretches:
            refs = await self._threads.run(self._store.list, turn.chain, position=turn.position)
            usable = [ref for ref in refs if ref.key not in self._damaged]
            turn.stretches = deque(cover(usable, turn.position, turn.last))
        if not turn.stretches:
            return None
        first = turn.stretches[0]
        return turn.stretches.popleft() if first.rows.first == turn.position else first

    async def _read(self, turn: _Turn, stretch: Stretch[SegmentRef]) -> None:
        def emit(block: Block) -> None:
            self._offer(turn, block)

        preparer = self._roster.preparer(turn.chain)
        preparer.relay = await self._relays.of(turn.chain)
        problem = await self._decoder.read(
            stretch.segment, stretch.rows, preparer, emit, avoided=frozenset(self._damaged)
        )
        if problem is not None:
            raise Stopped(problem.message, hint=self._advice.refused(problem.code), code=problem.code)

    def _skip_or_look_again(self, turn: _Turn, hole: SequenceRange) -> None:
        """A listing may be hours old, and damage may have been put right: look once more before it counts."""
        if turn.looked_again:
            self._skip(turn, hole)
            return
        turn.looked_again = True
        turn.stretches.clear()
        self._damaged.clear()

    def _skip(self, turn: _Turn, hole: SequenceRange) -> None:
        if not self._may_skip(turn.chain, hole):
            raise hole_error(self._advice, turn.chain, hole)
        block = Block(IntentPiece(Gap(turn.chain), hole, 0))
        self._offer(turn, block)
        self._budget.force(block.size)

    def _offer(self, turn: _Turn, block: Block) -> None:
        """The block is ready. Raises _StaleError where the replay has begun again elsewhere meanwhile."""
        if turn.generation != self._generation:
            raise _StaleError
        turn.position, turn.looked_again = block.piece.rows.last + 1, False
        self._ready.append(block)
        self._changed.set()

    def _leave_out(self, ref: SegmentRef, error: SegmentCorrupt) -> None:
        self._damaged.add(ref.key)
        log.error(
            "segment damaged, left out", action="segment_damaged", error=str(error), **ref.log_context()
        )


class _StaleError(Exception):
    """The replay has begun again at other positions: what is decoded belongs to nobody."""


class _Turn:
    """One chain: the next sequence to decode, the last one wanted, what is left of its cover.

    `looked_again`: what is missing at the position was looked for twice.
    """

    def __init__(self, chain: Chain, position: int, last: int, generation: int) -> None:
        self.chain, self.position, self.last, self.generation = chain, position, last, generation
        self.looked_again = False
        self.stretches: deque[Stretch[SegmentRef]] = deque()
        self.vanished = 0


class _Recall:
    """Finds the rows of an open intent again; what to do where they are gone is said for a replay."""

    def __init__(self, recall: Recall, advice: Advice) -> None:
        self._recall, self._advice = recall, advice

    async def rows(self, intent: Intent, stored: int) -> Rows:
        try:
            return await self._recall.rows(intent, stored)
        except Stopped as error:
            hint = ways(("put the segment back, and go on", self._advice.same()), self._advice.anew("or "))
            if error.code != "E-INTENT":
                hint = self._advice.refused(error.code)
            raise Stopped(error.message, hint=hint, code=error.code) from error


def hole_error(advice: Advice, chain: Chain, *holes: SequenceRange) -> Stopped:
    """What a replay ends with where sequences are missing that nobody has given up."""
    shown = ", ".join(map(str, holes[:10])) + (f" and {len(holes) - 10} more" if len(holes) > 10 else "")
    return Stopped(
        f"chain {chain}: no segment covers {shown}",
        hint=advice.holes(chain, holes),
        code="E-REPLAY-HOLE",
    )
