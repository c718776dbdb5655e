"""One target: waits for the lease, checks the target, carries, begins again after what passes by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from common.clock import Clock, first_of, wait_for
from common.errors import FloeError, LeaseLost, OutcomeUnknown, Unavailable
from common.jetstream.client import FloeClient
from common.jetstream.kv import KeyValue, state_key
from common.jetstream.lease import Lease, Leases
from common.jetstream.requests import ApiError
from common.jetstream.streams import StreamInfo
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.service.logs import get_logger
from common.service.monitor import Health
from common.service.threads import Threads
from common.settings.ingress import IngressSettings, TargetSettings
from ingress import metrics
from ingress.carrier import Carrier
from ingress.chains.roster import Roster
from ingress.chains.supply import Supply
from ingress.checkpoints.state import ROLE, StateStore
from ingress.discovery.discovery import Discovery
from ingress.preflight import control_headers, ensure_target, shape_of
from ingress.publishing.publisher import PUBLISHERS, Publisher, choose, offered
from ingress.publishing.replies import Replies
from ingress.verdicts.choices import Choices
from ingress.verdicts.settler import LOOK_SPACING
from ingress.verdicts.target import Target

log = get_logger("ingress.runner")

FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0  # seconds between attempts
WATCH_SPACING = 1.0  # seconds between two reports of what goes on


def passes_by_itself(error: BaseException) -> bool:
    """Whether trying again later may help without anybody doing anything."""
    if isinstance(error, ApiError):
        return error.status >= 500 or error.status == 429
    return isinstance(error, Unavailable | OutcomeUnknown)


@dataclass(frozen=True, slots=True)
class Parts:
    """What all targets of a process share."""

    settings: IngressSettings
    client: FloeClient
    connect: Callable[[], Awaitable[FloeClient]]
    store: SegmentStore
    documents: ChainStore
    threads: Threads
    discovery: Discovery
    health: Health
    clock: Clock
    owner: str
    look_spacing: float = LOOK_SPACING


class Runner:
    """Carries into one target for as long as the service runs."""

    def __init__(self, parts: Parts, settings: TargetSettings) -> None:
        self._parts, self._settings = parts, settings
        self.target = settings.stream
        self._part = f"target {settings.stream}"

    async def run(self, stop: asyncio.Event) -> None:
        """Carry, or stand by, until `stop` is set. Raises what an operator has to deal with."""
        pause = FIRST_PAUSE
        while not stop.is_set():
            try:
                await self._attempt(stop)
                pause = FIRST_PAUSE
            except LeaseLost as error:
                log.warning("lease lost", action="lease_lost", target=self.target, error=error.message)
            except FloeError as error:
                if not passes_by_itself(error):
                    raise
                log.warning(
                    "tried again later", action="retry", target=self.target, error=str(error), pause=pause
                )
                self._parts.health.set_ready(self._part, False, error.message)
                await wait_for(stop, pause)
                pause = min(LAST_PAUSE, pause * 2)

    async def _attempt(self, stop: asyncio.Event) -> None:
        """Get hold of the target and carry; returns when `stop` is set."""
        info = await ensure_target(self._parts.client, self._settings)
        lease = await self._lease(await self._leases(info), stop)
        if lease is None:
            return
        metrics.holds_lease.labels(self.target).set(1)
        log.info("carrying", action="carrying", target=self.target)
        try:
            await self._carry(lease, stop)
        finally:
            metrics.holds_lease.labels(self.target).set(0)
            await lease.release()
            log.info("lease released", action="lease_released", target=self.target)

    # The lease

    async def _leases(self, info: StreamInfo) -> Leases:
        settings = self._parts.settings
        bucket = await KeyValue.open(
            self._parts.client, settings.lease_bucket, ttl=settings.lease_ttl, replicas=self._replicas(info)
        )
        return Leases(bucket, self._parts.owner, settings.lease_ttl, self._parts.clock)

    def _replicas(self, info: StreamInfo) -> int:
        return self._parts.settings.kv_replicas or int(info.config.get("num_replicas", 1))

    async def _lease(self, leases: Leases, stop: asyncio.Event) -> Lease | None:
        """The lease on the target, as soon as nobody else holds it; None if `stop` was set first."""
        key = state_key(ROLE, self.target)
        while not stop.is_set():
            lease = await leases.acquire(key)
            if lease is not None:
                return lease
            self._parts.health.set_ready(self._part, True)
            self._parts.health.set_status(self._part, {"state": "standby"})
            await wait_for(stop, self._parts.settings.lease_ttl / 3)
        return None

    # Carrying

    async def _carry(self, lease: Lease, stop: asyncio.Event) -> None:
        info = await ensure_target(self._parts.client, self._settings)
        keeper, supply = await self._keeper(info), self._supply(info)
        publisher = await self._publisher(info)
        carrier = self._carrier(keeper, supply, publisher, lease)
        self._parts.discovery.add(supply)
        try:
            await self._run_beside(
                carrier.run(stop), lease.keep(), supply.run(), self._watch(carrier, supply, lease)
            )
        finally:
            self._parts.discovery.remove(supply)
            await publisher.aclose()

    @staticmethod
    async def _run_beside(main: Coroutine[Any, Any, None], *sides: Coroutine[Any, Any, None]) -> None:
        """Run `main` to its end; the `sides` run as long, and one of them that fails ends everything."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(side) for side in sides]
                await main
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise leading(errors) from None

    def _supply(self, info: StreamInfo) -> Supply:
        parts = self._parts
        roster = Roster(self._settings, shape_of(parts.client, info, self._settings))
        limit = parts.settings.memory_limit // len(parts.settings.targets)
        return Supply(self.target, roster, parts.store, parts.documents, parts.threads, parts.clock, limit)

    async def _publisher(self, info: StreamInfo) -> Publisher:
        client = self._parts.client
        against = offered(client.server_version, info.config, control_headers(self._settings))
        name = choose(self.target, self._settings.publisher, against)
        log.info(
            "publisher chosen", action="publisher", target=self.target, publisher=name, why=against["atomic"]
        )
        return PUBLISHERS[name](client, self.target, await Replies.open(client))

    async def _keeper(self, info: StreamInfo) -> StateStore:
        parts, name = self._parts, self._parts.settings.state_bucket
        bucket = await KeyValue.open(parts.client, name, replicas=self._replicas(info))
        return StateStore(bucket, state_key(ROLE, self.target), self.target)

    def _carrier(self, keeper: StateStore, supply: Supply, publisher: Publisher, lease: Lease) -> Carrier:
        parts = self._parts
        key = state_key(ROLE, self.target)
        return Carrier(
            Choices(self.target, f"nats kv del {parts.settings.state_bucket} {key} --force"),
            keeper,
            Target(parts.client, self.target, parts.connect),
            publisher,
            supply,
            lease,
            parts.clock,
            look_spacing=parts.look_spacing,
        )

    # Reports

    async def _watch(self, carrier: Carrier, supply: Supply, lease: Lease) -> None:
        """Report what goes on, and end everything when the lease is lost."""
        while not lease.lost.is_set():
            self._report(carrier, supply)
            await first_of(lease.lost.wait(), seconds=WATCH_SPACING)
        raise LeaseLost(f"lease of target {self.target} is not ours any more")

    def _report(self, carrier: Carrier, supply: Supply) -> None:
        health = self._parts.health
        health.set_ready(self._part, not carrier.trouble, carrier.trouble)
        health.set_status(self._part, {"state": "carrying", **status_of(carrier, supply)})
        metrics.measure(self.target, supply.roster, supply.positions, self._parts.clock.now())


def status_of(carrier: Carrier, supply: Supply) -> dict[str, Any]:
    """What /status shows of one target; at most 1,000 chains."""
    state = carrier.state
    positions = state.checkpoint.positions
    chains = {str(lane.chain): lane.status(positions) for lane in list(supply.roster)[:1000]}
    intent = state.intent and {"base": state.intent.base, "count": state.intent.count}
    return {"target_sequence": state.checkpoint.target_sequence, "intent": intent, "chains": chains}


def leading(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group that says most: one that an operator has to deal with before one that passes."""
    errors = list(_flat(group))
    ranked = sorted(errors, key=lambda e: (passes_by_itself(e), not isinstance(e, FloeError)))
    return ranked[0]


def _flat(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [inner for each in error.exceptions for inner in _flat(each)]
    return [error]
