"""The ingress service: one independent supervisor for each target, the shared components, and the drain."""

import asyncio
import random
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from common.archive.documents import ChainStore
from common.archive.store import SegmentStore
from common.clock import Clock
from common.errors import FloeError
from common.exits import checkpoint_command, choices, floe_command
from common.leasing import LeaseGroup, LeaseMetrics, group_name
from common.logs import get_logger
from common.metrics import show_zeros
from common.nats.client import FloeClient, connect
from common.nats.kv import BucketClaims, optional_state
from common.nats.lease import Leases, RenewalThread, new_owner, open_leases
from common.observe.coverage import CoverageScanner
from common.observe.monitor import Health
from common.service.process import ThreadPool
from common.service.progress import ProcessLog
from common.service.reload import ReloadPlan, attach, plan_entries
from common.settings.ingress import TargetSettings
from common.settings.root import Settings
from common.tasks import Stop, cancel, first_of, restart_on_error, spawn
from ingress import metrics
from ingress.discovery.discovery import Discovery
from ingress.discovery.notifications import follow
from ingress.discovery.sites import Heartbeats
from ingress.errors import check_targets, is_transient
from ingress.preflight import control_headers
from ingress.target import LEASE_SCOPE, IngressDeps, IngressTuning, TargetSupervisor, lease_key

log = get_logger(__name__)

READ_THREADS = 4
POLL_THREADS = 4
LEASE_BUCKET_RETRY_S = 2.0  # seconds between two attempts to open the bucket of the leases
RELEASE_TIMEOUT_S = 5.0  # seconds for each step of the release at the end


# Beginnings of keys that are compared target by target, or that ingress does not use.
TARGET_KEYS = ("ingress.targets[", "ingress.defaults", "egress.", "compaction.")


def plan_targets(before: Settings, now: Settings) -> ReloadPlan:
    """Plan a reload by targets, and by sources, named `TARGET: SITE/FEED`, of targets that go on. Raises ConfigError if
    there is no target any more.
    """
    check_targets(now.ingress)
    plan = plan_entries(before, now, TARGET_KEYS, *(dict(_entries(each.ingress.targets)) for each in (before, now)))
    target_of = {name: name.partition(": ")[0] for name in (*plan.started, *plan.ended, *plan.replaced)}
    whole = {target for name, target in target_of.items() if name == target or name in plan.replaced}
    named = whole.union(name for name, target in target_of.items() if target not in whole)
    started, ended = (tuple(n for n in names if n in named) for names in (plan.started, plan.ended))
    replaced = tuple(sorted(whole.difference(started, ended)))
    commands = [floe_command("checkpoint release", shlex.quote(name)) for name in ended if name in whole]
    forgetting = sorted({target_of[name] for name in ended if name not in whole})
    commands += [checkpoint_command(target, "--forget-unlisted") for target in forgetting]
    hint = choices(("positions stay, and hold retention back; to remove them, once no instance delivers", *commands))
    return replace(plan, started=started, ended=ended, replaced=replaced, hint=hint if commands else "")


def _entries(targets: Iterable[TargetSettings]) -> Iterator[tuple[str, object]]:
    """Yield each target without its sources, and each source without its names: they are equal if both may go on."""
    for target in targets:
        if target.patterns:  # the feeds that they took would have to be compared too
            yield target.stream, target
            continue
        # A source that is alone may use rollups of the whole target.
        is_alone = len(target.feed_sources) == 1
        yield target.stream, (target.model_copy(update={"sources": ()}), control_headers(target), is_alone)
        for source in target.sources:
            rule = source.model_copy(update={"site": (), "feed": ()})
            yield from ((f"{target.stream}: {site}/{feed}", rule) for site, feed in source.site_feed_pairs())


