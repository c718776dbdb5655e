"""Beside carrying: looks whether an operator asks for parked messages, and tries them again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from common.clock import Clock
from common.errors import ConfigError, DataError, FloeError
from common.service.logs import get_logger
from common.service.threads import Threads
from ingress import metrics
from ingress.parked.names import Entry, State, waiting
from ingress.parked.source import ParkedSource
from ingress.parked.store import ParkedStore
from ingress.rows.refusals import RowRefused

log = get_logger("ingress.parked.retries")

SPACING = 15.0  # seconds between two looks: one listing
MAX_OFFERED = 16 * 1024 * 1024  # bytes on their way at a time, or one larger message
ROOM_SPACING = 0.1  # seconds between two looks whether there is room


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
        spacing: float = SPACING,
    ) -> None:
        self._parked, self._source, self._threads = parked, source, threads
        self._reshape = reshape
        self._clock, self._spacing = clock, spacing

    async def run(self) -> None:
        """Look for ever; a store that cannot be reached is looked at again."""
        while True:
            try:
                await self._look()
            except FloeError as error:
                # Nothing here is worth to end what is carried beside it.
                log.warning(
                    "parked messages not looked at",
                    action="parked_retry",
                    target=self._parked.target,
                    error=str(error),
                )
            await self._clock.sleep(self._spacing)

    async def _look(self) -> None:
        entries = await self._threads.run(self._parked.entries)
        metrics.parked_waiting.labels(self._parked.target).set(waiting(entries, self._parked.created))
        asked = [entry for entry in entries.values() if entry.state is State.ASKED]
        wanted = [entry for entry in asked if not self._source.is_offered(entry.name)]
        if wanted:
            await self._reshape()
        for entry in wanted:
            while self._source.offered_bytes and self._source.offered_bytes + entry.size > MAX_OFFERED:
                await self._clock.sleep(ROOM_SPACING)
            await self._try(entry)

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
        log.warning(
            "message stays parked",
            action="parked_refused",
            target=self._parked.target,
            sequence=entry.name.sequence,
            why=why,
            **entry.name.chain.log_context(),
        )
