"""What a sampled session folds only, what it writes, and when former finds are told from new ones."""

from __future__ import annotations

from common.segments.columns import Columns
from common.sequences import SequenceRange
from common.settings.egress import SegmentSettings
from egress.advisories.advisory import Advisory, Event
from egress.builder import Builder, Close, Emitted, Piece
from egress.memory import MemoryBudget
from egress.partition import Position
from egress.sampling.filters import PreFilter, SampledStretch, SamplingStage, Tracking
from egress.sampling.sampler import SampledBatch
from tests.support.clock import ManualClock
from tests.support.segments import columns_of

SECOND = 1_000_000_000


class Bench:
    """An intake; its own sampler, which keeps everything and tells that every message is new; and its own outbox."""

    has_room, watermark_ns = True, 0

    def __init__(self, stretch: SampledStretch, again: tuple[int, int] | None = None, *, keep: int = 0) -> None:
        self.emitted: list[Emitted] = []
        self.folded: list[int] = []
        self.told_again, self.told_new = list[str](), list[str]()
        self.settled = 0
        self.written_from: list[tuple[int, bool]] = []
        self.batches_at: list[int] = []
        account = MemoryBudget(1 << 30).account(lambda: None)
        closing = SegmentSettings.model_construct(max_messages=1_000, max_size=1 << 30, max_age=60.0)
        position = Position(stretch.write_from, stretch.until)
        self.builder = Builder(closing, ManualClock(), account, self.emitted.append, position, sampled=True)
        self.intake = SamplingStage(
            self.builder,
            PreFilter("here", keep_ns=keep * SECOND, sampler=self),
            Tracking(self, self, *(again or (stretch.write_from - 1, 0))),
            stretch,
            on_writing=lambda is_news: self.written_from.append((self.intake.end + 1, is_news)),
            on_batch=lambda: self.batches_at.append(self.intake.end + 1),
            on_choices=lambda _: None,
        )
        self.intake.begin()

    def fold(self, columns: Columns) -> SampledBatch:
        self.folded += columns.sequences
        self.watermark_ns = columns.timestamps_ns[-1]
        count = len(columns.sequences)
        found = [Advisory(Event.NEW, str(s), 0, 0) for s in columns.sequences]
        return SampledBatch(bytearray(b"\1" * count), ["k"] * count, 0, 0, found)

    def advance(self, now_ns: int) -> list[Advisory]:
        return [Advisory(Event.TIMEOUT, f"at {now_ns // SECOND}", 0, now_ns)]

    def take(self, advisories: list[Advisory], *, again: bool) -> None:
        (self.told_again if again else self.told_new).extend(each.value for each in advisories)

    def settle(self) -> None:
        assert not self.told_new
        self.settled += 1

    def read(self, *batches: list[int]) -> None:
        for batch in batches:
            self.intake.messages(columns_of(batch))

    def rows(self) -> list[int]:
        self.builder.close(Close.DRAIN)
        return [s for piece in self.emitted if isinstance(piece, Piece) for s in piece.rows.sequences]


def test_what_is_archived_is_folded_and_not_written_and_each_written_batch_is_told_of_before() -> None:
    bench = Bench(SampledStretch(5, 8))
    assert bench.written_from == []
    bench.read([5, 6], [7, 8, 9])
    assert (bench.folded, bench.rows()) == ([5, 6, 7, 8, 9], [8, 9])
    assert (bench.told_again, bench.told_new) == (["5", "6", "7", "at 7"], ["8", "9"])
    assert (bench.settled, bench.written_from) == (1, [(8, False)])
    bench.intake.passed(12)
    bench.read([14])
    assert bench.batches_at == [8, 13]


def test_with_nothing_to_read_again_writing_begins_at_once() -> None:
    bench = Bench(SampledStretch(8, 8))
    assert (bench.written_from, bench.settled) == ([(8, False)], 1)
    bench.read([8])
    assert (bench.told_again[1:], bench.told_new, len(bench.written_from)) == ([], ["8"], 1)


def test_what_is_archived_and_gone_from_the_source_ends_reading_again_too() -> None:
    by_heartbeat, by_message = Bench(SampledStretch(5, 8)), Bench(SampledStretch(5, 8))
    by_heartbeat.intake.passed(20)
    by_message.read([12])
    assert by_heartbeat.written_from == by_message.written_from == [(8, False)]
    assert (by_heartbeat.intake.end, by_message.intake.end, by_message.rows()) == (20, 12, [12])


def test_what_a_crashed_session_may_have_read_is_in_doubt_up_to_the_sources_end_and_time() -> None:
    bench = Bench(SampledStretch(5, 8), (10, 30 * SECOND))
    bench.read([6, 7, 8])
    assert (bench.settled, bench.rows()) == (0, [8])
    bench.read([9, 10])
    assert bench.told_again == ["6", "7", "8", "9", "10", "at 30"]
    bench.read([11])
    assert (bench.told_new, bench.settled) == (["11"], 1)


def test_the_newest_message_of_the_source_counts_only_from_where_messages_are_written() -> None:
    bench = Bench(SampledStretch(5, 8, None, 100 * SECOND), keep=91)
    bench.read([5, 6, 7, 8, 9, 10])
    assert (bench.folded, bench.rows(), bench.written_from) == ([5, 6, 7, 9, 10], [9, 10], [(8, True)])


def test_a_hole_is_filled_and_nothing_behind_it_is_folded() -> None:
    bench = Bench(SampledStretch(5, 8, 10), (50, 0))
    bench.read([6, 8, 9, 12, 13], [14])
    bench.intake.passed(40)
    assert (bench.folded, bench.rows(), bench.intake.end) == ([6, 8, 9], [8, 9], 10)
    coverages = [each.coverage for each in bench.emitted if isinstance(each, Piece)]
    assert (coverages, bench.builder.is_done) == ([SequenceRange(8, 10)], True)
