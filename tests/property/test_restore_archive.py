"""I6 of a restored stream, at the archive: both forms hold any rows byte for byte."""

import json
import re
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.archive.captures import CapturedConsumer
from common.archive.columns import batch_of
from common.archive.segment import Message
from common.errors import ConfigError
from common.nats.restore import KEEP_ALIVE_FRAME
from common.sequences import MAX_SEQUENCE
from ingress.recovery.files_form import archive_writer
from ingress.recovery.stream_archive import ArchiveState, ArchiveWriter
from tests.support.restore import encoded_block, entries, tar_files, unframed

subjects = st.sampled_from([b"a", b"orders.eu", "größe.ж".encode(), b"\xff\xfe.raw"]) | st.binary(
    min_size=1, max_size=300
)
header_blocks = st.none() | st.sampled_from(
    [b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\nA: 1\r\nA:1\r\na:  2 \r\n\r\n", b"NATS/1.0\r\nX: \xff\r\n\r\n"]
)
times = st.integers(-(2**63), 2**63 - 1) | st.just(1_700_000_000_123_456_789)
payloads = st.binary(max_size=200)
long_payloads = payloads | st.integers(1, 40_000).map(lambda size: b"x" * size)


@st.composite
def batches(draw: st.DrawFn, payloads: st.SearchStrategy[bytes] = payloads) -> list[list[Message]]:
    """Return rows in sequence order, with small gaps and some over 10,000, in batches of any size."""
    sequences = sorted(draw(st.lists(st.integers(1, 200) | st.integers(1, MAX_SEQUENCE), max_size=30, unique=True)))
    rows = [Message(n, draw(times), draw(subjects), draw(header_blocks), draw(payloads)) for n in sequences]
    cut = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    return [rows[a:b] for a, b in zip([0, *cut], [*cut, len(rows)], strict=True) if a < b]


CONSUMERS = (
    CapturedConsumer({"durable_name": "clean"}, "2026-01-01T00:00:00Z", 20, 40, 20, 40),
    CapturedConsumer({"durable_name": "behind", "filter_subject": "a.>"}, "2026-01-01T00:00:00.5Z", 20, 300, 3, 7),
)
CONFIG = {"name": "ORDERS", "subjects": ["orders.>"]}


def state_of(rows: Sequence[Message], last: int) -> ArchiveState:
    first = rows[0] if rows else Message(last + 1, 0, b"", None, b"")
    return ArchiveState(len(rows), 1000, first.sequence, first.timestamp_ns, last, rows[-1].timestamp_ns if rows else 0)


def archive_of(writer: ArchiveWriter, cut: list[list[Message]], last: int) -> bytes:
    """Return all pieces, with a keep-alive frame between any two."""

    def pieces() -> Iterator[bytes]:
        rows = [row for batch in cut for row in batch]
        yield from writer.encode_head(CONFIG, "2026-01-01T00:00:00Z", state_of(rows, last), CONSUMERS)
        for batch in cut:
            yield from writer.encode_rows(batch_of(*batch))
        yield from writer.encode_tail()

    return KEEP_ALIVE_FRAME.join(pieces())


@given(batches(long_payloads), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_the_logical_archive_holds_every_row_as_it_was(cut: list[list[Message]], behind: int) -> None:
    rows = [row for batch in cut for row in batch]
    last = rows[-1].sequence + behind if rows else behind

    head, *found = entries(unframed(archive_of(archive_writer("ORDERS", "2.15.1"), cut, last), checked=False))

    state = json.loads(head.payload)
    assert (head.name, state["last_seq"], state["messages"]) == (b"state.json", last, len(rows))
    assert (state["first_seq"], state["consumer_count"]) == (rows[0].sequence if rows else last + 1, 2)
    assert [each.name for each in found[:2]] == [b"consumers/clean", b"consumers/behind"]
    assert found[-1] == (b"", 0, 0, b"", b"")
    assert [tuple(each) for each in found[2:-1]] == [
        (row.subject, row.timestamp_ns, row.sequence, row.headers or b"", row.payload) for row in rows
    ]


def expected_blocks(rows: Sequence[Message], last: int) -> list[bytes]:
    """Return the blocks, cut at wide gaps; all these rows are small. The last one holds the end of the stream."""
    cut: list[list[Message]] = []
    for row in rows:
        if not cut or row.sequence - cut[-1][-1].sequence > 10_000:
            cut.append([])
        cut[-1].append(row)
    blocks = [encoded_block("ORDERS", index, block) for index, block in enumerate(cut, 1)]
    if last > (rows[-1].sequence if rows else 0):
        end = rows[-1].timestamp_ns if rows else 0
        blocks.append(encoded_block("ORDERS", len(blocks) + 1, [], (last, end)))
    return blocks


@given(batches(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_the_archive_of_files_is_what_a_slow_encoder_writes(cut: list[list[Message]], behind: int) -> None:
    rows = [row for batch in cut for row in batch]
    last = min(MAX_SEQUENCE, rows[-1].sequence + behind) if rows else behind

    files = tar_files(unframed(archive_of(archive_writer("ORDERS", "2.12.8"), cut, last), checked=False))

    blocks = expected_blocks(rows, last)
    assert [name for name in files if name.startswith("msgs/")] == [f"msgs/{n}.blk" for n in range(1, len(blocks) + 1)]
    assert [files[f"msgs/{index}.blk"] for index in range(1, len(blocks) + 1)] == blocks


def test_a_block_ends_before_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingress.recovery.files_form.MAX_BLOCK_BYTES", 80_000)
    rows = [Message(n, n, b"a", None, bytes([n % 256]) * 1_000) for n in range(1, 201)]
    rows[150] = Message(151, 151, b"a", None, b"x" * 90_000)
    files = tar_files(
        unframed(archive_of(archive_writer("ORDERS", "2.11.11"), [rows[:7], rows[7:]], 200), checked=False)
    )
    blocks = [content for name, content in files.items() if name.startswith("msgs/")]

    assert [len(each) // 1_031 for each in blocks] == [77, 73, 87, 49]
    assert sum(map(len, blocks)) == sum(31 + len(row.payload) for row in rows)


def refusal(*of: str, force: bool = False) -> str:
    with pytest.raises(ConfigError) as refused:
        archive_writer("ORDERS", *of, force=force)
    assert refused.value.code == "E-RESTORE-VERSION"
    return str(refused.value)


def test_the_form_follows_the_server_and_is_refused_where_it_lacks_it() -> None:
    forms = {f"2.{minor}.0": "files" for minor in (10, 11, 12, 13, 14)}
    forms |= dict.fromkeys(("2.15.0", "2.15.1", "2.15.3-RC.1"), "logical")
    assert {version: archive_writer("ORDERS", version).format for version in forms} == forms
    assert {archive_writer("ORDERS", version, "files").format for version in forms} == {"files"}
    assert archive_writer("ORDERS", "2.15.0", "logical").format == "logical"
    assert "logical form" in refusal("2.14.6", "logical")


def test_an_unknown_newer_minor_is_refused_unless_forced_and_an_old_server_even_then() -> None:
    for version in ("2.16.0", "2.17.1-dev", "3.0.0"):
        assert re.search(r"tested with 2\.\d+ to 2\.15", refusal(version))
        assert archive_writer("ORDERS", version, force=True).format == "logical"
    for version in ("2.9.25", "1.4.1", "", "dev"):
        assert "or newer" in refusal(version, force=True)
