"""`floe compact` and `floe segments verify` as commands."""

import errno
import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.archive.documents import AcceptedGap, ChainDocument, ChainStore
from common.archive.segment import Reason
from common.chain import Chain
from common.objects.local import LocalObjects
from common.objects.port import ObjectStore
from common.sequences import SequenceRange
from common.service import progress
from tests.support.commands import run_here
from tests.support.compaction import CHAIN, Archive, at_once, rows

LEVEL = {"from": 0, "to": 1, "min_age": "1m", "max_wait": "10m", "min_count": 3, "min_size": "1G", "max_size": "4G"}


class Site(Archive):
    """An archive with a configuration."""

    def __init__(self, folder: Path, objects: ObjectStore | None = None) -> None:
        super().__init__(folder, objects)
        self.chains = ChainStore(self.objects, self.layout)
        self.chains.create_chain(CHAIN, ChainDocument((), 1, 1))
        self.config = folder / "floe.yaml"
        self.configure()

    def configure(self, **compaction: object) -> None:
        self.write({"url": f"file://{self.folder}/store"}, {**at_once(LEVEL), **compaction})

    def write(self, store: Mapping[str, Any], compaction: Mapping[str, Any], **more: Any) -> None:
        document = {"store": store, "spool_dir": str(self.folder / "spool"), "compaction": compaction, **more}
        self.config.write_text(yaml.safe_dump(document))
        self.config.chmod(0o600)

    def compact(self, *options: str, code: int = 0):
        return self._floe("compact", "-c", str(self.config), *options, code=code)

    def verify(self, *options: str, code: int = 0):
        return self._floe("segments", "verify", "-c", str(self.config), *options, code=code)

    def _floe(self, *command: str, code: int):
        done = run_here(*command)
        assert done.code == code, done.err
        return done.json() if "--json" in command else done


@pytest.fixture
def site(tmp_path: Path) -> Site:
    found = Site(tmp_path)
    for first in range(1, 40, 10):
        found.put(first, first + 9, age=700)
    return found


def test_a_run_prints_a_table_of_what_it_did_and_then_has_nothing_to_do(site: Site):
    done = run_here("-v", "compact", "-c", str(site.config))
    lines = done.out.splitlines()
    output = [json.loads(line) for line in done.err.splitlines() if line.startswith("{")]
    assert [output[0]["action"], output[-1]["action"]] == ["process_started", "process_ended"]
    assert (output[0]["engine"], output[0]["store"]) == ("local", f"file://{site.folder}/store/data")
    assert (output[-1]["merged"], output[-1]["rows"], output[-1]["deleted"], output[-1]["failures"]) == (1, 40, 3, 0)
    [merged] = (line for line in output if line["action"] == "segment_merged")
    assert (merged["first"], merged["last"], merged["rows"]) == (1, 40, 40)
    assert merged["stored_bytes"] > 0
    assert lines[0].split() == ["action", "chain", "level", "sequences", "segments", "bytes", "into"]
    assert lines[1].split()[:5] == ["merged", "us-east/NODES/0000/0", "1", "1..40", "4"]
    assert lines[2].split()[:5] == ["deleted", "us-east/NODES/0000/0", "0", "-", "3"]
    assert site.compact().out == "nothing to do: no segment of 1 chain is due\n"
    assert site.ranges() == ["0:31..40", "1:1..40"]


def test_a_run_that_does_nothing_shows_it(site: Site):
    site.configure(levels=[{**LEVEL, "min_age": "1h", "max_wait": "2h"}])
    assert site.compact().out == "nothing to do: no segment of 1 chain is due\n"
    (site.folder / "empty").mkdir()
    site.config.write_text(site.config.read_text().replace(f"{site.folder}/store", f"{site.folder}/empty"))
    assert site.compact().out == "nothing to do: the archive holds no such chain\n"


def test_only_v_shows_the_log_of_a_run_and_without_it_progress_is_shown(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "PRINT_INTERVAL_S", 0.0)
    done = site.compact()
    assert not any(line.startswith("{") for line in done.err.splitlines())
    assert "100%  merge 1 of 1" in done.err
    assert "100%  prove 1 of 1" in done.err
    site.put(41, 50, age=700)
    site.put(51, 60, age=700)
    assert "merge 1 of 1" not in run_here("-v", "compact", "-c", str(site.config)).err


