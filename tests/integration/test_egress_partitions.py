"""Partitions of one feed against a real server: what each takes, and how they begin and end together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from egress.incarnations import Closing, End
from tests.support.basics import soon, unique
from tests.support.egress import Bench, Partitioned, begun_parts, feed_of, publish_over

pytestmark = pytest.mark.simulated


async def recreate(bench: Bench, stream: str, subjects: list[str], count: int, text: str) -> None:
    await bench.recreate(stream)
    await publish_over(bench, stream, subjects, count, text)


async def test_a_list_of_filters_and_what_none_of_them_takes_is_reported(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    parts = Partitioned(bench, stream, 2)
    await publish_over(bench, stream, ["a.x", "b.y", "c.z", "c.w"], 40, "x")
    feed = {"stream": stream, "partitions": [f"{stream}.a.*", f"{stream}.b.>"]}
    one = {"stream": stream, "name": unique("ONE"), "filter_subject": f"{stream}.a.>"}
    async with bench.egress(feed, one) as running:
        await parts.archived_to(40)
        assert [running.state(f"{stream}{suffix}") for suffix in ("", "/1")] == ["reading"] * 2
        await bench.archived_to(one["name"], 40)
        await soon(lambda: "unmatched" in running.status(stream))
        expected = {"messages": 20, "subjects": 2, "example": f"{stream}.c.w"}
        assert running.status(stream)["unmatched"] == expected
        assert "unmatched" not in running.status(f"{stream}/1")
        assert "unmatched" not in running.status(one["name"]), "one filter is meant to leave subjects out"
    parts.check()
    assert sorted({m.subject for m in parts.messages()}) == [f"{stream}.a.x".encode(), f"{stream}.b.y".encode()]


async def test_two_hosts_that_start_at_the_end_of_a_moving_stream_begin_at_one_sequence(bench: Bench) -> None:
    """The first one to resolve it counts for every partition of both."""
    stream = await bench.make_stream(unique("T"))
    parts = Partitioned(bench, stream, 4)
    subjects = [f"{p}.s" for p in range(4)]
    await publish_over(bench, stream, subjects, 100, "before")
    settings = bench.settings(feed_of(stream, 4, start_at_end=True))
    hosts = [bench.start(settings) for _ in range(3)]
    last = 100
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


@pytest.mark.real
async def test_the_others_wait_for_a_partition_whose_worker_is_away(bench: Bench) -> None:
    """Not an error; whoever takes its lease closes it, and all go on."""
    subjects = [f"{p}.a" for p in range(3)]
    stream, parts = await begun_parts(bench, 3, 60, subjects)
    await publish_over(bench, stream, subjects, 30, "more")
    async with parts.away(1):
        running = bench.start(bench.settings(feed_of(stream)))
        await soon(lambda: parts.end(0) == parts.end(2) == 90)
        await recreate(bench, stream, subjects, 100, "second")
        await soon(lambda: running.state(stream) == running.state(f"{stream}/2") == "closing")
        await soon(lambda: running.status(stream)["why"] == "waiting for partitions 1")
        await soon(lambda: not running.health.status()["problems"])
        assert bench.chains.read_stream(parts.chain(0, 1)) is None
    try:
        await parts.archived_to(100, 1)
    finally:
        await running.drain()
    # Partition 1 never saw the last 30 of the first history, and no incarnation claims it did.
    assert parts.previous(1) == {0: 90, 1: 60, 2: 90}
    await parts.same(stream, 1)


async def test_an_end_that_was_noted_is_withdrawn_when_the_old_stream_is_back(bench: Bench) -> None:
    """Partition 0 reads on, so the incarnation must not be closed with the end it noted before."""
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


async def test_created_that_drifts_does_not_stop_a_partition_without_messages(bench: Bench) -> None:
    """It has nothing to compare; what the others archived is of the same stream."""
    stream, parts = await begun_parts(bench, 3, 60)
    key = bench.chains.layout.stream_document(parts.chain(0))
    found = bench.chains.read_stream(parts.chain(0))
    assert found is not None
    bench.objects.put(key, replace(found, created="2001-01-01T00:00:00Z").to_json())
    async with bench.egress(feed_of(stream)) as running:
        await publish_over(bench, stream, ["0.a", "2.a"], 20, "more")
        await parts.archived_to(80)
        assert running.status(f"{stream}/2")["drifted"]
    assert parts.previous(1) is None
    await parts.same(stream)
