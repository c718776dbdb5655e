"""The table of the sampler's keys: places for keys, and parallel columns with one entry for each place.

It has columns instead of an object for each key: a million keys fit in 200 MB, are frozen in a few milliseconds, and
Arrow finds the silent ones at once. The fold reads and writes the columns itself; this module only adds and removes
keys.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from itertools import chain
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from common.clock import NS_PER_S

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
