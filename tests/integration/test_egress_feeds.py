"""Feeds from limits-retention streams, against a real server: what is archived, how it is accounted for."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from common.chain import Chain
from tests.support.basics import soon, unique
from tests.support.egress import SITE, Bench

pytestmark = pytest.mark.simulated


async def test_two_feeds_of_one_stream_stand_side_by_side(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    other = unique("OTHER")
    none = {"name": unique("NONE"), "stream": stream, "filter_subject": f"{stream}.none"}
    feeds = {"stream": stream}, {"name": other, "stream": stream, "filter_subject": f"{stream}.*.b"}, none
    await bench.publish(stream, [b"a"] * 10, subject="a")
    await bench.publish(stream, [b"b"] * 5, subject="x.b")
    await bench.publish(stream, [b"a"] * 10, subject="a")
    async with bench.egress(*feeds):
        await bench.archived_to(stream, 25)
        await bench.archived_to(other, 25)
        await bench.archived_to(none["name"], 25)
    assert (bench.messages(none["name"]), bench.ledger(none["name"])) == ([], {"not_matched": 25})
    assert all(footer.tip is None for footer in bench.footers(none["name"])), "an empty segment"
    await bench.same(stream, stream)
    bench.check(other)
    assert [m.sequence for m in bench.messages(other)] == [11, 12, 13, 14, 15]
    assert bench.ledger(other) == {"not_matched": 20}
    assert bench.chains.read_chain(bench.chain(other)).filters == (f"{stream}.*.b",)


async def test_interior_gaps_are_deleted_and_what_lies_below_the_source_was_gone_before_read(bench: Bench) -> None:
    """F20, F21: purged before it was read, deleted singly; the archive keeps what it read."""
    stream = await bench.begun([b"x"] * 20)
    await bench.publish(stream, [b"y"] * 20)
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 31})
    for sequence in (33, 34, 39):
        await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    await bench.freeze({"stream": stream})
    bench.check(stream)
    assert bench.ledger(stream) == {"deleted": 3, "gone_before_read": 10}
    unread = [footer.unread for footer in bench.footers(stream) if footer.unread]
    assert (unread[0].first, unread[-1].last) == (21, 30)
    assert [m.sequence for m in bench.messages(stream)] == [*range(1, 21), 31, 32, 35, 36, 37, 38, 40]


async def test_everything_purged_is_covered_by_a_heartbeat_and_unverified_until_more_comes(
    bench: Bench,
) -> None:
    stream = await bench.begun([b"x"] * 5)
    await bench.publish(stream, [b"x"] * 5)
    await bench.client.api(f"STREAM.PURGE.{stream}")
    async with bench.egress({"stream": stream}) as running:
        await bench.archived_to(stream, 10)
        await soon(lambda: running.status(stream).get("verdict") == "unverified")
        await bench.publish(stream, [b"later"] * 3)
        await bench.archived_to(stream, 13)
        await soon(lambda: running.status(stream).get("verdict") == "same")
    bench.check(stream)
    assert bench.ledger(stream) == {"gone_before_read": 5}


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ({}, 1),
        ({"start_sequence": 4}, 4),
        ({"start_at_end": True}, 11),
        ({"start_sequence": 50}, 50),
        ({"start_time": "2000-01-01T00:00:00Z"}, 1),
        ({"start_delta": "1h"}, 1),
        ({"start_time": "2100-01-01T00:00:00Z"}, 11),
    ],
)
async def test_a_feed_begins_where_its_start_key_says_and_the_key_counts_once(
    bench: Bench, start: dict[str, object], first: int
) -> None:
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, [b"x"] * 10)
    async with bench.egress({"stream": stream, **start}) as running:
        await soon(lambda: running.state(stream) == "reading")
        await bench.publish(stream, [b"x"] * 45)
        await bench.archived_to(stream, 55)
    async with bench.egress({"stream": stream, "start_sequence": 8}) as running:
        await soon(lambda: running.state(stream) == "reading")
    assert bench.chains.read_chain(bench.chain(stream)).first == first
    bench.check(stream, first=first)
    assert [m.sequence for m in bench.messages(stream)] == list(range(first, 56))
    assert bench.ledger(stream) == {}


@pytest.mark.parametrize(
    ("now", "shown"),
    [
        ({"filter_subject": "STREAM.b"}, "the filter STREAM.b"),
        ({"relay": True}, "the whole stream as a relay"),
        ({"partitions": ["STREAM.0.>", "STREAM.1.>"]}, "2 partitions (STREAM.0.>, STREAM.1.>)"),
    ],
)
async def test_what_a_chain_that_has_begun_cannot_be_changed_to_stops_it(
    bench: Bench, now: dict[str, Any], shown: str
) -> None:
    stream = await bench.begun([b"x"])
    changed = yaml.safe_load(yaml.safe_dump(now).replace("STREAM", stream))
    async with bench.egress({"stream": stream, **changed}) as running:
        status = await running.stopped(stream)
        expected = f"begun with the whole stream, configured with {shown.replace('STREAM', stream)}"
        assert expected in status["why"]
        assert "floe egress repartition" in status["hint"]
        assert running.health.problems()
    assert bench.chains.read_chain(Chain(SITE, stream, 0, 1)) is None


async def test_a_stopped_feed_leaves_the_others_alone_and_goes_on_when_it_can(bench: Bench) -> None:
    stream, missing = await bench.make_stream(unique("T")), unique("MISSING")
    await bench.publish(stream, [b"x"] * 3)
    async with bench.egress({"stream": missing}, {"stream": stream}) as running:
        await soon(lambda: running.state(missing) == "stopped")
        await bench.archived_to(stream, 3)
        assert any("does not exist" in problem for problem in running.health.problems())
        await bench.make_stream(missing)
        await bench.publish(missing, [b"x"] * 3)
        await bench.archived_to(missing, 3)
        assert not running.health.problems()
