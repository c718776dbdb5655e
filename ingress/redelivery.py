"""Beside carrying: looks whether an operator asks for parked messages, and tries them again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from common.clock import Clock
from common.errors import ConfigError, DataError, FloeError
from common.service.logs import get_logger
from common.service.threads import Threads
from ingress import metrics
from ingress.chains.pauses import Pauses
from ingress.parked.names import Entry, ParkedName, State, waiting
from ingress.parked.side_by_side import in_threads
from ingress.parked.source import ParkedSource
from ingress.parked.store import ParkedStore
from ingress.rows.refusals import RowRefused

log = get_logger("ingress.redelivery")

SPACING = 15.0  # seconds between two looks: one HEAD, and one short listing for each open request
EVERYTHING = 600.0  # seconds until all that is parked is listed, whether or not something was asked for
MAX_OFFERED = 16 * 1024 * 1024  # bytes on their way at a time, or one larger message
ROOM_SPACING = 0.1  # seconds between two looks whether there is room


class Decisions(Protocol):
    """Who knows which chains are paused (`ingress.chains.pauses.PauseStore`)."""

    async def read(self) -> Pauses: ...


class Retries:
    """Tries again what an operator asks for. A message that still has no place is answered, and stays.

    `reshape`: looks what the target takes now, before anything is made ready for it.
    """

    def __init__(
        self,
        parked: ParkedStore,
        source: ParkedSource,
        threads: Threads,
        clock: Clock,
        reshape: Callable[[], Awaitable[None]],
        decisions: Decisions,
        spacing: float = SPACING,
    ) -> None:
        self._parked, self._source, self._threads = parked, source, threads
        self._reshape, self._decisions = reshape, decisions
        self._clock, self._spacing = clock, spacing
        self._seen: object = None  # at the last listing of everything
        self._listed_at = float("-inf")
        self._open: list[Entry] = []
        self._told: set[ParkedName] = set()

    async def run(self) -> None:
        """Look for ever; a store that cannot be reached is looked at again."""
        while True:
            try:
                await self.look()
            except FloeError as error:
                # Nothing here is worth to end what is carried beside it.
                log.warning(
                    "parked messages not looked at",
                    action="parked_retry",
                    target=self._parked.target,
                    error=str(error),
                )
            await self._clock.sleep(self._spacing)

    async def look(self) -> None:
        """Try what is asked for and not on its way. Raises what store, target and state bucket raise."""
        await self._find()
        wanted = [entry for entry in self._open if not self._source.is_offered(entry.name)]
        if wanted:
            paused = (await self._decisions.read()).paused
            wanted = [entry for entry in wanted if entry.name.chain not in paused]
        if wanted:
            await self._reshape()
        for entry in wanted:
            while self._source.offered_bytes and self._source.offered_bytes + entry.size > MAX_OFFERED:
                await self._clock.sleep(ROOM_SPACING)
            await self._try_one(entry)

    async def _find(self) -> None:
        """Which requests are open now."""
        seen = (self._parked.kept_as, await self._threads.run(self._parked.rung))
        now = self._clock.monotonic()
        if seen != self._seen or now - self._listed_at >= EVERYTHING:
            found = await self._threads.run(self._parked.entries)
            metrics.parked_waiting.labels(self._parked.target).set(waiting(found))
            self._seen, self._listed_at, entries = seen, now, list(found.values())
        else:
            names = [entry.name for entry in self._open]
            entries = await in_threads(self._threads, self._parked.entry, names)
        self._open = [entry for entry in entries if entry.state is State.ASKED]

    async def _try_one(self, entry: Entry) -> None:
        """Try it; one that cannot be tried now keeps nothing else waiting, and is told of once."""
        try:
            await self._try(entry)
        except FloeError as error:
            if entry.name not in self._told:
                self._told.add(entry.name)
                self._tell("parked message not tried", entry, "parked_retry", str(error))
        else:
            self._told.discard(entry.name)

    async def _try(self, entry: Entry) -> None:
        try:
            block = await self._source.recall.again(entry.name)
        except RowRefused as error:
            await self._answer(entry, error.why)
        except (ConfigError, DataError) as error:
            await self._answer(entry, error.message)
        else:
            self._source.offer(block)

    async def _answer(self, entry: Entry, why: str) -> None:
        await self._threads.run(self._parked.answer, entry, why)
        self._tell("message stays parked", entry, "parked_refused", why)

    def _tell(self, what: str, entry: Entry, action: str, why: str) -> None:
        context = entry.name.chain.log_context()
        target, sequence = self._parked.target, entry.name.sequence
        log.warning(what, action=action, target=target, sequence=sequence, why=why, **context)
