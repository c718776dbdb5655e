"""Lets a parked message into an intent only where it was not delivered before, and marks what an intent does.

A parked message is delivered exactly once, by three steps that stand in this order:

    state loaded or saved, no intent open → no mark `delivered` → intent with the message opened, by
    compare-and-set from that state → all rows stored → mark `delivered` → intent closed

Whoever delivered it before had marked it before the state moved; so where the mark is missing and the state
has not moved, nobody did. An open intent is finished as it stands, so the mark may precede its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from common.chain import Chain
from common.failpoints import failpoint
from common.service.threads import Threads
from ingress import metrics
from ingress.chains.prefetch import Supply
from ingress.chains.recall import Recall
from ingress.checkpoint import Intent, Piece
from ingress.parked.names import ParkedName
from ingress.parked.side_by_side import in_threads
from ingress.parked.store import ParkedStore
from ingress.rows.rows import Block, Rows


class ParkedSource:
    """The rows of a supply, with parked messages that are tried again among them."""

    def __init__(self, supply: Supply, parked: ParkedStore, threads: Threads) -> None:
        self._supply, self._parked, self._threads = supply, parked, threads
        self._offered: dict[ParkedName, int] = {}

    @property
    def recall(self) -> Recall:
        """Who finds the rows of an open intent again."""
        return self._supply.recall

    def is_offered(self, name: ParkedName) -> bool:
        """Whether the message is on its way, as far as this instance knows."""
        return name in self._offered

    @property
    def offered_bytes(self) -> int:
        """Bytes in memory of parked messages that are on their way."""
        return sum(self._offered.values())

    def offer(self, block: Block) -> None:
        """Publish a parked message among what is ready."""
        self._offered[self._name(block.piece)] = block.size
        self._supply.offer(block)

    async def take(self, stop: asyncio.Event) -> Rows | None:
        """As the supply; of parked messages only what may be delivered, each once."""
        while (rows := await self._supply.take(stop)) is not None:
            if not any(block.piece.out_of_turn for block in rows.blocks):
                return rows
            kept = await self._kept(rows)
            if kept.blocks:
                return kept
        return None

    async def _kept(self, rows: Rows) -> Rows:
        kept: list[Block] = []
        try:
            refused = await self._refused(rows, kept)
        except BaseException:
            self._supply.release(rows)
            raise
        self._supply.release(Rows(refused))
        return Rows(kept)

    async def _refused(self, rows: Rows, kept: list[Block]) -> list[Block]:
        """The blocks that may not be published; all others go to `kept`."""
        left = await self._deliverable(rows)
        refused: list[Block] = []
        for block in rows.blocks:
            if not block.piece.out_of_turn:
                kept.append(block)
            elif (name := self._name(block.piece)) in left:
                left.discard(name)  # each once
                kept.append(block)
            else:
                refused.append(block)
                self._offered.pop(name, None)
        return refused

    async def _deliverable(self, rows: Rows) -> set[ParkedName]:
        """Which parked messages among `rows` may be delivered."""
        names = list({self._name(block.piece): None for block in rows.blocks if block.piece.out_of_turn})
        may = await in_threads(self._threads, self._parked.may_be_delivered, names)
        return {name for name, each in zip(names, may, strict=True) if each}

    def release(self, rows: Rows) -> None:
        """Rows are done with: their memory may be used again."""
        self._supply.release(rows)

    def closed(self, positions: Mapping[Chain, int]) -> None:
        """Everything below `positions` is stored."""
        self._supply.closed(positions)

    def reset(self, positions: Mapping[Chain, int]) -> None:
        """Drop what was decoded and offered, and begin again at `positions`."""
        self._offered.clear()
        self._supply.reset(positions)

    async def before_close(self, intent: Intent) -> None:
        """Mark what the intent delivered out of turn and what it left out, before the state moves on."""
        left_out = [(p.chain, each) for p in intent.pieces for each in p.left_out]
        names = [self._parked.name(*each) for each in left_out]
        await in_threads(self._threads, self._parked.mark_left_out, names)
        delivered = [self._name(piece) for piece in intent.pieces if piece.out_of_turn]
        if delivered:
            failpoint("ingress.before_delivered")
            await in_threads(self._threads, self._parked.mark_delivered, delivered)
        for name in delivered:
            self._offered.pop(name, None)
        # The listing that corrects it comes only now and then.
        metrics.parked_waiting.labels(self._parked.target).inc(len(names) - len(delivered))

    def _name(self, piece: Piece) -> ParkedName:
        return self._parked.name(piece.chain, piece.rows.first)
