"""The components of egress for a command that ends by itself: what cannot be reached ends it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.clock import SystemClock
from common.errors import UsageError
from common.jetstream.buckets import optional_leases, optional_state
from common.jetstream.client import FloeClient, connect
from common.jetstream.lease import Leases, new_owner
from common.objects.open import open_objects
from common.open import open_chains, open_store
from common.service.metrics import version
from common.service.monitor import Health
from common.service.process import Threads
from common.settings.egress import FeedSettings
from common.settings.root import Settings
from egress.deps import EgressDeps, PartitionDeps, Pools, Tuning
from egress.memory import MemoryBudget
from egress.partition import Partition
from egress.report import FeedReport


@dataclass(frozen=True, slots=True)
class CommandContext:
    """What a command works with; its reports go nowhere."""

    settings: Settings
    deps: EgressDeps
    leases: Leases
    pools: Pools

    def of(self, partition: Partition) -> PartitionDeps:
        """The components of one partition, with a report that nobody reads."""
        report = FeedReport(partition.chain, partition.stream, Health(self.deps.clock))
        return self.deps.of(partition, report, self.pools)


@asynccontextmanager
async def opened(settings: Settings, tuning: Tuning) -> AsyncIterator[CommandContext]:
    """Connect, and close at the end. Raises Unavailable, Refused, ConfigError."""
    clock, rng = SystemClock(), random.SystemRandom()

    async def connected() -> FloeClient:
        title = f"floe egress {settings.site} command"
        return await connect(settings.nats_for("egress"), name=title, clock=clock, rng=rng)

    client = await connected()
    objects = open_objects(settings.store)
    store, chains = open_store(settings, objects), open_chains(settings, objects)
    pools = Pools(Threads("egress-command", 2), Threads("encode-command", 1))
    egress = settings.egress
    try:
        deps = EgressDeps(
            client=client,
            connect=connected,
            state=optional_state(client, egress),
            objects=objects,
            store=store,
            chains=chains,
            budget=MemoryBudget(egress.memory_limit),
            clock=clock,
            rng=rng,
            writer=f"floe {version()}",
            tuning=tuning,
        )
        leases = optional_leases(client, egress, new_owner(settings.instance), clock)
        yield CommandContext(settings, deps, leases, pools)
    finally:
        pools.close()
        store.close()
        await client.aclose()


def feed_named(settings: Settings, name: str) -> FeedSettings:
    """The feed of that name. Raises UsageError."""
    found = next((feed for feed in settings.egress.feeds if feed.name == name), None)
    if found is None:
        known = ", ".join(feed.name for feed in settings.egress.feeds)
        where = f"expected one of {known}" if known else "the configuration has no feed; name the site's file"
        raise UsageError(f"feed {name}: {where}")
    return found
