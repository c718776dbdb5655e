"""How many replicas a bucket gets where a command of ingress, replay or drill is the first to make it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from common.clock import Clock
from common.jetstream.api import most_replicas, stream_info
from common.jetstream.client import FloeClient
from common.jetstream.kv import KeyValue, state_key
from common.jetstream.lease import Leases
from common.leasing.balancer import LeaseGroup, LeaseScope
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.service.metrics import begin
from common.service.monitor import Health
from common.service.process import Threads
from common.settings.egress import EgressSettings
from common.settings.ingress import IngressSettings, TargetSettings
from common.settings.service import ServiceSettings
from ingress import metrics
from ingress.chains.chain_state import LOOK_AT_STOPPED
from ingress.checkpoint_store import ROLE
from ingress.discovery.discovery import Discovery
from ingress.redelivery import SPACING as RETRY_SPACING
from ingress.verdict.settle import LOOK_SPACING


async def kv_replicas(client: FloeClient, settings: IngressSettings) -> int:
    """What the configuration says; else as many as the most replicated of the targets has, or will have when
    it is created.
    """
    if settings.kv_replicas:
        return settings.kv_replicas
    return max([await _replicas(client, target) for target in settings.targets], default=1)


async def open_bucket(
    client: FloeClient, settings: ServiceSettings, bucket: str, *, ttl: float | None = None, target: str = ""
) -> KeyValue:
    """The bucket for a replay or a drill; made, where it is missing, as `service_replicas` says.

    Where it is there no other stream is asked: one without a leader must not keep a restore waiting.
    """
    found = await stream_info(client, f"KV_{bucket}")
    if found is None:
        replicas = await service_replicas(client, settings, target)
    else:
        replicas = int(found.config.get("num_replicas", 1))
    return await KeyValue.open(client, bucket, ttl=ttl, replicas=replicas)


async def service_replicas(client: FloeClient, settings: ServiceSettings, target: str = "") -> int:
    """As many as the service gives its buckets whose `settings` these are: ingress, or egress where a replay
    goes back into a source. `target`: of a replay; it counts as well.
    """
    if settings.kv_replicas:
        return settings.kv_replicas
    own = await most_replicas(client, [target] if target else [])
    if isinstance(settings, EgressSettings):
        return max(own, await most_replicas(client, (feed.stream for feed in settings.feeds)))
    assert isinstance(settings, IngressSettings), "there is no third service"
    return max(own, await kv_replicas(client, settings))


async def _replicas(client: FloeClient, target: TargetSettings) -> int:
    info = await stream_info(client, target.stream)
    if info is not None:
        return int(info.config.get("num_replicas", 1))
    return 1 if target.create is None else target.create.replicas


@dataclass(frozen=True, slots=True)
class IngressTuning:
    """Seconds: between the three looks that confirm a verdict, until a stopped target is looked at again,
    between two reports of what goes on, between two looks for parked messages that are asked for, until a
    chain that stopped is looked at again.
    """

    look_spacing: float = LOOK_SPACING
    reexamine: float = 10.0
    watch: float = 1.0
    parked: float = RETRY_SPACING
    look_at_stopped: float = LOOK_AT_STOPPED


@dataclass(frozen=True, slots=True)
class IngressDeps:
    """The components. `connect` opens a fresh connection to the targets' server."""

    settings: IngressSettings
    client: FloeClient
    connect: Callable[[], Awaitable[FloeClient]]
    store: SegmentStore
    documents: ChainStore
    threads: Threads
    discovery: Discovery
    sharing: LeaseGroup
    health: Health
    clock: Clock
    pace: IngressTuning = field(default_factory=IngressTuning)

    @property
    def memory_limit(self) -> int:
        """Bytes for one target. Split over all targets: whoever is left alone holds every one of them."""
        return self.settings.memory_limit // len(self.settings.targets)


# A target's lease is `ingress.{target}`, of two tokens; a member's key has four.
SCOPE = LeaseScope(state_key(ROLE) + ".*", state_key(ROLE, "member") + ".", "ingress sharing")


class TargetCounts:
    """The metrics of the sharing (`common.leasing.balancer.Counts`)."""

    def __init__(self) -> None:
        begin("ingress_")

    def shown(self, members: int, share: int, held: int) -> None:
        metrics.members.set(members)
        metrics.share.set(share)
        metrics.leases_held.set(held)

    def handed_over(self, reason: str) -> None:
        metrics.hand_overs.labels(reason).inc()

    def taken_over(self) -> None:
        metrics.take_overs.inc()


def lease_key(target: str) -> str:
    """The lease of a target."""
    return state_key(ROLE, target)


def share_targets(
    leases: Leases,
    client: FloeClient,
    targets: Iterable[str],
    clock: Clock,
    rng: random.Random,
    health: Health,
) -> LeaseGroup:
    """This process as one of all that have the same targets."""
    keys = map(lease_key, targets)
    return LeaseGroup(leases, client, SCOPE, keys, clock, rng, health, TargetCounts())
