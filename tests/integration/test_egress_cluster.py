"""A replicated stream whose leaders move and whose nodes die while it is frozen (F12, F18, F19)."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from common.errors import FloeError
from common.jetstream.api import stream_info
from infra.acked import AckedPublisher
from infra.local.nats import NatsCluster
from tests.support.basics import soon
from tests.support.egress import Bench


@pytest.fixture
def bench(clustered: Bench) -> Bench:
    return clustered


async def publish_until(bench: Bench, stream: str, done: asyncio.Event) -> None:
    """Publish with acknowledgements, retried, until `done`."""
    async with AckedPublisher(bench.client, window=64) as publisher:
        while not done.is_set():
            await publisher.publish(f"{stream}.a".encode(), b"x" * 100, None)
        await publisher.settle()


async def test_a_node_that_is_killed_takes_nothing_with_it(bench: Bench, cluster: NatsCluster) -> None:
    """The node in whose memory the consumer lives."""
    stream, done = await bench.make_replicated(), asyncio.Event()
    load = asyncio.create_task(publish_until(bench, stream, done))
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


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_leaders_that_move_lose_no_message_that_was_acknowledged_to_one_of_them(
    bench: Bench, retention: str
) -> None:
    """Leaders of the stream and of its durable; what they forget of acknowledgements is sent again."""
    stream, done = await bench.make_replicated(retention), asyncio.Event()
    feed = {"stream": stream, "segment": {"max_messages": 2_000}}
    async with bench.egress(feed, lease_ttl="10s") as running:
        await soon(lambda: running.state(stream) == "reading")
        load = asyncio.create_task(publish_until(bench, stream, done))
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
