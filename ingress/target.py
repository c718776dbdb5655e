"""Delivery into one target under one lease: its components, those that targets share, and the loop that runs them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from common.archive.catalog import FeedId
from common.archive.documents import ChainStore
from common.archive.store import SegmentStore
from common.chain import Chain
from common.clock import Backoff, Clock, doubling_delays
from common.doctor import DoctorFinding, failed, ok, problem, warning
from common.errors import ConfigError, FloeError, LeaseLost, Stopped, Unavailable, UnexpectedError
from common.exits import nats_command
from common.leasing import LeaseGroup, LeaseScope
from common.logs import get_logger
from common.nats.api import StreamInfo, ready_stream_info, stream_info
from common.nats.client import FloeClient
from common.nats.kv import KeyValue, state_key
from common.nats.lease import Lease
from common.observe.monitor import Health
from common.service.process import ThreadPool
from common.settings.ingress import IngressSettings, SourceSettings, TargetSettings
from common.settings.types import size_words
from common.tasks import Stop, StopReason, any_set, cancel, first_of, raise_fatal, record_unexpected, run_with, spawn
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.prefetch import Prefetcher
from ingress.chains.sources import PauseStore
from ingress.checkpoint import STATE_ROLE, StateStore, StoredState
from ingress.delivery import Delivery, ServerLimits
from ingress.discovery.discovery import Discovery
from ingress.errors import STOPPED_RECHECK_S, is_fatal_for_target, is_transient, most_important_error
from ingress.parked import ParkedStore
from ingress.preflight import add_command, config_problems, control_headers, ensure_target, limits_from, stream_config
from ingress.publishers.batches import PUBLISHERS, choose_publisher, objections
from ingress.publishers.publisher import Replies
from ingress.redelivery import REQUEST_CHECK_INTERVAL_S, ParkedSource, Retries
from ingress.report import PositionsWriter, TargetReport
from ingress.rows.prepare import TargetLimits, oversize_remedies
from ingress.rows.rows import ReadyBlocks
from ingress.verdict.settle import CONFIRM_INTERVAL_S, SharedTargetReconciler, TargetReconciler
from ingress.verdict.verdict import Sending, TargetErrors, TargetStream

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class IngressTuning:
    """Intervals in seconds: between the three reads that confirm a verdict, until a stopped target is checked again,
    between two reports, between two checks for parked messages to retry, until a stopped chain is checked again.
    """

    confirm_interval_s: float = CONFIRM_INTERVAL_S
    target_recheck_s: float = 10.0
    report_interval_s: float = 1.0
    parked_check_interval_s: float = REQUEST_CHECK_INTERVAL_S
    chain_recheck_s: float = STOPPED_RECHECK_S


@dataclass(frozen=True, slots=True)
class IngressDeps:
    """The components. `connect` opens a new connection to the targets' server. `oversize_lock`: as in `ByteBudget`."""

    settings: IngressSettings
    client: FloeClient
    connect: Callable[[], Awaitable[FloeClient]]
    store: SegmentStore
    documents: ChainStore
    threads: ThreadPool
    discovery: Discovery
    sharing: LeaseGroup
    health: Health
    clock: Clock
    tuning: IngressTuning
    oversize_lock: asyncio.Lock

    @property
    def memory_limit(self) -> int:
        """Bytes for one target. The memory is split over all targets, because one instance may have to hold the leases
        of all of them.
        """
        return self.settings.memory_limit // len(self.settings.targets)


# A target's lease is `ingress.{target}`, with two tokens; a member's key has four.
LEASE_SCOPE = LeaseScope(state_key(STATE_ROLE) + ".*", state_key(STATE_ROLE, "member") + ".", "sharing")


def lease_key(target: str) -> str:
    return state_key(STATE_ROLE, target)


