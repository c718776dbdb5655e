"""Reads one or two fields of a JSON document without building the rest of it.

The values are found by typed decoders of msgspec: it checks the document whole, and skips what is not asked
for. Where that is not enough (a list on the way, two things under one name) the slow walk finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

Path = tuple[str, ...]

#: What a decoder raises for a document that cannot be read: nesting beyond the interpreter's limit included.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_OBJECT, _ARRAY, _STRING = b"{", b"[", b'"'
_SPACE = b" \t\r\n"
_text = msgspec.json.Decoder(str).decode
_check = msgspec.json.Decoder(msgspec.Raw).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def parse_path(text: str) -> Path:
    r"""The names in a dotted path: dots separate them, a backslash takes what follows as it is (`a\.b`)."""
    names, characters = [""], iter(text)
    for character in characters:
        if character == ".":
            names.append("")
        else:
            names[-1] += next(characters, "\\") if character == "\\" else character
    return tuple(names)


def scalar(raw: bytes) -> str | None:
    """A JSON value as a key: a string itself, a number, true and false as written; None for any other."""
    if raw.startswith(_STRING):
        return _text(raw) or None
    return None if raw[:1] in b"n{[" else raw.decode("ascii")


class Walk:
    """Finds the value at one path, whatever the document looks like."""

    def __init__(self, path: Path) -> None:
        self._steps = [_step(name) for name in path]

    def find(self, document: bytes) -> bytes | None:
        """The JSON of the value; None if there is none. Raises one of `UNREADABLE`.

        The last of several members of one name counts, and what stands behind the value is checked too.
        """
        found: bytes | None = document
        for step in self._steps:
            found = None if found is None else step(found)
        return found


def _step(name: str) -> Callable[[bytes], bytes | None]:
    """From an object to its member, from an array to its item; None where there is none."""
    member = _member(name)
    # More digits than that name no item of a payload.
    index = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else None

    def step(value: bytes) -> bytes | None:
        start = value.lstrip(_SPACE)[:1]
        if start == _OBJECT:
            return member(value)
        if start == _ARRAY and index is not None:
            return _item(_items(value), index)
        _check(value)
        return None

    return step


def _item(items: list[msgspec.Raw], index: int) -> bytes | None:
    return bytes(items[index]) if index < len(items) else None


def _member(name: str) -> Callable[[bytes], bytes | None]:
    if not _is_plain(name):
        return lambda value: _bytes(_members(value).get(name))
    decode = msgspec.json.Decoder(_struct({name: 0}, [msgspec.Raw], "", [""])).decode
    return lambda value: _bytes(decode(value).m0)


def _bytes(raw: msgspec.Raw | None) -> bytes | None:
    return None if raw is None else bytes(raw)


def _is_plain(name: str) -> bool:
    """Whether msgspec takes it as the name of a field."""
    return not any(character in '"\\' or character < " " for character in name)


@dataclass(frozen=True, slots=True)
class Tree:
    """One decoder for several paths. `decode` raises one of `UNREADABLE`, or what it gives is read by `read`:
    a function for each path, from the decoded document to the value there, None where it is absent or null.
    """

    decode: Callable[[bytes], Any]
    read: tuple[Callable[[Any], Any], ...]


Branch = dict[str, "Branch | int"]


def tree(paths: Sequence[Path], kinds: Sequence[Any]) -> Tree | None:
    """A decoder of these paths, each with the type of its value.

    None where only a walk finds them: a name that could be an index, or one path that leads through another.
    """
    if not all(_is_plain(name) and not name.isdigit() for path in paths for name in path):
        return None
    root: Branch = {}
    for place, path in enumerate(paths):
        if not _grow(root, path, place):
            return None
    attributes = [""] * len(paths)
    kind = _struct(root, kinds, "", attributes)
    return Tree(msgspec.json.Decoder(kind).decode, tuple(map(attrgetter, attributes)))


def _grow(branch: Branch, path: Path, place: int) -> bool:
    """Add a path to the branch; False where it collides with another."""
    for name in path[:-1]:
        below = branch.setdefault(name, {})
        if isinstance(below, int):
            return False
        branch = below
    return branch.setdefault(path[-1], place) == place


def _struct(branch: Branch, kinds: Sequence[Any], prefix: str, attributes: list[str]) -> Any:
    """The type of a branch. What is absent is None at its end, and an empty struct on the way there.

    `attributes` takes for each path the attributes that lead to its value from the root, `prefix` those that
    lead here.
    """
    fields: list[tuple[str, Any, Any]] = []
    for number, below in enumerate(branch.values()):
        attribute = f"m{number}"
        if isinstance(below, int):
            attributes[below] = prefix + attribute
            fields.append((attribute, kinds[below], None))
        else:
            kind = _struct(below, kinds, f"{prefix}{attribute}.", attributes)
            fields.append((attribute, kind, kind()))
    names = {f"m{number}": name for number, name in enumerate(branch)}
    return msgspec.defstruct("Document", fields, rename=names, frozen=True, gc=False)
