"""The rows of a replay, decoded ahead of the publisher: the planned ranges, in order, and their end."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import pyarrow as pa

from common.archive.documents import ChainStore, Floor
from common.archive.reader import RowFilter
from common.archive.scan import ChainArchive, Hole
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import UnreadableSegment
from common.chain import Chain
from common.errors import Stopped
from common.exits import choices
from common.logs import get_logger
from common.nats.headers import REPLAY_HEADER
from common.sequences import SequenceRange, Stretch
from common.service.process import ThreadPool
from common.settings.ingress import SourceSettings, TargetSettings
from common.tasks import Stop, run_until_stopped
from ingress.chains.chain_state import ChainRegistry, ReadLimits
from ingress.chains.recall import Recall
from ingress.checkpoint import Gap, Intent, IntentPiece
from ingress.recovery.ranges import ChainRange
from ingress.recovery.request import ReplayHints, ReplayRequest
from ingress.rows.decoder import DecodeOptions, Decoder, RelayFlags
from ingress.rows.prepare import Prepared, Preparer, SubjectRule, TargetLimits
from ingress.rows.rows import Block, ReadyBlocks, Rows

log = get_logger(__name__)


class ReplayPreparer(Preparer):
    """A preparer of the rows that match the filters of `request` (no filters: all rows)."""

    def __init__(self, chain: Chain, request: ReplayRequest, limits: TargetLimits) -> None:
        mark = b"%b: %b" % (REPLAY_HEADER, request.digest.encode()) if request.into_source else b""
        super().__init__(chain, SubjectRule(request.prefix.encode()), limits, mark)
        self._filter = RowFilter(subjects=request.subjects)

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        wanted = self._filter.select(batch)
        return super().prepare(wanted) if wanted.num_rows else Prepared(None)


class ReplayRegistry(ChainRegistry):
    """A registry of chains with preparers for the request of `hints`."""

    def __init__(self, limits: TargetLimits, hints: ReplayHints, read_limits: ReadLimits) -> None:
        super().__init__(target_settings(hints.request), limits, read_limits)
        self.hints = hints

    def preparer(self, chain: Chain) -> ReplayPreparer:
        """Return a new preparer; used by one thread at a time."""
        return ReplayPreparer(chain, self.hints.request, self.limits)


def target_settings(request: ReplayRequest) -> TargetSettings:
    source = SourceSettings(site=(request.site,), feed=(request.feed,), subject_prefix=request.prefix)
    return TargetSettings(stream=request.target, sources=(source,))


MAX_REPLAY_ROWS = 50_000  # rows of one intent; progress is reported after each intent


class _ResetError(Exception):
    """The replay has begun again at other positions: the decoded rows are not used."""


@dataclass(slots=True)
class _ChainCursor:
    """One chain: the next sequence to decode, and the last one wanted."""

    archive: ChainArchive
    position: int
    last: int


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
        threads: ThreadPool,
        chains: ReplayRegistry,
        may_skip: Callable[[Chain, SequenceRange], bool],
        memory_limit: int,
    ) -> None:
        self._ranges, self._may_skip, self._chains, self._documents = ranges, may_skip, chains, documents
        self._store, self._threads, self._relays = store.with_partial_reads(), threads, RelayFlags(documents, threads)
        self._ahead = ReadyBlocks(memory_limit, MAX_REPLAY_ROWS)
        self._decoder = Decoder(self._store, threads, self._ahead.budget)
        self.recall = ReplayRecall(self._store, threads, self._ahead.budget, chains, self._relays)
        self._positions: Mapping[Chain, int] = {}
        self._is_decoded = False
        self._reset_event, self.finished = asyncio.Event(), asyncio.Event()
        self._stored: Mapping[Chain, int] = {}
        # Bytes of the last rows, unless their intent is closed.
        self._unclosed_bytes: dict[tuple[Chain, SequenceRange], int] = {}
        self.bytes_done = 0

    # For the publisher

    async def take(self, stop: Stop, seconds: float) -> Rows | None:
        if self._is_decoded and not [*self._ahead] and not stop.is_set:
            self.finished.set()
        self._unclosed_bytes = {}
        return await self._ahead.take(stop, seconds)

    def release(self, rows: Rows) -> None:
        self._ahead.release(rows)
        self._unclosed_bytes = {(b.piece.chain, b.piece.rows): b.batch.byte_ends[-1] for b in rows.blocks if b.batch}
        self._count_stored()

    def record_stored(self, positions: Mapping[Chain, int]) -> None:
        """Receive the `positions` of a closed intent: all rows below them are stored."""
        self._stored = positions
        self._count_stored()

    def _count_stored(self) -> None:
        """Count the rows of closed intents. Rows are released before or after their intent is closed, or it is never
        closed.
        """
        done = [sent for sent in self._unclosed_bytes if sent[1].last < self._stored.get(sent[0], 0)]
        self.bytes_done += sum(map(self._unclosed_bytes.pop, done))

    def reset(self, positions: Mapping[Chain, int]) -> None:
        self._ahead.drop()
        self._positions, self._is_decoded = dict(positions), False
        self._reset_event.set()  # it stays set until the present decoding has ended

    # Decoding

    async def run(self) -> None:
        while True:
            await self._reset_event.wait()
            self._reset_event.clear()
            await run_until_stopped(self._reset_event, self._decode_all())

    async def _decode_all(self) -> None:
        positions = self._positions
        with suppress(_ResetError):
            for _, group in groupby(self._ranges, key=lambda each: each.chain.incarnation):
                cursors = deque(
                    _ChainCursor(ChainArchive(self._store, c.chain), positions.get(c.chain, c.rows.first), c.rows.last)
                    for c in group
                )
                while cursors:
                    cursor = cursors.popleft()
                    if cursor.position <= cursor.last:
                        await self._advance(cursor)
                        cursors.append(cursor)
            self._is_decoded = not self._reset_event.is_set()
            self._ahead.wake()

    async def _advance(self, cursor: _ChainCursor) -> None:
        part = await self._threads.run(cursor.archive.next, cursor.position, cursor.last)
        if isinstance(part, Hole):
            await self._skip_hole(cursor, part.rows)
        elif part is not None:
            try:
                await self._decode(cursor, part)
            except UnreadableSegment as found:
                if cursor.archive.avoid(found):
                    context = found.segment.log_context()
                    log.error("segment damaged", action="segment_damaged", error=str(found), **context)

    async def _decode(self, cursor: _ChainCursor, stretch: Stretch[SegmentRef]) -> None:
        preparer = self._chains.preparer(stretch.segment.chain)
        preparer.is_relay = await self._relays.is_relay(stretch.segment.chain)
        options = DecodeOptions(damaged_keys=cursor.archive.avoided)
        rows = self._decoder.open(stretch.segment, stretch.rows, options)
        problem = await self._decoder.read(rows, preparer, partial(self._append, cursor))
        if problem is not None:
            raise Stopped(problem.message, hint=self._chains.hints.refused_hint(problem.code), code=problem.code)

    async def _skip_hole(self, cursor: _ChainCursor, hole: SequenceRange) -> None:
        chain = cursor.archive.chain
        if self._may_skip(chain, hole):
            block = Block(IntentPiece(Gap(chain), hole, 0))
            self._append(cursor, block)
            self._ahead.budget.acquire_unchecked(block.size)
        elif (floor := await self._threads.run(self._documents.floor, chain)) and floor.first > hole.first:
            raise retention_error(chain, floor, self._chains.hints)
        else:
            raise hole_error(self._chains.hints, chain, hole)

    def _append(self, cursor: _ChainCursor, block: Block) -> None:
        """Append a decoded block. Raises _ResetError if the replay has meanwhile begun again at other positions."""
        if self._reset_event.is_set():
            raise _ResetError
        cursor.position = block.piece.rows.last + 1
        self._ahead.append(block)


class ReplayRecall(Recall):
    """A recall with the hints of a replay, for missing rows of an open intent."""

    _chains: ReplayRegistry

    async def rows(self, intent: Intent, stored: int) -> Rows:
        try:
            return await super().rows(intent, stored)
        except Stopped as error:
            hints = self._chains.hints
            hint = choices(("put the segment back, and continue", hints.command()), hints.restart_hint("or "))
            if error.code != "E-INTENT":
                hint = hints.refused_hint(error.code)
            raise Stopped(error.message, hint=hint, code=error.code) from error


def retention_error(chain: Chain, floor: Floor, hints: ReplayHints | None = None) -> Stopped:
    """Return the error for rows that retention deleted meanwhile. `hints`: None before the replay begins."""
    hint = "run the same command again: it takes the remaining rows"
    if hints:
        left = "put the segments back from a copy of the bucket; or replay the remaining ones"
        hint = choices((left, hints.command("--skip-holes")))
    return Stopped(f"chain {chain}: {floor}", hint=hint, code="E-FLOOR")


def hole_error(hints: ReplayHints, chain: Chain, *holes: SequenceRange) -> Stopped:
    text = ", ".join(map(str, holes[:10])) + (f" and {len(holes) - 10} more" if len(holes) > 10 else "")
    return Stopped(f"chain {chain}: no segment covers {text}", hint=hints.hole_hint(chain, holes), code="E-REPLAY-HOLE")
