"""Batch of received messages, and the choice of those that are kept. Hot path: it works on whole lists."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from common.archive.columns import Columns
from common.archive.segment import Reason

# One byte for each examined message: 0 if it is kept, else the reason to leave it out.
CODE_KEPT, CODE_LOOPED, CODE_TOO_OLD, CODE_SAMPLED_OUT = range(4)
REASON_BY_CODE = {CODE_LOOPED: Reason.LOOPED, CODE_TOO_OLD: Reason.TOO_OLD, CODE_SAMPLED_OUT: Reason.SAMPLED_OUT}


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """Received messages (`examined`), one code for each (`codes`), and those with code 0, with sample keys (`kept`)."""

    examined: Columns
    codes: bytes | bytearray
    kept: Columns

    @classmethod
    def keep_all(cls, columns: Columns) -> MessageBatch:
        return cls(columns, bytes(len(columns)), columns)

    def __len__(self) -> int:
        return len(self.examined)

    def part(self, first: int, last: int) -> MessageBatch:
        """Return the examined messages from index `first` to `last` (exclusive)."""
        if len(self.kept) == len(self):
            rows = self.kept.part(first, last)
        else:
            begin = self.codes.count(CODE_KEPT, 0, first)
            rows = self.kept.part(begin, begin + self.codes.count(CODE_KEPT, first, last))
        return MessageBatch(self.examined.part(first, last), self.codes[first:last], rows)

    def examined_until(self, rows: int) -> int:
        """Count the examined messages up to the one that is kept as number `rows` (at least 1)."""
        if len(self.kept) == len(self):
            return rows
        return bisect_right(self.examined.sequences, self.kept.sequences[rows - 1])


_ONLY = {code: bytes(code == each for each in range(256)) for code in REASON_BY_CODE}  # 1 for this code, else 0


def left_out_bytes(batch: MessageBatch) -> dict[Reason, int]:
    """Return the raw bytes of the messages that are left out, by reason."""
    if len(batch.kept) == len(batch):
        return {}
    counts = count_left_out(batch.codes)
    if len(counts) == 1:
        return dict.fromkeys(counts, batch.examined.raw_size - batch.kept.raw_size)
    sizes = {REASON_BY_CODE[code]: batch.examined.select(batch.codes.translate(only)) for code, only in _ONLY.items()}
    return {reason: sizes[reason].raw_size for reason in counts}


def count_left_out(codes: bytes | bytearray) -> dict[Reason, int]:
    counts = {reason: codes.count(code) for code, reason in REASON_BY_CODE.items()}
    return {reason: count for reason, count in counts.items() if count}
