"""How the processes of a site share its feeds: fair shares of the leases, one for each partition."""

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
from egress import metrics


class SiteCounts:
    """The metrics of one site's sharing (`common.sharing.scope.Counts`)."""

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


def scope_of(site: str) -> Scope:
    """The leases of a site: `egress.{site}.{feed}.{partition}`."""
    members = state_key("egress", "member", site) + "."
    return Scope(state_key("egress", site) + ".*.*", members, "egress sharing")


def share_site(
    leases: Leases,
    client: FloeClient,
    site: str,
    keys: Iterable[str],
    clock: Clock,
    rng: random.Random,
    health: Health,
    siblings: int = 1,
) -> Sharing:
    """This process as one of all that have the same `keys` of `site`; `siblings` were started together."""
    return Sharing(leases, client, scope_of(site), keys, clock, rng, health, SiteCounts(site), siblings)
