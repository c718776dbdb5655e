"""The open segment of one chain: takes what the reader hands over, and says when it closes.

Synchronous, and called for every batch of messages: it only moves lists. What it emits, in order, is pieces
(rows and coverage, for the encoder) and, after the last piece of a segment, why the segment closed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from common.clock import Clock
from common.segments.rows import Columns
from common.segments.segment import Message
from common.sequences import SequenceRange
from egress.budget import Account

PIECE_BYTES = 4 * 2**20  # raw bytes handed to the encoder at once
PIECE_MESSAGES = 16_384
# Seconds until a piece with gaps is handed over unfilled, so that its gaps are judged by a source's first
# sequence that is hardly newer than they are.
GAP_AGE = 5.0
# Python's own bytes for one message: five objects and their places in the lists.
MESSAGE_OVERHEAD = 300


class Close(StrEnum):
    """Why a segment closed."""

    MESSAGES = "max_messages"
    SIZE = "max_size"
    AGE = "max_age"
    MEMORY = "memory_limit"
    HOLE = "hole_filled"
    DRAIN = "drain"
    DOUBT = "doubt"


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a segment: its pieces stand one behind the other.

    `examined`: the sequences of all messages received, of which `rows` are those kept. `last`: the last
    message received, None where there is none. `size`: raw bytes of the rows; `memory`: what is charged for
    them.
    """

    coverage: SequenceRange
    rows: Columns
    examined: list[int]
    last: Message | None
    size: int
    memory: int

    @property
    def missing(self) -> int:
        """Covered sequences that were not received."""
        return len(self.coverage) - len(self.examined)


Emitted = Piece | Close


@dataclass(frozen=True, slots=True)
class Closing:
    """When a segment closes: rows, raw bytes, seconds since it began to cover anything."""

    max_messages: int
    max_size: int
    max_age: float


