"""A consumer that stands still is given up and read anew; what the source is about to expire is told."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from common.errors import Unavailable
from common.jetstream.api import consumer_names
from common.metrics import REGISTRY
from infra.local.nats import NatsServer
from tests.support.basics import soon, unique
from tests.support.egress import QUICK, Bench, Running
from tests.support.proxies import TcpProxy
from tests.support.stores import FaultyStore, raising

pytestmark = [pytest.mark.servers, pytest.mark.simulated]

IMPATIENT = replace(QUICK, pace=replace(QUICK.pace, check=0.2, stalled=0.8))


def metric(name: str, feed: str, **labels: str) -> float:
    found = REGISTRY.get_sample_value(f"floe_egress_{name}", {"site": "site", "feed": feed, "partition": "0", **labels})
    return math.nan if found is None else found


class Store(FaultyStore):
    """Takes segments until it is `down`."""

    def down(self) -> None:
        self.on("put_if_absent", raising(Unavailable("the store takes nothing")))

    def up(self) -> None:
        self._faults.clear()


async def pause(bench: Bench, stream: str) -> str:
    """Pause the stream's one consumer for an hour; its name."""
    [name] = await soon(lambda: consumer_names(bench.client, stream))
    until = (datetime.now(UTC) + timedelta(hours=1)).isoformat().replace("+00:00", "Z")
    await bench.client.api(f"CONSUMER.PAUSE.{stream}.{name}", {"pause_until": until})
    return name


@pytest.mark.real
async def test_a_consumer_that_delivers_nothing_is_read_anew(bench: Bench) -> None:
    stream = await bench.make_stream(unique("PAUSED"))
    await bench.publish(stream, [b"a"] * 10)
    async with bench.egress({"stream": stream}, tuning=IMPATIENT) as running:
        await bench.archived_to(stream, 10)
        await pause(bench, stream)
        await bench.publish(stream, [b"b"] * 10)
        await soon(lambda: metric("doubts_total", stream, reason="stalled") >= 1)
        assert metric("stalled", stream) == 1
        await bench.archived_to(stream, 20)
        await soon(lambda: metric("stalled", stream) == 0)
        await soon(lambda: running.state(stream) == "reading")

    await bench.same(stream, stream)


@pytest.mark.real
async def test_a_stream_in_which_nothing_happens_does_not_stall(bench: Bench) -> None:
    """Neither an idle one, nor one that gets only what the feed does not take."""
    stream = await bench.make_stream(unique("IDLE"))
    await bench.publish(stream, [b"a"] * 3)
    async with bench.egress({"stream": stream, "filter_subject": f"{stream}.a"}, tuning=IMPATIENT):
        await bench.archived_to(stream, 3)
        await pause(bench, stream)  # so that no heartbeat says that the consumer has passed them
        await bench.publish(stream, [b"x"] * 5, subject="other")
        await asyncio.sleep(2.0)

    assert not metric("doubts_total", stream, reason="stalled") >= 1
    assert metric("stalled", stream) == 0


@pytest.mark.real
async def test_a_line_that_is_dead_in_one_direction_is_noticed_and_heals(bench: Bench, nats_server: NatsServer) -> None:
    """F14."""
    stream = await bench.make_stream(unique("DEAF"))
    async with TcpProxy(nats_server.port) as proxy:
        through = replace(bench, url=proxy.url)
        async with through.egress({"stream": stream}, tuning=IMPATIENT, lease_ttl="10s") as running:
            await bench.publish(stream, [b"a"] * 10)
            await bench.archived_to(stream, 10)
            proxy.blackhole("down")
            await bench.publish(stream, [b"b"] * 10)
            await soon(lambda: running.state(stream) == "checking")
            proxy.heal()
            await bench.archived_to(stream, 20)

    await bench.same(stream, stream)


async def test_a_store_that_takes_nothing_is_told_and_the_reader_is_kept(bench: Bench) -> None:
    stream = await bench.make_stream(unique("FULL"))
    store = Store(bench.objects)
    async with bench.egress({"stream": stream}, tuning=IMPATIENT, objects=store):
        await bench.publish(stream, [b"a"] * 10)
        await bench.archived_to(stream, 10)
        store.down()
        await bench.publish(stream, [b"b"] * 10)
        await soon(lambda: metric("stalled", stream) == 1)
        store.up()
        await bench.archived_to(stream, 20)
        await soon(lambda: metric("stalled", stream) == 0)

    assert not metric("doubts_total", stream, reason="stalled") >= 1
    await bench.same(stream, stream)


# What the source is about to expire


async def stuck(bench: Bench, stream: str) -> tuple[Store, Running]:
    """An egress whose store takes nothing any more, and that has archived something."""
    store = Store(bench.objects)
    running = bench.start(bench.settings({"stream": stream}), IMPATIENT, objects=store)
    await bench.publish(stream, [b"a"] * 10)
    await bench.archived_to(stream, 10)
    store.down()
    return store, running


async def test_the_age_limit_runs_down_while_egress_cannot_put(bench: Bench) -> None:
    stream = await bench.make_stream(unique("AGE"), max_age=3600 * 10**9)
    store, running = await stuck(bench, stream)
    await soon(lambda: metric("expiry_seconds", stream) == math.inf)

    await bench.publish(stream, [b"b"] * 10)

    await soon(lambda: 3500 < metric("expiry_seconds", stream) < 3600)
    before = metric("expiry_seconds", stream)
    await asyncio.sleep(0.3)
    assert metric("expiry_seconds", stream) < before
    store.up()
    await bench.archived_to(stream, 20)
    await soon(lambda: metric("expiry_seconds", stream) == math.inf)
    await running.drain()
