"""Readers of the sample key of a message, from a JSON field, a header or the subject, and of its force field.

Typed decoders of msgspec find values in JSON: they check the whole document, and skip members that are not needed.
If that is not enough (a list on the path, two members with one name), the slow walk finds the same value.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import msgspec

from common.archive.columns import Columns
from common.documents import is_too_deep
from egress.sampling.settings import MAX_JSON_DEPTH, MAX_KEY_BYTES, SamplingSettings

Path = tuple[str, ...]

#: The errors that a decoder raises for a document that it cannot read.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)

_OBJECT, _ARRAY, _STRING = b"{", b"[", b'"'
_SPACE = b" \t\r\n"
_text = msgspec.json.Decoder(str).decode
_check = msgspec.json.Decoder(msgspec.Raw).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def parse_path(text: str) -> Path:
    r"""Return the names in a dotted path: dots separate them, a backslash escapes the next character (`a\.b`)."""
    names, characters = [""], iter(text)
    for character in characters:
        if character == ".":
            names.append("")
        else:
            names[-1] += next(characters, "\\") if character == "\\" else character
    return tuple(names)


def key_of_json(raw: bytes) -> str | None:
    """Return a JSON value as a key: a string itself, a number, true and false as written; None for any other."""
    if raw.startswith(_STRING):
        return _text(raw) or None
    return None if raw[:1] in b"n{[" else raw.decode("ascii")


def _path_finder(path: Path) -> Callable[[bytes], bytes | None]:
    """Return a function that finds the JSON of the value at `path` in any document; it returns None if there is none.

    Of several members with one name the last counts. The rest of the document after the value is checked too. The
    function raises one of `UNREADABLE`.
    """
    steps = list(map(_step_finder, path))

    def find(document: bytes) -> bytes | None:
        found: bytes | None = document
        for step in steps:
            found = None if found is None else step(found)
        return found

    return find


def _step_finder(name: str) -> Callable[[bytes], bytes | None]:
    """Return a function from an object to its member, from an array to its item; it returns None if there is none."""
    member = _member_finder(name)
    # No payload has so many items that an index has more digits.
    index = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else None

    def step(value: bytes) -> bytes | None:
        if (start := value.lstrip(_SPACE)[:1]) == _OBJECT:
            return member(value)
        if start == _ARRAY and index is not None:
            items = _items(value)
            return bytes(items[index]) if index < len(items) else None
        _check(value)
        return None

    return step


def _member_finder(name: str) -> Callable[[bytes], bytes | None]:
    if not _is_plain(name):
        return lambda value: _bytes(_members(value).get(name))
    decode = msgspec.json.Decoder(_struct({name: 0}, [msgspec.Raw], "", [""])).decode
    return lambda value: _bytes(decode(value).m0)


def _bytes(raw: msgspec.Raw | None) -> bytes | None:
    return None if raw is None else bytes(raw)


def _is_plain(name: str) -> bool:
    return not any(character in '"\\' or character < " " for character in name)


Find = Callable[[Any], Any]
Branch = dict[str, "Branch | int"]


def _add_path(branch: Branch, path: Path, index: int) -> bool:
    """Add `path` to the tree under `branch`. Return False if it collides with another path."""
    for name in path[:-1]:
        below = branch.setdefault(name, {})
        if isinstance(below, int):
            return False
        branch = below
    return branch.setdefault(path[-1], index) == index


def _struct(branch: Branch, kinds: Sequence[Any], prefix: str, attributes: list[str]) -> Any:
    """Return the struct type of a branch. An absent value is None at the end of a path, an empty struct before it.

    `attributes` receives, for each path, the attributes that lead from the root to its value. `prefix`: the
    attributes that lead from the root to this branch.
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
class DocumentReader:
    """One method to read a document. Its functions may raise one of `UNREADABLE`; then the next method is tried."""

    decode: Callable[[bytes], Any]
    key: Callable[[Any], str | None]
    forced: Callable[[Any], bool]


class JsonReader:
    """The reader of JSON payloads: of the key at one path, and of `true` at another; either path may be None.

    It first tries a decoder of text. A document with another type of key is decoded once more, as raw JSON values;
    after the first key found that way, this decoder is tried first. A document that neither can read is walked. The
    result depends on the document alone, not on documents read before.
    """

    def __init__(self, key: Path | None, force: Path | None) -> None:
        self._document_readers, self._preferred = _document_readers(key, force), 0

    def keys(self, payloads: Sequence[bytes]) -> list[str | None]:
        """Return the keys; None for a document that has none, is not JSON, or is nested too deeply."""
        keys: list[str | None] = []
        append, reader = keys.append, self._document_readers[self._preferred]
        decode, key = reader.decode, reader.key
        for payload in payloads:
            try:
                append(None if is_too_deep(payload, MAX_JSON_DEPTH) else key(decode(payload)) or None)
            except UNREADABLE:
                append(self._read_with_fallbacks(payload)[0])
        return keys

    def keys_and_forces(self, payloads: Sequence[bytes]) -> tuple[list[str | None], list[bool]]:
        """Return the keys, as `keys` does, and True for each message that is forced to pass, False if unreadable."""
        found: list[tuple[str | None, bool]] = []
        reader = self._document_readers[self._preferred]
        decode, key, forced = reader.decode, reader.key, reader.forced
        for payload in payloads:
            if is_too_deep(payload, MAX_JSON_DEPTH):
                found.append((None, False))
                continue
            try:
                document = decode(payload)
                found.append((key(document) or None, forced(document)))
            except UNREADABLE:
                found.append(self._read_with_fallbacks(payload))
        return [each for each, _ in found], [force for _, force in found]

    def _read_with_fallbacks(self, payload: bytes) -> tuple[str | None, bool]:
        for number, reader in enumerate(self._document_readers):
            try:
                document = reader.decode(payload)
                key, forced = reader.key(document) or None, reader.forced(document)
            except UNREADABLE:
                continue
            if number == 1 and key is not None:
                self._preferred = 1
            return key, forced
        return None, False


