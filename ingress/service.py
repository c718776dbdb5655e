"""The ingress service: one independent supervisor for each target, the shared components, and the drain."""

import asyncio
import random
from functools import partial

from common.clock import Clock
from common.errors import FloeError
from common.jetstream.buckets import BucketClaims, open_leases, optional_state
from common.jetstream.client import FloeClient, connect
from common.jetstream.lease import Leases, new_owner
from common.leasing import LeaseGroup, LeaseMetrics
from common.logs import get_logger
from common.metrics import begin
from common.segments.coverage import CoverageWatch
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.service.life import Life
from common.service.monitor import Health
from common.service.process import Threads
from common.settings.root import Settings
from common.tasks import Stop, again, end, first_of
from ingress import metrics
from ingress.deps import SCOPE, IngressDeps, IngressTuning, lease_key
from ingress.discovery.discovery import Discovery
from ingress.discovery.notifications import follow
from ingress.discovery.sites import Sites
from ingress.errors import check_targets, passes_by_itself
from ingress.target import TargetSupervisor

log = get_logger(__name__)

THREADS = 4
LOOKERS = 4
RETRY = 2.0  # seconds between two attempts to open the bucket of the leases
LET_GO = 5.0  # seconds for each step of the release at the end


class Controller:
    """The ingress process: runs every target of `settings` until it is stopped. `pace`: intervals, shorter in tests."""

    def __init__(
        self,
        settings: Settings,
        store: SegmentStore,
        documents: ChainStore,
        health: Health,
        clock: Clock,
        *,
        pace: IngressTuning | None = None,
    ) -> None:
        self._settings, self._store, self._documents = settings, store, documents
        self._health, self._clock, self._pace = health, clock, pace or IngressTuning()
        self._threads = Threads("ingress", THREADS)
        # A separate pool: a poll of the store does not wait for reads of segments.
        self._lookers = Threads("look", LOOKERS)
        self._failures: list[FloeError] = []

    async def run(self, stop: Stop) -> None:
        """Replay until `stop` is set. Raises the first error that ended a target, once no target is left."""
        settings = self._settings.ingress
        targets, listen = [target.stream for target in settings.targets], settings.monitor.listen
        what = {"targets": targets, "events": settings.events, "monitor": listen}
        with Life("ingress", self._settings, self._clock, metrics.carried(), self._health, **what) as life:
            check_targets(settings)
            await self._run_all(stop, life)

    async def _run_all(self, stop: Stop, life: Life) -> None:
        for each in (metrics.nats_reachable, metrics.store_reachable):
            each.set(0)
        client = await self._connect()
        self._shows(client.is_up)
        client.add_listener(self._shows)
        try:
            await self._serve(client, stop, life)
        finally:
            await self._let_go(client)
        if self._failures:
            raise self._failures[0]

    def _shows(self, is_up: bool) -> None:
        now = self._clock.now()
        metrics.nats_reachable.set(is_up)
        metrics.nats_answered.set_function(self._clock.now if is_up else lambda: now)

    async def _connect(self) -> FloeClient:
        name = f"floe ingress {self._settings.instance}".strip()
        return await connect(self._settings.nats_for("ingress"), name=name, clock=self._clock)

    async def _serve(self, client: FloeClient, stop: Stop, life: Life) -> None:
        if (leases := await self._leases(client, stop)) is None:
            return
        parts = self._parts(client, leases)
        layout = self._documents.layout
        events = partial(follow, self._settings, client, layout, parts.discovery, self._health, self._clock)
        sides = [
            asyncio.create_task(again("discovery", parts.discovery.run, self._clock), name="discovery"),
            asyncio.create_task(self._health.keep_beating(), name="beat"),
            asyncio.create_task(parts.sharing.run(stop), name="sharing"),
            asyncio.create_task(again("events", events, self._clock), name="events"),
            asyncio.create_task(CoverageWatch(self._store, self._health, self._clock).run(stop), name="coverage"),
            asyncio.create_task(life.run(), name="minutes"),
        ]
        targets = [
            asyncio.create_task(self._run(TargetSupervisor(parts, each), stop), name=f"target-{each.stream}")
            for each in parts.settings.targets
        ]
        try:
            await self._drained(targets, sides, stop)
        finally:
            await end(*targets, *sides)
        for task in (*targets, *sides):
            if not task.cancelled():
                task.result()

    def _parts(self, client: FloeClient, leases: Leases) -> IngressDeps:
        settings, clock, health = self._settings.ingress, self._clock, self._health
        keys = [lease_key(target.stream) for target in settings.targets]
        documents, store, threads, lookers = self._documents, self._store, self._threads, self._lookers
        documents.claims = BucketClaims(optional_state(client, settings))
        sites = Sites(documents, lookers, clock, settings.silent_after)
        discovery = Discovery(documents, lookers, clock, health, settings.poll_seconds, sites)
        begin("ingress_")
        counts = LeaseMetrics(
            metrics.members, metrics.share, metrics.leases_held, metrics.hand_overs.labels, metrics.take_overs
        )
        sharing = LeaseGroup(leases, client, SCOPE, keys, random.SystemRandom(), health, counts)
        common, alone = (discovery, sharing, health, clock, self._pace), asyncio.Lock()
        return IngressDeps(settings, client, self._connect, store, documents, threads, *common, alone)

    # The leases

    async def _leases(self, client: FloeClient, stop: Stop) -> Leases | None:
        """Open the leases, once NATS can be reached; None if `stop` is set first."""
        began, has_waited = self._clock.monotonic(), False
        while not stop.is_set:
            self._health.beat()
            try:
                owner = new_owner(self._settings.instance)
                leases = await open_leases(client, self._settings.ingress, owner, self._clock)
            except FloeError as error:
                if not passes_by_itself(error):
                    raise
                has_waited = True
                self._health.set_ready("nats", False, error.message)
                log.warning("waiting", action="waiting", part="nats", code=error.code, error=str(error))
                await stop.wait(RETRY)
            else:
                self._health.forget("nats")
                if has_waited:
                    seconds = round(self._clock.monotonic() - began, 1)
                    log.info("goes on", action="over", part="nats", seconds=seconds)
                return leases
        return None

    # Running

    async def _run(self, runner: TargetSupervisor, stop: Stop) -> None:
        try:
            await runner.run(stop)
        except FloeError as error:
            self._failures.append(error)

    # The drain, step by step: targets finish their open intents and release their leases, within `shutdown_timeout`.
    # Unfinished work is then dropped. Last, the connection, threads and files are closed.

    async def _drained(self, targets: list[asyncio.Task[None]], sides: list[asyncio.Task[None]], stop: Stop) -> None:
        """Wait until all targets have ended; once `stop` is set, at most `shutdown_timeout`.

        A side task that fails ends the service, and so does an error that a target did not handle itself.
        """
        failing = asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        carrying = asyncio.wait(targets, return_when=asyncio.FIRST_EXCEPTION)
        await first_of(carrying, stop.wait(), failing)
        if not stop.is_set:
            return
        running = [target.get_name() for target in targets if not target.done()]
        log.info("draining", action="draining", targets=len(running))
        timeout = self._settings.ingress.shutdown_timeout
        # The sharing ends last: it releases the leases that no target occupied.
        await asyncio.wait([*targets, sides[2]], timeout=timeout)
        if left := [target.get_name() for target in targets if not target.done()]:
            log.warning("drain timed out", action="drain_timeout", seconds=timeout, left=left)

    async def _let_go(self, client: FloeClient) -> None:
        await first_of(client.aclose(), seconds=LET_GO)
        for pool in (self._threads, self._lookers):
            await first_of(pool.idle(), seconds=LET_GO)
            pool.close()
        self._store.close()