class Controller:
    """The ingress process: runs every target of `settings` until it is stopped. `tuning`: shortened in tests. `thread`:
    renews the leases (None: the event loop of the work does).
    """

    def __init__(
        self,
        settings: Settings,
        store: SegmentStore,
        documents: ChainStore,
        health: Health,
        clock: Clock,
        *,
        tuning: IngressTuning | None = None,
        thread: RenewalThread | None = None,
    ) -> None:
        self._settings, self._store, self._documents = settings, store, documents
        self._health, self._clock, self._tuning = health, clock, tuning or IngressTuning()
        self._renewals, self._threads = thread, ThreadPool("ingress", READ_THREADS)
        # A separate pool: a poll of the store does not wait for reads of segments.
        self._poll_threads = ThreadPool("poll", POLL_THREADS)
        self._targets: dict[TargetSupervisor, asyncio.Task[None]] = {}
        self._failures: dict[TargetSupervisor, FloeError] = {}  # of those that an error ended
        self._stop, self._over = Stop(), asyncio.Event()

    async def run(self, stop: Stop) -> None:
        """Replay until `stop` is set. Raises the first error that ended a target, once no target is left."""
        attach(self.reload)
        self._stop, settings = stop, self._settings.ingress
        targets, listen = [target.stream for target in settings.targets], settings.monitor.listen
        more = {"targets": targets, "events": settings.events, "monitor": listen}
        with ProcessLog(
            "ingress", self._settings, self._clock, metrics.totals(), self._health.problems, **more
        ) as process_log:
            await self._run_all(stop, process_log)

    async def _run_all(self, stop: Stop, process_log: ProcessLog) -> None:
        for each in (metrics.nats_reachable, metrics.store_reachable):
            each.set(0)
        client = await self._connect()
        self._set_nats_state(client.is_up)
        client.add_listener(self._set_nats_state)
        try:
            await self._serve(client, stop, process_log)
        finally:
            await self._release(client)
        for error in self._failures.values():
            raise error

    def _set_nats_state(self, is_up: bool) -> None:
        now = self._clock.now()
        metrics.nats_reachable.set(is_up)
        metrics.nats_answered.set_function(self._clock.now if is_up else lambda: now)

    async def _connect(self) -> FloeClient:
        name = f"floe ingress {self._settings.instance}".strip()
        return await connect(self._settings.nats_for("ingress"), name=name, clock=self._clock)

    async def _serve(self, client: FloeClient, stop: Stop, process_log: ProcessLog) -> None:
        if (leases := await self._open_leases(client, stop)) is None:
            return
        deps = self._deps = self._make_deps(client, leases)
        layout = self._documents.layout
        events = partial(follow, self._settings, client, layout, deps.discovery, self._health, self._clock)
        side_tasks = [
            asyncio.create_task(restart_on_error("discovery", deps.discovery.run, self._clock), name="discovery"),
            asyncio.create_task(self._health.keep_beating(), name="beat"),
            asyncio.create_task(deps.sharing.run(stop), name="sharing"),
            asyncio.create_task(restart_on_error("events", events, self._clock), name="events"),
            asyncio.create_task(CoverageScanner(self._store, self._health, self._clock).run(stop), name="coverage"),
            asyncio.create_task(process_log.run(), name="minutes"),
        ]
        for each in deps.settings.targets:
            self._begin(each)
        try:
            await self._drain(side_tasks, stop)
        finally:
            await cancel(*self._targets.values(), *side_tasks)
        for task in (*self._targets.values(), *side_tasks):
            if not task.cancelled():
                task.result()

    def _make_deps(self, client: FloeClient, leases: Leases) -> IngressDeps:
        settings, clock, health = self._settings.ingress, self._clock, self._health
        group = group_name(lease_key(target.stream) for target in settings.targets)
        documents, store, threads, pollers = self._documents, self._store, self._threads, self._poll_threads
        documents.claims = BucketClaims(optional_state(client, settings))
        sites = Heartbeats(documents, pollers, clock, settings.silent_after)
        pace = settings.poll_seconds, sites, settings.requests_per_second
        discovery = Discovery(documents, pollers, clock, health, *pace)
        show_zeros("ingress_")
        counts = LeaseMetrics(
            metrics.members, metrics.share, metrics.leases_held, metrics.hand_overs.labels, metrics.take_overs
        )
        sharing = LeaseGroup(leases, client, LEASE_SCOPE, group, random.SystemRandom(), health, counts)
        common, oversize_lock = (discovery, sharing, health, clock, self._tuning), asyncio.Lock()
        return IngressDeps(settings, client, self._connect, store, documents, threads, *common, oversize_lock)

    # The leases

    async def _open_leases(self, client: FloeClient, stop: Stop) -> Leases | None:
        """Open the leases, once NATS can be reached; None if `stop` is set first."""
        began, has_waited = self._clock.monotonic(), False
        while not stop.is_set:
            self._health.beat()
            try:
                owner = new_owner(self._settings.instance)
                leases = await open_leases(client, self._settings.ingress, owner, self._clock, thread=self._renewals)
            except FloeError as error:
                if not is_transient(error):
                    raise
                has_waited = True
                self._health.set_ready("nats", False, error.message)
                log.warning("start deferred", action="start_deferred", part="nats", code=error.code, error=str(error))
                await stop.wait(LEASE_BUCKET_RETRY_S)
            else:
                self._health.remove("nats")
                if has_waited:
                    seconds = round(self._clock.monotonic() - began, 1)
                    log.info("start recovered", action="start_recovered", part="nats", seconds=seconds)
                return leases
        return None

    # Running

    def reload(self, now: Settings) -> ReloadPlan:
        """Plan the change to `now`, and begin it unless a key is refused. Chains without a change do not pause, and a
        target that an error ended begins again.
        """
        plan = plan_targets(self._settings, now)
        if not plan.refused and not self._stop.is_set:
            self._settings = now
            if self._targets:
                self._change(plan)
        return plan

    def _change(self, plan: ReloadPlan) -> None:
        deps = self._deps = replace(self._deps, settings=self._settings.ingress)
        wanted = {target.stream: target for target in deps.settings.targets}
        for running in self._targets:
            if (target := wanted.pop(running.target, None)) is None:
                deps.sharing.drop_key(lease_key(running.target))
            if target is None or target.stream in plan.replaced or running in self._failures:
                running.removed.set()
            elif not running.removed.is_set:
                running.runner.adopt(deps, target)
        for target in wanted.values():
            self._begin(target)
        deps.sharing.regroup(group_name(lease_key(each.stream) for each in deps.settings.targets))

    def _begin(self, settings: TargetSettings) -> None:
        runner = TargetSupervisor(self._deps, settings)
        self._targets[runner] = spawn(self._run(runner), lambda _: self._over.set(), name=f"target-{settings.stream}")

    async def _run(self, runner: TargetSupervisor) -> None:
        try:
            await runner.run(self._stop)
        except FloeError as error:
            self._failures[runner] = error
            self._check_over()
            await Stop(self._stop, runner.removed).wait()
        if self._stop.is_set:
            return
        await runner.leave()
        self._failures.pop(runner, None)
        del self._targets[runner]
        for target in self._settings.ingress.targets:
            if target.stream == runner.target:  # with other settings
                self._begin(target)
        self._check_over()

    def _check_over(self) -> None:
        """End the process if an error has ended each target, and none of them is about to begin again."""
        if all(each in self._failures and not each.removed.is_set for each in self._targets):
            self._over.set()

    # The drain, step by step: targets finish their open intents and release their leases, within `shutdown_timeout`.
    # Unfinished work is then dropped. Last, the connection, threads and files are closed.

    async def _drain(self, side_tasks: list[asyncio.Task[None]], stop: Stop) -> None:
        """Wait until all targets have ended; once `stop` is set, at most `shutdown_timeout`.

        A side task that fails ends the service, and so does an error that a target did not handle itself.
        """
        failing = asyncio.wait(side_tasks, return_when=asyncio.FIRST_COMPLETED)
        await first_of(self._over.wait(), stop.wait(), failing)
        if not stop.is_set:
            return
        log.info("drain started", action="drain_started", targets=len(self._targets) - len(self._failures))
        timeout = self._settings.ingress.shutdown_timeout
        # The sharing ends last: it releases the leases that no target occupied.
        await asyncio.wait([*self._targets.values(), side_tasks[2]], timeout=timeout)
        if left := [target.get_name() for target in self._targets.values() if not target.done()]:
            log.warning("drain timed out", action="drain_timed_out", seconds=timeout, left=left)

    async def _release(self, client: FloeClient) -> None:
        await first_of(client.aclose(), seconds=RELEASE_TIMEOUT_S)
        for pool in (self._threads, self._poll_threads):
            await first_of(pool.wait_idle(), seconds=RELEASE_TIMEOUT_S)
            pool.close()
        self._store.close()