def test_verification_shows_how_much_is_left(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "PRINT_INTERVAL_S", 0.0)
    other = Chain("us-west", "NODES")
    site.chains.create_chain(other, ChainDocument((), 1, 1))
    site.put(1, 9, age=700, chain=other)
    shown = [line for line in site.verify().err.splitlines() if "%" in line]
    assert shown[1].startswith(" 25%, "), "the second of four segments, in the first of two chains"
    assert " left  us-east/NODES/0000/0 (1 of 2 chains): 2 segments, 20 rows, " in shown[1]
    assert shown[-1].split()[0] == "100%"


def test_a_selection_of_others_does_nothing_or_is_an_error_with_the_known_ones(site: Site):
    assert "there are us-east" in site.compact("nosuch", code=2).err
    assert "did you mean us-east/NODES?" in site.compact("us-east/NODE", code=2).err
    assert "there are us-east/NODES/0000/0" in site.compact("us-east/NODES/7", "--dry-run", code=2).err
    assert "did you mean us-east/NODES?" in site.verify("us-esat/NODES", code=2).err
    assert site.compact("--level", "1").out == "nothing to do: no entry of compaction.levels reads that level\n"
    assert len(site.ranges()) == 4
    found = site.compact("--json", "us-east/NODES/0000/0", "--level", "0")
    [merged] = found["merged"]
    assert merged.items() >= {"level": 1, "first": 1, "last": 40, "input_count": 4, "rows": 40}.items()
    assert (len(found["deleted"]), len(found["tombstones"]), found["failures"]) == (3, 1, [])


def test_a_dry_run_lists_keys_and_bytes_and_changes_nothing(site: Site):
    due = site.listed()
    for first in range(51, 90, 10):  # behind a hole: runs of their own
        site.put(first, first + 9, age=310 if first < 80 else 10)
    site.put(101, 110, age=5000)
    before, found = site.listed(), site.compact("--dry-run", "--json")
    assert [i["key"] for i in found["outputs"][0]["inputs"]] == [s.key for s in due]
    assert found["totals"].items() >= {"outputs": 1, "segments": 4, "bytes": sum(s.size for s in due)}.items()
    lines = site.compact("--dry-run").out.splitlines()
    assert [line.split()[1:3] for line in lines[1:5]] == [[s.key, str(s.size)] for s in due]
    rows_of = {line.split()[0]: line for line in lines[1:]}
    assert re.fullmatch(r"due +us-east/NODES/0000/0 level 0 +\d+ +4 segments into 1 of level 1", rows_of["due"])
    assert rows_of["total"].split("  ")[-1] == "1 merge of 4 segments"
    assert site.listed() == before


def test_wrong_options_and_configurations_have_codes_of_their_own(site: Site):
    site.compact("--level", "9", code=2)
    site.configure(levels=[{**LEVEL, "to": 0}])
    site.compact(code=78)


# verify


def test_a_sound_chain_verifies_shallow_and_deep(site: Site):
    site.compact()
    assert re.fullmatch(
        r"all is well: \d+ segments? of 1 chain, [\d,]+ rows, [\d.]+ KiB \(checksums and footers; .*\)\n",
        site.verify("us-east/NODES").err,
    )
    assert "every row was read" in site.verify("us-east/NODES", "--deep").err
    assert site.verify().out.splitlines()[1].split()[:4] == ["us-east/NODES/0000/0", "1..40", "0:1", "1:1"]
    [found] = site.verify("--deep", "--json", "us-east/NODES")
    assert (found["first"], found["last"], found["segments"], found["problems"]) == (1, 40, {"0": 1, "1": 1}, [])


def test_late_rows_are_reported_until_they_are_united_and_lost_ones_until_accepted(site: Site):
    chain = begun(site)
    expired = {"ledger": {Reason.GONE_BEFORE_READ: 50}, "unread": SequenceRange(1, 50)}
    site.put(1, 120, rows(range(51, 121)), age=700, chain=chain, **expired)
    site.put(1, 100, age=700, chain=chain)
    lost = {"ledger": {Reason.GONE_FROM_HOLE: 1}, "unread": SequenceRange(125, 125)}
    site.put(121, 130, rows(n for n in range(121, 131) if n != 125), age=700, chain=chain, **lost)

    problems = site.verify("--json", "eu-west", code=3)[0]["problems"]
    assert [p["kind"] for p in problems] == ["late", "gone"]
    assert "has 50 rows of 1..50 that" in problems[0]["text"]
    assert problems[1]["text"].startswith("1 of 125..125 were gone")
    lines = site.verify("eu-west", code=3).err.splitlines()
    assert lines[1].startswith("floe replay -c ")
    assert "--from-sequence 1 --to-sequence 50 --target NODES_LATE" in lines[1]
    assert lines[3].endswith("eu-west/NODES/0000/0 --first 125 --last 125")

    site.chains.accept_gap(chain, AcceptedGap(SequenceRange(125, 125)))
    assert "E-LATE-ROWS" in site.compact("eu-west", code=3).err
    site.compact("eu-west")
    [found] = site.verify("--json", "--deep", "eu-west")
    assert (found["problems"], found["accepted"]) == ([], [{"first": 125, "last": 125}])
    [filled] = [ref for ref in site.listed(chain) if 125 in ref.coverage]
    assert site.footer(filled).ledger.to_json() == {"gone_from_hole": 1}


