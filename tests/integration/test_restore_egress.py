"""Egress after `floe restore`: it continues at its position, and nothing is archived or carried twice."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from common.archive.captures import CONFIG
from common.errors import Stopped, UsageError
from common.nats.api import RESTORE_KEY, RESTORE_PREFIX, create_consumer
from common.sequences import SequenceRange
from infra.local.nats import NatsServer
from tests.integration.test_egress_faults import fail_puts, released
from tests.integration.test_egress_retention import durables, emptied, lapses
from tests.support import restoring as back
from tests.support.basics import raises_code, soon, unique
from tests.support.commands import configuration, floe
from tests.support.egress import SITE, Bench, Partitioned, Running, feed_of, publish_over
from tests.support.proxies import TcpProxy
from tests.support.segments import write_segment
from tests.support.stores import FaultyStore

pytestmark = pytest.mark.servers


LONG, LATE = {"segment": {"max_age": "1h"}}, [b"late %d" % n for n in range(50)]


async def begun(bench: Bench, count: int = 200, **config: object) -> str:
    """A fully archived stream."""
    return await bench.begun([b"%d" % n for n in range(count)], storage="file", **config)


async def resumes(bench: Bench, stream: str) -> None:
    """Check that new messages are archived behind the old ones, in the same incarnation."""
    await bench.archive(stream, [b"new"] * 10, 210)
    assert bench.chains.read_stream(bench.chain(stream, 1)) is None
    bench.check(stream)


async def test_egress_that_ran_all_the_while_resumes(bench: Bench) -> None:
    stream = await begun(bench)
    await create_consumer(bench.client, stream, {"durable_name": "push", "deliver_subject": unique("push")})
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: bool(bench.objects.list(bench.chains.layout.captures_prefix(bench.chain(stream), CONFIG))))
        await back.capture(bench, stream, 200)
        await bench.delete_stream(stream)
        await soon(lambda: "E-SOURCE-GONE" in str(running.status(stream)))
        assert f"site/{stream} --allow-elsewhere" in str(running.status(stream)), "the consumer reaches elsewhere"
        metadata = {RESTORE_KEY: "x first=1 end=200"}
        config = {"name": stream, "subjects": [f"{RESTORE_PREFIX}{stream}"], "metadata": metadata}
        await bench.client.api(f"STREAM.CREATE.{stream}", config)  # a restore is under way, and far from its end
        await soon(lambda: "E-RESTORING" in str(running.status(stream)))
        assert bench.chains.read_stream(bench.chain(stream, 1)) is None
        assert (await back.restored(bench, stream, allow_elsewhere=True)).exit_code == 0
        await resumes(bench, stream)
    await bench.same(stream, stream)


async def holding(bench: Bench, stream: str, running: Running, objects: FaultyStore | None = None) -> None:
    """Let egress receive 50 messages behind the 200 archived ones, without a put. `objects`: its puts are to fail."""
    await soon(lambda: running.state(stream) == "reading")
    if objects is not None:
        fail_puts(objects)
    await bench.publish(stream, LATE)
    await running.received(stream, 250)


@asynccontextmanager
async def overtaken(bench: Bench, server: NatsServer) -> AsyncIterator[tuple[str, Running, Running, TcpProxy]]:
    """A server that lost everything. The first instance holds 50 messages behind the 200 archived ones and cannot reach
    it; the second has its lease, received nothing and has stopped.
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
        await asyncio.sleep(2.5)  # the lease of the first has expired
        assert bench.end(stream) == 200
        yield stream, one, other, proxy


async def test_rows_held_after_a_restore_are_named_and_put_when_the_lease_is_free(
    alone: tuple[Bench, NatsServer],
) -> None:
    """Beside a reader, the put could meet other messages under the same sequences."""
    bench, server = alone
    async with overtaken(bench, server) as (stream, one, other, proxy):
        assert (await back.restored(bench, stream)).exit_code == 0
        await soon(lambda: other.state(stream) == "reading")
        await proxy.listen()
        await soon(lambda: one.status(stream).get("code") == "E-ROWS-UNARCHIVED")
        assert "50 messages of 201..250 were received here" in one.status(stream)["why"]
        assert any("were received here" in each for each in one.health.problems())
        assert bench.end(stream) == 200
        await other.drain()
        await soon(lambda: bench.end(stream) == 250)
        await soon(lambda: one.status(stream).get("code") == "E-ROLLED-BACK")
    bench.check(stream)


