"""Ingress behind a feed of several partitions: an incarnation waits for all of the one before, and for no
more than that.
"""

from __future__ import annotations

import pytest

from tests.support.basics import soon, unique
from tests.support.egress import SITE, Bench, Partitioned, feed_of, publish_over
from tests.support.ingress import Archive, Arrived, Centre

pytestmark = pytest.mark.simulated


async def carried(bench: Bench, stream: str, count: int) -> list[Arrived]:
    """What arrives in a target that carries the feed."""
    target = unique("FLEET")
    sources = [{"site": [SITE], "feed": [stream], "subject_prefix": target}]
    centre = Centre(bench.root, Archive(bench.root / "bucket"), bench.url, stream=target, sources=sources)
    async with centre.running():
        return await centre.carried(bench.client, count)


@pytest.mark.real
async def test_partitions_without_messages_hold_up_nobody(bench: Bench) -> None:
    """One covers without a row, one covered nothing before the stream was made anew."""
    stream = await bench.make_stream(unique("T"))
    parts, feed = Partitioned(bench, stream, 3), feed_of(stream, 3)
    await publish_over(bench, stream, ["0.a"], 40, "first")
    async with parts.away(2):
        running = bench.start(bench.settings(feed))
        await soon(lambda: parts.end(0) == parts.end(1) == 40)
        await running.drain()
    await bench.delete_stream(stream)
    await bench.make_stream(stream)
    await publish_over(bench, stream, ["0.a", "1.a", "2.a"], 60, "second")
    async with bench.egress(feed):
        await parts.archived_to(60, 1)
    assert parts.previous(1) == {0: 40, 1: 40, 2: 0}
    messages = await carried(bench, stream, 100)
    assert [m.chain.incarnation for m in messages] == [0] * 40 + [1] * 60
    assert sorted(m.message.sequence for m in messages[40:]) == list(range(1, 61))


async def test_a_feed_that_began_at_the_end_and_archived_nothing_holds_up_nobody(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, [b"before"] * 10)
    async with bench.egress({"stream": stream, "start_at_end": True}) as running:
        await soon(lambda: running.state(stream) == "reading")
    await bench.delete_stream(stream)
    await bench.make_stream(stream)
    await bench.publish(stream, [b"second"] * 5)
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, 5, incarnation=1)
    messages = await carried(bench, stream, 5)
    assert [(m.chain.incarnation, m.message.sequence) for m in messages] == [(1, n) for n in range(1, 6)]
