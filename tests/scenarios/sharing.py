"""Three egress processes share four partitions while they are killed, paused and cut off."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.chain import Chain
from common.jetstream.kv import KeyValue
from common.leasing import fair_share
from common.open import load_settings, open_store
from common.segments.segment import Message
from common.segments.store import SegmentStore
from common.settings.types import parse_duration
from egress.feed import lease_key
from infra.acked import AckedPublisher
from infra.oracle import Trace, read_stream, total
from tests.scenarios.faults import Outcome
from tests.scenarios.judge import Verdict, archive_of
from tests.scenarios.load import client_of, make_stream, publish
from tests.scenarios.processes import Service
from tests.scenarios.world import LEASE_TTL, World
from tests.support.basics import PATIENCE
from tests.support.proxies import TcpProxy

SITE, STREAM, PARTITIONS, MEMBERS = "alpha", "NODES", 4, 3
SUBJECT = "alpha.p{partition}.>"
LEASE_SECONDS = parse_duration(LEASE_TTL)
QUIET = PATIENCE  # for shares to settle: two lease times and a segment's age


def chains() -> list[Chain]:
    return [Chain(SITE, STREAM, partition=number) for number in range(PARTITIONS)]


# Publishes until a time of the monotonic clock.
Load = Callable[[World, random.Random, float], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Members:
    """What was disturbed: the processes, which run, the configuration of one, and which faults there were."""

    services: list[Service]
    config: Path
    faults: Counter[str]


async def shared(s3: Any, rng: random.Random, seconds: float, rate: int = 400) -> Outcome:
    """Random SIGKILL, SIGSTOP and cuts for `seconds` under load: chains exact, then shares fair (I1, I9)."""

    async def load(world: World, rng: random.Random, until: float) -> None:
        await _load(world, rng, rate, until)

    with World(s3, SITE) as world:
        started = time.monotonic()
        async with disturbed(world, rng, seconds, load) as members:
            verdict = await _judge(world, members.config)
        return Outcome(verdict, time.monotonic() - started, members.faults)


@asynccontextmanager
async def disturbed(
    world: World, rng: random.Random, seconds: float, load: Load, **feed: Any
) -> AsyncIterator[Members]:
    """Three members disturbed for `seconds` under load; the block behind that has them running, unbroken.

    Each process has a connection of its own that can be broken, and faults of its own: they overlap. At the
    end shares are fair, and leases given back. `feed`: more keys of the feed.
    """
    async with AsyncExitStack() as stack:
        await _prepare(world, rng)
        proxies = [await stack.enter_async_context(TcpProxy(world.sites[SITE].port)) for _ in range(MEMBERS)]
        configs = [_config(world, number, proxy, feed) for number, proxy in enumerate(proxies)]
        services = [world.egress(config, f"egress-{n}") for n, config in enumerate(configs)]
        until, faults = time.monotonic() + seconds, Counter[str]()
        loading = asyncio.create_task(load(world, random.Random(rng.random()), until))
        await asyncio.gather(
            *(
                _trouble(service, proxy, random.Random(rng.random()), until, faults)
                for service, proxy in zip(services, proxies, strict=True)
            )
        )
        await loading
        yield Members(services, configs[0], faults)
        await _settled(world, services)
        for service in services:
            code = await asyncio.to_thread(service.drain)
            assert code == 0, f"{service.name} ended with {code} on SIGTERM\n{service.tail()}"
        assert await _owners(world) == [""] * PARTITIONS, "a drained member gives its leases back"


async def _prepare(world: World, rng: random.Random) -> None:
    """A stream that already holds messages of every partition and of none, some of them deleted again.

    Not the awkward ones: nats-server 2.15 passes over subjects with a byte 0x7f where a consumer filters.
    """
    async with client_of(world.sites[SITE].url) as client:
        await make_stream(client, STREAM, SITE)
        stored = 0
        for number in range(PARTITIONS):
            stored += await publish(client, f"{SITE}.p{number}", rng, 40, first=number * 100)
            stored += await publish(client, f"{SITE}.none", rng, 5, first=number * 100 + 50)
        for sequence in rng.sample(range(1, stored), 12):
            await client.api(f"STREAM.MSG.DELETE.{STREAM}", {"seq": sequence})


def feed_of(more: dict[str, Any]) -> dict[str, Any]:
    """The feed of the members, with more keys."""
    return {"stream": STREAM, "partitions": {"count": PARTITIONS, "subject": SUBJECT}, **more}


def _config(world: World, number: int, proxy: TcpProxy, feed: dict[str, Any]) -> Path:
    return world.write(
        f"{SITE}-{number}",
        {
            "site": SITE,
            "instance": f"member-{number}",
            "nats": {"url": proxy.url},
            "store": world.store(),
            "egress": {
                "monitor": {"listen": ""},
                "lease_ttl": LEASE_TTL,
                "defaults": {"segment": world.segment},
                "feeds": [feed_of(feed)],
            },
        },
    )


async def _load(world: World, rng: random.Random, rate: int, until: float) -> None:
    """About `rate` messages a second over all partitions."""
    async with client_of(world.sites[SITE].url, "load") as client, AckedPublisher(client) as publisher:
        while time.monotonic() < until:
            for _ in range(max(1, rate // 10)):
                subject = f"{SITE}.p{rng.randrange(PARTITIONS)}.n{rng.randrange(50)}"
                await publisher.publish(subject.encode(), rng.randbytes(rng.randrange(1200)))
            await publisher.settle()
            await asyncio.sleep(0.1)


async def _trouble(service: Service, proxy: TcpProxy, rng: random.Random, until: float, faults: Counter[str]) -> None:
    """Faults of one process; afterwards it runs, unbroken."""
    while time.monotonic() < until:
        await asyncio.sleep(rng.uniform(0.2, 3.0))
        kind = rng.choice(["SIGKILL", "SIGSTOP", "cut", "blackhole"])
        faults[kind] += 1
        if kind == "SIGKILL":
            await asyncio.to_thread(service.kill)
        elif kind == "SIGSTOP":
            service.send(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.1, 5.0))
            service.send(signal.SIGCONT)
        elif kind == "cut":
            proxy.cut()
        else:
            proxy.blackhole(*rng.choice([("up",), ("down",), ("up", "down")]))
            await asyncio.sleep(rng.uniform(0.1, 4.0))
            proxy.heal()
        service.start()


# Afterwards


async def _judge(world: World, config: Path) -> Verdict:
    """Wait until the archive ends where the partitions do, then compare message by message."""
    sources = {chain: Trace.of(log) for chain, log in (await logs_of(world)).items()}
    store = open_store(load_settings(str(config)))
    await archived_to(store, {chain: trace.through for chain, trace in sources.items()})
    compared = total(archive_of(store, chain, trace) for chain, trace in sources.items())
    verdict = Verdict(compared, compared, sum(len(store.list(chain)) for chain in sources))
    if not verdict.ok:
        world.print_tails()
    return verdict


async def logs_of(world: World) -> dict[Chain, list[Message]]:
    """What the stream holds of each partition."""
    found: dict[Chain, list[Message]] = {chain: [] for chain in chains()}
    starts = {f"{SITE}.p{chain.partition}.".encode(): log for chain, log in found.items()}

    def take(message: Message) -> None:
        for start, log in starts.items():
            if message.subject.startswith(start):
                log.append(message)

    async with client_of(world.sites[SITE].url) as client:
        await read_stream(client, STREAM, take)
    return found


async def archived_to(store: SegmentStore, ends: dict[Chain, int], seconds: float = PATIENCE) -> None:
    """Wait until each chain is archived so far. What is missing then is for the comparison to name."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(_end(store, chain) < end for chain, end in ends.items()):
        await asyncio.sleep(0.3)


