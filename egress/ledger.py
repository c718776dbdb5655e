"""Why covered sequences have no row (I7): pure, judged piece by piece."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from common.segments.segment import Ledger, Reason
from common.sequences import SequenceRange
from egress.batch import last_message, part, raw_size
from egress.builder import Piece
from egress.sifted import left_out


def attribute(
    piece: Piece, source_first: int, *, filtered: bool, from_hole: Sequence[SequenceRange] = ()
) -> Ledger:
    """The ledger of `piece`: what was received and left out, what the consumer passed, what was gone before.

    `source_first`: the source's first sequence, asked for after the piece was received. Sequences that were
    not received and lie below it expired or were purged; the others are interior gaps. Without anything
    missing it does not matter. `from_hole`: what is missing in a hole under existing coverage, where nobody
    knows whether it was deleted before it was archived; nothing else of the piece is gone then.
    """
    gone = 0 if from_hole else gone_before_read(piece, source_first)
    lost = sum(map(len, from_hole))
    passed = Reason.NOT_MATCHED if filtered else Reason.DELETED
    counts = {
        **left_out(piece.codes),
        Reason.GONE_BEFORE_READ: gone,
        Reason.GONE_FROM_HOLE: lost,
        passed: piece.missing - gone - lost,
    }
    return Ledger({reason: count for reason, count in counts.items() if count})


def gaps(piece: Piece) -> Iterator[SequenceRange]:
    """The covered sequences that were not received, ascending."""
    position = piece.coverage.first
    for sequence in piece.examined:
        if sequence > position:
            yield SequenceRange(position, sequence - 1)
        position = sequence + 1
    if position <= piece.coverage.last:
        yield SequenceRange(position, piece.coverage.last)


def unread(piece: Piece, source_first: int, from_hole: Sequence[SequenceRange] = ()) -> SequenceRange | None:
    """The least range with all that `attribute` counts as gone; None where nothing is."""
    if from_hole:
        return SequenceRange(from_hole[0].first, from_hole[-1].last)
    if not gone_before_read(piece, source_first):
        return None
    below = [gap for gap in gaps(piece) if gap.first < source_first]
    return SequenceRange(below[0].first, min(below[-1].last, source_first - 1))


def gone_before_read(piece: Piece, source_first: int) -> int:
    """How many covered sequences below `source_first` were not received."""
    last = min(source_first - 1, piece.coverage.last)
    if last < piece.coverage.first:
        return 0
    return last - piece.coverage.first + 1 - bisect_left(piece.examined, source_first)


def before_first_gap(piece: Piece) -> Piece | None:
    """The leading part of `piece` in which nothing is missing, up to a row; None if there is no such row.

    For a hole under existing coverage, where nothing may be covered as gone.
    """
    first = piece.coverage.first
    count = next((i for i, s in enumerate(piece.examined) if s != first + i), len(piece.examined))
    rows = part(piece.rows, 0, bisect_left(piece.rows.sequences, first + count))
    if not rows.sequences:
        return None
    coverage = SequenceRange(first, rows.sequences[-1])
    examined, codes = piece.examined[: len(coverage)], piece.codes[: len(coverage)]
    return Piece(coverage, rows, examined, last_message(rows), raw_size(rows), piece.memory, codes)
