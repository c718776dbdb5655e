"""Sequence ranges, tables of many segments, and segments that have an unread range."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.archive.scan import ChainArchive, Problem, Scan
from common.archive.segment import Reason, SegmentRef
from common.archive.table import SegmentTable
from common.archive.times import search
from common.archive.unread import open_stretch
from common.errors import DataError
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch
from compaction.source import read_stretch
from tests.support.basics import PATIENCE, raises_code
from tests.support.compaction import CHAIN, Archive, ref, refs, rows, table_of


def test_a_range_includes_both_ends_and_may_be_the_whole_of_a_stream_and_no_more() -> None:
    span = SequenceRange(10, 12)
    assert (len(span), str(span), [n in span for n in (9, 10, 12, 13)]) == (3, "10..12", [False, True, True, False])
    assert len(SequenceRange(1, MAX_SEQUENCE)) == MAX_SEQUENCE
    for first, last in ((0, 1), (-1, 5), (5, 4), (1, MAX_SEQUENCE + 1)):
        with pytest.raises(ValueError, match="expected 1 <= first <= last"):
            SequenceRange(first, last)


def test_a_range_follows_exactly_next_overlaps_in_a_sequence_and_encloses_what_is_inside() -> None:
    ten = SequenceRange(1, 10)
    assert [SequenceRange(first, 20).follows(ten) for first in (10, 11, 12)] == [False, True, False]
    assert [ten.overlaps(SequenceRange(first, 20)) for first in (10, 11)] == [True, False]
    assert [ten.intersection(SequenceRange(first, 20)) for first in (8, 11)] == [SequenceRange(8, 10), None]
    assert [ten.encloses(SequenceRange(*each)) for each in ((1, 10), (3, 4), (3, 11))] == [True, True, False]


# Very many segments in little memory

SEGMENTS = refs(200, level=3, size=2**40, count=40)


def listed(segments: list[SegmentRef]) -> list[SegmentRef]:
    return sorted(segments, key=lambda s: s.key)


def windows(table: SegmentTable, size: int) -> Iterator[list[SegmentRef]]:
    for window in table.windows(size):
        yield [table[place] for places in window for place in places]


@given(SEGMENTS)
def test_what_is_put_in_comes_out(segments: list[SegmentRef]) -> None:
    table = table_of(segments)
    assert table == listed(segments)
    assert table != [*segments, ref(1000, 1000)]
    assert [table.index_of(s) for s in listed(segments)] == list(range(len(segments)))
    assert (table.index_of(ref(1000, 1001)), table.index_of(ref(1, 1, 9))) == (None, None)
    assert table.end == max((s.coverage.last for s in segments), default=0)
    for place, segment in enumerate(table):
        assert table[place] == segment
        assert (table.size_at(place), table.end_at(place)) == (segment.size, segment.coverage.last)


def test_the_greatest_values_are_kept_exactly() -> None:
    segment = ref(MAX_SEQUENCE, MAX_SEQUENCE, 9, size=2**62, age=0.123456)
    table = SegmentTable([segment])
    assert (table[0], table[-1], table[:]) == (segment, segment, [segment])
    with pytest.raises(IndexError):
        table[1]


@given(SEGMENTS, st.integers(1, 10))
def test_windows_hold_each_segment_once_and_no_two_overlap(segments: list[SegmentRef], size: int) -> None:
    found, reach = list(windows(table_of(segments), size)), 0
    assert listed([s for window in found for s in window]) == listed(segments)
    for window in found:
        assert window == sorted(window, key=lambda s: (s.level, s.name))
        assert reach < min(s.coverage.first for s in window)
        reach = max(s.coverage.last for s in window)


@given(st.integers(0, 60), st.integers(1, 10))
def test_a_window_is_no_larger_than_it_must_be(count: int, size: int) -> None:
    apart = [ref(n * 10 + 1, n * 10 + 10) for n in range(count)]
    assert all(len(window) <= size for window in windows(table_of(apart), size))
    assert [len(window) for window in windows(table_of([*apart, ref(1, 1000, 1)]), size)] == [count + 1]


def test_what_was_taken_in_any_order_and_of_many_levels_can_be_gone_through() -> None:
    refs = [ref(21, 30), ref(1, 10, 1), ref(1, 10)]
    table = SegmentTable()
    table.extend(refs)
    assert (list(table), len(table)) == ([refs[0], refs[2], refs[1]], 3)
    table.move_from(SegmentTable([ref(31, 40), ref(1, 10, 2)]))
    assert [str(s.coverage) for s in table] == ["21..30", "1..10", "31..40", "1..10", "1..10"]


# Segments with an unread range


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path)


def unread(archive: Archive) -> SegmentRef:
    """Put a segment of 1..120 with 1..50 unread."""
    return archive.put(1, 120, rows(range(51, 121)), ledger={Reason.GONE_BEFORE_READ: 50}, unread=SequenceRange(1, 50))


def cover_of(archive: Archive, first: int, last: int) -> tuple[list[int], list[str]]:
    """Return the sequences of all rows, and the reported problems."""
    problems: list[Problem] = []
    batches = Scan(ChainArchive(archive.store, CHAIN), SequenceRange(first, last), problems.append).batches()
    return [s for batch in batches for s in batch.column("sequence").to_pylist()], [*map(str, problems)]


def test_rows_of_a_late_segment_are_not_masked(archive: Archive):
    """Pause twin A with 1..100; the source deletes 1..50; B covers 1..120; then A's put succeeds."""
    early = unread(archive)
    assert len(cover_of(archive, 1, 120)[0]) == 70
    late = archive.put(1, 100)
    assert cover_of(archive, 1, 120) == ([*range(1, 121)], [])
    stretch = Stretch(early, early.coverage)
    assert sum(batch.num_rows for batch in read_stretch(archive.store, stretch, ["payload"])) == 120
    with open_stretch(archive.store, stretch) as reader:
        assert [(part.segment, part.batch.num_rows) for part in reader.parts()] == [(late, 50), (early, 70)]
        assert reader.max_missing(SequenceRange(1, 120)) == 0
    assert search(archive.store, CHAIN, 1_700_000_000_000_000_000 + 7 * 1_001)[0] == 7