def _end(store: SegmentStore, chain: Chain) -> int:
    return max((ref.coverage.last for ref in store.list(chain)), default=0)


async def _settled(world: World, services: list[Service]) -> None:
    """Every lease is held by a process that runs, none holds more than a share, and it stays so."""
    share, deadline = fair_share(PARTITIONS, MEMBERS), time.monotonic() + QUIET
    alive = {str(service.pid) for service in services}
    before: list[str] = []
    while time.monotonic() < deadline:
        owners = await _owners(world)
        held_by = {owner.split("/")[2] for owner in owners if owner}
        if owners == before and held_by <= alive and max(Counter(owners).values()) <= share:
            return
        before = owners if "" not in owners else []
        await asyncio.sleep(1.5 * LEASE_SECONDS)
    world.print_tails()
    raise AssertionError(f"not shared fairly within {QUIET} s: {await _owners(world)}, running {alive}")


async def _owners(world: World) -> list[str]:
    """Who holds the lease of each partition; empty: nobody."""
    async with client_of(world.sites[SITE].url) as client:
        leases = KeyValue(client, "FLOE_LEASES", ttl=LEASE_SECONDS, replicas=1)
        entries = [await leases.get(lease_key(chain)) for chain in chains()]
    return [entry.value.decode() if entry else "" for entry in entries]
