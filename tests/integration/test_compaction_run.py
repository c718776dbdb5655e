"""Whole runs without Spark over a real archive in a folder."""

import itertools
import multiprocessing
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from common.archive import writer
from common.archive.documents import list_snapshots
from common.archive.keys import StateName
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.chain import Chain
from common.errors import DataError, Refused, Unavailable
from common.objects.local import LocalObjects
from common.settings.root import Settings
from compaction import jobs
from compaction.compare import DeletionProof
from compaction.failures import exit_code
from compaction.jobs import JobRunner
from compaction.plan import Output, supersession_of_merge
from compaction.run import Compaction, Deletion, LocalRunner, RunReport, Selection, merge_output
from compaction.tombstones import TombstoneStore
from tests.integration.test_compaction_cli import Site
from tests.support.basics import raises_code, seeded
from tests.support.compaction import CHAIN, DUE, OTHER, Archive, TestPolicy, begun, rows
from tests.support.stores import CountingObjects, FaultyStore, raising


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return begun(tmp_path, CHAIN, OTHER)


#: A policy that merges nothing.
NEVER = TestPolicy(min_age=10**9, max_wait=10**9, min_count=1000, min_size=10**9, max_size=10**9)


def compaction(archive: Archive, *policies: TestPolicy, grace: float | None = 0) -> Compaction:
    return Compaction(archive.store, policies or (DUE,), grace, LocalRunner(archive.store))


def run(archive: Archive, *policies: TestPolicy, grace: float | None = 0, **selection: object) -> RunReport:
    return compaction(archive, *policies, grace=grace).run(Selection(**selection))


def fill(
    archive: Archive, count: int = 4, *, age: float = 700, chain: Chain = CHAIN, first: int = 1
) -> list[SegmentRef]:
    """Put adjacent segments of ten sequences each."""
    return [archive.put(n, n + 9, age=age, chain=chain) for n in range(first, first + count * 10, 10)]


def settings_of(archive: Archive) -> Settings:
    store = {"url": f"file://{archive.folder}/store"}
    return Settings.model_validate({"store": store, "spool_dir": str(archive.folder / "spool")})


def tombstones(archive: Archive) -> list[str]:
    return [info.key for info in archive.objects.list(archive.layout.tombstones_prefix(CHAIN))]


def after_the_grace(archive: Archive) -> RunReport:
    for stone in tombstones(archive):
        archive.age(stone, 4000)
    return run(archive, grace=3600)


def spoil(archive: Archive, ref: SegmentRef) -> None:
    archive.path(ref.key).write_bytes(b"?" * ref.size)
    archive.age(ref.key, 700)


def test_a_due_run_is_merged_and_its_inputs_go_the_last_one_and_the_tombstone_when_the_chain_has_moved_on(
    archive: Archive,
):
    fill(archive)
    before, report = archive.read(), run(archive)
    assert (len(report.merged), len(report.tombstones), len(report.deleted), report.failures) == (1, 1, 3, [])
    assert archive.ranges() == ["0:31..40", "1:1..40"]
    assert archive.read().equals(before)
    assert run(archive) == RunReport()
    fill(archive, 1, age=0, first=41)
    assert run(archive).deleted[0].coverage.first == 31
    assert tombstones(archive) != []
    assert (run(archive).deleted, archive.ranges(), tombstones(archive)) == ([], ["0:41..50", "1:1..40"], [])


def test_nothing_goes_where_deleting_is_off_nor_before_the_grace_by_the_store_s_clock(archive: Archive):
    fill(archive)
    assert len(run(archive, grace=None).merged) == 1
    [stone] = tombstones(archive)
    archive.age(stone, 3500)
    assert run(archive, grace=3600).deleted == run(archive, grace=None).deleted == []
    assert len(archive.listed()) == 5
    archive.age(stone, 101)
    assert len(run(archive, grace=3600).deleted) == 3


def test_a_selection_leaves_other_chains_and_levels_alone(archive: Archive):
    fill(archive)
    fill(archive, chain=OTHER)
    for elsewhere in ({"site": "nobody"}, {"partition": 7}, {"level": 1}):
        assert run(archive, **elsewhere) == RunReport()
    report = run(archive, site="eu-west", feed="NODES", partition=0, level=0)
    assert {m.ref.chain for m in report.merged} == {OTHER}


def test_a_damaged_output_is_made_again_while_its_inputs_are_there(archive: Archive):
    fill(archive)
    before = archive.read()
    [merged] = run(archive, grace=3600).merged
    good = archive.path(merged.ref.key).read_bytes()
    archive.path(merged.ref.key).write_bytes(good[:-1] + b"?")
    report = after_the_grace(archive)
    assert "E-READ-BACK" in report.failures[0].line
    assert (report.deleted, archive.path(merged.ref.key).read_bytes()) == ([], good)
    run(archive, grace=3600)
    assert archive.ranges() == ["0:31..40", "1:1..40"]
    assert archive.read().equals(before)


