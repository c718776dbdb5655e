"""The open segment: its closing, its coverage, its ledger; and the fold of a sampled session that reads again."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.archive.columns import Columns
from common.archive.segment import Reason
from common.sequences import SequenceRange
from common.settings.egress import SegmentSettings
from egress import builder as building
from egress.advisories.advisory import Advisory, AdvisoryEvent
from egress.builder import (
    CODE_SAMPLED_OUT,
    CODE_TOO_OLD,
    REASON_BY_CODE,
    ClosedBy,
    Emitted,
    MessageBatch,
    Piece,
    SegmentBuilder,
    ledger_of,
    unread,
)
from egress.memory import MemoryBudget
from egress.partition import Position
from egress.sampling.filters import AdvisoryTracker, FeedFilter, SamplingStage
from egress.sampling.sampler import SampledBatch
from tests.support.basics import is_gapless
from tests.support.clock import ManualClock
from tests.support.segments import columns_of


def sifted(sequences: Iterable[int], *, kept: set[int], code: int = CODE_SAMPLED_OUT) -> MessageBatch:
    examined = columns_of(sequences)
    selected = [s in kept for s in examined.sequences]
    codes = bytes(0 if each else code for each in selected)
    return MessageBatch(examined, codes, examined.select(selected, [f"k{s}" for s in examined.sequences]))


class Bench:
    """A builder, its clock and the pieces that it emitted."""

    def __init__(self, *, first: int = 1, until: int | None = None, sampled: bool = False, **closing: float) -> None:
        self.clock = ManualClock()
        self.emitted: list[Emitted] = []
        self.account = MemoryBudget(1 << 30).account(lambda: None)
        limits: dict[str, float] = {"max_messages": 1_000_000, "max_size": 1 << 30, "max_age": 60.0, **closing}
        given = SegmentSettings.model_construct(**limits)  # type: ignore[arg-type]
        position = Position(first, until)
        self.wakes, emit = list[None](), self.emitted.append
        callbacks: Any = {"sampled": sampled, "on_due": lambda: self.wakes.append(None)}
        self.builder = SegmentBuilder(given, self.clock, self.account, emit, position, **callbacks)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.builder.tick()

    @property
    def pieces(self) -> list[Piece]:
        return [item for item in self.emitted if isinstance(item, Piece)]

    def segments(self) -> list[tuple[SequenceRange, list[int], ClosedBy]]:
        """Return coverage, rows and cause of each closed segment."""
        found, pieces = [], []
        for item in self.emitted:
            if isinstance(item, Piece):
                pieces.append(item)
                continue
            coverage = SequenceRange(pieces[0].coverage.first, pieces[-1].coverage.last)
            found.append((coverage, [s for piece in pieces for s in piece.rows.sequences], item))
            pieces = []
        return found


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=40), st.integers(1, 5))
def test_bytes_that_are_left_out_count_by_reason_in_the_pieces_of_their_segment(
    received: list[tuple[int, int]], most: int
) -> None:
    codes = bytes({1: CODE_TOO_OLD, 2: CODE_SAMPLED_OUT}.get(code, 0) for code, _ in received)
    examined = columns_of(range(1, len(received) + 1))
    examined.payloads[:] = [bytes(size) for _, size in received]
    bench = Bench(max_messages=most)
    bench.builder.add_batch(MessageBatch(examined, codes, examined.select([not code for code in codes])))
    bench.builder.close(ClosedBy.DRAIN)
    for piece in bench.pieces:
        wanted = Counter[Reason]()
        for sequence, code in zip(piece.examined, piece.codes, strict=True):
            if code:
                wanted[REASON_BY_CODE[code]] += 1 + received[sequence - 1][1]
        assert piece.left_out == wanted


def test_a_session_wakes_when_a_segment_opens_and_when_a_piece_has_gaps() -> None:
    bench = Bench(max_age=60)
    for sequence, left in ((1, 60), (2, 59)):
        bench.builder.add_messages(columns_of([sequence]))
        assert (len(bench.wakes), bench.builder.due_in) == (1, left)
        bench.pass_time(1)
    bench.builder.skip_to(5)
    assert (len(bench.wakes), bench.builder.due_in) == (2, 3)
    bench.pass_time(3)
    assert ([piece.coverage for piece in bench.pieces], bench.builder.due_in) == ([SequenceRange(1, 5)], 55)
    bench.builder.close(ClosedBy.FLUSH)
    bench.builder.add_messages(columns_of([6]))
    assert (len(bench.wakes), bench.builder.due_in) == (3, 60)


def test_what_holds_no_row_still_becomes_a_segment_and_what_covers_nothing_none() -> None:
    bench = Bench(first=11)
    bench.builder.skip_to(10)
    bench.builder.close(ClosedBy.DRAIN)
    bench.pass_time(600)
    assert (bench.emitted, bench.builder.due_in) == ([], math.inf)
    bench.builder.add_batch(sifted([11, 12, 40], kept=set()))
    bench.pass_time(60)
    assert (bench.segments(), bench.pieces[0].last.sequence) == ([(SequenceRange(11, 40), [], ClosedBy.AGE)], 40)


def test_rows_of_a_sampled_feed_have_their_sample_keys() -> None:
    bench = Bench(sampled=True, max_messages=2)
    bench.builder.add_batch(sifted(range(1, 9), kept={1, 4, 6}))
    bench.builder.close(ClosedBy.DRAIN)
    assert [piece.rows.sample_keys for piece in bench.pieces] == [["k1", "k4"], ["k6"]]


def test_what_is_left_out_is_charged_too_and_handed_over_in_bounded_pieces() -> None:
    """Sample out 99 %: neither the lists nor the queue of pieces may grow without a charge to the budget."""
    bench = Bench()
    for first in range(1, 100_001, 1_000):
        bench.builder.add_batch(sifted(range(first, first + 1_000), kept=set(range(first, first + 10))))
    bench.builder.close(ClosedBy.DRAIN)
    assert max(len(piece.examined) for piece in bench.pieces) < building.PIECE_MESSAGES + 1_000
    assert bench.account.used == sum(piece.memory for piece in bench.pieces) > 99_000 * 40


DISTANCES = st.lists(st.integers(1, 4), min_size=1, max_size=30)
STEP = st.one_of(
    *(st.tuples(st.just(what), DISTANCES) for what in ("messages", "some")),
    st.tuples(st.just("passed"), st.integers(0, 20)),
    st.tuples(st.just("time"), st.integers(1, 40)),
)


@given(st.lists(STEP, max_size=30), st.integers(1, 9), st.integers(20, 200), st.one_of(st.none(), st.integers(1, 60)))
@settings(max_examples=150)
def test_segments_account_for_everything_once(
    steps: list[tuple[str, object]], max_messages: int, max_size: int, until: int | None
) -> None:
    """Check that coverages are gapless from the first sequence on and hold every message once, and no segment is
    too full."""
    bench = Bench(max_messages=max_messages, max_size=max_size, until=until)
    sent, received, reached = [], [], 0
    for what, value in steps:
        if what in ("messages", "some"):
            batch = []
            for distance in value:  # type: ignore[attr-defined]
                reached += distance
                batch.append(reached)
            kept = {s for s in batch if what == "messages" or s % 3 == 0}
            bench.builder.add_batch(sifted(batch, kept=kept))
            sent += sorted(kept)
            received += batch
        elif what == "passed":
            reached += value  # type: ignore[operator]
            bench.builder.skip_to(reached)
        else:
            bench.pass_time(value)  # type: ignore[arg-type]
    bench.builder.close(ClosedBy.DRAIN)
    segments, last = bench.segments(), reached if until is None else min(reached, until)
    assert [s for _, rows, _ in segments for s in rows] == [s for s in sent if s <= last]
    assert is_gapless(coverage for coverage, _, _ in segments)
    if last:
        assert (segments[0][0].first, segments[-1][0].last) == (1, last)
    for coverage, rows, reason in segments:  # 11 bytes each, the subject included
        assert all(s in coverage for s in rows)
        assert len(rows) <= max_messages
        assert 11 * (len(rows) - 1) < max_size
        assert (reason is ClosedBy.MESSAGES) is (len(rows) == max_messages), "closed with the message that fills it"
        assert reason in (ClosedBy.MESSAGES, ClosedBy.HOLE) or (reason is ClosedBy.SIZE) is (11 * len(rows) >= max_size)
    assert bench.builder.is_done is (until is not None and reached >= until)
    assert not bench.builder.is_done or segments[-1][2] not in (ClosedBy.AGE, ClosedBy.DRAIN)
    ledgers = [ledger_of(piece, 1, filtered=False).counts for piece in bench.pieces]
    within = [s for s in received if s <= last]
    counts = {reason: sum(ledger.get(reason, 0) for ledger in ledgers) for reason in Reason}
    assert counts[Reason.SAMPLED_OUT] == len(within) - len([s for s in sent if s <= last])
    assert counts[Reason.DELETED] == last - len(within)


def piece(coverage: SequenceRange, sequences: list[int]) -> Piece:
    return Piece(coverage, columns_of(sequences), sequences, None, 0, 0)


@given(st.sets(st.integers(1, 30)), st.integers(1, 40))
@settings(max_examples=150)
def test_the_ledger_agrees_with_checking_every_sequence(received: set[int], source_first: int) -> None:
    found = piece(SequenceRange(1, 30), sorted(received))
    missing = [s for s in range(1, 31) if s not in received]
    gone = sum(s < source_first for s in missing)
    assert building.gone_before_read(found, source_first) == gone
    for filtered, reason in ((False, Reason.DELETED), (True, Reason.NOT_MATCHED)):
        ledger = ledger_of(found, source_first, filtered=filtered)
        assert ledger.counts.get(Reason.GONE_BEFORE_READ, 0) == gone
        assert (ledger.counts.get(reason, 0), ledger.total() + len(received)) == (len(missing) - gone, 30)
    below = [s for s in missing if s < source_first]
    assert unread(found, source_first) == (SequenceRange(below[0], below[-1]) if below else None)


def test_a_batch_that_fails_halfway_is_never_closed_as_if_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emit neither the appended half, nor the messages before it with a coverage that includes missing ones."""
    bench, real = Bench(max_messages=3), Columns.extend
    bench.builder.add_messages(columns_of([1]))

    def fails_halfway(rows: Columns, more: Columns) -> None:
        if 6 not in more.sequences:
            return real(rows, more)
        rows.sequences.extend(more.sequences)
        raise MemoryError

    monkeypatch.setattr(Columns, "extend", fails_halfway)
    with pytest.raises(MemoryError):
        bench.builder.add_messages(columns_of([2, 3, 4, 5, 6, 7]))
    monkeypatch.undo()
    bench.pass_time(3600)
    bench.builder.close(ClosedBy.RESET)
    assert [(piece.coverage, piece.rows.sequences) for piece in bench.pieces] == [(SequenceRange(1, 3), [1, 2, 3])]
    for call in (lambda: bench.builder.skip_to(100), lambda: bench.builder.add_messages(columns_of([5]))):
        with pytest.raises(RuntimeError, match="after an error"):
            call()