def test_late_rows_in_a_segment_of_level_9_stay_and_verify_shows_it(site: Site):
    chain = begun(site)
    gone = {"ledger": {Reason.GONE_BEFORE_READ: 4}, "unread": SequenceRange(35, 38)}
    site.put(1, 40, rows(n for n in range(1, 41) if not 35 <= n <= 38), level=9, age=700, chain=chain, **gone)
    site.put(33, 90, level=1, age=700, chain=chain)
    assert site.compact("eu-west", "--json")["merged"] == []
    [problem] = site.verify("--json", "eu-west", code=3)[0]["problems"]
    assert (problem["kind"], problem["first"], problem["last"]) == ("late", 35, 38)
    assert problem["text"].endswith("level 9 is the last, they cannot be merged")


def begun(site: Site, first: int = 1) -> Chain:
    """Make another chain, without segments."""
    chain = Chain("eu-west", "NODES")
    site.chains.create_chain(chain, ChainDocument((), 1, first))
    return chain


def test_a_chain_must_begin_as_documented_and_a_corrupt_document_is_a_problem_of_its_chain(site: Site):
    late = begun(site, 5)
    site.put(11, 20, chain=late)
    site.objects.put(site.layout.chain_document(CHAIN), b"{")
    kinds = {chain["site"]: [p["kind"] for p in chain["problems"]] for chain in site.verify("--json", code=3)}
    assert kinds == {CHAIN.site: ["document"], late.site: ["hole"]}
    site.chains.raise_floor(late, 11)
    assert site.verify("--json", "eu-west")[0]["problems"] == []


# Problems that are reported once, and quarantine


def test_a_fork_ends_with_3_while_it_is_new_and_always_with_strict_until_one_side_is_quarantined(site: Site):
    false = site.put(5, 14, rows(range(5, 15), salt="forged"), age=700)
    before = site.path(false.key).read_bytes()
    lines = site.compact("--strict", code=3).err.splitlines()
    assert any("error[E-FORK]" in line for line in lines)
    again = site.compact()
    assert "E-FORK" not in again.err
    assert "reported before: 1; --strict" in again.err
    assert (site.compact("--dry-run").code, [f["is_new"] for f in site.compact("--json")["failures"]]) == (0, [False])
    site.compact("--strict", code=3)

    commands = [line.split() for line in lines if line.startswith("floe ")]
    assert [words[:3] for words in commands] == [["floe", "segments", "quarantine"]] * 2
    [command] = [words for words in commands if words[-1] == false.key]
    done = run_here(*command[1:], "--json")
    assert done.code == 0, done.err
    kept_at = done.json()["kept_at"]
    assert kept_at.startswith("data/_floe/quarantine/")
    assert (site.path(kept_at).read_bytes(), site.objects.head(false.key)) == (before, None)
    site.compact("--strict")
    assert site.ranges() == ["0:31..40", "1:1..40"]


def test_junk_among_the_tombstones_is_offered_for_quarantine(site: Site):
    site.compact()
    site.objects.put(site.layout.tombstones_prefix(CHAIN) + "notes of last week.txt", b"hello")
    [offered] = [line for line in site.compact(code=3).err.splitlines() if line.startswith("floe ")]
    assert (run_here(*shlex.split(offered)[1:]).code, site.compact("--strict").code) == (0, 0)


