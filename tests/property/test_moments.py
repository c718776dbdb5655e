"""The search for a moment in a chain, against a naive search, on archives of all shapes."""

import random
from pathlib import Path

import pytest

from common.archive import times as moments
from common.archive.columns import record_batch
from common.archive.reader import RowFilter
from common.archive.segment import Tip
from common.archive.times import SKEW_MARGIN_NS, Timeline, search
from common.objects.local import LocalObjects
from compaction.source import read_stretch
from tests.support.compaction import CHAIN, Archive
from tests.support.stores import CountingObjects, FaultyStore

SECOND = 1_000_000_000
START_NS = 1_700_000_000 * SECOND


def build(archive: Archive, rng: random.Random, segments: int) -> list[tuple[int, int]]:
    """Build an archive with empty segments, missing rows and steps back in time; return its (sequence, time)."""
    known: list[tuple[int, int]] = []
    sequence, now, newest = 1, START_NS, START_NS
    for _ in range(segments):
        first, rows = sequence, []
        for _ in range(rng.choice([0, 1, 3, 40])):
            now += rng.randint(0, 5 * SECOND)
            newest = max(newest, now)
            if rng.random() < 0.05:
                now = max(now - rng.randint(0, SKEW_MARGIN_NS), newest - SKEW_MARGIN_NS)
            rows.append((sequence, now))
            sequence += rng.choice([1, 1, 1, 3])
        last = max(first, sequence - 1)
        tip = None if rng.random() < 0.5 else Tip(last, now, "0" * 32)
        batch = record_batch(
            [s for s, _ in rows], [t for _, t in rows], [b"a"] * len(rows), [None] * len(rows), [b"x"] * len(rows)
        )
        archive.put(first, last, batch, tip=tip)
        sequence, known = last + 1, known + rows
        if rng.random() < 0.2:
            now += 3600 * SECOND
    return known


@pytest.mark.parametrize("seed", range(8))
def test_the_first_row_at_or_after_a_moment_is_found_and_none_between_two_is_outside_the_planned_stretches(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    archive = Archive(tmp_path)
    known = build(archive, rng, rng.randint(1, 25))
    times = [time for _, time in known] or [START_NS]
    moments_ns = [times[0] - 1, times[-1] + 1, max(times), max(times) + 1]
    moments_ns += [rng.choice(times) + rng.choice([-1, 0, 1]) for _ in range(40)]
    timeline = Timeline(archive.store, archive.store.list(CHAIN))
    for moment in moments_ns:
        expected = next((sequence for sequence, time in known if time >= moment), None)
        assert timeline.first_sequence_at(moment) == expected, (seed, moment)
    assert search(archive.store, CHAIN, times[0])[0] == (known[0][0] if known else None)
    for _ in range(20):
        begin, end = sorted(rng.choice(times) + rng.choice([-1, 0, 1, 40 * SECOND]) for _ in range(2))
        bounds = rng.choice([(begin, end + 1), (begin, None), (None, end)])
        asked = RowFilter(*bounds)
        found = [
            sequence
            for stretch in timeline.between(*bounds)
            for read in read_stretch(archive.store, stretch, ["sequence"], asked)
            for sequence in read.column("sequence").to_pylist()
        ]
        low, high = bounds[0] or 0, bounds[1] or 2**63
        assert found == [sequence for sequence, time in known if low <= time < high], (seed, bounds)


def batch(first: int, count: int, size: int = 10):  # type: ignore[no-untyped-def]
    rows = range(first, first + count)
    payloads = [random.Random(n).randbytes(size) for n in rows]
    return record_batch(list(rows), [START_NS + n * SECOND for n in rows], [b"a"] * count, [None] * count, payloads)


def test_a_moment_and_a_part_of_the_time_of_a_long_chain_are_found_by_few_footers(tmp_path: Path) -> None:
    objects = FaultyStore(LocalObjects(tmp_path / "store"))
    archive = Archive(tmp_path, objects)  # type: ignore[arg-type]
    for number in range(300):  # segments of 20 s
        archive.put(number * 20 + 1, number * 20 + 20, batch(number * 20 + 1, 20))
    objects.calls.clear()
    assert search(archive.store, CHAIN, START_NS + 3_123 * SECOND - 7)[0] == 3_123
    assert objects.calls["get"] <= 2 * 9 + 6
    objects.calls.clear()
    timeline = Timeline(archive.store, archive.store.list(CHAIN))
    begin, end = (START_NS + second * SECOND for second in (3_000, 3_060))
    planned = timeline.between(begin, end)
    assert len(planned) <= 3 + 2 * 4, "a minute on both sides"
    assert {s.rows.first for s in planned} >= {2981, 3001, 3021, 3041}
    assert [s for s in planned if not timeline.is_at_edge(s.segment, begin, end)], "some lie inside"
    assert objects.calls["get"] <= 2 * (2 * 9 + 6)


def test_what_only_a_damaged_segment_covers_is_planned_whatever_its_time_and_counts_right_before_a_time(
    tmp_path: Path,
) -> None:
    """Plan them, so that a query or a consumer that begins there fails instead of missing rows."""
    archive = Archive(tmp_path)
    refs = [archive.put(n * 10 + 1, n * 10 + 10, batch(n * 10 + 1, 10)) for n in range(9)]
    (tmp_path / "store" / refs[4].key).write_bytes(b"PAR1" + bytes(refs[4].size - 8) + b"PAR1")

    def planned() -> list[tuple[int, str]]:
        timeline, begin = Timeline(archive.store, archive.store.list(CHAIN)), START_NS + 45 * SECOND
        return [(s.segment.level, str(s.rows)) for s in timeline.between(begin, begin + SECOND, margin_ns=0)]

    def begins(second: int) -> int | None:
        return search(archive.store, CHAIN, START_NS + second * SECOND)[0]

    assert (planned(), [begins(second) for second in (31, 45, 52)]) == ([(0, "41..50")], [31, 41, 52])
    archive.put(35, 60, batch(35, 26), level=1)
    assert planned() == [(1, "41..60")]
    for gone in (refs[4], *archive.store.list(CHAIN)[-1:]):
        archive.store.delete(gone)
    assert begins(45) == 51  # missing rows are not awaited


def test_only_times_are_read_of_a_large_segment(tmp_path: Path) -> None:
    objects = CountingObjects(tmp_path / "store")
    archive = Archive(tmp_path, objects)
    ref = archive.put(1, 2000, batch(1, 2000, 20_000))
    objects.read = 0
    assert search(archive.store, CHAIN, START_NS + 1500 * SECOND)[0] == 1500
    assert objects.read < ref.size / 50


def test_a_segment_that_vanishes_makes_it_list_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive(tmp_path)
    assert search(archive.store, CHAIN, 0)[0] is None
    gone = archive.put(1, 10, batch(1, 0))
    assert search(archive.store, CHAIN, 0)[0] is None, "an archive without rows"
    archive.store.delete(gone)
    gone = archive.put(1, 10, batch(1, 10))
    archive.put(1, 20, batch(1, 20), level=1)
    former = moments.Timeline.first_sequence_at

    def deleting(self: Timeline, moment_ns: int) -> int | None:
        archive.store.delete(gone)
        return former(self, moment_ns)

    monkeypatch.setattr(moments.Timeline, "first_sequence_at", deleting)
    assert search(archive.store, CHAIN, START_NS + 5 * SECOND)[0] == 5
