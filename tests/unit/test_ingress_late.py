"""What becomes of a hole: who decided, how long it has waited, and by whose clock."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import OutcomeUnknown, Refused, Unavailable
from common.objects.port import ObjectInfo
from common.segments.documents import AcceptedGap, accepted_part
from common.segments.keys import Layout
from common.sequences import SequenceRange
from common.settings.ingress import SourceSettings
from ingress.chains.plan import ChainPlan, Phase, decide
from ingress.chains.search import StoreClock
from tests.support.clock import ManualClock

HALT, SKIP = (
    SourceSettings(site=("us-east",), feed=("NODES",), lost_segment_timeout=100.0, on_lost=on_lost)
    for on_lost in ("halt", "skip")
)


def gap(first: int, last: int, by: str = "ops") -> AcceptedGap:
    return AcceptedGap(SequenceRange(first, last), "why", by)


def late(first: int = 11, last: int = 20, since: float | None = 1000.0, phase: Phase = Phase.LATE) -> ChainPlan:
    return ChainPlan(phase, (), SequenceRange(first, last), since)


def test_of_a_hole_the_leading_part_is_accepted_that_gaps_cover_without_a_break() -> None:
    def accepted(*gaps: tuple[int, int]) -> SequenceRange | None:
        return accepted_part(SequenceRange(11, 20), [SequenceRange(*each) for each in gaps])

    assert [accepted(), accepted((12, 20)), accepted((1, 10))] == [None] * 3
    assert accepted((11, 15)) == accepted((1, 15)) == SequenceRange(11, 15)
    assert accepted((1, 15), (16, 40)) == SequenceRange(11, 20)
    assert accepted((14, 30), (1, 12)) == SequenceRange(11, 12)
    assert accepted((12, 13), (11, 11), (1, 5)) == SequenceRange(11, 13)


def test_a_hole_is_late_until_the_time_out_and_lost_then_but_for_damage_and_what_nothing_stands_behind() -> None:
    assert decide(late(), [], 1099.9, SKIP) is None
    halted = decide(late(), [], 1100.0, HALT)
    assert halted is not None
    assert halted.halts
    lost = decide(late(), [], 1100.0, SKIP)
    assert lost is not None
    assert (lost.halts, lost.part, lost.why) == (False, SequenceRange(11, 20), "no segment within 1m40s")
    assert decide(late(phase=Phase.DAMAGED), [], 10**9, SKIP) is None
    assert decide(late(since=None), [], 10**9, SKIP) is None


@pytest.mark.parametrize("phase", [Phase.LATE, Phase.DAMAGED])
def test_what_is_accepted_is_given_up_at_once_and_no_more_than_that(phase: Phase) -> None:
    decided = decide(late(phase=phase), [gap(9, 14)], 0.0, HALT)

    assert decided is not None
    assert (decided.halts, decided.part, decided.why) == (False, SequenceRange(11, 14), "accepted by ops: why")


def test_a_gap_reads_back_as_it_was_written_and_refuses_everything_else() -> None:
    written = AcceptedGap(SequenceRange(5, 9), "ä note", "ops@host", "2026-01-01T00:00:00Z")

    assert AcceptedGap.from_json(written.to_json()) == written
    for spoiled in (b"", b"{}", b"[]", b"null", written.to_json().replace(b'"first":5', b'"first":50')):
        with pytest.raises(ValueError):
            AcceptedGap.from_json(spoiled)
    with pytest.raises(ValueError, match="format_version: expected 1, found 2"):
        AcceptedGap.from_json(written.to_json().replace(b'version":1', b'version":2'))
    with pytest.raises(ValueError, match="note: expected at most"):
        AcceptedGap(SequenceRange(1, 2), "x" * 1001)


@pytest.mark.parametrize("at", ["yesterday", "2026-01-01", "2026-01-01T00:00:00", "2026-13-01T00:00:00Z"])
def test_a_gap_whose_time_is_none_is_refused(at: str) -> None:
    good = AcceptedGap(SequenceRange(1, 2), at="2026-01-01T00:00:00.123456789Z")

    assert AcceptedGap.from_json(good.to_json()) == good
    assert AcceptedGap(SequenceRange(1, 2)).at == ""
    with pytest.raises(ValueError, match="expected a time with its zone"):
        AcceptedGap.from_json(good.to_json().replace(good.at.encode(), at.encode()))


def test_the_key_of_a_gap_tells_its_range_and_gaps_that_end_before_a_position_are_not_listed() -> None:
    layout, prefix = Layout("p"), "p/_floe/x/gaps/"
    key = layout.gap(prefix, SequenceRange(5, 9))

    assert key == f"{prefix}{9:020d}-{5:020d}.json"
    assert layout.parse_gap(prefix, key) == SequenceRange(5, 9)
    assert layout.gaps_after(prefix, 9) < key < layout.gaps_after(prefix, 10)
    for foreign in (key + "x", "q" + key, f"{prefix}{5:020d}-{9:020d}.json", prefix):
        assert layout.parse_gap(prefix, foreign) is None


# The store's clock


class Objects:
    """A store whose clock is what the test says; `error`: what a put raises."""

    def __init__(self) -> None:
        self.time, self.puts, self.error = 5000.0, 0, None

    def put(self, key: str, body: bytes) -> None:
        self.puts += 1
        if self.error:
            raise self.error

    def head(self, key: str) -> ObjectInfo | None:
        return ObjectInfo(key, 0, self.time, "e")


def test_the_stores_clock_is_asked_once_a_minute_and_never_the_hosts() -> None:
    objects, clock = Objects(), ManualClock(now=1e12)
    store_clock = StoreClock(objects, "k", clock)  # type: ignore[arg-type]

    assert store_clock.now(0.0) == 5000.0
    clock.advance(30)
    assert store_clock.now(0.0) == 5030.0
    assert objects.puts == 1
    clock.advance(31)
    objects.time = 7000.0
    assert store_clock.now(0.0) == 7000.0


def test_where_ingress_may_not_write_nothing_is_later_than_what_is_there() -> None:
    objects = Objects()
    objects.error = Refused("no")
    store_clock = StoreClock(objects, "k", ManualClock())  # type: ignore[arg-type]

    assert store_clock.now(123.0) == 123.0
    assert store_clock.stamp() == ManualClock().now()
    objects.error = OutcomeUnknown("lost")
    with pytest.raises(Unavailable):
        store_clock.now(123.0)


def test_threads_that_ask_for_the_stores_clock_at_once_ask_the_store_once() -> None:
    class Slow(Objects):
        def put(self, key: str, body: bytes) -> None:
            super().put(key, body)
            time.sleep(0.05)

    objects = Slow()
    store_clock = StoreClock(objects, "k", ManualClock())  # type: ignore[arg-type]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(store_clock.now, [0.0] * 3)) == [5000.0] * 3
    assert objects.puts == 1
