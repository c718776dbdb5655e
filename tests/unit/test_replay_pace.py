"""How fast a replay goes, how far it is, and what a request means: pure parts of a replay."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pyarrow as pa
import pytest

from common.chain import Chain
from common.errors import UsageError
from common.segments.keys import SegmentName
from common.segments.segment import Message
from common.sequences import SequenceRange
from common.tasks import Stop
from ingress.checkpoint import IntentPiece
from ingress.publishers.publisher import Outcome
from ingress.replay.drill import Differences, Trail, compare
from ingress.replay.output import progress_line, standing
from ingress.replay.pace import ByteRate, Head, Interrupted, MessageRate, Pace, PacedPublisher, pace_of
from ingress.replay.plan import ChainRange, stretches_of
from ingress.replay.request import Request
from ingress.rows.rows import Block, PreparedBatch, Rows
from tests.support.clock import ManualClock
from tests.support.segments import CHAIN, message

SECOND = 1_000_000_000


def sent_at(pace: Pace, sizes: list[int]) -> list[float]:
    """When each message may go, asked as a publisher asks."""
    now, at = 0.0, list[float]()
    while len(at) < len(sizes):
        count, wait = pace.allowed(now, sizes[len(at) :])
        assert count or 0 < wait <= 0.5
        at += [now] * count
        now += wait
    return at


@pytest.mark.parametrize("rate", [1, 900])
def test_messages_a_second_are_kept(rate: int) -> None:
    count = rate * 4
    at = sent_at(MessageRate(rate), [1] * count)
    assert 3.0 <= at[-1] <= 4.3
    for begin in range(int(at[-1])):
        assert sum(begin <= moment < begin + 1 for moment in at) <= rate * 1.3 + 2


def test_bytes_a_second_are_kept_also_by_one_that_is_larger_than_a_second() -> None:
    at = sent_at(ByteRate(1000), [10, 5000, 10, 10, 990, 990, 10, 1000, 1000])
    assert 7.5 <= at[-1] <= 9.5


def test_what_the_option_says() -> None:
    assert [type(pace_of(text)) for text in ("", "5000/s", "20M/s")] == [type(None), MessageRate, ByteRate]
    for rate in ("5000", "0/s", "x/s"):
        with pytest.raises(UsageError):
            pace_of(rate)


def test_a_request_is_told_by_what_it_means_and_its_prefix_is_text_and_no_template() -> None:
    one = Request("s", "F", "T", incarnation=0, partition=0, subjects=("b", "a"), since=90.0)
    assert Request.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert one.digest == Request("s", "F", "T", 0, 0, subjects=("a", "b"), since=90.0).digest
    assert one.digest != Request("s", "F", "T", 0, subjects=("a", "b"), since=90.0).digest
    assert "--incarnation 0 --partition 0 --from-time 1m30s --subject b --subject a" in one.words()
    assert Request("s", "F", "T", since=60.0).moments(100.0) == (40 * SECOND, None)
    with pytest.raises(UsageError):
        Request("s", "F", "T", since=60.0, to_time="1970-01-01T00:00:30Z").moments(100.0)
    for prefix in ("{site}", "a.{x", "a}"):
        with pytest.raises(UsageError, match="--subject-prefix: expected the text itself, without braces"):
            Request("s", "F", "T", prefix=prefix)


def test_holes_are_split_where_they_are_accepted_in_part() -> None:
    gaps = [SequenceRange(3, 4), SequenceRange(5, 6)]
    _, holes, accepted = stretches_of([], SequenceRange(1, 10), gaps)
    assert holes == [SequenceRange(1, 2), SequenceRange(3, 6), SequenceRange(7, 10)]
    assert accepted == [SequenceRange(3, 6)]


def test_progress_says_how_long_it_takes() -> None:
    chain = Chain("s", "F")
    ranges = [ChainRange(chain, SequenceRange(101, 200))]
    begun, now = standing(ranges, {chain: 101}, 0, 0), standing(ranges, {chain: 151}, 40, 12_000)
    assert progress_line(now, begun, 10.0) == " 50%  40 messages, 11.7 KiB, 4 msg/s, 10 s left, s/F/0000/0 at 150"
    assert standing([], {}, 0, 0).share == 1.0


async def test_a_paced_publisher_sends_exactly_the_rows_and_stops_when_told() -> None:
    whole, payloads = SequenceRange(1, 20), pa.array([b"x"] * 20, pa.binary())
    ends = [10 * (n + 1) for n in range(20)]
    times, line = [SECOND] * 20, b"Floe-Source: s F 0000 0 "
    batch = PreparedBatch([*range(1, 21)], times, [b"a"] * 20, line, None, payloads, ends)
    piece = IntentPiece(SegmentName(Chain("s", "F"), 0, whole, "0" * 16), whole, 20)
    rows, stop, spans = Rows([Block(piece, batch)]), Stop(), list[tuple[int, int]]()

    async def publish(head: Head, _base: int, stored: int) -> Outcome:
        spans.append((stored, head.count))
        return Outcome(head.count)

    paced = PacedPublisher(SimpleNamespace(name="inner", publish=publish), MessageRate(1000), ManualClock(), stop)
    outcome = await paced.publish(rows, 0, 0)
    assert spans == [(0, outcome.stored)]
    stop.set()
    with pytest.raises(Interrupted):
        await paced.publish(rows, 0, 5)


# A drill: what came back is compared


def trail_of(*rows: Message) -> Trail:
    found = Trail()
    for row in rows:
        found.add(row)
    return found


def test_the_comparison_tells_apart_what_can_happen() -> None:
    one, two, three, four = (message(s) for s in range(1, 5))
    expected = trail_of(one, two, three)
    for rows, told in (
        ((one, two, three), {}),
        ((one, three), {"lost": 1}),
        ((one, two, two, three), {"repeated": 1}),
        ((two, one, three), {"out_of_order": 1}),
        ((one, two, three, four), {"unexpected": 1}),
        *(
            ((one, two, message(3, **other)), {"altered": 1, "examples": ("NODES 3: altered",)})
            for other in ({"payload": b"else"}, {"headers": b""}, {"subject": b"nodes.two"}, {"timestamp_ns": 1})
        ),
    ):
        found = compare(expected, trail_of(*rows), CHAIN.feed)
        wanted = {"expected": 3, "found": len(rows), "examples": found.examples, **told}
        assert (found, found.none) == (Differences(**wanted), not told)
    summed = compare(expected, trail_of(one)).plus(compare(expected, trail_of(one, one, two, three)))
    assert (summed.expected, summed.lost, summed.repeated) == (6, 2, 1)
