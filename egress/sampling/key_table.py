"""What is known about each key: places for keys, and parallel columns with one entry for each place.

Columns and not an object for each key: a million keys fit in 200 MB, are frozen in a few milliseconds, and
Arrow finds the silent ones at once. The fold reads and writes the columns itself; only keys come and go here.
"""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa

from egress.sampling.state import CHUNK, Notice, SamplerState

#: `seen` of a free place: later than any message.
NEVER = 2**63 - 1


def later(time_ns: int, by_ns: int) -> int:
    """`time_ns + by_ns`, as far as a column holds it: message times may be any that a server can write."""
    return min(NEVER, time_ns + by_ns)


class Table:
    """Keys and columns. A place is reused only after `forget`.

    `places`: where each key stands. `seen`, `due`: ns; `sizes`: bytes; `notices`: of type `Notice`.
    """

    def __init__(self, state: SamplerState) -> None:
        self.seen = array("q", state.seen)
        self.due = array("q", state.due)
        self.sizes = array("I", state.sizes)
        self.notices = bytearray(state.notices)
        self.places: dict[str, int] = {}
        self._chunks = list(state.values)
        self._shared = bytearray(b"\1" * len(self._chunks))
        self._free: list[int] = []
        for number, chunk in enumerate(self._chunks):
            self._find(chunk, number * CHUNK)

    def _find(self, chunk: list[str | None], first: int) -> None:
        for place, key in enumerate(chunk, first):
            if key is None:
                self._free.append(place)
            else:
                self.places[key] = place

    def __len__(self) -> int:
        """How many keys stand here."""
        return len(self.places)

    def key(self, place: int) -> str:
        """The key at a place that is not free."""
        key = self._chunks[place // CHUNK][place % CHUNK]
        assert key is not None
        return key

    def add(self, key: str, seen: int, due: int, size: int) -> None:
        """A key that does not stand here yet."""
        if not self._free:
            self._append(key, seen, due, size)
            return
        place = self._free.pop()
        self._put(place, key)
        self.places[key] = place
        self.seen[place], self.due[place], self.sizes[place] = seen, due, size

    def forget(self, place: int) -> None:
        """Free a place that is not free."""
        del self.places[self.key(place)]
        self._put(place, None)
        self.seen[place], self.due[place], self.sizes[place] = NEVER, 0, 0
        self.notices[place] = Notice.NONE
        self._free.append(place)

    def freeze(self, duration_ns: int, watermark_ns: int) -> SamplerState:
        """What stands here now. The keys are not copied: their lists are shared until one of them changes."""
        self._shared = bytearray(b"\1" * len(self._chunks))
        return SamplerState(
            duration_ns,
            watermark_ns,
            tuple(self._chunks),
            self.seen.tobytes(),
            self.due.tobytes(),
            self.sizes.tobytes(),
            bytes(self.notices),
        )

    def columns(self) -> tuple[pa.Array[Any], pa.Array[Any]]:
        """`seen` and `notices`, not copied: no key can be added while the arrays exist."""
        count = len(self.seen)
        seen = pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(self.seen)])
        notices = pa.Array.from_buffers(pa.uint8(), count, [None, pa.py_buffer(self.notices)])
        return seen, notices

    def _append(self, key: str, seen: int, due: int, size: int) -> None:
        place = len(self.seen)
        if place % CHUNK == 0:
            self._chunks.append([])
            self._shared.append(0)
        self._own(place // CHUNK).append(key)
        self.places[key] = place
        self.seen.append(seen)
        self.due.append(due)
        self.sizes.append(size)
        self.notices.append(Notice.NONE)

    def _put(self, place: int, key: str | None) -> None:
        self._own(place // CHUNK)[place % CHUNK] = key

    def _own(self, number: int) -> list[str | None]:
        """The list of keys, copied if a frozen state holds it too."""
        if self._shared[number]:
            self._chunks[number] = list(self._chunks[number])
            self._shared[number] = 0
        return self._chunks[number]
