"""The contract of publishers on a stream of three replicas, while its leaders step down, die and pause."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress

import pytest

from common.errors import FloeError
from common.nats.api import stream_info
from common.nats.client import FloeClient
from infra.local.nats import NatsCluster, NatsServer
from ingress.publishers.batches import PUBLISHERS
from tests.support.basics import PATIENCE, soon
from tests.support.ingress import client_of
from tests.support.publishers import carry, check, last_of, new_stream, publisher, quiet, rows_for
from tests.support.servers import placing

pytestmark = pytest.mark.servers
COUNTS = {"fast": 2000, "atomic": 2000, "single": 150}
INTENT = {"fast": 500, "atomic": 500, "single": 50}


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    with NatsCluster() as servers:
        yield placing(servers)


@pytest.fixture
async def client(cluster: NatsCluster) -> AsyncIterator[FloeClient]:
    async with client_of(*cluster.urls) as connected:
        yield connected


@pytest.fixture
async def stream(client: FloeClient) -> str:
    return await soon(lambda: three_replicas(client))


async def three_replicas(client: FloeClient) -> str:
    with suppress(FloeError):  # the leader of the cluster may have been the last one paused
        return await new_stream(client, num_replicas=3)
    return ""


async def leader_of(cluster: NatsCluster, client: FloeClient, stream: str) -> NatsServer:
    """Return the server that leads the stream."""

    async def look() -> str:
        with suppress(FloeError):
            info = await stream_info(client, stream)
            return info.leader if info and info.leader else ""
        return ""

    return cluster.server(await soon(look))


async def led_by_one(cluster: NatsCluster, client: FloeClient) -> tuple[NatsServer, dict[str, str]]:
    """Create a stream for each kind of publisher, all with the same leader, so that one fault affects all."""
    streams = {kind: await soon(lambda: three_replicas(client)) for kind in PUBLISHERS}
    leader = await leader_of(cluster, client, streams["fast"])
    for stream in streams.values():
        while await leader_of(cluster, client, stream) is not leader:
            await step_down(client, stream, leader.name)
            await asyncio.sleep(0.1)
    return leader, streams


async def step_down(client: FloeClient, stream: str, successor: str = "") -> None:
    request = {"placement": {"preferred": successor}} if successor else None
    with suppress(FloeError):  # its answer may be lost with the leader
        await client.api(f"STREAM.LEADER.STEPDOWN.{stream}", request)


async def all_kinds(run: Callable[[str], Awaitable[None]]) -> None:
    """Run a test function for each kind of publisher at the same time."""
    async with asyncio.TaskGroup() as group:
        for kind in PUBLISHERS:
            group.create_task(_named(kind, run(kind)))


async def _named(kind: str, running: Awaitable[None]) -> None:
    try:
        await running
    except BaseException as error:
        error.add_note(f"publisher {kind}")
        raise


async def test_twins_under_changing_leaders_store_rows_once(
    kind: str, cluster: NatsCluster, client: FloeClient, stream: str
) -> None:
    over, step = asyncio.Event(), INTENT[kind]

    async def send() -> int:
        async with client_of(*cluster.urls) as twin:
            sender, base = await publisher(kind, twin, stream, 1.0), 0
            while not over.is_set() or base < COUNTS[kind]:
                rows = rows_for(stream, step, first=base + 1)
                await asyncio.wait_for(carry(sender, rows, client, stream, base=base, twin=True), PATIENCE)
                base += step
                await asyncio.sleep(0.05 if base >= COUNTS[kind] else 0)
            return base

    async def change_leaders() -> None:
        for _ in range(4):
            await asyncio.sleep(0.05)
            await step_down(client, stream)
        over.set()

    *ends, _ = await asyncio.gather(send(), send(), change_leaders())

    assert await quiet(client, stream) == max(ends)
    await check(client, stream, max(ends))


async def test_a_leader_that_dies_loses_and_repeats_nothing(cluster: NatsCluster, client: FloeClient) -> None:
    leader, streams = await led_by_one(cluster, client)
    over = asyncio.Event()

    async def send(kind: str) -> None:
        urls, stream = [server.url for server in cluster.servers if server is not leader], streams[kind]
        async with client_of(*urls) as sending:
            sender, base = await publisher(kind, sending, stream, 1.0), 0
            while not over.is_set() or base < COUNTS[kind]:
                rows = rows_for(stream, INTENT[kind], first=base + 1)
                await asyncio.wait_for(carry(sender, rows, sending, stream, base=base), PATIENCE)
                base += INTENT[kind]
                if base >= COUNTS[kind]:  # enough to read back: one now and then until the fault is over
                    await asyncio.sleep(0.2)
            await quiet(sending, stream)
            await check(sending, stream, base)

    async def kill() -> None:
        await soon(lambda: last_of(client, streams["fast"]), every=0.01)
        await asyncio.to_thread(leader.kill)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(leader.start)
        over.set()

    await asyncio.gather(all_kinds(send), kill())


async def test_a_leader_that_wakes_stores_nothing_of_its_queue(cluster: NatsCluster, client: FloeClient) -> None:
    """Keep rows in a paused leader while a twin stores them through the next one; then resume it."""
    leader, streams = await led_by_one(cluster, client)
    others = [server.url for server in cluster.servers if server is not leader]
    outcomes = {}
    async with client_of(leader.url) as behind, client_of(*others) as ahead:
        late = {kind: await publisher(kind, behind, stream, 1.0) for kind, stream in streams.items()}
        for kind, stream in streams.items():
            await carry(late[kind], rows_for(stream, 10), behind, stream)

        async def send(kind: str) -> None:
            rows = rows_for(streams[kind], COUNTS[kind])
            outcomes[kind] = await late[kind].publish(rows, 0, 10)
            sender = await publisher(kind, ahead, streams[kind], 1.0)
            await asyncio.wait_for(carry(sender, rows, ahead, streams[kind]), PATIENCE)

        leader.pause()
        try:
            await all_kinds(send)
        finally:
            leader.resume()
        await asyncio.to_thread(cluster.wait_ready)

        for kind, stream in streams.items():
            assert outcomes[kind].stored == 10
            assert outcomes[kind].unclear is not None
            assert await quiet(ahead, stream) == COUNTS[kind]
            await check(ahead, stream, COUNTS[kind])
