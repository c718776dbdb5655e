"""Lists of received messages: parts of them, those that are chosen, their size. Hot: whole lists at once."""

from __future__ import annotations

from itertools import compress
from typing import Any

from common.segments.columns import Columns
from common.segments.segment import Message


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
