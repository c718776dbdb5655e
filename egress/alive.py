"""What a process of egress says of itself once a minute, in the store, where the centre reads it
(`common.segments.alive`); and what it learns by asking: how far the streams are, and who answers.

Nothing waits for it. A store that refuses the object is told once and counted: the archive goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from common.clock import Clock, wait_for
from common.errors import FloeError, OutcomeUnknown, Unavailable
from common.jetstream.api import parse_time, stream_info
from common.jetstream.client import FloeClient
from common.segments.alive import Alive
from common.segments.documents import ChainStore
from common.service.logs import get_logger
from common.service.threads import Threads
from common.tasks import again, unless
from egress import metrics
from egress.report import FeedReport

log = get_logger("egress.alive")

SOON = 1 / 12  # of the time between two: by then most chains have something to say, or the store is back


class SignOfLife:
    """The sign of life of this process, under the name `process`. `every`: seconds between two of them.

    `reports`: of all its chains; `owner`: as its leases name it.
    """

    def __init__(
        self,
        site: str,
        process: str,
        owner: str,
        reports: Sequence[FeedReport],
        chains: ChainStore,
        client: FloeClient,
        clock: Clock,
        every: float,
    ) -> None:
        self._site, self._process, self._owner, self._reports = site, process, owner, reports
        self._chains, self._client, self._clock, self._every = chains, client, clock, every
        self._failure, self._is_put_off = "", False

    async def run(self, stop: asyncio.Event) -> None:
        """Put it again and again until `stop` is set; after an error that nobody foresaw it begins again."""
        await again("alive", lambda: self._put_on(stop), self._clock)

    async def _put_on(self, stop: asyncio.Event) -> None:
        threads = Threads("alive", 1)
        try:
            await wait_for(stop, self._every * SOON)
            while not stop.is_set():
                began = self._clock.monotonic()
                await unless(stop, self._once(threads))
                # At the centre the site looks silent until it is put: soon after the store is back.
                pause = self._every * (SOON if self._is_put_off else 1)
                await wait_for(stop, max(0.0, began + pause - self._clock.monotonic()))
        finally:
            threads.close()

    async def _once(self, threads: Threads) -> None:
        await self._ask_sources()
        chains = tuple(report.sign() for report in self._reports)
        alive = Alive(self._site, self._owner, self._clock.now(), chains)
        try:
            await threads.run(self._chains.write_alive, self._process, alive)
        except FloeError as error:
            metrics.alive_errors.labels(self._site).inc()
            self._is_put_off = isinstance(error, Unavailable | OutcomeUnknown)
            self._fails(error)
        else:
            self._is_put_off = False
            metrics.alive_put.labels(self._site).set(alive.time)
            self._failure = ""

    def _fails(self, error: FloeError) -> None:
        """Told once for each reason, until it works again."""
        if self._failure != error.code:
            self._failure = error.code
            log.warning("sign of life not stored", action="alive_failed", code=error.code, error=str(error))

    async def _ask_sources(self) -> None:
        """How far the stream of each chain is that this process has: also where the store is away, and where
        the chain waits for an operator.
        """
        working = [report for report in self._reports if report.works_on_chain]
        streams = sorted({report.stream for report in working})
        answers = dict(zip(streams, await asyncio.gather(*map(self._ask, streams)), strict=True))
        for report in working:
            if (answer := answers[report.stream]) is not None:
                report.source(*answer)

    async def _ask(self, stream: str) -> tuple[int, int | None] | None:
        """Sequence and time of its last message; None where nobody can tell, or there is no such stream."""
        if not self._client.is_up:
            return None
        try:
            info = await stream_info(self._client, stream)
        except FloeError as error:
            log.debug("source not asked", action="source_unknown", stream=stream, error=str(error))
            return None
        if info is None:
            return None
        return info.last_sequence, parse_time(info.last_timestamp) if info.messages else None


class Reach:
    """Whether the store and NATS can be reached, as metrics of this process; both begin as not reached."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lines = clock, dict[str, bool]()
        for each in (metrics.store_reachable, metrics.nats_reachable):
            each.set(0)

    def store(self, has_answered: bool) -> None:
        """The store was asked; from any thread."""
        metrics.store_reachable.set(has_answered)
        if has_answered:
            metrics.store_answered.set(self._clock.now())

    def nats(self, line: str, is_up: bool) -> None:
        """A connection to NATS came up or broke."""
        self._lines[line] = is_up
        metrics.nats_reachable.set(all(self._lines.values()))
        if all(self._lines.values()):
            metrics.nats_answered.set_function(self._clock.now)
        else:
            now = self._clock.now()
            metrics.nats_answered.set_function(lambda: now)
