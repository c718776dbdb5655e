"""The sampler, a pure fold over the messages, and the table of its keys.

The same settings and messages lead to the same choices (I8). All times are message times in ns,
made to run forward (`monotonic_runs`). Nothing here reads a clock. The moment at which a silent key is forgotten
changes no choice: a key that was silent for `inspect_duration` counts as never seen, and it is forgotten only after
message times have advanced that far.

The table has columns instead of an object for each key: a million keys fit in 200 MB, are frozen in a few milliseconds,
and Arrow finds the silent ones at once. The fold reads and writes the columns itself; the table only adds and removes
keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from itertools import chain, repeat
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from common.archive.columns import Columns
from common.clock import NS_PER_S
from egress.advisories.advisory import Advisory, AdvisoryEvent
from egress.sampling.keys import KeyReader, SamplingSettings

#: A publisher with a period of `inspect_duration` is never exactly on time: it may be early by 1/100 of the period.
SLACK_DIVISOR = 100


def period_ns(key: str, duration_ns: int) -> int:
    """Return the nanoseconds from a copy of a message of `key` to the time when the next message of it passes.

    They are `duration_ns`, less a slack of one hundredth of it (at most one second), less a share of up to a tenth of
    it that depends on the key alone. So copies that began together drift apart, and none is late.
    """
    digest = blake2b(key.encode("utf-8", "backslashreplace"), digest_size=8).digest()
    spread = int.from_bytes(digest, "big") * duration_ns // (10 << 64)
    return duration_ns - min(NS_PER_S, duration_ns // SLACK_DIVISOR) - spread


#: Values in one list. If a frozen state shares the list, it is copied before it is changed.
CHUNK_VALUES = 4096


class Notice(IntEnum):
    """The last event that was reported about a key since it was last seen."""

    NONE = 0
    TIMEOUT = 1
    EXPIRE = 2


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The state of a sampler at one moment, empty at first. Made by `Sampler.freeze` and by `decode`.

    `watermark_ns`: the newest message time folded in. `values`: lists of `CHUNK_VALUES` keys (the last may be shorter),
    None for a free place. The other fields hold the columns, one entry for each place: `seen` and `due` 8 bytes (ns),
    `sizes` 4, `notices` 1, in the byte order of this machine.
    """

    duration_ns: int
    watermark_ns: int = 0
    values: tuple[list[str | None], ...] = ()
    seen: bytes = b""
    due: bytes = b""
    sizes: bytes = b""
    notices: bytes = b""

    def count(self) -> int:
        return sum(len(chunk) - chunk.count(None) for chunk in self.values)


#: `seen` of a free place: later than any message.
MAX_INT64 = 2**63 - 1


def add_capped(time_ns: int, by_ns: int) -> int:
    """Return `time_ns + by_ns`, capped to the range of a column: a server can write any message time."""
    return min(MAX_INT64, time_ns + by_ns)


