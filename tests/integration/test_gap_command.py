"""`floe gap accept`: what may be given up, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import floe
from common.chain import Chain
from common.segments.store import quarantine_command
from common.sequences import MAX_SEQUENCE, SequenceRange
from ingress.operator.holes import look_up, standing_at
from tests.support.ingress import CHAIN, Archive, Centre, rows_of

LATER = CHAIN.next_incarnation()


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 10))
    archive.put(rows_of(21, 30))
    return archive


def accept(archive: Archive, first: int, last: int, *more: str, chain: Chain = CHAIN, is_exact: bool = True) -> Result:
    config = str(Centre(archive.folder.parent, archive, "nats://127.0.0.1:1").write())
    named = ["--site", chain.site, "--feed", chain.feed]
    named += ["--incarnation", str(chain.incarnation)] if is_exact else []
    words = ["gap", "accept", "-c", config, *named, "--first", str(first), "--last", str(last), *more]
    return CliRunner().invoke(floe.cli, words, prog_name="floe")


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        (5, 12, "expected no segment there, found 1..10"),
        (11, 21, "expected no segment there, found 21..30"),
        (11, 40, "which ends at 30"),
        (31, 31, "of which nothing reaches 31"),
        (20, 11, "is greater than --last"),
    ],
)
def test_only_what_nobody_covers_can_be_given_up(archive: Archive, first: int, last: int, why: str) -> None:
    done = accept(archive, first, last, "--yes")

    assert (done.exit_code, why in done.stderr) == (2, True), done.output
    assert archive.documents.gaps(CHAIN) == []


def test_nobody_is_asked_where_nobody_can_answer_and_what_was_decided_first_stays(archive: Archive) -> None:
    refused = accept(archive, 11, 20)
    accepted = accept(archive, 11, 20, "--yes", "--note", "gone", "--json")

    assert (refused.exit_code, accepted.exit_code) == (2, 0), accepted.output
    [gap] = archive.documents.gaps(CHAIN)
    assert (gap.range, gap.note) == (SequenceRange(11, 20), "gone")
    assert json.loads(accepted.stdout)["by"] == gap.by
    again = accept(archive, 11, 20, "--yes", "--note", "second", "--json")
    assert json.loads(again.stdout)["note"] == "gone"


def test_a_dry_run_asks_nobody_and_gives_nothing_up(archive: Archive) -> None:
    shown = accept(archive, 11, 20, "--dry-run")
    listed = accept(archive, 11, 20, "--dry-run", "--json")
    refused = accept(archive, 5, 12, "--dry-run")

    assert (shown.exit_code, refused.exit_code) == (0, 2), shown.output
    assert shown.stdout == "us-east/NODES/0000/0 11..20 can be given up; nothing was changed\n"
    assert json.loads(listed.stdout)["dry_run"] is True
    assert archive.documents.gaps(CHAIN) == []


def test_damaged_segments_are_named_with_the_command_that_puts_them_away_and_given_up(archive: Archive) -> None:
    bad = archive.put(rows_of(11, 20))
    path = archive.folder / bad.key
    path.write_bytes(path.read_bytes()[:-100] + b"\0" * 100)

    found = standing_at(archive.store, look_up(archive.store, archive.documents, CHAIN, 11))
    assert found is not None
    assert (found.rows, found.kind, found.damaged) == (SequenceRange(11, 20), "damaged", (bad.key,))
    assert f"\n{quarantine_command(bad.key)}\n" in found.ways_out()[0]
    assert standing_at(archive.store, look_up(archive.store, archive.documents, CHAIN, 5)) is None
    done = accept(archive, 11, 20, "--yes")
    assert (done.exit_code, bad.key in done.stderr) == (0, True), done.output


def test_the_end_of_an_incarnation_can_be_given_up_and_what_only_a_tail_claims_not(archive: Archive) -> None:
    """Whoever can write the tail could have the chain passed over what comes next."""
    archive.documents.write_tail(CHAIN, MAX_SEQUENCE)

    refused = accept(archive, 31, 40, "--yes")
    assert (refused.exit_code, "of which nothing reaches 31" in refused.stderr) == (2, True), refused.output
    assert [hole.rows for hole in look_up(archive.store, archive.documents, CHAIN).holes()] == [SequenceRange(11, 20)]
    archive.begin(LATER, previous={0: 35})
    assert accept(archive, 36, 40, "--yes").exit_code == 2
    assert accept(archive, 31, 35, "--yes").exit_code == 0


def test_without_an_incarnation_the_newest_is_meant_unless_an_older_one_has_a_hole_there(archive: Archive) -> None:
    archive.put(rows_of(1, 4, LATER), chain=LATER)
    archive.put(rows_of(15, 20, LATER), chain=LATER)
    refused, accepted = (accept(archive, *each, "--yes", is_exact=False) for each in ((8, 14), (5, 10)))

    assert refused.exit_code == 2
    assert "say --incarnation 0 or --incarnation 1" in refused.stderr
    assert accepted.exit_code == 0, accepted.stderr
    assert [gap.range for gap in archive.documents.gaps(LATER)] == [SequenceRange(5, 10)]
    assert archive.documents.gaps(CHAIN) == []


def test_a_feed_that_is_not_there_is_an_error_that_says_which_are(archive: Archive) -> None:
    refused = accept(archive, 11, 20, "--yes", chain=Chain("us-esat", "NODES"))
    assert (refused.exit_code, "did you mean us-east/NODES?" in refused.stderr) == (2, True)
