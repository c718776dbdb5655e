"""`Scan` against a count of sequences, over random archives that change while they are read."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.archive.guard import SegmentGone
from common.archive.reader import RowFilter
from common.archive.scan import ChainArchive, Hole, Problem, ReadAhead, Scan
from common.archive.segment import SegmentRef
from common.archive.unread import StretchReader, UnreadableSegment
from common.sequences import SequenceRange, Stretch
from tests.support.compaction import CHAIN, Archive

LAST = 30
RANGES = st.tuples(st.integers(1, LAST), st.integers(1, LAST)).map(lambda pair: SequenceRange(min(pair), max(pair)))
#: Coverage and level; and what happens to the segment: nothing, damage, or a merge once the scan has begun.
SEGMENTS = st.lists(st.tuples(RANGES, st.integers(0, 2), st.sampled_from(["sound", "damaged", "merged"])), max_size=6)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found


@pytest.fixture(autouse=True)
def _piecewise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read three rows at a time, and fail in the middle of a segment once it is deleted."""
    whole = StretchReader.batches

    def pieces(self: StretchReader, *of: Any, **named: Any) -> Iterator[pa.RecordBatch]:
        for batch in whole(self, *of, **named):
            for at in range(0, batch.num_rows, 3):
                if self._store.objects.head(self._stretch.segment.key) is None:
                    raise SegmentGone(self._stretch.segment.key)
                yield batch.slice(at, 3)

    monkeypatch.setattr(StretchReader, "batches", pieces)


def damage(archive: Archive, ref: SegmentRef) -> None:
    path = archive.path(ref.key)
    path.write_bytes(path.read_bytes()[:-9] + b"123456789")


def merge(archive: Archive, ref: SegmentRef) -> None:
    """Put the rows of a segment under a higher level, and delete it, as compaction does."""
    archive.put(ref.coverage.first, ref.coverage.last, level=ref.level + 3)
    archive.store.delete(ref)


def covered(archive: Archive, fates: dict[str, str], within: SequenceRange) -> list[int]:
    """Return the sequences that a segment without damage covers."""
    sound = [ref.coverage for ref in archive.listed() if fates.get(ref.key) != "damaged"]
    return [n for n in range(within.first, within.last + 1) if any(n in each for each in sound)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=SEGMENTS, within=RANGES, is_ahead=st.booleans(), columns=st.sampled_from([None, ("payload",)]))
def test_each_covered_sequence_is_read_once_and_each_other_one_is_in_a_hole(
    tmp_path_factory: pytest.TempPathFactory,
    pool: ThreadPoolExecutor,
    made: list[tuple[SequenceRange, int, str]],
    within: SequenceRange,
    is_ahead: bool,
    columns: tuple[str, ...] | None,
) -> None:
    archive, problems, found, fates = Archive(tmp_path_factory.mktemp("a")), list[Problem](), list[int](), {}
    for coverage, level, fate in made:
        fates[archive.put(coverage.first, coverage.last, level=level).key] = fate
    listing = ChainArchive.listed(archive.store, CHAIN, within.first)
    covers, holes = [each.rows for each in listing.covers(within)], listing.holes(within)
    assert [n for each in covers for n in range(each.first, each.last + 1)] == covered(archive, {}, within)
    assert sum(map(len, [*covers, *holes])) == len(within)
    for ref in archive.listed():
        if fates[ref.key] == "damaged":
            damage(archive, ref)
    chain = ChainArchive(archive.store, CHAIN, archive.listed())
    scan = Scan(
        chain, within, problems.append, columns=columns, ahead=ReadAhead(pool, 10**6, count=2) if is_ahead else None
    )

    for number, batch in enumerate(scan.batches()):
        found += batch.column("sequence").to_pylist()
        for ref in archive.listed() if not number else ():
            if fates.get(ref.key) == "merged":
                merge(archive, ref)

    expected = covered(archive, fates, within)
    missing = [n for each in problems if isinstance(each, Hole) for n in range(each.rows.first, each.rows.last + 1)]
    assert (found, missing) == (expected, [n for n in range(within.first, within.last + 1) if n not in expected])
    assert {fates[each.segment.key] for each in problems if isinstance(each, UnreadableSegment)} <= {"damaged"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=SEGMENTS, wanted=st.sampled_from(["nodes.1", "nodes.*", "none"]), planned=RANGES)
def test_a_planned_stretch_is_read_through_others_if_its_segment_fails_and_the_filter_selects_rows(
    tmp_path_factory: pytest.TempPathFactory, made: list[tuple[SequenceRange, int, str]], wanted: str, planned: Any
) -> None:
    archive, problems, fates = Archive(tmp_path_factory.mktemp("a")), list[Problem](), dict[str, str]()
    for coverage, level, fate in made:
        fates[archive.put(coverage.first, coverage.last, level=level).key] = fate
    own = archive.put(planned.first, planned.last)
    (damage if own.coverage.first % 2 else archive.store.delete)(*([archive] if own.coverage.first % 2 else []), own)
    fates[own.key] = "damaged"
    for ref in archive.listed():
        if fates[ref.key] == "damaged" and ref.key != own.key:
            damage(archive, ref)

    stretch = Stretch(own, planned)
    row_filter = RowFilter(subjects=(wanted,))
    scan = Scan(ChainArchive.planned(archive.store, stretch), planned, problems.append, row_filter=row_filter)
    found = [n for batch in scan.batches() for n in batch.column("sequence").to_pylist()]

    matching = {"nodes.1": lambda n: n % 5 == 1, "nodes.*": lambda _: True, "none": lambda _: False}[wanted]
    assert found == [n for n in covered(archive, fates, planned) if n % 17 and matching(n)]


def test_a_hole_names_its_causes_and_a_segment_that_was_put_back_counts_again(tmp_path_factory: Any) -> None:
    archive = Archive(tmp_path_factory.mktemp("a"))
    archive.put(1, 10)
    lost = archive.put(11, 20)
    kept = archive.path(lost.key).read_bytes()
    damage(archive, lost)
    chain = ChainArchive(archive.store, CHAIN)

    def put_back(problem: Problem) -> None:
        if isinstance(problem, UnreadableSegment):
            archive.path(lost.key).write_bytes(kept)
        else:
            pytest.fail(str(problem))

    scan = Scan(chain, SequenceRange(1, 20), put_back)
    assert [n for batch in scan.batches() for n in batch.column("sequence").to_pylist()] == [*range(1, 21)]

    damage(archive, lost)
    problems = list[Problem]()
    assert [
        b.num_rows for b in Scan(ChainArchive(archive.store, CHAIN), SequenceRange(1, 20), problems.append).batches()
    ]
    [broken, hole] = problems
    assert (str(hole), isinstance(hole, Hole) and len(hole.causes)) == ("no segment covers 11..20", 1)
    assert isinstance(broken, UnreadableSegment)
    assert broken.segment.key == lost.key
