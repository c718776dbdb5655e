"""Rows of an intent over many blocks: one index, and the same messages for any split into batches."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from common.archive.keys import SegmentName
from common.chain import Chain
from common.sequences import SequenceRange
from ingress.checkpoint import Intent, IntentPiece
from ingress.rows.rows import Block, PreparedBatch, Rows

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
