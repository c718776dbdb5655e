"""What `/status` tells of a feed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.chain import Chain
from common.clock import SystemClock
from common.errors import Stopped, Unavailable
from common.segments.segment import Footer, Ledger, Reason
from common.segments.writer import SpooledSegment
from common.sequences import SequenceRange
from common.service.monitor import Health
from common.settings.egress import SegmentSettings
from egress import metrics
from egress.builder import OpenSegment
from egress.report import FeedReport
from tests.support.basics import counted, unique


def spooled(chain: Chain, first: int, last: int) -> SpooledSegment:
    coverage = SequenceRange(first, last)
    footer = Footer(
        chain=chain,
        level=0,
        coverage=coverage,
        rows=0,
        ledger=Ledger({Reason.DELETED: len(coverage)}),
        raw_bytes=0,
        first_timestamp_ns=None,
        last_timestamp_ns=None,
        tip=None,
        writer="test",
    )
    return SpooledSegment(Path("none"), footer, 1, "0" * 64)


def test_the_position_is_the_first_sequence_that_is_not_accounted_for() -> None:
    health, chain = Health(SystemClock()), Chain("s", unique("F"))
    report = FeedReport(chain, "S", health)

    def place() -> tuple[Any, Any]:
        status = health.status()["parts"][f"egress {chain.feed}"]
        return status["position"], status["end"]

    report.reading(chain, 5, 0, 5)
    assert place() == (5, 0)
    [[ends]] = [each.samples for each in metrics.end_sequence.labels(chain.site, chain.feed, "0").collect()]
    assert ends.value == 4, "what was before is not owed"
    report.reading(chain, 5, 4)
    assert place() == (5, 4)
    report.put(spooled(chain, 5, 9), 0.1)
    assert place() == (10, 9)
    report.put(spooled(chain, 10, 30), 0.1)
    assert place() == (31, 30)


def test_the_source_is_not_behind_the_archive_unless_it_was_rolled_back() -> None:
    health, chain = Health(SystemClock()), Chain("s", unique("F"))
    report, labels = FeedReport(chain, "S", health), (chain.site, chain.feed, "0")

    def ends() -> tuple[Any, Any]:
        status = health.status()["parts"][f"egress {chain.feed}"]
        assert counted(metrics.source_sequence.labels(*labels)) == status["source_last"]
        return status["end"], status["source_last"]

    report.reading(chain, 5, 4)
    report.source(9, None)
    assert ends() == (4, 9)
    report.put(spooled(chain, 5, 30), 0.1)
    assert ends() == (30, 30), "what was archived since it was asked is in the stream"
    report.source(25, None)
    assert ends() == (30, 30), "asked before the put, answered behind it"
    report.source(25, None)
    assert ends() == (30, 25), "it was rolled back"


def test_the_open_segment_is_asked_for_whenever_the_page_is() -> None:
    health, chain = Health(SystemClock()), Chain("s", unique("F"))
    report = FeedReport(chain, "S", health)
    labels = (chain.site, chain.feed, "0")
    report.reading(chain, 5, 4)

    def shown() -> Any:
        return health.status()["parts"][f"egress {chain.feed}"]["open_segment"]

    assert shown() is None
    assert counted(metrics.open_age.labels(*labels)) == 0
    held = OpenSegment(5, 8, 3, 120, 12.5, 287.5, SegmentSettings())
    report.opens(lambda: held)
    assert (shown()["messages"], shown()["bytes"], shown()["last"]) == (3, 120, 8)
    assert (shown()["age_seconds"], shown()["closes_in_seconds"]) == (12.5, 287.5)
    assert (shown()["max_messages"], shown()["max_size"]) == (1_000_000, 100 * 2**20)
    figures = metrics.open_messages, metrics.open_bytes, metrics.open_age
    assert [counted(each.labels(*labels)) for each in figures] == [3, 120, 12.5]
    report.opens()
    assert shown() is None
    assert counted(metrics.open_messages.labels(*labels)) == 0


def test_a_stop_names_the_incarnation_that_was_looked_at_and_a_recreated_source_is_counted() -> None:
    health, chain = Health(SystemClock()), Chain("s", unique("F"))
    report, next_one = FeedReport(chain, "S", health), chain.next_incarnation()
    count = metrics.recreated.labels(chain.site, chain.feed, "0")
    assert counted(count) == 0, "an alert needs a beginning"
    report.recreated()
    report.follow(next_one)
    report.stopped(Stopped("why", code="E-FORKED"))
    assert report.sign().chain == next_one
    assert counted(count) == 1
    assert counted(metrics.incarnation.labels(chain.site, chain.feed, "0")) == 1


def test_a_chain_waits_while_the_store_is_silent_unless_another_works_on_it() -> None:
    health, chain = Health(SystemClock()), Chain("s", unique("F"))
    report = FeedReport(chain, "S", health)
    waiting = metrics.waiting.labels(chain.site, chain.feed, "0")
    report.reading(chain, 5, 4)
    assert counted(waiting) == 0
    health.set_ready("objects", False, "the store does not answer")
    assert counted(waiting) == 1
    health.set_ready("objects", True)
    assert counted(waiting) == 0
    report.waits(Unavailable("away"))
    assert counted(waiting) == 1
    report.standby("another")
    health.set_ready("objects", False)
    assert counted(waiting) == 0


def test_a_chain_is_not_ready_while_a_stop_is_confirmed_and_keeps_one_that_stands() -> None:
    health, chain = Health(SystemClock()), Chain("s", unique("F"))
    report = FeedReport(chain, "S", health)
    report.reading(chain, 5, 4)
    report.confirms("sequence 4 is not as archived")
    assert health.problems() == [f"egress {chain.feed}: sequence 4 is not as archived"]
    report.works()
    assert health.problems() == []
    report.stopped(Stopped("it differs", code="E-FORKED"))
    report.confirms("sequence 4 is not as archived")
    assert health.problems() == [f"egress {chain.feed}: it differs"]
