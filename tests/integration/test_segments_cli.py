"""`floe segments`: what operators see of the archive."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

from common import segments_cli as cli
from common.chain import Chain
from common.clock import format_time
from common.objects.local import LocalObjects
from common.segments.documents import ChainDocument, ChainStore, StreamDocument
from common.segments.keys import Layout
from common.segments.segment import Message, SegmentRef
from common.segments.store import SegmentStore
from common.segments.writer import SegmentWriter
from common.segments_cli import segments
from common.sequences import SequenceRange
from infra.local.process import spawn
from tests.support.basics import PATIENCE
from tests.support.segments import CHAIN, batch_of, footer_of, message

Run = Callable[..., Result]


class Archive:
    """A local store with one chain, and a configuration that names it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "store"
        self.objects = LocalObjects(self.root)
        self.store = SegmentStore(self.objects, Layout("data"), spool_dir=folder / "spool")
        self.chains = ChainStore(self.objects, Layout("data"))
        self.chains.create_chain(CHAIN, ChainDocument(("nodes.>",), 1, 1))
        self.chains.create_stream(CHAIN, StreamDocument({"name": "NODES"}, "2026-11-20T10:00:00Z"))
        self.config = folder / "floe.yaml"
        self.config.write_text(
            f"site: us-east\nspool_dir: {folder / 'spool'}\nlog: {{level: error}}\n"
            f"store: {{url: 'file://{self.root}', prefix: data}}\n"
        )

    def put(self, rows: list[Message], coverage: SequenceRange, level: int = 0, chain: Chain = CHAIN) -> SegmentRef:
        writer = SegmentWriter(self.store.new_spool(), level=level, compression_level=1)
        writer.append(batch_of(rows))
        return self.store.put(writer.finish(footer_of(rows, coverage, level=level, chain=chain)))


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path)


@pytest.fixture
def run(archive: Archive) -> Run:
    def invoke(*args: str) -> Result:
        return CliRunner().invoke(segments, [*args, "-c", str(archive.config)])

    return invoke


def rows(*sequences: int) -> list[Message]:
    return [message(n, b'{"n":%d}' % n) for n in sequences]


@pytest.fixture
def merged(archive: Archive) -> tuple[SegmentRef, SegmentRef, SegmentRef]:
    """Two segments of level 0 and one of level 1 over both."""
    one = archive.put(rows(1, 2, 5), SequenceRange(1, 5))
    two = archive.put(rows(6, 7), SequenceRange(6, 10))
    both = archive.put(rows(1, 2, 5, 6, 7), SequenceRange(1, 10), level=1)
    return one, two, both


Merged = tuple[SegmentRef, SegmentRef, SegmentRef]


# ls


def test_every_segment_is_listed(run: Run, merged: Merged) -> None:
    result = run("ls")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["chain", "level", "first", "last", "bytes", "modified", "name"]
    assert [line.split()[0:4] for line in lines[1:]] == [
        ["us-east/NODES/0000/0", "0", "1", "5"],
        ["us-east/NODES/0000/0", "0", "6", "10"],
        ["us-east/NODES/0000/0", "1", "1", "10"],
    ]


def test_the_cover_leaves_out_what_a_merged_segment_holds_in_all_forms(
    run: Run, merged: Merged, archive: Archive
) -> None:
    path = f"{archive.root}/{merged[2].key}"
    assert run("ls", "us-east/NODES", "--cover", "--format", "paths").stdout == f"{path}\n"
    assert Path(path).exists()
    for form in ("json", "duckdb", "polars"):
        assert path in run("ls", "--cover", "--format", form).stdout
    assert run("ls", "--cover", "--json").stdout == run("ls", "--cover", "--format", "json").stdout
    assert [s["key"] for s in json.loads(run("ls", "--level", "1", "--json").stdout)] == [merged[2].key]


