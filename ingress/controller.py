"""The ingress service: all targets of a configuration, each for itself; what they share; the drain."""

from __future__ import annotations

import asyncio

from common.clock import Clock, first_of
from common.errors import ConfigError, FloeError
from common.jetstream.client import FloeClient, connect
from common.jetstream.lease import new_owner
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.service.logs import get_logger
from common.service.monitor import Health
from common.service.threads import Threads
from common.settings.root import Settings
from ingress.discovery.discovery import Discovery
from ingress.runner import Parts, Runner
from ingress.verdicts.settler import LOOK_SPACING

log = get_logger("ingress.controller")

THREADS = 4
BEAT_SPACING = 2.0  # seconds
IDLE_TIMEOUT = 5.0  # seconds for threads that still read


class Controller:
    """Runs every target of `settings` until it is asked to stop.

    `look_spacing`: seconds between the three looks that confirm a verdict.
    """

    def __init__(
        self,
        settings: Settings,
        store: SegmentStore,
        documents: ChainStore,
        health: Health,
        clock: Clock,
        *,
        look_spacing: float = LOOK_SPACING,
    ) -> None:
        self._settings, self._store, self._documents = settings, store, documents
        self._health, self._clock = health, clock
        self._look_spacing = look_spacing
        self._threads = Threads("ingress", THREADS)
        self._failures: list[FloeError] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Carry until `stop` is set. Raises the first error that ended a target, once no target is left."""
        if not self._settings.ingress.targets:
            raise ConfigError("ingress.targets: expected at least one target, found none")
        client = await self._connect()
        try:
            await self._serve(client, stop)
        finally:
            await self._close(client)
        if self._failures:
            raise self._failures[0]

    async def _connect(self) -> FloeClient:
        name = f"floe ingress {self._settings.instance}".strip()
        return await connect(self._settings.nats_for("ingress"), name=name, clock=self._clock)

    async def _serve(self, client: FloeClient, stop: asyncio.Event) -> None:
        parts = self._parts(client)
        async with asyncio.TaskGroup() as group:
            sides = [
                group.create_task(parts.discovery.run(), name="discovery"),
                group.create_task(self._beat(), name="beat"),
            ]
            targets = [
                group.create_task(self._run(Runner(parts, target), stop), name=f"target-{target.stream}")
                for target in parts.settings.targets
            ]
            await self._drained(targets, stop)
            for side in (*sides, *targets):
                side.cancel()

    def _parts(self, client: FloeClient) -> Parts:
        settings = self._settings.ingress
        return Parts(
            settings,
            client,
            self._connect,
            self._store,
            self._documents,
            self._threads,
            Discovery(self._documents, self._threads, self._clock, self._health, settings.poll_interval),
            self._health,
            self._clock,
            new_owner(self._settings.instance),
            self._look_spacing,
        )

    async def _run(self, runner: Runner, stop: asyncio.Event) -> None:
        """One target; an error that an operator has to deal with ends it, the others go on."""
        try:
            await runner.run(stop)
        except FloeError as error:
            self._failures.append(error)
            self._health.set_ready(f"target {runner.target}", False, error.message)
            log.error(
                "target stopped",
                action="target_stopped",
                target=runner.target,
                error=str(error),
                code=error.code,
            )

    async def _drained(self, targets: list[asyncio.Task[None]], stop: asyncio.Event) -> None:
        """Wait until no target runs any more; from `stop` on for the time-out at most."""
        await first_of(asyncio.wait(targets), stop.wait())
        running = [target for target in targets if not target.done()]
        if not running or not stop.is_set():
            return
        log.info("draining", action="draining", targets=len(running))
        await asyncio.wait(running, timeout=self._settings.ingress.shutdown_timeout)
        if not all(target.done() for target in running):
            log.warning("drain timed out", action="drain_timeout")

    async def _beat(self) -> None:
        while True:
            self._health.beat()
            await self._clock.sleep(BEAT_SPACING)

    async def _close(self, client: FloeClient) -> None:
        await client.aclose()
        await first_of(self._threads.idle(), seconds=IDLE_TIMEOUT)
        self._threads.close()
        self._store.close()
        log.info("stopped", action="stopped")
