"""When a chain counts as stalled, and how long the source keeps what is not archived."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egress.watchdog import ProgressCheck, Rise, SessionStanding, StreamLimits, left_by_age, left_by_size

SECOND = 10**9
HALF = SessionStanding(count=50, received=50, archived=50, source=100)


def progress() -> ProgressCheck:
    return ProgressCheck(patience=60, segment_age=300, now=0.0)


def test_messages_that_wait_for_a_minute_are_a_stall_that_a_fresh_reader_may_heal_unless_there_is_no_room() -> None:
    for asks in (True, False):
        judge, standing = progress().judge, replace(HALF, asks=asks)
        assert [judge(standing, now) for now in (0.0, 30.0, 59.9)] == [None] * 3
        stall = judge(replace(standing, source=200), 60.0)
        assert stall is not None
        assert (stall.pending, stall.since, stall.heals) == ("sequences 51..200 are not received", 60.0, asks)


@pytest.mark.parametrize("change", [{"count": 51}, {"received": 51}, {"archived": 51, "received": 51}])
def test_whatever_moves_begins_the_minute_anew(change: dict[str, int]) -> None:
    judge, moved = progress().judge, replace(HALF, **change)
    judge(HALF, 0.0)
    assert [judge(moved, now) is None for now in (59.0, 118.0, 119.0)] == [True, True, False]


@pytest.mark.parametrize("standing", [replace(HALF, source=50), replace(HALF, source=7), replace(HALF, is_done=True)])
def test_where_nothing_waits_nothing_stalls_and_the_next_message_has_a_minute(standing: SessionStanding) -> None:
    judge = progress().judge

    assert [judge(standing, now) for now in (0.0, 1000.0, 2000.0)] == [None] * 3
    assert [judge(HALF, now) is None for now in (2030.0, 2059.0, 2060.0)] == [True, True, False]


def test_what_is_received_and_not_archived_stalls_after_its_segment_had_to_close() -> None:
    judge = progress().judge
    received = SessionStanding(count=50, received=50, archived=10, source=50)

    assert [judge(received, now) for now in (0.0, 300.0, 359.0)] == [None] * 3
    stall = judge(replace(received, count=60, received=60, source=60), 360.0)
    assert stall is not None
    assert (stall.pending, stall.heals) == ("sequences 11..60 are received and not archived", False)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=30))
def test_a_chain_that_archives_at_each_check_never_stalls(steps: list[tuple[int, int, bool]]) -> None:
    judge = progress().judge
    archived = 0
    for number, (more, behind, asks) in enumerate(steps):
        archived += 1 + more
        standing = SessionStanding(archived, archived + behind, archived, archived + behind + more, asks)
        assert judge(standing, number * 59.0) is None


# How long the source keeps it


@pytest.mark.parametrize(
    ("config", "limits"),
    [
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
