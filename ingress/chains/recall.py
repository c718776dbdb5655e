"""Recall of the rows of an open intent: from the segment that it names, or through the cover if that is gone."""

import hashlib

from common.archive.columns import batch_of
from common.archive.documents import ChainStore
from common.archive.keys import DIGEST_LENGTH, SegmentName
from common.archive.scan import ChainArchive
from common.archive.segment import Message, SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import UnreadableSegment
from common.chain import Chain
from common.errors import DataError, Stopped
from common.exits import checkpoint_command, choices
from common.logs import get_logger
from common.sequences import SequenceRange, Stretch
from common.service.process import ThreadPool
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.plan import stretches_for
from ingress.checkpoint import Gap, Intent, IntentPiece
from ingress.parked import ParkedName, ParkedStore, to_bytes
from ingress.rows.decoder import DecodeOptions, Decoder, RelayFlags
from ingress.rows.prepare import Preparer, RowRefused, oversize_remedies
from ingress.rows.rows import Block, ByteBudget, Rows

log = get_logger(__name__)

MAX_SAME_END_SEGMENTS = 20  # segments that may end at the same sequence


class Recall:
    """Reader of the rows that an intent names. It counts the bytes of its blocks in `budget` without waiting, because
    rows that were decoded ahead are not published before the intent is closed.
    """

    def __init__(
        self,
        store: SegmentStore,
        threads: ThreadPool,
        budget: ByteBudget,
        chains: ChainRegistry,
        relays: RelayFlags,
        parked: ParkedStore | None = None,
    ) -> None:
        self._store, self._threads, self._budget, self._chains = store, threads, budget, chains
        self._relays, self._parked, self._decoder = relays, parked, Decoder(store, threads, budget)

    async def rows(self, intent: Intent, stored: int) -> Rows:
        """Return all messages of the intent by their index; a piece that is stored completely has only the number.

        Raises Stopped if the archive does not hold exactly these rows or the target no longer accepts one of them,
        ConfigError for a chain that is no longer in `sources`, else as the store does.
        """
        blocks: list[Block] = []
        before = 0
        try:
            for piece in intent.pieces:
                before += piece.count
                is_wanted = piece.count and before > stored
                if (block := await self._parked_block(piece) if is_wanted else Block(piece)) is None:
                    blocks += await self._piece(piece)
                else:
                    self._budget.acquire_unchecked(block.size)
                    blocks.append(block)
        except BaseException as error:
            self._budget.release(sum(block.size for block in blocks))
            if isinstance(error, RowRefused):
                raise self.refused_row_error(error) from error
            raise
        return Rows(blocks)

    def refused_row_error(self, error: RowRefused) -> Stopped:
        """Return the error for a row of the open intent that the target no longer accepts. Hints about the chain would
        not help: the intent is finished unchanged.
        """
        message, target = f"{error.message}; the row is part of the open intent", self._chains.target
        drop = checkpoint_command(target, "--accept")
        if error.code != "E-SUBJECT":
            message += f"; max_payload of the server is {self._chains.limits.max_payload}"
            return Stopped(message, hint=oversize_remedies(target), code="E-OVERSIZE-INTENT")
        return Stopped(
            message,
            hint=choices(
                "let the target accept the subject again: delivery continues by itself",
                ("or drop the rest of the intent, so that the chain stops instead", drop),
            ),
            code=error.code,
        )

    # Parked messages

    async def prepare_parked(self, name: ParkedName) -> Block:
        """Return the parked message, prepared with the current limits and rules. Its bytes are not yet on the budget.

        Raises RowRefused if the target still refuses it, ConfigError if its chain is not in `sources`, DataError if it
        is missing or damaged, else as the store does.
        """
        assert self._parked is not None, "only a target that parks retries"
        if (message := await self._threads.run(self._parked.read, name)) is None:
            raise DataError(f"parked message {name.sequence} of {name.chain} does not exist", code="E-PARKED")
        rows = SequenceRange(message.sequence, message.sequence)
        digest = hashlib.sha256(to_bytes(name.chain, message)).hexdigest()[:DIGEST_LENGTH]
        segment = SegmentName(name.chain, 0, rows, digest)
        return await self._retry_block(IntentPiece(segment, rows, 1, is_retry=True), message)

    async def _parked_block(self, piece: IntentPiece) -> Block | None:
        """Return the message of a piece out of turn; None if only the archive can hold it."""
        if self._parked is None or not piece.is_retry:
            return None
        message = await self._threads.run(self._parked.read, self._parked.name(piece.chain, piece.rows.first))
        return None if message is None else await self._retry_block(piece, message)

    async def _retry_block(self, piece: IntentPiece, message: Message) -> Block:
        preparer = await self._preparer(piece.chain, frozenset())
        prepared = await self._threads.run(preparer.prepare, batch_of(message))
        if prepared.problem is not None:
            raise prepared.problem
        assert prepared.batch is not None, "one row is ready or refused"
        return Block(piece, prepared.batch, prepared.batch.size)

    async def _preparer(self, chain: Chain, excluded: frozenset[int]) -> Preparer:
        preparer = self._chains.preparer(chain)
        preparer.is_relay = await self._relays.is_relay(chain)
        preparer.excluded = excluded
        return preparer

    # Pieces of segments

    async def _piece(self, piece: IntentPiece) -> list[Block]:
        damaged: set[str] = set()
        name, call = piece.segment, self._threads.run
        assert not isinstance(name, Gap), "a gap has no rows to be found"
        last, level = name.coverage.last, name.level
        near = await call(ChainArchive.listed, self._store, piece.chain, last, level=level, limit=MAX_SAME_END_SEGMENTS)
        while True:
            # The named segment holds exactly the rows of the intent. Other segments may hold rows that it left unread,
            # which are not part of it. If it is gone, the cover holds the rows, and may hold more by now.
            named = [ref for ref in near.refs if ref.segment == name and ref.key not in damaged]
            stretches = [Stretch(ref, piece.rows) for ref in named]
            if not named:
                stretches = await call(stretches_for, self._store, piece.chain, piece.rows, frozenset(damaged))
            if not stretches:
                floor = await call(ChainStore(self._store.objects, self._store.layout).floor, piece.chain)
                is_below = floor is not None and piece.rows.first < floor.first
                raise self._lost_rows_error(
                    piece, f"no undamaged segments cover {piece.rows}" + (f"; {floor}" if is_below else "")
                )
            if (found := await self._read(piece, stretches, damaged, own_rows_only=bool(named))) is not None:
                return found

    async def _read(
        self, piece: IntentPiece, stretches: list[Stretch[SegmentRef]], damaged: set[str], *, own_rows_only: bool
    ) -> list[Block] | None:
        """Read the stretches; None if a segment is damaged or gone, which is then added to `damaged`."""
        blocks: list[Block] = []
        try:
            preparer = await self._preparer(piece.chain, frozenset(piece.parked))
            for stretch in stretches:
                options = DecodeOptions(own_rows_only=own_rows_only, damaged_keys=frozenset(damaged))
                source = self._decoder.open(stretch.segment, stretch.rows, options)
                problem = await self._decoder.read(source, preparer, blocks.append, wait=False)
                if problem is not None:
                    raise problem
            if (count := sum(block.piece.count for block in blocks)) != piece.count:
                raise self._lost_rows_error(piece, f"expected {piece.count} messages in {piece.rows}, found {count}")
        except BaseException as error:
            self._budget.release(sum(block.size for block in blocks))
            if not isinstance(error, UnreadableSegment):
                raise
            context = piece.chain.log_context()
            log.warning("recall segment rejected", action="recall_segment_rejected", error=str(error), **context)
            damaged.add(error.segment.key)
            return None
        return blocks

    def _lost_rows_error(self, piece: IntentPiece, reason: str) -> Stopped:
        drop = checkpoint_command(self._chains.target, "--accept")
        return Stopped(
            f"chain {piece.chain}: the rows of the open intent cannot be found again: {reason}",
            hint=choices(("put the segment back, or one with the same rows; or drop the rest of the intent", drop)),
            code="E-INTENT",
        )
