"""What one segment did not read is read from others: once, in order, and so that it can be found again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import DataError
from common.segments.archive import read_cover, search
from common.segments.segment import Reason, SegmentRef
from common.segments.unread import open_stretch
from common.sequences import SequenceRange, Stretch
from compaction.source import read_stretch
from tests.support.basics import PATIENCE
from tests.support.compaction import CHAIN, Archive, rows


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path)


def unread(archive: Archive, first: int, last: int, held: range | list[int], gone: SequenceRange) -> SegmentRef:
    """A segment that did not read `gone`, of which it holds `held` nevertheless."""
    missing = last - first + 1 - len(held)
    counts = {Reason.GONE_BEFORE_READ: missing}
    return archive.put(first, last, rows(held), ledger=counts, unread=gone)


def cover_of(archive: Archive, first: int, last: int) -> tuple[list[int], list[str]]:
    """The sequences of all rows, and what was reported."""
    problems: list[str] = []
    refs = archive.store.list(CHAIN)
    batches = read_cover(archive.store, refs, SequenceRange(first, last), problems.append)
    return [s for batch in batches for s in batch.column("sequence").to_pylist()], problems


def test_rows_of_a_late_segment_are_not_masked(archive: Archive):
    """Twin A was paused with 1..100; the source let go of 1..50; B covers 1..120; then A's put lands."""
    early = unread(archive, 1, 120, range(51, 121), SequenceRange(1, 50))
    assert len(cover_of(archive, 1, 120)[0]) == 70
    late = archive.put(1, 100)
    assert cover_of(archive, 1, 120) == ([*range(1, 121)], [])
    stretch = Stretch(early, early.coverage)
    assert sum(batch.num_rows for batch in read_stretch(archive.store, stretch, ["payload"])) == 120
    with open_stretch(archive.store, stretch) as reader:
        assert [(part.segment, part.batch.num_rows) for part in reader.parts()] == [(late, 50), (early, 70)]
        assert reader.still_missing(SequenceRange(1, 120)) == 0
    assert search(archive.store, CHAIN, 1_700_000_000_000_000_000 + 7 * 1_001)[0] == 7


def test_a_damaged_segment_hides_none_of_the_others(archive: Archive):
    unread(archive, 1, 120, range(51, 121), SequenceRange(1, 50))
    broken, sound = archive.put(1, 100), archive.put(11, 99)
    path = archive.folder / "store" / broken.key
    path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    assert cover_of(archive, 1, 120) == ([*range(11, 121)], [])
    assert sound.level == 0


def test_two_contents_under_one_sequence_are_a_fork(archive: Archive):
    unread(archive, 1, 120, range(51, 121), SequenceRange(1, 50))
    archive.put(1, 100)
    archive.put(1, 99, rows(range(1, 100), salt="other"))
    with pytest.raises(DataError, match="has one content in") as stopped:
        cover_of(archive, 1, 120)
    assert stopped.value.code == "E-FORK"


def test_segments_that_read_everything_are_read_alone(archive: Archive):
    whole = archive.put(1, 120, rows(range(51, 121)), ledger={Reason.DELETED: 50})
    archive.put(1, 100)
    with open_stretch(archive.store, Stretch(whole, whole.coverage)) as reader:
        assert (reader.others, reader.unread) == ([], None)
        assert sum(batch.num_rows for batch in reader.batches()) == 70


def test_a_listing_without_an_answer_holds_up_no_other_reader(archive: Archive, monkeypatch: pytest.MonkeyPatch):
    early = unread(archive, 1, 120, range(51, 121), SequenceRange(1, 50))
    asked, answered, real = threading.Event(), threading.Event(), archive.store.covering

    def silent(*of: Any) -> Any:
        asked.set()
        answered.wait(PATIENCE)
        return real(*of)

    stretch = Stretch(early, early.coverage)
    with open_stretch(archive.store, stretch) as held, open_stretch(archive.store, stretch) as free:
        monkeypatch.setattr(archive.store, "covering", silent)
        waiting = threading.Thread(target=lambda: held.others)
        waiting.start()
        assert asked.wait(PATIENCE)
        monkeypatch.setattr(archive.store, "covering", real)
        other = threading.Thread(target=lambda: free.others)
        other.start()
        other.join(PATIENCE)
        is_held_up = other.is_alive()
        answered.set()
        waiting.join()
        other.join()
    assert not is_held_up


SOME = st.sets(st.integers(1, 20))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(own=SOME, others=st.lists(SOME, max_size=3), bounds=st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_each_part_is_found_again_by_its_segment_and_range(
    tmp_path_factory: pytest.TempPathFactory, own: set[int], others: list[set[int]], bounds: tuple[int, int]
):
    """An intent names segment, first, last and count: these give the very same rows, whatever came since."""
    archive = Archive(tmp_path_factory.mktemp("archive"))
    gone = SequenceRange(min(bounds), max(bounds))
    missing = {s for s in range(gone.first, gone.last + 1) if s not in own}
    if not missing:
        return
    counts = {Reason.GONE_BEFORE_READ: len(missing), Reason.DELETED: 30 - len(own) - len(missing)}
    held = rows(sorted(own))
    segment = archive.put(1, 30, held, ledger=counts, unread=SequenceRange(min(missing), max(missing)))
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
