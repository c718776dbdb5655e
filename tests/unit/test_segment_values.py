"""The values of a segment, rows in memory, and the file that the writer makes of them."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.archive.columns import SCHEMA, messages, record_batch
from common.archive.guard import Bounds, read_struct, row_group_bytes
from common.archive.reader import open_file
from common.archive.segment import Footer, Ledger, MergeInputs, Message, Reason, Tip, decode_subject, message_digest
from common.archive.store import object_metadata
from common.archive.writer import SegmentWriter
from common.chain import Chain
from common.errors import Unavailable
from common.sequences import MAX_SEQUENCE, SequenceRange
from compaction.merge import COMPRESSION_LEVEL
from tests.support.basics import raises_code, seeded
from tests.support.segments import batch_of, footer_of, message, read_all, read_segment, write_segment

MIB = 2**20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segment.parquet"


# Rows in memory


def test_a_subject_that_is_not_utf8_is_escaped_for_engines_and_kept_raw() -> None:
    rows = [message(1, subject=b"a.b"), message(2, subject=b"a.\xff.\xc3\xa4"), message(3, subject=b"a.b")]
    batch = batch_of(rows)
    assert batch.column("subject").to_pylist() == ["a.b", "a.\\xff.ä", "a.b"]
    assert batch.column("subject_raw").to_pylist() == [None, b"a.\xff.\xc3\xa4", None]
    assert (decode_subject(b"a.\xff.\xc3\xa4"), list(messages(batch.slice(1)))) == ("a.\\xff.ä", rows[1:])


def test_microseconds_are_rounded_down() -> None:
    batch = batch_of([message(n, timestamp_ns=ns) for n, ns in enumerate((1999, 1000, 999, 0, -1, -1000, -1001), 1)])
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [1, 1, 0, 0, -1, -1, -2]


# Values


def test_a_digest_keeps_adjacent_values_apart() -> None:
    parts = [(b"ab", None, b"c"), (b"a", None, b"bc"), (b"ab", b"", b"c"), (b"ab", b"c", b"")]
    digests = {message_digest(Message(1, 1, *part)) for part in parts}
    assert len(digests) == len(parts)
    assert all(len(digest) == 32 for digest in digests)


def test_a_tip_is_written_in_bounded_length_and_read_back_and_other_text_is_refused() -> None:
    tip = Tip.of(message(MAX_SEQUENCE, b"x" * 1000, subject=b"s" * 5000, timestamp_ns=2**63 - 1))
    assert Tip.from_text(tip.to_text()) == tip
    assert len(tip.to_text()) <= 73
    for text in ("", "1:2", "1:2:3", "x:2:" + "0" * 32, "1:2:" + "0" * 31):
        with pytest.raises(ValueError, match=r"expected|invalid"):
            Tip.from_text(text)


def test_a_footer_is_read_back_as_it_was_written() -> None:
    ledger, sampling = Ledger({Reason.SAMPLED_OUT: 7, Reason.LOST: 1}), {"inspect_field": "id", "inspect_duration": 3.5}
    more = {"level": 1, "ledger": ledger, "inputs": MergeInputs.of(["x"])}
    footer = footer_of([message(5), message(7)], SequenceRange(1, 10), sampling=sampling, sampling_digest="ab", **more)
    assert Footer.from_json(footer.to_json()) == footer
    assert footer.is_balanced()


def test_object_metadata_stay_small_whatever_the_segment(path: Path) -> None:
    chain = Chain("s" * 63, "☃" * 255, 9999, 65535)
    last = message(MAX_SEQUENCE, b"", subject=b"s" * 4000, timestamp_ns=2**63 - 1)
    spooled = write_segment(path, [last], chain=chain)
    metadata = object_metadata(replace(spooled, footer=replace(spooled.footer, rows=MAX_SEQUENCE, raw_bytes=2**63 - 1)))
    assert set(metadata) == {"format", "rows", "bytes", "tip", "sha256"}
    assert sum(len(f"x-amz-meta-{name}: {value}\r\n") for name, value in metadata.items()) < 1024
    assert all(value.isascii() for value in metadata.values())


# The writer


def test_the_name_comes_from_the_bytes_which_the_same_rows_give(tmp_path: Path) -> None:
    rows, path = [message(n) for n in range(1, 100)], tmp_path / "a"
    spooled = write_segment(path, rows)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (spooled.sha256, spooled.size) == (digest, path.stat().st_size)
    assert spooled.segment_name == (spooled.segment_name.chain, 0, SequenceRange(1, 99), digest[:16])
    assert write_segment(tmp_path / "b", rows).sha256 == digest


def test_raw_bytes_and_times_are_taken_from_the_rows(path: Path) -> None:
    rows = [message(1, b"abc", headers=b"12345"), message(2, b"")]
    spooled = write_segment(path, rows, raw_bytes=0, first_timestamp_ns=None, last_timestamp_ns=7)
    found = spooled.footer
    times = (found.first_timestamp_ns, found.last_timestamp_ns)
    assert (found.raw_bytes, *times) == (len(b"nodes.one") * 2 + 3 + 5, *(row.timestamp_ns for row in rows))
    with open_file(path.read_bytes(), spooled.segment_name) as reader:
        assert read_all(reader) == rows


def groups_of(path: Path, rows: list[Message], level: int = 0) -> list[int]:
    """Return the raw bytes of the payloads in each row group of the file."""
    spooled = write_segment(path, rows, level=level, batch_rows=7)
    assert read_segment(path, spooled.segment_name) == rows
    with open_file(path, spooled.segment_name) as reader:
        return [
            sum(len(p) for b in reader.batches(group.range) for p in b.column("payload").to_pylist())
            for group in reader.row_groups
        ]


def test_a_row_group_ends_before_its_limit_would_be_passed_and_is_larger_in_merged_segments(path: Path) -> None:
    size = MIB - 200
    assert groups_of(path, [message(n, bytes([n]) * size) for n in range(1, 41)]) == [32 * size, 8 * size]
    large = 40 * MIB
    rows = [message(1, b"a"), message(2, b"b" * large), message(3, b"c" * large), message(4, b"d")]
    assert groups_of(path, rows) == [1, large, large, 1]
    rows = [message(n, bytes([n]) * (3 * MIB)) for n in range(1, 25)]
    assert groups_of(path, rows, level=1) == [6 * MIB, 63 * MIB, 3 * MIB]


def test_many_empty_messages_are_not_one_row_group(path: Path) -> None:
    count = 600_000
    batch = record_batch(range(1, count + 1), [0] * count, [b"s"] * count, [None] * count, [b""] * count)
    writer = SegmentWriter(path, level=0, compression_level=1)
    writer.append(batch)
    footer = replace(footer_of([message(1)]), coverage=SequenceRange(1, count), rows=count, ledger=Ledger())
    with open_file(path, writer.finish(footer).segment_name) as reader:
        assert [group.rows for group in reader.row_groups] == [516_222, 83_778]


def test_a_segment_of_256_gib_would_still_be_read(path: Path) -> None:
    """Read as many row groups as it would have, of one row each."""
    count = 256 * 1024 * MIB // row_group_bytes(2)
    rows = [message(n, b"x", subject=b"nodes.%d.a-subject-of-ordinary-length" % n) for n in range(1, count + 1)]
    writer = SegmentWriter(path, level=2, compression_level=1, group_bytes=1)
    writer.append(batch_of(rows))
    with open_file(path, writer.finish(replace(footer_of(rows), level=2)).segment_name) as reader:
        assert len(reader.row_groups) == count
        assert sum(batch.num_rows for batch in reader.batches(rows=SequenceRange(7, 8))) == 2


@pytest.mark.parametrize(("level", "size"), [(0, 2 * MIB), (1, 4 * MIB)])
def test_large_messages_make_pages_of_bounded_size(path: Path, level: int, size: int) -> None:
    """Bound pages: a reader holds a page of a few messages, not a row group; merged segments have larger pages."""
    write_segment(path, [message(n, bytes([n]) * (2 * MIB)) for n in range(1, 13)], level=level)
    payload = pq.read_metadata(path).row_group(0).column(6)
    assert payload.has_offset_index
    at = payload.data_page_offset
    header, _ = read_struct(path.read_bytes()[at : at + 200], Bounds(64, 0))
    assert size <= header[2] < size + 100


def test_what_repeats_after_a_megabyte_is_stored_once_in_a_merged_segment(path: Path) -> None:
    """Store repeated documents of one node once: those of all others in its fleet come between them."""
    documents = [seeded().randbytes(300_000) for _ in range(4)]
    rows = [message(n, documents[n % 4]) for n in range(1, 13)]
    sizes = list[int]()
    for level in (0, 1):
        writer = SegmentWriter(path, level=level, compression_level=COMPRESSION_LEVEL)
        writer.append(batch_of(rows))
        sizes.append(writer.finish(footer_of(rows, level=level)).size)
    assert sizes[1] < sizes[0] * 0.6


def test_the_file_is_laid_out_as_engines_like_it_and_its_metadata_show_no_payload_and_no_header(path: Path) -> None:
    secrets = b"NATS/1.0\r\nKey: another\r\n\r\n"
    write_segment(path, [message(n, b"a-secret", headers=secrets) for n in range(1, 101)])
    whole = path.read_bytes()
    metadata = whole[-8 - int.from_bytes(whole[-8:-4], "little") :]
    assert [word in metadata for word in (b"secret", b"another", b"us-east")] == [False, False, True]
    file = pq.ParquetFile(path)
    group = file.metadata.row_group(0)
    by_name = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert (list(by_name), {c.compression for c in by_name.values()}) == (SCHEMA.names, {"ZSTD"})
    assert [n for n, c in by_name.items() if c.has_dictionary_page] == ["subject"]
    delta = [n for n, c in by_name.items() if "DELTA_BINARY_PACKED" in c.encodings]
    assert delta == ["sequence", "timestamp", "timestamp_ns"]
    assert [n for n, c in by_name.items() if c.statistics and c.statistics.has_min_max] == [*delta, "subject"]
    assert all(c.has_offset_index for c in by_name.values())
    assert group.sorting_columns == (pq.SortingColumn(0),)
    fields = [file.schema_arrow.field(i).metadata[b"PARQUET:field_id"] for i in range(len(SCHEMA))]
    assert (fields, set(file.metadata.metadata)) == ([b"%d" % n for n in range(1, 9)], {b"floe.segment"})
    assert json.loads(file.metadata.metadata[b"floe.segment"])["site"] == "us-east"


@pytest.fixture
def writer(path: Path) -> SegmentWriter:
    return SegmentWriter(path, level=0, compression_level=1)


BAD_FOOTERS = [
    ({"rows": 2, "ledger": Ledger()}, "footer rows: expected 1 as appended, found 2"),
    ({"coverage": SequenceRange(1, 9)}, "expected 9 sequences accounted for"),
    ({"coverage": SequenceRange(6, 6), "ledger": Ledger()}, "expected them in 6..6"),
]


@pytest.mark.parametrize(("fields", "cause"), BAD_FOOTERS)
def test_what_does_not_fit_the_rows_before_is_refused(writer: SegmentWriter, fields: Any, cause: str) -> None:
    for sequences in ([2, 1], [1, 1]):
        with pytest.raises(ValueError, match="expected ascending"):
            writer.append(batch_of([message(n) for n in sequences]))
    with pytest.raises(ValueError, match="expected columns"):
        writer.append(batch_of([message(5)]).select(["sequence"]))
    writer.append(batch_of([message(5)]))
    with pytest.raises(ValueError, match="expected ascending ones after 5"):
        writer.append(batch_of([message(5)]))
    with pytest.raises(ValueError, match=cause):
        writer.finish(replace(footer_of([message(5)]), **fields))


def test_aborting_leaves_no_file(path: Path, writer: SegmentWriter) -> None:
    writer.append(batch_of([message(n, b"x" * MIB) for n in range(1, 40)]))
    assert path.exists()
    writer.abort()
    writer.abort()
    assert not path.exists()


def test_a_full_disk_is_a_fault_of_the_spool_folder(path: Path) -> None:
    path.symlink_to("/dev/full")
    writer = SegmentWriter(path, level=0, compression_level=1)
    writer.append(batch_of([message(1, b"x" * 100)]))
    with raises_code(Unavailable, "E-SPOOL", match="No space left"):
        writer.finish(footer_of([message(1, b"x" * 100)]))


@pytest.mark.parametrize("level", [0, 1])
def test_row_groups_that_are_written_aside_make_the_same_file(tmp_path: Path, level: int) -> None:
    rows = [message(n, bytes([n]) * MIB) for n in range(1, 100)]

    def written(name: str, aside: ThreadPoolExecutor | None) -> str:
        writer = SegmentWriter(tmp_path / name, level=level, compression_level=1, pool=aside)
        for n in range(0, len(rows), 10):
            writer.append(batch_of(rows[n : n + 10]))
        return writer.finish(footer_of(rows)).sha256

    with ThreadPoolExecutor(1) as pool:
        assert written("aside", pool) == written("plain", None)


def test_what_fails_aside_is_raised_by_a_later_call_and_can_be_aborted(path: Path) -> None:
    path.symlink_to("/dev/full")
    with ThreadPoolExecutor(1) as pool:
        writer = SegmentWriter(path, level=0, compression_level=1, pool=pool)
        noise = seeded(7).randbytes
        with raises_code(Unavailable, "E-SPOOL", match="No space left"):
            for n in range(1, 9):
                writer.append(batch_of([message(n, noise(33 * MIB))]))
        writer.abort()
    assert not path.is_symlink()
