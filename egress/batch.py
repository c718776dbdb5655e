"""Lists of received messages: parts of them, those that are chosen, their size. Hot: whole lists at once."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import compress
from typing import Any

from common.segments.columns import Columns
from common.segments.segment import Message, Reason


def part(columns: Columns, first: int, last: int) -> Columns:
    """The messages at the places `first` up to, not including, `last`."""
    keys = columns.sample_keys
    return Columns(
        columns.sequences[first:last],
        columns.timestamps_ns[first:last],
        columns.subjects[first:last],
        columns.headers[first:last],
        columns.payloads[first:last],
        None if keys is None else keys[first:last],
    )


def chosen(
    columns: Columns, selected: list[bool] | bytes | bytearray, keys: list[str | None] | None = None
) -> Columns:
    """The messages at whose places `selected` is true, with those of `keys` as their sample keys."""

    def some(values: list[Any]) -> list[Any]:
        return list(compress(values, selected))

    return Columns(
        some(columns.sequences),
        some(columns.timestamps_ns),
        some(columns.subjects),
        some(columns.headers),
        some(columns.payloads),
        None if keys is None else some(keys),
    )


def raw_size(columns: Columns) -> int:
    """Bytes of subjects, header blocks and payloads."""
    headers = sum(map(len, filter(None, columns.headers)))
    return sum(map(len, columns.payloads)) + sum(map(len, columns.subjects)) + headers


def extend(columns: Columns, more: Columns) -> None:
    """Append `more` to the lists of `columns`; sample keys only where `columns` has any."""
    columns.sequences.extend(more.sequences)
    columns.timestamps_ns.extend(more.timestamps_ns)
    columns.subjects.extend(more.subjects)
    columns.headers.extend(more.headers)
    columns.payloads.extend(more.payloads)
    if columns.sample_keys is not None:
        columns.sample_keys.extend(more.sample_keys or [None] * len(more.sequences))


def empty(*, sampled: bool) -> Columns:
    """No messages; with room for sample keys where `sampled`."""
    return Columns([], [], [], [], [], [] if sampled else None)


def last_message(columns: Columns) -> Message:
    """The last of the messages, of which there is one at least."""
    return Message(
        columns.sequences[-1],
        columns.timestamps_ns[-1],
        columns.subjects[-1],
        columns.headers[-1],
        columns.payloads[-1],
    )


# One byte for each examined message: 0 is kept, the others say why it is left out.
KEPT, LOOPED, TOO_OLD, SAMPLED_OUT = range(4)
REASONS = {LOOPED: Reason.LOOPED, TOO_OLD: Reason.TOO_OLD, SAMPLED_OUT: Reason.SAMPLED_OUT}


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """`examined`: received messages. `codes`: one for each. `kept`: those with code 0, with sample keys."""

    examined: Columns
    codes: bytes | bytearray
    kept: Columns

    @classmethod
    def whole(cls, columns: Columns) -> MessageBatch:
        """All of them are kept."""
        return cls(columns, bytes(len(columns.sequences)), columns)

    def __len__(self) -> int:
        return len(self.examined.sequences)

    def part(self, first: int, last: int) -> MessageBatch:
        """The examined messages at the places `first` up to, not including, `last`."""
        if len(self.kept.sequences) == len(self):
            rows = part(self.kept, first, last)
        else:
            begin = self.codes.count(KEPT, 0, first)
            rows = part(self.kept, begin, begin + self.codes.count(KEPT, first, last))
        return MessageBatch(part(self.examined, first, last), self.codes[first:last], rows)

    def behind(self, rows: int) -> int:
        """How many examined messages it takes until `rows` (at least 1) are kept."""
        if len(self.kept.sequences) == len(self):
            return rows
        return bisect_right(self.examined.sequences, self.kept.sequences[rows - 1])


def left_out(codes: bytes | bytearray) -> dict[Reason, int]:
    """How many messages each reason left out; reasons with 0 are left out."""
    counts = {reason: codes.count(code) for code, reason in REASONS.items()}
    return {reason: count for reason, count in counts.items() if count}