class TargetRunner:
    """Factory and runner of the components that deliver into one target; `run` may be called again."""

    def __init__(self, deps: IngressDeps, settings: TargetSettings, report: TargetReport) -> None:
        self._deps, self._settings, self._report, self._target = deps, settings, report, settings.stream
        self._known_sources = dict[FeedId, SourceSettings]()  # of all deliveries: an intent may outlive one

    def adopt(self, deps: IngressDeps, settings: TargetSettings) -> None:
        """Adopt the share of memory in `deps`, and other sources; chains of the same sources go on meanwhile."""
        self._deps, self._settings = deps, settings
        for prefetch in deps.discovery.targets:
            if prefetch.name == self._target:
                former = prefetch.pairs()
                prefetch.change_sources(settings)
                prefetch.ahead.resize(deps.memory_limit)
                deps.discovery.update(prefetch, former)

    async def check(self) -> None:
        """Create the target if that is allowed. Raises ConfigError if it is of the wrong kind."""
        with suppress(Stopped):  # reported during delivery, under the lease
            self._publisher_name(await self._info())

    async def run(self, lease: Lease, sending: Sending, stop: Stop) -> None:
        """Deliver until `stop` is set and no intent is open. `sending`: the record of what was sent under this lease.

        Raises errors that need an operator, LeaseLost, and errors that pass by themselves.
        """
        deps, name, info = self._deps, self._target, await self._info()
        objects, layout = deps.documents.objects, deps.documents.layout
        bucket = await self._bucket(int(info.config.get("num_replicas", 1)))
        decisions, parked = PauseStore(bucket, name), ParkedStore(objects, layout, name, info.created)
        kind, replies = PUBLISHERS[self._publisher_name(info)], await Replies.open(deps.client)
        # Nothing waits from here on until discovery has the target, by which `adopt` finds it.
        chains = ChainRegistry(self._settings, limits_from(deps.client, info, self._settings), self._limits)
        chains.known_sources = self._known_sources = {**self._known_sources, **chains.known_sources}
        ahead = ReadyBlocks(self._deps.memory_limit, oversize_lock=deps.oversize_lock)
        prefetch = Prefetcher(chains, deps.store, deps.documents, deps.threads, deps.clock, ahead, parked, decisions)
        prefetch.stopped_recheck_s = deps.tuning.chain_recheck_s
        source = ParkedSource(prefetch, parked, deps.threads)
        retries = Retries(parked, source, deps.threads, deps.clock, chains.renew_limits, decisions)
        retries.check_interval_s = deps.tuning.parked_check_interval_s
        state = StateStore(bucket, name, parked.adopt_state)
        reconciler = self._reconciler(state, lease, sending)
        limits = ServerLimits(deps.client, chains, source.reset, oversize_remedies(name))
        publisher = kind(deps.client, name, replies, exclusive=self._settings.exclusive)
        delivery = Delivery(name, state, reconciler, publisher, source, deps.clock, source.before_close, limits)
        deps.discovery.add(prefetch)
        try:
            watching, writer = self._watch(delivery, prefetch, lease), self._positions_writer(delivery, chains, lease)
            delivery.name_writers = writer.name_writers
            await run_with(delivery.run(stop), prefetch.run(), retries.run(), watching, writer.run())
        except BaseExceptionGroup as errors:
            raise most_important_error(errors) from None
        finally:
            deps.discovery.remove(prefetch)
            prefetch.open_segments.drop()
            await publisher.aclose()

    async def _watch(self, delivery: Delivery, prefetch: Prefetcher, lease: Lease) -> None:
        while not lease.lost.is_set:
            # A stopped target remains stopped until it is known to be repaired.
            if delivery.is_settled or delivery.trouble or not self._report.is_stopped:
                self._report.report_progress(delivery, prefetch)
            await lease.lost.wait(self._deps.tuning.report_interval_s)
        raise LeaseLost(f"lease of target {self._target}: no longer held by this process")

    def _positions_writer(self, delivery: Delivery, chains: ChainRegistry, lease: Lease) -> PositionsWriter:
        deps = self._deps

        def stored() -> StoredState | None:
            return delivery.stored if delivery.is_settled and lease.is_usable() else None

        def stopped() -> Mapping[Chain, str]:
            found = ((each.chain, each.stopped) for each in chains if each.stopped is not None)
            return {chain: f"{error.code}: {error}" for chain, error in islice(found, MAX_REPORTED_STOPS)}

        known = (lambda: chains.source_names), stored, stopped
        return PositionsWriter(self._target, *known, deps.documents, deps.threads, deps.clock)

    def _reconciler(self, state: StateStore, lease: Lease, sending: Sending) -> TargetReconciler:
        deps, errors, headers = self._deps, TargetErrors(self._target), control_headers(self._settings)
        stream = TargetStream(deps.client, self._target, deps.connect, headers)
        kind = TargetReconciler if self._settings.exclusive else SharedTargetReconciler
        return kind(errors, state, stream, lease, deps.clock, deps.tuning.confirm_interval_s, sending)

    # The target

    async def _info(self) -> StreamInfo:
        """Return the target's information. Create it if it is missing and may be created.

        A target with a stored state is never created again automatically: it could then not be restored under its
        name. Raises Stopped for that, else as `ensure_target`.
        """
        client, settings = self._deps.client, self._settings
        if (create := settings.create) is not None and await stream_info(client, self._target) is None:
            bucket = await self._bucket(create.replicas)
            if (await StateStore(bucket, self._target).load()).state:
                raise TargetErrors(self._target).no_checkpoint(None)
        return await ensure_target(client, settings)

    async def _limits(self) -> TargetLimits:
        """Return the limits of the target now. Raises Unavailable if it is gone, else as `ready_stream_info`."""
        if (info := await ready_stream_info(self._deps.client, self._target)) is None:
            raise Unavailable(f"target {self._target}: the stream no longer exists")
        return limits_from(self._deps.client, info, self._settings)

    def _publisher_name(self, info: StreamInfo) -> str:
        """Choose and report the publisher. Raises ConfigError if the configured one is not offered."""
        version, headers = self._deps.client.server_version, control_headers(self._settings)
        against = objections(version, info.config, headers, exclusive=self._settings.exclusive)
        name = choose_publisher(self._target, self._settings.publisher, against)
        self._report.report_publisher(name, against)
        return name

    async def _bucket(self, replicas: int) -> KeyValue:
        settings = self._deps.settings
        replicas = settings.kv_replicas or replicas
        size = settings.kv_max_bytes
        return await KeyValue(self._deps.client, settings.state_bucket, replicas=replicas, max_bytes=size).ensure()