def test_segments_only_in_level_9_stay_and_are_logged_once(archive: Archive):
    archive.put(1, 20, rows([1]), level=9)
    late = archive.put(2, 5)
    first, second = run(archive), run(archive)
    assert [f.code for f in first.failures] == ["E-ROWS-MISSING"] == [f.code for f in second.failures]
    assert (first.known_failures, second.known_failures) == ([], second.failures)
    assert late.key in {s.key for s in archive.listed()}


def test_a_fork_is_logged_again_only_after_its_end_and_neither_side_is_touched(archive: Archive):
    fill(archive)
    for _ in range(2):
        false = archive.put(5, 14, rows(range(5, 15), salt="forged"), age=700)
        before, report = archive.ranges(), run(archive)
        assert (report.merged, report.deleted, archive.ranges()) == ([], [], before)
        assert [(f.code, f.suspects.count(false.key)) for f in report.failures] == [("E-FORK", 1)]
        run(archive, level=1)  # a run that does not read this level forgets nothing
        assert [f.code for f in run(archive).known_failures] == ["E-FORK"]
        archive.store.delete(false)
        assert run(archive, grace=None).known_failures == []
        assert archive.objects.list(archive.layout.reported_prefix()) == []
        for segment in archive.listed():
            if segment.level:
                archive.store.delete(segment)


def test_a_corrupt_tombstone_is_reported_and_never_used(archive: Archive):
    fill(archive)
    run(archive, grace=3600)
    [stone] = tombstones(archive)
    archive.path(stone).write_bytes(b'{"format_version":1}')
    archive.objects.put(stone.rpartition("/")[0] + "/notes.txt", b"hello")
    report = run(archive, grace=0)
    assert [f.exit_code for f in report.failures] == [3, 3]
    assert any("E-STATE-JSON" in f.line for f in report.failures)
    assert exit_code(report.failures) == 3


def test_a_tombstone_is_a_proposal_and_the_rest_must_hold_every_row(archive: Archive):
    """Everyone who may write to the bucket can write one, beside a segment that covers the rows but lacks some."""
    inputs = fill(archive)
    poor = archive.put(1, 40, rows([n for n in range(1, 41) if n != 15]), level=1)
    TombstoneStore(archive.objects, archive.layout).put(supersession_of_merge(poor, inputs))
    before = archive.objects.get(inputs[1].key)

    report = run(archive, NEVER)

    assert [s.coverage.first for s in report.deleted] == [1, 21], "what is proved goes"
    [failure] = report.failures
    assert "error[E-ROWS-MISSING]" in failure.line
    assert "sequence 15 of " in failure.line
    assert (archive.objects.get(inputs[1].key), exit_code(report.failures)) == (before, 3)
    assert run(archive, NEVER).known_failures == report.failures, "and it is told once"


@pytest.mark.parametrize(("inputs", "tasks"), [(4, [3]), (20, [4, 4, 4, 4, 3])], ids=["few", "many"])
def test_many_deletions_are_proved_where_merges_are_made(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, inputs: int, tasks: list[int]
):
    monkeypatch.setattr("compaction.run.SEGMENTS_PER_DELETION", 4)
    fill(archive, inputs)
    begun: list[int] = []

    class Elsewhere(LocalRunner):
        def map(self, work: Any, items: Any) -> Any:
            begun.extend(len(item.superseded) for item in items if isinstance(item, Deletion))
            return super().map(work, items)

    report = Compaction(archive.store, (DUE,), 0, Elsewhere(archive.store)).run(Selection())
    assert [s.coverage.first for s in report.deleted] == [n * 10 + 1 for n in range(inputs - 1)]
    assert begun == (tasks if inputs > 4 else []), "a few do not begin Spark"


def test_a_run_that_is_to_stop_does_not_prove_all_of_a_task_first(archive: Archive):
    inputs = fill(archive, 75)
    run(archive, grace=None)

    def check() -> None:
        if archive.objects.head(inputs[0].key) is None:
            raise Unavailable("stopped")

    store = archive.store
    with pytest.raises(Unavailable, match="stopped"):
        Compaction(store, (NEVER,), 0, LocalRunner(store, check=check), check=check).run(Selection())
    assert len(archive.listed()) > 25


