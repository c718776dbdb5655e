"""What is left of archived rows: the archive holds more than the stream did at its end.

`Fold` takes off, row by row, what a later row rolled up, what was deleted, what `max_msgs_per_subject` dropped, and
each schedule of which a later row says that the server removed it when it fired for the last time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from common.clock import NS_PER_S
from common.jetstream.headers import parse_block
from common.segments.captures import CapturedDeletions
from common.segments.segment import decode_subject
from common.sequences import SequenceRange
from common.settings.types import MAX_DURATION, parse_duration

Mask = npt.NDArray[np.bool_]
Whole = npt.NDArray[np.int64]


def hashes(batch: pa.RecordBatch) -> npt.NDArray[np.uint64]:
    """64 bits for each row, equal for equal subjects within this process."""
    text = batch.column("subject")
    encoded: Any = text if isinstance(text, pa.DictionaryArray) else text.dictionary_encode()
    each = np.array([*map(_hash, encoded.dictionary.to_pylist())], np.uint64)
    found: npt.NDArray[np.uint64] = each[np.asarray(encoded.indices)]
    return found


def _hash(subject: str) -> int:
    return hash(subject) & 0xFFFFFFFFFFFFFFFF


@dataclass
class _Subjects:
    """By hash of a subject, ascending: how many rows are left of it, and the sequence of its last rollup (0: none)."""

    hash: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    rows: Whole = field(default_factory=lambda: np.zeros(0, np.int64))
    rollup: Whole = field(default_factory=lambda: np.zeros(0, np.int64))

    def then(self, *later: _Subjects) -> _Subjects:
        """Both, where a rollup of a later one takes off what was counted before."""
        every = (self, *later)
        hash_ = np.concatenate([each.hash for each in every])
        if not len(hash_):
            return self
        order = np.argsort(hash_, kind="stable")
        hash_ = hash_[order]
        rows, rollup = (np.concatenate([getattr(e, n) for e in every])[order] for n in ("rows", "rollup"))
        starts = np.flatnonzero(np.r_[True, hash_[1:] != hash_[:-1]])
        sums = np.cumsum(rows)
        before = np.where(rollup > 0, sums - rows, 0)
        before[starts] = np.maximum(before[starts], sums[starts] - rows[starts])
        ends = np.r_[starts[1:], len(hash_)] - 1
        left = sums[ends] - np.maximum.reduceat(before, starts)
        return _Subjects(hash_[starts], left, np.maximum.reduceat(rollup, starts))


class Fold:
    """Takes off the rows that the stream did not hold any more at its end, in two passes over the same batches.

    `deletions`: what egress captured; `rolls`: the stream allows `Nats-Rollup`; `per_subject`: `max_msgs_per_subject`,
    0 for no limit; `schedules`, `expires`: the stream allows them, and `Nats-TTL`: a message that had expired when a
    later one of its subject came has pushed none out. Call `see` with every batch and `end_pass`, as often as `passes`
    says; then `left` with every batch again.
    Memory: 24 bytes for each subject, twice that with `expires`.
    """

    def __init__(
        self,
        deletions: CapturedDeletions | None,
        *,
        rolls: bool,
        per_subject: int,
        schedules: bool = False,
        expires: bool = False,
    ) -> None:
        self._rolls, self._per_subject, self._schedules = rolls, max(0, per_subject), schedules
        self._first, self._last = (deletions.first, deletions.last) if deletions else (0, 0)
        ranges = np.array(deletions.deleted if deletions else [], np.int64).reshape(-1, 2)
        self._deleted_first, self._deleted_last = ranges[:, 0], ranges[:, 1]
        self._subjects, self._pending, self._size = _Subjects(), list[_Subjects](), 0
        self._rolled = 0  # the last rollup of the whole stream
        self._seen: Whole = np.zeros(0, np.int64)
        # By subject, in place of the last rollup: when its last message came; known after the first of two passes.
        self._latest = _Subjects()
        self.passes = (2 if expires and self._per_subject > 1 else 1) if self.needs_pass else 0

    @property
    def needs_pass(self) -> bool:
        return self._rolls or self._schedules or self._per_subject > 0

    @property
    def is_none(self) -> bool:
        return not self.needs_pass and not self._last

    def deleted(self, rows: SequenceRange) -> int:
        """How many of these sequences were captured as deleted."""
        below = min(self._first - 1, self._last, rows.last) - rows.first + 1
        some = slice(
            np.searchsorted(self._deleted_last, rows.first), np.searchsorted(self._deleted_first, rows.last, "right")
        )
        first = np.maximum(self._deleted_first[some], max(rows.first, self._first))
        behind = np.minimum(self._deleted_last[some], rows.last) - first + 1
        return max(0, below) + int(np.maximum(behind, 0).sum())

    @property
    def rows(self) -> int:
        """How many rows are left, after the first pass."""
        counts = self._subjects.rows
        return int((np.minimum(counts, self._per_subject) if self._per_subject else counts).sum())

    def see(self, batch: pa.RecordBatch) -> None:
        batch = batch.filter(pa.array(self._held(batch)))
        if not batch.num_rows:
            return
        if self.passes > 1:
            self._add(hashes(batch), np.zeros(batch.num_rows, np.int64), np.asarray(batch.column("timestamp_ns")))
            return
        sequences, rollups = np.asarray(batch.column("sequence")), self._rollups(batch)
        whole = [row for row, is_all in rollups.items() if is_all]
        begin = 0
        if whole:  # nothing from before is left
            begin, self._rolled = whole[-1], int(sequences[whole[-1]])
            self._subjects, self._pending, self._size = _Subjects(), [], 0
        hash_ = hashes(batch)[begin:]
        marks = np.zeros(len(hash_), np.int64)
        for row in (row - begin for row in rollups if row >= begin):
            marks[row] = sequences[begin + row]
        counts = np.ones(len(hash_), np.int64)
        if fired := {row - begin: of for row, of in self._fired(batch).items() if row >= begin}:
            at = [*fired]
            hash_ = np.insert(hash_, at, np.array([*fired.values()], np.uint64))
            counts, marks = np.insert(counts, at, 0), np.insert(marks, at, sequences[begin:][at])
        self._add(hash_, counts, marks)

    def _add(self, hash_: npt.NDArray[np.uint64], counts: Whole, marks: Whole) -> None:
        self._pending.append(_Subjects().then(_Subjects(hash_, counts, marks)))
        self._size += len(self._pending[-1].hash)
        if self._size > max(1_000_000, len(self._subjects.hash)):
            self._settle()

    def end_pass(self) -> None:
        self._settle()
        if self.passes > 1:
            self._latest, self._subjects = self._subjects, _Subjects()
        self.passes -= 1
        self._seen = np.zeros(len(self._subjects.hash), np.int64)

    def _settle(self) -> None:
        self._subjects = self._subjects.then(*self._pending)
        self._pending, self._size = [], 0

    def left(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.is_none or not batch.num_rows:
            return batch
        keep = self._held(batch)
        if not self.needs_pass:
            return batch.filter(pa.array(keep))
        sequences = np.asarray(batch.column("sequence"))
        keep &= sequences >= self._rolled
        batch = batch.filter(pa.array(keep))
        if not batch.num_rows:
            return batch
        sequences, places = np.asarray(batch.column("sequence")), np.searchsorted(self._subjects.hash, hashes(batch))
        keep = sequences >= self._subjects.rollup[places]
        if self._per_subject:
            live = np.flatnonzero(keep)
            keep[live] &= self._is_recent(places[live])
        return batch.filter(pa.array(keep))

    def _is_recent(self, places: npt.NDArray[np.int64]) -> Mask:
        """Of rows of the subjects at `places`: whether they are among the last `per_subject` ones."""
        order = np.argsort(places, kind="stable")
        sorted_ = places[order]
        starts = np.flatnonzero(np.r_[True, sorted_[1:] != sorted_[:-1]]) if len(sorted_) else np.zeros(0, np.int64)
        lengths = np.diff(np.r_[starts, len(sorted_)])
        nth = np.empty(len(sorted_), np.int64)
        nth[order] = np.arange(len(sorted_)) - np.repeat(starts, lengths)
        nth += self._seen[places]
        np.add.at(self._seen, places, 1)
        recent: Mask = nth >= self._subjects.rows[places] - self._per_subject
        return recent

    def _held(self, batch: pa.RecordBatch) -> Mask:
        """Which rows the stream held when its deletions were captured, and all from behind that."""
        sequences = np.asarray(batch.column("sequence"))
        keep: Mask = (sequences >= self._first) | (sequences > self._last)
        if len(self._deleted_first):
            place = np.searchsorted(self._deleted_first, sequences, side="right") - 1
            keep &= (place < 0) | (sequences > self._deleted_last[np.maximum(place, 0)])
        if len(self._latest.hash):
            lives = {row: _ttl_ns(found[b"Nats-TTL"]) for row, found in _with(batch, b"Nats-TTL") if keep[row]}
            rows, places = np.array([*lives], np.int64), np.searchsorted(self._latest.hash, hashes(batch))
            ends = np.asarray(batch.column("timestamp_ns"))[rows] + np.array([*lives.values()], np.int64)
            keep[rows] = self._latest.rollup[places[rows]] < ends
        return keep

    def _rollups(self, batch: pa.RecordBatch) -> dict[int, bool]:
        """The rows that roll up, and whether they do so for the whole stream."""
        found = {}
        for row, headers in _with(batch, b"Nats-Rollup") if self._rolls else ():
            if (value := headers[b"Nats-Rollup"].lower()) in (b"sub", b"all"):
                found[row] = value == b"all"
        return found

    def _fired(self, batch: pa.RecordBatch) -> dict[int, int]:
        """The rows that a schedule made which was removed then, and the hash of the subject that it had."""
        found = {}
        for row, headers in _with(batch, b"Nats-Schedule-Next") if self._schedules else ():
            if headers[b"Nats-Schedule-Next"] == b"purge" and (subject := headers.get(b"Nats-Scheduler")):
                found[row] = _hash(decode_subject(subject))
        return found


def _ttl_ns(value: bytes) -> int:
    """Nanoseconds that a message with this `Nats-TTL` lives; a hundred years where it never expires."""
    text = value.decode(errors="replace")
    with suppress(ValueError):
        return int(parse_duration(f"{text}s" if text.isdecimal() else text) * NS_PER_S)
    return int(MAX_DURATION) * NS_PER_S


class SourcedRow(NamedTuple):
    """An archived message that came from a source of the stream; `origin`: its sequence there."""

    sequence: int
    timestamp_ns: int
    origin: int


def sourced_rows(batch: pa.RecordBatch) -> Iterator[tuple[str, SourcedRow]]:
    """The rows that came from a source, by what `source_key` says of it; by its name alone before nats-server 2.10."""
    for row, headers in _with(batch, b"Nats-Stream-Source"):
        fields = headers[b"Nats-Stream-Source"].decode(errors="replace").split(" ")
        if len(fields) > 1 and fields[1].isdecimal():
            sequence, at = batch.column("sequence")[row].as_py(), batch.column("timestamp_ns")[row].as_py()
            yield " ".join([fields[0], *fields[2:4]]), SourcedRow(sequence, at, int(fields[1]))


def _with(batch: pa.RecordBatch, name: bytes) -> Iterator[tuple[int, dict[bytes, bytes]]]:
    """The rows with a header of exactly this name: their number, and the first value of each of their headers."""
    blocks: Any = batch.column("headers")
    marked: Any = pc.fill_null(pc.match_substring(blocks, name.decode()), False)
    for row in np.flatnonzero(np.asarray(marked.cast(pa.uint8()))):
        headers = {key: value.strip() for key, value in reversed(parse_block(blocks[int(row)].as_py()))}
        if name in headers:
            yield int(row), headers