@asynccontextmanager
async def restored_without(bench: Bench) -> AsyncIterator[tuple[str, Running, FaultyStore]]:
    """The stream, restored without the 50 messages that egress holds and cannot put, and with 10 others instead."""
    stream, objects = await begun(bench), FaultyStore(bench.objects)
    async with bench.egress({"stream": stream, **LONG}, objects=objects) as running:
        await holding(bench, stream, running, objects)
        await bench.delete_stream(stream)
        assert (await back.restored(bench, stream)).plan.end == 200
        await bench.publish(stream, [b"new"] * 10)
        yield stream, running, objects


async def test_rows_egress_held_are_never_replaced_by_those_of_a_restored_stream(bench: Bench) -> None:
    async with restored_without(bench) as (stream, running, objects):
        released(objects)
        await soon(lambda: "E-ROLLED-BACK" in str(running.status(stream)))
    assert [m.payload for m in bench.messages(stream)][200:] == LATE


@pytest.mark.parametrize("rows", [0, 10])
async def test_rows_egress_held_are_not_put_beside_another_history(
    bench: Bench, caplog: pytest.LogCaptureFixture, rows: int
) -> None:
    """Another instance continued with the restored stream while this one could not put. `rows`: those it archived."""
    async with restored_without(bench) as (stream, running, objects):
        others = (await back.contents(bench, stream))[200 : 200 + rows]
        for sequence in range(201 + rows, 211):
            await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
        written = {"coverage": SequenceRange(201, 210), "chain": bench.chain(stream)}
        bench.store.put(write_segment(bench.store.new_spool(), others, **written))
        await soon(lambda: "held rows dropped" in caplog.text)
        released(objects)
        await soon(lambda: running.state(stream) == "reading")
        await bench.publish(stream, [b"new"] * 10)
        await running.received(stream, 220)
    assert bench.end(stream) == 220
    assert [m.payload for m in bench.messages(stream)][200:] == [b"new"] * (rows + 10)


@pytest.mark.parametrize("can_put", [True, False])
async def test_a_drain_puts_what_egress_holds_of_a_lost_stream_or_logs_the_failure(
    bench: Bench, caplog: pytest.LogCaptureFixture, can_put: bool
) -> None:
    """The leases and the state are lost with the stream."""
    stream, objects = await begun(bench), FaultyStore(bench.objects)
    limit = "60s" if can_put else "4s"
    running = bench.start(bench.settings({"stream": stream, **LONG}, shutdown_timeout=limit), objects=objects)
    await holding(bench, stream, running, None if can_put else objects)
    for lost in (stream, f"KV_{bench.state_bucket}", f"KV_{bench.lease_bucket}"):
        await bench.delete_stream(lost)
    await soon(lambda: running.state(stream) != "reading")
    running.stop.set()
    assert await running.task is can_put
    assert bench.end(stream) == (250 if can_put else 200)
    assert ("'rows': 50, 'first': 201, 'last': 250" in caplog.text) is not can_put


