"""`floe segments verify`: its counts, segments that it skips, and equal findings for any division of the work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from common.archive import store as segment_store
from common.archive.captures import CapturedConfig, CaptureStore
from common.archive.checks import ForeignKeys, find_foreign_keys
from common.archive.documents import AcceptedGap, ChainDocument, ChainStore, StreamDocument
from common.archive.reader import SegmentReader
from common.archive.segment import Reason
from common.chain import Chain
from common.errors import SegmentCorrupt
from common.objects.open import open_objects
from common.sequences import SequenceRange
from common.settings.root import StoreSettings
from compaction.verify import ChainReport, check_segment, known_chains, verify_chains
from tests.support.basics import PATIENCE, SharedS3
from tests.support.commands import invoke
from tests.support.compaction import CHAIN, OTHER, Archive, begun, rows

NEXT = CHAIN.next_incarnation()


class Site:
    """An archive that is verified again and again."""

    def __init__(self, folder: Path, *chains: Chain) -> None:
        self.archive = begun(folder, *chains)
        self.chains = ChainStore(self.archive.objects, self.archive.layout)
        self.captures = CaptureStore(self.archive.layout, self.archive.objects)
        self.config = folder / "floe.yaml"
        self.config.write_text(f"store: {{url: 'file://{folder}/store'}}\nspool_dir: {folder}/spool\n")

    def verify(self, *, deep: bool = True) -> ChainReport:
        [found] = verify_chains(self.archive.store, self.chains, [CHAIN], deep=deep)
        return found

    async def command(self, *options: str, code: int = 0) -> Any:
        done = await invoke("segments", "verify", "-c", str(self.config), *options)
        assert done.code == code, done
        return json.loads(done.out) if "--json" in options else done


@pytest.fixture
def site(tmp_path: Path) -> Site:
    found = Site(tmp_path, CHAIN)
    for first in range(1, 40, 10):
        found.archive.put(first, first + 9, age=700)
    return found


def kinds(report: ChainReport) -> list[tuple[str, str]]:
    return [(problem.kind, str(problem.rows)) for problem in report.problems]


# Counts


@pytest.mark.parametrize(("count", "is_shown"), [(34, True), (35, False), (39, False), (40, True)])
def test_a_level_may_have_more_rows_than_those_below_had_read_and_no_others(tmp_path: Path, count: int, is_shown: bool):
    """As after a union of late rows while the chain is idle."""
    site = Site(tmp_path, CHAIN)
    gone = {"ledger": {Reason.GONE_BEFORE_READ: 4, Reason.DELETED: 1}, "unread": SequenceRange(15, 18)}
    site.archive.put(1, 40, rows(n for n in range(1, 41) if not 15 <= n <= 19), **gone)
    site.archive.put(1, 40, rows([n for n in range(1, 41) if n != 19][:count] if count < 40 else range(1, 41)), level=1)
    found = [("rows", "1..40")] if is_shown else []
    assert kinds(site.verify(deep=False)) == found


async def test_findings_are_counted_for_each_chain_and_in_total(tmp_path: Path):
    site = Site(tmp_path, CHAIN, OTHER)
    archive = site.archive
    for first in (1, 11, 31):
        archive.put(first, first + 9)
    archive.put(1, 10, rows(range(1, 10)), level=1)
    archive.path(archive.put(41, 50).key).write_bytes(b"?")
    site.chains.write_tail(CHAIN, 60)
    archive.put(1, 10, chain=OTHER)
    archive.objects.put(f"{archive.layout.segments_prefix(OTHER, 0)}junk", b"")
    archive.objects.put("data/README", b"")

    other, chain, nobody = await site.command("--json", code=3)
    expected = {"found": 4, "delayed": 1, "missing": 1, "damaged": 1, "divergent": 1, "contained": 1, "foreign": 0}
    assert chain["findings"] == expected
    assert other["findings"] == {**dict.fromkeys(expected, 0), "found": 1, "foreign": 1}
    assert nobody["foreign"] == 2
    problems = [(p["finding"], p["kind"], p["first"], p["last"]) for p in chain["problems"]]
    assert problems == [
        *(("damaged", "damaged", 41, 50), ("missing", "hole", 21, 30)),
        *(("delayed", "hole", 41, 60), ("divergent", "rows", 1, 10)),
    ]
    low = {"segments": 3, "first": 1, "last": 40, "holes": 1}
    assert ({name: chain["levels"]["0"][name] for name in low}, chain["levels"]["1"]["segments"]) == (low, 1)

    lines = (await site.command(code=3)).out.splitlines()
    assert lines[1].endswith("found:1 foreign:1")
    assert lines[2].endswith("found:4 delayed:1 missing:1 damaged:1 divergent:1 contained:1")
    assert lines[3].split()[0] == "total"
    assert lines[3].endswith("found:5 delayed:1 missing:1 damaged:1 divergent:1 contained:1 foreign:2")


def test_a_chain_of_which_only_a_trace_is_left_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No listing shows a chain without its `chain.json`: its tail, and the next incarnation, still name it."""
    site = Site(tmp_path, NEXT)
    only_a_tail, gone = Chain("eu-west", "NODES"), CHAIN
    site.chains.write_tail(only_a_tail, 7)
    site.chains.create_stream(NEXT, StreamDocument({}, "2026-01-01T00:00:00Z", {0: 10, 1: 0}))
    site.archive.put(1, 10, chain=NEXT)
    assert known_chains(site.chains) == [only_a_tail, gone, NEXT]
    table, together = site.archive.store.table, Barrier(3)  # chains are listed side by side
    with monkeypatch.context() as patch:
        patch.setattr(site.archive.store, "table", lambda chain: (together.wait(PATIENCE), table(chain))[1])
        found = verify_chains(site.archive.store, site.chains, known_chains(site.chains))
    assert [[(p.kind, p.finding) for p in report.problems] for report in found] == [
        [("document", "missing"), ("hole", "delayed")],
        [("document", "missing"), ("hole", "missing")],
        [],
    ]
    assert "chain.json: expected a document, found none" in found[0].problems[0].text
    assert ["gap accept" in report.problems[1].hint for report in found[:2]] == [False, True]
    site.archive.objects.delete(site.archive.layout.stream_document(NEXT))
    [after] = verify_chains(site.archive.store, site.chains, [NEXT])
    assert ["stream.json: expected" in p.text for p in after.problems] == [True]


