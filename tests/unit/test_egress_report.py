"""What `/status` tells of a feed, and the words for owners, filters and what is left out."""

from __future__ import annotations

import math
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from common import exits
from common.chain import Chain
from common.errors import Stopped, Unavailable
from common.jetstream.lease import new_owner, owner_text
from common.segments.segment import Footer, Ledger, Reason
from common.segments.writer import SpooledSegment
from common.sequences import SequenceRange
from common.service.monitor import Health
from common.settings.egress import SegmentSettings
from egress import metrics
from egress.builder import OpenSegment
from egress.incarnations import filters_text
from egress.partition import repartition, resolve
from egress.report import FeedReport, LeftOut, Unmatched, log
from egress.watchdog import Liveness, ProgressCheck, SessionStanding
from tests.support.basics import counted, unique
from tests.support.clock import ManualClock


def spooled(chain: Chain, first: int, last: int) -> SpooledSegment:
    coverage = SequenceRange(first, last)
    ledger = Ledger({Reason.DELETED: len(coverage)})
    footer = Footer(chain, 0, coverage, 0, ledger, 0, None, None, None, "test")
    return SpooledSegment(Path("none"), footer, 1, "0" * 64)


class Feed(NamedTuple):
    clock: ManualClock
    health: Health
    chain: Chain
    report: FeedReport

    def status(self, *keys: str) -> tuple[Any, ...]:
        part = self.health.status()["parts"][f"egress {self.chain.feed}"]
        return tuple(part[key] for key in keys)

    def count(self, metric: Any) -> float:
        return counted(metric.labels(self.chain.site, self.chain.feed, "0"))

    def watched(self, waits: Callable[[int], Awaitable[bool]]) -> Liveness:
        return Liveness(ProgressCheck(60, 300, self.clock.monotonic()), waits, self.report, self.clock)


@pytest.fixture
def feed() -> Feed:
    clock, chain = ManualClock(), Chain("s", unique("F"))
    health = Health(clock)
    return Feed(clock, health, chain, FeedReport(chain, "S", health))


def test_the_position_is_the_first_sequence_that_is_not_accounted_for(feed: Feed) -> None:
    chain, report = feed.chain, feed.report
    report.reading(chain, 5, 0, 5)
    assert feed.status("position", "end") == (5, 0)
    assert feed.count(metrics.end_sequence) == 4, "what was before is not owed"
    report.reading(chain, 5, 4)
    assert feed.status("position", "end") == (5, 4)
    for first, last in ((5, 9), (10, 30)):
        report.put(spooled(chain, first, last), 0.1)
        assert feed.status("position", "end") == (last + 1, last)


def test_the_source_is_not_behind_the_archive_unless_it_was_rolled_back(feed: Feed) -> None:
    feed.report.reading(feed.chain, 5, 4)
    feed.report.source(9, None)
    ends = [feed.status("end", "source_last")]
    feed.report.put(spooled(feed.chain, 5, 30), 0.1)
    ends.append(feed.status("end", "source_last"))  # what was archived since it was asked is in the stream
    for _ in range(2):  # asked before the put and answered behind it; then it was rolled back
        feed.report.source(25, None)
        ends.append(feed.status("end", "source_last"))
        assert feed.count(metrics.source_sequence) == ends[-1][1]
    assert ends == [(4, 9), (30, 30), (30, 30), (30, 25)]


def test_the_open_segment_is_asked_for_whenever_the_page_is(feed: Feed) -> None:
    figures = metrics.open_messages, metrics.open_bytes, metrics.open_age
    feed.report.reading(feed.chain, 5, 4)
    assert (feed.status("open_segment"), feed.count(metrics.open_age)) == ((None,), 0)
    held = OpenSegment(5, 8, 3, 120, 12.5, 287.5, SegmentSettings())
    feed.report.opens(lambda: held)
    [shown] = feed.status("open_segment")
    found = {"messages": 3, "bytes": 120, "last": 8, "age_seconds": 12.5, "closes_in_seconds": 287.5}
    assert shown.items() >= {**found, "max_messages": 1_000_000, "max_size": 100 * 2**20}.items()
    assert [*map(feed.count, figures)] == [3, 120, 12.5]
    feed.report.opens()
    assert (feed.status("open_segment"), feed.count(metrics.open_messages)) == ((None,), 0)


def test_a_stop_names_the_incarnation_that_was_looked_at_and_a_recreated_source_is_counted(feed: Feed) -> None:
    assert feed.count(metrics.recreated) == 0, "an alert needs a beginning"
    feed.report.recreated()
    feed.report.follow(feed.chain.next_incarnation())
    feed.report.stopped(Stopped("why", code="E-FORKED"))
    assert feed.report.sign().chain == feed.chain.next_incarnation()
    assert (feed.count(metrics.recreated), feed.count(metrics.incarnation)) == (1, 1)


