"""Messages that were examined: which of them become rows, and why the others do not."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from common.segments.columns import Columns
from common.segments.segment import Reason
from egress.batch import part

# One byte for each examined message: 0 is kept, the others say why it is left out.
KEPT, LOOPED, TOO_OLD, SAMPLED_OUT = range(4)
REASONS = {LOOPED: Reason.LOOPED, TOO_OLD: Reason.TOO_OLD, SAMPLED_OUT: Reason.SAMPLED_OUT}


@dataclass(frozen=True, slots=True)
class Sifted:
    """`examined`: received messages. `codes`: one for each. `kept`: those with code 0, with sample keys."""

    examined: Columns
    codes: bytes | bytearray
    kept: Columns

    @classmethod
    def whole(cls, columns: Columns) -> Sifted:
        """All of them are kept."""
        return cls(columns, bytes(len(columns.sequences)), columns)

    def __len__(self) -> int:
        return len(self.examined.sequences)

    def part(self, first: int, last: int) -> Sifted:
        """The examined messages at the places `first` up to, not including, `last`."""
        if len(self.kept.sequences) == len(self):
            rows = part(self.kept, first, last)
        else:
            begin = self.codes.count(KEPT, 0, first)
            rows = part(self.kept, begin, begin + self.codes.count(KEPT, first, last))
        return Sifted(part(self.examined, first, last), self.codes[first:last], rows)

    def behind(self, rows: int) -> int:
        """How many examined messages it takes until `rows` (at least 1) are kept."""
        if len(self.kept.sequences) == len(self):
            return rows
        return bisect_right(self.examined.sequences, self.kept.sequences[rows - 1])


def left_out(codes: bytes | bytearray) -> dict[Reason, int]:
    """How many messages each reason left out; reasons with 0 are left out."""
    counts = {reason: codes.count(code) for code, reason in REASONS.items()}
    return {reason: count for reason, count in counts.items() if count}