def test_the_open_segment_shows_its_content_and_when_it_closes() -> None:
    bench = Bench(first=5, max_age=60.0, max_messages=1_000, max_size=1 << 20)
    assert bench.builder.open_segment is None
    bench.builder.add_batch(sifted([5, 6, 7, 9], kept={5, 6, 9}))
    bench.clock.advance(20)
    bench.builder.skip_to(12)
    found = bench.builder.open_segment
    assert (found.first, found.last, found.messages, found.size) == (5, 12, 3, 33)
    assert (found.age, found.due_in, found.as_dict()["max_size"]) == (20.0, 40.0, 1 << 20)
    bench.builder.close(ClosedBy.FLUSH)
    assert bench.builder.open_segment is None
    assert bench.segments() == [(SequenceRange(5, 12), [5, 6, 9], ClosedBy.FLUSH)]


RESTORED_SOURCES = [
    (1, {"deleted": 22}, None),
    (18, {"deleted": 20, "gone_before_read": 2}, SequenceRange(16, 17)),
    (22, {"deleted": 18, "gone_before_read": 4}, SequenceRange(16, 21)),
    (40, {"deleted": 10, "gone_before_read": 12}, SequenceRange(16, 30)),
]


@pytest.mark.parametrize(("source_first", "counts", "gone"), RESTORED_SOURCES)
def test_sequences_that_a_restore_left_out_are_deleted_and_what_went_behind_them_is_gone(
    source_first: int, counts: dict[str, int], gone: SequenceRange | None
) -> None:
    found = piece(SequenceRange(6, 30), [18, 19, 22])
    assert ledger_of(found, source_first, filtered=False, restored=16).to_json() == counts
    assert unread(found, source_first, restored=16) == gone


