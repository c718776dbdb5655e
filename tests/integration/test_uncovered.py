"""Streams of the account that no feed archives, as egress finds and names them."""

from dataclasses import replace
from typing import Any

import pytest

from common.nats.api import stream_info
from egress.account import all_feeds
from egress.status import site_view
from tests.support.basics import metric_value, soon, unique
from tests.support.egress import QUICK, SITE, Bench


@pytest.mark.simulated
async def test_new_streams_without_a_feed_are_named_until_they_are_gone_or_archived(bench: Bench) -> None:
    stream, other = await bench.filled([b"x"]), unique("OTHER")
    copies = await bench.make_stream(unique("COPIES"))
    await bench.publish(copies, [b"x"], headers=b"NATS/1.0\r\nFloe-Source: eu S 0000 0 1 1\r\n\r\n")

    def shown() -> Any:
        return running.health.status()["parts"].get("account", {})

    async with bench.egress({"stream": stream}, not_archived=["TMP_*"]) as running:
        await soon(lambda: shown().get("uncovered_streams") == 0)
        await bench.make_stream("TMP_1")
        await bench.make_stream(other)
        await soon(lambda: shown().get("uncovered") == [other])
        assert (shown()["streams"], metric_value("floe_egress_uncovered_streams", {"site": SITE})) == (6, 1)
        await bench.publish(copies, [b"not a copy"])
        await soon(lambda: shown()["uncovered_streams"] == 2)
        await bench.delete_stream(copies)
        await bench.delete_stream(other)
        await soon(lambda: shown()["uncovered_streams"] == 0)


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
            account = running.health.status()["parts"]["account"]
            assert (account["matched"], account["uncovered"]) == (4, [f"{queue} (retention workqueue)"])
            group = running.health.status()["parts"]["egress sharing"]
            assert (group["members"], group["share"], len(group["held"])) in ((2, 3, 3), (2, 3, 2))
        assert await bench.last(queue) == 1
        feeds = await all_feeds(bench.client, bench.settings(entry, explicit))
        assert sorted(feed.name for feed in feeds) == sorted(["OWN", *streams[1:], late, empty])
    for stream in (*streams[1:], late, empty):
        await bench.same(stream, stream)
    assert bench.refs(streams[0]) == bench.refs(queue) == []


@pytest.mark.simulated
async def test_a_matched_stream_that_becomes_a_queue_is_not_emptied(bench: Bench) -> None:
    stream = await bench.filled([b"x"])
    tuning = replace(QUICK, intervals=replace(QUICK.intervals, alive=1.0))
    async with bench.egress({"streams": "T*"}, tuning=tuning) as running:
        await bench.archived_to(stream, 1)
        await soon(lambda: bench.chains.list_heartbeats(SITE))
        view = await site_view(bench.settings({"streams": "T*"}, monitor={"listen": ""}))
        assert [(row["feed"], row["archived"]) for row in view.rows()] == [(stream, 1)], view.rows()
        await bench.recreate(stream, [b"job"] * 2, retention="workqueue")
        status = await running.stopped(stream)
        assert (status["code"], "expected retention limits by the pattern T*" in status["why"]) == ("E-RETENTION", True)
        assert (await stream_info(bench.client, stream)).messages == 2
