"""Egress service: makes its components from the settings, and runs them."""

import gc
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import Any, TypeVar

from common.archive.heartbeats import process_name
from common.archive.keys import Layout
from common.clock import Backoff, Clock, SystemClock
from common.errors import FloeError, OutcomeUnknown, Unavailable
from common.exits import EXIT_RETRY_LATER
from common.leasing import LeaseGroup, LeaseMetrics, LeaseScope, group_name
from common.logs import flush, get_logger
from common.metrics import show_zeros
from common.nats.client import FloeClient
from common.nats.kv import KeyValue, open_state, state_key
from common.nats.lease import Leases, RenewalThread, new_owner, open_leases
from common.objects.open import open_objects
from common.objects.port import ObjectInfo, ObjectStore
from common.objects.s3_errors import ObservedStore, without_paths
from common.observe.coverage import CoverageScanner
from common.observe.monitor import Health, Monitor
from common.service.process import SystemdNotifier, ThreadPool, count_running_calls, handle_signal, stop_on_signals
from common.service.progress import ProcessLog
from common.service.reload import ReloadPlan, attach
from common.settings.root import Settings
from common.tasks import Stop, cancel, raise_fatal, run_until_stopped, spawn, wait_for, warn_if_slow
from egress import metrics
from egress.account_watch import AccountWatch
from egress.deps import EgressDeps, ProcessThreads, Tuning, connect_egress, make_deps
from egress.feed import FeedSet, Runnable, run_feeds
from egress.flush import FlushWatch
from egress.heartbeats import ProcessHeartbeat, Reachability, SubjectHeartbeats
from egress.partition import all_partitions, lease_key, next_feed, plan_feeds, require_feeds
from egress.workers import WorkerIdentity

log = get_logger(__name__)


def share_site(
    leases: Leases, client: FloeClient, site: str, group: str, rng: random.Random, health: Health, siblings: int
) -> LeaseGroup:
    members = state_key("egress", "member", site) + "."
    scope = LeaseScope(state_key("egress", site) + ".*.*", members, "sharing")
    show_zeros("egress_", site=site)
    counts = LeaseMetrics(
        metrics.members.labels(site),
        metrics.share.labels(site),
        metrics.leases_held.labels(site),
        partial(metrics.hand_overs.labels, site),
        metrics.take_overs.labels(site),
    )
    return LeaseGroup(leases, client, scope, group, rng, health, counts, siblings)


def group_of(settings: Settings) -> str:
    """Return the name of the group of processes that share the leases of this configuration."""
    keys = [lease_key(each.chain) for each in all_partitions(settings.site, settings.egress.feeds)]
    # With patterns, members learn of a new stream at different times, and are of one group all the same.
    patterns = [f"{each.pattern} {each.except_}" for each in settings.egress.patterns]
    return group_name(["patterns", *keys, *patterns] if patterns else keys)


T = TypeVar("T")


async def serve(settings: Settings, *, tuning: Tuning | None = None, identity: WorkerIdentity | None = None) -> int:
    """Run egress, and return the exit code. Raises ConfigError or Refused if it cannot begin.

    `identity`: this process is one of several workers, and its parent ends it.
    """
    require_feeds(settings.egress.feeds_)
    # Hundreds of feeds have a million objects: to look at all of them every minute takes as long as the idle feeds do.
    gc.set_threshold(50_000)
    clock = SystemClock()
    health = Health(clock, service="egress", site=settings.site, instance=settings.instance)
    wanted = settings.egress.monitor
    # Only the parent reads the monitor of a worker; it has one of its own if that is configured.
    is_inner = identity is not None and bool(wanted.listen)
    monitor = Monitor("127.0.0.1:0", health) if is_inner else Monitor(wanted.listen, health, tls=wanted.tls)
    monitor.start()
    with closing(monitor):
        flushes: list[Callable[[], None]] = []
        # Of several processes, only the parent notifies systemd.
        notifier = SystemdNotifier(monitor.page_text, clock, {} if identity else os.environ)
        # Outside, so that the handler exists before a parent knows of this process and passes the signal on.
        with handle_signal(signal.SIGUSR1, lambda: [flush() for flush in flushes]):
            async with service_stop(identity, monitor.port) as stop, notifier.while_running(stop):
                connecting = partial(connect_egress, settings, "leases", clock)
                async with RenewalThread(connecting, health.beat_age) as thread:
                    service = EgressService(settings, tuning or Tuning(), clock, health, stop, None, identity, thread)
                    flushes.append(service.flush)
                    drained = await service.run()
    code = 0 if drained else EXIT_RETRY_LATER
    if count_running_calls():
        # A call to a silent store would keep the process for minutes. Once all is drained it holds no message.
        log.warning("calls abandoned", action="calls_abandoned", calls=count_running_calls())
        flush()
        os._exit(code)
    return code


