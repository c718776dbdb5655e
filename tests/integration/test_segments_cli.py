"""`floe segments`: the operator's view of the archive."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from common import segments_cli as cli
from common.archive.documents import AcceptedGap, ChainDocument, ChainStore, StreamDocument
from common.archive.keys import Layout
from common.archive.segment import Message, SegmentRef
from common.archive.store import SegmentStore
from common.chain import Chain
from common.objects.local import LocalObjects
from common.sequences import SequenceRange
from tests.support.commands import Done, run_here
from tests.support.segments import CHAIN, message, write_segment

Run = Callable[..., Done]


class Archive:
    """A local store with one chain, and a configuration that names it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "store"
        self.objects = LocalObjects(self.root)
        self.store = SegmentStore(self.objects, Layout("data"), spool_dir=folder / "spool")
        self.chains = ChainStore(self.objects, Layout("data"))
        self.chains.create_chain(CHAIN, ChainDocument(("nodes.>",), 1, 1))
        self.chains.create_stream(CHAIN, StreamDocument({"name": "NODES"}, "2026-11-20T10:00:00Z", None))
        self.config = folder / "floe.yaml"
        self.config.write_text(
            f"site: us-east\nspool_dir: {folder / 'spool'}\nlog: {{level: error}}\n"
            f"store: {{url: 'file://{self.root}', prefix: data}}\n"
        )

    def put(self, rows: list[Message], coverage: SequenceRange, level: int = 0, chain: Chain = CHAIN) -> SegmentRef:
        return self.store.put(write_segment(self.store.new_spool(), rows, coverage, level=level, chain=chain))


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path)


@pytest.fixture
def run(archive: Archive) -> Run:
    return lambda *args: run_here("segments", *args, "-c", str(archive.config))


def rows(*sequences: int) -> list[Message]:
    return [message(n, b'{"n":%d}' % n) for n in sequences]


@pytest.fixture
def merged(archive: Archive) -> tuple[SegmentRef, SegmentRef, SegmentRef]:
    """Two segments of level 0 and one of level 1 over both."""
    one = archive.put(rows(1, 2, 5), SequenceRange(1, 5))
    two = archive.put(rows(6, 7), SequenceRange(6, 10))
    return one, two, archive.put(rows(1, 2, 5, 6, 7), SequenceRange(1, 10), level=1)


Merged = tuple[SegmentRef, SegmentRef, SegmentRef]


# ls


def test_the_cover_leaves_out_merged_segments_in_all_forms(run: Run, merged: Merged, archive: Archive) -> None:
    path = f"{archive.root}/{merged[2].key}"
    assert run("ls", "us-east/NODES", "--cover", "--format", "paths").out == f"{path}\n"
    assert Path(path).exists()
    for form in ("duckdb", "polars"):
        assert path in run("ls", "--cover", "--format", form).out
    assert [s["key"] for s in run("ls", "--level", "1", "--json").json()] == [merged[2].key]


def test_a_cover_that_cuts_a_segment_shows_it(run: Run, archive: Archive) -> None:
    archive.put(rows(1), SequenceRange(1, 10))
    archive.put(rows(8), SequenceRange(8, 20))
    assert "1 of these also hold rows that others account for" in run("ls", "--cover", "--format", "paths").err
    found = run("ls", "--cover", "--json").json()
    assert [(s["take_first"], s["take_last"]) for s in found] == [(1, 10), (11, 20)]


def test_chains_are_chosen_by_site_feed_incarnation_and_partition(run: Run, archive: Archive) -> None:
    chains = [CHAIN, Chain("us-east", "NODES", 1), Chain("us-east", "NODES", 0, 1), Chain("us-east", "OTHER")]
    for chain in chains:
        archive.chains.create_chain(chain, ChainDocument((), 2, 1))
        archive.put(rows(1), SequenceRange(1, 1), chain=chain)

    def listed(*what: str) -> list[str]:
        return [s["chain"] for s in run("ls", "--json", *what).json()]

    assert listed() == listed("us-east") == sorted(str(chain) for chain in chains)
    assert listed("us-east/NODES") == ["us-east/NODES/0000/0", "us-east/NODES/0000/1", "us-east/NODES/0001/0"]
    assert listed("us-east/NODES/0") == ["us-east/NODES/0000/0", "us-east/NODES/0000/1"]
    assert listed("us-east/NODES/0000/1") == ["us-east/NODES/0000/1"]
    archive.put(rows(1), SequenceRange(1, 1), chain=Chain("lost", "DOCUMENTS", 3, 2))
    assert listed("lost/DOCUMENTS/3/2") == ["lost/DOCUMENTS/0003/2"]


