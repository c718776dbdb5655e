"""Batches of received messages, and the open segment of one chain that takes them and decides when it closes.

Synchronous, and called for every batch of messages: it only moves lists. The builder emits, in order, pieces (rows and
coverage, for the encoder) and, after the last piece of a segment, the reason that the segment closed. An error in the
middle of a batch leaves it torn, that is inconsistent: it then emits nothing more, and its messages are read again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

from common.archive.columns import Columns
from common.archive.segment import Ledger, Message, Reason
from common.clock import Clock
from common.sequences import SequenceRange
from common.settings.egress import SegmentSettings
from egress.memory import MemoryAccount
from egress.partition import Position

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


PIECE_BYTES = 4 * 2**20  # raw bytes handed to the encoder at once
PIECE_MESSAGES = 16_384
# Seconds until a piece with gaps is handed over before it is full. The first sequence of the source, by which its gaps
# are judged, is then hardly newer than they are.
GAP_MAX_AGE_S = 5.0
# Python's own bytes for one message: five objects and their entries in the lists.
MESSAGE_OVERHEAD_BYTES = 300
# Bytes kept of a message that is left out: its sequence, and the reason.
EXAMINED_OVERHEAD_BYTES = 48


class ClosedBy(StrEnum):
    """Reason that a segment closed."""

    MESSAGES = "max_messages"
    SIZE = "max_size"
    AGE = "max_age"
    MEMORY = "memory_limit"
    HOLE = "hole_filled"
    FLUSH = "flush"
    DRAIN = "drain"
    RESET = "doubt"


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a segment; the pieces of a segment follow each other without a gap.

    `examined`: the sequences of all messages received; `rows`: those that are kept. `last`: the last message received,
    None if there is none. `size`: raw bytes of the rows; `memory`: bytes charged for the piece. `codes`: as in
    `MessageBatch`, one for each examined message; empty if all are kept. `left_out`: raw bytes of the others by reason.
    """

    coverage: SequenceRange
    rows: Columns
    examined: list[int]
    last: Message | None
    size: int
    memory: int
    codes: bytes | bytearray = b""
    left_out: Mapping[Reason, int] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        return len(self.coverage) - len(self.examined)


