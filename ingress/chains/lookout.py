"""Finds out what there is of a chain: where it begins, and which stretches continue from where it stands."""

from __future__ import annotations

from collections.abc import Mapping

from common.chain import Chain
from common.clock import Clock
from common.errors import DataError
from common.segments.documents import ChainDocument, ChainStore
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.service.logs import get_logger
from common.service.threads import Threads
from ingress.chains.lane import Lane
from ingress.chains.plan import ChainPlan, Phase, first_position, plan_chain
from ingress.chains.relays import Relays
from ingress.chains.roster import Roster

log = get_logger("ingress.chains.lookout")

LISTED = 200  # segments of level 0 that one look takes


class Lookout:
    """Reads documents and listings for the lanes of one target."""

    def __init__(
        self,
        roster: Roster,
        store: SegmentStore,
        documents: ChainStore,
        relays: Relays,
        threads: Threads,
        clock: Clock,
    ) -> None:
        self._roster, self._store, self._documents, self._relays = roster, store, documents, relays
        self._threads, self._clock = threads, clock

    async def finds(self, lane: Lane, positions: Mapping[Chain, int]) -> bool:
        """Whether there is a stretch to read next; `positions`: what is stored for good.

        Raises Stopped and DataError where only an operator can help the chain, and what the store raises.
        """
        if not lane.has_begun and not await self._begin(lane, positions):
            return False
        if not lane.stretches:
            await self._look(lane)
        return bool(lane.stretches)

    async def read_previous(self, positions: Mapping[Chain, int]) -> None:
        """Read the `stream.json` of incarnations of which it is not known yet."""
        for chain in self._roster.needs_previous():
            try:
                document = await self._threads.run(self._documents.read_stream, chain)
            except DataError as error:
                context = chain.log_context()
                log.error("stream.json spoiled", action="document_spoiled", error=str(error), **context)
                continue
            if document is not None:
                self._roster.set_previous(chain, document.previous, positions)

    async def _begin(self, lane: Lane, positions: Mapping[Chain, int]) -> bool:
        """Find out where the chain begins; whether that is known."""
        lane.waits_for = self._roster.obstacle(lane, positions)
        document = None if lane.waits_for else await self._read_chain(lane)
        if document is None:
            return False
        floor = await self._threads.run(self._documents.read_floor, lane.chain)
        lane.position = first_position(document.first, floor)
        log.info("chain begins", action="chain_begins", position=lane.position, **lane.chain.log_context())
        return True

    async def _read_chain(self, lane: Lane) -> ChainDocument | None:
        document = await self._threads.run(self._documents.read_chain, lane.chain)
        if document is None:
            lane.waits_for = "chain.json is not there yet"
        else:
            self._relays.note(lane.chain, document)
        return document

    async def _look(self, lane: Lane) -> None:
        """List from the position: level 0 first, all levels where that does not lead on but must."""
        if lane.is_done:
            lane.looked(ChainPlan(Phase.DONE), self._clock.monotonic())
            return
        refs = await self._list(lane, level=0, limit=LISTED)
        plan = plan_chain(refs, lane.position, lane.end, lane.damaged)
        if plan.phase not in (Phase.READY, Phase.DONE) and (refs or lane.look_everywhere or lane.waits):
            refs = await self._list(lane)
            plan = plan_chain(refs, lane.position, lane.end, lane.damaged)
        lane.looked(plan, self._clock.monotonic())

    async def _list(self, lane: Lane, level: int | None = None, limit: int | None = None) -> list[SegmentRef]:
        call = self._threads.run
        return await call(self._store.list, lane.chain, position=lane.position, level=level, limit=limit)