@pytest.mark.parametrize("page", [1, 2])
def test_partitions_that_never_existed_are_one_line_and_those_with_segments_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: int
):
    """A document of one site may name a thousand partitions, in each of ten thousand incarnations."""
    monkeypatch.setattr("common.archive.documents._PAGE_KEYS", page)
    site = Site(tmp_path, NEXT)
    site.chains.create_stream(NEXT, StreamDocument({}, "2026-01-01T00:00:00Z", dict.fromkeys(range(1024), 10)))
    site.archive.put(1, 10, chain=NEXT)
    there = [Chain(CHAIN.site, CHAIN.feed, 0, partition) for partition in (1, 2, 9, 10, 19, 100)]
    for chain in there:
        for first in (1, 6):
            site.archive.put(first, first + 4, chain=chain)
    site.archive.objects.put(f"{site.archive.layout.incarnation_prefix(CHAIN)}junk", b"")

    assert (site.chains.partitions(CHAIN), known_chains(site.chains)) == (set(there), [CHAIN, *there, NEXT])
    first, *others, last = verify_chains(site.archive.store, site.chains, known_chains(site.chains))
    assert [(p.kind, str(p.rows)) for p in first.problems] == [("document", "None"), ("hole", "1..10")]
    assert first.problems[0].text.endswith("chain.json: expected a document, found none, nor in 1023 other partitions")
    assert ([[p.kind for p in report.problems] for report in others], last.problems) == ([["document"]] * 6, [])


