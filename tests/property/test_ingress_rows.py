"""Rows of an intent over many blocks: one index, and the same messages for any split into batches."""

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.archive.keys import SegmentName
from common.chain import Chain
from common.sequences import SequenceRange
from ingress.checkpoint import Intent, IntentPiece
from ingress.publishers import batches
from ingress.rows.rows import Block, PreparedBatch, Rows
from tests.unit.test_frames import compiled

NAME = SegmentName(Chain("us", "A"), 0, SequenceRange(1, 10_000), "0" * 16)

counts = st.lists(st.integers(0, 5), max_size=8)


def rows_of(counts: list[int], sizes: list[int]) -> Rows:
    blocks, sequence = [], 0
    for count in counts:
        taken = list(range(sequence + 1, sequence + 1 + count))
        ends, total = [], 0
        for each in taken:
            total += sizes[each % len(sizes)]
            ends.append(total)
        subjects = [b"%d" % each for each in taken]
        batch = PreparedBatch(taken, taken, subjects, b"O: ", None, pa.array([b"p"] * count, pa.binary()), ends)
        # One sequence without a row after each block, so that empty blocks have a range too.
        piece = IntentPiece(NAME, SequenceRange(sequence + 1, sequence + count + 1), count)
        blocks.append(Block(piece, batch if count else None))
        sequence += count + 1
    return Rows(blocks)


@given(counts, st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 7), st.integers(1, 120))
def test_batches_cover_every_message_once_within_their_limits(
    counts: list[int], sizes: list[int], most: int, most_bytes: int
) -> None:
    rows = rows_of(counts, sizes)
    everything = [subject for subject, _, _ in rows.messages(0, rows.count)]
    assert everything == [b"%d" % rows.sequence(index) for index in range(rows.count)]

    start, found = 0, []
    while start < rows.count:
        stop = rows.batch_end(start, most, most_bytes)
        assert start < stop <= min(rows.count, start + most)
        weight = sum(sizes[(rows.sequence(index) or 0) % len(sizes)] for index in range(start, stop))
        assert weight <= most_bytes or stop == start + 1
        found += [subject for subject, _, _ in rows.messages(start, stop)]
        start = stop
    assert found == everything


@given(counts)
def test_an_intent_finds_the_piece_of_each_message(counts: list[int]) -> None:
    rows = rows_of(counts, [1])
    intent = Intent(0, tuple(rows.pieces()))

    assert intent.count == rows.count
    for index in range(rows.count):
        before, piece = intent.piece_at(index)
        assert rows.sequence(index) in piece.rows
        assert before <= index < before + piece.count


TEXT, NUMBER = st.binary(max_size=9), st.integers(0, 2**63 - 1) | st.sampled_from([0, 9, 10, -1, 2**63])
ROW = st.tuples(TEXT, NUMBER, NUMBER, st.none() | TEXT, TEXT)


def batch_of(rows: list[tuple[Any, ...]], skipped: int, *, has_tails: bool) -> PreparedBatch:
    subjects, sequences, times, tails, payloads = ([row[n] for row in rows] for n in range(5))
    array = pa.array([b"before"] * skipped + payloads, pa.binary())[skipped:]
    ends = list(range(1, len(rows) + 1))
    kept = tails if has_tails else None
    return PreparedBatch(sequences, times, subjects, b"O: ", kept, array, ends, b"\r\nX: y\r\n\r\n")


@pytest.fixture(scope="module")
def in_c() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_compose", compiled("compose"))
        yield


@pytest.mark.usefixtures("in_c")
@given(st.lists(st.lists(ROW, min_size=1), min_size=1), st.sampled_from([0, 8, 98, 2**60]), st.booleans(), st.data())
def test_compiled_messages_of_a_fast_batch_are_those_of_python(
    blocks: list[list[Any]], base: int, has_tails: bool, data: st.DataObject
) -> None:
    made = [batch_of(rows, data.draw(st.integers(0, 2)), has_tails=has_tails) for rows in blocks]
    pieces = [IntentPiece(NAME, SequenceRange(1, len(rows)), len(rows)) for rows in blocks]
    rows = Rows([Block(piece, batch) for piece, batch in zip(pieces, made, strict=True)])
    start = data.draw(st.integers(0, rows.count - 1))
    answers: Any = SimpleNamespace(batch=b"_INBOX.a.b.")
    batch = batches.FastBatch(rows, base, start, 7, answers, answers)
    begin = data.draw(st.integers(0, batch.count - 1))
    end = data.draw(st.integers(begin, batch.count))
    compiled = batch.compose(begin, end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_compose", None)
        assert compiled == batch.compose(begin, end)


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize(
    "changed",
    [
        *({"ends": each} for each in ([0, 2], [0, 5, 2], [-1, 2, 4], [0, 2, 5])), {"offset": -1}, {"offset": 1},
        *({"subjects": each} for each in ([b"a", "b"], [b"a"])), *({"tails": each} for each in ([b"t"], [None, 5])),
        {"sequences": [1, -1]}, {"times": [1, 2**63]}, {"row": -1}, {"row": 3}, {"stop": 3}, {"number": -1},
        {"after": 2**63 - 1}, {"operation": 10},
    ],
)  # fmt: skip
def test_rows_that_are_not_ordinary_are_left_to_python(changed: dict[str, Any]) -> None:
    given: dict[str, Any] = {"subjects": [b"a", b"b"], "sequences": [1, 2], "times": [3, 4], "tails": None}
    given |= {"ends": [0, 2, 4], "data": b"wxyz", "offset": 0, "origin": b"O: ", "end": b"\r\n\r\n", "reply": b"r."}
    given |= {"row": 0, "stop": 2, "operation": 1, "number": 1, "last": 9, "after": 5}
    wire = lambda found: batches._compose.compose(*(found | {"ends": array("i", found["ends"])}).values())  # noqa: E731
    assert wire(given).startswith(b"HPUB a r.1.1.$FI 52 54\r\nNATS/1.0\r\nNats-Expected-Last-Sequence: 5\r\nO: 1 3")
    assert wire(given | changed) is None