def test_a_cover_that_cuts_a_segment_says_so(run: Run, archive: Archive) -> None:
    archive.put(rows(1), SequenceRange(1, 10))
    archive.put(rows(8), SequenceRange(8, 20))
    result = run("ls", "--cover", "--format", "paths")
    assert "1 of these also hold rows that others account for" in result.stderr
    found = json.loads(run("ls", "--cover", "--json").stdout)
    assert [(s["take_first"], s["take_last"]) for s in found] == [(1, 10), (11, 20)]


def test_chains_are_chosen_by_site_feed_incarnation_and_partition(run: Run, archive: Archive) -> None:
    chains = [CHAIN, Chain("us-east", "NODES", 1), Chain("us-east", "NODES", 0, 1), Chain("us-east", "OTHER")]
    for chain in chains:
        archive.chains.create_chain(chain, ChainDocument((), 2, 1))
        archive.put(rows(1), SequenceRange(1, 1), chain=chain)

    def listed(*what: str) -> list[str]:
        return [s["chain"] for s in json.loads(run("ls", "--json", *what).stdout)]

    everything = sorted(str(chain) for chain in chains)
    assert listed() == listed("us-east") == everything
    assert listed("us-east/NODES") == ["us-east/NODES/0000/0", "us-east/NODES/0000/1", "us-east/NODES/0001/0"]
    assert listed("us-east/NODES/0") == ["us-east/NODES/0000/0", "us-east/NODES/0000/1"]
    assert listed("us-east/NODES/0000/1") == ["us-east/NODES/0000/1"]
    archive.put(rows(1), SequenceRange(1, 1), chain=Chain("lost", "DOCUMENTS", 3, 2))
    assert listed("lost/DOCUMENTS/3/2") == ["lost/DOCUMENTS/0003/2"]


@pytest.mark.parametrize("words", ["ls", "info", "cat"])
def test_a_name_that_is_not_there_is_an_error_that_says_what_is(run: Run, archive: Archive, words: str) -> None:
    for what, said in [
        ("us-esat/NODES", "did you mean us-east/NODES? there are us-east/NODES"),
        ("us-east/NODES/7", "there are us-east/NODES/0000/0"),
        ("us-east/NODES/0/7", "there are us-east/NODES/0000/0"),
    ]:
        result = run(words, what)
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
    config = archive.config.read_text()
    archive.config.write_text(f"{config}egress: {{feeds: [{{stream: LATER}}]}}\n")
    assert run(words, "us-east/LATER").exit_code == 0


def test_of_a_feed_the_newest_incarnation_is_shown(run: Run, archive: Archive, merged: Merged) -> None:
    again = Chain("us-east", "NODES", 1)
    archive.chains.create_chain(again, ChainDocument((), 1, 1))
    archive.put(rows(4), SequenceRange(1, 4), chain=again)
    assert sequences(run("cat", "us-east/NODES", "--json")) == [4]
    assert sequences(run("cat", "us-east/NODES/0", "--json")) == [1, 2, 5, 6, 7]
    assert json.loads(run("info", "us-east/NODES", "--json").stdout)["chain"] == str(again)
    beside = Chain("us-east", "NODES", 1, 1)
    archive.chains.create_chain(beside, ChainDocument((), 2, 1))
    result = run("cat", "us-east/NODES")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "found partitions 0, 1; name the partition, such as us-east/NODES/0001/1" in result.stderr
    assert run("cat", "us-east/NODES/1/1").exit_code == 0


# info


def test_a_chain_is_described_with_its_documents_and_holes(run: Run, archive: Archive, merged: Merged) -> None:
    archive.chains.write_tail(CHAIN, 10)
    found = json.loads(run("info", "us-east/NODES", "--json").stdout)
    expected = {"begins": 1, "filters": ["nodes.>"], "created": "2026-11-20T10:00:00Z", "holes": []}
    assert found.items() >= {**expected, "first": 1, "last": 10, "tail": 10}.items()
    assert found["levels"]["0"]["segments"] == 2
    archive.put(rows(15), SequenceRange(13, 15))
    result = run("info", "us-east/NODES")
    assert (result.exit_code, "11..12" in result.stdout) == (3, True)