def test_deep_proves_every_byte_of_a_segment_of_any_size(site: Site, monkeypatch: pytest.MonkeyPatch):
    """Reading by ranges meets the pages and their checksums, but not the bytes between them and the footer."""
    monkeypatch.setattr(segment_store, "WHOLE_BYTES", 100)
    ref, store = site.archive.listed()[0], site.archive.store
    path = site.archive.path(ref.key)
    good = path.read_bytes()
    assert check_segment(store, ref, deep=True) == store.footer(ref)
    unnoticed = 0
    for place in range(4, len(good), 97):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert getattr(check_segment(store, ref, deep=True), "kind", None) == "damaged", place
        try:
            with store.open(ref) as reader:
                unnoticed += sum(batch.num_rows for batch in reader.batches()) == 10
        except segment_store.SegmentCorrupt:
            pass
    assert unnoticed, "the name proves more than the pages do"


def test_levels_are_compared_once_no_other_segment_shares_their_sequences(site: Site):
    site.archive.put(41, 50, rows(range(41, 47)))
    late = site.archive.put(47, 48)
    site.archive.put(41, 50, rows(range(41, 49)), level=1)
    assert kinds(site.verify()) == []
    site.archive.objects.delete(late.key)
    assert kinds(site.verify()) == [("rows", "41..50")]


def test_pages_that_cannot_be_read_are_a_problem_of_their_segment(site: Site, monkeypatch: pytest.MonkeyPatch):
    """Its footer and its digest are right: only the search for late rows reads its pages."""
    gone = {"ledger": {Reason.GONE_BEFORE_READ: 5}, "unread": SequenceRange(31, 35)}
    site.archive.put(31, 40, rows(range(36, 41)), level=1, age=700, **gone)

    def broken(reader: SegmentReader, *args: Any) -> Iterator[Any]:
        raise SegmentCorrupt("expected pages")

    monkeypatch.setattr(SegmentReader, "batches", broken)
    assert ("damaged", "31..40") in kinds(site.verify(deep=False))


def test_gone_rows_segments_after_an_end_and_documents_are_differences(site: Site):
    lost = {"ledger": {Reason.GONE_FROM_HOLE: 1}, "unread": SequenceRange(45, 45)}
    site.archive.put(41, 50, rows(n for n in range(41, 51) if n != 45), **lost)
    assert kinds(site.verify()) == [("gone", "45..45")]
    site.chains.create_stream(NEXT, StreamDocument({}, "2026-01-01T00:00:00Z", {0: 30}))
    assert kinds(site.verify()) == [("behind", "31..50"), ("gone", "45..45")]
    site.archive.objects.put(site.archive.layout.chain_document(CHAIN), b"{")
    assert kinds(site.verify())[0] == ("document", "None")


def test_segments_that_compaction_replaces_meanwhile_are_no_problem(site: Site, monkeypatch: pytest.MonkeyPatch):
    """A merge comes after the listing, and its inputs go between the footer and the checksum."""
    store, going = site.archive.store, {ref.key for ref in site.archive.listed()}
    site.archive.put(41, 50)
    table, inspect = store.table, store.inspect
    monkeypatch.setattr(store, "table", lambda chain: (table(chain), site.archive.put(1, 40, level=1))[0])
    monkeypatch.setattr(store, "inspect", lambda ref, deep: (inspect(ref), ref.key in going and store.delete(ref))[0])
    assert kinds(site.verify(deep=False)) == []


def test_of_a_hole_that_is_accepted_in_part_the_rest_is_a_difference(site: Site):
    site.archive.put(51, 60)
    for accepted, rest in ((SequenceRange(41, 45), ["46..50"]), (SequenceRange(44, 50), [])):
        site.chains.accept_gap(CHAIN, AcceptedGap(accepted))
        assert [str(problem.rows) for problem in site.verify().problems] == rest