def test_a_missing_name_is_an_error_that_lists_the_known_ones(run: Run, archive: Archive) -> None:
    for words, what, part in (
        ("ls", "us-esat/NODES", "did you mean us-east/NODES? there are us-east/NODES"),
        ("info", "us-east/NODES/7", "there are us-east/NODES/0000/0"),
        ("cat", "us-east/NODES/0/7", "there are us-east/NODES/0000/0"),
        ("cat", "us-east//0", "expected"),
    ):
        result = run(words, what)
        assert (result.code, result.out, part in result.err) == (2, "", True), result
    archive.config.write_text(f"{archive.config.read_text()}egress: {{feeds: [{{stream: LATER}}]}}\n")
    for words in ("ls", "cat", "info"):
        assert [run(words, chain).code for chain in ("us-east/LATER", "us-east/LATER/0/0")] == [0, 0]


def test_of_a_feed_the_newest_incarnation_is_shown(run: Run, archive: Archive, merged: Merged) -> None:
    again = Chain("us-east", "NODES", 1)
    archive.chains.create_chain(again, ChainDocument((), 1, 1))
    archive.put(rows(4), SequenceRange(1, 4), chain=again)
    assert sequences(run("cat", "us-east/NODES", "--json")) == [4]
    assert sequences(run("cat", "us-east/NODES/0", "--json")) == [1, 2, 5, 6, 7]
    assert run("info", "us-east/NODES", "--json").json()["chain"] == str(again)
    archive.chains.create_chain(Chain("us-east", "NODES", 1, 1), ChainDocument((), 2, 1))
    result = run("cat", "us-east/NODES")
    assert (result.code, result.out) == (2, "")
    assert "found partitions 0, 1; name the partition, such as us-east/NODES/0001/1" in result.err
    assert run("cat", "us-east/NODES/1/1").code == 0


# info


def test_a_chain_is_described_with_its_documents_and_holes(run: Run, archive: Archive, merged: Merged) -> None:
    archive.chains.write_tail(CHAIN, 10)
    found = run("info", "us-east/NODES", "--json").json()
    expected = {"begins": 1, "filters": ["nodes.>"], "created": "2026-11-20T10:00:00Z", "holes": []}
    assert found.items() >= {**expected, "first": 1, "last": 10, "tail": 10}.items()
    assert found["levels"]["0"]["segments"] == 2
    archive.put(rows(15), SequenceRange(13, 15))
    result = run("info", "us-east/NODES")
    assert (result.code, "11..12" in result.out) == (3, True)


def test_a_segment_is_described_by_its_footer_for_programs_and_people(
    run: Run, archive: Archive, merged: Merged
) -> None:
    for key in (merged[0].key, f"file://{archive.root}/{merged[0].key}"):
        found = run("info", key, "--json").json()
        assert (found["rows"], found["ledger"]) == (3, {"deleted": 2})
        assert found["row_groups"][0].items() >= {"first": 1, "last": 5, "rows": 3}.items()
        assert isinstance(found["last_timestamp_ns"], int)
    shown = run("info", merged[0].key).out
    assert "ledger.deleted" in shown
    assert re.search(r"^last_timestamp +20\d\d-\d\d-\d\dT[0-9:.]+Z$", shown, re.MULTILINE)
    assert "_ns" not in shown


def test_people_see_times_and_durations() -> None:
    counts = {"rows": 1592, "ledger": {"sampled_out": 8529, "deleted": 3}}
    durations = {"inspect_duration_ns": 20_000_000_000, "max_age_ns": 0, "x_ns": 10**400, "y_ns": 1}
    times = {"first_timestamp_ns": None, "last_timestamp_ns": 1_700_000_000_123_456_789}
    assert cli.for_people({**counts, **times, "sampling": durations}) == {
        **counts,
        "first_timestamp": None,
        "last_timestamp": "2023-11-14T22:13:20.123456789Z",
        "sampling": {"inspect_duration": "20s", "max_age": "0s", "x": f"{10**400}ns", "y": "1ns"},
    }


