"""What is in the store: one listing of `tails/` tells which chains have grown; now and then all are looked
up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from common.chain import Chain
from common.clock import Clock, first_of
from common.errors import OutcomeUnknown, Unavailable
from common.segments.documents import ChainStore
from common.service.logs import get_logger
from common.service.monitor import Health
from common.service.threads import Threads

log = get_logger("ingress.discovery")

LOOK_UP_ALL = 300.0  # seconds between two listings of the chains' documents
PARALLEL = 8  # tails that are read at the same time


class Listener(Protocol):
    """Who wants to know of chains (`ingress.chains.supply.Supply`)."""

    def pairs(self) -> list[tuple[str, str]]: ...
    def found(self, chain: Chain, end: int | None = None) -> None: ...
    async def tick(self) -> None: ...


class Discovery:
    """Looks at the store for all targets of this process."""

    def __init__(
        self, documents: ChainStore, threads: Threads, clock: Clock, health: Health, poll_interval: float
    ) -> None:
        self._documents, self._threads = documents, threads
        self._clock, self._health, self._poll_interval = clock, health, poll_interval
        self._listeners: list[Listener] = []
        self._known: dict[Chain, int | None] = {}
        self._etags: dict[Chain, str] = {}
        self._looked_up = float("-inf")
        self._soon = asyncio.Event()

    def add(self, listener: Listener) -> None:
        """Tell `listener` of every chain that is known, and of what changes from now on."""
        self._listeners.append(listener)
        self._tell(self._known)
        self._looked_up = float("-inf")
        self._soon.set()

    def remove(self, listener: Listener) -> None:
        """Tell it nothing more."""
        self._listeners.remove(listener)

    async def run(self) -> None:
        """Look for ever; a store that does not answer is asked again."""
        while True:
            try:
                await self.look()
                self._health.set_ready("store", True)
            except (Unavailable, OutcomeUnknown) as error:
                self._health.set_ready("store", False, error.message)
                log.warning("store not readable", action="store_error", error=str(error))
            await first_of(self._soon.wait(), self._clock.sleep(self._poll_interval))
            self._soon.clear()

    async def look(self) -> None:
        """One look. Raises what the store raises."""
        if not self._listeners:
            return
        await self._look_at_tails()
        if self._clock.monotonic() - self._looked_up >= LOOK_UP_ALL:
            await self._look_up_all()
            self._looked_up = self._clock.monotonic()
        for listener in list(self._listeners):
            await listener.tick()

    async def _look_at_tails(self) -> None:
        """One listing; a tail is read only if it changed."""
        wanted = self._pairs()
        etags = await self._threads.run(self._documents.tails)
        changed = [
            chain
            for chain, etag in etags.items()
            if (chain.site, chain.feed) in wanted and self._etags.get(chain) != etag
        ]
        for start in range(0, len(changed), PARALLEL):
            part = changed[start : start + PARALLEL]
            ends = await asyncio.gather(*(self._threads.run(self._documents.read_tail, c) for c in part))
            for chain, end in zip(part, ends, strict=True):
                self._known[chain] = end
                self._etags[chain] = etags[chain]
            self._tell(part)

    async def _look_up_all(self) -> None:
        """Chains without a tail exist too: a crash may stand between a segment and its tail."""
        for site, feed in sorted(self._pairs()):
            chains = await self._threads.run(self._documents.chains, site, feed)
            new = [chain for chain in chains if chain not in self._known]
            self._known.update(dict.fromkeys(new))
            self._tell(new)

    def _pairs(self) -> set[tuple[str, str]]:
        return {pair for listener in self._listeners for pair in listener.pairs()}

    def _tell(self, chains: Iterable[Chain]) -> None:
        for chain in chains:
            for listener in self._listeners:
                listener.found(chain, self._known[chain])
