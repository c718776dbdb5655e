"""What a sampler knows, as one value that no longer changes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

from egress.sampling.spread import period_ns

#: Values that stand in one list; such a list is copied before it is changed, where a frozen state holds it.
CHUNK = 4096


class Notice(IntEnum):
    """What was told about a key since it was last seen."""

    NONE = 0
    TIMEOUT = 1
    EXPIRE = 2


@dataclass(frozen=True, slots=True)
class Known:
    """One key, as `floe state` shows it. Times are nanoseconds since 1970.

    `seen_ns`, `size`: time and payload bytes of its last message. `copied_ns`: the message of that time was
    the last that passed. From `due_ns` on the next one passes.
    """

    value: str
    seen_ns: int
    copied_ns: int
    due_ns: int
    size: int
    notice: Notice


@dataclass(frozen=True, slots=True)
class SamplerState:
    """What a sampler knew at one moment. Made by `Sampler.freeze` and by `decode`, read by `Sampler`.

    `watermark_ns`: the newest message time folded in. `values`: lists of `CHUNK` keys (the last may be
    shorter), None where a place is free. The other fields hold the columns, one entry for each place: `seen`
    and `due` 8 bytes (ns), `sizes` 4, `notices` 1, in the byte order of this machine.
    """

    duration_ns: int
    watermark_ns: int
    values: tuple[list[str | None], ...]
    seen: bytes
    due: bytes
    sizes: bytes
    notices: bytes

    @classmethod
    def empty(cls, duration_ns: int) -> SamplerState:
        """The state before the first message."""
        return cls(duration_ns, 0, (), b"", b"", b"", b"")

    def count(self) -> int:
        """How many keys are known."""
        return sum(len(chunk) - chunk.count(None) for chunk in self.values)

    def known(self) -> Iterator[Known]:
        """Every key with what is known about it, in no order that means anything."""
        columns = zip(
            chain.from_iterable(self.values),
            array("q", self.seen),
            array("q", self.due),
            array("I", self.sizes),
            self.notices,
            strict=True,
        )
        for value, seen, due, size, notice in columns:
            if value is not None:
                copied = due - period_ns(value, self.duration_ns)
                yield Known(value, seen, copied, due, size, Notice(notice))