def test_a_segment_is_described_by_its_footer_for_programs_and_people(
    run: Run, archive: Archive, merged: Merged
) -> None:
    for key in (merged[0].key, f"file://{archive.root}/{merged[0].key}"):
        found = json.loads(run("info", key, "--json").stdout)
        assert (found["rows"], found["ledger"]) == (3, {"deleted": 2})
        assert found["row_groups"][0].items() >= {"first": 1, "last": 5, "rows": 3}.items()
        assert isinstance(found["last_timestamp_ns"], int)
    shown = run("info", merged[0].key).stdout
    assert "ledger.deleted" in shown
    assert re.search(r"^last_timestamp +20\d\d-\d\d-\d\dT[0-9:.]+Z$", shown, re.MULTILINE)
    assert "_ns" not in shown


def test_people_see_times_durations_and_what_was_sampled_out() -> None:
    found = {
        "rows": 1592,
        "ledger": {"sampled_out": 8529, "deleted": 3},
        "first_timestamp_ns": None,
        "last_timestamp_ns": 1_700_000_000_123_456_789,
        "sampling": {"inspect_duration_ns": 20_000_000_000, "max_age_ns": 0, "x_ns": 10**400, "y_ns": 1},
    }
    assert cli.readable(found) == {
        "rows": 1592,
        "ledger": {"sampled_out": 8529, "deleted": 3},
        "first_timestamp": None,
        "last_timestamp": "2023-11-14T22:13:20.123456789Z",
        "sampling": {"inspect_duration": "20s", "max_age": "0s", "x": f"{10**400}ns", "y": "1ns"},
        "sampled out": "8,529 of 10,121 (84 %)",
    }
    assert cli.readable({"rows": 0, "ledger": {}, "sampling": {}})["sampled out"] == "0 of 0 (0 %)"
    assert "sampled out" not in cli.readable({"rows": 1, "ledger": {}, "sampling": None})


def test_a_segment_that_is_not_there_or_damaged_is_an_error_with_its_key(
    run: Run, archive: Archive, merged: Merged
) -> None:
    archive.objects.put(merged[0].key, b"x" * merged[0].size)
    result = run("info", merged[0].key)
    assert (result.exit_code, merged[0].key in result.stderr) == (3, True)
    archive.store.delete(merged[0])
    result = run("info", merged[0].key)
    assert (result.exit_code, "E-SEG-GONE" in result.stderr) == (3, True)


# cat


def sequences(result: Result) -> list[int]:
    return [json.loads(line)["sequence"] for line in result.stdout.splitlines()]


def test_messages_of_a_chain_of_a_part_or_of_a_segment_are_printed_once_and_in_order(run: Run, merged: Merged) -> None:
    result = run("cat", "us-east/NODES", "--json")
    assert (result.exit_code, sequences(result)) == (0, [1, 2, 5, 6, 7])
    assert json.loads(result.stdout.splitlines()[0]) == {
        "sequence": 1,
        "timestamp": "2023-11-14T22:13:20.124456790Z",
        "subject": "nodes.one",
        "headers": None,
        "payload": '{"n":1}',
    }
    chain = run("ls").stdout.splitlines()[1].split()[0]  # what is listed can be pasted
    assert run("info", chain).exit_code == 0
    for words, found in (
        ((chain,), [1, 2, 5, 6, 7]),
        (("us-east/NODES", "--from-sequence", "2", "--to-sequence", "6"), [2, 5, 6]),
        (("us-east/NODES", "--from-sequence", "7"), [7]),
        ((merged[1].key,), [6, 7]),
    ):
        assert sequences(run("cat", *words, "--json")) == found


