"""After `floe restore` egress goes on where it was, and nothing is archived or carried twice."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from common.clock import format_time
from common.errors import FloeError, Stopped, UsageError
from common.jetstream.api import GUARD, MARKER, create_consumer, stream_info
from common.jetstream.kv import KeyValue, state_key
from common.segments.captures import CONFIG, CapturedConsumer, CapturedConsumers, CaptureStore
from common.segments.segment import Reason
from common.sequences import SequenceRange
from infra.local.nats import NatsServer
from ingress.restore.guard import GuardedStream
from ingress.restore.history import SOURCED
from ingress.restore.plan import forecast
from tests.integration.test_egress_faults import held_up, released
from tests.integration.test_egress_repartition import uneven, until_cut
from tests.integration.test_egress_retention import durables, emptied, lapses
from tests.support import restoring as back
from tests.support.basics import soon, unique
from tests.support.commands import configuration, floe
from tests.support.egress import SITE, Bench, Partitioned, Running, feed_of, publish_over
from tests.support.ingress import Archive, Centre
from tests.support.proxies import TcpProxy
from tests.support.segments import write_segment
from tests.support.stores import FaultyStore

pytestmark = pytest.mark.servers


async def begun(bench: Bench, count: int = 200, **config: object) -> str:
    """A stream, all of it archived."""
    stream = await bench.make_stream(unique("R"), storage="file", **config)
    await bench.publish(stream, [b"%d" % n for n in range(count)])
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, count)
    return stream


async def goes_on(bench: Bench, stream: str, last: int) -> None:
    """New messages are archived behind what was, in the same incarnation."""
    await bench.publish(stream, [b"new %d" % n for n in range(10)])
    await bench.archived_to(stream, last + 10)
    assert bench.chains.read_stream(bench.chain(stream, 1)) is None
    bench.check(stream)


async def test_egress_that_ran_all_the_while_goes_on(bench: Bench) -> None:
    stream = await begun(bench)
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: running.state(stream) == "reading")
        await bench.delete_stream(stream)
        await soon(lambda: "E-SOURCE-GONE" in str(running.status(stream)))
        await under_guard(bench, stream, running)
        assert (await back.restored(bench, stream)).exit_code == 0
        await goes_on(bench, stream, 200)
    await bench.same(stream, stream)


async def under_guard(bench: Bench, stream: str, running: Running) -> None:
    """A restore is on its way, and far from its end."""
    config = {"name": stream, "subjects": [f"{GUARD}{stream}"], "metadata": {MARKER: "x first=1 end=200"}}
    await bench.client.api(f"STREAM.CREATE.{stream}", config)
    await soon(lambda: "E-RESTORING" in str(running.status(stream)))
    assert bench.chains.read_stream(bench.chain(stream, 1)) is None


async def holding(bench: Bench, stream: str, running: Running, objects: FaultyStore | None = None) -> None:
    """Egress has received 50 messages behind the 200 that are archived, and not put them. `objects`: can put none."""
    await soon(lambda: running.state(stream) == "reading")
    if objects is not None:
        held_up(objects)
    await bench.publish(stream, [b"late %d" % n for n in range(50)])
    await running.received(stream, 250)


async def all_is_archived(bench: Bench, stream: str) -> None:
    """The archive holds the 200 messages put before, the 50 that were in hand, and 10 new ones."""
    await bench.same(stream, stream)
    assert len(bench.messages(stream)) == 260
    bench.check(stream)


LONG = {"segment": {"max_age": "1h"}}


async def test_what_egress_holds_of_the_lost_stream_is_put_and_comes_back(bench: Bench) -> None:
    stream = await begun(bench)
    async with bench.egress({"stream": stream, **LONG}) as running:
        await holding(bench, stream, running)
        before = await back.contents(bench, stream)
        await bench.delete_stream(stream)
        assert (await back.restored(bench, stream)).exit_code == 0
        assert await back.contents(bench, stream) == before
        await soon(lambda: running.state(stream) == "reading")
        await bench.publish(stream, [b"new"] * 10)
        await running.received(stream, 260)
    await all_is_archived(bench, stream)


@pytest.mark.parametrize("down", [0.1, 0.6, 1.1])
async def test_of_two_instances_the_one_that_received_puts_it_where_the_server_lost_all(
    alone: tuple[Bench, NatsServer], down: float
) -> None:
    """Also the leases are gone with its folder, and the other sees that first. `down`: for how many of their lives."""
    bench, server = alone
    stream = await begun(bench)
    feed, ttl = {"stream": stream, **LONG}, 8  # longer than the pauses between tries to connect
    leases = {"lease_bucket": unique("L"), "lease_ttl": f"{ttl}s"}
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(TcpProxy(server.port))
        one = await stack.enter_async_context(replace(bench, url=proxy.url).egress(feed, **leases))
        await holding(bench, stream, one)
        other = await stack.enter_async_context(bench.egress(feed, **leases))
        both = (one, other)
        await soon(lambda: other.state(stream) == "standby")
        before = await back.contents(bench, stream)
        server.kill()
        shutil.rmtree(server.store)
        await proxy.refuse()
        await asyncio.sleep(down * ttl)
        server.start()
        await soon(lambda: bench.client.is_up)
        await asyncio.sleep(1.0)
        await proxy.listen()
        await soon(lambda: bench.end(stream) == 250)
        await soon(lambda: any("E-SOURCE-GONE" in str(each.status(stream)) for each in both))
        assert (await back.restored(bench, stream)).exit_code == 0
        assert await back.contents(bench, stream) == before
        await soon(lambda: any(each.state(stream) == "reading" for each in both))
        await bench.publish(stream, [b"new"] * 10)
    async with bench.egress({"stream": stream}):  # a lease that could not be renewed yet ends a drain early
        await bench.archived_to(stream, 260)
    await all_is_archived(bench, stream)


@asynccontextmanager
async def overtaken(bench: Bench, server: NatsServer) -> AsyncIterator[tuple[str, Running, Running, TcpProxy]]:
    """The server lost all. The first instance holds 50 messages behind the 200 that are archived, and cannot reach it;
    the second has its lease, received nothing and has stopped.
    """
    stream = await begun(bench)
    feed, leases = {"stream": stream, **LONG}, {"lease_bucket": unique("L"), "lease_ttl": "2s"}
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(TcpProxy(server.port))
        one = bench.start(replace(bench, url=proxy.url).settings(feed, **leases))
        stack.push_async_callback(one.crash)
        await holding(bench, stream, one)
        server.kill()
        shutil.rmtree(server.store)
        await proxy.refuse()
        server.start()
        other = await stack.enter_async_context(bench.egress(feed, **leases))
        await soon(lambda: "E-SOURCE-GONE" in str(other.status(stream)))
        await asyncio.sleep(2.5)  # the lease of the first is over
        assert bench.end(stream) == 200
        yield stream, one, other, proxy


async def test_what_was_in_hand_when_the_lease_was_lost_is_put_where_the_stream_is_gone(
    alone: tuple[Bench, NatsServer],
) -> None:
    bench, server = alone
    async with overtaken(bench, server) as (stream, one, other, proxy):
        await proxy.listen()
        await soon(lambda: bench.end(stream) == 250)
        assert "E-SOURCE-GONE" in str(other.status(stream)), "it has the lease all the while"
        await soon(lambda: one.status(stream)["state"] == "standby")
        assert (await back.restored(bench, stream)).exit_code == 0
        assert [each.payload for each in await back.contents(bench, stream)][200:] == [
            b"late %d" % n for n in range(50)
        ]
        await soon(lambda: other.state(stream) == "reading")
        await bench.publish(stream, [b"new"] * 10)
        await other.received(stream, 260)
    await all_is_archived(bench, stream)


async def test_what_is_in_hand_after_a_restore_is_named_and_put_when_its_lease_is_free(
    alone: tuple[Bench, NatsServer],
) -> None:
    """Put beside a reader, it could meet other messages under the same sequences."""
    bench, server = alone
    async with overtaken(bench, server) as (stream, one, other, proxy):
        assert (await back.restored(bench, stream)).exit_code == 0
        await soon(lambda: other.state(stream) == "reading")
        await proxy.listen()
        await soon(lambda: one.status(stream).get("code") == "E-HELD")
        assert "50 messages of 201..250 were received here" in one.status(stream)["why"]
        assert any("were received here" in each for each in one.health.problems())
        assert bench.end(stream) == 200
        await other.drain()
        await soon(lambda: bench.end(stream) == 250)
        await soon(lambda: one.status(stream).get("code") == "E-ROLLED-BACK")
    bench.check(stream)


async def test_a_restore_begins_again_where_egress_put_what_it_held_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, objects, clear = await begun(bench), FaultyStore(bench.objects), GuardedStream.clear

    async def long(*arguments: Any) -> None:
        """The first step behind the plan lasts until egress has put it."""
        await clear(*arguments)
        await soon(lambda: bench.end(stream) == 250)

    monkeypatch.setattr(GuardedStream, "clear", long)
    async with bench.egress({"stream": stream, **LONG}, objects=objects) as running:
        await holding(bench, stream, running, objects)
        before = await back.contents(bench, stream)
        await bench.delete_stream(stream)
        restoring = asyncio.create_task(back.restored(bench, stream))

        async def is_planned() -> bool:
            try:
                leases = await KeyValue(bench.client, f"{bench.lease_bucket}_RESTORE", ttl=10.0).ensure()
                return await leases.get(state_key("restore", stream)) is not None
            except FloeError:
                return False

        await soon(is_planned)
        released(objects)
        assert (await restoring).plan.end == 250
        assert await back.contents(bench, stream) == before
        await soon(lambda: running.state(stream) == "reading")
    bench.check(stream)


@asynccontextmanager
async def restored_without(bench: Bench) -> AsyncIterator[tuple[str, Running, FaultyStore]]:
    """The stream is restored without the 50 messages that egress holds and cannot put, and has 10 others there."""
    stream, objects = await begun(bench), FaultyStore(bench.objects)
    async with bench.egress({"stream": stream, **LONG}, objects=objects) as running:
        await holding(bench, stream, running, objects)
        await bench.delete_stream(stream)
        assert (await back.restored(bench, stream)).plan.end == 200
        await bench.publish(stream, [b"other"] * 10)
        yield stream, running, objects


async def test_what_egress_held_is_never_replaced_by_what_a_restored_stream_has_there(bench: Bench) -> None:
    async with restored_without(bench) as (stream, running, objects):
        released(objects)
        await soon(lambda: "E-ROLLED-BACK" in str(running.status(stream)))
    assert [m.payload for m in bench.messages(stream)][200:] == [b"late %d" % n for n in range(50)]


@pytest.mark.parametrize("rows", [0, 10])
async def test_what_egress_held_is_not_put_beside_another_history(
    bench: Bench, caplog: pytest.LogCaptureFixture, rows: int
) -> None:
    """Another instance went on with the restored stream while this one could not put. `rows`: that it archived."""
    async with restored_without(bench) as (stream, running, objects):
        others = (await back.contents(bench, stream))[200 : 200 + rows]
        for sequence in range(201 + rows, 211):
            await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
        written = {"coverage": SequenceRange(201, 210), "chain": bench.chain(stream)}
        bench.store.put(write_segment(bench.store.new_spool(), others, **written))
        await soon(lambda: "held rows dropped" in caplog.text)
        released(objects)
        await soon(lambda: running.state(stream) == "reading")
        await bench.publish(stream, [b"other"] * 10)
        await running.received(stream, 220)
    assert bench.end(stream) == 220
    assert [m.payload for m in bench.messages(stream)][200:] == [b"other"] * (rows + 10)


async def test_a_drain_puts_what_egress_holds_of_a_lost_stream(bench: Bench) -> None:
    """The leases and the state are lost with it."""
    stream = await begun(bench)
    async with bench.egress({"stream": stream, **LONG}) as running:
        await holding(bench, stream, running)
        for lost in (stream, f"KV_{bench.state_bucket}", f"KV_{bench.lease_bucket}"):
            await bench.delete_stream(lost)
    assert len(bench.messages(stream)) == 250
    bench.check(stream)


async def test_a_drain_says_what_it_could_not_put_of_a_lost_stream(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    stream, objects = await begun(bench), FaultyStore(bench.objects)
    settings = bench.settings({"stream": stream, **LONG}, shutdown_timeout="4s")
    running = bench.start(settings, objects=objects)
    await holding(bench, stream, running, objects)
    for lost in (stream, f"KV_{bench.state_bucket}", f"KV_{bench.lease_bucket}"):
        await bench.delete_stream(lost)
    await soon(lambda: running.state(stream) != "reading")
    running.stop.set()
    assert await running.task is False
    assert "received and not archived" in caplog.text
    assert "'rows': 50, 'first': 201, 'last': 250" in caplog.text


async def test_the_command_of_egress_permits_the_effects_elsewhere_of_its_stream(bench: Bench) -> None:
    stream = await begun(bench)
    pushed = {"durable_name": "push", "deliver_subject": unique("push")}
    await create_consumer(bench.client, stream, pushed)
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: bool(bench.objects.list(bench.chains.layout.captures_prefix(bench.chain(stream), CONFIG))))
        await back.capture(bench, stream, 200)
        await bench.delete_stream(stream)
        await soon(lambda: "E-SOURCE-GONE" in str(running.status(stream)))
        assert f"site/{stream} --allow-elsewhere" in str(running.status(stream))


async def begun_and_further(bench: Bench, last: int) -> str:
    """A stream of which 200 messages are archived, and that a capture saw at `last`; it is gone."""
    stream = await begun(bench)
    await bench.publish(stream, [b"lost"] * (last - 200))
    await back.capture(bench, stream, 200, deletions=True)
    await bench.delete_stream(stream)
    return stream


@pytest.mark.parametrize("is_emptied", [False, True])
async def test_sequences_that_were_lost_are_left_out_where_that_is_asked_for(bench: Bench, is_emptied: bool) -> None:
    stream = await begun_and_further(bench, 250)
    note = next(note for note in (await back.planned(bench, stream)).notes if "stood at 250" in note)
    assert "201..250 is given to new messages, which no mirror" in note
    assert "--skip-to-sequence 250 leaves it out" in note
    with pytest.raises(UsageError, match="expected 200, where the archive ends, or more, found 199"):
        await back.planned(bench, stream, skip_to=199)
    file = str(configuration(bench, {"stream": stream}))
    shown = await floe("restore", "-c", file, f"{SITE}/{stream}", "--dry-run", "--json", "--skip-to-sequence")
    assert (shown.code, shown.json()["end"], shown.json()["last"]) == (0, 200, 250), shown
    past = await floe("restore", "-c", file, f"{SITE}/{stream}", "--skip-to-sequence", "260", "--to-sequence", "9")
    assert (past.code, "expected only without --to-sequence and --to-time" in past.err) == (2, True), past
    report = await back.restored(bench, stream, skip_to=0)
    assert (report.exit_code, report.plan.last) == (0, 250), [*report.lines()]
    assert "new messages begin at 251: 201..250 is left out" in [*report.plan.lines()]
    assert not any("given to new messages" in note for note in report.plan.notes)
    await bench.publish(stream, [b"new"] * 5)
    assert (await back.state(bench, stream))["last_seq"] == 255
    if is_emptied:  # of what egress has not read too
        await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 254})
    # Lost again before egress has seen any of that: the sequences stay out, and nothing more is lost.
    again = await back.planned(bench, stream)
    assert (again.end, again.last, again.lossy) == (200, 250, ())
    assert not any("stood at" in text for text in (*again.notes, *again.lossy))
    async with bench.egress({"stream": stream}) as running:
        await bench.archived_to(stream, 255)
        assert running.state(stream) == "reading"
    gone = {"gone_before_read": 3} if is_emptied else {}
    assert bench.ledger(stream) == {"deleted": 50, **gone}
    assert [footer.unread for footer in bench.footers(stream) if footer.unread] == (
        [SequenceRange(251, 253)] if is_emptied else []
    )
    assert bench.chains.read_stream(bench.chain(stream, 1)) is None
    before = await back.contents(bench, stream)
    await bench.delete_stream(stream)
    assert (await back.planned(bench, stream)).lossy == ()
    report = await back.restored(bench, stream)
    assert (report.exit_code, report.plan.last) == (0, 255)
    if not is_emptied:
        assert await back.contents(bench, stream) == before


async def test_a_mirror_that_was_further_than_the_archive_goes_on_behind_what_is_left_out(bench: Bench) -> None:
    stream, mirror = await begun(bench), unique("M")
    await bench.publish(stream, [b"lost"] * 50)
    await bench.client.api(f"STREAM.CREATE.{mirror}", {"name": mirror, "mirror": {"name": stream}})
    await soon(lambda: ends_at(bench, mirror, 250))
    await back.capture(bench, stream, 200, deletions=True)
    await bench.delete_stream(stream)
    assert (await back.restored(bench, stream, skip_to=250)).exit_code == 0
    await bench.publish(stream, [b"new"] * 3)
    await soon(lambda: ends_at(bench, mirror, 253))
    assert [m.payload for m in (await back.contents(bench, mirror))[-4:]] == [b"lost", *[b"new"] * 3]


async def ends_at(bench: Bench, stream: str, last: int) -> bool:
    return await bench.last(stream) == last


async def test_how_far_neighbours_had_read_is_said_where_it_was_captured(bench: Bench) -> None:
    stream = await begun(bench)
    config = {"name": "JS_SRC_k3", "metadata": {"_nats.src.stream": "COPY"}}
    consumers = (CapturedConsumer(config, "2026-01-02T03:04:05Z", 240, 240, 240, 240),)
    captures = CaptureStore(bench.chains.layout, bench.objects)
    captures.put(bench.chain(stream), CapturedConsumers("2026-01-02T03:04:05Z", 200, consumers))
    await bench.delete_stream(stream)
    notes = (await back.planned(bench, stream)).notes
    assert "COPY had read up to 240 by JS_SRC_k3 (2026-01-02T03:04:05Z)" in notes


@pytest.mark.parametrize("stretch", [SOURCED, 7])
async def test_a_source_of_which_no_message_came_back_is_not_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, stretch: int
) -> None:
    monkeypatch.setattr("ingress.restore.history.SOURCED", stretch)
    ups = [await bench.make_stream(unique(name)) for name in ("HELD", "LOST", "NONE")]
    transform = {"subject_transforms": [{"src": f"{ups[1]}.>", "dest": f"moved.{ups[1]}.>"}]}
    sources = [{"name": ups[0]}, {"name": ups[1], **transform}, {"name": ups[2], "filter_subject": f"{ups[2]}.never"}]
    stream = await bench.make_stream(unique("R"), storage="file", subjects=[unique("own")], sources=sources)
    for up in (ups[1], ups[2], ups[0]):
        await bench.publish(up, [b"%d" % n for n in range(30)])
        await soon(lambda: ends_at(bench, stream, 60 if up == ups[0] else 30))  # noqa: B023
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, 60)
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 31})
    await back.capture(bench, stream, 60, deletions=True)
    before = await back.contents(bench, stream)
    await bench.delete_stream(stream)
    plan = await back.planned(bench, stream)
    assert plan.elsewhere == (
        f"sources: takes messages from stream '{ups[0]}'",
        f"sources: takes messages from stream '{ups[1]}'",
        f"sources: takes messages from stream '{ups[2]}', all again: the archive has none of them",
    )
    for up in ups[:2]:
        assert f"source {up}: goes on behind 30, the newest of it that is archived" in plan.notes
    file = str(configuration(bench, {"stream": stream}))
    drilled = await floe("drill", "-c", file, f"{SITE}/{stream}", "--exact", "--json")
    assert (drilled.code, drilled.json()["differences"]) == (0, []), drilled
    report = await back.restored(bench, stream, allow_elsewhere=True)
    assert (report.exit_code, report.not_kept) == (0, ()), [*report.lines()]
    for up in ups[:2]:
        await bench.publish(up, [b"next"])
    await soon(lambda: ends_at(bench, stream, 62))
    found = await back.contents(bench, stream)
    assert (found[:-2], [m.payload for m in found[-2:]]) == (before, [b"next"] * 2)
    kept = (await back.config(bench, stream))["sources"]
    assert [source.get("opt_start_seq") for source in kept] == [None, 31, None]


async def test_egress_goes_on_where_its_state_was_lost_with_the_stream(bench: Bench) -> None:
    stream = await begun(bench)
    for lost in (stream, f"KV_{bench.state_bucket}", f"KV_{bench.lease_bucket}"):
        await bench.delete_stream(lost)
    assert (await back.restored(bench, stream)).exit_code == 0
    async with bench.egress({"stream": stream}):
        await goes_on(bench, stream, 200)
    await bench.same(stream, stream)


async def test_egress_goes_on_where_limits_left_nothing_that_was_archived(bench: Bench) -> None:
    stream = await begun(bench)
    await bench.delete_stream(stream)
    assert (await back.restored(bench, stream)).exit_code == 0
    await bench.client.api(f"STREAM.PURGE.{stream}")
    async with bench.egress({"stream": stream}):
        await goes_on(bench, stream, 200)
    # Without the record of the restore nothing tells which stream it is.
    stream = await begun(bench)
    await bench.delete_stream(stream)
    assert (await back.restored(bench, stream)).exit_code == 0
    await bench.client.api(f"STREAM.PURGE.{stream}")
    for path in (bench.root / "bucket").rglob("restored/*.json"):
        path.unlink()
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: "E-IDENTITY" in str(running.status(stream)))


async def test_what_is_older_than_the_stream_keeps_is_not_sent(bench: Bench) -> None:
    stream = await begun(bench, max_msgs=50)
    async with bench.egress({"stream": stream}):
        for n in range(3):
            await bench.publish(stream, [b"%d" % n] * 100)
            await bench.archived_to(stream, 300 + n * 100)
    before, state = await back.contents(bench, stream), await back.state(bench, stream)
    await bench.delete_stream(stream)
    plan = await back.planned(bench, stream)
    assert plan.begin > 200
    assert any("max_msgs 50" in note for note in plan.notes)
    await back.comes_back(bench, stream, before)
    assert await back.state(bench, stream) == state


async def test_ingress_carries_nothing_twice(bench: Bench) -> None:
    stream = await begun(bench)
    sources = [{"site": [SITE], "feed": [stream], "subject_prefix": "C"}]
    target = unique("C")
    centre = Centre(
        bench.root, Archive(bench.root / "bucket"), str(bench.url), stream=target, sources=sources,
        create={"subjects": ["C.>"]},
    )  # fmt: skip
    async with centre.running():
        await centre.carried(bench.client, 200)
        await bench.delete_stream(stream)
        assert (await back.restored(bench, stream)).exit_code == 0
        async with bench.egress({"stream": stream}):
            await goes_on(bench, stream, 200)
            found = await centre.carried(bench.client, 210)
    assert [each.message.payload for each in found[200:]] == [b"new %d" % n for n in range(10)]
    info = await stream_info(bench.client, target)
    assert info is not None
    assert info.messages == 210


async def test_a_feed_that_was_cut_anew_is_one_history(bench: Bench) -> None:
    stream, _ = await uneven(bench, 20)
    await until_cut(bench, feed_of(stream, 3))
    parts = Partitioned(bench, stream, 3)
    await publish_over(bench, stream, ["0.a", "1.a", "2.a"], 30, "later")
    async with bench.egress(feed_of(stream, 3)):
        await soon(lambda: min(parts.end(n, 1) for n in range(3)) == 70)
    before = await back.contents(bench, stream)
    await bench.delete_stream(stream)
    plan = await back.planned(bench, stream)
    assert {chain.chain.incarnation for chain in plan.chains} == {0, 1}
    assert plan.lossy == ()
    await back.comes_back(bench, stream, before)
    await publish_over(bench, stream, ["0.a", "1.a", "2.a"], 30, "restored")
    async with bench.egress(feed_of(stream, 3)):
        await soon(lambda: min(parts.end(n, 1) for n in range(3)) == 100)
    await parts.same(
        stream, 1, first=min(c.first for n in range(3) if (c := bench.chains.read_chain(parts.chain(n, 1))))
    )
    await back.comes_back(bench, stream, before[:15], to_sequence=15)


async def test_a_partition_is_not_said_to_have_lost_what_another_one_has(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    feed, parts = feed_of(stream, 2), Partitioned(bench, stream, 2)
    async with bench.egress(feed):
        await publish_over(bench, stream, ["0.a"], 10, "one")
        await soon(lambda: parts.end(0) == 10)
        await publish_over(bench, stream, ["1.a"], 10, "other")
        await soon(lambda: parts.end(1) == 20)
    assert parts.end(0) == 10
    await bench.delete_stream(stream)
    plan = await back.planned(bench, stream)
    assert (plan.rows, plan.end) == (20, 20)
    assert not [note for note in forecast(plan, 0, captured=None, skipped=()) if "is lost" in note]


async def test_a_feed_that_began_in_the_middle_lacks_what_the_stream_had_before(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, [b"x"] * 60)
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 21})
    infos = [m for m in await back.contents(bench, stream) if m.sequence in (31, 41)]
    when = format_time(infos[1].timestamp_ns)
    kinds: dict[str, tuple[dict[str, Any], int]] = {
        stream: ({}, 21),
        unique("S"): ({"start_sequence": 31}, 31),
        unique("M"): ({"start_time": when}, 41),
        unique("D"): ({"start_delta": "1h"}, 21),
        unique("E"): ({"start_at_end": True}, 61),
    }
    async with bench.egress(*({"stream": stream, "name": name, **keys} for name, (keys, _) in kinds.items())):
        await soon(lambda: all(bench.chains.read_chain(bench.chain(name)) for name in kinds))
        await bench.publish(stream, [b"later"] * 10)
        for name in kinds:
            await bench.archived_to(name, 70)
    before = await back.contents(bench, stream)
    await bench.delete_stream(stream)
    for name, (_, first) in kinds.items():
        plan = await back.planned(bench, name)
        lost = (
            f"site/{name}/0000 begins at {first}, and the stream at 21: up to {first - 21} sequences of 21..{first - 1}"
        )
        assert plan.lossy == ((f"{lost} not archived",) if first > 21 else ()), name
        assert plan.rows == 71 - first
    with pytest.raises(Stopped) as caught:
        await back.restored(bench, name)
    assert caught.value.code == "E-RESTORE-LOSSY"
    with pytest.raises(Stopped, match=r"up to 40 sequences of 21\.\.60 not archived"):
        await back.restored(bench, name, promote=False, name=unique("FLOE_DRILL"))
    key = bench.chains.layout.stream_document(bench.chain(name))
    document = bench.chains.read_stream(bench.chain(name))
    assert document is not None
    bench.objects.put(key, replace(document, stream_first=None).to_json())
    plan = await back.planned(bench, name)
    lost = "up to 40 sequences of 1..60 not archived"  # a captured configuration shows the first, 21
    told = f"site/{name}/0000 begins at 61, and nothing tells where the stream began: {lost}"
    assert (plan.lossy, told in plan.notes) == ((), True), "of before this was recorded"
    await back.comes_back(bench, stream, before)


async def test_partitions_that_leave_subjects_out_are_a_filter(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    async with bench.egress(feed_of(stream, 2)):
        await publish_over(bench, stream, ["0.a", "1.a"], 20, "x")
        await soon(lambda: min(Partitioned(bench, stream, 2).end(n) for n in range(2)) == 20)
        assert (await back.planned(bench, stream)).lossy == (), "each sequence has its message"
        await publish_over(bench, stream, ["elsewhere", "0.b", "1.b"], 12, "y")
        await soon(lambda: min(Partitioned(bench, stream, 2).end(n) for n in range(2)) == 32)
    froze = f"of {stream}.> it froze {stream}.0.>, {stream}.1.>: up to 4 messages not archived"
    assert (await back.planned(bench, stream)).lossy == (f"the feed is filtered: {froze}",)


async def test_another_feed_of_the_stream_that_is_archived_further_is_named(bench: Bench) -> None:
    stream, (other, part, some) = await bench.make_stream(unique("T")), map(unique, "FPS")
    await publish_over(bench, stream, ["a", "b"], 30, "x")
    feeds = [
        {"stream": stream, "name": other},
        {"stream": stream, "name": part, "filter_subject": f"{stream}.a"},
        {"stream": stream, "name": some, "inspect_field": "id", "inspect_duration": "60s"},
    ]
    async with bench.egress({"stream": stream}, *feeds):
        for feed in (stream, other, part, some):
            await bench.archived_to(feed, 30)
    await publish_over(bench, stream, ["a", "b"], 20, "later")
    async with bench.egress(*feeds):
        for feed in (other, part, some):
            await bench.archived_to(feed, 50)
    before = await back.contents(bench, stream)
    await bench.delete_stream(stream)
    with pytest.raises(Stopped) as caught:
        await back.restored(bench, stream)
    assert caught.value.code == "E-RESTORE-LOSSY"
    for feed in (other, part, some):
        assert f"feed {feed} of the same stream is archived up to 50: 31..50 would be given" in caught.value.message
    assert f" site/{other}\n" in caught.value.hint
    for feed in (part, some):
        assert f" site/{feed}" not in caught.value.hint, "it does not have the whole stream"
    assert any(f"feed {other} " in note for note in (await back.planned(bench, stream, to_sequence=20)).notes)
    beside = await back.planned(bench, stream, name=unique("B"))
    assert (beside.lossy, beside.further) == ((), ()), "a stream of another name takes no sequence from anybody"
    await back.comes_back(bench, stream, before[:30], allow_lossy=True)
    await bench.delete_stream(stream)
    assert (await back.restored(bench, other)).exit_code == 0
    assert await back.contents(bench, stream) == before


@pytest.mark.parametrize("count", [1, 2])
async def test_an_interest_stream_keeps_for_egress_what_is_published_before_it_reads_again(
    bench: Bench, count: int
) -> None:
    """Nobody else wants it, so the stream would drop it at once. `count`: of partitions."""
    stream = await bench.make_stream(unique("T"), retention="interest", storage="file")
    feed, parts = ({"stream": stream} if count == 1 else feed_of(stream, count)), Partitioned(bench, stream, count)
    async with bench.egress(feed) as running:
        await soon(lambda: all(running.state(stream + each) == "reading" for each in ("", "/1")[:count]))
        await publish_over(bench, stream, ["0.a", "1.a"], 20, "first")
        await soon(lambda: len(parts.messages()) == 20)
    before = lapses(stream)
    await bench.delete_stream(stream)
    assert (await back.restored(bench, stream, keys=feed)).exit_code == 0
    await publish_over(bench, stream, ["0.a", "1.a"], 20, "at once")
    async with bench.egress(feed):
        await soon(lambda: len(parts.messages()) == 40)
        await emptied(bench, stream)
    assert [m.payload for m in parts.messages()][20:] == [
        b"at once %d" % n for n in (*range(0, 20, 2), *range(1, 20, 2))
    ]
    assert lapses(stream) == before
    assert len(await durables(bench, stream)) == count


async def test_a_stream_that_was_never_used_and_begins_later_is_the_same_after_its_restore(bench: Bench) -> None:
    stream = await bench.make_stream(unique("R"), storage="file", first_seq=77_001)
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: running.state(stream) == "reading")
    await bench.delete_stream(stream)
    assert (await back.restored(bench, stream)).exit_code == 0
    async with bench.egress({"stream": stream}):
        await bench.publish(stream, [b"new %d" % n for n in range(10)])
        await bench.archived_to(stream, 77_010)
    assert bench.chains.read_stream(bench.chain(stream, 1)) is None
    await bench.same(stream, stream)
    assert [message.sequence for message in bench.messages(stream)] == [*range(77_001, 77_011)]
    ledgers = [bench.store.footer(ref).ledger.counts for ref in bench.refs(stream)]
    assert not any(Reason.GONE_BEFORE_READ in each for each in ledgers), ledgers