def test_a_segment_that_is_not_there_or_damaged_is_an_error_with_its_key(
    run: Run, archive: Archive, merged: Merged
) -> None:
    archive.objects.put(merged[0].key, b"x" * merged[0].size)
    result = run("info", merged[0].key)
    assert (result.code, merged[0].key in result.err) == (3, True)
    archive.store.delete(merged[0])
    result = run("info", merged[0].key)
    assert (result.code, "E-SEG-GONE" in result.err) == (3, True)


# cat


def sequences(result: Done) -> list[int]:
    return [json.loads(line)["sequence"] for line in result.out.splitlines()]


def test_messages_of_a_chain_of_a_part_or_of_a_segment_are_printed_once_and_in_order(run: Run, merged: Merged) -> None:
    result = run("cat", "us-east/NODES", "--json")
    assert (result.code, sequences(result)) == (0, [1, 2, 5, 6, 7])
    first = {"sequence": 1, "timestamp": "2023-11-14T22:13:20.124456790Z", "subject": "nodes.one", "headers": None}
    assert json.loads(result.out.splitlines()[0]) == {**first, "payload": '{"n":1}'}
    chain = run("ls").out.splitlines()[1].split()[0]  # listed names can be pasted
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
    first, second = run("cat", "us-east/NODES").out.splitlines()
    assert first.split("\t")[2:] == ["a.\\xff", "NATS/1.0\\r\\nA: 1\\r\\n\\r\\n", "/wA="]
    assert second.split("\t")[3:] == ["-", "one\\ntwo\\x1b[31m"]
    found = json.loads(run("cat", "us-east/NODES", "--json").out.splitlines()[0])
    assert (found["payload_base64"], found["subject_base64"], found["headers"]) == ("/wA=", "YS7/", [["A", "1"]])


def test_on_a_terminal_everything_can_be_read_and_a_payload_ends_with_the_line() -> None:
    odd = message(1, b"\xff\x00" * 50, subject=b"a.\xff", headers=b"NATS/1.0\r\nA: 1\r\nB:2\r\n\r\n")
    shown = cli.format_message(odd, width=1000)
    assert shown.split(maxsplit=2)[2].startswith("a.\\xff")
    assert "A: 1; B: 2" in shown
    assert shown.endswith(f"<100 bytes: {'ff00' * 32}…>")
    assert cli.format_message(message(2, "é\x1b[31m\n".encode()), width=1000).endswith(" é\\x1b[31m\\n")
    wide = message(7, "é漢".encode() * 200)
    shown = cli.format_message(wide, width=80)
    assert (cell_len(shown) in (79, 80), shown[-1]) == (True, "…")  # there may be room before a letter of two columns
    assert cli.format_message(wide).endswith("\t" + "é漢" * 200)


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
    assert (shown("--since", third), shown("--since", third, "--until", sixth)) == ([3, 4, 5, 6, 7, 8], [3, 4, 5])
    assert (shown("--until", third), shown("--since", "1h"), shown("--subject", "*.0")) == ([1, 2], [], [2, 4, 6, 8])
    assert shown("--subject", "a.1", "--subject", "b.>", "--limit", "2") == [1, 3]
    assert shown("--since", third, "--subject", "a.0", "--limit", "1") == [4]
    for words in (("--since", third, "--from-sequence", "1"), ("--since", sixth, "--until", third), ("--limit", "0")):
        assert run("cat", "us-east/NODES", *words).code == 2, words

    def keys(*words: str) -> list[tuple[int, int]]:
        return [(s["first"], s["last"]) for s in run("ls", "--json", *words).json()]

    assert keys("--since", third) == [(1, 4), (5, 8)]
    assert keys("--since", sixth) == keys("--since", sixth, "us-east/NODES") == [(5, 8)]
    assert keys("--until", third) == [(1, 4)]


# ls --cover as a view


def test_a_view_is_of_a_cover(run: Run) -> None:
    result = run("ls", "--format", "duckdb")
    assert (result.code, "--format duckdb: expected --cover" in " ".join(result.err.split())) == (2, True), result
    assert run("ls", "--cover", "--format", "polars").out.endswith("messages = polars.LazyFrame(schema=_columns)\n")


# ls, more of it


