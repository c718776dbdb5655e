"""What goes wrong while egress runs: consumers, connections, the object store, leases, memory, the drain."""

from __future__ import annotations

import os

import pytest

from common.errors import Unavailable
from common.jetstream.api import consumer_names
from common.jetstream.kv import KeyValue
from egress.feed import lease_key
from tests.support.basics import soon, unique
from tests.support.egress import Bench
from tests.support.stores import FaultyStore, raising


def held_up(store: FaultyStore) -> None:
    """Let no segment be put until `released`."""
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
            await bench.publish(stream, [b"y"] * 50)
            await bench.archived_to(stream, 100 * (round_ + 1))
    await bench.same(stream, stream)
    assert await consumer_names(bench.client, stream) == []


# The object store


async def test_an_unreachable_store_stops_the_pulling_within_the_memory_limit(bench: Bench) -> None:
    """F31: what waits is bounded, and in order once the store is back."""
    stream = await bench.make_stream(unique("T"))
    objects = FaultyStore(bench.objects)
    held_up(objects)
    feed = {"stream": stream, "segment": {"max_size": "1M"}}
    # Documents are small objects put through the same verbs: they must exist before the store goes down.
    async with bench.egress(feed) as running:
        await soon(lambda: running.state(stream) == "reading")
    body = os.urandom(20_000)
    async with bench.egress(feed, objects=objects, memory_limit="16M") as running:
        await bench.publish(stream, [body] * 4_000)
        await soon(lambda: running.state(stream) == "waiting")
        (name,) = await consumer_names(bench.client, stream)
        asked = await bench.client.api(f"CONSUMER.INFO.{stream}.{name}")
        assert asked["num_pending"] > 2_000, "most of it stays in the stream"
        assert running.health.problems()
        released(objects)
        await bench.archived_to(stream, 4_000)
    await bench.same(stream, stream)


async def test_a_drain_that_the_store_holds_up_ends_in_time_and_keeps_the_lease(bench: Bench) -> None:
    """F06: what was not stored is read again; the lease is left to expire."""
    stream = await bench.make_stream(unique("T"))
    objects = FaultyStore(bench.objects)
    async with bench.egress({"stream": stream}, lease_ttl="5s") as running:
        await soon(lambda: running.state(stream) == "reading")
    held_up(objects)
    settings = bench.settings({"stream": stream}, shutdown_timeout="1s", lease_ttl="5s")
    running = bench.start(settings, objects=objects)
    await bench.publish(stream, [b"x"] * 10)
    await soon(lambda: running.state(stream) == "waiting")
    running.stop.set()
    assert await running.task is False
    leases = await KeyValue(bench.client, bench.lease_bucket, ttl=5.0).ensure()
    assert await leases.get(lease_key(bench.chain(stream))) is not None
    async with bench.egress({"stream": stream}, lease_ttl="5s"):
        await bench.archived_to(stream, 10)
    await bench.same(stream, stream)


# Leases


async def test_a_drained_instance_hands_over_at_once_and_a_lease_taken_away_is_waited_for(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    settings = bench.settings({"stream": stream}, lease_ttl="5s")
    first = bench.start(settings)
    await soon(lambda: first.state(stream) == "reading")
    second = bench.start(settings)
    await soon(lambda: second.state(stream) == "standby")
    await first.drain()
    await soon(lambda: second.state(stream) == "reading")
    leases = await KeyValue(bench.client, bench.lease_bucket, ttl=5.0).ensure()
    await leases.put(lease_key(bench.chain(stream)), b"somebody else")
    await soon(lambda: second.state(stream) == "standby")
    assert second.status(stream)["holder"] == "somebody else"
    await bench.publish(stream, [b"x"] * 10)
    await bench.archived_to(stream, 10)
    await second.drain()
    await bench.same(stream, stream)


# Memory


@pytest.mark.parametrize("size", [101_000, 200_000], ids=["received", "not sent by the server"])
async def test_a_message_too_large_to_archive_stops_behind_what_came_before_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("egress.reader.MAX_MESSAGE_BYTES", 100_000)
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, [b"x" * 99_000, b"y" * 10, b"z" * size, b"behind it"])
    # No segment is due for an hour: what came before the message is archived because of the stop.
    async with bench.egress({"stream": stream, "segment": {"max_age": "1h"}}) as running:
        await soon(lambda: running.state(stream) == "stopped")
        assert running.status(stream)["code"] == "E-MSG-TOO-LARGE"
        assert bench.end(stream) == 2
        await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 3})
        await soon(lambda: running.state(stream) == "reading")
        await running.received(stream, 4)
    await bench.same(stream, stream)
    assert bench.end(stream) == 4


async def test_many_small_feeds_share_one_budget(bench: Bench) -> None:
    """12 feeds of 10 MB each, and no segment is due: only the limit closes them."""
    stream = await bench.make_stream(unique("T"))
    names = [unique(f"F{i}") for i in range(12)]
    feeds = [{"name": name, "stream": stream, "segment": {"max_age": "1h"}} for name in names]
    await bench.publish(stream, [os.urandom(20_000)] * 500)
    async with bench.egress(*feeds, memory_limit="16M"):
        # What is left is in memory, and that is less than 16 MiB: 838 messages.
        await soon(lambda: sum(bench.end(name) for name in names) >= 12 * 500 - 838)
    for name in names:
        bench.check(name)
