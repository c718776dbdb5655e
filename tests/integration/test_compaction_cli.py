"""`floe compact` and `floe segments verify` as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from common.chain import Chain
from common.segments.documents import ChainDocument, ChainStore
from common.segments.gaps import AcceptedGap
from common.sequences import SequenceRange
from tests.compaction_archive import CHAIN, Archive, rows
from tests.scenarios.processes import run_floe

LEVEL = {
    "from": 0,
    "to": 1,
    "min_age": "1m",
    "max_wait": "10m",
    "min_count": 3,
    "min_size": "1G",
    "max_size": "4G",
}


class Site(Archive):
    """An archive with a configuration."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.chains = ChainStore(self.objects, self.layout)
        self.chains.create_chain(CHAIN, ChainDocument((), 1, 1))
        self.config = folder / "floe.yaml"
        self.configure()

    def configure(self, **compaction: object) -> None:
        document = {
            "store": {"url": f"file://{self.folder}/store"},
            "spool_dir": str(self.folder / "spool"),
            "compaction": {"levels": [LEVEL], "engine": "local", "delete_grace": "0s", **compaction},
        }
        self.config.write_text(yaml.safe_dump(document))
        self.config.chmod(0o600)

    def compact(self, *options: str, code: int = 0):
        return self._floe("compact", "-c", str(self.config), *options, code=code)

    def verify(self, *options: str, code: int = 0):
        return self._floe("segments", "verify", "-c", str(self.config), *options, code=code)

    def _floe(self, *command: str, code: int):
        done = run_floe(*command)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if "--json" in command else done


@pytest.fixture
def site(tmp_path: Path) -> Site:
    found = Site(tmp_path)
    for first in range(1, 40, 10):
        found.put(first, first + 9, age=700)
    return found


def test_a_run_prints_a_table_of_what_it_did_and_then_has_nothing_to_do(site: Site):
    lines = site.compact().stdout.splitlines()
    assert lines[0].split() == ["action", "chain", "level", "sequences", "segments", "bytes", "into"]
    assert lines[1].split()[:5] == ["merged", "us-east/NODES/0000/0", "1", "1..40", "4"]
    assert lines[2].split()[:5] == ["deleted", "us-east/NODES/0000/0", "0", "-", "3"]
    assert site.compact().stdout == "nothing to do\n"
    assert site.ranges() == ["0:31..40", "1:1..40"]


def test_the_same_as_json(site: Site):
    found = site.compact("--json", "--site", "us-east", "--feed", "NODES", "--partition", "0", "--level", "0")
    [merged] = found["merged"]
    assert (merged["level"], merged["first"], merged["last"], merged["input_count"], merged["rows"]) == (
        1,
        1,
        40,
        4,
        40,
    )
    assert [d["key"] for d in found["deleted"]] == sorted(d["key"] for d in found["deleted"])
    assert (len(found["tombstones"]), found["failures"]) == (1, [])


def test_a_dry_run_lists_keys_and_bytes_and_changes_nothing(site: Site):
    before = site.listed()
    lines = site.compact("--dry-run").stdout.splitlines()
    assert [line.split()[1:3] for line in lines[1:]] == [[s.key, str(s.size)] for s in before]
    found = site.compact("--dry-run", "--json")
    assert [i["key"] for i in found["outputs"][0]["inputs"]] == [s.key for s in before]
    assert site.listed() == before


def test_a_selection_of_others_does_nothing(site: Site):
    assert site.compact("--site", "eu-west").stdout == "nothing to do\n"
    assert site.compact("--level", "1").stdout == "nothing to do\n"


def test_damage_ends_with_3_after_the_rest_is_done(site: Site):
    damaged = site.listed()[0]
    site.path(damaged.key).write_bytes(b"?")
    site.age(damaged.key, 700)
    done = site.compact(code=3)
    assert "error[E-SEG-CORRUPT]" in done.stderr
    assert "Traceback" not in done.stderr
    assert site.ranges() == ["0:1..10", "0:31..40", "1:11..40"]


