"""I6 at the file: any message is read as it was written."""

import tempfile
from pathlib import Path

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from common.archive.columns import SCHEMA, columns_of, messages, raw_size, record_batch
from common.archive.reader import open_file
from common.archive.segment import Message
from common.sequences import MAX_SEQUENCE, SequenceRange
from tests.support.invariants import first_difference, in_order
from tests.support.segments import batch_of, read_all, write_segment

subjects = st.binary(min_size=1, max_size=30) | st.text(min_size=1, max_size=20).map(
    lambda text: text.encode("utf-8", "surrogatepass")
)
header_blocks = st.none() | st.sampled_from(
    [b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\nA: 1\r\nA: 1\r\na:  2 \r\n\r\n", b"NATS/1.0\r\nX: \xff\r\n\r\n"]
)
times = st.integers(0, 2**63 - 1) | st.integers(-(2**62), 2**62) | st.just(1_700_000_000_123_456_789)


@st.composite
def streams(draw: st.DrawFn) -> list[Message]:
    """Generate messages in sequence order, with gaps, equal times and every kind of content."""
    sequences = draw(st.lists(st.integers(1, 1000) | st.integers(1, MAX_SEQUENCE), max_size=40, unique=True))
    payloads = st.binary(max_size=200)
    return [Message(n, draw(times), draw(subjects), draw(header_blocks), draw(payloads)) for n in sorted(sequences)]


@given(streams())
def test_messages_become_a_batch_and_columns_and_messages_again(rows: list[Message]) -> None:
    batch = batch_of(rows)
    assert batch.schema.equals(SCHEMA)
    assert list(messages(batch)) == rows
    lists = columns_of(batch)
    assert lists.sequences == [m.sequence for m in rows]
    assert in_order(lists.sequences)
    assert (lists.subjects, lists.headers) == ([m.subject for m in rows], [m.headers for m in rows])
    assert raw_size(batch) == sum(len(m.subject) + len(m.headers or b"") + len(m.payload) for m in rows)


@given(streams().filter(bool), st.integers(1, 50))
def test_a_file_gives_back_what_was_written(rows: list[Message], batch_rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "segment"
        spooled = write_segment(path, rows, batch_rows=batch_rows)
        with open_file(path, spooled.segment_name) as reader:
            assert (first_difference(rows, read_all(reader)), reader.footer) == (None, spooled.footer)
            assert sum(group.rows for group in reader.row_groups) == len(rows)


@given(streams().filter(bool), st.data())
def test_a_part_of_a_file_is_the_rows_inside_it(rows: list[Message], data: st.DataObject) -> None:
    edge = st.sampled_from([m.sequence for m in rows]) | st.integers(1, MAX_SEQUENCE)
    first, last = sorted((data.draw(edge), data.draw(edge)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "segment"
        with open_file(path, write_segment(path, rows).segment_name) as reader:
            found = read_all(reader, SequenceRange(first, last))
            assert found == [m for m in rows if first <= m.sequence <= last]
            alone = pa.Table.from_batches(
                reader.batches(SequenceRange(first, last), ["subject"]), pa.schema([SCHEMA.field("subject")])
            )
            assert alone.num_rows == len(found)


@given(st.lists(st.text() | st.none(), max_size=5))
def test_sample_keys_are_kept(keys: list[str | None]) -> None:
    keys = [key if key is None else key.encode("utf-8", "replace").decode() for key in keys]
    count = len(keys)
    batch = record_batch(range(1, count + 1), [0] * count, [b"s"] * count, [None] * count, [b""] * count, keys)
    assert batch.column("sample_key").to_pylist() == keys
