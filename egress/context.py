"""Components of egress for a command that ends by itself: an unreachable server or store ends the command."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from common.archive.catalog import parse_chain_name
from common.chain import Chain
from common.clock import Clock, SystemClock
from common.errors import Unavailable, UsageError
from common.metrics import version
from common.nats.buckets import BucketClaims, optional_leases, optional_state
from common.nats.client import FloeClient, connect
from common.nats.kv import KeyValue
from common.nats.lease import Lease, Leases, format_owner, new_owner
from common.objects.open import VIEW_TIMEOUT_S, open_objects
from common.objects.port import ObjectStore
from common.observe.monitor import Health
from common.open import open_chains, open_store
from common.service.process import ThreadPool
from common.settings.egress import FeedSettings
from common.settings.root import Settings
from common.tasks import cancel, raise_fatal, spawn
from egress.deps import EgressDeps, PartitionDeps, Pools, Tuning
from egress.memory import MemoryBudget
from egress.partition import Partition, lease_key
from egress.report import FeedReport


@dataclass(frozen=True, slots=True)
class CommandContext:
    """Components that a command works with; its reports are not published."""

    settings: Settings
    deps: EgressDeps
    leases: Leases
    pools: Pools

    async def hold_lease(self, stack: AsyncExitStack, chain: Chain, *, waits: bool = False) -> Lease:
        """Hold the lease of a partition until `stack` ends. `waits`: until that of a killed instance has expired.

        Raises Unavailable if another instance holds it.
        """
        key, clock = lease_key(chain), self.deps.clock
        until = clock.monotonic() + (self.leases.ttl * 1.5 if waits else 0.0)
        while (lease := await self.leases.acquire(key)) is None and clock.monotonic() < until:
            await clock.sleep(min(0.5, self.leases.ttl / 10))
        if lease is None:
            holder = format_owner(await self.leases.get_owner(key) or "another instance")
            raise Unavailable(
                f"the lease of partition {chain.partition} of feed {chain.feed} is held by {holder}",
                hint="stop egress on all hosts, then try again; nothing was changed",
                code="E-LEASE",
            )
        stack.push_async_callback(lease.release)
        stack.push_async_callback(cancel, spawn(lease.run_renewals(), raise_fatal, name=f"lease {chain}"))
        return lease

    def deps_of(self, partition: Partition) -> PartitionDeps:
        report = FeedReport(partition.chain, partition.stream, Health(self.deps.clock))
        return self.deps.for_partition(partition, report, self.pools)


async def connect_egress(settings: Settings, name: str, clock: Clock) -> FloeClient:
    """Connect to the NATS server of egress. Raises Unavailable, Refused."""
    title = f"floe egress {settings.site} {name}"
    return await connect(settings.nats_for("egress"), name=title, clock=clock)


def make_deps(
    settings: Settings,
    tuning: Tuning,
    objects: ObjectStore,
    client: FloeClient,
    state: KeyValue,
    chains: int,
    name: str,
) -> EgressDeps:
    return EgressDeps(
        client=client,
        connect=partial(connect_egress, settings, name, client.clock),
        state=state,
        objects=objects,
        store=open_store(settings, objects),
        chains=open_chains(settings, objects, BucketClaims(state)),
        budget=MemoryBudget(settings.egress.memory_limit, chains),
        clock=client.clock,
        rng=random.SystemRandom(),
        writer=f"floe {version()}",
        tuning=tuning,
    )


@asynccontextmanager
async def open_context(settings: Settings, *, is_view: bool = False) -> AsyncIterator[CommandContext]:
    """Open the components of a command. `is_view`: a person waits for the output, so a silent store fails after some
    ten seconds.

    Raises Unavailable, Refused, ConfigError.
    """
    clock, egress = SystemClock(), settings.egress
    client = await connect_egress(settings, "command", clock)
    io = ThreadPool("egress-command", 2)
    pools = Pools(io, io, ThreadPool("encode-command", 1))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.aclose)
        stack.callback(pools.close)
        leases = optional_leases(client, egress, new_owner(settings.instance), clock)
        state = optional_state(client, egress)
        objects = open_objects(settings.store, timeout=VIEW_TIMEOUT_S if is_view else None, creates=not is_view)
        deps = make_deps(settings, Tuning(), objects, client, state, 1, "command")
        stack.callback(deps.store.close)
        yield CommandContext(settings, deps, leases, pools)


def parse_feed(settings: Settings, text: str) -> tuple[str, int | None, int | None]:
    """Return the feed of this site named by `FEED` or `SITE/FEED[/INCARNATION[/PARTITION]]`, and the numbers, None if
    they are absent. Raises UsageError for another site, and for a text that names no chain.
    """
    if "/" not in text:  # no feed name contains it
        return text, None, None
    site, feed, incarnation, partition = parse_chain_name(text)
    if site != settings.site:
        raise UsageError(f"{text}: expected a feed of site {settings.site}, as in the configuration")
    return feed or "", incarnation, partition


def find_feed(settings: Settings, name: str) -> FeedSettings:
    """Return the settings of a feed. Raises UsageError if the configuration has no such feed."""
    if (found := settings.egress.feed_named(name)) is not None:
        return found
    feeds = [each.label for each in settings.egress.feeds_]
    where = f"expected one of {', '.join(feeds)}" if feeds else "the configuration has no feed; use the site's file"
    raise UsageError(f"feed {name or repr(name)}: {where}")
