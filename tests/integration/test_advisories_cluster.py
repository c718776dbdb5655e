"""Advisories into a replicated stream whose leader moves, and whose replicas lag, while they are sent."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from common.errors import FloeError
from common.jetstream.client import connect
from common.settings.service import NatsSettings
from infra.local.nats import NatsCluster
from tests.support.advisories import SECOND, World, news, running
from tests.support.basics import soon


async def _made(world: World) -> bool:
    with suppress(FloeError):
        await world.make_stream(num_replicas=3, storage="file", duplicate_window=120 * SECOND)
        return True
    return False


async def test_leaders_that_move_and_restarts_lose_and_repeat_nothing(cluster: NatsCluster) -> None:
    client = await connect(NatsSettings(url=cluster.urls), name="test")
    world, sent = World(client), news(4000, values=2000)
    await soon(lambda: _made(world))
    for _ in range(3):
        async with running(world.advisories(outbox=sent)) as advisories:
            advisories.settle()
            for _ in range(2):
                await asyncio.sleep(0.3)
                with suppress(FloeError):
                    await client.api(f"STREAM.LEADER.STEPDOWN.{world.stream}")
    async with running(world.advisories(outbox=sent)) as last:
        last.settle()
        await last.drain(1)  # may fail for a moment, then it waits for nothing
        await soon(lambda: not last.pending())
    found = await world.stored()
    await client.aclose()

    assert len({each.event_id for each in found}) == len(found) == len(sent)