def test_rows_and_times_are_read_from_the_footers_where_they_are_asked_for(
    run: Run, archive: Archive, merged: Merged
) -> None:
    found = run("ls", "--wide", "--json").json()
    assert [s["rows"] for s in found] == [3, 2, 5]
    assert found[0]["first_time"] == "2023-11-14T22:13:20.124456790Z" < found[0]["last_time"]
    assert "rows" not in run("ls", "--json").json()[0]
    wide = run("ls", "--wide")
    header, first, *_ = (line.split() for line in wide.out.splitlines())
    assert header[:7] == ["chain", "level", "first", "last", "rows", "first_time", "last_time"]
    assert first[:5] == ["us-east/NODES/0000/0", "0", "1", "5", "3"]
    assert re.fullmatch(r"3 segments of 1 chain, [0-9.]+ KiB, 10 rows\n", wide.err)
    assert re.fullmatch(r"3 segments of 1 chain, [0-9.]+ KiB\n", run("ls").err)
    archive.objects.put(merged[0].key, b"x" * merged[0].size)
    damaged = run("ls", "--wide")
    assert (damaged.code, merged[0].key in damaged.err, len(damaged.out.splitlines())) == (3, True, 4)


def test_holes_are_skipped_and_reported(run: Run, archive: Archive) -> None:
    assert (run("cat", "us-east/NODES").code, run("cat", "us-east/NODES").out) == (0, ""), "nothing yet"
    archive.put(rows(1), SequenceRange(1, 2))
    archive.put(rows(9), SequenceRange(5, 9))
    result = run("cat", "us-east/NODES", "--json")
    assert (result.code, sequences(result)) == (3, [1, 9])
    assert "no segment covers 3..4" in result.err
    for bounds, code, part in (
        (("1", "12"), 3, "no segment covers 10..12"),
        (("10", "11"), 3, "no segment covers 10..11"),
        (("4", "2"), 2, "--from-sequence 4 is greater than --to-sequence 2"),
        (("11", "10"), 2, "--from-sequence 11 is greater than --to-sequence 10"),
    ):
        done = run("cat", str(CHAIN), "--from-sequence", bounds[0], "--to-sequence", bounds[1])
        assert (done.code, done.err.count(part)) == (code, 1), done
    assert run("cat", str(CHAIN), "--from-sequence", "10").code == 0  # nothing is archived there yet


def test_a_hole_at_the_beginning_is_one(run: Run, archive: Archive) -> None:
    archive.put(rows(5, 6), SequenceRange(5, 6))
    assert json.loads((described := run("info", str(CHAIN), "--json")).out)["holes"] == ["1..4"]
    assert described.code == 3
    printed = run("cat", str(CHAIN))
    assert (printed.code, printed.err) == (3, "no segment covers 1..4\n")
    archive.chains.raise_floor(CHAIN, 5)
    assert [run(*words).code for words in (("info", str(CHAIN)), ("cat", str(CHAIN)))] == [0, 0]
    archive.objects.put(Layout("data").chain_document(CHAIN), b"{")
    assert len(run("cat", str(CHAIN)).out.splitlines()) == 2


def test_a_lost_end_is_named_and_an_accepted_gap_is_no_hole(run: Run, archive: Archive) -> None:
    archive.put(rows(1, 2), SequenceRange(1, 2))
    archive.chains.write_tail(CHAIN, 4)
    assert (done := run("cat", str(CHAIN))).code == 3
    assert done.err == "no segment covers 3..4\n"
    created = "2026-11-21T10:00:00Z"
    archive.chains.create_stream(CHAIN.next_incarnation(), StreamDocument({"name": "NODES"}, created, {0: 6}))
    assert run("cat", str(CHAIN)).err == "no segment covers 3..6\n"
    assert json.loads(run("info", str(CHAIN), "--json").out)["holes"] == ["3..6"]
    archive.chains.accept_gap(CHAIN, AcceptedGap(SequenceRange(3, 6)))
    assert [run(*words).code for words in (("info", str(CHAIN)), ("cat", str(CHAIN)))] == [0, 0]


def test_a_damaged_segment_is_skipped_if_others_cover_it(run: Run, archive: Archive, merged: Merged) -> None:
    archive.objects.put(merged[2].key, b"x" * merged[2].size)
    result = run("cat", "us-east/NODES", "--json")
    assert sequences(result) == [1, 2, 5, 6, 7]
    assert merged[2].key in result.err
    assert result.code == 3
    archive.objects.put(merged[0].key, b"x" * merged[0].size)
    result = run("cat", "us-east/NODES", "--json")
    assert sequences(result) == [6, 7]
    assert "no segment covers 1..5" in result.err