class KeyTable:
    """The keys and their columns. A place is reused only after `forget`.

    `places`: the place of each key. `seen`, `due`: ns; `sizes`: bytes; `notices`: of type `Notice`.
    """

    def __init__(self, state: SamplerState) -> None:
        self.seen, self.due = array("q", state.seen), array("q", state.due)
        self.sizes, self.notices = array("I", state.sizes), bytearray(state.notices)
        self.places: dict[str, int] = {}
        self._chunks = list(state.values)
        self._shared = bytearray(b"\1" * len(self._chunks))
        self._free: list[int] = []
        for place, key in enumerate(chain.from_iterable(self._chunks)):
            if key is None:
                self._free.append(place)
            else:
                self.places[key] = place

    def __len__(self) -> int:
        return len(self.places)

    def key(self, place: int) -> str:
        key = self._chunks[place // CHUNK_VALUES][place % CHUNK_VALUES]
        assert key is not None
        return key

    def add(self, key: str, seen: int, due: int, size: int) -> None:
        if not self._free:
            place = len(self.seen)
            if place % CHUNK_VALUES == 0:
                self._chunks.append([])
                self._shared.append(0)
            self._writable_chunk(place).append(key)
            self.seen.append(seen)
            self.due.append(due)
            self.sizes.append(size)
            self.notices.append(Notice.NONE)
        else:
            place = self._free.pop()
            self._writable_chunk(place)[place % CHUNK_VALUES] = key
            self.seen[place], self.due[place], self.sizes[place] = seen, due, size
        self.places[key] = place

    def forget(self, place: int) -> None:
        del self.places[self.key(place)]
        self._writable_chunk(place)[place % CHUNK_VALUES] = None
        self.seen[place], self.due[place], self.sizes[place] = MAX_INT64, 0, 0
        self.notices[place] = Notice.NONE
        self._free.append(place)

    def freeze(self, duration_ns: int, watermark_ns: int) -> SamplerState:
        self._shared = bytearray(b"\1" * len(self._chunks))
        columns = self.seen.tobytes(), self.due.tobytes(), self.sizes.tobytes(), bytes(self.notices)
        return SamplerState(duration_ns, watermark_ns, tuple(self._chunks), *columns)

    def _writable_chunk(self, place: int) -> list[str | None]:
        number = place // CHUNK_VALUES
        if self._shared[number]:
            self._chunks[number] = list(self._chunks[number])
            self._shared[number] = 0
        return self._chunks[number]

    # With Arrow: its arrays share the memory of the columns, so no key can be added while they exist.

    def _columns(self) -> tuple[pa.Array[Any], pa.Array[Any]]:
        count = len(self.seen)
        seen = pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(self.seen)])
        notices = pa.Array.from_buffers(pa.uint8(), count, [None, pa.py_buffer(self.notices)])
        return seen, notices

    def due_places(self, timeout: int, expire: int, forget: int) -> list[int]:
        """Return the places of keys that are due: last seen before `timeout`, not after `expire`, or not after `forget`
        (ns).

        A timeout or an expiry is due only if it was not reported yet.
        """
        seen, notices = self._columns()
        is_silent = pc.less(seen, _int64(max(timeout, expire + 1, forget + 1)))
        silent = cast("pa.Array[Any]", pc.call_function("indices_nonzero", [is_silent]))
        if not len(silent):
            return []
        seen, notices = seen.take(silent), notices.take(silent)
        forgotten = pc.less_equal(seen, _int64(forget))
        expired = pc.and_(pc.less_equal(seen, _int64(expire)), pc.less(notices, _notice(Notice.EXPIRE)))
        timed_out = pc.and_(pc.less(seen, _int64(timeout)), pc.equal(notices, _notice(Notice.NONE)))
        due = silent.filter(pc.or_(pc.or_(forgotten, expired), timed_out))
        return cast(list[int], due.to_pylist())

    def oldest_seen(self) -> tuple[int, int, int]:
        """Return the least `seen` of keys without a notice, of those with a timeout, and of all keys.

        Each is `MAX_INT64` if there is none.
        """
        seen, notices = self._columns()
        least = _min_seen(seen)
        if not len(seen) or not pc.max(notices).as_py():
            return least, MAX_INT64, least
        found = []
        for notice in (Notice.NONE, Notice.TIMEOUT):
            # The mask becomes the validity of the column, so that nothing is copied.
            validity = pc.equal(notices, _notice(notice)).buffers()[1]
            found.append(_min_seen(pa.Array.from_buffers(pa.int64(), len(seen), [validity, seen.buffers()[1]])))
        return found[0], found[1], least


def _int64(time_ns: int) -> pa.Int64Scalar:
    return pa.scalar(time_ns, pa.int64())


def _notice(notice: Notice) -> pa.UInt8Scalar:
    return pa.scalar(int(notice), pa.uint8())


def _min_seen(seen: pa.Array[Any]) -> int:
    least = pc.min(seen).as_py()
    return MAX_INT64 if least is None else int(least)


@dataclass(frozen=True, slots=True)
class MessageRun:
    """A run of messages from the place `first` of a batch on, with their times, which never decrease.

    `is_set_back`: the clock was set back before them, to the first of these times.
    """

    first: int
    times: Sequence[int]
    is_set_back: bool


def monotonic_runs(timestamps_ns: Sequence[int], newest_ns: int, tolerance_ns: int) -> list[MessageRun]:
    """Return the batch as consecutive runs of time: nearly always one; none for an empty batch.

    `newest_ns`: the newest time before the batch. A run ends when a time is more than `tolerance_ns` below the newest.
    """
    if timestamps_ns and timestamps_ns[0] >= newest_ns and sorted(timestamps_ns) == timestamps_ns:
        return [MessageRun(0, timestamps_ns, False)]
    times: list[int] = []
    found = [MessageRun(0, times, False)]
    for place, timestamp_ns in enumerate(timestamps_ns):
        if timestamp_ns < newest_ns - tolerance_ns:
            times, newest_ns = [], timestamp_ns
            found.append(MessageRun(place, times, True))
        newest_ns = max(newest_ns, timestamp_ns)
        times.append(newest_ns)
    return [run for run in found if run.times]


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """The result for a batch.

    `kept`: 1 for each message that passes, else 0. `keys`: the key of each, None if it has none. `missing`: how many
    have none; `forced`: how many have a force field that is true. `advisories`: in the order of the messages that
    led to them.
    """

    kept: bytearray
    keys: list[str | None]
    missing: int
    forced: int
    advisories: list[Advisory]