def test_a_chain_waits_while_the_store_is_silent_unless_another_works_on_it(feed: Feed) -> None:
    feed.report.reading(feed.chain, 5, 4)
    assert feed.count(metrics.waiting) == 0
    for is_ready in (False, True):
        feed.health.set_ready("objects", is_ready)
        assert feed.count(metrics.waiting) == (not is_ready)
    feed.report.waits(Unavailable("away"))
    assert feed.count(metrics.waiting) == 1
    feed.report.standby("another")
    feed.health.set_ready("objects", False)
    assert feed.count(metrics.waiting) == 0


def test_a_chain_is_not_ready_while_a_stop_is_confirmed_and_keeps_one_that_stands(feed: Feed) -> None:
    feed.report.reading(feed.chain, 5, 4)
    feed.report.confirms("sequence 4 is not as archived")
    assert feed.health.problems() == [f"egress {feed.chain.feed}: sequence 4 is not as archived"]
    feed.report.works()
    assert feed.health.problems() == []
    feed.report.stopped(Stopped("it differs", code="E-FORKED"))
    feed.report.confirms("sequence 4 is not as archived")
    assert feed.health.problems() == [f"egress {feed.chain.feed}: it differs"]


# Stalls


HALF = SessionStanding(count=50, received=50, archived=50, source=100)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(log, "error", lambda _, **fields: found.append(fields["code"]))
    return found


async def test_a_stall_is_told_once_and_taken_back(feed: Feed, told: list[str]) -> None:
    waits = iter([True, True, False])

    async def waiting(_: int) -> bool:
        return next(waits)

    liveness = feed.watched(waiting)
    assert await liveness.look(HALF) is None
    feed.clock.advance(60)
    for _ in range(2):
        doubt = await liveness.look(HALF)
        assert doubt.reason == "stalled"
    assert (feed.count(metrics.stalled), told) == (1, ["E-STALLED"])
    assert (await liveness.look(HALF), feed.count(metrics.stalled)) == (None, 0)


async def test_a_stall_that_lasts_over_several_readers_is_told_once(feed: Feed, told: list[str]) -> None:
    async def waiting(_: int) -> bool:
        return True

    fresh = replace(HALF, count=0)
    for standings in ([fresh] * 3, [fresh] * 3, [HALF] * 3):  # the third has received something
        liveness = feed.watched(waiting)
        for standing in standings:
            doubt = await liveness.look(standing)
            feed.clock.advance(30)
        assert doubt is not None
    assert told == ["E-STALLED"] * 2


def test_time_goes_on_while_nobody_can_be_asked(feed: Feed) -> None:
    left = [feed.count(metrics.expiry)]
    at = feed.clock.monotonic() + 100
    feed.report.expires(lambda: max(0.0, at - feed.clock.monotonic()))
    for passed in (40, 100):
        feed.clock.advance(passed)
        left.append(feed.count(metrics.expiry))
    feed.report.standby("another")
    assert [*left, feed.count(metrics.expiry)] == [math.inf, 60, 0, math.inf]


# Words


def test_an_owner_is_a_host_and_a_process() -> None:
    owners = {
        "-/vm/370/5ae63413": "vm (process 370)",
        "blue/vm/370/5ae63413": "blue on vm (process 370)",
        "a/b/vm/370/5ae63413": "a/b on vm (process 370)",
        "somebody else": "somebody else",
        "": "",
    }
    assert {owner: owner_text(owner) for owner in owners} == owners
    assert owner_text(new_owner("")).startswith(new_owner("").split("/")[1] + " (process ")


def test_filters_and_what_is_left_out_are_words() -> None:
    texts = {
        "the whole stream": [""],
        "the filter a.>": ["a.>"],
        "2 partitions (a, b)": ["a", "b"],
        "10 partitions (n0, n1, n2, n3, n4, n5, n6, n7 and 2 more)": [f"n{i}" for i in range(10)],
    }
    assert [filters_text(filters) for filters in texts.values()] == [*texts]
    many = LeftOut("nodes.3.>", Unmatched(11, 4, "nodes.3.n11"))
    assert str(many) == "nodes.3.>: 11 messages on 4 subjects, such as nodes.3.n11, belong to no partition any more"
    assert str(LeftOut("", Unmatched(1, 1, "a"))) == ">: 1 message on 1 subject, a, belongs to no partition any more"
    some = LeftOut("", Unmatched(5, 2, "a", is_complete=False))
    assert str(some).startswith(">: at least 5 messages on 2 subjects, such as a,")


def test_commands_name_the_file_that_was_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    before = exits.source()
    exits.remember("my site's.yaml")
    path = str(tmp_path / "my site's.yaml")
    command = ["floe", "egress", "resolve", "-c", path, "F", "--partition", "2", "--same"]
    assert shlex.split(resolve("F", "--same", 2)) == command
    assert shlex.split(repartition("$F")) == ["floe", "egress", "repartition", "-c", path, "$F"]
    assert exits.source() == "my site's.yaml"
    exits.remember(before)