Emitted = Piece | ClosedBy


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """Sequences from `first` to `last`, which are received and in no finished segment yet.

    `messages`, `size`: the rows kept of them, and their raw bytes. `age`: seconds since the first of them was received;
    after `due_in` more seconds it closes by age. `limits`: the limits that close it sooner.
    """

    first: int
    last: int
    messages: int
    size: int
    age: float
    due_in: float
    limits: SegmentSettings

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON output."""
        return {
            "first": self.first,
            "last": self.last,
            "messages": self.messages,
            "bytes": self.size,
            "age_seconds": round(self.age, 3),
            "closes_in_seconds": round(self.due_in, 3),
            "max_messages": self.limits.max_messages,
            "max_size": self.limits.max_size,
        }


class SegmentBuilder:
    """Builder of segments that cover everything from `position` on. `end`: the last sequence covered so far; `closed`:
    the number of segments closed.

    `limits`: when a segment closes, by rows, raw bytes, and seconds since it began to cover anything. `sampled`: rows
    have sample keys. `max_age`: the greatest age of the first segment, if it is less than that of the others. `on_due`:
    called if `due_in` has become less than time alone makes it, and nothing was emitted.
    """

    _due_at: float  # at the last `_check_due`, by the monotonic clock

    def __init__(
        self,
        limits: SegmentSettings,
        clock: Clock,
        account: MemoryAccount,
        emit: Callable[[Emitted], None],
        position: Position,
        *,
        sampled: bool = False,
        max_age: float | None = None,
        on_due: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits, self._clock, self._account, self._emit = limits, clock, account, emit
        self._on_due, self._due_at = on_due, math.inf
        self._until = position.until
        self._max_age = limits.max_age if max_age is None else min(max_age, limits.max_age)
        self._sampled, self.end, self._is_inconsistent, self.closed = sampled, position.first - 1, False, 0
        self.last: Message | None = None
        self._begin_segment()
        self._begin_piece()

    @property
    def is_done(self) -> bool:
        return self._until is not None and self.end >= self._until

    @property
    def is_open(self) -> bool:
        return self.end >= self._first

    @property
    def open_segment(self) -> OpenSegment | None:
        """Open segment; None if it covers nothing. Safe in any thread: while messages arrive, figures may differ by a
        batch.
        """
        if (opened := self._opened) is None:
            return None
        age = max(0.0, self._clock.monotonic() - opened)
        due_in = max(0.0, self._max_age - age)
        return OpenSegment(self._first, self.end, self._count, self._size, age, due_in, self._limits)

    def add_messages(self, columns: Columns) -> None:
        """Take messages in sequence order, all after `end`, and keep all of them."""
        self.add_batch(MessageBatch.keep_all(columns))

    def add_batch(self, batch: MessageBatch) -> None:
        """Take received messages in sequence order, all after `end`, and keep some of them.

        Only kept messages count towards the limits of a segment, which closes after the message that reaches them.
        """
        with self._consistent_step():
            while len(batch) and not self.is_done:
                size = batch.kept.raw_size
                count, reason = self._count_fitting(batch, size)
                if count == len(batch):
                    self._take(batch, size)
                elif count:
                    first = batch.part(0, count)
                    self._take(first, first.kept.raw_size)
                if reason is ClosedBy.HOLE and self._until is not None:
                    self.end = self._until
                if reason is not None:
                    self._close(reason)
                batch = batch.part(count, len(batch))
            self._check_due()

    @contextmanager
    def _consistent_step(self) -> Iterator[None]:
        """Guard steps that may fail halfway if memory runs out: rows would be without coverage, or counted twice."""
        if self._is_inconsistent:
            raise RuntimeError("builder: expected no call after an error")
        self._is_inconsistent = True
        yield
        self._is_inconsistent = False

    def skip_to(self, sequence: int) -> None:
        if sequence <= self.end or self.is_done:
            return
        with self._consistent_step():
            self._open()
            self.end = sequence if self._until is None else min(sequence, self._until)
            if self.end == self._until:
                self._close(ClosedBy.HOLE)
            self._check_due()

    def tick(self) -> None:
        if self._opened is None or self._is_inconsistent:
            return
        now = self._clock.monotonic()
        if now >= self._opened + self._max_age:
            self.close(ClosedBy.AGE)
        elif now >= self._next_due():
            with self._consistent_step():
                self._emit_piece()

    def _next_due(self) -> float:
        if self._opened is None:
            return math.inf
        has_gap = self.end - self._piece_first >= len(self._examined)
        return min(self._opened + self._max_age, self._piece_opened + GAP_MAX_AGE_S if has_gap else math.inf)

    def _check_due(self) -> None:
        before, self._due_at = self._due_at, self._next_due()
        if self._due_at < before:
            self._on_due()

    @property
    def due_in(self) -> float:
        """Seconds until the open segment is old enough to close, or a piece with gaps to be handed over; infinite if it
        covers nothing.
        """
        return max(0.0, self._next_due() - self._clock.monotonic())

    def close(self, reason: ClosedBy) -> None:
        """Close the open segment. Does nothing if it covers nothing, or if the builder is torn."""
        if not self._is_inconsistent:
            with self._consistent_step():
                self._close(reason)

    def _close(self, reason: ClosedBy) -> None:
        if not self.is_open:
            return
        self._emit_piece()
        self._emit(reason)
        self.closed += 1
        self._max_age = self._limits.max_age
        self._begin_segment()

    def _begin_segment(self) -> None:
        self._first = self.end + 1
        self._count, self._size = 0, 0
        self._opened: float | None = None
        self._due_at = math.inf

    def _begin_piece(self) -> None:
        self._piece_first, self._piece_opened = self.end + 1, 0.0
        self._rows, self._codes = Columns.empty(sampled=self._sampled), bytearray()
        self._examined: list[int] = []
        self._piece_size, self._memory, self._left_out = 0, 0, Counter[Reason]()
        self._due_at = math.inf

    def _open(self) -> None:
        now = self._clock.monotonic()
        if self._opened is None:
            self._opened = now
        if self._piece_first > self.end:
            self._piece_opened = now

    def _count_fitting(self, batch: MessageBatch, size: int) -> tuple[int, ClosedBy | None]:
        count, reason = len(batch), None
        sequences, rows = batch.examined.sequences, batch.kept
        if self._until is not None and sequences[-1] >= self._until:
            count, reason = bisect_right(sequences, self._until), ClosedBy.HOLE
        room = self._limits.max_messages - self._count
        if room <= len(rows) and (reached := batch.examined_until(room)) <= count:
            count, reason = reached, ClosedBy.MESSAGES
        if self._size + size >= self._limits.max_size:
            filled = batch.examined_until(_count_until_full(rows, self._limits.max_size - self._size))
            if filled < count or (filled == count and reason is None):
                count, reason = filled, ClosedBy.SIZE
        return count, reason

    def _take(self, batch: MessageBatch, size: int) -> None:
        self._open()
        self.end = batch.examined.sequences[-1]
        self._count += len(batch.kept)
        self.last = batch.examined.last
        self._examined += batch.examined.sequences
        self._codes += batch.codes
        self._rows.extend(batch.kept)
        self._left_out.update(left_out_bytes(batch))
        kept, others = len(batch.kept), len(batch) - len(batch.kept)
        memory = size + MESSAGE_OVERHEAD_BYTES * kept + EXAMINED_OVERHEAD_BYTES * others
        self._size += size
        self._piece_size += size
        self._memory += memory
        self._account.charge(memory)
        if self._piece_size >= PIECE_BYTES or len(self._examined) >= PIECE_MESSAGES:
            self._emit_piece()

    def _emit_piece(self) -> None:
        if self.end < self._piece_first:
            return
        coverage = SequenceRange(self._piece_first, self.end)
        last, size = self.last if self._examined else None, self._piece_size
        received = self._rows, self._examined, last, size, self._memory, self._codes, self._left_out
        self._emit(Piece(coverage, *received))
        self._begin_piece()


def _count_until_full(columns: Columns, room: int) -> int:
    rows = zip(columns.subjects, columns.headers, columns.payloads, strict=True)
    sums = list(accumulate(len(subject) + len(headers or b"") + len(payload) for subject, headers, payload in rows))
    return bisect_left(sums, room) + 1


def ledger_of(
    piece: Piece, source_first: int, *, filtered: bool, from_hole: Sequence[SequenceRange] = (), restored: int = 0
) -> Ledger:
    """Return the ledger of `piece`: messages left out, sequences skipped by the consumer, sequences gone before
    reading.

    `source_first`: the source's first sequence, read after the piece was received; it has no effect if nothing is
    missing. Sequences that were not received and are below it expired or were purged; the others are interior gaps.
    `from_hole`: the ranges missing in a hole under existing coverage. It is unknown if they were deleted before they
    were archived; nothing else of the piece is gone then. `restored`: the first sequence that a restored stream gave to
    a message; everything below was lost with the stream before it, which is no fault of reading.
    """
    gone = 0 if from_hole else gone_before_read(piece, source_first, restored)
    lost = sum(map(len, from_hole))
    skipped = Reason.NOT_MATCHED if filtered else Reason.DELETED
    counts = {
        **count_left_out(piece.codes),
        Reason.GONE_BEFORE_READ: gone,
        Reason.GONE_FROM_HOLE: lost,
        skipped: piece.missing - gone - lost,
    }
    return Ledger({reason: count for reason, count in counts.items() if count})


def gaps(piece: Piece) -> Iterator[SequenceRange]:
    position = piece.coverage.first
    for sequence in piece.examined:
        if sequence > position:
            yield SequenceRange(position, sequence - 1)
        position = sequence + 1
    if position <= piece.coverage.last:
        yield SequenceRange(position, piece.coverage.last)


def unread(
    piece: Piece, source_first: int, from_hole: Sequence[SequenceRange] = (), restored: int = 0
) -> SequenceRange | None:
    """Return the least range with all sequences that `ledger_of` counts as gone; None if there are none."""
    if from_hole:
        return SequenceRange(from_hole[0].first, from_hole[-1].last)
    if not gone_before_read(piece, source_first, restored):
        return None
    below = [gap for gap in gaps(piece) if gap.first < source_first and gap.last >= restored]
    return SequenceRange(max(below[0].first, restored), min(below[-1].last, source_first - 1))


def gone_before_read(piece: Piece, source_first: int, restored: int = 0) -> int:
    first, last = max(piece.coverage.first, restored), min(source_first - 1, piece.coverage.last)
    received = bisect_left(piece.examined, source_first) - bisect_left(piece.examined, first)
    return last - first + 1 - received if first <= last else 0


def before_first_gap(piece: Piece) -> Piece | None:
    """Return the leading part of `piece` in which nothing is missing, up to a row; None if there is no such row.

    For a hole under existing coverage: nothing there may be covered as gone.
    """
    first = piece.coverage.first
    count = next((i for i, s in enumerate(piece.examined) if s != first + i), len(piece.examined))
    if not (rows := piece.rows.part(0, bisect_left(piece.rows.sequences, first + count))):
        return None
    coverage = SequenceRange(first, rows.sequences[-1])
    examined, codes = piece.examined[: len(coverage)], piece.codes[: len(coverage)]
    return Piece(coverage, rows, examined, rows.last, rows.raw_size, piece.memory, codes)
