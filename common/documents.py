"""The JSON of small documents: of one version, typed, bounded in depth, and checked before anything acts on it."""

from itertools import accumulate
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

#: Levels of objects and arrays in a document. The interpreter's own limit differs between versions of Python.
MAX_DEPTH = 100

_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_DROPPED_BYTES = bytes(set(range(256)) - set(b'[]{}"'))
_BRACKET_MIDPOINT = (ord("[") + ord("]")) // 2
_MAX_REMOVED_LEVELS = 16


def is_too_deep(raw: bytes, max_depth: int = MAX_DEPTH) -> bool:
    """True if JSON has more than `max_depth` levels of objects and arrays. Other text may pass with a few more."""
    if raw.count(b"[") + raw.count(b"{") <= max_depth:
        return False
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Drop texts: first those without a bracket, as most are. Then remove the innermost levels, all of a level at once.
    brackets, taken = b"".join(raw.translate(_TO_SQUARE, _DROPPED_BYTES).replace(b'""', b"").split(b'"')[::2]), 0
    while taken < _MAX_REMOVED_LEVELS and len(outer := brackets.replace(b"[]", b"")) < len(brackets):
        brackets, taken = outer, taken + 1
    return taken + max(accumulate(_BRACKET_MIDPOINT - each for each in brackets), default=0) > max_depth


def check_depth(raw: bytes) -> None:
    """Raise ValueError if JSON has more than MAX_DEPTH levels; text that is not JSON may pass."""
    if is_too_deep(raw):
        raise ValueError("nested too deeply")


_VERSIONED = msgspec.defstruct("Version", [("format_version", int)])
_VERSIONS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_VERSIONED)


class JsonCodec(Generic[T]):
    """Encoder and decoder for values of `kind`, a msgspec struct tagged with `format_version` 1.

    Create it at import: if two threads decode a type for the first time at once, the process ends.
    """

    def __init__(self, kind: type[T]) -> None:
        self._decoder, self._encoder = msgspec.json.Decoder(kind), msgspec.json.Encoder(order="sorted")

    def encode(self, value: T) -> bytes:
        """Encode with sorted keys: equal values give equal bytes."""
        return self._encoder.encode(msgspec.to_builtins(value, str_keys=True))

    def decode(self, raw: bytes) -> T:
        """Decode `raw`. Raises ValueError for another form or version, or for more than MAX_DEPTH levels."""
        check_depth(raw)
        try:
            # Decode the version first, alone: another version may have other fields.
            if (found := _VERSIONS.decode(raw).format_version) != 1:
                raise ValueError(f"format_version: expected 1, found {found}")
            return self._decoder.decode(raw)
        except RecursionError:
            raise ValueError("nested too deeply") from None
