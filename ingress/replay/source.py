"""The rows of a replay, decoded ahead of the publisher: the planned ranges, in order, and their end."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.chain import Chain
from common.errors import SegmentCorrupt, Stopped
from common.exits import ways
from common.jetstream.headers import REPLAY
from common.logs import get_logger
from common.segments.documents import ChainStore, Floor
from common.segments.parquet_guard import SegmentGone
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, Stretch, cover
from common.service.process import Threads
from common.settings.ingress import SourceSettings, TargetSettings
from common.subjects import matches
from common.tasks import Stop, unless
from ingress.chains.chain_state import AskLimits, ChainRegistry
from ingress.chains.recall import Recall
from ingress.checkpoint import Gap, Intent, IntentPiece
from ingress.replay.plan import ChainRange
from ingress.replay.request import Advice, Request
from ingress.rows.decoder import Decoder, HowRead, Relays
from ingress.rows.prepare import Prepared, Preparer, SubjectRule, TargetLimits
from ingress.rows.rows import Block, DecodedAhead, Rows

log = get_logger(__name__)


class ReplayPreparer(Preparer):
    """A preparer of the rows that match the filters of `request` (no filters: all rows)."""

    def __init__(self, chain: Chain, request: Request, limits: TargetLimits) -> None:
        mark = b"%b: %b" % (REPLAY, request.digest.encode()) if request.into_source else b""
        super().__init__(chain, SubjectRule(request.prefix.encode()), limits, mark)
        self._subjects_wanted = request.subjects

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        wanted = matching(batch, self._subjects_wanted)
        return super().prepare(wanted) if wanted.num_rows else Prepared(None)


class ReplayRegistry(ChainRegistry):
    """A registry of chains with preparers for the request of `advice`."""

    def __init__(self, limits: TargetLimits, advice: Advice, ask_limits: AskLimits) -> None:
        super().__init__(target_settings(advice.request), limits, ask_limits)
        self.advice = advice

    def preparer(self, chain: Chain) -> ReplayPreparer:
        """Return a new preparer; used by one thread at a time."""
        return ReplayPreparer(chain, self.advice.request, self.limits)


def target_settings(request: Request) -> TargetSettings:
    source = SourceSettings(site=(request.site,), feed=(request.feed,), subject_prefix=request.prefix)
    return TargetSettings(stream=request.target, sources=(source,))


def matching(batch: pa.RecordBatch, subjects: tuple[str, ...]) -> pa.RecordBatch:
    if not subjects:
        return batch
    text, raw = batch.column("subject").cast(pa.binary()), batch.column("subject_raw")
    found: Any = text if raw.null_count == len(raw) else pc.coalesce(raw, text)
    kept = [s for s in set(found.to_pylist()) if any(matches(each, s) for each in subjects)]
    mask: Any = pc.is_in(found, value_set=pa.array(kept, pa.binary()))
    return batch.filter(mask)


VANISHED = 5  # times that a segment may be gone before an error
MOST_ROWS = 50_000  # rows of one intent; progress is reported after each intent


class _StaleError(Exception):
    """The replay has begun again at other positions: the decoded rows are not used."""


@dataclass(slots=True)
class _Turn:
    """One chain: the next sequence to decode, the last one wanted, the rest of its cover.

    `looked_again`: the segments were listed again because no stretch begins at the position.
    """

    chain: Chain
    position: int
    last: int
    generation: int
    looked_again: bool = False
    stretches: deque[Stretch[SegmentRef]] = field(default_factory=deque)
    vanished: int = 0


class ReplaySource:
    """The rows of `ranges` (`ingress.delivery.RowSource`).

    Incarnations come one after the other, their partitions in turn, a stretch of a segment at a time. `may_skip`:
    returns True for a hole that may be skipped. `memory_limit`: bytes. `finished`: set at the end of the ranges, once
    all ready rows have been taken. `bytes_done`: of the messages in closed intents.
    """

    def __init__(
        self,
        ranges: Sequence[ChainRange],
        store: SegmentStore,
        documents: ChainStore,
        threads: Threads,
        chains: ReplayRegistry,
        may_skip: Callable[[Chain, SequenceRange], bool],
        memory_limit: int,
    ) -> None:
        self._ranges, self._may_skip, self._chains, self._documents = ranges, may_skip, chains, documents
        self._store, self._threads, self._relays = store.in_parts(), threads, Relays(documents, threads)
        self._ahead = DecodedAhead(memory_limit, MOST_ROWS)
        self._decoder = Decoder(self._store, threads, self._ahead.budget)
        self.recall = ReplayRecall(self._store, threads, self._ahead.budget, chains, self._relays)
        self._positions: Mapping[Chain, int] = {}
        self._generation, self._is_decoded = 0, False
        self._again, self.finished = asyncio.Event(), asyncio.Event()
        self._damaged: set[str] = set()
        self._stored: Mapping[Chain, int] = {}
        self._sent: dict[tuple[Chain, SequenceRange], int] = {}  # bytes of the last rows, unless their intent is closed
        self.bytes_done = 0

    # For the publisher

    async def take(self, stop: Stop, seconds: float) -> Rows | None:
        if self._is_decoded and not [*self._ahead] and not stop.is_set:
            self.finished.set()
        self._sent = {}
        return await self._ahead.take(stop, seconds)

    def release(self, rows: Rows) -> None:
        self._ahead.release(rows)
        self._sent = {(each.piece.chain, each.piece.rows): each.batch.ends[-1] for each in rows.blocks if each.batch}
        self._count()

    def closed(self, positions: Mapping[Chain, int]) -> None:
        """Receive the `positions` of a closed intent: all rows below them are stored."""
        self._stored = positions
        self._count()

    def _count(self) -> None:
        """Count the rows of closed intents. Rows are released before or after their intent is closed, or it is never
        closed.
        """
        done = [sent for sent in self._sent if sent[1].last < self._stored.get(sent[0], 0)]
        self.bytes_done += sum(map(self._sent.pop, done))

    def reset(self, positions: Mapping[Chain, int]) -> None:
        self._ahead.drop()
        self._positions, self._is_decoded = dict(positions), False
        self._generation += 1
        self._again.set()

    # Decoding

    async def run(self) -> None:
        while True:
            await self._again.wait()
            self._again.clear()
            await unless(self._again, self._decode_all())

    async def _decode_all(self) -> None:
        generation, positions = self._generation, self._positions
        with suppress(_StaleError):
            for _, group in groupby(self._ranges, key=lambda each: each.chain.incarnation):
                turns = deque(
                    _Turn(each.chain, positions.get(each.chain, each.rows.first), each.rows.last, generation)
                    for each in group
                )
                while turns:
                    turn = turns.popleft()
                    if turn.position <= turn.last:
                        await self._advance(turn)
                        turns.append(turn)
            self._is_decoded = generation == self._generation
            self._ahead.wake()

    async def _advance(self, turn: _Turn) -> None:
        if (stretch := await self._next(turn)) is None or stretch.rows.first > turn.position:
            last = turn.last if stretch is None else stretch.rows.first - 1
            await self._pass(turn, SequenceRange(turn.position, last))
            return
        turn.stretches.popleft()
        try:
            await self._decode(turn, stretch)
        except SegmentGone:
            turn.vanished += 1
            turn.stretches.clear()
            if turn.vanished > VANISHED:
                raise
        except SegmentCorrupt as error:
            context = stretch.segment.log_context()
            log.error("segment damaged, left out", action="segment_damaged", error=str(error), **context)
            self._damaged.add(stretch.segment.key)
            turn.stretches.clear()

    async def _next(self, turn: _Turn) -> Stretch[SegmentRef] | None:
        """Return the next stretch at or after the position; None if there is none."""
        if not turn.stretches:
            refs = await self._threads.run(self._store.list, turn.chain, position=turn.position)
            usable = [ref for ref in refs if ref.key not in self._damaged]
            turn.stretches = deque(cover(usable, turn.position, turn.last))
        return turn.stretches[0] if turn.stretches else None

    async def _decode(self, turn: _Turn, stretch: Stretch[SegmentRef]) -> None:
        preparer = self._chains.preparer(turn.chain)
        preparer.relay = await self._relays.of(turn.chain)
        rows = self._decoder.begin(stretch.segment, stretch.rows, HowRead(avoided=frozenset(self._damaged)))
        problem = await self._decoder.read(rows, preparer, partial(self._append, turn))
        if problem is not None:
            raise Stopped(problem.message, hint=self._chains.advice.refused(problem.code), code=problem.code)

    async def _pass(self, turn: _Turn, hole: SequenceRange) -> None:
        if not turn.looked_again:
            # A listing may be hours old, and damage may have been repaired: list once more before the hole counts.
            turn.looked_again = True
            turn.stretches.clear()
            self._damaged.clear()
        elif self._may_skip(turn.chain, hole):
            block = Block(IntentPiece(Gap(turn.chain), hole, 0))
            self._append(turn, block)
            self._ahead.budget.force(block.size)
        elif (floor := await self._threads.run(self._documents.floor, turn.chain)) and floor.first > hole.first:
            raise gone_error(turn.chain, floor, self._chains.advice)
        else:
            raise hole_error(self._chains.advice, turn.chain, hole)

    def _append(self, turn: _Turn, block: Block) -> None:
        """Append a decoded block. Raises _StaleError if the replay has meanwhile begun again at other positions."""
        if turn.generation != self._generation:
            raise _StaleError
        turn.position, turn.looked_again = block.piece.rows.last + 1, False
        self._ahead.append(block)


class ReplayRecall(Recall):
    """A recall with the hints of a replay, for missing rows of an open intent."""

    _chains: ReplayRegistry

    async def rows(self, intent: Intent, stored: int) -> Rows:
        try:
            return await super().rows(intent, stored)
        except Stopped as error:
            advice = self._chains.advice
            hint = ways(("put the segment back, and go on", advice.same()), advice.anew("or "))
            if error.code != "E-INTENT":
                hint = advice.refused(error.code)
            raise Stopped(error.message, hint=hint, code=error.code) from error


def gone_error(chain: Chain, floor: Floor, advice: Advice | None = None) -> Stopped:
    """Return the error for rows that retention deleted meanwhile. `advice`: None before the replay begins."""
    left = "put the segments back from a copy of the bucket; or replay what is left"
    hint = ways((left, advice.same("--skip-holes"))) if advice else "give the same command again: it takes what is left"
    return Stopped(f"chain {chain}: {floor}", hint=hint, code="E-FLOOR")


def hole_error(advice: Advice, chain: Chain, *holes: SequenceRange) -> Stopped:
    shown = ", ".join(map(str, holes[:10])) + (f" and {len(holes) - 10} more" if len(holes) > 10 else "")
    return Stopped(f"chain {chain}: no segment covers {shown}", hint=advice.holes(chain, holes), code="E-REPLAY-HOLE")
