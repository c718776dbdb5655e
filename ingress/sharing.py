"""How the instances of ingress share its targets: fair shares of the leases, one for each target."""

from __future__ import annotations

import random
from collections.abc import Iterable

from common.clock import Clock
from common.jetstream.client import FloeClient
from common.jetstream.kv import state_key
from common.jetstream.lease import Leases
from common.leasing.balancer import Sharing
from common.service.metrics import begin
from common.service.monitor import Health
from common.sharing.scope import Scope
from ingress import metrics
from ingress.checkpoints.state import ROLE

# A target's lease is `ingress.{target}`, of two tokens; a member's key has four.
SCOPE = Scope(state_key(ROLE) + ".*", state_key(ROLE, "member") + ".", "ingress sharing")


class TargetCounts:
    """The metrics of the sharing (`common.sharing.scope.Counts`)."""

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
) -> Sharing:
    """This process as one of all that have the same targets."""
    keys = map(lease_key, targets)
    return Sharing(leases, client, SCOPE, keys, clock, rng, health, TargetCounts())