class Sampler:
    """The choice of the messages that pass, and the detection of new, silent and returning keys.

    `state`: the state to begin with; None: an empty one. `makes_advisories`: False if advisories are not wanted.
    """

    def __init__(
        self, sampling: SamplingSettings, state: SamplerState | None = None, *, makes_advisories: bool = True
    ) -> None:
        state = state or SamplerState(sampling.duration_ns)
        self._duration, self._warn = sampling.duration_ns, sampling.warn_ns
        self._size_trigger = sampling.size_trigger or MAX_INT64
        self._makes_advisories, self._keys, self._table = makes_advisories, KeyReader(sampling), KeyTable(state)
        #: The newest message time folded in; 0 before the first.
        self.watermark_ns = state.watermark_ns
        self._reset_due_times()

    @property
    def value_count(self) -> int:
        return len(self._table) - self._table.notices.count(Notice.EXPIRE)

    def fold(self, columns: Columns) -> SampledBatch:
        keys, forced = self._keys.read(columns)
        return self.fold_keys(keys, forced, columns.timestamps_ns, list(map(len, columns.payloads)))

    def fold_keys(
        self, keys: list[str | None], forced: list[bool] | None, timestamps_ns: Sequence[int], sizes: Sequence[int]
    ) -> SampledBatch:
        """Fold in messages with keys that are read already. All lists have equal lengths."""
        kept = bytearray(len(keys))
        found: list[Advisory] = []
        for run in monotonic_runs(timestamps_ns, self.watermark_ns, self._duration):
            if run.is_set_back:
                self._handle_set_back(run.times[0], found)
            self._fold_run(run, keys, forced, sizes, kept, found)
            self.watermark_ns = run.times[-1]
        return SampledBatch(kept, keys, keys.count(None), forced.count(True) if forced else 0, found)

    def advance(self, now_ns: int) -> list[Advisory]:
        """Advance time to `now_ns` at least; return the advisories of silent keys, sorted by moment and value.

        `now_ns`: the watermark, or the server's time if the source holds nothing newer. Cheap if nothing is due; else
        it scans the whole table.
        """
        now_ns = max(now_ns, self.watermark_ns)
        is_nothing_due = not self._makes_advisories or now_ns < self._next_advisory_ns
        if is_nothing_due and self.watermark_ns < self._next_forget_ns:
            return []
        return self._report_silent(now_ns)

    def mark_all_seen(self, at_ns: int) -> None:
        """Mark every known key as seen at `at_ns` or later, and without a notice.

        Call it after `learn`: then the silence of a key counts from `at_ns`, and old keys are not all reported at once.
        """
        table = self._table
        for place, seen in enumerate(table.seen):
            if seen < at_ns:
                table.seen[place] = at_ns
        table.notices[:] = bytes(len(table.notices))
        self._reset_due_times()

    def learn(self, keys: Sequence[str | None], timestamps_ns: Sequence[int], sizes: Sequence[int]) -> None:
        """Learn messages that passed before, in their order: each key was seen and copied then. No advisories."""
        forced = [True] * len(keys)
        makes_advisories, self._makes_advisories = self._makes_advisories, False
        self.fold_keys(list(keys), forced, timestamps_ns, sizes)
        self._makes_advisories = makes_advisories
        self._reset_due_times()

    def freeze(self) -> SamplerState:
        """Return the current state as a value. It takes some milliseconds for a million keys."""
        return self._table.freeze(self._duration, self.watermark_ns)

    def _fold_run(
        self,
        run: MessageRun,
        keys: list[str | None],
        forced: list[bool] | None,
        sizes: Sequence[int],
        kept: bytearray,
        found: list[Advisory],
    ) -> None:
        first, last = run.first, run.first + len(run.times)
        is_whole_batch = last - first == len(keys)
        forces: Iterable[bool] = repeat(False) if forced is None else forced[first:last]
        table, duration, size_trigger = self._table, self._duration, self._size_trigger
        # Without advisories, silence does not matter: after a long one the key is due anyway.
        warn_ns = self._warn if self._makes_advisories else MAX_INT64
        place_of, seen_at, due_at = table.places.get, table.seen, table.due
        size_of, notice_of = table.sizes, table.notices
        messages = zip(
            range(first, last),
            # None is never a key of the table.
            cast(list[str], keys if is_whole_batch else keys[first:last]),
            run.times,
            sizes if is_whole_batch else sizes[first:last],
            forces,
            strict=False,
        )
        for number, key, now, size, is_kept in messages:
            if (place := place_of(key)) is None:
                kept[number] = 1
                if key is not None:
                    self._add_key(key, now, size, found)
                continue
            if now - seen_at[place] > warn_ns or notice_of[place]:
                is_kept = self._handle_return(key, place, now, found) or is_kept
            seen_at[place] = now
            before = size_of[place]
            if size != before:
                size_of[place] = size
                is_kept = is_kept or not before or abs(size - before) >= size_trigger
            if is_kept or now >= due_at[place]:
                kept[number] = 1
                due_at[place] = add_capped(now, period_ns(key, duration))

    def _add_key(self, key: str, now: int, size: int, found: list[Advisory]) -> None:
        self._table.add(key, now, add_capped(now, period_ns(key, self._duration)), size)
        self._note_due(now)
        if self._makes_advisories:
            found.append(Advisory(AdvisoryEvent.NEW, key, now, now))

    def _handle_return(self, key: str, place: int, now: int, found: list[Advisory]) -> bool:
        seen, notice = self._table.seen[place], self._table.notices[place]
        unknown = now - seen >= self._duration
        self._table.notices[place] = Notice.NONE
        self._note_due(now)
        if self._makes_advisories:
            if notice == Notice.NONE:
                found.append(Advisory(AdvisoryEvent.TIMEOUT, key, seen, add_capped(seen, self._warn)))
            if unknown and notice < Notice.EXPIRE:
                found.append(Advisory(AdvisoryEvent.EXPIRE, key, seen, add_capped(seen, self._duration)))
            if unknown or notice == Notice.EXPIRE:
                found.append(Advisory(AdvisoryEvent.NEW, key, now, now))
            else:
                found.append(Advisory(AdvisoryEvent.RECOVER, key, seen, now))
        return unknown

    def _report_silent(self, now_ns: int) -> list[Advisory]:
        table, found = self._table, list[Advisory]()
        # The server's time only leads to advisories. If it made keys be forgotten, choices would depend on a clock
        # other than that of the messages.
        forget = self.watermark_ns - self._duration
        timeout, expire = forget, forget
        if self._makes_advisories:
            timeout, expire = now_ns - self._warn, now_ns - self._duration
        for place in table.due_places(timeout, expire, forget):
            key, seen, notice = table.key(place), table.seen[place], table.notices[place]
            if self._makes_advisories and notice == Notice.NONE and seen < timeout:
                found.append(Advisory(AdvisoryEvent.TIMEOUT, key, seen, add_capped(seen, self._warn)))
                table.notices[place] = Notice.TIMEOUT
            if self._makes_advisories and notice < Notice.EXPIRE and seen <= expire:
                found.append(Advisory(AdvisoryEvent.EXPIRE, key, seen, add_capped(seen, self._duration)))
                table.notices[place] = Notice.EXPIRE
            if seen <= forget:
                table.forget(place)
        # Nothing is due before these times, even if messages of known keys come meanwhile.
        unreported_ns, timed_out, least = table.oldest_seen()
        self._next_advisory_ns = min(unreported_ns + self._warn + 1, timed_out + self._duration)
        self._next_forget_ns = least + self._duration
        found.sort(key=lambda advisory: (advisory.event_time_ns, advisory.value))
        return found

    def _handle_set_back(self, to_ns: int, found: list[Advisory]) -> None:
        """Handle a clock that was set back: times after `to_ns` count as `to_ns`.

        Keys that are due at the watermark are handled first, so that the time of the last call of `advance` does not
        matter.
        """
        table, duration = self._table, self._duration
        found.extend(self._report_silent(self.watermark_ns))
        for key, place in table.places.items():
            if table.seen[place] > to_ns:
                table.seen[place] = to_ns
                table.notices[place] = Notice.NONE
                table.due[place] = min(table.due[place], add_capped(to_ns, period_ns(key, duration)))
        self.watermark_ns = to_ns
        self._reset_due_times()

    def _reset_due_times(self) -> None:
        self._next_advisory_ns = self._next_forget_ns = 0

    def _note_due(self, now: int) -> None:
        self._next_advisory_ns = min(self._next_advisory_ns, now + self._warn + 1)
        self._next_forget_ns = min(self._next_forget_ns, now + self._duration)
