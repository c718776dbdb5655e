"""Makes the components of egress from the settings, and runs them."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from common.clock import Backoff, Clock, SystemClock
from common.errors import OutcomeUnknown, Unavailable
from common.jetstream.buckets import open_leases, open_state
from common.jetstream.client import FloeClient, connect
from common.jetstream.kv import KeyValue, state_key
from common.jetstream.lease import Leases, new_owner
from common.leasing.balancer import LeaseGroup, LeaseScope
from common.objects.open import open_objects
from common.objects.port import ObjectStore
from common.objects.s3_errors import AnsweringStore
from common.open import open_chains, open_store
from common.segments.alive import process_name
from common.segments.documents import ChainStore
from common.service.logs import flush, get_logger
from common.service.metrics import begin, version
from common.service.monitor import Health, Monitor
from common.service.process import Threads, busy_threads, stop_on_signals
from common.settings.root import Settings
from common.tasks import Stop, end, orphaned, wait_for, watched
from egress import metrics
from egress.deps import EgressDeps, Tuning
from egress.feed import REEXAMINE, Feed, Runs, lease_key, run_feeds
from egress.heartbeats import Heartbeats, Reachability, SignOfLife
from egress.memory import MemoryBudget
from egress.partition import Partition, all_partitions, require_feeds
from egress.report import FeedReport
from egress.workers.process import WorkerPlace

log = get_logger("egress.service")


class SiteCounts:
    """The metrics of one site's sharing (`common.leasing.balancer.Counts`)."""

    def __init__(self, site: str) -> None:
        self._site = site
        begin("egress_", site=site)

    def shown(self, members: int, share: int, held: int) -> None:
        metrics.members.labels(self._site).set(members)
        metrics.share.labels(self._site).set(share)
        metrics.leases_held.labels(self._site).set(held)

    def handed_over(self, reason: str) -> None:
        metrics.hand_overs.labels(self._site, reason).inc()

    def taken_over(self) -> None:
        metrics.take_overs.labels(self._site).inc()


def scope_of(site: str) -> LeaseScope:
    """The leases of a site: `egress.{site}.{feed}.{partition}`."""
    members = state_key("egress", "member", site) + "."
    return LeaseScope(state_key("egress", site) + ".*.*", members, "egress sharing")


def share_site(
    leases: Leases,
    client: FloeClient,
    site: str,
    keys: Iterable[str],
    clock: Clock,
    rng: random.Random,
    health: Health,
    siblings: int = 1,
) -> LeaseGroup:
    """This process as one of all that have the same `keys` of `site`; `siblings` were started together."""
    return LeaseGroup(leases, client, scope_of(site), keys, clock, rng, health, SiteCounts(site), siblings)


T = TypeVar("T")


NOT_DRAINED = 75  # exit code: try again, what was read and not stored is read again


async def serve(
    settings: Settings,
    *,
    tuning: Tuning | None = None,
    reexamine: float = REEXAMINE,
    place: WorkerPlace | None = None,
) -> int:
    """Run egress until a signal; the exit code. Raises ConfigError or Refused where it cannot begin.

    `place`: this process is one of several workers, and its parent ends it.
    """
    require_feeds(settings.egress.feeds)
    clock = SystemClock()
    health = Health(clock)
    listen = settings.egress.monitor.listen
    # The parent alone reads the monitor of a worker, and has one of its own if any.
    monitor = Monitor("127.0.0.1:0" if place and listen else listen, health)
    monitor.start()
    try:
        async with _stop(place, monitor.port) as stop:
            siblings = place.count if place else 1
            worker = place.index if place else None
            service = EgressService(
                settings,
                tuning or Tuning(),
                reexamine,
                clock,
                health,
                stop,
                siblings=siblings,
                worker=worker,
            )
            drained = await service.run()
    finally:
        monitor.close()
    if busy_threads():
        # An upload that hangs would hold the process for minutes, and nothing waits for it any more.
        log.warning("uploads abandoned", action="uploads_abandoned", calls=busy_threads())
        flush()
        os._exit(NOT_DRAINED)
    return 0 if drained else NOT_DRAINED


@asynccontextmanager
async def _stop(place: WorkerPlace | None, port: int) -> AsyncIterator[Stop]:
    """What ends the service: a signal, or for a worker also the end of its parent.

    A second signal is the parent's affair: a supervisor sends its signal to all processes, and the parent
    passes it on besides.
    """
    if place is None:
        async with stop_on_signals() as stop:
            yield stop
        return
    async with stop_on_signals(lambda _number: None, deaf_afterwards=True) as stop:
        watching = watched(place.watch(port, stop), orphaned, name="parent")
        try:
            yield stop
        finally:
            await end(watching)


class _StopAskedError(Exception):
    """The stop came before the start was complete."""


