"""Compaction killed, stopped or doubled at any step: readers get the same rows, and nothing is lost."""

from pathlib import Path

import pytest

from tests.support.basics import seeded
from tests.support.compaction import CHAIN, Archive, Job, begun, left_over, rows, run

STEPS = [
    *("list", "plan", "open", "merge", "spool_full", "put", "read_back"),
    *("verify", "tombstone", "grace", "delete_some", "done"),
]
ALL_STEPS = [f"compaction.{step}" for step in STEPS] + ["segments.put", "segments.read_back"]
DELETIONS = [f"compaction.delete_some=kill@{number}" for number in (2, 3, 4)]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return begun(tmp_path, CHAIN)


def fill(archive: Archive, first: int = 1, count: int = 4, *, age: float = 700) -> None:
    for n in range(first, first + count * 10, 10):
        archive.put(n, n + 9, rows(x for x in range(n, n + 10) if x % 7), age=age)


@pytest.mark.parametrize("point", [*(f"{step}=kill" for step in ALL_STEPS), *DELETIONS])
def test_a_job_killed_at_any_step_is_finished_by_the_next(archive: Archive, point: str):
    fill(archive)
    archive.put(35, 60, rows(x for x in range(35, 61) if x % 7), age=700)
    fill(archive, 61, 1, age=0)
    before = archive.read()

    assert Job(archive.folder, point).wait() == -9
    assert archive.read().equals(before)

    assert run(archive.folder).failures == []
    assert archive.read().equals(before)
    run(archive.folder)
    assert archive.ranges() == ["0:61..70", "1:1..60"]
    assert (archive.objects.list(archive.layout.tombstones_prefix(CHAIN)), left_over(archive)) == ([], [])


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


def test_jobs_at_once_killed_at_random_over_a_growing_chain_lose_and_repeat_nothing(archive: Archive):
    random = seeded()
    end, model = 0, set[int]()
    for round_number in range(6):
        for _ in range(random.randint(2, 5)):
            first = max(1, end + 1 - random.choice([0, 0, 0, 3, 12]))
            end = first + random.randint(12, 20)
            held = [n for n in range(first, end + 1) if n % 7]
            model |= set(held)
            archive.put(first, end, rows(held), age=700)
        points = [f"{random.choice(ALL_STEPS)}=kill@{random.randint(1, 4)}" for _ in range(2)]
        jobs = [Job(archive.folder, point) for point in points]
        assert {job.wait() for job in jobs} <= {0, -9}, (round_number, points)
        assert archive.read().column("sequence").to_pylist() == sorted(model), points
        for ref in archive.listed():
            if random.random() < 0.5:
                archive.age(ref.key, 700)
    for _ in range(4):
        assert run(archive.folder).failures == []
    assert (archive.read().column("sequence").to_pylist(), left_over(archive)) == (sorted(model), [])
