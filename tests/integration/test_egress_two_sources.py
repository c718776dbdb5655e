"""Two sources under one name, both running: what one of them closes, the other puts nothing into any more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.jetstream.api import stream_info
from common.segments.documents import ChainDocument, StreamDocument
from tests.support.basics import soon, unique
from tests.support.egress import QUICK, Bench


@pytest.mark.parametrize("check", [0.3, 3600.0], ids=["by the look", "before a put"])
async def test_what_another_source_has_closed_gets_nothing_more(bench: Bench, check: float) -> None:
    """The other one has leases and state of its own, as on another host; the first stops, and says why."""
    other, feed = Bench(bench.url, bench.root, bench.client), unique("F")
    mine, theirs = await bench.make_stream(unique("T")), await bench.make_stream(unique("T"))
    await bench.publish(mine, [b"mine"] * 10)
    await bench.publish(theirs, [b"theirs"] * 4)
    patient = replace(QUICK, pace=replace(QUICK.pace, check=check))
    async with bench.egress({"stream": mine, "name": feed}, tuning=patient) as running:
        await bench.archived_to(feed, 10)
        async with other.egress({"stream": theirs, "name": feed}) as beside:
            await bench.archived_to(feed, 4, incarnation=1)
            if check > 1:
                await bench.publish(mine, [b"mine, late"] * 5)
            await soon(lambda: running.state(feed) == "stopped")
            assert "is forked: incarnation 0000 is there again" in running.status(feed)["why"]
            await bench.publish(mine, [b"mine, later"] * 5)
            await bench.publish(theirs, [b"theirs"] * 6)
            await bench.archived_to(feed, 10, incarnation=1)
            assert beside.state(feed) == "reading"
    assert bench.end(feed) == 10
    assert [m.payload for m in bench.messages(feed, 1)] == [b"theirs"] * 10
    assert bench.chains.read_stream(bench.chain(feed, 2)) is None


@pytest.mark.parametrize("count", [2, 30], ids=["shorter", "longer"])
async def test_a_queue_that_another_source_has_closed_stops_though_nothing_in_it_tells(
    bench: Bench, count: int
) -> None:
    """What was archived was acknowledged: the stream's `created` says which incarnation is its own."""
    other, feed = Bench(bench.url, bench.root, bench.client), unique("F")
    mine = await bench.make_stream(unique("T"), retention="workqueue")
    theirs = await bench.make_stream(unique("T"))
    await bench.publish(mine, [b"mine"] * 10)
    await bench.publish(theirs, [b"theirs"] * 4)
    async with bench.egress({"stream": mine, "name": feed}) as running:
        await bench.archived_to(feed, 10)
        async with other.egress({"stream": theirs, "name": feed}):
            await bench.archived_to(feed, 4, incarnation=1)
            await soon(lambda: running.state(feed) == "stopped")
            await bench.publish(theirs, [b"theirs"] * count)
            await bench.archived_to(feed, 4 + count, incarnation=1)
            await bench.publish(mine, [b"mine, later"] * 5)
            await soon(lambda: "is forked: incarnation 0000" in running.status(feed)["why"])
    assert bench.chains.read_stream(bench.chain(feed, 2)) is None


async def test_where_its_source_is_that_of_the_next_incarnation_it_goes_on_there(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, [b"x"] * 10)
    async with bench.egress({"stream": stream}) as running:
        await bench.archived_to(stream, 10)
        info = await stream_info(bench.client, stream)
        assert info is not None
        cut = (ChainDocument((), 1, 11),)
        document = StreamDocument(info.config, info.created, {0: 10}, cut, continues=True)
        bench.chains.create_stream(bench.chain(stream, 1), document)
        await bench.publish(stream, [b"y"] * 5)
        await bench.archived_to(stream, 15, incarnation=1)
        assert running.state(stream) == "reading"
    assert bench.end(stream) == 10
    bench.check(stream, 1, 11)
    assert [m.payload for m in bench.messages(stream, 1)] == [b"y"] * 5