TARGET_PAUSES_S = doubling_delays(1.0, 30.0)  # seconds between attempts
MAX_REPORTED_STOPS = 100  # stopped chains in `positions.json`, each with its reason


class TargetSupervisor:
    """Supervisor of one target, for as long as the service runs, or until `removed` is set."""

    def __init__(self, deps: IngressDeps, settings: TargetSettings) -> None:
        self.target, self._deps, self.removed = settings.stream, deps, Stop()
        known = deps.health, deps.clock, deps.discovery.sites, deps.sharing.owner
        self._report = TargetReport(settings.stream, *known, deps.settings.monitor.per_chain)
        self.runner = TargetRunner(deps, settings, self._report)
        self._slot = deps.sharing.slot(lease_key(settings.stream), self._report)
        self._was_checked, self._pauses = False, Backoff(None, TARGET_PAUSES_S)

    async def run(self, stop: Stop) -> None:
        """Deliver or be on standby, until `stop` or `removed` is set and no intent is open.

        An unexpected error ends an attempt and is logged; the next attempt begins after a pause that grows. Raises
        an error that ends the target for this process: ConfigError at the start, OtherWriter.
        """
        stop = Stop(stop, self.removed)
        try:
            while not self._was_checked and not stop.is_set:
                await self._attempt(self._check(), stop)
            while (lease := await self._slot.wait_for_lease(stop)) is not None:
                await self._hold(lease, stop)
        except FloeError as error:
            self._report.report_ended(error)
            await self._deps.sharing.remove_slot(self._slot)
            raise

    async def leave(self) -> None:
        """Leave the group that shares the leases, and remove the report, after the end of `run`."""
        await self._deps.sharing.remove_slot(self._slot)
        self._report.remove()

    async def _check(self) -> None:
        await self.runner.check()
        self._was_checked = True

    async def _hold(self, lease: Lease, stop: Stop) -> None:
        """Work under the lease until it is lost, or due to be released to another member, or `stop` is set.

        A target that waits for an operator keeps its lease: another instance would find the same.
        """
        self._report.report_held()
        keeping, sending = spawn(lease.run_renewals(), raise_fatal, name=f"lease {self.target}"), Sending()
        try:
            async with any_set(stop, lease.return_requested, lease.lost) as leaving:
                while lease.is_usable() and not leaving.is_set:
                    await self._attempt(self._run_under_lease(lease, sending, leaving), leaving)
        finally:
            await cancel(keeping)
            was_lost = lease.lost.is_set
            await lease.release()
            self._report.report_released()
            self._slot.give_up(lost=was_lost)

    async def _run_under_lease(self, lease: Lease, sending: Sending, leaving: Stop) -> None:
        try:
            await self.runner.run(lease, sending, leaving)
        except LeaseLost as error:
            log.warning("lease lost", action="lease_lost", target=self.target, error=error.message)
            lease.lost.set(StopReason.LEASE_LOST)

    async def _attempt(self, work: Coroutine[Any, Any, None], leaving: Stop) -> None:
        began = self._deps.clock.monotonic()
        try:
            await work
            return
        except Exception as error:
            lasted = self._deps.clock.monotonic() - began
            if not isinstance(error, FloeError) or isinstance(error, UnexpectedError):
                pause = self._next_pause(lasted)
                found = record_unexpected(error, "target", f"target {self.target}", target=self.target, pause=pause)
                self._report.report_stopped(found)
            elif is_transient(error):
                pause = self._next_pause(lasted)
                self._report.report_retry(error, pause)
            elif is_fatal_for_target(error, was_checked=self._was_checked):
                raise
            else:
                pause = self._deps.tuning.target_recheck_s
                self._report.report_stopped(error)
        await first_of(leaving.wait(), seconds=pause)

    def _next_pause(self, lasted: float) -> float:
        """Return seconds; twice as many after each attempt that failed soon."""
        if lasted > TARGET_PAUSES_S[-1]:
            self._pauses.reset()
        return self._pauses.next_delay()