@asynccontextmanager
async def service_stop(identity: WorkerIdentity | None, port: int) -> AsyncIterator[Stop]:
    """Yield the stop of the service: set by a signal, or for a worker also by the end of its parent.

    The parent handles a second signal: a supervisor sends its signal to all processes, and the parent passes it on as
    well.
    """
    if identity is None:
        async with stop_on_signals() as stop:
            yield stop
        return
    async with stop_on_signals(lambda _number: None, ignore_afterwards=True) as stop:
        watching = spawn(identity.watch_parent(port, stop), raise_fatal, name="parent")
        try:
            yield stop
        finally:
            await cancel(watching)


class _StoppedInStartError(Exception):
    """Stop that came before the start was complete."""


class EgressService:
    """One egress process. It waits for an unreachable server or store, at the start as later on.

    `objects`, if given, is used instead of the configured store; `identity`: among processes started together;
    `thread`: renews the leases (None: the event loop of the work does).
    """

    def __init__(
        self,
        settings: Settings,
        tuning: Tuning,
        clock: Clock,
        health: Health,
        stop: Stop,
        objects: ObjectStore | None = None,
        identity: WorkerIdentity | None = None,
        thread: RenewalThread | None = None,
    ) -> None:
        self._settings, self._tuning, self._clock, self._health, self._stop = settings, tuning, clock, health, stop
        self._objects, self._identity, self._reach = objects, identity, Reachability(clock, health)
        self._thread = thread
        self._rng = random.SystemRandom()
        self._flushing: FlushWatch | None = None
        self._running: tuple[FeedSet, AccountWatch, LeaseGroup] | None = None

    def reload(self, now: Settings) -> ReloadPlan:
        """Plan the change to `now`, and begin it unless a key is refused. Feeds without a change do not pause."""
        former = self._settings
        plan = plan_feeds(former, now, self._running[0].matched() if self._running else ())
        if not plan.refused and not self._stop.is_set:
            self._settings = now
            if self._running is not None and now.egress != former.egress:
                feeds, account, sharing = self._running
                for name in (*plan.ended, *plan.replaced, *plan.started):
                    if " " not in name:  # no pattern
                        feeds.change(name, next_feed(former, now, name))
                account.adopt(now)
                sharing.regroup(group_of(now))
        return plan

    def flush(self) -> None:
        """Close all open segments now; do nothing before the start is complete."""
        if self._flushing is not None:
            self._flushing.flush_all()

    async def run(self) -> bool:
        """Run until the stop is requested and everything is drained. Return True if it was drained in time."""
        attach(self.reload)
        settings, totals = self._settings.egress, metrics.totals()
        what = {"feeds": [each.label for each in settings.feeds_], "monitor": settings.monitor.listen}
        process_log = ProcessLog("egress", self._settings, self._clock, totals, self._health.problems, **what)
        with process_log:
            async with AsyncExitStack() as stack:
                # The start may wait for a server or the store; the process is healthy all the same.
                beats = spawn(self._health.keep_beating(), raise_fatal, name="start")
                try:
                    feeds, parts = await self._start(stack)
                except _StoppedInStartError:
                    return True
                finally:
                    await cancel(beats)
                stack.push_async_callback(cancel, spawn(process_log.run(), raise_fatal, name="minutes"))
                drained = await run_feeds(feeds, parts, self._health, self._stop, settings.shutdown_timeout)
                process_log.add_end_fields(drained=drained)
                return drained

    async def _start(self, stack: AsyncExitStack) -> tuple[list[Runnable], EgressDeps]:
        settings, site = self._settings, self._settings.site
        for part in ("feeds", "objects", "nats"):
            self._health.set_ready(part, False, "starting")
        objects = ObservedStore(self._objects or open_objects(settings.store), self._reach.set_store)
        # NATS first: its attempts end by themselves, so its state is known while the store is silent.
        data, control, state, leases = await self._connect(stack)
        store = without_paths(settings.store.endpoint_url) or settings.store.url
        # A stop abandons a call to the store that is in progress.
        check = partial(self._check_store, objects)
        await self._retry("objects", "the store", f"store {store}", lambda: run_until_stopped(self._stop, check()))
        settings = self._settings  # a reload may have come meanwhile
        deps = make_deps(settings, self._tuning, objects, data, state, "check")
        stack.callback(deps.store.close)
        metrics.spool_bytes.set_function(deps.store.spooled_bytes)
        siblings = self._identity.count if self._identity else 1
        sharing = share_site(leases, control, site, group_of(settings), self._rng, self._health, siblings)
        threads = ProcessThreads()
        stack.callback(threads.close)
        feeds = FeedSet(site, deps, sharing, self._health, threads)
        for each in settings.egress.feeds:
            feeds.change(each.name, each)
        self._health.remove("feeds")  # each reports for itself from here on
        host, worker = socket.gethostname(), self._identity.index if self._identity else None
        process = process_name(host, settings.instance, worker)
        self._flushing = FlushWatch(site, feeds.feeds, state, self._clock, self._tuning.intervals.flush)
        silent, coverage = partial(self._reach.set_store, False), CoverageScanner(deps.store, self._health, self._clock)
        alive = ProcessHeartbeat(site, process, leases.owner, feeds.reports, deps, control, silent)
        account = AccountWatch(settings, control, state, self._health, self._tuning.intervals.account, feeds)
        self._running = feeds, account, sharing
        runs: list[Runnable] = [sharing, feeds, self._flushing, alive, coverage, account]
        if settings.egress.heartbeats.subjects:
            runs.append(SubjectHeartbeats(settings, leases, control, host, self._rng, self._health))
        return runs, deps

    async def _retry(self, part: str, what: str, where: str, step: Callable[[], Coroutine[Any, Any, T | None]]) -> T:
        """Retry `step` until it succeeds, and return its result; None from it means a stop. `part`: of the health;
        `what`, `where`: its name and address, in words.
        """
        backoff, began, has_waited = Backoff(self._rng), self._clock.monotonic(), False
        timeout = self._tuning.intervals.alive / 2

        def defer(error: FloeError, reason: str) -> None:
            nonlocal has_waited
            has_waited = True
            log.warning("start deferred", action="start_deferred", part=part, code=error.code, error=str(error))
            self._health.set_ready(part, False, reason)

        silent = partial(defer, Unavailable(f"{where}: no answer for {timeout:g} s"), f"{what} does not answer")
        while not self._stop.is_set:
            try:
                result = await warn_if_slow(step(), timeout, silent)
            except (Unavailable, OutcomeUnknown) as error:
                defer(error, error.message)
                await wait_for(self._stop, backoff.next_delay())
            else:
                if result is None:
                    break
                self._health.set_ready(part, True)
                if has_waited:
                    seconds = round(self._clock.monotonic() - began, 1)
                    log.info("start recovered", action="start_recovered", part=part, seconds=seconds)
                return result
        raise _StoppedInStartError

    async def _check_store(self, objects: ObjectStore) -> list[ObjectInfo]:
        with closing(ThreadPool("egress-start", 1)) as threads:
            prefix = Layout(self._settings.store.prefix).tails_prefix(self._settings.site)
            return await threads.run(objects.list, prefix, limit=1)

    async def _connect(self, stack: AsyncExitStack) -> tuple[FloeClient, FloeClient, KeyValue, Leases]:
        # An attempt is not cut off by a stop, because it might leave its connection open.
        retry = partial(self._retry, "nats", "NATS", "NATS")
        # Leases and marks have a connection of their own, so that a flood of messages cannot delay them.
        data, control = [await retry(partial(self._client, stack, name)) for name in ("data", "control")]
        return data, control, *await retry(lambda: self._buckets(control))

    async def _client(self, stack: AsyncExitStack, name: str) -> FloeClient:
        client = await connect_egress(self._settings, name, self._clock)
        stack.push_async_callback(client.aclose)

        def on_connection_change(is_up: bool) -> None:
            self._reach.set_nats(name, is_up)
            self._health.set_ready(f"nats {name}", is_up, "the connection is down")

        self._reach.set_nats(name, client.is_up)
        client.add_listener(on_connection_change)
        return client

    async def _buckets(self, client: FloeClient) -> tuple[KeyValue, Leases]:
        egress, owner = self._settings.egress, new_owner(self._settings.instance)
        state = await open_state(client, egress)
        return state, await open_leases(client, egress, owner, self._clock, thread=self._thread)