class Builder:
    """Builds segments that cover everything from `first` on, to `until` if it is given.

    `keep_ns`: messages older than this before the newest message seen are left out; 0 keeps all. `hurry`: the
    greatest age of the first segment, where that is less than that of the others.
    """

    def __init__(
        self,
        closing: Closing,
        clock: Clock,
        account: Account,
        emit: Callable[[Emitted], None],
        *,
        first: int,
        until: int | None = None,
        keep_ns: int = 0,
        hurry: float | None = None,
    ) -> None:
        self._closing = closing
        self._clock = clock
        self._account = account
        self._emit = emit
        self._until = until
        self._max_age = closing.max_age if hurry is None else min(hurry, closing.max_age)
        self._keep_ns = keep_ns
        self._newest_ns = 0
        self._end = first - 1
        self.last: Message | None = None
        self._begin_segment()
        self._begin_piece()

    @property
    def end(self) -> int:
        """The last sequence accounted for."""
        return self._end

    @property
    def is_done(self) -> bool:
        """Whether `until` is reached; what comes after is dropped."""
        return self._until is not None and self._end >= self._until

    def saw(self, timestamp_ns: int) -> None:
        """The source holds a message as new as this."""
        self._newest_ns = max(self._newest_ns, timestamp_ns)

    def messages(self, columns: Columns) -> None:
        """Take received messages, in sequence order, all behind `end`."""
        while columns.sequences and not self.is_done:
            count, why = self._fitting(columns)
            self._take(columns if count == len(columns.sequences) else part(columns, 0, count))
            if why is Close.HOLE and self._until is not None:
                self._end = self._until
            if why is not None:
                self.close(why)
            columns = part(columns, count, len(columns.sequences))

    def passed(self, sequence: int) -> None:
        """The consumer has passed `sequence` and delivered all that it had up to there."""
        if sequence <= self._end or self.is_done:
            return
        self._open()
        self._end = sequence if self._until is None else min(sequence, self._until)
        if self._end == self._until:
            self.close(Close.HOLE)

    def tick(self) -> None:
        """Close the segment if it is old enough; to be called every now and then."""
        if self._opened is None:
            return
        now = self._clock.monotonic()
        if now - self._opened >= self._max_age:
            self.close(Close.AGE)
        elif now - self._piece_opened >= GAP_AGE and self._end - self._piece_first >= len(self._examined):
            self._emit_piece()

    def close(self, why: Close) -> None:
        """Close the segment; nothing where it covers nothing."""
        if self._end < self._first:
            return
        self._emit_piece()
        self._emit(why)
        self._max_age = self._closing.max_age
        self._begin_segment()

    def _begin_segment(self) -> None:
        self._first = self._end + 1
        self._count = 0
        self._size = 0
        self._opened: float | None = None

    def _begin_piece(self) -> None:
        self._piece_first = self._end + 1
        self._piece_opened = 0.0
        self._rows = Columns([], [], [], [], [])
        self._examined: list[int] = []
        self._piece_size = 0
        self._memory = 0

    def _open(self) -> None:
        now = self._clock.monotonic()
        if self._opened is None:
            self._opened = now
        if self._piece_first > self._end:
            self._piece_opened = now

    def _fitting(self, columns: Columns) -> tuple[int, Close | None]:
        """How many of the messages the open segment takes, and why it closes behind them, if it does."""
        count, why = len(columns.sequences), None
        if self._until is not None and columns.sequences[-1] >= self._until:
            count, why = bisect_right(columns.sequences, self._until), Close.HOLE
        room = self._closing.max_messages - self._count
        if room <= count:
            count, why = room, Close.MESSAGES
        if self._size + raw_size(columns) >= self._closing.max_size:
            filled = _filled(columns, self._closing.max_size - self._size)
            if filled < count or (filled == count and why is None):
                count, why = filled, Close.SIZE
        return count, why

    def _take(self, columns: Columns) -> None:
        if not columns.sequences:
            return
        self._open()
        self._end = columns.sequences[-1]
        self._count += len(columns.sequences)
        self.last = last_message(columns)
        self._examined += columns.sequences
        self._keep(self._without_old(columns) if self._keep_ns else columns)
        if self._piece_size >= PIECE_BYTES or len(self._examined) >= PIECE_MESSAGES:
            self._emit_piece()

    def _keep(self, columns: Columns) -> None:
        size = raw_size(columns)
        memory = size + MESSAGE_OVERHEAD * len(columns.sequences)
        self._rows.sequences.extend(columns.sequences)
        self._rows.timestamps_ns.extend(columns.timestamps_ns)
        self._rows.subjects.extend(columns.subjects)
        self._rows.headers.extend(columns.headers)
        self._rows.payloads.extend(columns.payloads)
        self._size += size
        self._piece_size += size
        self._memory += memory
        self._account.charge(memory)

    def _without_old(self, columns: Columns) -> Columns:
        kept = []
        for index, timestamp_ns in enumerate(columns.timestamps_ns):
            self.saw(timestamp_ns)
            if timestamp_ns >= self._newest_ns - self._keep_ns:
                kept.append(index)
        return columns if len(kept) == len(columns.sequences) else _chosen(columns, kept)

    def _piece_last(self) -> Message | None:
        return self.last if self._examined else None

    def _emit_piece(self) -> None:
        if self._end < self._piece_first:
            return
        coverage = SequenceRange(self._piece_first, self._end)
        self._emit(
            Piece(coverage, self._rows, self._examined, self._piece_last(), self._piece_size, self._memory)
        )
        self._begin_piece()


def raw_size(columns: Columns) -> int:
    """Bytes of subjects, header blocks and payloads."""
    headers = sum(map(len, filter(None, columns.headers)))
    return sum(map(len, columns.payloads)) + sum(map(len, columns.subjects)) + headers


def _filled(columns: Columns, room: int) -> int:
    """How many of the messages it takes to fill `room` bytes; at least one."""
    rows = zip(columns.subjects, columns.headers, columns.payloads, strict=True)
    sums = list(
        accumulate(len(subject) + len(headers or b"") + len(payload) for subject, headers, payload in rows)
    )
    return bisect_left(sums, room) + 1


def part(columns: Columns, first: int, last: int) -> Columns:
    """The messages at the places `first` up to, not including, `last`."""
    return Columns(
        columns.sequences[first:last],
        columns.timestamps_ns[first:last],
        columns.subjects[first:last],
        columns.headers[first:last],
        columns.payloads[first:last],
    )


def _chosen(columns: Columns, places: list[int]) -> Columns:
    return Columns(
        [columns.sequences[i] for i in places],
        [columns.timestamps_ns[i] for i in places],
        [columns.subjects[i] for i in places],
        [columns.headers[i] for i in places],
        [columns.payloads[i] for i in places],
    )


def last_message(columns: Columns) -> Message:
    """The last of the messages, of which there is one at least."""
    return Message(
        columns.sequences[-1],
        columns.timestamps_ns[-1],
        columns.subjects[-1],
        columns.headers[-1],
        columns.payloads[-1],
    )