# Checks of `floe doctor`

DEFAULT_MAX_PAYLOAD_BYTES = 1024 * 1024  # bytes: the largest message of a server by default


async def examine_target(
    client: FloeClient, settings: TargetSettings, stopped: Mapping[Chain, str], is_size_demanded: bool = False
) -> list[DoctorFinding]:
    """Return findings about a target and the delivery into it; changes nothing. `stopped`: the reason, by chain;
    `is_size_demanded`: the account refuses a stream without `max_bytes`.
    """
    name = settings.stream
    try:
        info = await ready_stream_info(client, name)
    except FloeError as error:
        return [failed("nats", "target", error)]
    if info is None:
        if (create := settings.create) is None:
            meaning = "no message is delivered: there is no such stream, and no `create` allows to create it"
            return [problem("nats", "target", f"{name}: no such stream", meaning, add_command(settings))]
        config: Mapping[str, Any] = stream_config(settings, create)
        state, limit = "created at the first start", client.max_payload
        wrong = [*config_problems(config, settings)]
        if is_size_demanded and not create.max_bytes:
            wrong.append("expected max_bytes: the account accepts no stream without it")
        meaning = "the target would not be created: ingress ends with E-TARGET"
        remedy = f"change `create` of target {name}, or the subject rules of its sources"
    else:
        config, limit = info.config, limits_from(client, info, settings).max_message
        state = f"{info.messages} messages, {config.get('num_replicas', 1)} replicas"
        wrong = [*config_problems(config, settings)]
        meaning = "the target would lose, refuse or change messages: ingress ends with E-TARGET"
        remedy = nats_command("stream edit", name)
    found = ok("nats", "target", f"{name}: {state}")
    if wrong:
        found = problem("nats", "target", f"{name}: {'; '.join(wrong)}", meaning, remedy)
    return [found, _batches(client, settings, config), _max_payload(settings, limit, stopped)]


def _batches(client: FloeClient, settings: TargetSettings, config: Mapping[str, Any]) -> DoctorFinding:
    name, headers = settings.stream, control_headers(settings)
    against = objections(client.server_version, config, headers, exclusive=settings.exclusive)
    try:
        chosen = choose_publisher(name, settings.publisher, against)
    except ConfigError as error:
        return failed("nats", "batches", error, "ingress ends with this error at its start")
    missing = [f"not {better}: {reason}" for better, reason in against.items() if reason]
    found = f"{name}: {chosen}" + (f" ({'; '.join(missing)})" if missing else "")
    if chosen != "single" or settings.publisher == "single" or not settings.exclusive:
        return ok("nats", "batches", found)
    meaning = "each message is sent and acknowledged by itself: as safe, and several times slower than a batch"
    edit = nats_command("stream edit", name, "--allow-batch", "--allow-fast")
    return warning("nats", "batches", found, meaning, f"use nats-server 2.12, better 2.14, and allow batches:\n{edit}")


def _max_payload(settings: TargetSettings, limit: int, stopped: Mapping[Chain, str]) -> DoctorFinding:
    found = f"{settings.stream}: {size_words(limit)}"
    for chain, reason in sorted(stopped.items()):
        if reason.startswith("E-MSG-TOO-LARGE"):
            meaning = f"{chain} has stopped: {reason}"
            remedy = "raise `max_payload` of the server and `max_msg_size` of the stream, or set `on_oversize: park`"
            return problem("nats", "max_payload", found, meaning, remedy)
    if limit >= DEFAULT_MAX_PAYLOAD_BYTES:
        return ok("nats", "max_payload", found)
    stops = "is put aside (`on_oversize: park`)" if settings.on_oversize == "park" else "stops its chain"
    meaning = f"a message that is larger, with the headers that Floe adds, {stops}; the default of a server is 1 MiB"
    remedy = "raise `max_payload` of the server and `max_msg_size` of the stream to the limits of the sites"
    return warning("nats", "max_payload", found, meaning, remedy)
