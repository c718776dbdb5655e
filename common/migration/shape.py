"""The keys of stream-replicator's configuration file, and a file as those keys with their places.

Only what the file says is read: no default is put in, nothing it names is opened.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from common.settings.yaml import Items, Keys, Mark, Node, Problems, Scalar


class Kind(StrEnum):
    """What a key holds; the value is how a message calls it."""

    TEXT = "text"
    WHOLE = "a whole number from 0"
    ANY_WHOLE = "a whole number"
    NUMBER = "a number from 0"
    FLAG = "true or false"
    HEADERS = "a mapping of text"


@dataclass(frozen=True, slots=True)
class Many:
    """A list of sections."""

    of: Shape


Shape = Mapping[str, "Kind | Many | Shape"]

TLS: Shape = dict.fromkeys(("ca", "cert", "key"), Kind.TEXT)
CHORIA: Shape = dict.fromkeys(("seed_file", "jwt_file", "collective"), Kind.TEXT)
ADVISORY: Shape = {"subject": Kind.TEXT, "reliable": Kind.FLAG}
HEARTBEAT_SUBJECT: Shape = {"subject": Kind.TEXT, "interval": Kind.TEXT, "headers": Kind.HEADERS}
HEARTBEATS: Shape = {
    "leader_election": Kind.FLAG,
    "interval": Kind.TEXT,
    "headers": Kind.HEADERS,
    "subjects": Many(HEARTBEAT_SUBJECT),
    "tls": TLS,
    "choria": CHORIA,
    "url": Kind.TEXT,
}
STREAM: Shape = {
    **dict.fromkeys(("name", "stream", "filter_subject", "target_stream"), Kind.TEXT),
    **dict.fromkeys(("target_subject_prefix", "target_subject_remove"), Kind.TEXT),
    **dict.fromkeys(("source_url", "target_url"), Kind.TEXT),
    **dict.fromkeys(("no_target_create", "ephemeral", "target_initiated"), Kind.FLAG),
    "start_sequence": Kind.WHOLE,
    **dict.fromkeys(("start_time", "start_delta"), Kind.TEXT),
    "start_at_end": Kind.FLAG,
    **dict.fromkeys(("tls", "source_tls", "target_tls"), TLS),
    **dict.fromkeys(("choria", "source_choria", "target_choria"), CHORIA),
    **dict.fromkeys(("max_age", "inspect_field", "inspect_force_field", "inspect_header"), Kind.TEXT),
    "inspect_subject_token": Kind.ANY_WHOLE,
    **dict.fromkeys(("inspect_duration", "warn_duration"), Kind.TEXT),
    "size_trigger": Kind.NUMBER,
    "leader_election_name": Kind.TEXT,
    "advisory": ADVISORY,
}
FILE: Shape = {
    "name": Kind.TEXT,
    "streams": Many(STREAM),
    "state_store": Kind.TEXT,
    "tls": TLS,
    "choria": CHORIA,
    "monitor_port": Kind.WHOLE,
    "profiling": Kind.FLAG,
    "logfile": Kind.TEXT,
    "loglevel": Kind.TEXT,
    "heartbeats": HEARTBEATS,
}


def every_key(shape: Shape = FILE, prefix: str = "") -> Iterator[str]:
    """Every key by its path, such as `streams.advisory.subject`; sections too."""
    for key, kind in shape.items():
        yield prefix + key
        below = kind.of if isinstance(kind, Many) else kind
        if not isinstance(below, Kind):
            yield from every_key(below, f"{prefix}{key}.")


@dataclass(frozen=True, slots=True)
class Given:
    """A section of the file. A key that is null counts as not given, as it does for stream-replicator."""

    mark: Mark
    path: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    marks: Mapping[str, Mark] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        """Whether the file gives the key, be it an empty value."""
        return key in self.values

    def get(self, key: str, default: Any = None) -> Any:
        """Its value: text, int, float, bool, a mapping of headers, a section, or a tuple of sections."""
        return self.values.get(key, default)

    def text(self, key: str) -> str:
        """Its text; empty where it is not given."""
        return str(self.values.get(key, ""))

    def place(self, key: str) -> str:
        """The key's path in the file, such as `streams.0.stream`."""
        return f"{self.path}.{key}" if self.path else key

    def at(self, key: str) -> Mark:
        """Where its value stands; the section's place where it is not given."""
        return self.marks.get(key, self.mark)


def read(node: Keys, problems: Problems, shape: Shape = FILE, path: str = "") -> Given:
    """The section `node`; unknown keys and values of another kind are noted and left out."""
    given: dict[str, Any] = {}
    for key, below in node.entries.items():
        where = f"{path}.{key}" if path else key
        if key not in shape:
            problems.add(node.marks[key], (where,), _unknown(key, shape))
        elif not _is_null(below):
            value = _value(below, shape[key], problems, where)
            given |= {} if value is None else {key: value}
    marks = {key: node.entries[key].mark for key in given}
    return Given(node.mark, path, given, marks)


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value() is None


def _unknown(key: str, shape: Shape) -> str:
    close = difflib.get_close_matches(key, shape, n=1)
    hint = f"did you mean {close[0]}?" if close else f"expected one of {' '.join(shape)}"
    return f"unknown key of stream-replicator; {hint}"


def _value(node: Node, kind: Kind | Many | Shape, problems: Problems, path: str) -> Any:
    if isinstance(kind, Many):
        return _many(node, kind, problems, path)
    if kind is Kind.HEADERS:
        return _headers(node, problems, path)
    if isinstance(kind, Kind):
        return _scalar(node, kind, problems, path)
    if not isinstance(node, Keys):
        problems.add(node.mark, (path,), "expected a mapping, found something else")
        return None
    return read(node, problems, kind, path)


def _many(node: Node, kind: Many, problems: Problems, path: str) -> tuple[Given, ...] | None:
    if not isinstance(node, Items):
        problems.add(node.mark, (path,), "expected a list, found something else")
        return None
    found = [_value(item, kind.of, problems, f"{path}.{n}") for n, item in enumerate(node.items)]
    return tuple(each for each in found if each is not None)


def _headers(node: Node, problems: Problems, path: str) -> dict[str, str] | None:
    if not isinstance(node, Keys):
        problems.add(node.mark, (path,), "expected a mapping of text, found something else")
        return None
    found = {
        name: _scalar(item, Kind.TEXT, problems, f"{path}.{name}") for name, item in node.entries.items()
    }
    return {name: text for name, text in found.items() if text is not None}


def _scalar(node: Node, kind: Kind, problems: Problems, path: str) -> Any:
    value = node.value() if isinstance(node, Scalar) else None
    if _fits(value, kind):
        return value
    quote = "; quote it" if kind is Kind.TEXT and isinstance(value, bool | int | float) else ""
    # Never what was found: a password may stand where none belongs.
    problems.add(node.mark, (path,), f"expected {kind}{quote}, found something else")
    return None


def _fits(value: Any, kind: Kind) -> bool:
    if kind is Kind.FLAG or isinstance(value, bool):
        return isinstance(value, bool) and kind is Kind.FLAG
    if kind is Kind.TEXT:
        return isinstance(value, str)
    if kind is Kind.NUMBER:
        return isinstance(value, int | float) and value >= 0
    return isinstance(value, int) and (kind is Kind.ANY_WHOLE or value >= 0)
