"""The contract of publishers on lines that break, beside twins, and on a server that dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.jetstream.client import FloeClient
from infra.local.nats import NatsServer
from tests.support.basics import PATIENCE, soon
from tests.support.ingress import client_of
from tests.support.proxies import TcpProxy
from tests.support.publishers import carry, check, last_of, new_stream, publisher, quiet, rows_for

pytestmark = pytest.mark.servers
COUNTS = {"fast": 2500, "atomic": 2500, "single": 60}


async def test_answers_that_never_come_are_settled_by_reading(
    kind: str, nats_server: NatsServer, client: FloeClient, stream: str
) -> None:
    async with TcpProxy(nats_server.port) as proxy, client_of(proxy.url) as broken:
        rows, sender = rows_for(stream, COUNTS[kind]), await publisher(kind, broken, stream, 0.3)
        proxy.blackhole("down")
        carrying = asyncio.create_task(carry(sender, rows, client, stream))
        for _ in range(3):
            await asyncio.sleep(0.35)
            proxy.heal()
            await soon(lambda: broken.is_up)
            proxy.blackhole("down")
        proxy.heal()
        unclear = await asyncio.wait_for(carrying, PATIENCE)

    assert unclear >= 1
    await check(client, stream, rows.count)


async def test_connections_cut_in_the_middle_lose_and_repeat_nothing(
    kind: str, nats_server: NatsServer, client: FloeClient, stream: str
) -> None:
    async with TcpProxy(nats_server.port) as proxy, client_of(proxy.url) as broken:
        rows, sender = rows_for(stream, COUNTS[kind], 200), await publisher(kind, broken, stream)
        proxy.cut_after("up", 4_000)
        carrying = asyncio.create_task(carry(sender, rows, client, stream))
        for direction, size in (("up", 9_000), ("down", 300), ("up", 30_000), ("down", 900)):
            await asyncio.sleep(0.2)
            proxy.cut_after(direction, size)
        await asyncio.wait_for(carrying, PATIENCE)

    await check(client, stream, rows.count, 200)


async def test_two_senders_of_the_same_rows_store_each_row_once(
    kind: str, client: FloeClient, nats_url: str, stream: str
) -> None:
    rows = rows_for(stream, COUNTS[kind])
    async with client_of(nats_url) as one, client_of(nats_url) as two:
        senders = [await publisher(kind, twin, stream) for twin in (one, two)]
        await asyncio.gather(*(carry(sender, rows, client, stream) for sender in senders))

    await check(client, stream, rows.count)


async def test_late_messages_of_a_slow_twin_are_the_same_messages_or_refused(
    kind: str, nats_server: NatsServer, client: FloeClient, stream: str
) -> None:
    rows = rows_for(stream, COUNTS[kind])
    async with TcpProxy(nats_server.port) as proxy, client_of(proxy.url) as slow:
        late, sender = await publisher(kind, slow, stream, 0.5), await publisher(kind, client, stream)
        proxy.delay = 0.15
        sending = asyncio.create_task(late.publish(rows, 0, 0))
        await soon(lambda: last_of(client, stream), every=0.001)

        await carry(sender, rows, client, stream)
        outcome = await sending
        proxy.delay = 0.0

    assert outcome.stored <= rows.count
    assert await quiet(client, stream) == rows.count
    await check(client, stream, rows.count)


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_connection_cut_at_any_point_loses_and_repeats_nothing(
    kind: str, nats_server: NatsServer, client: FloeClient, direction: str
) -> None:
    count = COUNTS[kind] // 3
    whole = {"up": count * 260, "down": {"fast": 900, "atomic": 400, "single": count * 110}[kind]}[direction]
    async with TcpProxy(nats_server.port) as proxy, client_of(proxy.url) as broken:
        for part in range(1, 5):
            stream = await new_stream(client)
            sender = await publisher(kind, broken, stream, 1.0)
            proxy.cut_after(direction, whole * part // 5)
            await asyncio.wait_for(carry(sender, rows_for(stream, count), client, stream), PATIENCE)
            await check(client, stream, count)
            await soon(lambda: broken.is_up)
            await sender.aclose()


async def test_a_server_killed_in_the_middle_and_started_again_goes_on(kind: str, tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as server:
        async with client_of(server.url) as client:
            stream = await new_stream(client)
            rows, sender = rows_for(stream, 4 * COUNTS[kind]), await publisher(kind, client, stream, 1.0)
            carrying = asyncio.create_task(carry(sender, rows, client, stream))
            await soon(lambda: last_of(client, stream), every=0.001)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await asyncio.wait_for(carrying, PATIENCE)

            await check(client, stream, rows.count)
