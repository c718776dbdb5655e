"""A target of three replicas whose leader steps down, dies and is paused while ingress carries into it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from common.chain import Chain
from common.clock import SystemClock
from common.errors import FloeError
from common.jetstream.api import StreamInfo, stream_info
from common.jetstream.buckets import kv_replicas
from common.jetstream.client import FloeClient
from common.settings.egress import EgressSettings
from infra.local.nats import NatsCluster
from ingress.replay.drill import Scratch
from tests.support.basics import at_length, soon
from tests.support.ingress import Archive, Centre, check_exact, client_of, rows_of
from tests.support.replay import World
from tests.support.servers import place, placing

pytestmark = pytest.mark.servers
CHAINS = [Chain("us-east", "NODES"), Chain("eu-west", "NODES")]
ROWS = 3000


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    with NatsCluster() as servers:
        yield placing(servers)


async def led(client: FloeClient, stream: str) -> StreamInfo:
    """The stream once it has a leader."""

    async def look() -> StreamInfo | None:
        try:
            info = await stream_info(client, stream)
        except FloeError:
            return None
        return info if info and info.leader else None

    found = await soon(look)
    assert found is not None
    return found


@pytest.mark.parametrize("publisher", ["fast", at_length("atomic"), at_length("single")])
async def test_moving_leaders_lose_and_repeat_nothing(tmp_path: Path, cluster: NatsCluster, publisher: str) -> None:
    archive = Archive(tmp_path / "store")
    rows = ROWS // 4 if publisher == "single" else ROWS
    centre = Centre(tmp_path, archive, cluster.urls[0], publisher=publisher, create={"replicas": 3})
    centre.urls = cluster.urls
    async with client_of(*cluster.urls) as client, centre.running(lease_ttl="10s"):
        for first in range(1, rows, rows // 3):
            for chain in CHAINS:
                archive.put(rows_of(first, first + rows // 3 - 1, chain), chain=chain)
            info = await led(client, centre.target)
            await disturb(cluster, client, info, first // (rows // 3))
        messages = await centre.carried(client, 2 * rows)

    check_exact(messages, archive, centre.prefix)


async def test_the_first_replay_or_drill_makes_buckets_as_ingress_would(tmp_path: Path, cluster: NatsCluster) -> None:
    """Though its own target has one replica, and that of ingress does not exist yet."""
    async with client_of(*cluster.urls) as client:
        world = World(tmp_path, cluster.urls[0], client)

        def centre() -> Centre:
            create = {"subjects": ["fleet.>"], "replicas": 3}
            return Centre(tmp_path, world.archive, cluster.urls[0], create=create)

        world.centre = centre()
        world.fill((1, 10))
        await world.make()
        assert (await world.run()).finished
        drilling = centre()
        settings = drilling.settings().ingress
        await Scratch(client, settings, "", SystemClock()).sweep()
        buckets = [world.centre.lease_bucket, world.centre.state_bucket, drilling.lease_bucket]
        infos = [await led(client, f"KV_{bucket}") for bucket in buckets]
        assert [info.config["num_replicas"] for info in infos] == [3, 3, 3]


async def test_a_replay_into_a_source_makes_buckets_as_egress_would(tmp_path: Path, cluster: NatsCluster) -> None:
    async with client_of(*cluster.urls) as client:
        for name, replicas in (("SOURCE", 3), ("BACK", 1)):
            await place(client, {"name": name, "subjects": [f"{name}.>"], "num_replicas": replicas})
        for settings, expected in (
            (EgressSettings(feeds=({"stream": "SOURCE"},)), 3),
            (EgressSettings(feeds=({"stream": "GONE"},)), 1),
            (EgressSettings(feeds=({"stream": "SOURCE"},), kv_replicas=2), 2),
        ):
            assert await kv_replicas(client, settings, "BACK") == expected
        assert await kv_replicas(client, EgressSettings(), "SOURCE") == 3


async def disturb(cluster: NatsCluster, client: FloeClient, info: StreamInfo, number: int) -> None:
    leader = cluster.server(info.leader)
    if number % 3 == 0:
        with suppress(FloeError):  # its answer may be lost with the leader
            await client.api(f"STREAM.LEADER.STEPDOWN.{info.name}")
    elif number % 3 == 1:
        await asyncio.to_thread(leader.kill)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(leader.start)
    else:
        leader.pause()
        await asyncio.sleep(2)
        leader.resume()
