"""O6: many feeds at one site, most of them idle: they start, and idle ones make almost no requests."""

import pytest

from egress.deps import Tuning
from tests.support.basics import soon, unique
from tests.support.egress import Bench
from tests.support.stores import FaultyStore

pytestmark = [pytest.mark.servers, pytest.mark.simulated]

FEEDS = 60


async def test_feeds_without_a_message_start_beside_a_busy_one_and_ask_for_next_to_nothing(bench: Bench) -> None:
    streams = [await bench.make_stream(unique("T")) for _ in range(FEEDS)]
    objects = FaultyStore(bench.objects)
    feeds = [{"stream": stream, "segment": {"max_age": "1s"}} for stream in streams]
    async with bench.egress(*feeds, tuning=Tuning(), objects=objects) as running:  # type: ignore[arg-type]
        await soon(lambda: all(running.state(stream) == "reading" for stream in streams), 120, 0.2)
        started = objects.calls.total()
        await bench.archive(streams[0], (b"%d" % n for n in range(200)), 200)
        for stream in streams[1:4]:
            assert not bench.refs(stream)
        asked = objects.calls.total() - started
    print(f"{FEEDS} feeds: {started / FEEDS:.1f} requests each to start, {asked} while one was busy")
    assert started <= 45 * FEEDS
    # Each checks its documents now and then, perhaps just now, and hardly twice.
    assert asked <= 2 * FEEDS, "idle feeds ask too"
    await bench.same(streams[0], streams[0])
