"""Faults while egress runs: deleted or stalled consumers, connections, the object store, leases, memory, the drain. The
source is about to expire messages meanwhile.
"""

import asyncio
import math
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from common.errors import Unavailable
from common.nats.api import consumer_names
from common.nats.kv import KeyValue
from egress.feed import lease_key
from tests.support.basics import metric_value, soon, unique
from tests.support.egress import QUICK, Bench
from tests.support.stores import FaultyStore, raising

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


def fail_puts(store: FaultyStore) -> None:
    """Let every put fail until `released`."""
    for verb in ("put", "put_if_absent"):
        store.on(verb, raising(Unavailable("the store is down")))


def released(store: FaultyStore) -> None:
    for verb in ("put", "put_if_absent"):
        store.on(verb, lambda real, *args, **kwargs: real(*args, **kwargs))


# The source


async def test_a_deleted_consumer_is_made_again_and_nothing_is_missing(bench: Bench) -> None:
    """F17."""
    stream = await bench.make_stream(unique("T"))
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: running.state(stream) == "reading")
        for round_ in range(3):
            await bench.publish(stream, [b"x"] * 50)
            (name,) = await soon(lambda: consumer_names(bench.client, stream))
            await bench.client.api(f"CONSUMER.DELETE.{stream}.{name}")
            await bench.archive(stream, [b"y"] * 50, 100 * (round_ + 1))
    await bench.same(stream, stream)
    assert await consumer_names(bench.client, stream) == []


# The object store


@pytest.mark.real
async def test_an_unreachable_store_stops_the_pulling_within_the_memory_limit(bench: Bench) -> None:
    """F31: the waiting messages are bounded, and in order once the store is back."""
    stream = await bench.make_stream(unique("T"))
    objects = FaultyStore(bench.objects)
    fail_puts(objects)
    feed = {"stream": stream, "segment": {"max_size": "1M"}}
    # Documents are small objects put by the same verbs: they must exist before the store fails.
    async with bench.egress(feed, lease_ttl=LONG_LEASE) as running:
        await soon(lambda: running.state(stream) == "reading")
    body = os.urandom(20_000)
    async with bench.egress(feed, objects=objects, memory_limit="16M", lease_ttl=LONG_LEASE) as running:
        await bench.publish(stream, [body] * 4_000)
        await soon(lambda: running.state(stream) == "waiting")
        (name,) = await consumer_names(bench.client, stream)
        asked = await bench.client.api(f"CONSUMER.INFO.{stream}.{name}")
        assert asked["num_pending"] > 2_000, "most of it stays in the stream"
        assert running.health.problems()
        released(objects)
        await bench.archived_to(stream, 4_000)
    await bench.same(stream, stream)


async def test_a_drain_that_the_store_delays_ends_in_time_and_keeps_the_lease(bench: Bench) -> None:
    """F06: messages that were not stored are read again; the lease is left to expire."""
    stream = await bench.make_stream(unique("T"))
    objects = FaultyStore(bench.objects)
    async with bench.egress({"stream": stream}, lease_ttl="5s") as running:
        await soon(lambda: running.state(stream) == "reading")
    fail_puts(objects)
    running = bench.start(bench.settings({"stream": stream}, shutdown_timeout="1s", lease_ttl="5s"), objects=objects)
    await bench.publish(stream, [b"x"] * 10)
    await soon(lambda: running.state(stream) == "waiting")
    running.stop.set()
    assert await running.task is False
    leases = await KeyValue(bench.client, bench.lease_bucket, ttl=5.0).ensure()
    assert await leases.get(lease_key(bench.chain(stream))) is not None
    async with bench.egress({"stream": stream}, lease_ttl="5s"):
        await bench.archived_to(stream, 10)
    await bench.same(stream, stream)


# Memory


@pytest.mark.parametrize("size", [101_000, 200_000], ids=["received", "not sent by the server"])
async def test_a_message_too_large_to_archive_stops_behind_earlier_ones(bench: Bench, monkeypatch, size: int) -> None:
    monkeypatch.setattr("egress.reader.MAX_MESSAGE_BYTES", 100_000)
    stream = await bench.filled([b"x" * 99_000, b"y" * 10, b"z" * size, b"behind it"])
    # No segment is due for an hour: the messages before this one are archived because of the stop.
    async with bench.egress({"stream": stream, "segment": {"max_age": "1h"}}) as running:
        await soon(lambda: running.state(stream) == "stopped")
        assert (running.status(stream)["code"], bench.end(stream)) == ("E-MSG-TOO-LARGE", 2)
        await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 3})
        await soon(lambda: running.state(stream) == "reading")
        await running.received(stream, 4)
    await bench.same(stream, stream)
    assert bench.end(stream) == 4


