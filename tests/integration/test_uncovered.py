"""Streams of the account that no feed archives, as egress finds and names them."""

from dataclasses import replace
from typing import Any

import pytest

from common.nats.api import stream_info
from egress import account_watch
from egress.account import all_feeds
from egress.report import FeedReport
from egress.status import site_view
from tests.support.basics import metric_value, soon, unique
from tests.support.commands import configuration, ran
from tests.support.egress import QUICK, SITE, Bench, Running


def account(running: Running) -> Any:
    return running.health.status()["parts"].get("account", {})


@pytest.mark.simulated
async def test_new_streams_without_a_feed_are_named_until_they_are_gone_or_archived(bench: Bench) -> None:
    stream, other = await bench.filled([b"x"]), unique("OTHER")
    copies = await bench.make_stream(unique("COPIES"))
    await bench.publish(copies, [b"x"], headers=b"NATS/1.0\r\nFloe-Source: eu S 0000 0 1 1\r\n\r\n")
    async with bench.egress({"stream": stream}, not_archived=["TMP_*"]) as running:
        await soon(lambda: account(running).get("uncovered_streams") == 0)
        await bench.make_stream("TMP_1")
        await bench.make_stream(other)
        await soon(lambda: account(running).get("uncovered") == [other])
        assert (account(running)["streams"], metric_value("floe_egress_uncovered_streams", {"site": SITE})) == (6, 1)
        await bench.publish(copies, [b"not a copy"])
        await soon(lambda: account(running)["uncovered_streams"] == 2)
        await bench.delete_stream(copies)
        await bench.delete_stream(other)
        await soon(lambda: account(running)["uncovered_streams"] == 0)


@pytest.mark.simulated
async def test_streams_that_a_pattern_matches_are_archived_by_all_processes_together(bench: Bench) -> None:
    streams = [await bench.filled([b"x"] * 3) for _ in range(3)]
    queue = await bench.filled([b"job"], retention="workqueue")
    entry = {"streams": ["T*"], "except": ["TMP_*"], "segment": {"max_age": "1s"}}
    explicit = {"stream": streams[0], "name": "OWN"}
    async with bench.egress(entry, explicit) as one, bench.egress(entry, explicit) as other:
        await bench.archived_to("OWN", 3)
        for stream in streams[1:]:
            await bench.archived_to(stream, 3)
        late, empty = await bench.filled([b"y"] * 5), await bench.make_stream(unique("T"))
        await bench.archived_to(late, 5)
        await bench.publish(empty, [b"z"])
        await bench.archived_to(empty, 1)
        for running in (one, other):
            await soon(lambda: not running.health.problems())  # noqa: B023
            assert account(running)["matched"] == 4
            assert account(running)["uncovered"] == [f"{queue} (retention workqueue)"]
            group = running.health.status()["parts"]["sharing"]
            assert (group["members"], group["share"], len(group["held"])) in ((2, 3, 3), (2, 3, 2))
        assert await bench.last(queue) == 1
        feeds = await all_feeds(bench.client, bench.settings(entry, explicit))
        assert sorted(feed.name for feed in feeds) == sorted(["OWN", *streams[1:], late, empty])
    for stream in (*streams[1:], late, empty):
        await bench.same(stream, stream)
    assert bench.refs(streams[0]) == bench.refs(queue) == []


async def shown(bench: Bench, found: list[tuple[str, int]]) -> bool:
    """True if the view of the site has these feeds, each with its archived end. A heartbeat may be older."""
    view = await site_view(bench.settings({"streams": "T*"}, monitor={"listen": ""}))
    return [(row["feed"], row["archived"]) for row in view.rows()] == found


@pytest.mark.simulated
async def test_a_matched_stream_that_becomes_a_queue_is_not_emptied_and_stops_after_each_start(bench: Bench) -> None:
    stream = await bench.filled([b"x"])
    tuning = replace(QUICK, intervals=replace(QUICK.intervals, alive=1.0))
    async with bench.egress({"streams": "T*"}, tuning=tuning) as running:
        await bench.archived_to(stream, 1)
        await soon(lambda: shown(bench, [(stream, 1)]))
        await bench.recreate(stream, [b"job"] * 2, retention="workqueue")
        status = await running.stopped(stream)
        assert (status["code"], "expected retention limits by the pattern T*" in status["why"]) == ("E-RETENTION", True)
    async with bench.egress({"streams": "T*"}) as running:
        assert "found workqueue" in str(await running.stopped(stream))
    assert (await stream_info(bench.client, stream)).messages == 2
    config = str(configuration(bench, {"streams": ["T*"]}))
    assert "E-RETENTION" in (await ran("egress", "resolve", "-c", config, stream, code=3)).out
    assert "expected a feed or a stream" in (await ran("egress", "resolve", "-c", config, "TYPO", code=2)).err


