"""Segment files made of pieces: in order, balanced, and without coverage of a hole that is not accounted for."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.archive.reader import open_file
from common.archive.writer import Spool
from common.chain import Chain
from common.clock import SystemClock
from common.errors import FloeError, OutcomeUnknown, Unavailable
from common.nats.api import STREAM_NOT_FOUND
from common.nats.protocol import ApiError
from common.observe.monitor import Health
from common.sequences import SequenceRange
from common.service.process import ThreadPool
from common.settings.egress import FeedSettings
from common.tasks import Stop
from egress.builder import CODE_SAMPLED_OUT, ClosedBy, Piece
from egress.consumers import ReaderResetError
from egress.encoder import MIN_BATCH_ROWS, Encoder, SegmentFile, SourceQueries
from egress.identity import SourceStream
from egress.memory import MemoryBudget
from egress.partition import Partition
from egress.report import FeedReport
from egress.sampling.keys import SamplingSettings
from tests.support.segments import columns_of

CHAIN = Chain("site", "UNIT_ENCODER")
FEED = FeedSettings(stream="S", inspect_field="id", inspect_duration="1m")  # type: ignore[arg-type]
SAMPLING = SamplingSettings.from_feed(FEED)


def piece(coverage: SequenceRange, sequences: list[int]) -> Piece:
    return Piece(coverage, columns_of(sequences), sequences, None, 2 * len(sequences), 1_000)


class Source:
    """A source with a first sequence that a test moves; it holds none of the messages that were not received."""

    def __init__(self, moved_to: int = 1) -> None:
        self.moved_to, self.is_away = moved_to, False

    async def first(self) -> int:
        if self.is_away:
            raise ReaderResetError("stream_changed", "gone")
        return self.moved_to

    async def restored_first(self, piece: Piece) -> int:
        return 0

    async def absent_of(self, missing: Sequence[SequenceRange]) -> Sequence[SequenceRange]:
        return missing

    async def remove_looped(self, piece: Piece) -> Piece:
        return piece


@pytest.fixture
def thread() -> Iterator[ThreadPool]:
    threads = ThreadPool("test-encoder", 1)
    yield threads
    threads.close()


def deps(folder: Path, feed: FeedSettings, thread: ThreadPool | None = None) -> Any:
    return SimpleNamespace(
        partition=Partition("site", feed),
        store=SimpleNamespace(new_spool=Spool(folder).new_file, subject_statistics=True),
        writer="test",
        report=FeedReport(CHAIN, "S", Health(SystemClock())),
        pools=SimpleNamespace(encoder=thread),
    )


Make = Callable[..., Encoder]


@pytest.fixture
def make(thread: ThreadPool, tmp_path: Path) -> Make:
    def made(source: Any = None, *, fills_hole: bool = False) -> Encoder:
        account = MemoryBudget(1 << 30).account(lambda: None)
        given = deps(tmp_path, FeedSettings(stream="S"), thread)
        return Encoder(given, CHAIN, account, source or Source(), fills_hole=fills_hole)

    return made


def emit(made: Encoder, *items: Piece | ClosedBy) -> None:
    for item in items:
        made.emit(item)


def coverages(encoder: Encoder) -> list[str]:
    return [str(spooled.footer.coverage) for spooled in encoder.sealed]


async def test_pieces_of_one_segment_become_one_balanced_file(make: Make, tmp_path: Path) -> None:
    made = make(Source(moved_to=5))
    emit(made, piece(SequenceRange(1, 6), [6]), piece(SequenceRange(7, 10), [8, 10]), ClosedBy.SIZE)
    await made.encode_all()
    (spooled,) = made.sealed
    footer = spooled.footer
    assert footer.is_balanced()
    assert (footer.ledger.to_json(), footer.unread) == ({"gone_before_read": 4, "deleted": 3}, SequenceRange(1, 4))
    assert (footer.coverage, footer.rows, spooled.path.stat().st_size) == (SequenceRange(1, 10), 3, spooled.size)
    emit(made, piece(SequenceRange(11, 12), [11, 12]))
    await made.encode_all()
    made.close()
    assert not list(tmp_path.rglob("tmp*")), "left in the spool"


async def test_in_a_hole_nothing_is_covered_as_gone(make: Make) -> None:
    """Move the source to 20 while 5..30 is read: the messages received before the gap are kept."""
    made, other = (make(Source(moved_to=20), fills_hole=True) for _ in range(2))
    emit(made, piece(SequenceRange(5, 8), [5, 6, 7, 8]), piece(SequenceRange(9, 25), [9, 10, 21, 25]))
    emit(made, piece(SequenceRange(26, 30), [26]))
    assert [await made.encode_next(), await made.encode_next()] == [True, False]
    emit(made, piece(SequenceRange(31, 32), [31]))
    assert (made.is_idle, coverages(made), made.sealed[0].footer.ledger.to_json()) == (True, ["5..10"], {})
    emit(other, piece(SequenceRange(5, 25), [20, 25]))  # begins with a gap
    assert (await other.encode_next(), other.is_idle, list(other.sealed)) == (False, True, [])


async def test_what_is_missing_in_a_hole_is_gone_from_it_unless_the_source_holds_it(make: Make) -> None:
    """Count 6, 10 and 11 as gone from the hole: they may have been deleted after the lost segment was written."""

    class Holding(Source):
        async def absent_of(self, missing: Sequence[SequenceRange]) -> Sequence[SequenceRange]:
            assert list(missing) in ([SequenceRange(6, 6)], [SequenceRange(10, 11)])
            return [each for each in missing if each.first == 6]

    for source, ledger, unread in (
        (Source(), {"gone_from_hole": 3}, SequenceRange(6, 11)),
        (Holding(), {"deleted": 2, "gone_from_hole": 1}, SequenceRange(6, 6)),  # left out by a filter
    ):
        made = make(source, fills_hole=True)
        emit(made, piece(SequenceRange(5, 9), [5, 7, 8, 9]), piece(SequenceRange(10, 13), [12, 13]), ClosedBy.HOLE)
        await made.encode_all()
        footer = made.sealed[0].footer
        assert (footer.ledger.to_json(), footer.unread) == (ledger, unread)


async def test_a_doubt_while_the_source_is_asked_loses_no_piece(make: Make) -> None:
    source = Source()
    made = make(source)
    emit(made, piece(SequenceRange(1, 10), [1, 2]), ClosedBy.RESET)
    source.is_away = True
    with pytest.raises(ReaderResetError):
        await made.encode_next()
    source.is_away = False
    await made.encode_all()
    assert coverages(made) == ["1..10"]


async def test_nothing_is_sealed_behind_a_piece_that_was_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seal nothing: the segment would cover the sequences of the lost piece without its rows."""
    made, real = make(), SegmentFile.add

    def add(self: SegmentFile, each: Piece, *rest: Any) -> None:
        if each.coverage.first == 4:
            raise Unavailable("the disk is full")
        real(self, each, *rest)

    monkeypatch.setattr(SegmentFile, "add", add)
    first, second, third = (piece(SequenceRange(n, n + 2), [n, n + 1, n + 2]) for n in (1, 4, 7))
    emit(made, first, ClosedBy.SIZE, second, third, ClosedBy.RESET)
    with pytest.raises(Unavailable):
        await made.encode_all()
    await made.encode_all()
    assert coverages(made) == ["1..3"]


