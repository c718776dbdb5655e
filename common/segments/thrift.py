"""The part of Thrift's compact protocol that Parquet uses, for untrusted bytes.

`read_struct` gives `{field id: value}`; structs are dicts, lists are lists. What does not mean the same to
every reader is refused: numbers too large for their type, fields that come twice. pyarrow reads the same
bytes in C++ and ends the whole process over some of them, so they are read here first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_BITS = {_I16: 15, _I32: 31, _I64: 63}  # of an integer, without its sign
_MAX_VARINT_BYTES = 10
_LONG_LIST = 15

Struct = dict[int, Any]


class TruncatedError(ValueError):
    """The bytes end inside the structure; more bytes may complete it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`values`: in all, list elements included. `elements`: of one list. `depth`: of nesting."""

    values: int
    elements: int
    depth: int = 8


def read_struct(data: bytes, bounds: Bounds) -> tuple[Struct, int]:
    """The structure at the start of `data`, and its size in bytes. Raises TruncatedError, ValueError."""
    reader = _Reader(data, bounds)
    return reader.struct(0), reader.position


class _Reader:
    def __init__(self, data: bytes, bounds: Bounds) -> None:
        self._data = data
        self._bounds = bounds
        self._values_left = bounds.values
        self.position = 0

    def struct(self, depth: int) -> Struct:
        self._check_depth(depth)
        fields: Struct = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer(_BITS[_I16])
            if number in fields:
                raise ValueError(f"field {number} comes twice")
            kind = head & 0x0F
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        self._values_left -= 1
        if self._values_left < 0:
            raise ValueError(f"more than {self._bounds.values} values")
        if kind in _BITS:
            return self._integer(_BITS[kind])
        if kind == _BINARY:
            return self._take(self._varint())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind == _LIST:
            return self._list(depth + 1)
        if kind in (_BYTE, _TRUE, _FALSE):  # an element of a list of truths is one byte, like any other
            return self._byte()
        if kind == _DOUBLE:
            return struct.unpack("<d", self._take(8))[0]
        raise ValueError(f"type {kind}, which Parquet does not use")

    def _list(self, depth: int) -> list[Any]:
        self._check_depth(depth)
        head = self._byte()
        size = head >> 4 if head >> 4 != _LONG_LIST else self._varint()
        if size > self._bounds.elements:
            raise ValueError(f"list of {size} elements: expected at most {self._bounds.elements}")
        return [self._value(head & 0x0F, depth) for _ in range(size)]

    def _check_depth(self, depth: int) -> None:
        if depth > self._bounds.depth:
            raise ValueError(f"structures nested deeper than {self._bounds.depth}")

    def _integer(self, bits: int) -> int:
        coded = self._varint()
        value = (coded >> 1) ^ -(coded & 1)
        if not -(1 << bits) <= value < 1 << bits:
            raise ValueError(f"number {value}: expected {bits + 1} bits")
        return value

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError(f"number longer than {_MAX_VARINT_BYTES} bytes")

    def _byte(self) -> int:
        if self.position >= len(self._data):
            raise TruncatedError(f"structure goes on after {len(self._data)} bytes")
        byte = self._data[self.position]
        self.position += 1
        return byte

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise TruncatedError(f"structure goes on after {len(self._data)} bytes")
        taken = self._data[self.position : end]
        self.position = end
        return taken
