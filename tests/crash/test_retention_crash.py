"""Retention killed, stopped or doubled at any step: rows above the floor stay, and the next run completes it."""

import time
from pathlib import Path

import pyarrow.compute as pc
import pytest

from common.archive.documents import ChainStore
from compaction.verify import verify_chains
from tests.support.compaction import CHAIN, Archive, Job, begun, rows, run

OLD, DAY = 40 * 86_400, 86_400
MAX_AGE = 30 * DAY


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
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


STEPS = ["compaction.floor", "compaction.after_floor", *(f"compaction.expire=kill@{n}" for n in (1, 2, 3, 5))]


@pytest.mark.parametrize("step", STEPS)
def test_a_run_killed_at_any_step_is_finished_by_the_next(archive: Archive, step: str):
    assert Job(archive.folder, step if "=" in step else f"{step}=kill", max_age=MAX_AGE).wait() == -9
    check_whole(archive)
    assert chains(archive).read_floor(CHAIN) == (None if step == "compaction.floor" else 41)

    assert (run(archive.folder, max_age=MAX_AGE).failures, chains(archive).read_floor(CHAIN)) == ([], 41)
    assert archive.ranges() == ["0:41..50", "0:51..60"]
    check_whole(archive)
    assert len(run(archive.folder, max_age=MAX_AGE).retention.expired) == 0


@pytest.mark.parametrize("step", ["compaction.floor", "compaction.after_floor", "compaction.expire"])
def test_a_paused_run_wakes_up_behind_another_and_does_no_harm(archive: Archive, step: str):
    paused = Job(archive.folder, f"{step}=stop", max_age=MAX_AGE)
    paused.wait_until_stopped()
    run(archive.folder, max_age=MAX_AGE)
    for ref in archive.listed():
        archive.age(ref.key, OLD)
    archive.put(61, 70)
    assert run(archive.folder, max_age=MAX_AGE).retention.floors == {CHAIN: 61}
    paused.resume()
    assert (paused.wait(), chains(archive).read_floor(CHAIN), archive.ranges()) == (0, 61, ["0:61..70"])
