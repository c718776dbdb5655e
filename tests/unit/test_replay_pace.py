"""Pure parts of a replay: pace, progress, request, and the comparison of a drill."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from common.archive.keys import SegmentName
from common.chain import Chain
from common.errors import LeaseLost, UsageError
from common.sequences import SequenceRange
from common.tasks import Stop
from ingress.checkpoint import IntentPiece
from ingress.publishers.publisher import Outcome
from ingress.recovery.guard import run_with_renewal
from ingress.recovery.ranges import ChainRange, ReplayProgress, split_range
from ingress.recovery.replay import Interrupted, PacedPublisher
from ingress.recovery.request import Pace, ReplayRequest, pace_of
from ingress.rows.rows import Block, PreparedBatch, Rows
from tests.support.clock import ManualClock

SECOND = 1_000_000_000


def sent_at(pace: Pace, sizes: list[int]) -> list[float]:
    """Return the time at which each message may be sent, asked as a publisher asks."""
    now, at = 0.0, list[float]()
    while len(at) < len(sizes):
        count, wait = pace.admit(now, sizes[len(at) :])
        assert count or 0 < wait <= 0.5
        at += [now] * count
        now += wait
    return at


@pytest.mark.parametrize("rate", [1, 900])
def test_messages_a_second_are_kept(rate: int) -> None:
    count = rate * 4
    at = sent_at(Pace(rate), [1] * count)
    assert 3.0 <= at[-1] <= 4.3
    for begin in range(int(at[-1])):
        assert sum(begin <= moment < begin + 1 for moment in at) <= rate * 1.3 + 2


def test_bytes_a_second_are_kept_also_by_one_that_is_larger_than_a_second() -> None:
    assert 7.5 <= sent_at(Pace(1000, counts_bytes=True), [10, 5000, 10, 10, 990, 990, 10, 1000, 1000])[-1] <= 9.5


def test_values_of_the_option() -> None:
    assert [pace_of(text) for text in ("", "5000/s", "20M/s")] == [None, Pace(5000), Pace(20 << 20, counts_bytes=True)]
    for rate in ("5000", "0/s", "x/s"):
        with pytest.raises(UsageError):
            pace_of(rate)


def test_a_request_is_known_by_its_meaning_and_its_prefix_is_text_and_no_template() -> None:
    one = ReplayRequest("s", "F", "T", incarnation=0, partition=0, subjects=("b", "a"), since=90.0)
    assert ReplayRequest.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert one.digest == ReplayRequest("s", "F", "T", 0, 0, subjects=("a", "b"), since=90.0).digest
    assert one.digest != ReplayRequest("s", "F", "T", 0, subjects=("a", "b"), since=90.0).digest
    assert "s/F/0000/0 --target T --since 1m30s --subject b --subject a" in one.arguments()
    assert ReplayRequest("s", "F", "T", since=60.0).moments(100.0) == (40 * SECOND, None)
    with pytest.raises(UsageError):
        ReplayRequest("s", "F", "T", since=60.0, to_time="1970-01-01T00:00:30Z").moments(100.0)
    for prefix in ("{site}", "a.{x", "a}", "a.*", "a b", "a..b", "."):
        with pytest.raises(UsageError, match="--subject-prefix: expected a subject without wildcards and braces"):
            ReplayRequest("s", "F", "T", prefix=prefix)


def test_holes_are_split_where_they_are_accepted_in_part() -> None:
    _, holes, accepted = split_range([], SequenceRange(1, 10), [SequenceRange(3, 4), SequenceRange(5, 6)])
    assert holes == [SequenceRange(1, 2), SequenceRange(3, 6), SequenceRange(7, 10)]
    assert accepted == [SequenceRange(3, 6)]


def test_progress_has_the_time_left() -> None:
    chain = Chain("s", "F")
    ranges = [ChainRange(chain, SequenceRange(101, 200))]
    line = ReplayProgress(ranges, {chain: 101}, 0).line({chain: 151}, 40, 12_000, 10.0)
    assert line == " 50%  40 messages, 11.7 KiB, 4 msg/s, 10 s left, s/F/0000/0 at 150"
    assert ReplayProgress([], {}, 0).line({}, 0, 0, 0.0).startswith("100%")


async def test_a_paced_publisher_sends_exactly_the_rows_and_stops_if_asked() -> None:
    whole, payloads = SequenceRange(1, 20), pa.array([b"x"] * 20, pa.binary())
    ends = [10 * (n + 1) for n in range(20)]
    times, line = [SECOND] * 20, b"Floe-Source: s F 0000 0 "
    batch = PreparedBatch([*range(1, 21)], times, [b"a"] * 20, line, None, payloads, ends)
    piece = IntentPiece(SegmentName(Chain("s", "F"), 0, whole, "0" * 16), whole, 20)
    rows, stop, spans = Rows([Block(piece, batch)]), Stop(), list[tuple[int, int]]()

    async def publish(head: Rows, _base: int, stored: int) -> Outcome:
        spans.append((stored, head.count))
        return Outcome(head.count)

    paced = PacedPublisher(SimpleNamespace(name="inner", publish=publish), Pace(1000), ManualClock(), stop)
    outcome = await paced.publish(rows, 0, 0)
    assert spans == [(0, outcome.stored)]
    stop.set()
    with pytest.raises(Interrupted):
        await paced.publish(rows, 0, 5)


# The lease of a drill


async def test_a_drill_ends_with_its_lease_and_a_restore_checks_its_lease_itself() -> None:
    lease: Any = SimpleNamespace(run_renewals=lambda: asyncio.sleep(0))  # it is lost at once

    async def work() -> str:
        for _ in range(10):
            await asyncio.sleep(0)
        return "done"

    assert await run_with_renewal(lease, work()) == "done"
    with pytest.raises(LeaseLost):
        await run_with_renewal(lease, work(), LeaseLost("drill: its lease was lost"))
