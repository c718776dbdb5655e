"""Why covered sequences have no row (I7): pure, judged piece by piece."""

from __future__ import annotations

from bisect import bisect_left

from common.segments.segment import Ledger, Reason
from common.sequences import SequenceRange
from egress.builder import Piece
from egress.columns import last_message, part, raw_size
from egress.sifted import left_out


def attribute(piece: Piece, source_first: int, *, filtered: bool) -> Ledger:
    """The ledger of `piece`: what was received and left out, what the consumer passed, what was gone before.

    `source_first`: the source's first sequence, asked for after the piece was received. Sequences that were
    not received and lie below it expired or were purged; the others are interior gaps. Without anything
    missing it does not matter.
    """
    gone = gone_before_read(piece, source_first)
    passed = Reason.NOT_MATCHED if filtered else Reason.DELETED
    counts = {
        **left_out(piece.codes),
        Reason.GONE_BEFORE_READ: gone,
        passed: piece.missing - gone,
    }
    return Ledger({reason: count for reason, count in counts.items() if count})


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
