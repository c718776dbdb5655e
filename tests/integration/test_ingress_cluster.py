"""A target of three replicas whose leader steps down, dies and is paused while ingress carries into it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from common.chain import Chain
from common.errors import FloeError
from common.jetstream.api import StreamInfo, stream_info
from common.jetstream.client import FloeClient
from infra.local.nats import NatsCluster
from tests.support.basics import at_length, soon
from tests.support.ingress import Archive, Centre, check_exact, client_of, rows_of
from tests.support.servers import placing

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