def test_bytes_that_are_not_text_come_as_base64_and_lines_stay_lines(run: Run, archive: Archive) -> None:
    odd = message(1, b"\xff\x00", subject=b"a.\xff", headers=b"NATS/1.0\r\nA: 1\r\n\r\n")
    archive.put([odd, message(2, b"one\ntwo\x1b[31m")], SequenceRange(1, 2))
    first, second = run("cat", "us-east/NODES").stdout.splitlines()
    assert first.split("\t")[2:] == ["a.\\xff", "NATS/1.0\\r\\nA: 1\\r\\n\\r\\n", "/wA="]
    assert second.split("\t")[3:] == ["-", "one\\ntwo\\x1b[31m"]
    found = json.loads(run("cat", "us-east/NODES", "--json").stdout.splitlines()[0])
    assert found["payload_base64"] == "/wA="
    assert found["subject_base64"] == "YS7/"
    assert found["headers"] == [["A", "1"]]


def test_on_a_terminal_everything_can_be_read_and_a_payload_ends_with_the_line() -> None:
    odd = message(1, b"\xff\x00" * 50, subject=b"a.\xff", headers=b"NATS/1.0\r\nA: 1\r\nB:2\r\n\r\n")
    shown = cli.text_of(odd, width=1000)
    assert shown.split(maxsplit=2)[2].startswith("a.\\xff")
    assert "A: 1; B: 2" in shown
    assert shown.endswith(f"<100 bytes: {'ff00' * 32}…>")
    assert cli.text_of(message(2, "é\x1b[31m\n".encode()), width=1000).endswith(" é\\x1b[31m\\n")
    wide = message(7, "é漢".encode() * 200)
    shown = cli.text_of(wide, width=80)
    assert (cell_len(shown) in (79, 80), shown[-1]) == (True, "…")  # there may be room before a letter of two columns
    assert cli.text_of(wide).endswith("\t" + "é漢" * 200)


def test_messages_are_chosen_by_time_subject_and_number(run: Run, archive: Archive) -> None:
    timed = [
        message(n, b"x", subject=b"a.%d" % (n % 2), timestamp_ns=1_700_000_000_000_000_000 + n * 1_000_000_000)
        for n in range(1, 9)
    ]
    archive.put(timed[:4], SequenceRange(1, 4))
    archive.put(timed[4:], SequenceRange(5, 8))

    def shown(*words: str) -> list[int]:
        return sequences(run("cat", "us-east/NODES", "--json", *words))

    third, sixth = "2023-11-14T22:13:23Z", "2023-11-14T22:13:26Z"
    assert shown("--since", third) == [3, 4, 5, 6, 7, 8]
    assert shown("--since", third, "--until", sixth) == [3, 4, 5]
    assert shown("--until", third) == [1, 2]
    assert shown("--since", "1h") == []
    assert shown("--subject", "*.0") == [2, 4, 6, 8]
    assert shown("--subject", "a.1", "--subject", "b.>", "--limit", "2") == [1, 3]
    assert shown("--since", third, "--subject", "a.0", "--limit", "1") == [4]
    for words in (
        ("--since", third, "--from-sequence", "1"),
        ("--since", sixth, "--until", third),
        ("--subject", "a..b"),
        ("--limit", "0"),
        ("--follow", "--to-sequence", "3"),
    ):
        assert run("cat", "us-east/NODES", *words).exit_code == 2, words

    def keys(*words: str) -> list[tuple[int, int]]:
        return [(s["first"], s["last"]) for s in json.loads(run("ls", "--json", *words).stdout)]

    assert keys("--since", third) == [(1, 4), (5, 8)]
    assert keys("--since", sixth) == keys("--since", sixth, "us-east/NODES") == [(5, 8)]
    assert keys("--until", third) == [(1, 4)]
    assert keys("--since", "2h ago") == []


def follow(archive: Archive, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "floe", "segments", "cat", "us-east/NODES", "-c", str(archive.config), "--follow"]
    folder, pipe = Path(__file__).parents[2], subprocess.PIPE
    return spawn([*command, *words], cwd=folder, stdout=pipe, stderr=pipe, text=True)