async def test_lost_sequences_are_left_out_on_request(bench: Bench) -> None:
    stream = await begun(bench)
    await bench.publish(stream, [b"lost"] * 50)
    await back.capture(bench, stream, 200, deletions=True)
    await bench.delete_stream(stream)
    note = next(note for note in (await back.planned(bench, stream)).notes if "was at 250" in note)
    assert "201..250 is given to new messages, which mirrors" in note
    assert "--skip-to-sequence 250 leaves it out" in note
    with pytest.raises(UsageError, match="expected at least 200, the end of the archive, found 199"):
        await back.restored(bench, stream, skip_to=199)
    words = ("restore", "-c", str(configuration(bench, {"stream": stream})), f"{SITE}/{stream}", "--skip-to-sequence")
    shown = await floe(*words, "--dry-run", "--json")
    assert (shown.code, shown.json()["end"], shown.json()["last"]) == (0, 200, 250), shown
    past = await floe(*words, "260", "--to-sequence", "9")
    assert (past.code, "expected only without --to-sequence and --until" in past.err) == (2, True), past
    report = await back.restored(bench, stream, skip_to=0)
    assert (report.exit_code, report.plan.last_sequence) == (0, 250), [*report.lines()]
    assert "new messages begin at 251: 201..250 is left out" in [*report.plan.lines()]
    assert not any("given to new messages" in note for note in report.plan.notes)
    await bench.publish(stream, [b"new"] * 5)
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 254})  # also of messages that egress has not read
    # Lost again before egress has read any of that: the sequences stay out, and nothing more is lost.
    again = await back.planned(bench, stream)
    assert (again.end, again.last_sequence, again.lossy) == (200, 250, ())
    assert not any("stream was at" in text or "; it was at" in text for text in (*again.notes, *again.lossy))
    async with bench.egress({"stream": stream}) as running:
        await bench.archived_to(stream, 255)
        await soon(lambda: running.state(stream) == "reading")
    assert bench.ledger(stream) == {"deleted": 50, "gone_before_read": 3}
    assert [footer.unread for footer in bench.footers(stream) if footer.unread] == [SequenceRange(251, 253)]
    assert bench.chains.read_stream(bench.chain(stream, 1)) is None
    await bench.delete_stream(stream)
    report = await back.restored(bench, stream)
    assert (report.exit_code, report.plan.last_sequence) == (0, 255)


async def ends_at(bench: Bench, stream: str, last: int) -> bool:
    return await bench.last(stream) == last


async def test_a_source_of_which_no_message_came_back_is_not_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingress.recovery.history.SOURCE_SEARCH_ROWS", 7)  # so the search takes several ranges
    ups = [await bench.make_stream(unique(name)) for name in ("HELD", "LOST", "NONE")]
    transform = {"subject_transforms": [{"src": f"{ups[1]}.>", "dest": f"moved.{ups[1]}.>"}]}
    sources = [{"name": ups[0]}, {"name": ups[1], **transform}, {"name": ups[2], "filter_subject": f"{ups[2]}.never"}]
    stream = await bench.make_stream(unique("R"), storage="file", subjects=[unique("own")], sources=sources)
    for up in (ups[1], ups[2], ups[0]):
        await bench.publish(up, [b"%d" % n for n in range(30)])
        await soon(lambda: ends_at(bench, stream, 60 if up == ups[0] else 30))  # noqa: B023
    await bench.freeze({"stream": stream})
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 31})
    await back.capture(bench, stream, 60, deletions=True)
    before = await back.contents(bench, stream)
    await bench.delete_stream(stream)
    plan = await back.planned(bench, stream)
    taken = [f"sources: takes messages from stream '{up}'" for up in ups]
    assert plan.elsewhere == (*taken[:2], f"{taken[2]}, all again: the archive has none of them")
    for up in ups[:2]:
        assert any(note.startswith(f"source {up}: continues after 30, its newest archived") for note in plan.notes)
        await bench.publish(up, [b"next"])
    file = str(configuration(bench, {"stream": stream}))
    drilled = await floe("drill", "-c", file, f"{SITE}/{stream}", "--exact", "--json")
    assert (drilled.code, drilled.json()["differences"]) == (0, []), drilled
    report = await back.restored(bench, stream, allow_elsewhere=True)
    assert (report.exit_code, report.not_kept) == (0, ()), [*report.lines()]
    await soon(lambda: ends_at(bench, stream, 62))
    found = await back.contents(bench, stream)
    assert (found[:-2], [m.payload for m in found[-2:]]) == (before, [b"next"] * 2)
    kept = (await back.config(bench, stream))["sources"]
    assert [source.get("opt_start_seq") for source in kept] == [None, 31, None]


