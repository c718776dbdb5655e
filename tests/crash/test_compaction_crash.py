"""Compaction stopped, or two killed at any step: readers get the same rows, and nothing is lost. Of retention killed or
stopped the rows above the floor stay, and the next run completes it.
"""

import time
from pathlib import Path

import pyarrow.compute as pc
import pytest

from common.archive.documents import ChainStore
from compaction.verify import verify_chains
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


# Retention


OLD, DAY = 40 * 86_400, 86_400
MAX_AGE = 30 * DAY


@pytest.fixture
def aged(tmp_path: Path) -> Archive:
    """Level 0 from 1 to 60, which is old up to 40; 1..20 of it is merged too, into a young object."""
    found = begun(tmp_path, CHAIN)
    for first in range(1, 60, 10):
        age = OLD if first < 40 else 0
        found.put(first, first + 9, rows(range(first, first + 10), at_ns=int((time.time() - age) * 1e9)), age=age)
    found.put(1, 20, rows(range(1, 21), at_ns=int((time.time() - OLD) * 1e9)), level=1)
    return found


def chains(archive: Archive) -> ChainStore:
    return ChainStore(archive.objects, archive.layout)


def check_whole(archive: Archive) -> None:
    """Check that every row from the floor on is there once, and that `verify` finds nothing wrong."""
    floor = chains(archive).read_floor(CHAIN) or 1
    held = archive.read().column("sequence")
    assert held.filter(pc.greater_equal(held, floor)).to_pylist() == list(range(floor, 61))
    assert verify_chains(archive.store, chains(archive), [CHAIN])[0].problems == []


@pytest.mark.parametrize("step", ["floor=kill", "after_floor=kill", *(f"expire=kill@{n}" for n in (1, 2, 3, 5))])
def test_retention_killed_at_any_step_is_finished_by_the_next(aged: Archive, step: str):
    assert Job(aged.folder, f"compaction.{step}", max_age=MAX_AGE).wait() == -9
    check_whole(aged)
    assert chains(aged).read_floor(CHAIN) == (None if step == "floor=kill" else 41)

    assert (run(aged.folder, max_age=MAX_AGE).failures, chains(aged).read_floor(CHAIN)) == ([], 41)
    assert aged.ranges() == ["0:41..50", "0:51..60"]
    check_whole(aged)
    assert len(run(aged.folder, max_age=MAX_AGE).retention.expired) == 0


@pytest.mark.parametrize("step", ["compaction.floor", "compaction.after_floor", "compaction.expire"])
def test_paused_retention_wakes_up_behind_another_and_does_no_harm(aged: Archive, step: str):
    paused = Job(aged.folder, f"{step}=stop", max_age=MAX_AGE)
    paused.wait_until_stopped()
    run(aged.folder, max_age=MAX_AGE)
    for ref in aged.listed():
        aged.age(ref.key, OLD)
    aged.put(61, 70)
    assert run(aged.folder, max_age=MAX_AGE).retention.floors == {CHAIN: 61}
    paused.resume()
    assert (paused.wait(), chains(aged).read_floor(CHAIN), aged.ranges()) == (0, 61, ["0:61..70"])
