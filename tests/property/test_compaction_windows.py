"""Where a chain is cut into windows and batches makes no difference to compaction and verify."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from common.segments.documents import AcceptedGap, ChainDocument, ChainStore, StreamDocument
from common.segments.segment import Reason
from common.segments.table import SegmentTable
from common.sequences import SequenceRange
from compaction.plan import Planner, Waiting, blocks
from compaction.run import Compaction, LocalRunner, Report, Selection
from compaction.supersede import contained
from compaction.verify import ChainReport, verify_chains
from tests.property.test_compaction_plan import POLICIES, SEGMENTS
from tests.support.compaction import CHAIN, NOW, Archive, TestPolicy, plan, rows

WHOLE = 10**9
LOW = TestPolicy(min_age=0, max_wait=-1, min_count=2, max_count=4, min_size=10**9, max_size=10**9)
HIGH = replace(LOW, from_=1, to=2)


def cut(segments, size):
    table = SegmentTable.listing(segments)
    for window in table.windows(size):
        yield [table[place] for places in window for place in places]


@given(SEGMENTS, POLICIES, st.integers(1, 6))
def test_a_plan_is_the_same_whatever_the_windows(segments, policy, size):
    parted, whole = Waiting(CHAIN, policy, NOW), Waiting(CHAIN, policy, NOW)
    planner, outputs, opened = Planner(policy, NOW, parted), [], []
    for window in cut(segments, size):
        outputs += planner.add(blocks(window))
        opened.append({s.key for s in planner.open})
    outputs += planner.end()
    assert outputs == plan(segments, policy, NOW, waiting=whole)
    assert not planner.open
    assert parted.next_merge() == whole.next_merge()
    assert parted == whole


@given(SEGMENTS, st.integers(1, 6))
def test_what_is_contained_is_the_same_whatever_the_windows(segments, size):
    def pairs(found):
        return Counter((s.key, u.superseding) for u in found for s in u.superseded)

    assert pairs(s for window in cut(segments, size) for s in contained(window)) == pairs(contained(segments))


# Real archives

PIECES = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 12), st.integers(0, 2)), min_size=1, max_size=14, unique=True
)


def made(folder: Path, pieces: list[tuple[int, int, int]], *, alike: bool) -> Archive:
    """Segments where some sequences have no row: in all the same ones if `alike`, else each has its own."""
    archive = Archive(folder)
    ChainStore(archive.objects, archive.layout).create_chain(CHAIN, ChainDocument((), 1, 1))
    for number, (first, length, level) in enumerate(pieces):
        salt = 0 if alike else number
        held = rows(n for n in range(first, first + length + 1) if (n + salt) % 3)
        archive.put(first, first + length, held, level=level, age=700)
    return archive


def everything(archive: Archive) -> set[int]:
    """The sequences of all rows that any segment has."""
    return {n for ref in archive.listed() for n in archive.table(ref).column("sequence").to_pylist()}


def run(archive: Archive, size: int) -> Report:
    parts = Compaction(archive.store, [LOW, HIGH], 0, LocalRunner(archive.store), window=size, batch=size)
    return parts.run(Selection())


def at_rest(archive: Archive, size: int) -> list[str]:
    """What is listed once there is nothing to do any more."""
    for _ in range(12):
        report = run(archive, size)
        assert [f for f in report.failures if f.code not in ("E-ROWS-MISSING", "E-LATE-ROWS")] == []
        if not (report.merged or report.tombstones or report.deleted):
            return archive.ranges()
    raise AssertionError(f"no end after 12 runs: {archive.ranges()}")


def verified(archive: Archive, size: int, *, deep: bool) -> tuple[object, ...]:
    chains = ChainStore(archive.objects, archive.layout)
    found = verify_chains(archive.store, chains, [CHAIN], deep=deep, window=size)[0]
    return comparable(found)


def comparable(found: ChainReport) -> tuple[object, ...]:
    problems = Counter(found.problems)
    return (found.coverage, found.segments, found.size, found.overlapping, found.accepted, problems)


@settings(max_examples=12)
@given(PIECES, st.integers(1, 3))
def test_readers_see_the_same_rows_after_runs_in_small_windows(pieces, size):
    with tempfile.TemporaryDirectory() as name:
        archive = made(Path(name), pieces, alike=True)
        before = archive.read()
        at_rest(archive, size)
        assert archive.read().equals(before)
        deep = [verified(archive, each, deep=True) for each in (size, WHOLE)]
        assert deep[0] == deep[1]


@settings(max_examples=12)
@given(PIECES, st.integers(1, 3))
def test_no_row_is_lost_in_small_windows_where_segments_disagree(pieces, size):
    with tempfile.TemporaryDirectory() as name:
        archive = made(Path(name), pieces, alike=False)
        before = everything(archive)
        for _ in range(4):
            run(archive, size)
            assert everything(archive) == before


@settings(max_examples=25)
@given(PIECES, st.integers(1, 3))
def test_a_view_of_the_cover_has_all_rows_in_the_end_that_one_segment_had_not_read(pieces, size):
    with tempfile.TemporaryDirectory() as name:
        archive = made(Path(name), [], alike=True)
        for number, (first, length, level) in enumerate(pieces[:6]):
            sequences = range(first, first + length + 1)
            gone = [n for n in sequences if (n + number) % 3 == 0]
            unread = {"unread": SequenceRange(gone[0], gone[-1])} if gone else {}
            ledger = {Reason.GONE_BEFORE_READ: len(gone)} if gone else {}
            held = rows(n for n in sequences if n not in gone)
            archive.put(first, first + length, held, level=level, age=700, ledger=ledger, **unread)
        before = everything(archive)
        at_rest(archive, size)
        assert set(archive.read().column("sequence").to_pylist()) == everything(archive) == before


@settings(max_examples=25)
@given(
    PIECES,
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 9)), max_size=3),
    st.one_of(st.none(), st.integers(1, 70)),
    st.sets(st.integers(0, 13), max_size=2),
    st.booleans(),
)
def test_verify_says_the_same_whatever_the_windows(pieces, size, gaps, end, damaged, deep):
    with tempfile.TemporaryDirectory() as name:
        archive = made(Path(name), pieces, alike=False)
        chains = ChainStore(archive.objects, archive.layout)
        for first, length in gaps:
            chains.accept_gap(CHAIN, AcceptedGap(SequenceRange(first, first + length)))
        if end is not None:
            chains.create_stream(
                CHAIN.next_incarnation(), StreamDocument({}, "2026-01-01T00:00:00Z", {CHAIN.partition: end})
            )
        for number, ref in enumerate(archive.listed()):
            if number in damaged:
                archive.path(ref.key).write_bytes(b"nothing")
        assert verified(archive, size, deep=deep) == verified(archive, WHOLE, deep=deep)


def test_a_late_segment_waits_for_a_group_that_a_later_window_closes(tmp_path: Path):
    """Its rows are united with what contains it only once that is no input of a merge of the same round."""
    archive = made(tmp_path, [], alike=True)
    for first in range(1, 80, 10):
        archive.put(first, first + 9, rows([first]), level=1, age=700)
    archive.put(12, 18, rows([15]), age=700)
    archive.put(3, 4, rows([3]), age=700)
    for _ in range(5):
        report = run(archive, 1)
        assert report.failures == []
    assert archive.read().column("sequence").to_pylist() == [1, 3, 11, 15, *range(21, 80, 10)]


def test_a_late_segment_waits_where_one_window_closes_a_group_and_opens_the_next(tmp_path: Path):
    """The rest of the window is taken up in a later batch than the merge of what contains the segment."""
    archive = made(tmp_path, [], alike=True)
    for first in range(1, 80, 10):
        archive.put(first, first + 9, rows([first]), level=1, age=700)
    for first in (33, 43):  # in the last of the first group and in the first of the second
        archive.put(first, first + 1, rows([first]), age=700)
    for _ in range(5):
        parts = Compaction(archive.store, [HIGH], 0, LocalRunner(archive.store), window=6, batch=1)
        assert parts.run(Selection()).failures == []
    assert archive.read().column("sequence").to_pylist() == [1, 11, 21, 31, 33, 41, 43, 51, 61, 71]


def test_what_fails_in_one_batch_is_told_and_the_others_are_worked_on(tmp_path: Path):
    archive = made(tmp_path, [], alike=True)
    refs = [archive.put(first, first + 9, age=700) for first in range(1, 200, 10)]
    archive.path(refs[3].key).write_bytes(b"nothing")
    archive.age(refs[3].key, 700)
    report = run(archive, 1)
    assert [f.suspects for f in report.failures] == [(refs[3].key,)]
    merged = [m.ref.coverage for m in report.merged if m.ref.level == 1]
    assert sorted(map(str, merged)) == sorted(["1..30", "41..80", "81..120", "121..160", "161..200"])
