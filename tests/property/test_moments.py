"""Where a moment lies in a chain, against a search by hand, on archives of all shapes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from common.objects.local import LocalObjects
from common.segments import archive as moments
from common.segments.archive import MARGIN_NS, Timeline, search
from common.segments.columns import record_batch
from common.segments.segment import Tip
from tests.support.compaction import CHAIN, Archive

SECOND = 1_000_000_000
START_NS = 1_700_000_000 * SECOND


def build(archive: Archive, rng: random.Random, segments: int) -> list[tuple[int, int]]:
    """An archive with empty segments, holes in the rows, and steps back in time; its (sequence, time)."""
    known: list[tuple[int, int]] = []
    sequence, now, newest = 1, START_NS, START_NS
    for _ in range(segments):
        first, rows = sequence, []
        for _ in range(rng.choice([0, 1, 3, 40])):
            now += rng.randint(0, 5 * SECOND)
            newest = max(newest, now)
            if rng.random() < 0.05:
                now = max(now - rng.randint(0, MARGIN_NS), newest - MARGIN_NS)
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


@pytest.mark.parametrize("seed", range(12))
def test_the_first_row_at_or_after_a_moment_is_found(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    archive = Archive(tmp_path)
    known = build(archive, rng, rng.randint(1, 25))
    times = [time for _, time in known] or [START_NS]
    moments_ns = [times[0] - 1, times[-1] + 1, max(times), max(times) + 1]
    moments_ns += [rng.choice(times) + rng.choice([-1, 0, 1]) for _ in range(40)]
    timeline = Timeline(archive.store, archive.store.list(CHAIN))
    for moment in moments_ns:
        expected = next((sequence for sequence, time in known if time >= moment), None)
        assert timeline.first_at(moment) == expected, (seed, moment)
    assert search(archive.store, CHAIN, times[0])[0] == (known[0][0] if known else None)


class CountingObjects(LocalObjects):
    """Counts what is read."""

    gets, read = 0, 0

    def get(self, key: str, *, first: int = 0, length: int | None = None) -> bytes | None:
        data = super().get(key, first=first, length=length)
        self.gets, self.read = self.gets + 1, self.read + len(data or b"")
        return data


def batch(first: int, count: int, size: int = 10):  # type: ignore[no-untyped-def]
    rows = range(first, first + count)
    payloads = [random.Random(n).randbytes(size) for n in rows]
    times = [START_NS + n * SECOND for n in rows]
    return record_batch(list(rows), times, [b"a"] * count, [None] * count, payloads)


def test_a_long_chain_is_searched_by_few_footers(tmp_path: Path) -> None:
    objects = CountingObjects(tmp_path / "store")
    archive = Archive(tmp_path, objects)
    for number in range(300):
        archive.put(number * 20 + 1, number * 20 + 20, batch(number * 20 + 1, 20))
    objects.gets = 0
    assert search(archive.store, CHAIN, START_NS + 3_123 * SECOND - 7)[0] == 3_123
    assert objects.gets <= 2 * 9 + 6


def test_only_times_are_read_of_a_large_segment(tmp_path: Path) -> None:
    objects = CountingObjects(tmp_path / "store")
    archive = Archive(tmp_path, objects)
    ref = archive.put(1, 2000, batch(1, 2000, 20_000))
    objects.read = 0
    assert search(archive.store, CHAIN, START_NS + 1500 * SECOND)[0] == 1500
    assert objects.read < ref.size / 50


def test_a_damaged_segment_is_left_out(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    refs = [archive.put(n * 10 + 1, n * 10 + 10, batch(n * 10 + 1, 10)) for n in range(9)]
    (tmp_path / "store" / refs[4].key).write_bytes(b"PAR1" + bytes(refs[4].size - 8) + b"PAR1")
    assert search(archive.store, CHAIN, START_NS + 45 * SECOND)[0] == 51
    assert search(archive.store, CHAIN, START_NS + 31 * SECOND)[0] == 31


def test_a_segment_that_vanishes_makes_it_list_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive(tmp_path)
    gone = archive.put(1, 10, batch(1, 10))
    archive.put(1, 20, batch(1, 20), level=1)
    former = moments.Timeline.first_at

    def deleting(self: Timeline, moment_ns: int) -> int | None:
        archive.store.delete(gone)
        return former(self, moment_ns)

    monkeypatch.setattr(moments.Timeline, "first_at", deleting)
    assert search(archive.store, CHAIN, START_NS + 5 * SECOND)[0] == 5


def test_an_archive_without_rows_has_no_such_row(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    assert search(archive.store, CHAIN, 0)[0] is None
    archive.put(1, 10, batch(1, 0))
    assert search(archive.store, CHAIN, 0)[0] is None
