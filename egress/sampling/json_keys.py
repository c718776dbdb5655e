"""The keys of JSON documents, and which of them ask to pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from egress.sampling.key_reader import UNREADABLE, Path, Walk, scalar, tree


@dataclass(frozen=True, slots=True)
class Way:
    """One way to read a document. All of them may raise one of `UNREADABLE`; then the next way is tried."""

    decode: Callable[[bytes], Any]
    key: Callable[[Any], str | None]
    forced: Callable[[Any], bool]


class JsonReader:
    """Reads the key at one path, and whether `true` stands at another; either may be None.

    It begins with a decoder of text. A document that holds something else there is read once more, as JSON
    values, and after the first key that is found so this way comes first; what neither can read is walked
    through. The answer depends on the document alone, not on what was read before.
    """

    def __init__(self, key: Path | None, force: Path | None) -> None:
        self._ways = _ways(key, force)
        self._first = 0

    def keys(self, payloads: Sequence[bytes]) -> list[str | None]:
        """The key of each; None for a document without one, and for what is no document."""
        keys: list[str | None] = []
        append, first = keys.append, self._ways[self._first]
        decode, key = first.decode, first.key
        for payload in payloads:
            try:
                append(key(decode(payload)) or None)
            except UNREADABLE:
                append(self._otherwise(payload)[0])
        return keys

    def both(self, payloads: Sequence[bytes]) -> tuple[list[str | None], list[bool]]:
        """The key of each, as above, and whether it is to pass; False for what is no document."""
        keys: list[str | None] = []
        forces: list[bool] = []
        first = self._ways[self._first]
        decode, key, forced = first.decode, first.key, first.forced
        for payload in payloads:
            try:
                document = decode(payload)
                found, force = key(document) or None, forced(document)
            except UNREADABLE:
                found, force = self._otherwise(payload)
            keys.append(found)
            forces.append(force)
        return keys, forces

    def _otherwise(self, payload: bytes) -> tuple[str | None, bool]:
        for number, way in enumerate(self._ways):
            try:
                document = way.decode(payload)
                key, forced = way.key(document) or None, way.forced(document)
            except UNREADABLE:
                continue
            if number == 1 and key is not None:
                self._first = 1
            return key, forced
        return None, False


def _ways(key: Path | None, force: Path | None) -> list[Way]:
    ways = [_tree(key, force, str | None), _tree(key, force, msgspec.Raw)]
    return [way for way in ways if way is not None] + [_walk(key, force)]


def _tree(key: Path | None, force: Path | None, kind: Any) -> Way | None:
    found = tree([path for path in (key, force) if path is not None], [kind, msgspec.Raw][key is None :])
    if found is None:
        return None
    text = kind is not msgspec.Raw
    return Way(
        found.decode,
        _nothing if key is None else found.read[0] if text else _scalar(found.read[0]),
        _never if force is None else _true(found.read[-1]),
    )


def _walk(key: Path | None, force: Path | None) -> Way:
    return Way(
        _as_it_is,
        _nothing if key is None else _scalar(Walk(key).find),
        _never if force is None else _true(Walk(force).find),
    )


def _as_it_is(payload: bytes) -> bytes:
    return payload


def _nothing(_document: Any) -> None:
    return None


def _never(_document: Any) -> bool:
    return False


def _scalar(find: Callable[[Any], Any]) -> Callable[[Any], str | None]:
    def key(document: Any) -> str | None:
        found = find(document)
        return None if found is None else scalar(bytes(found))

    return key


def _true(find: Callable[[Any], Any]) -> Callable[[Any], bool]:
    def forced(document: Any) -> bool:
        found = find(document)
        return found is not None and bytes(found) == b"true"

    return forced
