"""Remove the archived rows that the stream no longer held at its end: the archive holds more than the stream did.

`RetentionFilter` removes, row by row, the rows that a later row rolled up, the deleted rows, the rows that
`max_msgs_per_subject` dropped, and each schedule that the server removed when it fired for the last time, as a later
row shows. A limit that was raised later counts for as long as it was in force, as far as captured configurations show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from common.archive.captures import CapturedConfig, CapturedDeletions
from common.archive.segment import decode_subject
from common.clock import NS_PER_S
from common.nats.headers import parse_block
from common.sequences import MAX_SEQUENCE, SequenceRange
from common.settings.types import MAX_DURATION_S, parse_duration

Mask = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


PER_SUBJECT_KEY = "max_msgs_per_subject"
SWITCH_KEYS = ("allow_rollup_hdrs", "allow_msg_schedules", "allow_msg_ttl")


def limit_of(config: Mapping[str, Any], key: str) -> int:
    """Return the limit `key` of a configuration; 0: no limit."""
    return max(0, int(config.get(key) or 0))


def is_raised(old: CapturedConfig, new: CapturedConfig, key: str) -> bool:
    """True if a limit was raised or lifted: the stream had dropped messages that the new configuration keeps."""
    before, since = limit_of(old.config, key), limit_of(new.config, key)
    return before > 0 and not 0 < since <= before


def config_changes(
    configs: Sequence[CapturedConfig], deletions: CapturedDeletions | None
) -> Iterator[tuple[CapturedConfig, CapturedConfig, int]]:
    """Yield each configuration with the next one, and a sequence up to which the first was in force. `configs`: the
    oldest first. A pair is left out if `deletions` are not older than its second: they show which rows were held then.
    """
    for old, new in pairwise(configs):
        if deletions is None or deletions.moment_ns < new.moment_ns:
            known = deletions.last if deletions and deletions.moment_ns >= old.moment_ns else 0
            yield old, new, max(known, old.last or old.end, new.before or 0)


def hashes(batch: pa.RecordBatch) -> npt.NDArray[np.uint64]:
    """Return 64 bits for each row, equal for equal subjects within this process."""
    text = batch.column("subject")
    encoded: Any = text if isinstance(text, pa.DictionaryArray) else text.dictionary_encode()
    each = np.array([*map(_subject_hash, encoded.dictionary.to_pylist())], np.uint64)
    found: npt.NDArray[np.uint64] = each[np.asarray(encoded.indices)]
    return found


def _subject_hash(subject: str) -> int:
    return hash(subject) & 0xFFFFFFFFFFFFFFFF


@dataclass
class _Subjects:
    """Counts for each subject, ascending by its hash. `rows`: its rows since its last rollup; `rollup`: the sequence of
    that rollup (0: none); `dropped`: how many of the rows, counted from the first, a limit has dropped.
    """

    hash: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    rows: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    rollup: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    dropped: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def merge(self, *later: _Subjects) -> _Subjects:
        """Return the sum of all counts; a rollup in a later one discards the rows that were counted before it."""
        every = (self, *later)
        hash_ = np.concatenate([each.hash for each in every])
        if not len(hash_):
            return self
        order = np.argsort(hash_, kind="stable")
        hash_ = hash_[order]
        rows, rollup, dropped = (
            np.concatenate([getattr(e, n) for e in every])[order] for n in ("rows", "rollup", "dropped")
        )
        starts = np.flatnonzero(np.r_[True, hash_[1:] != hash_[:-1]])
        sums = np.cumsum(rows)
        before = np.where(rollup > 0, sums - rows, 0)
        before[starts] = np.maximum(before[starts], sums[starts] - rows[starts])
        ends = np.r_[starts[1:], len(hash_)] - 1
        left, newest = sums[ends] - np.maximum.reduceat(before, starts), np.maximum.reduceat(rollup, starts)
        # Only `self` has dropped rows, and its entry is the first of each subject.
        return _Subjects(hash_[starts], left, newest, np.where(newest > rollup[starts], 0, dropped[starts]))


class RetentionFilter:
    """A filter that removes the rows that the stream no longer held at its end.

    `config`: of the stream at its end. `deletions`, `configs`: as captured by egress, `configs` the oldest first. The
    stream state of a `configs` entry after `end` is ignored: a message may have gone because of one after `end`. If any
    configuration has `allow_msg_ttl`, a message that had expired before a later one of its subject pushed none out.
    While `passes_left` is not 0, call `observe` with every batch, then `end_pass`. Then call `filter` with every batch
    again. No row is left below `floor`, the first sequence that the stream held when its configuration was captured
    last. Memory: 32 bytes for each subject, twice that with `allow_msg_ttl`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        deletions: CapturedDeletions | None = None,
        configs: Sequence[CapturedConfig] = (),
        end: int = MAX_SEQUENCE,
    ) -> None:
        every = [config, *(each.config for each in configs)]
        self._has_rollups, self._has_schedules, expires = (any(each.get(key) for each in every) for key in SWITCH_KEYS)
        self._per_subject = limit_of(config, PER_SUBJECT_KEY)
        known = [each for each in configs if each.last is not None and each.last <= end]
        self.floor = min(known[-1].first or 0, (known[-1].last or 0) + 1) if known else 0
        raised = (each for each in config_changes(configs, deletions) if is_raised(*each[:2], PER_SUBJECT_KEY))
        self._limits = sorted((before, limit_of(old.config, PER_SUBJECT_KEY)) for old, _, before in raised)
        most = max(self._per_subject, *(limit for _, limit in self._limits), 0)
        self._has_limit = most > 0
        self._first, self._last = (deletions.first, deletions.last) if deletions else (0, 0)
        ranges = np.array(deletions.deleted if deletions else [], np.int64).reshape(-1, 2)
        self._deleted_first, self._deleted_last = ranges[:, 0], ranges[:, 1]
        self._subjects, self._pending, self._size = _Subjects(), list[_Subjects](), 0
        self._last_rollup = 0  # sequence of the last rollup of the whole stream
        self._rows_seen: Int64Array = np.zeros(0, np.int64)
        # Its `rollup` is the time (ns) of the last message of each subject; known after the first of two passes.
        self._latest = _Subjects()
        self.passes_left = (2 if expires and most > 1 else 1) if self.needs_pass else 0

    @property
    def needs_pass(self) -> bool:
        return self._has_rollups or self._has_schedules or self._has_limit

    def count_deleted(self, rows: SequenceRange) -> int:
        """Return the number of these sequences that were captured as deleted, or are below `floor`."""
        below = max(min(self._first - 1, self._last, rows.last), min(self.floor - 1, rows.last)) - rows.first + 1
        some = slice(
            np.searchsorted(self._deleted_last, rows.first), np.searchsorted(self._deleted_first, rows.last, "right")
        )
        first = np.maximum(self._deleted_first[some], max(rows.first, self._first, self.floor))
        behind = np.minimum(self._deleted_last[some], rows.last) - first + 1
        return max(0, below) + int(np.maximum(behind, 0).sum())

    @property
    def rows_left(self) -> int:
        """The number of rows that are left; known after the last pass."""
        return int((self._subjects.rows - self._subjects.dropped).sum())

    def observe(self, batch: pa.RecordBatch) -> None:
        batch = batch.filter(pa.array(self._held_mask(batch)))
        while self.passes_left == 1 and self._limits and batch.num_rows:
            count = int(np.searchsorted(np.asarray(batch.column("sequence")), self._limits[0][0], side="right"))
            self._observe(batch.slice(0, count))
            if not (batch := batch.slice(count)).num_rows:
                return
            self._apply_limit(self._limits.pop(0)[1])
        self._observe(batch)

    def _observe(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self.passes_left > 1:
            self._add(hashes(batch), np.zeros(batch.num_rows, np.int64), np.asarray(batch.column("timestamp_ns")))
            return
        sequences, rollups = np.asarray(batch.column("sequence")), self._rollups(batch)
        whole = [row for row, is_all in rollups.items() if is_all]
        begin = 0
        if whole:  # this rollup removes all earlier rows
            begin, self._last_rollup = whole[-1], int(sequences[whole[-1]])
            self._subjects, self._pending, self._size = _Subjects(), [], 0
        hash_ = hashes(batch)[begin:]
        marks = np.zeros(len(hash_), np.int64)
        for row in (row - begin for row in rollups if row >= begin):
            marks[row] = sequences[begin + row]
        counts = np.ones(len(hash_), np.int64)
        if fired := {row - begin: of for row, of in self._finished_schedules(batch).items() if row >= begin}:
            at = [*fired]
            hash_ = np.insert(hash_, at, np.array([*fired.values()], np.uint64))
            counts, marks = np.insert(counts, at, 0), np.insert(marks, at, sequences[begin:][at])
        self._add(hash_, counts, marks)

    def _add(self, hash_: npt.NDArray[np.uint64], counts: Int64Array, marks: Int64Array) -> None:
        self._pending.append(_Subjects().merge(_Subjects(hash_, counts, marks, np.zeros(len(hash_), np.int64))))
        self._size += len(self._pending[-1].hash)
        if self._size > max(1_000_000, len(self._subjects.hash)):
            self._merge_pending()

    def end_pass(self) -> None:
        if self.passes_left > 1:
            self._merge_pending()
            self._latest, self._subjects = self._subjects, _Subjects()
        else:
            for limit in (*(limit for _, limit in self._limits), self._per_subject):
                self._apply_limit(limit)
        self.passes_left -= 1
        self._rows_seen = np.zeros(len(self._subjects.hash), np.int64)

    def _apply_limit(self, limit: int) -> None:
        """Keep at most the last `limit` rows of each subject; 0: all."""
        self._merge_pending()
        if limit:
            # Rows that were dropped before are also the first ones of their subject.
            self._subjects.dropped = np.maximum(self._subjects.dropped, self._subjects.rows - limit)

    def _merge_pending(self) -> None:
        self._subjects = self._subjects.merge(*self._pending)
        self._pending, self._size = [], 0

    def filter(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not batch.num_rows or not (self.needs_pass or self._last or self.floor):
            return batch
        keep = self._held_mask(batch) & (np.asarray(batch.column("sequence")) >= self._last_rollup)
        batch = batch.filter(pa.array(keep))
        if not batch.num_rows or not self.needs_pass:
            return batch
        sequences, places = np.asarray(batch.column("sequence")), np.searchsorted(self._subjects.hash, hashes(batch))
        keep = sequences >= self._subjects.rollup[places]
        if self._has_limit:
            live = np.flatnonzero(keep)
            keep[live] &= self._is_recent(places[live])
        return batch.filter(pa.array(keep))

    def _is_recent(self, places: npt.NDArray[np.int64]) -> Mask:
        """Return a mask of the rows that no limit has dropped. `places`: for each row, the index of its subject."""
        order = np.argsort(places, kind="stable")
        sorted_ = places[order]
        starts = np.flatnonzero(np.r_[True, sorted_[1:] != sorted_[:-1]]) if len(sorted_) else np.zeros(0, np.int64)
        lengths = np.diff(np.r_[starts, len(sorted_)])
        nth = np.empty(len(sorted_), np.int64)
        nth[order] = np.arange(len(sorted_)) - np.repeat(starts, lengths)
        nth += self._rows_seen[places]
        np.add.at(self._rows_seen, places, 1)
        recent: Mask = nth >= self._subjects.dropped[places]
        return recent

    def _held_mask(self, batch: pa.RecordBatch) -> Mask:
        """Return a mask of the rows that were neither captured as deleted, nor are below `floor`, nor had expired."""
        sequences = np.asarray(batch.column("sequence"))
        keep: Mask = ((sequences >= self._first) | (sequences > self._last)) & (sequences >= self.floor)
        if len(self._deleted_first):
            place = np.searchsorted(self._deleted_first, sequences, side="right") - 1
            keep &= (place < 0) | (sequences > self._deleted_last[np.maximum(place, 0)])
        if len(self._latest.hash):
            lives = {row: _ttl_ns(found[b"Nats-TTL"]) for row, found in _with_header(batch, b"Nats-TTL") if keep[row]}
            rows, places = np.array([*lives], np.int64), np.searchsorted(self._latest.hash, hashes(batch))
            ends = np.asarray(batch.column("timestamp_ns"))[rows] + np.array([*lives.values()], np.int64)
            keep[rows] = self._latest.rollup[places[rows]] < ends
        return keep

    def _rollups(self, batch: pa.RecordBatch) -> dict[int, bool]:
        """Return the rows that roll up, with True for a rollup of the whole stream."""
        found = {}
        for row, headers in _with_header(batch, b"Nats-Rollup") if self._has_rollups else ():
            if (value := headers[b"Nats-Rollup"].lower()) in (b"sub", b"all"):
                found[row] = value == b"all"
        return found

    def _finished_schedules(self, batch: pa.RecordBatch) -> dict[int, int]:
        """Return the rows made by a schedule that was then removed, with the hash of the subject of the schedule."""
        found = {}
        for row, headers in _with_header(batch, b"Nats-Schedule-Next") if self._has_schedules else ():
            if headers[b"Nats-Schedule-Next"] == b"purge" and (subject := headers.get(b"Nats-Scheduler")):
                found[row] = _subject_hash(decode_subject(subject))
        return found


def _ttl_ns(value: bytes) -> int:
    """Return the lifetime (ns) of a message with this `Nats-TTL`; a hundred years if it never expires."""
    text = value.decode(errors="replace")
    with suppress(ValueError):
        return int(parse_duration(f"{text}s" if text.isdecimal() else text) * NS_PER_S)
    return int(MAX_DURATION_S) * NS_PER_S


class SourcedRow(NamedTuple):
    """An archived message that came from a source of the stream; `source_sequence`: its sequence in the source.

    `identity`: the `server_hash` of the creation time of the source; empty before nats-server 2.15.
    """

    sequence: int
    timestamp_ns: int
    source_sequence: int
    identity: str = ""


def sourced_rows(batch: pa.RecordBatch) -> Iterator[tuple[str, SourcedRow]]:
    """Yield the rows that came from a source with its `source_key`; before nats-server 2.10 with its name only."""
    for row, headers in _with_header(batch, b"Nats-Stream-Source"):
        fields = headers[b"Nats-Stream-Source"].decode(errors="replace").split(" ")
        if len(fields) > 1 and fields[1].isdecimal():
            sequence, at = batch.column("sequence")[row].as_py(), batch.column("timestamp_ns")[row].as_py()
            yield " ".join([fields[0], *fields[2:4]]), SourcedRow(sequence, at, int(fields[1]), "".join(fields[5:6]))


def _with_header(batch: pa.RecordBatch, name: bytes) -> Iterator[tuple[int, dict[bytes, bytes]]]:
    """Yield the rows with a header of exactly this name: the row number, and the first value of each of its headers."""
    blocks: Any = batch.column("headers")
    marked: Any = pc.fill_null(pc.match_substring(blocks, name.decode()), False)
    for row in np.flatnonzero(np.asarray(marked.cast(pa.uint8()))):
        headers = {key: value.strip() for key, value in reversed(parse_block(blocks[int(row)].as_py()))}
        if name in headers:
            yield int(row), headers
