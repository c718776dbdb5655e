"""Reads one or two fields of a JSON document without building the rest of it.

The values are found by typed decoders of msgspec: it checks the document whole, and skips what is not asked
for. Where that is not enough (a list on the way, two things under one name) the slow walk finds the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from common.segments.columns import Columns
from egress.sampling.settings import MAX_KEY_BYTES, Sampling

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


class JsonWalk:
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
        _nothing if key is None else _scalar(JsonWalk(key).find),
        _never if force is None else _true(JsonWalk(force).find),
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


Keys = list[str | None]
Forces = list[bool] | None
#: From a batch to the key of each message, and whether each is forced (None: no force field).
Read = Callable[[Columns], tuple[Keys, Forces]]


class KeyReader:
    """Reads the keys of messages as `sampling` says; made once per session, for one thread."""

    def __init__(self, sampling: Sampling) -> None:
        self._read = _by_field(sampling) if sampling.field else _by_other(sampling)

    def read(self, columns: Columns) -> tuple[Keys, Forces]:
        """The key of each message, None where it has none; and whether each is forced to pass, None where the
        settings name no force field.
        """
        keys, forced = self._read(columns)
        return _without_long(keys), forced


def _without_long(keys: Keys) -> Keys:
    # A character is four bytes at most: mostly this one comparison is all.
    if max(map(len, filter(None, keys)), default=0) <= MAX_KEY_BYTES // 4:
        return keys
    return [None if key is None or len(key.encode()) > MAX_KEY_BYTES else key for key in keys]


def _by_field(sampling: Sampling) -> Read:
    field = parse_path(sampling.field)
    if not sampling.force_field:
        reader = JsonReader(field, None)
        return lambda columns: (reader.keys(columns.payloads), None)
    both = JsonReader(field, parse_path(sampling.force_field))
    return lambda columns: both.both(columns.payloads)


def _by_other(sampling: Sampling) -> Read:
    keys = _by_header(sampling.header) if sampling.header else _by_token(sampling.subject_token)
    if not sampling.force_field:
        return lambda columns: (keys(columns), None)
    force = JsonReader(None, parse_path(sampling.force_field))
    return lambda columns: (keys(columns), force.both(columns.payloads)[1])


def _by_header(name: str) -> Callable[[Columns], Keys]:
    """By the first header of this name, in any case, without the spaces around its value."""
    line = rb"\r\n[ \t]*" + re.escape(name.encode()) + rb"[ \t]*:([^\r\n]*)"
    find = re.compile(line, re.IGNORECASE).search

    def key(block: bytes | None) -> str | None:
        found = None if block is None else find(block)
        return None if found is None else _key_text(found[1].strip())

    return lambda columns: list(map(key, columns.headers))


def _by_token(token: int) -> Callable[[Columns], Keys]:
    """By one token of the subject, counted from 1, or by all of it (-1)."""
    if token < 0:
        return lambda columns: list(map(_key_text, columns.subjects))

    def key(subject: bytes) -> str | None:
        tokens = subject.split(b".", token)
        return _key_text(tokens[token - 1]) if len(tokens) >= token else None

    return lambda columns: list(map(key, columns.subjects))


def _key_text(raw: bytes) -> str | None:
    return raw.decode("utf-8", "backslashreplace") or None