def test_quarantine_is_refused_for_uncovered_segments_and_for_documents(site: Site, monkeypatch: pytest.MonkeyPatch):
    segment, twin = site.listed()[0], site.put(1, 10, rows(range(1, 11), salt="other"))
    site.path(twin.key).write_bytes(b"?")  # it covers by name only

    def quarantine(key: str, *options: str):
        return run_here("segments", "quarantine", "-c", str(site.config), key, *options)

    refused = quarantine(segment.key)
    assert (refused.code, "1..10" in refused.err, "--yes" in refused.err) == (2, True, True)
    assert "--believe-listing" not in refused.err
    last = max(site.listed(), key=lambda each: each.coverage.last)
    done = quarantine(last.key, "--yes")  # the high-water mark of egress is there
    assert (done.code, "\nfloe egress resolve -c site.yaml NODES --believe-listing\n" in done.err) == (0, True), done
    for document in (site.layout.chain_document(CHAIN), site.layout.tail(CHAIN), "elsewhere/notes"):
        site.objects.put(document, b"{")
        assert "E-QUARANTINE" in quarantine(document, "--yes").err
        assert site.objects.head(document) is not None
    assert quarantine(f"file://{site.folder}/store/{segment.key}", "--yes").code == 0
    assert site.objects.head(segment.key) is None
    for wrong in ("", "data/../floe.yaml", "/data/notes"):
        assert (quarantine(wrong).code, "expected parts that" in quarantine(wrong).err) == (2, True)
    for gone in (segment.key, "nosuch"):
        missing = quarantine(gone, "--yes")
        assert (missing.code, "not in the store" in missing.err) == (3, True)

    def full_disk(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(LocalObjects, "download", full_disk)
    full = quarantine(site.listed()[0].key, "--yes")
    assert (full.code, "E-SPOOL" in full.err) == (75, True), full


def samples(path: Path) -> dict[str, float]:
    """The samples of a textfile, without the prefix of their names."""
    lines = [line.split(" ") for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name.removeprefix("floe_compaction_"): float(value) for name, value in lines}


def test_a_run_leaves_its_metrics_for_a_textfile_collector(site: Site, tmp_path: Path):
    path = tmp_path / "metrics" / "floe.prom"
    path.parent.mkdir()
    sizes = {ref.key: ref.size for ref in site.listed()}
    site.compact("--metrics-textfile", str(path))
    first = samples(path)
    counts = {"merged_segments": 4, "output_segments": 1, "merged_rows": 40, "deleted_segments": 3, "failures": 0}
    assert ({name: first[name] for name in counts}, first["read_bytes"]) == (counts, sum(sizes.values()))
    assert first["written_bytes"] == next(ref.size for ref in site.listed() if ref.level == 1)
    assert first["last_success_timestamp_seconds"] == first["last_run_timestamp_seconds"] > 1_700_000_000
    assert first["duration_seconds"] > 0
    assert list(path.parent.iterdir()) == [path], "nothing half written is left"

    (tmp_path / "store").rename(tmp_path / "away")
    site.compact("--metrics-textfile", str(path), code=75)
    second = samples(path)
    assert second["failures"] == 1
    assert second["last_success_timestamp_seconds"] == first["last_success_timestamp_seconds"]
    assert second["last_run_timestamp_seconds"] > first["last_run_timestamp_seconds"]


def test_an_unwritable_textfile_is_an_error_before_any_work_and_a_dry_run_has_none(site: Site, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    before = site.listed()
    for name in ("missing/floe.prom", "pipe", ".", "store"):
        assert "--metrics-textfile" in site.compact("--metrics-textfile", str(tmp_path / name), code=2).err
    path = tmp_path / "floe.prom"
    assert "--metrics-textfile" in site.compact("--dry-run", "--metrics-textfile", str(path), code=2).err
    assert (site.listed(), path.exists()) == (before, False)


def test_a_run_leaves_in_the_bucket_how_it_ended(site: Site, tmp_path: Path):
    def noted() -> dict[tuple[str | None, str | None], tuple[int, bool]]:
        return {name: (run.code, run.succeeded is not None) for name, run in site.chains.runs().items()}

    for options in (["--dry-run"], ["--level", "0"], ["us-east/NODES/0000"]):
        site.compact(*options)
    assert noted() == {}
    site.compact("us-east/NODES")
    site.compact()
    assert noted() == {(None, None): (0, True), ("us-east", "NODES"): (0, True)}
    first = site.chains.read_run(None, None)
    assert first.succeeded == first.ended > 1_700_000_000
    assert first.seconds > 0

    site.objects.put(f"{site.layout.tombstones_prefix(CHAIN)}{'0' * 20}-{'1'.zfill(20)}-{'0' * 16}.json", b"spoiled")
    site.compact("--strict", code=3)
    failed = site.chains.read_run(None, None)
    assert (failed.code, failed.succeeded) == (3, first.succeeded)
    assert failed.ended > first.ended