def sampled_piece(number: int, rows: int) -> Piece:
    """Return a piece of 1,000 examined messages, of which the first `rows` are kept."""
    examined = list(range(number * 1_000 + 1, number * 1_000 + 1_001))
    kept = columns_of(examined[:rows], b"x" * 100, [f"k{s}" for s in examined[:rows]])
    codes = bytes(rows) + bytes([CODE_SAMPLED_OUT]) * (1_000 - rows)
    return Piece(SequenceRange(examined[0], examined[-1]), kept, examined, None, 101 * rows, 1_000, codes)


@pytest.mark.parametrize("rows", [0, 1, 10])
def test_pieces_with_a_few_rows_each_become_a_file_like_any_other(tmp_path: Path, rows: int) -> None:
    """Sample out 99.9 %: a piece gets no batch, row group or page of its own."""
    draft = SegmentFile(deps(tmp_path, FEED), CHAIN)
    for number in range(300):
        draft.add(sampled_piece(number, rows), 1)
        assert draft.buffered_bytes <= 164 * rows * (number + 1) + 600 * MIN_BATCH_ROWS
    spooled = draft.finish()
    assert spooled.footer.ledger.total() == 300 * (1_000 - rows)
    assert (spooled.footer.sampling_digest, spooled.footer.is_balanced()) == (SAMPLING.digest, True)
    with open_file(spooled.path, spooled.segment_name) as reader:
        assert len(reader.row_groups) == (1 if rows else 0)
        batches = list(reader.batches())
    keys = [key for batch in batches for key in batch.column("sample_key").to_pylist()]
    assert keys == [f"k{sequence}" for batch in batches for sequence in batch.column("sequence").to_pylist()]
    assert len(keys) == 300 * rows
    assert len(batches) <= 300 * rows // 16_384 + 1 + (rows > 0)


SOURCE_ERRORS = [
    (Unavailable("away"), ReaderResetError, None),
    (OutcomeUnknown("no answer"), ReaderResetError, None),
    (ApiError(404, STREAM_NOT_FOUND, "stream not found"), ApiError, None),
    (ApiError(500, 10077, "message get refused"), ApiError, ApiError),
]


@pytest.mark.parametrize(("error", "while_it_runs", "at_the_end"), SOURCE_ERRORS)
async def test_only_an_unreachable_source_counts_as_empty_at_the_end(
    error: FloeError, while_it_runs: type[FloeError], at_the_end: type[FloeError] | None
) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise error

    ended, missing, nothing = Stop(), [SequenceRange(3, 4)], SimpleNamespace(io=None)
    part, client = SimpleNamespace(filter_subject="one.>", stream="S"), SimpleNamespace(api=refuse, api_subject=str)
    parts: Any = SimpleNamespace(client=client, partition=part, pools=nothing, store=None, report=None)
    asked = SourceQueries(parts, CHAIN, SourceStream("2026", 1, 9), nothing, ended)  # type: ignore[arg-type]
    with pytest.raises(while_it_runs):
        await asked.absent_of(missing)
    ended.set()
    if at_the_end is None:
        assert await asked.absent_of(missing) == missing
    else:
        with pytest.raises(at_the_end):
            await asked.absent_of(missing)