@pytest.mark.simulated
async def test_a_stream_that_was_deleted_on_purpose_is_named_with_what_was_not_archived(bench: Bench) -> None:
    stream, other = await bench.filled([b"x"] * 3), await bench.filled([b"o"])
    entry = {"streams": "T*", "segment": {"max_age": "1h"}}
    async with bench.egress(entry) as one, bench.egress(entry) as two:
        both = one, two
        await soon(lambda: all(each.state(stream) for each in both))
        await soon(lambda: any((each.status(stream).get("open_segment") or {}).get("last") == 3 for each in both))
        await bench.delete_stream(stream)
        for each in both:
            await soon(lambda: not each.status(stream))  # noqa: B023
            await soon(lambda: account(each)["matched"] == 1)  # noqa: B023
            assert account(each)["deleted"] == [f"{stream}: 0 sequences never archived, as of sequence 3"]
            assert each.health.problems() == []
        done = await ran("egress", "resolve", "-c", str(configuration(bench, entry)), stream, code=2)
        assert ("the stream was deleted" in done.err, "floe restore -c" in done.err) == (True, True)
        assert len(bench.messages(stream)) == 3, "received messages are put"
        assert metric_value("floe_egress_end_sequence", {"site": SITE, "feed": stream, "partition": "0"}) is None
        await bench.make_stream(stream)
        await bench.publish(stream, [b"again"] * 2)
        for each in both:
            await soon(lambda: each.state(stream) in ("reading", "standby"))  # noqa: B023
            await soon(lambda: account(each)["deleted"] == [])  # noqa: B023
    assert [m.payload for m in bench.messages(stream, 1)] == [b"again"] * 2
    await bench.same(other, other)


@pytest.mark.simulated
async def test_the_feeds_of_many_deleted_streams_end_at_once_and_each_is_named_once(bench: Bench, monkeypatch, caplog):
    monkeypatch.setattr(account_watch, "MAX_DELETED", 1)
    streams = [await bench.filled([b"x"]) for _ in range(8)]
    async with bench.egress({"streams": "T*"}) as running:
        await soon(lambda: all(running.state(each) == "reading" for each in streams))
        for each in streams:
            await bench.delete_stream(each)
        await soon(lambda: account(running)["matched"] == 0, 600)
        await soon(lambda: not any(map(running.status, streams)))
        assert account(running)["deleted_streams"] == 1
    named = [each.msg["feed"] for each in caplog.records if "stream_deleted" in str(each.msg)]  # type: ignore[index]
    assert sorted(named) == sorted(streams)


@pytest.mark.simulated
async def test_an_earlier_deletion_does_not_announce_a_later_loss(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The stream was made again at once; the standby, which heard of the deletion, takes over before the loss."""
    stream, entry = await bench.filled([b"x"] * 3), {"streams": "T*"}
    async with bench.egress(entry) as one, bench.egress(entry) as two:
        await bench.archived_to(stream, 3)
        await bench.recreate(stream, [b"again"] * 2)
        await bench.archived_to(stream, 2, 1)
        monkeypatch.setattr(FeedReport, "announce_deletion", lambda *_: None)
        holder, standby = (one, two) if two.state(stream) == "standby" else (two, one)
        assert standby.state(stream) == "standby"
        await holder.drain()
        await bench.delete_stream(stream)
        assert (await standby.stopped(stream))["code"] == "E-SOURCE-GONE"


@pytest.mark.simulated
async def test_of_another_history_nobody_knows_how_much_was_never_archived(bench: Bench) -> None:
    stream = await bench.begun([b"x"] * 5)
    async with bench.egress({"streams": "T*", "on_recreated": "halt"}) as running:
        await bench.recreate(stream, [b"again"] * 3)
        assert (await running.stopped(stream))["code"] == "E-RECREATED"
        await bench.delete_stream(stream)
        await soon(lambda: account(running)["deleted"] == [f"{stream}: an unknown number of sequences never archived"])


@pytest.mark.simulated
async def test_a_stream_that_vanishes_without_an_announcement_stops_its_feed(bench: Bench) -> None:
    lost, late = await bench.filled([b"x"] * 2), await bench.filled([b"y"])
    async with bench.egress({"streams": "T*"}) as running:
        for stream in (lost, late):
            await bench.archived_to(stream, await bench.last(stream))
    await bench.delete_stream(lost)
    async with bench.egress({"streams": "T*"}) as running:
        status = await running.stopped(lost)
        assert (status["code"], f"add {lost} to `except` of T*" in status["hint"]) == ("E-SOURCE-GONE", True)
        assert metric_value("floe_egress_source_gone", {"site": SITE, "feed": lost, "partition": "0"}) == 1
        await bench.make_stream(lost)
        await bench.publish(lost, [b"z"])
        await soon(lambda: running.state(lost) == "reading")
        assert metric_value("floe_egress_source_gone", {"site": SITE, "feed": lost, "partition": "0"}) == 0
        await bench.archived_to(lost, 1, 1)