def test_several_processes_merge_and_prove_as_one_does(archive: Archive, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("compaction.jobs.PROCESSES_FROM_S", 0.0)
    for chain in (CHAIN, OTHER):
        fill(archive, chain=chain)
    before = archive.read()
    with closing(JobRunner(archive.store, settings_of(archive), 2, lambda: None)) as runner:
        report = Compaction(archive.store, (DUE,), 0, runner).run(Selection())
    assert ([each.inputs for each in report.merged], len(report.deleted), report.failures) == ([4, 4], 6, [])
    assert archive.read().equals(before)


def die(_store: SegmentStore, _item: object) -> None:
    os._exit(9)


def test_a_process_that_ends_and_a_stop_end_the_run_and_all_of_its_processes(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("compaction.jobs.PROCESSES_FROM_S", 0.0)
    asked = iter([True])

    def check() -> None:
        if not next(asked, False):
            raise Unavailable("stopped")

    for work, wanted in ((die, "E-JOBS"), (merge_output, "E-UNAVAILABLE")):
        asked = iter([True] * 1000 if work is die else [])
        with (
            closing(JobRunner(archive.store, settings_of(archive), 2, check)) as runner,
            raises_code(Unavailable, wanted),
        ):
            runner.map(work, [Output(1, tuple(fill(archive)))] * 2)
        assert multiprocessing.active_children() == []


def test_the_number_of_processes_is_bounded_and_spark_is_named_where_it_pays(monkeypatch: pytest.MonkeyPatch):
    assert 1 <= jobs.default_jobs() <= len(os.sched_getaffinity(0))
    for free, wanted in ((10**8, 1), (10**12, jobs.MAX_DEFAULT_JOBS)):
        monkeypatch.setattr(jobs, "_free_memory", lambda free=free: free)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(100))
        assert jobs.default_jobs() == wanted
    assert jobs.spark_advice(1000, 10**10, 4) == ""
    assert jobs.spark_advice(1000, 4 * 10**10, 1).startswith(
        "37.3 GiB take about 33m24s with --jobs 1; --engine spark "
    )


def test_deletions_are_not_proved_where_that_is_switched_off(archive: Archive):
    inputs, poor = fill(archive), archive.put(1, 40, rows([1]), level=1)
    TombstoneStore(archive.objects, archive.layout).put(supersession_of_merge(poor, inputs))
    trusting = Compaction(archive.store, (NEVER,), 0, LocalRunner(archive.store), prove_deletions=False)
    assert [s.coverage.first for s in trusting.run(Selection()).deleted] == [1, 11, 21]


def test_a_damaged_segment_is_not_deleted_before_it_is_checked(archive: Archive):
    """Unless the remaining segments hold every sequence of its coverage: then none can be missing."""
    inputs = [archive.put(n, n + 9, rows(range(n, n + 9, 2)), age=700) for n in range(1, 41, 10)]
    run(archive, grace=3600)
    spoil(archive, inputs[0])
    report = after_the_grace(archive)
    assert [s.coverage.first for s in report.deleted] == [11, 21]
    assert any("E-SEG-CORRUPT" in failure.line for failure in report.failures)


def test_deletions_of_another_run_are_skipped(archive: Archive):
    gone, above = archive.put(1, 10), archive.put(1, 10, rows(range(2, 11)), level=1)
    archive.store.delete(gone)
    with closing(DeletionProof(archive.store, [above])) as proof:
        proof.check(gone)


@pytest.mark.parametrize("number", range(4))
def test_every_absent_row_is_found_across_segments_row_groups_and_overlaps(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, number: int
):
    """Comparison with sets of sequences: deleted and remaining segments begin and end anywhere."""
    random = seeded(number)
    monkeypatch.setattr(writer, "row_group_bytes", lambda _level: 600)  # about ten rows
    held, middle = {n for n in range(1, 101) if random.random() < 0.8}, random.randrange(30, 70)
    spans = [(1, middle + random.choice([0, 5])), (middle + 1, 100)]
    staying = [archive.put(a, z, rows(n for n in range(a, z + 1) if n in held), level=2) for a, z in spans]
    with closing(DeletionProof(archive.store, staying)) as proof:
        first = 1
        while first <= 100:
            last = min(100, first + random.randrange(30))
            more = 0.1 if random.random() < 0.5 else 0.0
            wanted = [n for n in range(first, last + 1) if n in held or random.random() < more]
            goes, absent = archive.put(first, last, rows(wanted)), set(wanted) - held
            if absent:
                with pytest.raises(DataError, match=f"sequence {min(absent)} of "):
                    proof.check(goes)
            else:
                proof.check(goes)
            first = last + 1 - (random.randrange(5) if last < 100 and last - first > 5 else 0)


def test_errors_of_single_deletions_are_read_and_reported(archive: Archive):
    fill(archive)
    run(archive, grace=3600)

    class Stubborn(LocalObjects):
        def delete(self, key: str) -> None:
            if "0000011-" in key:
                raise Unavailable(f"delete {key}: come back later")
            super().delete(key)

    report = after_the_grace(Archive(archive.folder, Stubborn(archive.folder / "store")))
    assert sorted(s.coverage.first for s in report.deleted) == [1, 21]
    assert [f.exit_code for f in report.failures] == [75]
    assert [s.coverage.first for s in run(archive, grace=3600).deleted] == [11]


def test_a_preview_shows_the_effects_of_a_run_with_a_read_only_credential(archive: Archive):
    fill(archive)
    fill(archive, 1, age=0, first=41)

    class ReadOnly(LocalObjects):
        def put(self, key: str, *rest: object, **more: object) -> None:
            raise Refused(f"put {key}: no permission")

        delete = put

    reader = Archive(archive.folder, ReadOnly(archive.folder / "store"))
    for outputs, going in ((["1..40"], []), ([], ["1..10", "11..20", "21..30", "31..40"])):
        [survey] = [s for s in compaction(reader, grace=3600).preview(Selection(), time.time()) if s.chain == CHAIN]
        assert [str(each.coverage) for each in survey.outputs] == outputs
        assert [str(each.coverage) for each in survey.deletable] == going
        run(archive, grace=3600)
        archive.age(tombstones(archive)[0], 4000)


def test_a_preview_reads_footers_of_segments_that_overlap(archive: Archive, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("common.archive.store.BLOCK_BYTES", 1000)
    size = sum(archive.put(first, first + 1999).size for first in (1, 1001))
    reader = Archive(archive.folder, objects := CountingObjects(archive.folder / "store"))
    compaction(reader, NEVER).preview(Selection(), time.time())
    assert 0 < objects.read < size / 3


# Snapshots, which egress may not delete


def snapshots(archive: Archive, *chains: Chain) -> list[str]:
    """Put objects that look like snapshots, which compaction never opens: seven of each chain, at 10 to 70, the lowest
    the oldest.
    """
    found = []
    for chain, position in itertools.product(chains or (CHAIN,), range(10, 80, 10)):
        found.append(archive.layout.state(StateName(chain, position, "0" * 16)))
        archive.objects.put(found[-1], b"%d bytes" % position)
        archive.age(found[-1], 10_000 - position)
    return found


def positions(archive: Archive, chain: Chain = CHAIN) -> list[int]:
    return sorted(ref.position for ref in list_snapshots(archive.objects, archive.layout, chain))


def test_of_selected_chains_all_snapshots_but_the_newest_three_go_and_nothing_else_and_without_deletion_none(
    archive: Archive,
) -> None:
    foreign = f"{archive.layout.states_prefix(CHAIN)}notes.txt"
    archive.objects.put(foreign, b"mine")
    archive.age(foreign, 10_000)
    before = {info.key for info in archive.objects.list("data/_floe/site=")}
    keys = snapshots(archive, CHAIN, OTHER)
    assert run(archive, NEVER, grace=None).pruned == []
    surveys = compaction(archive, NEVER, grace=None).preview(Selection(), time.time())
    assert all(survey.snapshots == () for survey in surveys)
    report = run(archive, NEVER, site=CHAIN.site)
    assert (positions(archive), len(positions(archive, OTHER))) == ([50, 60, 70], 7)
    assert ([ref.key for ref in report.pruned], report.failures) == (keys[:4], [])
    assert before <= {info.key for info in archive.objects.list("data/_floe/site=")}


def test_a_chain_whose_snapshots_cannot_be_listed_or_deleted_does_not_stop_the_others(archive: Archive) -> None:
    snapshots(archive, CHAIN, OTHER)

    def fault(real, prefix, **kwargs):  # type: ignore[no-untyped-def]
        if prefix == archive.layout.states_prefix(CHAIN):
            raise Unavailable("list: 503", code="E-LIST-INVALID")
        return real(prefix, **kwargs)

    def under(faulty: FaultyStore) -> RunReport:
        return run(Archive(archive.folder, faulty), NEVER)  # type: ignore[arg-type]

    refused = under(FaultyStore(archive.objects).on("delete", raising(Refused("delete: 403", code="E-S3-DENIED"))))
    assert (refused.pruned, [failure.exit_code for failure in refused.failures]) == ([], [77, 77]), "once for a chain"
    [failure] = under(FaultyStore(archive.objects).on("list", fault)).failures
    assert (len(positions(archive, CHAIN)), len(positions(archive, OTHER))) == (7, 3)
    assert "snapshots of us-east/NODES/0000/0" in failure.work


def test_the_command_prints_which_snapshots_go(tmp_path: Path) -> None:
    site = Site(tmp_path)
    keys = snapshots(site)
    assert [entry["key"] for entry in site.compact("--json", "--dry-run")["outdated"]] == keys[:4]
    assert site.compact().out.splitlines()[1].split()[:5] == ["pruned", str(CHAIN), "-", "4", "snapshots"]
    assert site.compact("--json")["pruned"] == []