class EgressService:
    """One egress process. What cannot be reached at the start is waited for, like later on.

    `objects`, if given, is used instead of the configured store; `siblings`: processes started together;
    `worker`: the number among them, None where it is alone.
    """

    def __init__(
        self,
        settings: Settings,
        tuning: Tuning,
        reexamine: float,
        clock: Clock,
        health: Health,
        stop: Stop,
        objects: ObjectStore | None = None,
        siblings: int = 1,
        worker: int | None = None,
    ) -> None:
        self._objects, self._siblings, self._worker = objects, siblings, worker
        self._reach = Reachability(clock)
        self._settings, self._tuning, self._reexamine = settings, tuning, reexamine
        self._clock, self._health, self._stop = clock, health, stop
        self._rng = random.SystemRandom()

    async def run(self) -> bool:
        """Until the stop is asked for and all is drained; whether it was, in time."""
        async with AsyncExitStack() as stack:
            try:
                feeds, parts = await self._start(stack)
            except _StopAskedError:
                return True
            return await run_feeds(
                feeds, parts, self._health, self._stop, self._settings.egress.shutdown_timeout
            )

    async def _start(self, stack: AsyncExitStack) -> tuple[list[Runs], EgressDeps]:
        settings = self._settings
        for part in ("objects", "nats"):
            self._health.set_ready(part, False, "starting")
        objects = AnsweringStore(self._objects or open_objects(settings.store), self._reach.store)
        chains = open_chains(settings, objects)
        await self._patiently("objects", lambda: self._look_into(objects, chains.layout.tails_prefix()))
        # Leases and marks travel on a connection of their own, so that a flood of messages cannot delay them.
        data, control = [await self._client(stack, name) for name in ("data", "control")]
        state, leases = await self._patiently("nats", lambda: self._buckets(control))
        store = open_store(settings, objects)
        parts_of_feeds = all_partitions(settings.site, settings.egress.feeds)
        stack.callback(store.close)
        parts = EgressDeps(
            client=data,
            connect=lambda: self._connect("check"),
            state=state,
            objects=objects,
            store=store,
            chains=chains,
            budget=MemoryBudget(settings.egress.memory_limit, len(parts_of_feeds)),
            clock=self._clock,
            rng=self._rng,
            writer=f"floe {version()}",
            tuning=self._tuning,
        )
        sharing = self._sharing(leases, control, parts_of_feeds)
        feeds = [Feed(each, parts, sharing, self._health, self._reexamine) for each in parts_of_feeds]
        alive = self._sign_of_life(leases.owner, [feed.report for feed in feeds], chains, control)
        return [sharing, alive, *self._heartbeats(leases, control), *feeds], parts

    def _sign_of_life(
        self, owner: str, reports: Sequence[FeedReport], chains: ChainStore, client: FloeClient
    ) -> SignOfLife:
        site, every = self._settings.site, self._tuning.pace.alive
        process = process_name(socket.gethostname(), self._settings.instance, self._worker)
        return SignOfLife(site, process, owner, reports, chains, client, self._clock, every)

    def _heartbeats(self, leases: Leases, client: FloeClient) -> list[Runs]:
        """Those of this site; none where no subject is configured."""
        settings, site = self._settings.egress.heartbeats, self._settings.site
        if not settings.subjects:
            return []
        host = socket.gethostname()
        return [Heartbeats(settings, leases, client, site, host, self._clock, self._rng, self._health)]

    def _sharing(self, leases: Leases, client: FloeClient, chains: Sequence[Partition]) -> LeaseGroup:
        return share_site(
            leases,
            client,
            self._settings.site,
            [lease_key(each.chain) for each in chains],
            self._clock,
            self._rng,
            self._health,
            self._siblings,
        )

    async def _patiently(self, part: str, step: Callable[[], Awaitable[T]]) -> T:
        """What `step` returns, once what it needs can be reached."""
        backoff = Backoff(self._rng)
        while not self._stop.is_set:
            try:
                result = await step()
            except (Unavailable, OutcomeUnknown) as error:
                log.warning("waiting", action="waiting", part=part, code=error.code, error=str(error))
                self._health.set_ready(part, False, error.message)
                await wait_for(self._stop, backoff.next())
            else:
                self._health.set_ready(part, True)
                return result
        raise _StopAskedError

    async def _look_into(self, objects: ObjectStore, prefix: str) -> None:
        """A wrong bucket or credential ends the start, before anything is read."""
        threads = Threads("egress-start", 1)
        try:
            await threads.run(objects.list, prefix, limit=1)
        finally:
            threads.close()

    async def _client(self, stack: AsyncExitStack, name: str) -> FloeClient:
        client = await self._patiently("nats", lambda: self._connect(name))
        stack.push_async_callback(client.aclose)

        def tell(is_up: bool) -> None:
            self._reach.nats(name, is_up)
            self._health.set_ready(f"nats {name}", is_up, "the connection is down")

        self._reach.nats(name, client.is_up)
        client.add_listener(tell)
        return client

    async def _connect(self, name: str) -> FloeClient:
        settings = self._settings
        title = f"floe egress {settings.site} {name}"
        return await connect(settings.nats_for("egress"), name=title, clock=self._clock, rng=self._rng)

    async def _buckets(self, client: FloeClient) -> tuple[KeyValue, Leases]:
        egress, owner = self._settings.egress, new_owner(self._settings.instance)
        return await open_state(client, egress), await open_leases(client, egress, owner, self._clock)
