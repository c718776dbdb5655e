"""`floe compact` clears snapshots away, because egress may not: what goes, what stays, what is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.chain import Chain
from common.errors import Refused, Unavailable
from common.segments.documents import list_snapshots
from common.segments.keys import StateName
from compaction.report import preview_rows, report_json, report_rows
from compaction.run import Compaction, LocalRunner, Report, Selection
from tests.integration.test_compaction_cli import Site
from tests.support.compaction import CHAIN, OTHER, Archive, Job, TestPolicy, begun
from tests.support.stores import FaultyStore, raising

IDLE = TestPolicy(min_age=10**9, max_wait=10**9, min_count=3, min_size=10**9, max_size=10**9)
GRACE = 600.0
OLD = 10_000.0


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return begun(tmp_path, CHAIN, OTHER)


def snapshot(archive: Archive, position: int, *, age: float = OLD, chain: Chain = CHAIN, digit: str = "0") -> str:
    """An object that looks like a snapshot; compaction never opens one."""
    key = archive.layout.state(StateName(chain, position, digit * 16))
    archive.objects.put(key, b"%d bytes" % position)
    archive.age(key, age)
    return key


def fill(archive: Archive, *chains: Chain) -> list[str]:
    """Seven of each chain, at 10 to 70, the lowest the oldest."""
    at = range(10, 80, 10)
    return [snapshot(archive, n, age=OLD - n, chain=chain) for chain in chains or (CHAIN,) for n in at]


def compaction(archive: Archive, grace: float | None = GRACE, objects: object = None) -> Compaction:
    store = archive.store if objects is None else Archive(archive.folder, objects).store  # type: ignore[arg-type]
    return Compaction(store, [IDLE], grace, LocalRunner(store))


def run(archive: Archive, grace: float | None = GRACE, objects: object = None, **selection: object) -> Report:
    return compaction(archive, grace, objects).run(Selection(**selection))


def positions(archive: Archive, chain: Chain = CHAIN) -> list[int]:
    return sorted(ref.position for ref in list_snapshots(archive.objects, archive.layout, chain))


def test_a_preview_names_what_goes_a_run_counts_it_the_newest_three_stay_and_without_deletion_all(
    archive: Archive,
) -> None:
    keys = fill(archive)
    assert run(archive, None).pruned == []
    assert all(survey.outdated == () for survey in compaction(archive, None).preview(Selection()))
    assert [row[:2] for row in preview_rows(compaction(archive).preview(Selection()))] == [
        ["delete", key] for key in keys[:4]
    ]
    assert len(positions(archive)) == 7
    report = run(archive)
    assert positions(archive) == [50, 60, 70]
    assert ([ref.key for ref in report.pruned], report.failures) == (keys[:4], [])
    assert report_rows(report) == [["pruned", CHAIN, None, "4 snapshots", None, 32, None]]
    assert len(report_json(report)["pruned"]) == 4
    assert run(archive).pruned == []


def test_only_selected_chains_are_cleared_and_foreign_objects_and_other_documents_stay(archive: Archive) -> None:
    foreign = f"{archive.layout.states_prefix(OTHER)}notes.txt"
    archive.objects.put(foreign, b"mine")
    archive.age(foreign, OLD)
    before = {info.key for info in archive.objects.list("data/_floe/site=")}
    fill(archive, CHAIN, OTHER)
    run(archive, site="eu-west")
    assert (len(positions(archive, CHAIN)), len(positions(archive, OTHER))) == (7, 3)
    assert before <= {info.key for info in archive.objects.list("data/_floe/site=")}


@pytest.mark.parametrize(
    "error", [Unavailable("list: 503", code="E-LIST-INVALID"), Refused("list: 403", code="E-S3-DENIED")]
)
def test_a_chain_that_cannot_be_listed_does_not_stop_the_others(archive: Archive, error: Exception) -> None:
    fill(archive, CHAIN, OTHER)

    def fault(real, prefix, **kwargs):  # type: ignore[no-untyped-def]
        if prefix == archive.layout.states_prefix(CHAIN):
            raise error
        return real(prefix, **kwargs)

    [failure] = run(archive, objects=FaultyStore(archive.objects).on("list", fault)).failures
    assert (len(positions(archive, CHAIN)), len(positions(archive, OTHER))) == (7, 3)
    assert "snapshots of us-east/NODES/0000/0" in failure.what


def test_a_refused_delete_is_told_once_for_a_chain_and_the_others_go_on(archive: Archive) -> None:
    fill(archive, CHAIN, OTHER)
    faulty = FaultyStore(archive.objects).on("delete", raising(Refused("delete: 403", code="E-S3-DENIED")))
    report = run(archive, objects=faulty)
    assert (report.pruned, [failure.exit_code for failure in report.failures]) == ([], [77, 77])


def test_a_run_killed_between_two_deletions_leaves_the_newest_and_is_finished_by_the_next(archive: Archive) -> None:
    fill(archive)
    assert Job(archive.folder, "compaction.delete_snapshot=kill@2").wait() == -9
    assert positions(archive) == [20, 30, 40, 50, 60, 70]
    run(archive)
    assert positions(archive) == [50, 60, 70]


def test_the_command_prints_them(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.configure(delete_grace="10m")
    keys = fill(site)
    assert [entry["key"] for entry in site.compact("--json", "--dry-run")["outdated"]] == keys[:4]
    assert site.compact().out.splitlines()[1].split()[:5] == ["pruned", str(CHAIN), "-", "4", "snapshots"]
    assert site.compact("--json")["pruned"] == []
