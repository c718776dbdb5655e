"""Interest and work-queue streams: archived messages leave the stream, and no message leaves it before."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from common.errors import LeaseLost, Unavailable
from common.nats.api import consumer_info, consumer_names, create_consumer, delete_consumer
from common.settings.egress import FeedSettings
from egress.consumers import ReaderResetError, WantedMessages, create_durable, delete_stray_durables, open_consumer
from egress.partition import partitions_of
from tests.support.basics import metric_value, soon, unique
from tests.support.commands import configuration, floe
from tests.support.egress import SITE, Bench
from tests.support.stores import FaultyStore, raising

pytestmark = pytest.mark.simulated


async def make(bench: Bench, retention: str, **config: Any) -> str:
    return await bench.make_stream(unique("T"), retention=retention, **config)


async def emptied(bench: Bench, stream: str) -> None:
    async def is_empty() -> bool:
        return await bench.held(stream) == 0

    await soon(is_empty)


async def leaves(bench: Bench, stream: str, last: int) -> None:
    """Wait until all up to `last` is archived and has left the stream."""
    await bench.archived_to(stream, last)
    await emptied(bench, stream)


async def reads(bench: Bench, running: Any, *feeds: str) -> None:
    await soon(lambda: all(running.state(feed) == "reading" for feed in feeds))


async def durables(bench: Bench, stream: str) -> list[str]:
    return [name for name in await consumer_names(bench.client, stream) if name.startswith("floe_")]


async def durable_with(bench: Bench, stream: str, **expected: int) -> str:
    """The name of the one durable, once its info has the `expected` values."""
    (name,) = await durables(bench, stream)

    async def is_so() -> bool:
        info = await consumer_info(bench.client, stream, name)
        return info is not None and all(getattr(info, key) == value for key, value in expected.items())

    await soon(is_so)
    return name


def lapses(feed: str) -> float:
    return metric_value("floe_egress_interest_lapsed_total", {"site": SITE, "feed": feed, "partition": "0"}) or 0.0


def payloads(bench: Bench, feed: str, incarnation: int = 0) -> list[bytes]:
    return [message.payload for message in bench.messages(feed, incarnation)]


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


# Messages that are sampled out or too old


async def test_rows_too_old_or_sampled_out_are_acknowledged_with_coverage(bench: Bench) -> None:
    old, sampled = await make(bench, "workqueue"), await make(bench, "workqueue")
    await bench.publish(old, numbered(20))
    await asyncio.sleep(1.2)
    await bench.publish(old, numbered(5, 20))
    feeds = {"stream": old, "max_age": "1s"}, {"stream": sampled, "inspect_subject_token": -1, "inspect_duration": "1h"}
    await bench.publish(sampled, numbered(30), subject="a")
    async with bench.egress(*feeds):
        await leaves(bench, old, 25)
        await leaves(bench, sampled, 30)
    async with bench.egress(*feeds):
        await bench.publish(sampled, numbered(30), subject="b")
        await bench.publish(sampled, numbered(30), subject="a")
        await leaves(bench, sampled, 90)
    assert (payloads(bench, old), bench.ledger(old)) == (numbered(5, 20), {"too_old": 20})
    assert [message.sequence for message in bench.messages(sampled)] == [1, 31]
    assert bench.ledger(sampled) == {"sampled_out": 88}


# The source changes


async def test_a_hole_in_the_archive_of_a_work_queue_is_never_covered_again(bench: Bench) -> None:
    """It was archived and acknowledged once, even if the stream still holds messages for others."""
    stream = await make(bench, "workqueue")
    feed = {"stream": stream, "segment": {"max_messages": 10}, "filter_subject": f"{stream}.a"}
    await bench.publish(stream, [b"of nobody"], subject="b")
    async with bench.egress(feed):
        await bench.archive(stream, numbered(30), 31)
    lost = next(ref for ref in bench.refs(stream) if 16 in ref.coverage)
    bench.objects.delete(lost.key)
    async with bench.egress(feed) as running:
        await soon(lambda: running.status(stream).get("lost") == len(lost.coverage))
        await reads(bench, running, stream)
        await bench.archive(stream, numbered(10, 30), 41)
    assert not any(16 in ref.coverage for ref in bench.refs(stream))
    assert len(payloads(bench, stream)) == 40 - len(lost.coverage)


async def test_a_durable_that_an_admin_removes_is_an_alarm_what_was_received_is_kept_and_what_was_not_is_gone(
    bench: Bench,
) -> None:
    """F29: the stream drops messages that only Floe wanted, so memory has the last copy. Then while egress is down."""
    stream = await make(bench, "interest")
    async with bench.egress({"stream": stream, "segment": {"max_age": "1h"}}) as running:
        await reads(bench, running, stream)
        await bench.publish(stream, numbered(30))
        name = await durable_with(bench, stream, ack_pending=30)
        await asyncio.sleep(0.1)
        await bench.client.api(f"CONSUMER.DELETE.{stream}.{name}")
        await soon(lambda: lapses(stream) == 1)
        await reads(bench, running, stream)
        await bench.archive(stream, numbered(10, 30), 40)
    assert bench.ledger(stream) == {}
    (name,) = await durables(bench, stream)
    await bench.client.api(f"CONSUMER.DELETE.{stream}.{name}")
    await bench.publish(stream, [b"lost"] * 5)
    assert await bench.held(stream) == 0
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, 45)
        assert lapses(stream) == 2
        await bench.archive(stream, numbered(5, 40), 50)
    assert (payloads(bench, stream), bench.ledger(stream)) == (numbered(45), {"gone_before_read": 5})
    bench.check(stream)


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_limits_a_purge_and_deleted_messages_are_recorded_and_the_rest_is_kept_for_a_stopped_egress(
    bench: Bench, retention: str
) -> None:
    """F20, F21, F22."""
    stream = await make(bench, retention, max_msgs=100)
    async with bench.egress({"stream": stream}) as running:
        await reads(bench, running, stream)
    await bench.publish(stream, numbered(200))
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 141})
    for sequence in (150, 160, 161):
        await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    async with bench.egress({"stream": stream}):
        await leaves(bench, stream, 200)
        await bench.client.api(f"STREAM.PURGE.{stream}")
        await bench.publish(stream, numbered(10))
        await leaves(bench, stream, 210)
    assert bench.ledger(stream) == {"gone_before_read": 140, "deleted": 3}
    unread = [footer.unread for footer in bench.footers(stream) if footer.unread]
    assert (unread[0].first, unread[-1].last) == (1, 140)
    assert [m.sequence for m in bench.messages(stream)] == sorted({*range(141, 211)} - {150, 160, 161})
    assert lapses(stream) == 0
    bench.check(stream)


async def test_a_recreated_interest_stream_drops_nothing_while_it_is_judged(bench: Bench) -> None:
    """The same holds while the chain waits for an operator."""
    stream = await make(bench, "interest")
    async with bench.egress({"stream": stream, "on_recreated": "halt"}) as running:
        await reads(bench, running, stream)
        await bench.publish(stream, numbered(20))
        await leaves(bench, stream, 20)
        await bench.recreate(stream, retention="interest")
        await soon(lambda: durables(bench, stream))
        await bench.publish(stream, numbered(10))
        await soon(lambda: running.state(stream) == "stopped")
        assert await bench.held(stream) == 10
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, 10, incarnation=1)
        await emptied(bench, stream)
    assert payloads(bench, stream, 1) == numbered(10)
    assert lapses(stream) == 1, "what was published before may be lost, and is told"


async def test_an_interest_stream_drops_nothing_while_the_store_is_away(bench: Bench) -> None:
    stream, objects = await make(bench, "interest"), FaultyStore(bench.objects)
    async with bench.egress({"stream": stream}, objects=objects) as running:
        await reads(bench, running, stream)
        await bench.archive(stream, numbered(3), 3)
        for verb in ("get", "head", "list"):
            objects.on(verb, raising(Unavailable("the store is down")))
        (name,) = await durables(bench, stream)
        await delete_consumer(bench.client, stream, name)
        await soon(lambda: running.state(stream) == "waiting")
        await bench.publish(stream, numbered(5, 3))
        objects.heal()
        await leaves(bench, stream, 8)
    assert payloads(bench, stream) == numbered(8)


# Refusals


async def test_a_consumer_in_the_way_and_a_beginning_in_the_middle_are_refused_and_lose_nothing(bench: Bench) -> None:
    stream = await make(bench, "workqueue")
    await create_consumer(bench.client, stream, {"durable_name": "worker", "ack_policy": "explicit"})
    await bench.publish(stream, numbered(5))
    async with bench.egress({"stream": stream, "start_at_end": True}) as running:
        assert "start_" in (await running.stopped(stream))["why"]
    assert bench.chains.read_chain(bench.chain(stream)) is None
    async with bench.egress({"stream": stream}) as running:
        assert "consumer worker" in (await running.stopped(stream))["why"]
        assert await bench.held(stream) == 5
        await bench.client.api(f"CONSUMER.DELETE.{stream}.worker")
        await bench.archived_to(stream, 5)


# Other partitions


@pytest.mark.parametrize("counts", [(1, 3), (3, 2)])
async def test_an_interest_stream_keeps_messages_for_partitions_that_have_no_durable_yet(
    bench: Bench, counts: tuple[int, int]
) -> None:
    """The durable of a former partition is removed only when each current partition has its own."""
    stream, feed = await make(bench, "interest"), unique("F")
    for count in counts:
        cut = {"count": count, "subject": f"{stream}.{{partition}}.>"} if count > 1 else {}
        settings = FeedSettings.model_validate({"name": feed, "stream": stream, "partitions": cut})
        if count == counts[1]:
            for partition in range(count):
                await bench.publish(stream, numbered(5), subject=f"{partition}.a")
        parts = partitions_of(SITE, settings)
        for part in parts:
            await open_consumer(bench.client, WantedMessages(part, "interest"))
    assert await bench.held(stream) == 5 * counts[1]
    assert sorted(parts[0].partition_of(name) or 0 for name in await durables(bench, stream)) == [*range(counts[1])]


async def test_a_late_instance_deletes_no_durable_of_its_successor(bench: Bench) -> None:
    stream = await make(bench, "interest")
    wanted = WantedMessages(partitions_of(SITE, FeedSettings(stream=stream))[0], "interest")
    late, successor = [(await create_durable(bench.client, wanted)).name for _ in range(2)]
    with pytest.raises(LeaseLost):
        await delete_stray_durables(bench.client, wanted, late, Mock(side_effect=LeaseLost("taken over")))
    await delete_consumer(bench.client, stream, late)
    with pytest.raises(ReaderResetError):
        await delete_stray_durables(bench.client, wanted, late, Mock())
    assert await durables(bench, stream) == [successor]


# `floe egress init`


async def test_init_shows_what_was_dropped_missing_stale_or_in_the_way_and_changes_none_of_it(bench: Bench) -> None:
    stream, queue, limits = [await make(bench, kind) for kind in ("interest", "workqueue", "limits")]
    missing = unique("MISSING")
    await bench.publish(stream, numbered(7))
    gone = partitions_of(SITE, FeedSettings.model_validate({"name": "GONE", "stream": stream}))[0]
    await open_consumer(bench.client, WantedMessages(gone, "interest"))
    await create_consumer(bench.client, queue, {"durable_name": "worker", "ack_policy": "explicit"})
    feeds = ({"stream": each} for each in (stream, queue, limits, missing))
    command = ("egress", "init", "-c", str(configuration(bench, *feeds)))
    done = await floe(*command)
    for line in (f"error[E-SOURCE-GONE]: stream {missing} does not exist;", "error[E-RETENTION]", "consumer worker"):
        assert line in done.err
    for words in ("messages 1..7 were dropped", "of no configured partition", "refused"):
        assert words in done.out
    assert (done.code, limits in done.out) == (1, False), "people see no durables that are not needed"
    await bench.client.api(f"CONSUMER.DELETE.{queue}.worker")
    await bench.make_stream(missing)
    done = await floe(*command, "--json")
    found = [each["result"] for each in done.json() if each["what"] == "durable"]
    assert (done.code, sorted(found)) == (0, ["made", "not needed", "not needed", "there", "there"]), done
    await bench.publish(stream, numbered(20, 7))
    async with bench.egress({"stream": stream}) as running:
        await reads(bench, running, stream)
        before = await durables(bench, stream)
        assert ((await floe(*command)).code, await durables(bench, stream)) == (0, before)
        await bench.archived_to(stream, 27)
    assert payloads(bench, stream) == numbered(20, 7)
