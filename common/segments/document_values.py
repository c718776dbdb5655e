"""The JSON of the small objects beside the segments, both directions; every field that is read is checked.

Fields that this version does not know are passed over: a newer one may write them. What has to be known has
another `format_version`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from common.chain import MAX_PARTITION
from common.sequences import MAX_SEQUENCE

FORMAT_VERSION = 1


class _Wire(msgspec.Struct, frozen=True):
    format_version: int


class _BeginWire(msgspec.Struct, frozen=True, omit_defaults=True):
    filters: list[str]
    first: int
    relay: bool = False


class _StreamWire(_Wire, frozen=True, omit_defaults=True):
    config: dict[str, Any]
    created: str
    previous: dict[str, int] | None
    chains: list[_BeginWire] = []
    continues: bool = False


class _ChainWire(_Wire, frozen=True, omit_defaults=True):
    filters: list[str]
    partitions: int
    first: int
    relay: bool = False


class _FloorWire(_Wire, frozen=True):
    first: int


class _TailWire(_Wire, frozen=True):
    end: int


# Made at import: a type that two threads decode for the first time at once ends the process.
_ENCODER = msgspec.json.Encoder(order="sorted")
_VERSION = msgspec.json.Decoder(_Wire)
_STREAM = msgspec.json.Decoder(_StreamWire)
_CHAIN = msgspec.json.Decoder(_ChainWire)
_FLOOR = msgspec.json.Decoder(_FloorWire)
_TAIL = msgspec.json.Decoder(_TailWire)


W = TypeVar("W", bound=_Wire)


@dataclass(frozen=True, slots=True)
class ChainDocument:
    """What a chain is. `filters`: its filter subjects, none for the whole stream. `partitions`: of its feed.

    `first`: the sequence at which the chain begins. `relay`: the stream is itself a target of Floe, so its
    `Floe-*` headers are believed. Raises ValueError where a number is outside its range.
    """

    filters: tuple[str, ...]
    partitions: int
    first: int
    relay: bool = False

    def __post_init__(self) -> None:
        _expect("partitions", self.partitions, 1, MAX_PARTITION + 1)
        _expect("first", self.first, 1, MAX_SEQUENCE)

    def to_json(self) -> bytes:
        return _encode(
            _ChainWire(FORMAT_VERSION, list(self.filters), self.partitions, self.first, self.relay)
        )

    @classmethod
    def from_json(cls, raw: bytes) -> ChainDocument:
        """What `to_json` wrote. Raises ValueError."""
        wire = _decode(raw, _CHAIN)
        return cls(tuple(wire.filters), wire.partitions, wire.first, wire.relay)


@dataclass(frozen=True, slots=True)
class StreamDocument:
    """One incarnation of a stream. `config`, `created`: as STREAM.INFO had them when it was first seen.

    `previous`: for each partition of the incarnation before, the last sequence it covered (0: none); None
    where there is no incarnation before. `chains`: what each partition's `chain.json` says, by its number, so
    that all hosts begin alike whoever comes first; empty in documents of the first version. `continues`: it
    is the same history as the incarnation before, only cut otherwise. Raises ValueError where a number is
    outside its range.
    """

    config: Mapping[str, Any]
    created: str
    previous: Mapping[int, int] | None = None
    chains: tuple[ChainDocument, ...] = ()
    continues: bool = False

    def __post_init__(self) -> None:
        for partition, end in (self.previous or {}).items():
            _expect("previous: partition", partition, 0, MAX_PARTITION)
            _expect("previous: end", end, 0, MAX_SEQUENCE)
        for chain in self.chains:
            _expect("chains: partitions", chain.partitions, len(self.chains), len(self.chains))

    def to_json(self) -> bytes:
        previous = None if self.previous is None else {str(p): end for p, end in self.previous.items()}
        chains = [_BeginWire(list(each.filters), each.first, each.relay) for each in self.chains]
        wire = _StreamWire(FORMAT_VERSION, dict(self.config), self.created, previous, chains, self.continues)
        return _encode(wire)

    @classmethod
    def from_json(cls, raw: bytes) -> StreamDocument:
        """What `to_json` wrote. Raises ValueError."""
        wire = _decode(raw, _STREAM)
        previous = None if wire.previous is None else {_number(p): end for p, end in wire.previous.items()}
        count = len(wire.chains)
        chains = [ChainDocument(tuple(each.filters), count, each.first, each.relay) for each in wire.chains]
        return cls(wire.config, wire.created, previous, tuple(chains), wire.continues)


def floor_to_json(first: int) -> bytes:
    """`floor.json`. Raises ValueError."""
    return _encode(_FloorWire(FORMAT_VERSION, _expect("first", first, 1, MAX_SEQUENCE)))


def floor_from_json(raw: bytes) -> int:
    """What `floor_to_json` wrote. Raises ValueError."""
    return _expect("first", _decode(raw, _FLOOR).first, 1, MAX_SEQUENCE)


def tail_to_json(end: int) -> bytes:
    """A tail; `end` 0: nothing is covered. Raises ValueError."""
    return _encode(_TailWire(FORMAT_VERSION, _expect("end", end, 0, MAX_SEQUENCE)))


def tail_from_json(raw: bytes) -> int:
    """What `tail_to_json` wrote. Raises ValueError."""
    return _expect("end", _decode(raw, _TAIL).end, 0, MAX_SEQUENCE)


def _encode(wire: _Wire) -> bytes:
    return _ENCODER.encode(wire)


def _decode(raw: bytes, decoder: msgspec.json.Decoder[W]) -> W:
    try:
        # First alone: another version may have other fields.
        found = _VERSION.decode(raw).format_version
        if found != FORMAT_VERSION:
            raise ValueError(f"format_version: expected {FORMAT_VERSION}, found {found}")
        return decoder.decode(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_PARTITION))):
        raise ValueError(f"previous: expected a partition, found {text!r:.40}")
    return int(text)


def _expect(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, found {value}")
    return value
