"""When a chain counts as stalled, and how long the source keeps what is not archived."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chain import Chain
from common.metrics import REGISTRY
from common.service.monitor import Health
from egress.report import FeedReport, log
from egress.watchdog import Liveness, ProgressCheck, Rise, SessionStanding, StreamLimits, left_by_age, left_by_size
from tests.support.basics import unique
from tests.support.clock import ManualClock

SECOND = 10**9
HALF = SessionStanding(count=50, received=50, archived=50, source=100)


def progress() -> ProgressCheck:
    return ProgressCheck(patience=60, segment_age=300, now=0.0)


def test_messages_that_wait_for_a_minute_are_a_stall_that_a_fresh_reader_may_heal() -> None:
    judge = progress().judge

    assert [judge(HALF, now) for now in (0.0, 30.0, 59.9)] == [None] * 3
    stall = judge(replace(HALF, source=200), 60.0)
    assert stall is not None
    assert (stall.pending, stall.since, stall.heals) == ("sequences 51..200 are not received", 60.0, True)


def test_whatever_moves_begins_the_minute_anew() -> None:
    for change in ({"count": 51}, {"received": 51}, {"archived": 51, "received": 51}):
        judge = progress().judge
        judge(HALF, 0.0)
        assert judge(replace(HALF, **change), 59.0) is None
        assert judge(replace(HALF, **change), 118.0) is None
        assert judge(replace(HALF, **change), 119.0) is not None


@pytest.mark.parametrize("standing", [replace(HALF, source=50), replace(HALF, source=7), replace(HALF, is_done=True)])
def test_where_nothing_waits_nothing_stalls(standing: SessionStanding) -> None:
    judge = progress().judge

    assert [judge(standing, now) for now in (0.0, 1e3, 1e6)] == [None] * 3


def test_a_stream_that_was_idle_for_long_gets_a_minute_from_its_next_message_on() -> None:
    judge = progress().judge
    for now in (0.0, 1000.0, 2000.0):
        judge(replace(HALF, source=50), now)

    assert judge(HALF, 2030.0) is None
    assert judge(HALF, 2059.0) is None
    assert judge(HALF, 2060.0) is not None


def test_what_is_received_and_not_archived_stalls_after_its_segment_had_to_close() -> None:
    judge = progress().judge
    received = SessionStanding(count=50, received=50, archived=10, source=50)

    assert [judge(received, now) for now in (0.0, 300.0, 359.0)] == [None] * 3
    stall = judge(replace(received, count=60, received=60, source=60), 360.0)
    assert stall is not None
    assert (stall.pending, stall.heals) == ("sequences 11..60 are received and not archived", False)


def test_without_room_a_fresh_reader_would_not_help() -> None:
    judge = progress().judge
    judge(replace(HALF, asks=False), 0.0)
    stall = judge(replace(HALF, asks=False), 61.0)
    assert stall is not None
    assert not stall.heals


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=30))
def test_a_chain_that_archives_at_each_check_never_stalls(steps: list[tuple[int, int, bool]]) -> None:
    judge = progress().judge
    archived = 0
    for number, (more, behind, asks) in enumerate(steps):
        archived += 1 + more
        standing = SessionStanding(archived, archived + behind, archived, archived + behind + more, asks)
        assert judge(standing, number * 59.0) is None


async def test_the_report_tells_it_once_and_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, feed = ManualClock(), unique("F")
    report = FeedReport(Chain("s", feed), "S", Health(clock))
    waits, told = True, []
    monkeypatch.setattr(log, "error", lambda _, **fields: told.append(fields["code"]))

    async def waiting(sequence: int) -> bool:
        assert sequence == 51
        return waits

    liveness = Liveness(ProgressCheck(60, 300, clock.monotonic()), waiting, report, clock)

    def stalled() -> float | None:
        return REGISTRY.get_sample_value("floe_egress_stalled", {"site": "s", "feed": feed, "partition": "0"})

    assert await liveness.look(HALF) is None
    clock.advance(60)
    for _ in range(2):
        doubt = await liveness.look(HALF)
        assert doubt is not None
        assert doubt.reason == "stalled"
    assert (stalled(), told) == (1, ["E-STALLED"])
    waits = False
    assert await liveness.look(HALF) is None
    assert stalled() == 0


async def test_a_stall_that_lasts_over_several_readers_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = ManualClock(), []
    report = FeedReport(Chain("s", unique("F")), "S", Health(clock))
    monkeypatch.setattr(log, "error", lambda _, **fields: told.append(fields["code"]))

    async def waiting(_: int) -> bool:
        return True

    fresh = replace(HALF, count=0)
    for _ in range(3):
        liveness = Liveness(ProgressCheck(60, 300, clock.monotonic()), waiting, report, clock)
        for _ in range(3):
            doubt = await liveness.look(fresh)
            clock.advance(30)
        assert doubt is not None
    assert told == ["E-STALLED"]

    liveness = Liveness(ProgressCheck(60, 300, clock.monotonic()), waiting, report, clock)
    await liveness.look(HALF)  # it has received something
    for _ in range(3):
        clock.advance(30)
        await liveness.look(HALF)
    assert told == ["E-STALLED"] * 2


def test_time_goes_on_while_nobody_can_be_asked() -> None:
    clock, feed = ManualClock(), unique("F")
    report = FeedReport(Chain("s", feed), "S", Health(clock))

    def left() -> float | None:
        labels = {"site": "s", "feed": feed, "partition": "0"}
        return REGISTRY.get_sample_value("floe_egress_expiry_seconds", labels)

    assert left() == math.inf
    at = clock.monotonic() + 100
    report.expires(lambda: max(0.0, at - clock.monotonic()))
    clock.advance(40)
    assert left() == 60
    clock.advance(100)
    assert left() == 0
    report.standby("another")
    assert left() == math.inf


# How long the source keeps it


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        ({}, StreamLimits()),
        ({"max_age": 5, "max_msgs": -1, "max_bytes": -1}, StreamLimits(5)),
        ({"max_msgs": 10}, StreamLimits(0, True)),
        ({"max_bytes": 10, "discard": "old"}, StreamLimits(0, True)),
        ({"max_msgs": 10, "discard": "new"}, StreamLimits()),
        ({"max_msgs": 10, "retention": "workqueue"}, StreamLimits()),
        ({"max_msgs_per_subject": 1}, StreamLimits()),
    ],
)
def test_limits_of_a_stream(config: dict[str, object], limits: StreamLimits) -> None:
    assert StreamLimits.of(config) == limits


def test_it_is_kept_as_long_as_the_oldest_waiting_message_has_left_or_the_pace_takes_to_it() -> None:
    day, full = StreamLimits(86_400 * SECOND), StreamLimits(by_size=True)
    ages = ((100 * SECOND, 100 * SECOND), (100 * SECOND, 86_400 * SECOND), (0, 10 * 86_400 * SECOND))

    assert [left_by_age(day, *each) for each in ages] == [86_400, 100, 0]
    assert left_by_age(StreamLimits(), *ages[2]) == math.inf
    paces = ((400, 6), (1000, 6), (400, 0))
    assert [left_by_size(full, waiting=1000, first=first, pace=pace) for first, pace in paces] == [100, 0, math.inf]
    assert left_by_size(StreamLimits(max_age_ns=1), waiting=1000, first=400, pace=6) == math.inf


def test_the_pace_is_that_of_the_last_looks() -> None:
    rise = Rise()

    assert [rise.look(at, last) for at, last in ((0.0, 1), (30.0, 301), (60.0, 301))] == [0, 10, 5]
    paces = [rise.look(float(now), 301) for now in range(90, 600, 30)]
    assert (paces[-1], rise.look(600.0, 1)) == (0, 0), "what rose was long ago; another stream"
