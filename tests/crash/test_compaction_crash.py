"""Compaction stopped, or two killed at any step: readers get the same rows, and nothing is lost."""

from pathlib import Path

import pytest

from tests.support.basics import seeded
from tests.support.compaction import CHAIN, Archive, Job, begun, left_over, rows, run

STEPS = [
    *("list", "plan", "open", "merge", "spool_full", "put", "read_back"),
    *("verify", "tombstone", "grace", "delete_some", "done"),
]
ALL_STEPS = [f"compaction.{step}" for step in STEPS] + ["segments.put", "segments.read_back"]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return begun(tmp_path, CHAIN)


def fill(archive: Archive, first: int = 1, count: int = 4, *, age: float = 700) -> None:
    for n in range(first, first + count * 10, 10):
        archive.put(n, n + 9, rows(x for x in range(n, n + 10) if x % 7), age=age)


@pytest.mark.parametrize(
    "step", ["compaction.put", "compaction.verify", "compaction.tombstone", "compaction.delete_some"]
)
def test_a_paused_job_wakes_up_into_the_work_of_another_and_does_no_harm(archive: Archive, step: str):
    """The other job has merged to a higher level meanwhile: the output of the paused one is superseded already."""
    fill(archive)
    fill(archive, 41, 1, age=0)
    before = archive.read()
    paused = Job(archive.folder, f"{step}=stop")
    paused.wait_until_stopped()
    run(archive.folder)
    for ref in archive.listed():
        archive.age(ref.key, 700)
    fill(archive, 51, 3)
    before_more = archive.read()
    for _ in range(3):
        run(archive.folder)
        assert archive.read().equals(before_more)
    paused.resume()
    paused.wait()
    assert archive.read().equals(before_more)
    for _ in range(2):
        run(archive.folder)
    assert archive.read().equals(before_more)
    assert before.num_rows < before_more.num_rows


def test_jobs_at_once_killed_at_each_step_over_a_growing_chain_lose_and_repeat_nothing(archive: Archive):
    random = seeded()
    end, model, steps = 0, set[int](), random.sample(ALL_STEPS, len(ALL_STEPS))
    while steps:
        for _ in range(random.randint(2, 5)):
            first = max(1, end + 1 - random.choice([0, 0, 0, 3, 12]))
            end = first + random.randint(12, 20)
            held = [n for n in range(first, end + 1) if n % 7]
            model |= set(held)
            archive.put(first, end, rows(held), age=700)
        points = [f"{steps.pop()}=kill@{random.choice([1, 1, 2, 3])}" for _ in range(2)]
        jobs = [Job(archive.folder, point) for point in points]
        assert {job.wait() for job in jobs} <= {0, -9}, points
        assert archive.read().column("sequence").to_pylist() == sorted(model), points
        for ref in archive.listed():
            if random.random() < 0.5:
                archive.age(ref.key, 700)
    for _ in range(4):
        assert run(archive.folder).failures == []
    assert (archive.read().column("sequence").to_pylist(), left_over(archive)) == (sorted(model), [])