SECOND = 1_000_000_000


class Stage:
    """An intake; its own sampler, which keeps everything and reports every message as new; and its own outbox."""

    has_room, watermark_ns = True, 0

    def __init__(
        self, read_from: int, position: Position, again: tuple[int, ...] = (), *, newest: int = 0, keep: int = 0
    ) -> None:
        self.emitted: list[Emitted] = []
        self.folded: list[int] = []
        self.reported_again, self.reported_new = list[str](), list[str]()
        self.settled = 0
        self.written_from: list[tuple[int, bool]] = []
        self.batches_at: list[int] = []
        account = MemoryBudget(1 << 30).account(lambda: None)
        closing = SegmentSettings.model_construct(max_messages=1_000, max_size=1 << 30, max_age=60.0)
        self.builder = SegmentBuilder(closing, ManualClock(), account, self.emitted.append, position, sampled=True)
        feed_filter = FeedFilter("here", max_age_ns=keep * SECOND, sampler=self)
        observe = feed_filter.observe_source_time
        self.intake = SamplingStage(
            self.builder,
            feed_filter,
            AdvisoryTracker(self, self, *(again or (position.first - 1, 0))),
            position,
            read_from=read_from,
            on_writing=lambda: self.written_from.append((self.intake.last_sequence + 1, observe(newest * SECOND))),
            on_batch=lambda: self.batches_at.append(self.intake.last_sequence + 1),
            on_sampled=lambda _: None,
        )
        self.intake.begin()

    def fold(self, columns: Columns) -> SampledBatch:
        self.folded += columns.sequences
        self.watermark_ns = columns.timestamps_ns[-1]
        count = len(columns.sequences)
        found = [Advisory(AdvisoryEvent.NEW, str(s), 0, 0) for s in columns.sequences]
        return SampledBatch(bytearray(b"\1" * count), ["k"] * count, 0, 0, found)

    def advance(self, now_ns: int) -> list[Advisory]:
        return [Advisory(AdvisoryEvent.TIMEOUT, f"at {now_ns // SECOND}", 0, now_ns)]

    def enqueue(self, advisories: list[Advisory], *, may_be_sent: bool) -> None:
        (self.reported_again if may_be_sent else self.reported_new).extend(each.value for each in advisories)

    def finish_reread(self) -> None:
        assert not self.reported_new
        self.settled += 1

    def read(self, *batches: list[int]) -> None:
        for batch in batches:
            self.intake.add_messages(columns_of(batch))

    def rows(self) -> list[int]:
        self.builder.close(ClosedBy.DRAIN)
        return [s for piece in self.emitted if isinstance(piece, Piece) for s in piece.rows.sequences]