def test_the_findings_are_the_same_however_the_segments_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = Site(tmp_path, CHAIN)
    store = site.archive.store
    refs = [site.archive.put(first, first + 9, age=700) for first in range(1, 80, 10)]
    site.archive.path(refs[2].key).write_bytes(b"?")
    store.delete(refs[4])
    site.archive.put(1, 10, rows(range(1, 11), salt="x"), level=1)
    site.archive.put(51, 70, rows(range(51, 70)), level=1)
    expired = {"ledger": {Reason.GONE_BEFORE_READ: 5}, "unread": SequenceRange(81, 85)}
    site.archive.put(81, 90, rows(range(86, 91)), **expired)
    site.archive.put(82, 90)
    here = verify_chains(store, site.chains, [CHAIN], deep=True)
    monkeypatch.setattr("compaction.verify.GROUP_MAX_BYTES", 1)
    there = verify_chains(store, site.chains, [CHAIN], deep=True, window=1)
    texts = [sorted((p.kind, p.text) for p in report.problems) for [report] in (here, there)]
    assert texts[0] == texts[1]
    assert [kind for kind, _ in texts[0]] == ["damaged", "fork", "hole", "hole", "late", "rows", "rows"]


# Captures of egress beside the messages


def captured(site: Site, end: int) -> str:
    """Put a capture taken at `end`, and return its key."""
    at = "2026-11-20T10:00:00Z"
    site.captures.put(CHAIN, CapturedConfig(at, end, at, {"name": "NODES"}))
    return site.captures.list_captures(CHAIN, "config")[-1].key


@pytest.mark.parametrize(("is_newest", "deep", "count"), [(True, False, 1), (False, False, 0), (False, True, 1)])
def test_a_damaged_capture_is_a_problem_of_its_chain(site: Site, is_newest: bool, deep: bool, count: int):
    """The newest of each kind is read; with `deep`, every one."""
    older, newest = captured(site, 10), captured(site, 40)
    assert site.verify(deep=True).problems == []
    key = newest if is_newest else older
    site.archive.objects.put(key, b"{}")
    found = site.verify(deep=deep)
    assert [(each.kind, each.finding) for each in found.problems] == [("document", "damaged")] * count
    assert all(key in each.text and each.hint for each in found.problems)
    assert found.foreign == 0


# Objects in a bucket that nothing reads


JUNK = (
    "data/README",
    "data/_floe/notes.txt",
    "data/_floe/tombstones/site=us-east/feed=NODES/incarnation=0000/partition=0/old.json",
    "data/site=us east/feed=NODES/incarnation=0000/partition=0/level=0/x.parquet",
    "data/site=us-east/feed=NODES/incarnation=0000/partition=0/level=0/0.parquet.tmp",
)


@pytest.mark.servers
def test_foreign_keys_are_counted_and_named(tmp_path: Path, s3: SharedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive(tmp_path, open_objects(StoreSettings.model_validate(s3.store())))
    ChainStore(archive.objects, archive.layout).create_chain(CHAIN, ChainDocument((), 1, 1))
    archive.put(1, 10)
    for key in JUNK:
        archive.objects.put(key, b"?")
    monkeypatch.setattr("common.objects.s3.KEYS_PER_PAGE", 2)

    found = find_foreign_keys(archive.objects, archive.layout)
    assert (sorted(found.keys), found.count, found.is_complete) == (sorted(JUNK), len(JUNK), True)
    assert f"does not read: {len(JUNK)}" in found.lines()[0]
    places = archive.layout.chain_prefixes(CHAIN)
    assert sorted(find_foreign_keys(archive.objects, archive.layout, places).keys) == [JUNK[2], JUNK[4]]
    assert find_foreign_keys(archive.objects, archive.layout, []).keys == [], "of a feed without an archive"
    assert ForeignKeys(["a\nerror: b"], 1, 1).lines()[1] == "  a\\nerror: b"
    assert not find_foreign_keys(archive.objects, archive.layout, limit=2).is_complete
