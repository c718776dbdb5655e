"""Shares over replicated buckets whose quorum is lost for longer than a lease lives (F12)."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from common.errors import Unavailable
from common.jetstream.kv import KeyValue, state_key
from infra.acked import AckedPublisher
from infra.local.nats import NatsCluster
from tests.support.basics import soon, unique
from tests.support.egress import SITE, Bench, Running

TTL = 3.0  # seconds


@pytest.fixture
def bench(clustered: Bench) -> Bench:
    return clustered


async def publish(bench: Bench, stream: str, count: int) -> None:
    async with AckedPublisher(bench.client, window=64) as publisher:
        for number in range(count):
            await publisher.publish(f"{stream}.a".encode(), b"%d" % number, None)
        await publisher.settle()


def working(members: list[Running], names: list[str]) -> list[int]:
    """How many feeds each member reads."""
    return sorted([member.state(name) for name in names].count("reading") for member in members)


async def owners(bench: Bench, names: list[str]) -> list[str]:
    kv = await KeyValue(bench.client, bench.lease_bucket, ttl=TTL).ensure()
    entries = [await kv.get(state_key("egress", SITE, name, "0")) for name in names]
    return [entry.value.decode() if entry else "" for entry in entries]


async def test_without_a_quorum_nobody_works_and_with_one_again_the_shares_are_fair(
    bench: Bench, cluster: NatsCluster
) -> None:
    stream, names = await bench.make_replicated(), [unique("F") for _ in range(4)]
    settings = bench.settings(*({"name": name, "stream": stream} for name in names), lease_ttl=f"{TTL:g}s")
    members = [bench.start(settings) for _ in range(2)]
    await publish(bench, stream, 100)
    await soon(lambda: working(members, names) == [2, 2])
    for server in cluster.servers[1:]:
        server.pause()
    await soon(lambda: working(members, names) == [0, 0])
    for server in cluster.servers[1:]:
        server.resume()
    await asyncio.to_thread(cluster.wait_ready)
    await soon(lambda: working(members, names) == [2, 2])
    await publish(bench, stream, 100)
    last = await bench.last(stream)
    for name in names:
        await bench.archived_to(name, last)

    async def fair() -> bool:
        with suppress(Unavailable):  # no leader just now
            found = await owners(bench, names)
            return sorted(map(found.count, set(found))) == [2, 2]
        return False

    await soon(fair)
    await asyncio.gather(*(member.drain() for member in members))
    for name in names:
        await bench.same_at_last(name, stream)