def test_archived_messages_are_folded_only_and_each_written_batch_is_announced_before() -> None:
    bench = Stage(5, Position(8))
    assert bench.written_from == []
    bench.read([5, 6], [7, 8, 9])
    assert (bench.folded, bench.rows()) == ([5, 6, 7, 8, 9], [8, 9])
    assert (bench.reported_again, bench.reported_new) == (["5", "6", "7", "at 7"], ["8", "9"])
    assert (bench.settled, bench.written_from) == (1, [(8, False)])
    bench.intake.skip_to(12)
    bench.read([14])
    assert bench.batches_at == [8, 13]


def test_with_nothing_to_read_again_writing_begins_at_once() -> None:
    bench = Stage(8, Position(8))
    assert (bench.written_from, bench.settled) == ([(8, False)], 1)
    bench.read([8])
    assert (bench.reported_again[1:], bench.reported_new, len(bench.written_from)) == ([], ["8"], 1)


def test_what_is_archived_and_gone_from_the_source_ends_reading_again_too() -> None:
    by_heartbeat, by_message = Stage(5, Position(8)), Stage(5, Position(8))
    by_heartbeat.intake.skip_to(20)
    by_message.read([12])
    assert by_heartbeat.written_from == by_message.written_from == [(8, False)]
    assert (by_heartbeat.intake.last_sequence, by_message.intake.last_sequence, by_message.rows()) == (20, 12, [12])


def test_what_a_crashed_session_may_have_read_is_in_doubt_up_to_the_sources_end_and_time() -> None:
    bench = Stage(5, Position(8), (10, 30 * SECOND))
    bench.read([6, 7, 8])
    assert (bench.settled, bench.rows()) == (0, [8])
    bench.read([9, 10])
    assert bench.reported_again == ["6", "7", "8", "9", "10", "at 30"]
    bench.read([11])
    assert (bench.reported_new, bench.settled) == (["11"], 1)


def test_the_newest_message_of_the_source_counts_only_from_where_messages_are_written() -> None:
    bench = Stage(5, Position(8), newest=100, keep=91)
    bench.read([5, 6, 7, 8, 9, 10])
    assert (bench.folded, bench.rows(), bench.written_from) == ([5, 6, 7, 9, 10], [9, 10], [(8, True)])


def test_a_hole_is_filled_and_nothing_behind_it_is_folded() -> None:
    bench = Stage(5, Position(8, 10), (50, 0))
    bench.read([6, 8, 9, 12, 13], [14])
    bench.intake.skip_to(40)
    assert (bench.folded, bench.rows(), bench.intake.last_sequence) == ([6, 8, 9], [8, 9], 10)
    coverages = [each.coverage for each in bench.emitted if isinstance(each, Piece)]
    assert (coverages, bench.builder.is_done) == ([SequenceRange(8, 10)], True)
