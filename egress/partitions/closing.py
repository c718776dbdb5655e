"""How far the partitions of one incarnation are with closing it: a value, pure, and its JSON.

An incarnation ends for all its partitions or for none. Each partition, once everything that belongs into it
is put, notes where its coverage ends and which stream it found in place of the old one. The note can be
withdrawn until the last partition has made its own: that one closes the incarnation, in the same write, so
no partition can read on behind the end that the next incarnation goes by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from common.sequences import MAX_SEQUENCE

FORMAT_VERSION = 1


class _EndWire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    end: int
    first: int
    created: str


class _DecisionWire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    created: str
    first: dict[str, int]


class _StreamWire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    created: str
    config: dict[str, Any]


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format_version: int
    ends: dict[str, _EndWire]
    decision: _DecisionWire | None
    next: _StreamWire | None


# Made at import: a type that two threads decode for the first time at once ends the process.
_DECODER = msgspec.json.Decoder(_Wire)
_ENCODER = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class End:
    """Where a partition ends (`end` 0: nothing is covered), and its `first` in the next incarnation, which
    is of the stream created at `created`.
    """

    end: int
    first: int
    created: str


@dataclass(frozen=True, slots=True)
class Decision:
    """An operator lets the incarnation end for the stream created at `created`.

    `first`: where the partitions that cannot go on by themselves begin; the others begin behind their ends.
    """

    created: str
    first: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class NextStream:
    """The stream of the next incarnation, as STREAM.INFO had it."""

    created: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Closing:
    """How far closing is. `next`: set once all partitions have their ends; nothing changes any more then."""

    ends: Mapping[int, End] = field(default_factory=dict)
    decision: Decision | None = None
    next: NextStream | None = None

    def noted(self, partition: int, end: End, count: int, stream: NextStream) -> Closing:
        """With the end of one of `count` partitions; closed for `stream` where that was the last one."""
        if self.next is not None:
            return self
        ends = {**self.ends, partition: end}
        agree = all(number in ends and ends[number].created == stream.created for number in range(count))
        return replace(self, ends=ends, next=stream if agree else None)

    def withdrawn(self, partition: int) -> Closing:
        """Without the end of the partition: it reads on. Unchanged once the incarnation is closed."""
        if self.next is not None or partition not in self.ends:
            return self
        return replace(self, ends={number: end for number, end in self.ends.items() if number != partition})

    def decided(self, decision: Decision) -> Closing:
        """With the operator's decision. Unchanged once the incarnation is closed."""
        return self if self.next is not None else replace(self, decision=decision)

    def decision_for(self, created: str) -> Decision | None:
        """The decision, if it is about the stream created at `created`."""
        return self.decision if self.decision is not None and self.decision.created == created else None

    def missing(self, count: int, created: str) -> list[int]:
        """The partitions of `count` that have not ended for the stream created at `created`."""
        return [n for n in range(count) if n not in self.ends or self.ends[n].created != created]

    def to_json(self) -> bytes:
        ends = {str(n): _EndWire(e.end, e.first, e.created) for n, e in self.ends.items()}
        wire = _Wire(FORMAT_VERSION, ends, _decision_wire(self.decision), _stream_wire(self.next))
        return _ENCODER.encode(wire)

    @classmethod
    def from_json(cls, raw: bytes) -> Closing:
        """What `to_json` wrote. Raises ValueError."""
        try:
            wire = _DECODER.decode(raw)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if wire.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version: expected {FORMAT_VERSION}, found {wire.format_version}")
        ends = {int(number): _end(each) for number, each in wire.ends.items()}
        stream = None if wire.next is None else NextStream(wire.next.created, wire.next.config)
        return cls(ends, _decision(wire.decision), stream)


def _decision_wire(decision: Decision | None) -> _DecisionWire | None:
    if decision is None:
        return None
    return _DecisionWire(decision.created, {str(number): first for number, first in decision.first.items()})


def _decision(wire: _DecisionWire | None) -> Decision | None:
    if wire is None:
        return None
    return Decision(wire.created, {int(number): _bounded(first, 1) for number, first in wire.first.items()})


def _stream_wire(stream: NextStream | None) -> _StreamWire | None:
    return None if stream is None else _StreamWire(stream.created, dict(stream.config))


def _end(wire: _EndWire) -> End:
    return End(_bounded(wire.end, 0), _bounded(wire.first, 1), wire.created)


def _bounded(value: int, least: int) -> int:
    if not least <= value <= MAX_SEQUENCE:
        raise ValueError(f"expected {least} to {MAX_SEQUENCE}, found {value}")
    return value