def test_a_damaged_segment_hides_none_of_the_others(archive: Archive):
    unread(archive)
    broken, sound = archive.put(1, 100), archive.put(11, 99)
    path = archive.folder / "store" / broken.key
    path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    found, [problem] = cover_of(archive, 1, 120)
    assert (found, broken.key in problem, sound.level) == ([*range(11, 121)], True, 0)


def test_a_segment_that_was_merged_since_the_listing_keeps_its_rows_in_the_unread_range(archive: Archive):
    unread(archive)
    late, problems = archive.put(1, 100), list[Problem]()
    chain = ChainArchive(archive.store, CHAIN, archive.listed())
    archive.put(1, 100, level=1)
    archive.store.delete(late)
    batches = Scan(chain, SequenceRange(1, 120), problems.append).batches()
    assert ([s for b in batches for s in b.column("sequence").to_pylist()], problems) == ([*range(1, 121)], [])


def test_two_contents_under_one_sequence_are_a_fork(archive: Archive):
    unread(archive)
    archive.put(1, 100)
    archive.put(1, 99, rows(range(1, 100), salt="other"))
    with raises_code(DataError, "E-FORK", match="has one content in"):
        cover_of(archive, 1, 120)


def test_segments_that_read_everything_are_read_alone(archive: Archive):
    whole = archive.put(1, 120, rows(range(51, 121)), ledger={Reason.DELETED: 50})
    archive.put(1, 100)
    with open_stretch(archive.store, Stretch(whole, whole.coverage)) as reader:
        assert (reader.others, reader.unread, sum(batch.num_rows for batch in reader.batches())) == ([], None, 70)


def test_a_listing_without_an_answer_holds_up_no_other_reader(archive: Archive, monkeypatch: pytest.MonkeyPatch):
    early = unread(archive)
    asked, answered, real = threading.Event(), threading.Event(), archive.store.list

    def silent(*of: Any, **named: Any) -> Any:
        asked.set()
        answered.wait(PATIENCE)
        return real(*of, **named)

    stretch = Stretch(early, early.coverage)
    with ThreadPoolExecutor() as pool, open_stretch(archive.store, stretch) as held:
        monkeypatch.setattr(archive.store, "list", silent)
        waiting = pool.submit(lambda: held.others)
        assert asked.wait(PATIENCE)
        monkeypatch.setattr(archive.store, "list", real)
        with open_stretch(archive.store, stretch) as free:
            assert pool.submit(lambda: free.others).result(PATIENCE / 2) == []
        answered.set()
        waiting.result()


SOME = st.sets(st.integers(1, 20))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(own=SOME, others=st.lists(SOME, max_size=3), bounds=st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_each_part_is_found_again_by_its_segment_and_range(tmp_path_factory, own: set[int], others, bounds):
    """Read by the names in an intent (segment, first, last, count): later segments do not change the rows."""
    archive = Archive(tmp_path_factory.mktemp("archive"))
    gone = SequenceRange(min(bounds), max(bounds))
    missing = {s for s in range(gone.first, gone.last + 1) if s not in own}
    if not missing:
        return
    counts = {Reason.GONE_BEFORE_READ: len(missing), Reason.DELETED: 30 - len(own) - len(missing)}
    segment = archive.put(1, 30, rows(sorted(own)), ledger=counts, unread=SequenceRange(min(missing), max(missing)))
    for number, each in enumerate(others):
        archive.put(min(each, default=1), 21 + number, rows(sorted(each)))
    found: list[int] = []
    with open_stretch(archive.store, Stretch(segment, segment.coverage)) as reader:
        begin = 1
        for part in reader.parts():
            sequences = part.batch.column("sequence").to_pylist()
            within = SequenceRange(max(begin, part.since), sequences[-1])
            assert part.segment.coverage.encloses(within)
            with archive.store.open(part.segment) as named:
                again = [s for b in named.batches(within) for s in b.column("sequence").to_pylist()]
            assert again == sequences
            found += sequences
            begin = sequences[-1] + 1
    late = set().union(*others) & set(range(min(missing), max(missing) + 1))
    assert found == sorted(own | late)
