"""Carrying into one target under one lease: what it is made of, and how it runs."""

from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from common.chain import Chain
from common.clock import Backoff, doubling
from common.errors import FloeError, LeaseLost, Stopped, Unavailable, Unforeseen
from common.jetstream.api import StreamInfo, stream_info
from common.jetstream.kv import KeyValue, state_key
from common.jetstream.lease import Lease
from common.logs import get_logger
from common.settings.ingress import TargetSettings
from common.tasks import Stop, StopReason, beside, either, end, first_of, orphaned, told, watched
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.pauses import PauseStore
from ingress.chains.prefetch import Prefetcher
from ingress.checkpoint_store import ROLE, StateStore
from ingress.delivery import Delivery, ServerLimits
from ingress.deps import IngressDeps, lease_key
from ingress.errors import ends_target, leading, passes_by_itself
from ingress.parked import ParkedStore
from ingress.preflight import control_headers, ensure_target, shape_of
from ingress.publishers.choose import PUBLISHERS, choose, offered
from ingress.publishers.publisher import Replies
from ingress.redelivery import ParkedSource, Retries
from ingress.report import PositionsReport, TargetReport
from ingress.rows.prepare import TargetLimits, oversize_hint
from ingress.verdict.settle import Reconciler, SharedSettler
from ingress.verdict.verdict import Sending, TargetErrors, TargetStream

log = get_logger("ingress.target")


class Target:
    """Makes the components that carry into one target, and runs them; `run` may be called again."""

    def __init__(self, deps: IngressDeps, settings: TargetSettings, report: TargetReport) -> None:
        self._deps, self._settings, self._report, self._target = deps, settings, report, settings.stream
        self._sending: tuple[Lease | None, Sending] = (None, Sending())

    async def check(self) -> None:
        """Make the target where it may be made. Raises ConfigError where it is not of the right kind."""
        with suppress(Stopped):  # carrying tells, under the lease
            self._publisher_name(await self._info())

    async def run(self, lease: Lease, stop: Stop) -> None:
        """Carry until `stop` is set and no intent is open.

        Raises what an operator has to deal with, LeaseLost, and what passes by itself.
        """
        deps, name, info = self._deps, self._target, await self._info()
        objects, layout = deps.documents.objects, deps.documents.layout
        bucket = await self._bucket(int(info.config.get("num_replicas", 1)))
        decisions, parked = PauseStore(bucket, name), ParkedStore(objects, layout, name, info.created)
        chains = ChainRegistry(self._settings, shape_of(deps.client, info, self._settings), self._limits)
        prefetch = Prefetcher(
            chains, deps.store, deps.documents, deps.threads, deps.clock, deps.memory_limit, parked, decisions
        )
        prefetch.look_at_stopped = deps.pace.look_at_stopped
        source = ParkedSource(prefetch, parked, deps.threads)
        retries = Retries(parked, source, deps.threads, deps.clock, chains.renew_limits, decisions)
        retries.spacing = deps.pace.parked
        state = StateStore(bucket, state_key(ROLE, name), name, parked.adopt)
        reconciler = self._reconciler(state, lease)
        limits = ServerLimits(deps.client, chains, source.reset, oversize_hint(name))
        kind, replies = PUBLISHERS[self._publisher_name(info)], await Replies.open(deps.client)
        publisher = kind(deps.client, name, replies, exclusive=self._settings.exclusive)
        delivery = Delivery(name, state, reconciler, publisher, source, deps.clock, source.before_close, limits)
        deps.discovery.add(prefetch)
        try:
            watching, says = self._watch(delivery, prefetch, lease), self._says(delivery).run()
            await beside(delivery.run(stop), prefetch.run(), retries.run(), watching, says)
        except BaseExceptionGroup as errors:
            raise leading(errors) from None
        finally:
            deps.discovery.remove(prefetch)
            await publisher.aclose()

    async def _watch(self, delivery: Delivery, prefetch: Prefetcher, lease: Lease) -> None:
        """Report what goes on, and end everything when the lease is lost."""
        while not lease.lost.is_set:
            # A target that was stopped stays so until it is known to be mended.
            if delivery.is_settled or delivery.trouble or not self._report.is_stopped:
                self._report.carries(delivery, prefetch)
            await lease.lost.wait(self._deps.pace.watch)
        raise LeaseLost(f"lease of target {self._target} is not ours any more")

    def _says(self, delivery: Delivery) -> PositionsReport:
        """What those read who delete."""
        deps, sources = self._deps, self._settings.sources
        pairs = {f"{site}/{feed}" for source in sources for site, feed in source.pairs()}

        def positions() -> Mapping[Chain, int] | None:
            return delivery.state.checkpoint.positions if delivery.is_settled else None

        return PositionsReport(self._target, tuple(sorted(pairs)), positions, deps.documents, deps.threads, deps.clock)

    def _reconciler(self, state: StateStore, lease: Lease) -> Reconciler:
        deps, errors, headers = self._deps, TargetErrors(self._target), control_headers(self._settings)
        stream = TargetStream(deps.client, self._target, deps.connect, headers)
        if self._sending[0] is not lease:
            self._sending = (lease, Sending())
        kind = Reconciler if self._settings.exclusive else SharedSettler
        return kind(errors, state, stream, lease, deps.clock, deps.pace.look_spacing, self._sending[1])

    # The target

    async def _info(self) -> StreamInfo:
        """The target as it is, made if it is missing and may be made.

        One that was carried into is never made again by itself: it could not be restored under its name then.
        Raises Stopped for that, else as `ensure_target`.
        """
        client, settings = self._deps.client, self._settings
        if (create := settings.create) is not None and await stream_info(client, self._target) is None:
            bucket = await self._bucket(create.replicas)
            if (await StateStore(bucket, state_key(ROLE, self._target), self._target).load()).state:
                raise TargetErrors(self._target).no_checkpoint(None)
        return await ensure_target(client, settings)

    async def _limits(self) -> TargetLimits:
        """What the target takes now. Raises Unavailable where it is gone, and what asking raises."""
        if (info := await stream_info(self._deps.client, self._target)) is None:
            raise Unavailable(f"target {self._target}: no such stream any more")
        return shape_of(self._deps.client, info, self._settings)

    def _publisher_name(self, info: StreamInfo) -> str:
        """The publisher for the target as it is. Raises ConfigError where the wanted one is not offered."""
        version, headers = self._deps.client.server_version, control_headers(self._settings)
        against = offered(version, info.config, headers, exclusive=self._settings.exclusive)
        name = choose(self._target, self._settings.publisher, against)
        self._report.publishes(name, against)
        return name

    async def _bucket(self, replicas: int) -> KeyValue:
        """The state bucket, made with so many replicas where the configuration says nothing."""
        settings = self._deps.settings
        replicas = settings.kv_replicas or replicas
        return await KeyValue.open(self._deps.client, settings.state_bucket, replicas=replicas)


