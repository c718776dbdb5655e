"""Settings of the sampling of one feed, and the readers of a message's key, from a JSON field, a header or the subject.

Typed decoders of msgspec find values in JSON: they check the whole document, and skip members that are not needed.
If that is not enough (a list on the path, two members with one name), the slow walk finds the same value. The force
field is read in the same way.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from common.archive.columns import Columns
from common.clock import NS_PER_S
from common.documents import is_too_deep
from common.settings.egress import FeedSettings

#: The version of the fold: increased when the same settings and messages would lead to other choices.
FOLD_VERSION = 1
#: Bytes of UTF-8 of the longest key; a longer one counts as no key.
MAX_KEY_BYTES = 1024
MAX_JSON_DEPTH = 500  # of objects and arrays in a payload; half of the depth that Python 3.11 can read


@dataclass(frozen=True)
class SamplingSettings:
    """The sampling settings of one feed. Exactly one of `field`, `header`, `subject_token` is set.

    `field`, `force_field`: dotted JSON paths, empty if not set. `subject_token`: from 1, -1 the whole subject, 0 not
    set. `duration_ns`: one message of each key passes in about this time, and a key that was silent for as long is
    unknown. `warn_ns`: a key silent for longer than this is reported; it is less than `duration_ns`. `size_trigger`:
    bytes, 0 is off. `max_age_ns`, `relay`: decide which messages reach the fold.
    """

    field: str
    header: str
    subject_token: int
    force_field: str
    duration_ns: int
    warn_ns: int
    size_trigger: int
    max_age_ns: int
    relay: bool

    @classmethod
    def from_feed(cls, feed: FeedSettings) -> SamplingSettings | None:
        """Return the settings of `feed`; None if all its messages are archived."""
        if not feed.sampling_key:
            return None
        duration = _nanoseconds(feed.inspect_duration)
        return cls(
            field=feed.inspect_field,
            header=feed.inspect_header,
            subject_token=feed.inspect_subject_token,
            force_field=feed.inspect_force_field,
            duration_ns=duration,
            warn_ns=_nanoseconds(feed.warn_duration) or duration // 2,
            size_trigger=feed.size_trigger,
            max_age_ns=_nanoseconds(feed.max_age),
            relay=feed.relay,
        )

    def to_json(self) -> dict[str, str | int | bool]:
        """Return all settings that change choices, and no others, for the footer of a segment."""
        return {
            "fold": FOLD_VERSION,
            "inspect_field": self.field,
            "inspect_header": self.header,
            "inspect_subject_token": self.subject_token,
            "inspect_force_field": self.force_field,
            "inspect_duration_ns": self.duration_ns,
            "size_trigger": self.size_trigger,
            "max_age_ns": self.max_age_ns,
            "relay": self.relay,
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 (64 hex digits) of `to_json`: equal digests mean equal choices for the same messages."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NS_PER_S)


T = TypeVar("T")
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
    decode = msgspec.json.Decoder(_struct((name,), msgspec.Raw)).decode
    return lambda value: _bytes(decode(value).member)


def _bytes(raw: msgspec.Raw | None) -> bytes | None:
    return None if raw is None else bytes(raw)


def _is_plain(name: str) -> bool:
    return not any(character in '"\\' or character < " " for character in name)


def _struct(path: Path, kind: Any) -> Any:
    """Return the struct type of a document with a value of the type `kind` at `path`; each step is named `member`.

    An absent value is None at the end of the path, an empty struct before it.
    """
    default: Any = None
    for name in reversed(path):
        fields = [("member", kind, default)]
        kind = msgspec.defstruct("Document", fields, rename={"member": name}, frozen=True, gc=False)
        default = kind()
    return kind


class JsonReader(Generic[T]):
    """Reader of the value at one path in JSON payloads. `kind`: the type that nearly all values have, str or bool.
    `of_json`: returns a value for its JSON, None if it does not count.

    It first tries a decoder of that type. A document with another type of value is decoded once more, as a raw JSON
    value; after the first value found that way, this decoder is tried first. A document that neither can read is
    walked. The result depends on the document alone, not on documents read before.
    """

    def __init__(self, path: Path, kind: Any, of_json: Callable[[bytes], T | None]) -> None:
        def convert(found: Any) -> T | None:
            return None if found is None else of_json(bytes(found))

        # Each is a decoder, and the value of what it returns; both may raise one of `UNREADABLE`.
        self._methods: list[tuple[Callable[[bytes], Any], Callable[[Any], T | None]]] = [(_path_finder(path), convert)]
        # Only a walk finds a name that could be an index or contains an escaped character.
        if all(_is_plain(name) and not name.isdigit() for name in path):
            find = attrgetter(".".join(["member"] * len(path)))
            typed, raw = (msgspec.json.Decoder(_struct(path, each)).decode for each in (kind | None, msgspec.Raw))
            self._methods[:0] = [(typed, find), (raw, lambda document: convert(find(document)))]
        self._preferred = 0

    def values(self, payloads: Sequence[bytes]) -> list[T | None]:
        """Return the values; None for a document that has none, is not JSON, or is nested too deeply, and for an empty
        value.
        """
        values: list[T | None] = []
        append, (decode, value) = values.append, self._methods[self._preferred]
        for payload in payloads:
            try:
                append(None if is_too_deep(payload, MAX_JSON_DEPTH) else value(decode(payload)) or None)
            except UNREADABLE:
                append(self._read_with_fallbacks(payload))
        return values

    def _read_with_fallbacks(self, payload: bytes) -> T | None:
        for number, (decode, value) in enumerate(self._methods):
            try:
                found = value(decode(payload)) or None
            except UNREADABLE:
                continue
            if number == 1 and found is not None:
                self._preferred = 1
            return found
        return None


Keys = list[str | None]
Forces = list[bool] | None


class KeyReader:
    """The reader of the keys of messages, as set by `sampling`; made once per session, for one thread."""

    def __init__(self, sampling: SamplingSettings) -> None:
        if sampling.field:
            self._read_keys = _json_reader(parse_path(sampling.field))
        elif sampling.header:
            self._read_keys = _header_reader(sampling.header)
        else:
            self._read_keys = _token_reader(sampling.subject_token)
        force = sampling.force_field
        self._forces = JsonReader(parse_path(force), bool, lambda raw: raw == b"true") if force else None

    def read(self, columns: Columns) -> tuple[Keys, Forces]:
        """Return the key of each message, None if it has none; and True for each that is forced to pass, None instead
        of a list if the settings name no force field.
        """
        keys = self._read_keys(columns)
        # A character has at most four bytes: this one comparison is enough for most batches.
        if max(map(len, filter(None, keys)), default=0) > MAX_KEY_BYTES // 4:
            keys = [None if key is None or len(key.encode()) > MAX_KEY_BYTES else key for key in keys]
        return keys, None if self._forces is None else list(map(bool, self._forces.values(columns.payloads)))


def _json_reader(path: Path) -> Callable[[Columns], Keys]:
    reader = JsonReader(path, str, key_of_json)
    return lambda columns: reader.values(columns.payloads)


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
