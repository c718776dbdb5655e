"""A replicated stream with moving leaders and dying nodes under egress (F12, F18, F19). Leases are shared over
replicated buckets that lose their quorum for longer than a lease lives.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from common.errors import FloeError, Unavailable
from common.nats.api import stream_info
from common.nats.kv import KeyValue, state_key
from infra.acked import AckedPublisher
from infra.local.nats import NatsCluster, nats_server_binary
from tests.support.basics import soon, unique
from tests.support.egress import SITE, Bench, Running, connected
from tests.support.servers import placing


@pytest.fixture
def bench(clustered: Bench) -> Bench:
    return clustered


async def publish(bench: Bench, stream: str, is_done: Callable[[int], bool]) -> None:
    """Publish with acknowledgements and retries until `is_done` accepts the number."""
    async with AckedPublisher(bench.client, window=64) as publisher:
        count = 0
        while not is_done(count):
            await publisher.publish(f"{stream}.a".encode(), b"%d" % count, None)
            count += 1
        await publisher.wait_for_acks()


async def test_a_node_that_is_killed_takes_nothing_with_it(bench: Bench, cluster: NatsCluster) -> None:
    """The node that has the consumer in memory is killed."""
    stream, done = await bench.make_replicated(), asyncio.Event()
    load = asyncio.create_task(publish(bench, stream, lambda _: done.is_set()))
    async with bench.egress({"stream": stream}, lease_ttl="10s"):
        await bench.archived_to(stream, 1)

        async def where() -> str:
            with suppress(FloeError):  # no leader just now
                for name in (await bench.client.api(f"CONSUMER.NAMES.{stream}"))["consumers"] or []:
                    answer = await bench.client.api(f"CONSUMER.INFO.{stream}.{name}")
                    return str(answer["cluster"]["leader"])
            return ""

        server = cluster.server(await soon(where))
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(1.0)
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(cluster.wait_ready)
        done.set()
        await load
        await bench.archived_to(stream, await bench.last(stream))
    await bench.same_at_last(stream, stream)


async def test_leaders_that_move_lose_no_message_that_was_acknowledged_to_one_of_them(bench: Bench) -> None:
    """Leaders of the stream and of its durable; messages with a forgotten acknowledgement are sent again."""
    stream, done = await bench.make_replicated("workqueue"), asyncio.Event()
    async with bench.egress({"stream": stream, "segment": {"max_messages": 2_000}}, lease_ttl="10s") as running:
        await soon(lambda: running.state(stream) == "reading")
        load = asyncio.create_task(publish(bench, stream, lambda _: done.is_set()))
        for _ in range(4):
            await asyncio.sleep(0.5)
            with suppress(FloeError):
                await bench.client.api(f"STREAM.LEADER.STEPDOWN.{stream}")
            with suppress(FloeError):
                for name in (await bench.client.api(f"CONSUMER.NAMES.{stream}"))["consumers"] or []:
                    await bench.client.api(f"CONSUMER.LEADER.STEPDOWN.{stream}.{name}")
        done.set()
        await load
        last = 0

        async def is_empty() -> bool:
            nonlocal last
            with suppress(FloeError):  # no leader just now
                info = await stream_info(bench.client, stream)
                last = info.last_sequence if info else 0
                return info is not None and info.messages == 0
            return False

        await soon(is_empty)
    bench.check(stream)
    assert bench.ledger(stream) == {}
    assert [message.sequence for message in bench.messages(stream)] == list(range(1, last + 1))


def working(members: list[Running], names: list[str]) -> list[int]:
    """The number of feeds that each member reads."""
    return sorted([member.state(name) for name in names].count("reading") for member in members)


async def owners(bench: Bench, names: list[str]) -> list[str]:
    kv = await KeyValue(bench.client, bench.lease_bucket, ttl=3.0).ensure()
    entries = [await kv.get(state_key("egress", SITE, name, "0")) for name in names]
    return [entry.value.decode() if entry else "" for entry in entries]


async def test_without_a_quorum_nobody_works_and_with_one_again_the_shares_are_fair(bench: Bench, cluster: NatsCluster):
    stream, names = await bench.make_replicated(), [unique("F") for _ in range(4)]
    settings = bench.settings(*({"name": name, "stream": stream} for name in names), lease_ttl="3s")
    members = [bench.start(settings) for _ in range(2)]
    await publish(bench, stream, lambda count: count == 100)
    await soon(lambda: working(members, names) == [2, 2])
    for server in cluster.servers[1:]:
        server.pause()
    await soon(lambda: working(members, names) == [0, 0])
    for server in cluster.servers[1:]:
        server.resume()
    await asyncio.to_thread(cluster.wait_ready)
    await soon(lambda: working(members, names) == [2, 2])
    await publish(bench, stream, lambda count: count == 100)
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


async def test_a_leader_that_dies_in_an_older_cluster_and_comes_back_as_the_newest_loses_nothing(tmp_path: Path):
    with NatsCluster(binary=nats_server_binary("2.10")) as older:
        await asyncio.to_thread(placing, older)
        async with aclosing(await connected(older.urls)) as client:
            bench = Bench(older.urls, tmp_path, client)
            stream = await bench.make_replicated()

            async def reaches(last: int) -> bool:
                with suppress(FloeError):  # no leader just now
                    await publish(bench, stream, lambda count: count == 100)
                    return await bench.last(stream) >= last
                return False

            await soon(lambda: reaches(100))
            async with bench.egress({"stream": stream}, kv_replicas=3, lease_ttl="10s"):
                await bench.archived_to(stream, 100)
                leader = older.server((await stream_info(client, stream)).leader)
                await asyncio.to_thread(leader.kill)
                leader.binary = nats_server_binary()
                await asyncio.to_thread(leader.start)
                await asyncio.to_thread(older.wait_ready)
                await soon(lambda: reaches(200))
                await bench.archived_to(stream, await bench.last(stream))
            await bench.same_at_last(stream, stream)
            assert len(bench.messages(stream)) >= 200