def test_what_is_archived_later_is_followed(archive: Archive) -> None:
    archive.put(rows(1, 2), SequenceRange(1, 2))
    process = follow(archive, "--json", "--limit", "4")
    assert process.stdout is not None
    assert [json.loads(process.stdout.readline())["sequence"] for _ in range(2)] == [1, 2]
    archive.put(rows(3), SequenceRange(3, 3))
    assert json.loads(process.stdout.readline())["sequence"] == 3
    archive.put(rows(5, 6), SequenceRange(4, 6))
    assert json.loads(process.stdout.readline())["sequence"] == 5
    rest, _ = process.communicate(timeout=PATIENCE)
    assert (rest, process.returncode) == ("", 0)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_ctrl_c_is_how_following_ends(archive: Archive, is_damaged: bool) -> None:
    archive.put(rows(1, 2), SequenceRange(1, 2))
    if is_damaged:
        archive.put(rows(9), SequenceRange(9, 9))
    process = follow(archive)
    shown = process.stderr if is_damaged else process.stdout  # the hole is told once all is printed
    assert shown is not None
    shown.readline()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "Traceback" in told) == (3 if is_damaged else 0, False), told


def test_what_takes_away_asks_on_a_terminal(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive.objects.put("data/junk", b"x")
    command = ["quarantine", "data/junk", "-c", str(archive.config)]
    for answer, code in ((b"n\n", 1), (b"y\n", 0)):
        ours, its = pty.openpty()
        os.write(ours, answer)
        with os.fdopen(ours), os.fdopen(its) as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", terminal)
            with pytest.raises(SystemExit) as ended:
                segments(command)
        shown = capsys.readouterr().err
        assert (ended.value.code, "put data/junk away? [y/N]" in shown) == (code, True), shown
        assert (archive.objects.head("data/junk") is None) is (code == 0)


# ls --cover as a view


@pytest.mark.parametrize("form", ["duckdb", "polars"])
def test_a_view_is_of_a_cover(run: Run, form: str) -> None:
    result = run("ls", "--format", form)
    said = f"--format {form}: expected --cover"
    assert (result.exit_code, said in " ".join(result.stderr.split())) == (2, True), result.stderr
    assert run("ls", "--cover", "--format", "polars").stdout.endswith("messages = polars.LazyFrame(schema=_columns)\n")


# ls, more of it


def test_rows_and_times_are_read_from_the_footers_where_they_are_asked_for(
    run: Run, archive: Archive, merged: Merged
) -> None:
    found = json.loads(run("ls", "-o", "wide", "--json").stdout)
    assert [s["rows"] for s in found] == [3, 2, 5]
    assert found[0]["first_time"] == "2023-11-14T22:13:20.124456790Z" < found[0]["last_time"]
    assert "rows" not in json.loads(run("ls", "--json").stdout)[0]
    wide = run("ls", "-o", "wide")
    assert wide.stdout.splitlines()[0].split()[4:7] == ["rows", "first_time", "last_time"]
    assert re.fullmatch(r"3 segments of 1 chain, [0-9.]+ KiB, 10 rows\n", wide.stderr)
    assert re.fullmatch(r"3 segments of 1 chain, [0-9.]+ KiB\n", run("ls").stderr)
    archive.objects.put(merged[0].key, b"x" * merged[0].size)
    damaged = run("ls", "-o", "wide")
    assert (damaged.exit_code, merged[0].key in damaged.stderr, len(damaged.stdout.splitlines())) == (3, True, 4)


def test_holes_are_stepped_over_and_told(run: Run, archive: Archive) -> None:
    assert (run("cat", "us-east/NODES").exit_code, run("cat", "us-east/NODES").stdout) == (0, ""), "nothing yet"
    archive.put(rows(1), SequenceRange(1, 2))
    archive.put(rows(9), SequenceRange(5, 9))
    result = run("cat", "us-east/NODES", "--json")
    assert (result.exit_code, sequences(result)) == (3, [1, 9])
    assert "no segment covers 3..4" in result.stderr
    for bounds, code, said in (
        (("1", "12"), 3, "no segment covers 10..12"),
        (("10", "11"), 3, "no segment covers 10..11"),
        (("4", "2"), 2, "--from-sequence 4 is greater than --to-sequence 2"),
        (("11", "10"), 2, "--from-sequence 11 is greater than --to-sequence 10"),
    ):
        done = run("cat", str(CHAIN), "--from-sequence", bounds[0], "--to-sequence", bounds[1])
        assert (done.exit_code, done.stderr.count(said)) == (code, 1), done
    assert run("cat", str(CHAIN), "--from-sequence", "10").exit_code == 0  # nothing has come yet


def test_a_hole_at_the_beginning_is_one(run: Run, archive: Archive) -> None:
    archive.put(rows(5, 6), SequenceRange(5, 6))
    assert json.loads((described := run("info", str(CHAIN), "--json")).stdout)["holes"] == ["1..4"]
    assert described.exit_code == 3
    printed = run("cat", str(CHAIN))
    assert (printed.exit_code, printed.stderr) == (3, "no segment covers 1..4\n")
    archive.chains.raise_floor(CHAIN, 5)
    assert [run(*words).exit_code for words in (("info", str(CHAIN)), ("cat", str(CHAIN)))] == [0, 0]
    archive.objects.put(Layout("data").chain_document(CHAIN), b"{")
    assert len(run("cat", str(CHAIN)).stdout.splitlines()) == 2


def test_what_is_damaged_right_before_a_time_is_told(run: Run, archive: Archive) -> None:
    refs = [archive.put(rows(*range(n, n + 10)), SequenceRange(n, n + 9)) for n in (1, 11, 21)]
    at = [format_time(message(n).timestamp_ns) for n in (15, 25)]
    (archive.root / refs[1].key).write_bytes(bytes(refs[1].size))
    done = run("cat", str(CHAIN), "--since", at[0])
    assert (done.exit_code, len(done.stdout.splitlines())) == (3, 10)
    assert refs[1].key in done.stderr
    assert len(run("ls", str(CHAIN), "--since", at[0], "-o", "paths").stdout.splitlines()) == 2
    assert run("cat", str(CHAIN), "--since", at[1]).exit_code == 0
    (archive.root / refs[2].key).write_bytes(bytes(refs[2].size))
    assert run("cat", str(CHAIN), "--since", at[1]).exit_code == 3
    assert len(run("ls", str(CHAIN), "--since", at[1], "-o", "paths").stdout.splitlines()) == 2


def test_a_damaged_segment_is_read_around_where_others_cover_it(run: Run, archive: Archive, merged: Merged) -> None:
    archive.objects.put(merged[2].key, b"x" * merged[2].size)
    result = run("cat", "us-east/NODES", "--json")
    assert sequences(result) == [1, 2, 5, 6, 7]
    assert merged[2].key in result.stderr
    assert result.exit_code == 3
    archive.objects.put(merged[0].key, b"x" * merged[0].size)
    result = run("cat", "us-east/NODES", "--json")
    assert sequences(result) == [6, 7]
    assert "no segment covers 1..5" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("ls", "us-east/NODES/x"),
        ("ls", "us-east//0"),
        ("ls", "a/b/0/0/0"),
        ("cat", "us-east"),
        ("cat", "us-east/NODES", "--from-sequence", "0"),
    ],
)
def test_what_cannot_be_listed_or_printed_is_a_usage_error(run: Run, merged: Merged, args: tuple[str, ...]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert any(word in result.stderr.lower() for word in ("expected", "invalid")), result.stderr


@pytest.mark.parametrize("command", ["ls", "info", "cat"])
def test_help_shows_an_example(command: str) -> None:
    result = CliRunner().invoke(segments, [command, "--help"])
    assert result.exit_code == 0
    assert f"floe segments {command}" in result.stdout
    assert "--json" in result.stdout