PAUSES = doubling(1.0, 30.0)  # seconds between attempts


class TargetSupervisor:
    """Carries into one target for as long as the service runs."""

    def __init__(self, deps: IngressDeps, settings: TargetSettings) -> None:
        self.target, self._deps = settings.stream, deps
        self._report = TargetReport(settings.stream, deps.health, deps.clock, deps.discovery.sites, deps.sharing.owner)
        self._carrying = Target(deps, settings, self._report)
        self._slot = deps.sharing.slot(lease_key(settings.stream), self._report)
        self._was_checked, self._pauses = False, Backoff(None, PAUSES)

    async def run(self, stop: Stop) -> None:
        """Carry, or stand by, until `stop` is set and no intent is open.

        What nobody foresaw ends an attempt, loudly, and the next one begins after a pause that grows. Raises
        what ends the target for this process: ConfigError at the start, AnotherWriter.
        """
        try:
            while not self._was_checked and not stop.is_set:
                await self._attempt(self._check(), stop)
            while (lease := await self._slot.occupy(stop)) is not None:
                await self._hold(lease, stop)
        except FloeError as error:
            self._report.ended(error)
            await self._deps.sharing.retire(self._slot)
            raise

    async def _check(self) -> None:
        await self._carrying.check()
        self._was_checked = True

    async def _hold(self, lease: Lease, stop: Stop) -> None:
        """Work under the lease until it is lost or to be given back, or `stop` is set.

        A target that waits for an operator keeps its lease: another instance would find the same.
        """
        self._report.holds()
        keeping = watched(lease.keep(), orphaned, name=f"lease {self.target}")
        try:
            async with either(stop, lease.give_back, lease.lost) as leaving:
                while lease.is_usable() and not leaving.is_set:
                    await self._attempt(self._carry(lease, leaving), leaving)
        finally:
            await end(keeping)
            was_lost = lease.lost.is_set
            await lease.release()
            self._report.gives_back()
            self._slot.vacate(lost=was_lost)

    async def _carry(self, lease: Lease, leaving: Stop) -> None:
        try:
            await self._carrying.run(lease, leaving)
        except LeaseLost as error:
            log.warning("lease lost", action="lease_lost", target=self.target, error=error.message)
            lease.lost.set(StopReason.LEASE_LOST)

    async def _attempt(self, work: Coroutine[Any, Any, None], leaving: Stop) -> None:
        """Do `work`, and wait after what keeps it from its end, unless `leaving` is set."""
        began = self._deps.clock.monotonic()
        try:
            await work
            return
        except Exception as error:
            lasted = self._deps.clock.monotonic() - began
            if not isinstance(error, FloeError) or isinstance(error, Unforeseen):
                pause = self._next_pause(lasted)
                known = told(error, "target", f"target {self.target}", target=self.target, pause=pause)
                self._report.stopped(known)
            elif passes_by_itself(error):
                pause = self._next_pause(lasted)
                self._report.retries(error, pause)
            elif ends_target(error, was_checked=self._was_checked):
                raise
            else:
                pause = self._deps.pace.reexamine
                self._report.stopped(error)
        await first_of(leaving.wait(), seconds=pause)

    def _next_pause(self, lasted: float) -> float:
        """Twice as long after each attempt that failed soon."""
        if lasted > PAUSES[-1]:
            self._pauses.reset()
        return self._pauses.next()