def _document_readers(key: Path | None, force: Path | None) -> list[DocumentReader]:
    by_walk = _document_reader(bytes, _path_finder(key) if key else None, _path_finder(force) if force else None)
    readers = [_struct_reader(key, force, str | None), _struct_reader(key, force, msgspec.Raw), by_walk]
    return [reader for reader in readers if reader is not None]


def _struct_reader(key: Path | None, force: Path | None, kind: Any) -> DocumentReader | None:
    """Return one decoder for both paths, with a value of the type `kind` as the key.

    None if only a walk finds them: a name could be an index or contains an escaped character, or one path leads
    through another.
    """
    paths = [path for path in (key, force) if path is not None]
    if not all(_is_plain(name) and not name.isdigit() for path in paths for name in path):
        return None
    root: Branch = {}
    if not all(_add_path(root, path, index) for index, path in enumerate(paths)):
        return None
    attributes = [""] * len(paths)
    document = _struct(root, [kind, msgspec.Raw][key is None :], "", attributes)
    find = list(map(attrgetter, attributes))
    decode = msgspec.json.Decoder(document).decode
    reader = _document_reader(decode, find[0] if key else None, find[-1] if force else None)
    return reader if key is None or kind is msgspec.Raw else replace(reader, key=find[0])


def _document_reader(decode: Callable[[bytes], Any], find_key: Find | None, find_force: Find | None) -> DocumentReader:
    """Return a `DocumentReader`. `find_key`, `find_force`: return the JSON of a value, None if it is absent; each is
    None itself if the value is not needed.
    """

    def key(document: Any) -> str | None:
        found = find_key(document) if find_key else None
        return None if found is None else key_of_json(bytes(found))

    def forced(document: Any) -> bool:
        found = find_force(document) if find_force else None
        return found is not None and bytes(found) == b"true"

    return DocumentReader(decode, key, forced)


Keys = list[str | None]
Forces = list[bool] | None


class KeyReader:
    """The reader of the keys of messages, as set by `sampling`; made once per session, for one thread."""

    def __init__(self, sampling: SamplingSettings) -> None:
        key, force = (parse_path(path) if path else None for path in (sampling.field, sampling.force_field))
        self._json, self._has_force, self._reader = JsonReader(key, force), force is not None, None
        if key is None:
            self._reader = _header_reader(sampling.header) if sampling.header else _token_reader(sampling.subject_token)

    def read(self, columns: Columns) -> tuple[Keys, Forces]:
        """Return the key of each message, None if it has none; and True for each that is forced to pass, None instead
        of a list if the settings name no force field.
        """
        keys, forced = self._json.keys_and_forces(columns.payloads) if self._has_force else ([], None)
        if self._reader is not None:
            keys = self._reader(columns)
        elif forced is None:
            keys = self._json.keys(columns.payloads)
        # A character has at most four bytes: this one comparison is enough for most batches.
        if max(map(len, filter(None, keys)), default=0) > MAX_KEY_BYTES // 4:
            keys = [None if key is None or len(key.encode()) > MAX_KEY_BYTES else key for key in keys]
        return keys, forced


def _header_reader(name: str) -> Callable[[Columns], Keys]:
    line = rb"\r\n[ \t]*" + re.escape(name.encode()) + rb"[ \t]*:([^\r\n]*)"
    find = re.compile(line, re.IGNORECASE).search

    def key(block: bytes | None) -> str | None:
        found = None if block is None else find(block)
        return None if found is None else _key_text(found[1].strip())

    return lambda columns: list(map(key, columns.headers))


def _token_reader(token: int) -> Callable[[Columns], Keys]:
    if token < 0:
        return lambda columns: list(map(_key_text, columns.subjects))

    def key(subject: bytes) -> str | None:
        tokens = subject.split(b".", token)
        return _key_text(tokens[token - 1]) if len(tokens) >= token else None

    return lambda columns: list(map(key, columns.subjects))


def _key_text(raw: bytes) -> str | None:
    return raw.decode("utf-8", "backslashreplace") or None