@pytest.mark.real
async def test_many_small_feeds_share_one_budget(bench: Bench) -> None:
    """12 feeds of 10 MB each, and no segment is due: only the memory limit closes them."""
    stream = await bench.make_stream(unique("T"))
    names = [unique(f"F{i}") for i in range(12)]
    feeds = [{"name": name, "stream": stream, "segment": {"max_age": "1h"}} for name in names]
    await bench.publish(stream, [os.urandom(20_000)] * 500)
    async with bench.egress(*feeds, memory_limit="16M"):
        # The rest is in memory, which is less than 16 MiB: 838 messages.
        await soon(lambda: sum(bench.end(name) for name in names) >= 12 * 500 - 838)
    for name in names:
        bench.check(name)


# Stalls

IMPATIENT = replace(QUICK, intervals=replace(QUICK.intervals, check=0.2, stalled=0.8))
LONG_LEASE = "60s"  # a lease that is lost on a busy machine would replace the consumer of the test


def metric(name: str, feed: str, **labels: str) -> float:
    found = metric_value(f"floe_egress_{name}", {"site": "site", "feed": feed, "partition": "0", **labels})
    return math.nan if found is None else found


async def pause(bench: Bench, stream: str) -> str:
    """Pause the stream's one consumer for an hour, and return its name."""
    [name] = await soon(lambda: consumer_names(bench.client, stream))
    until = (datetime.now(UTC) + timedelta(hours=1)).isoformat().replace("+00:00", "Z")
    await bench.client.api(f"CONSUMER.PAUSE.{stream}.{name}", {"pause_until": until})
    return name


@pytest.mark.real
async def test_a_consumer_that_delivers_nothing_is_remade(bench: Bench) -> None:
    stream = await bench.filled([b"a"] * 10)
    async with bench.egress({"stream": stream}, tuning=IMPATIENT, lease_ttl=LONG_LEASE) as running:
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
    """Neither an idle stream, nor one that gets only messages that the feed does not take."""
    stream = await bench.filled([b"a"] * 3)
    feed = {"stream": stream, "filter_subject": f"{stream}.a"}
    async with bench.egress(feed, tuning=IMPATIENT, lease_ttl=LONG_LEASE):
        await bench.archived_to(stream, 3)
        await pause(bench, stream)  # so that no heartbeat reports that the consumer has passed them
        before = metric("doubts_total", stream, reason="stalled")  # a server that is slow to begin may have caused one
        await bench.publish(stream, [b"x"] * 5, subject="other")
        await asyncio.sleep(2.0)

    assert metric("doubts_total", stream, reason="stalled") == before
    assert metric("stalled", stream) == 0


async def test_a_store_that_takes_nothing_is_logged_with_the_time_until_messages_expire(bench: Bench) -> None:
    """The reader stays the same."""
    stream = await bench.make_stream(unique("AGE"), max_age=3600 * 10**9)
    store = FaultyStore(bench.objects)
    async with bench.egress({"stream": stream}, tuning=IMPATIENT, objects=store, lease_ttl=LONG_LEASE):
        await bench.archive(stream, [b"a"] * 10, 10)
        await soon(lambda: metric("expiry_seconds", stream) == math.inf)
        fail_puts(store)
        await bench.publish(stream, [b"b"] * 10)
        await soon(lambda: metric("stalled", stream) == 1)
        await soon(lambda: 3500 < metric("expiry_seconds", stream) < 3600)
        before = metric("expiry_seconds", stream)
        await asyncio.sleep(0.3)
        assert metric("expiry_seconds", stream) < before
        released(store)
        await bench.archived_to(stream, 20)
        await soon(lambda: (metric("stalled", stream), metric("expiry_seconds", stream)) == (0, math.inf))
    assert not metric("doubts_total", stream, reason="stalled") >= 1
    await bench.same(stream, stream)