def test_wrong_options_and_configurations_have_codes_of_their_own(site: Site):
    site.compact("--level", "9", code=2)
    site.compact("--engine", "hadoop", code=2)
    site.configure(spark={"conf": {"spark.speculation": "true"}})
    assert "spark.speculation: expected false, found true" in site.compact(code=78).stderr
    site.configure(levels=[{**LEVEL, "to": 0}])
    site.compact(code=78)


@pytest.mark.spark
def test_spark_is_started_by_the_command_and_leaves_nothing_behind(site: Site):
    before = site.read()
    found = site.compact("--json", "--engine", "spark", "--verify", "spark", "--master", "local[2]")
    assert len(found["merged"]) == 1
    assert site.ranges() == ["0:31..40", "1:1..40"]
    assert site.read().equals(before)


def test_without_java_the_configuration_is_at_fault(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    assert "--engine local" in site.compact("--engine", "spark", code=78).stderr


# verify


def test_a_sound_chain_verifies_shallow_and_deep(site: Site):
    site.compact()
    lines = site.verify().stdout.splitlines()
    assert lines[1].split()[:4] == ["us-east/NODES/0000/0", "1..40", "0:1", "1:1"]
    [found] = site.verify("--deep", "--json", "us-east/NODES")
    assert (found["first"], found["last"], found["segments"], found["problems"]) == (
        1,
        40,
        {"0": 1, "1": 1},
        [],
    )


def test_holes_damage_and_disagreement_are_reported_with_3(site: Site):
    refs = site.listed()
    site.store.delete(refs[1])
    site.path(refs[2].key).write_bytes(bytes(refs[2].size))
    site.chains.write_tail(CHAIN, 45)
    site.put(31, 40, rows(range(31, 40)), level=1)
    problems = [(p["kind"], p["text"]) for p in site.verify("--json", code=3)[0]["problems"]]
    assert [kind for kind, _ in problems] == ["damaged", "hole", "hole", "rows"]
    assert problems[1][1].startswith("sequences 11..30 are in no segment")
    assert problems[2][1].startswith("sequences 41..45")
    assert "expected 10 rows as in the 1 segments below it, found 9" in problems[3][1]


def test_deep_finds_what_only_rows_tell(site: Site):
    site.put(1, 10, rows(range(1, 11), salt="x"), level=1)
    site.put(11, 20, rows(range(11, 20)), level=2)
    site.put(35, 50, rows(range(36, 51)))
    kinds = [p["kind"] for p in site.verify("--deep", "--json", code=3)[0]["problems"]]
    assert sorted(kinds) == ["fork", "rows", "rows"]


def test_a_chain_must_begin_where_its_document_says(site: Site):
    late = Chain("eu-west", "NODES")
    site.chains.create_chain(late, ChainDocument((), 1, 5))
    site.put(11, 20, chain=late)
    [found] = site.verify("--json", "eu-west", code=3)
    assert found["problems"] == [
        {"kind": "hole", "text": "sequences 5..10 are in no segment that can be read"}
    ]
    site.chains.raise_floor(late, 11)
    assert site.verify("--json", "eu-west")[0]["problems"] == []


def test_an_accepted_hole_is_shown_and_no_difference_and_no_output_spans_it(site: Site):
    site.put(51, 60)
    site.chains.accept_gap(CHAIN, AcceptedGap(SequenceRange(41, 45)))
    [found] = site.verify("--json", code=3)
    assert found["accepted"] == [{"first": 41, "last": 45}]
    assert [p["text"].split()[1] for p in found["problems"]] == ["46..50"]

    site.chains.accept_gap(CHAIN, AcceptedGap(SequenceRange(44, 50)))
    site.compact()
    [found] = site.verify("--json")
    assert (found["accepted"], found["problems"]) == ([{"first": 41, "last": 50}], [])
    assert all(not ref.coverage.overlaps(SequenceRange(41, 50)) for ref in site.listed())


def test_a_spoiled_document_is_a_problem_of_its_chain(site: Site):
    site.objects.put(site.layout.chain_document(CHAIN), b"{")
    [found] = site.verify("--json", code=3)
    assert [p["kind"] for p in found["problems"]] == ["document"]