@pytest.mark.parametrize("is_restored", [True, False])
async def test_a_stream_continues_after_a_restored_source(bench: Bench, is_restored: bool) -> None:
    """To nats-server 2.15 that is another stream than the lost one, of which it would take all messages again."""
    up = await bench.begun([b"%d" % n for n in range(30)], storage="file")
    stream = await bench.make_stream(unique("R"), storage="file", sources=[{"name": up}])
    await bench.publish(up, [b"late"] * 5)  # not archived: new messages get their sequences
    await soon(lambda: ends_at(bench, stream, 35))
    await back.archived(bench, stream)
    before = await back.contents(bench, stream)
    for lost in (stream, up):
        await bench.delete_stream(lost)
    await (back.restored(bench, up) if is_restored else bench.make_stream(up))
    await bench.publish(up, [b"next"] * 7)
    notes, _ = await back.restore(bench, stream).check(await back.planned(bench, stream))
    assert any("is not the archived stream" in note for note in notes) is not is_restored
    assert (await back.restored(bench, stream, allow_elsewhere=True)).exit_code == 0
    await bench.publish(up, [b"last"])
    await soon(lambda: bench.reaches(stream, 43))
    found = await back.contents(bench, stream)
    assert (found[:35], [m.payload for m in found[35:]]) == (before, [b"next"] * 7 + [b"last"])
    assert (await back.config(bench, stream))["sources"][0].get("opt_start_seq") == (31 if is_restored else None)


async def test_egress_resumes_without_its_state_and_with_all_archived_messages_expired(bench: Bench) -> None:
    stream = await begun(bench)
    for lost in (stream, f"KV_{bench.state_bucket}", f"KV_{bench.lease_bucket}"):
        await bench.delete_stream(lost)
    assert (await back.restored(bench, stream)).exit_code == 0
    await bench.client.api(f"STREAM.PURGE.{stream}")
    async with bench.egress({"stream": stream}):
        await resumes(bench, stream)


async def test_another_feed_of_the_stream_that_is_archived_further_is_named(bench: Bench) -> None:
    stream, (other, part) = await bench.make_stream(unique("T")), map(unique, "FP")
    await publish_over(bench, stream, ["a", "b"], 30, "x")
    feeds = [{"stream": stream, "name": other}, {"stream": stream, "name": part, "filter_subject": f"{stream}.a"}]
    async with bench.egress({"stream": stream}, *feeds):
        for feed in (stream, other, part):
            await bench.archived_to(feed, 30)
    await publish_over(bench, stream, ["a", "b"], 20, "later")
    async with bench.egress(*feeds):
        for feed in (other, part):
            await bench.archived_to(feed, 50)
    before = await back.contents(bench, stream)
    await bench.delete_stream(stream)
    with raises_code(Stopped, "E-RESTORE-LOSSY") as caught:
        await back.restored(bench, stream)
    for feed in (other, part):
        assert f"feed {feed} of the same stream is archived up to 50: 31..50 would be given" in caught.value.message
    assert f" site/{other}\n" in caught.value.hint
    assert f" site/{part}" not in caught.value.hint, "it does not have the whole stream"
    assert any(f"feed {other} " in note for note in (await back.planned(bench, stream, to_sequence=20)).notes)
    beside = await back.planned(bench, stream, name=unique("B"))
    assert (beside.lossy, beside.longer_feeds) == ((), ()), "a stream of another name takes no sequence from anybody"
    await back.comes_back(bench, stream, before[:30], allow_lossy=True)
    await bench.delete_stream(stream)
    assert (await back.restored(bench, other)).exit_code == 0
    assert await back.contents(bench, stream) == before


@pytest.mark.parametrize(("retention", "count"), [("interest", 1), ("interest", 2), ("workqueue", 1)])
async def test_a_stream_keeps_for_egress_what_is_published_before_it_reads_again(
    bench: Bench, retention: str, count: int
) -> None:
    """Only egress wants it, so an interest stream would drop it at once. `count`: the number of partitions."""
    stream = await bench.make_stream(unique("T"), retention=retention, storage="file")
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
    order = (*range(0, 20, 2), *range(1, 20, 2))
    assert [m.payload for m in parts.messages()][20:] == [b"at once %d" % n for n in order]
    assert lapses(stream) == before
    assert len(await durables(bench, stream)) == count
