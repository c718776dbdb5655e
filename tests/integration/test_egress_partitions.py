"""Partitions of one feed: their messages, common beginnings and common ends. A repartitioned feed has no message twice
or missing, at a crash of any process at any step.
"""

import os
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
from msgspec import structs

from common.archive.segment import Message
from common.chain import Chain
from common.errors import Unavailable
from common.nats.api import consumer_names, delete_consumer
from egress.incarnations import Closing, End
from infra.oracle import Trace, archived_messages, compare, read_source_trace
from tests.support.basics import soak_only, soon, unique
from tests.support.commands import Done, configuration, floe, paste
from tests.support.egress import SITE, Bench, Partitioned, begun_parts, feed_of, publish_over
from tests.support.servers import restore_disk, save_disk
from tests.support.stores import FaultyStore, raising


@pytest.mark.simulated
async def test_filters_are_listed_and_unmatched_subjects_reported(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    parts = Partitioned(bench, stream, 2)
    await publish_over(bench, stream, ["a.x", "b.y", "c.z", "c.w"], 40, "x")
    feed = {"stream": stream, "partitions": [f"{stream}.a.*", f"{stream}.b.>"]}
    one = {"stream": stream, "name": unique("ONE"), "filter_subject": f"{stream}.a.>"}
    objects = FaultyStore(bench.objects)
    async with bench.egress(feed, one, objects=objects) as running:
        await parts.archived_to(40)
        assert [running.state(f"{stream}{suffix}") for suffix in ("", "/1")] == ["reading"] * 2
        await bench.archived_to(one["name"], 40)
        await soon(lambda: "unmatched" in running.status(stream))
        objects.on("list", raising(Unavailable("the store is down")))
        for name in await consumer_names(bench.client, stream):
            await delete_consumer(bench.client, stream, name)
        await soon(lambda: running.state(stream) == "waiting")
        assert running.status(stream)["unmatched"] == {"messages": 20, "subjects": 2, "example": f"{stream}.c.w"}
        objects.heal()
        assert "unmatched" not in running.status(f"{stream}/1")
        assert "unmatched" not in running.status(one["name"]), "one filter is meant to leave subjects out"
    parts.check()
    assert sorted({m.subject for m in parts.messages()}) == [f"{stream}.a.x".encode(), f"{stream}.b.y".encode()]


@pytest.mark.simulated
async def test_two_hosts_that_start_at_the_end_of_a_moving_stream_begin_at_one_sequence(bench: Bench) -> None:
    """The first host that resolves it decides for every partition of all."""
    stream = await bench.make_stream(unique("T"))
    parts, subjects = Partitioned(bench, stream, 4), [f"{p}.s" for p in range(4)]
    await publish_over(bench, stream, subjects, 100, "before")
    settings = bench.settings(feed_of(stream, 4, start_at_end=True))
    hosts, last = [bench.start(settings) for _ in range(3)], 100
    try:
        while not all(bench.chains.read_chain(parts.chain(p)) for p in range(4)):
            await publish_over(bench, stream, subjects, 100, "during")
            last += 100
        await publish_over(bench, stream, subjects, 400, "after")
        last += 400
        await parts.archived_to(last)
    finally:
        for host in hosts:
            await host.drain()
    firsts = {bench.chains.read_chain(parts.chain(p)).first for p in range(4)}  # type: ignore[union-attr]
    assert len(firsts) == 1
    [first] = firsts
    assert 100 < first <= last
    await parts.same(stream, first=first)


async def test_the_others_wait_for_a_partition_whose_worker_is_away(bench: Bench) -> None:
    """Not an error: the process that takes its lease closes it, and all continue."""
    subjects = [f"{p}.a" for p in range(3)]
    stream, parts = await begun_parts(bench, 3, 60, subjects)
    await publish_over(bench, stream, subjects, 30, "more")
    patient = replace(bench, lease_bucket=unique("L"))
    async with replace(parts, bench=patient).away(1, 30.0):  # a shorter lease is lost on a busy machine
        running = patient.start(patient.settings(feed_of(stream), lease_ttl="30s"))
        await soon(lambda: parts.end(0) == parts.end(2) == 90)
        await bench.recreate(stream)
        await publish_over(bench, stream, subjects, 100, "second")
        await soon(lambda: running.state(stream) == running.state(f"{stream}/2") == "closing")
        await soon(lambda: running.status(stream).get("why") == "waiting for partitions 1")
        await soon(lambda: not running.health.status()["problems"])
        assert bench.chains.read_stream(parts.chain(0, 1)) is None
    try:
        await parts.archived_to(100, 1)
    finally:
        await running.drain()
    # Partition 1 never read the last 30 of the first history, and no incarnation claims it did.
    assert parts.previous(1) == {0: 90, 1: 60, 2: 90}
    await parts.same(stream, 1)


@pytest.mark.simulated
async def test_an_end_that_was_noted_is_withdrawn_when_the_old_stream_is_back(bench: Bench) -> None:
    """Partition 0 reads on, so the incarnation must not be closed with the end that it recorded before."""
    stream, parts = await begun_parts(bench, 2, 60)
    closings = await parts.closings()
    another = Closing({0: End(60, 1, "2001-01-01T00:00:00Z")})
    await closings.change(parts.chain(0), lambda _: another)
    await publish_over(bench, stream, ["0.a", "1.a"], 20, "more")
    async with bench.egress(feed_of(stream, 2)):
        await parts.archived_to(80)
        assert (await closings.get(parts.chain(0))).ends == {}
    assert parts.previous(1) is None
    await parts.same(stream)


@pytest.mark.simulated
async def test_created_that_drifts_does_not_stop_a_partition_without_messages(bench: Bench) -> None:
    """It has nothing to compare; the rows that the others archived are of the same stream."""
    stream, parts = await begun_parts(bench, 3, 60)
    key = bench.chains.layout.stream_document(parts.chain(0))
    found = bench.chains.read_stream(parts.chain(0))
    bench.objects.put(key, structs.replace(found, created="2001-01-01T00:00:00Z").to_json())
    async with bench.egress(feed_of(stream)) as running:
        await publish_over(bench, stream, ["0.a", "2.a"], 20, "more")
        await parts.archived_to(80)
        assert running.status(f"{stream}/2")["drifted"]
    assert parts.previous(1) is None
    await parts.same(stream)


# A repartitioned feed


async def repartition(bench: Bench, feed: dict[str, Any], *arguments: str, failpoints: str = "") -> Done:
    env = {**os.environ, "FLOE_FAILPOINTS": failpoints} if failpoints else None
    command = ("egress", "repartition", "-c", str(configuration(bench, feed)))
    return await floe(*command, f"{SITE}/{feed['stream']}", *arguments, env=env)


async def until_cut(bench: Bench, feed: dict[str, Any], *arguments: str) -> Done:
    """Repeat the command until the leases of the killed processes have expired."""

    async def ended() -> Done | None:
        done = await repartition(bench, feed, "--yes", *arguments)
        return None if done.code == 75 else done

    done = await soon(ended, every=0.5)
    assert done.code == 0, done
    return done


def everything(bench: Bench, feed: str) -> list[Message]:
    """The messages of all chains of the feed, in sequence order; a repeated one appears twice."""
    chains = bench.chains.chains(SITE, feed)
    return sorted((m for c in chains for m in archived_messages(bench.store, c)), key=lambda m: m.sequence)


async def check_all(bench: Bench, feed: str, stream: str) -> None:
    found = compare(await read_source_trace(bench.client, stream), Trace.of(everything(bench, feed)), may_be_gone=False)
    assert found.is_ok, found.report()


async def read_ahead(bench: Bench, feed: dict[str, Any], parts: Partitioned, last: int) -> None:
    """Let partition 0 read to `last` while another instance holds partition 1 by a lease that a busy machine keeps."""
    patient = replace(bench, lease_bucket=unique("L"))
    async with replace(parts, bench=patient).away(1, 30.0):
        running = patient.start(patient.settings(feed, lease_ttl="30s"))
        await soon(lambda: parts.end(0) == last)
        await running.drain()


async def uneven(bench: Bench, count: int) -> tuple[str, Partitioned]:
    """A feed of two partitions, of which partition 0 is ahead of partition 1; its stream, and the partitions."""
    stream, parts = await begun_parts(bench, 2, count, ["0.a", "1.a", "0.b", "1.b"])
    await publish_over(bench, stream, ["0.a", "1.a"], count, "more")
    await read_ahead(bench, feed_of(stream, 2), parts, 2 * count)
    assert parts.end(1) == count
    return stream, parts


async def test_a_partition_that_is_behind_reads_on_to_the_end_of_the_furthest_and_no_further(bench: Bench) -> None:
    stream, parts = await uneven(bench, 100)
    await publish_over(bench, stream, ["0.a", "1.a"], 50, "beyond")
    feed = {"stream": stream}
    shown = await repartition(bench, feed, "--dry-run", "--json")
    assert (shown.json()["still_to_read"], parts.end(1)) == ({"0": 0, "1": 100}, 100)
    done = await until_cut(bench, feed, "--json")
    assert (done.json()["first"], done.json()["ends"]) == (201, {"0": 200, "1": 200})
    assert parts.ends() == parts.previous(1) == {0: 200, 1: 200}
    assert await bench.mark(stream, incarnation=1) == 0
    parts.check()
    async with bench.egress(feed):
        await bench.archived_to(stream, 250, incarnation=1)
    document = bench.chains.read_chain(Chain(SITE, stream, 1))
    assert (document.first, document.filters, document.partitions) == (201, (), 1)
    await check_all(bench, stream, stream)


async def test_people_read_words_and_what_the_new_filters_leave_out(bench: Bench) -> None:
    stream, _ = await uneven(bench, 100)
    await publish_over(bench, stream, ["1.b", "1.c"], 11, "left")
    await publish_over(bench, stream, ["0.x"], 1, "left")
    feed = {"stream": stream, "partitions": [f"{stream}.0.a", f"{stream}.0.b", f"{stream}.1.a"]}
    left = [
        f"{stream}.0.>: 1 message on 1 subject, {stream}.0.x, belongs to no partition any more",
        f"{stream}.1.>: 36 messages on 2 subjects, such as {stream}.1.b, belong to no partition any more",
    ]
    cut = f"3 partitions ({stream}.0.a, {stream}.0.b, {stream}.1.a)"
    words = [f"to: {cut}", "partition 0: nothing still to read", "partition 1: 100 sequences still to read", *left]
    shown = await repartition(bench, feed, "--dry-run")
    assert (shown.out.splitlines()[2:], shown.err) == (words, "")
    as_json = await repartition(bench, feed, "--dry-run", "--json")
    assert [each["messages"] for each in as_json.json()["left_out"]] == [1, 36]
    unasked = await repartition(bench, feed)
    assert (unasked.code, all(f"warning: {line}" in unasked.err for line in left)) == (2, True)
    done = await until_cut(bench, feed)
    assert done.err.splitlines() == [f"warning: {line}" for line in left]
    assert f"site/{stream}/0001 begins at 201: {cut}" in done.out.splitlines()


FAILPOINTS = [
    *("egress.after_put", "repartition.after_stream"),
    *map(soak_only, ("repartition.before_stream", "repartition.after_chain")),
]


@pytest.mark.parametrize("failpoint", FAILPOINTS)
async def test_a_crash_at_any_step_is_completed_by_the_next_run(bench: Bench, failpoint: str) -> None:
    """Behind the commit the old partition layout stops."""
    stream, parts = await uneven(bench, 60)
    feed = feed_of(stream, 3)
    assert (await repartition(bench, feed, "--yes", failpoints=f"{failpoint}=kill")).code == -9
    is_cut = failpoint in ("repartition.after_stream", "repartition.after_chain")
    assert (bench.chains.read_stream(parts.chain(0, 1)) is not None) is is_cut
    if is_cut:
        async with bench.egress(feed_of(stream, 2)) as running:
            await soon(lambda: running.state(stream) == running.state(f"{stream}/1") == "stopped")
            assert "repartition" in running.status(stream)["hint"]
    await publish_over(bench, stream, ["0.a", "1.a", "2.a"], 30, "meanwhile")
    await until_cut(bench, feed)
    assert parts.previous(1) == parts.ends() == {0: 120, 1: 120}
    after = Partitioned(bench, stream, 3)
    await after.freeze(150, 1)
    after.check(1)
    await check_all(bench, stream, stream)


async def test_nothing_is_done_where_there_is_nothing_to_do_and_a_running_egress_is_left_alone(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    parts = Partitioned(bench, stream, 2)
    unbegun = await repartition(bench, feed_of(stream, 2), "--yes")
    assert (unbegun.code, "has not begun" in unbegun.err) == (2, True)
    await publish_over(bench, stream, ["0.a", "1.a"], 20, "x")
    async with bench.egress(feed_of(stream, 2)):
        await parts.archived_to(20)
        done = await repartition(bench, feed_of(stream, 2), "--yes")
        assert (done.code, "is divided as configured" in done.out) == (0, True)
        done = await repartition(bench, {"stream": stream}, "--yes")
    assert done.code == 75
    assert f"partition 0 of feed {stream} is held by {gethostname()} (process {os.getpid()})" in done.err
    assert (bench.chains.read_stream(parts.chain(0, 1)), parts.ends()) == (None, {0: 20, 1: 20})


async def test_a_stream_set_back_behind_the_cut_is_noticed_though_nothing_was_archived_since(alone, tmp_path: Path):
    """The tips of the previous incarnation are evidence for the one that continues it."""
    bench, server = alone
    stream, parts = await begun_parts(bench, 2, 20, storage="file")
    saved = await save_disk(server, tmp_path)
    await publish_over(bench, stream, ["0.a", "1.a"], 20, "lost")
    await parts.freeze(40)
    await until_cut(bench, feed_of(stream, 3))
    await restore_disk(server, saved)
    feed = feed_of(stream, 3)
    async with bench.egress(feed) as running:
        await soon(lambda: all(running.state(stream + s) == "stopped" for s in ("", "/1", "/2")))
        assert "is rolled back" in running.status(f"{stream}/2")["why"]
        await paste(bench, running.status(stream)["hint"], feed)
        await publish_over(bench, stream, ["0.a", "1.a", "2.a"], 30, "other")
        after = Partitioned(bench, stream, 3)
        await after.archived_to(50, 2)
    after.check(2)
    assert [m.sequence for m in after.messages(2)] == list(range(21, 51))


@pytest.mark.parametrize(("retention", "count"), [("interest", 3), ("workqueue", 2)])
async def test_the_new_partitions_get_later_messages(bench: Bench, retention: str, count: int) -> None:
    stream = await bench.make_stream(unique("T"), retention=retention)
    before, after = Partitioned(bench, stream, 2), Partitioned(bench, stream, count)
    async with bench.egress(feed_of(stream, 2)) as running:
        await soon(lambda: running.state(stream) == running.state(f"{stream}/1") == "reading")
        await publish_over(bench, stream, ["0.a", "1.a"], 60, "first")
        await before.archived_to(60)
    cut = {"stream": stream, "partitions": [f"{stream}.{part}.>" for part in (1, 0, 2)[:count]]}
    await until_cut(bench, cut)
    await publish_over(bench, stream, ["0.a", "1.a", "2.a"][:count], 90, "second")
    async with bench.egress(cut):
        await after.archived_to(150, 1)
    expected = [b"first %d" % i for i in range(60)] + [b"second %d" % i for i in range(90)]
    assert sorted(m.payload for m in everything(bench, stream)) == sorted(expected)


async def test_a_sampled_feed_is_read_on_with_its_sampler_and_keeps_its_memory(bench: Bench) -> None:
    """One copy of each value in an hour: a value copied before the repartition is not copied behind it."""
    stream = await bench.make_stream(unique("T"))
    keys = {"inspect_subject_token": 3, "inspect_duration": "1h"}
    subjects = [f"{partition}.{value}" for partition in (0, 1) for value in "abc"]
    parts = Partitioned(bench, stream, 2)
    await publish_over(bench, stream, subjects, 60, "first")
    async with bench.egress(feed_of(stream, 2, **keys)):
        await parts.archived_to(60)
    await publish_over(bench, stream, [*subjects, "0.d", "1.d"], 40, "more")
    await read_ahead(bench, feed_of(stream, 2, **keys), parts, 100)
    cut = {"stream": stream, **keys}
    await until_cut(bench, cut)
    assert parts.ends() == {0: 100, 1: 100}
    parts.check()
    copied = [m.subject.decode().removeprefix(f"{stream}.") for m in parts.messages()]
    assert sorted(copied) == sorted([*subjects, "0.d", "1.d"])
    await publish_over(bench, stream, [*subjects, "0.e"], 70, "later")
    async with bench.egress(cut):
        await bench.archived_to(stream, 170, incarnation=1)
    assert [m.subject.decode() for m in bench.messages(stream, 1)] == [f"{stream}.0.e"]
    bench.check(stream, 1, 101)
