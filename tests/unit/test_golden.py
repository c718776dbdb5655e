"""Archives of all earlier versions, which Floe must still read; it ignores fields that a newer version adds."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from common.archive import documents
from common.archive.captures import CaptureStore
from common.archive.columns import messages
from common.archive.reader import open_file
from common.archive.segment import Ledger, Reason, Tip
from common.archive.store import SegmentStore
from common.errors import SegmentCorrupt
from common.objects.local import LocalObjects
from common.sequences import SequenceRange
from compaction.tombstones import Tombstone, TombstoneStore
from tests.support import golden as golden
from tests.support.golden import CHAIN, LAYOUT
from tests.support.segments import footer_of, forge, message, name_of, table_of

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(params=sorted(path.name for path in GOLDEN.iterdir()))
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> LocalObjects:
    """Return the archive of one version, as a copy to which tests may write."""
    return LocalObjects(shutil.copytree(GOLDEN / request.param, tmp_path / "store"))


def test_documents_and_captures_of_every_version_are_read(objects: LocalObjects) -> None:
    chains, captures = documents.ChainStore(objects, LAYOUT), CaptureStore(LAYOUT, objects)
    assert chains.chains() == [CHAIN]
    assert (chains.read_stream(CHAIN), chains.read_chain(CHAIN)) == (golden.STREAM, golden.DOCUMENT)
    assert (chains.read_floor(CHAIN), chains.read_tail(CHAIN)) == (golden.FLOOR, golden.END)
    assert (chains.gaps(CHAIN), chains.skipped_gaps(golden.TARGET, CHAIN)) == ([golden.ACCEPTED], [golden.PASSED])
    reads = (captures.config, captures.consumers, captures.deletions)
    assert [read(CHAIN) for read in reads] == [golden.CONFIG, golden.CONSUMERS, golden.DELETIONS]


def test_segments_and_tombstones_of_every_version_are_read(objects: LocalObjects) -> None:
    store = SegmentStore(objects, LAYOUT)
    first, second, merged = store.list(CHAIN)
    for ref, rows in ((first, slice(0, 3)), (second, slice(3, 4)), (merged, slice(0, 4))):
        with store.open(ref) as reader:
            batches = list(reader.batches())
            footer = reader.footer
        assert [m for batch in batches for m in messages(batch)] == golden.ROWS[rows]
        assert [k for b in batches for k in b.column("sample_key").to_pylist()] == golden.KEYS[rows]
        assert (footer.chain, footer.sampling, footer.sampling_digest) == (CHAIN, golden.SAMPLING, golden.DIGEST)
        assert footer.tip == Tip.of(golden.ROWS[rows][-1])
        assert footer.is_balanced()
    assert store.footer(first).ledger == Ledger(golden.LEDGERS[0])
    assert store.footer(first).unread == store.footer(merged).unread == golden.UNREAD
    assert (store.footer(merged).inputs.count, store.footer(second).unread) == (2, None)
    tombstones = TombstoneStore(objects, LAYOUT)
    [stone] = [tombstones.read(CHAIN, info.key) for info in tombstones.names(CHAIN)]
    assert [ref.name for ref in (*stone.superseded, *stone.superseding)] == [first.name, second.name, merged.name]


def newer(raw: bytes, **fields: object) -> bytes:
    return json.dumps({**json.loads(raw), "of_a_newer_version": {"a": [1]}, **fields}).encode()


def test_fields_of_a_newer_minor_version_are_passed_over_and_a_newer_major_is_refused(objects: LocalObjects) -> None:
    [key] = [info.key for info in objects.list(LAYOUT.tombstones_prefix(CHAIN))]
    stone = objects.get(key) or b""
    reads = {
        "stream": (golden.STREAM.to_json(), documents.StreamDocument.from_json),
        "chain": (golden.DOCUMENT.to_json(), documents.ChainDocument.from_json),
        "floor": (b'{"format_version":1,"first":3}', documents.FloorDocument.from_json),
        "tail": (b'{"format_version":1,"end":60}', documents.TailDocument.from_json),
        "gap": (golden.PASSED.to_json(), documents.AcceptedGap.from_json),
        "tombstone": (stone, lambda raw: Tombstone.from_json(raw, LAYOUT, CHAIN)),
    }
    for name, (raw, read) in reads.items():
        assert read(newer(raw)) == read(raw), name
        with pytest.raises(ValueError, match="format_version: expected 1, found 2"):
            read(b'{"format_version":2}')


def test_a_segment_of_a_newer_minor_version_is_read_with_its_reasons_as_counts(tmp_path: Path) -> None:
    rows = [message(n) for n in (1, 2, 5)]
    raw = footer_of(rows, SequenceRange(1, 5)).to_json()
    more = newer(raw, ledger={"deleted": 1, "eaten_by_a_grue": 1})
    column = pa.field("of_a_newer_version", pa.string())
    table = table_of(rows).append_column(column, pa.array([None, "x", None], pa.string()))
    path = tmp_path / "segment.parquet"
    forge(path, table, more)
    with open_file(path, name_of(footer_of(rows, SequenceRange(1, 5)))) as reader:
        ledger = reader.footer.ledger
        assert [m for batch in reader.batches() for m in messages(batch)] == rows
    assert (ledger.total(), ledger.counts[Reason.DELETED]) == (2, 1)
    assert ledger.plus(ledger).to_json() == {"deleted": 2, "eaten_by_a_grue": 2}

    forge(path, table, newer(raw, format_version=2))
    with pytest.raises(SegmentCorrupt, match="format_version: expected 1, found 2") as refused:
        open_file(path, name_of(footer_of(rows, SequenceRange(1, 5))))
    assert refused.value.code == "E-SEG-VERSION"


def test_the_archive_of_this_version_is_as_it_would_be_made_now(tmp_path: Path) -> None:
    """Compare all except the bytes of Parquet, which depend on the version of its writer."""
    golden.make(tmp_path / "now")
    kept = {p.relative_to(GOLDEN / "1") for p in (GOLDEN / "1").rglob("*.json")}
    made = {p.relative_to(tmp_path / "now") for p in (tmp_path / "now").rglob("*.json")}
    same = {path for path in kept & made if "tombstones" not in path.parts}
    assert len(same) >= 8
    for path in same:
        assert (GOLDEN / "1" / path).read_bytes() == (tmp_path / "now" / path).read_bytes()
