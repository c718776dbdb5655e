"""YAML as a tree that records the place of every value in the file.

A strict part of YAML 1.2's core schema: no anchors, aliases, merge keys and tags, no duplicate keys, and plain text is
null, true, false, a decimal number or text; never a date, an octal number or `no`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from common.errors import ConfigError

MAX_FILE_BYTES = 1024 * 1024  # of one file
MAX_NESTING = 32  # mappings and lists within each other
MAX_NODES = 50_000  # values and keys of one file

KeyPath = tuple[str | int, ...]

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class Mark(NamedTuple):
    """A place in a file; both count from 1, columns in characters."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value as it is written. `is_plain`: without quotes, so it may be something else than text."""

    mark: Mark
    text: str
    is_plain: bool

    def value(self) -> Any:
        if not self.is_plain:
            return self.text
        if self.text in _CONSTANTS:
            return _CONSTANTS[self.text]
        if _INTEGER.fullmatch(self.text) and len(self.text) < 100:
            return int(self.text)
        is_octal = self.text.lstrip("+-").isdecimal()
        return float(self.text) if _FLOAT.fullmatch(self.text) and not is_octal else self.text


@dataclass(frozen=True, slots=True)
class ListNode:
    """A list."""

    mark: Mark
    items: list[Node]


@dataclass(frozen=True, slots=True)
class MappingNode:
    """A mapping; `marks`: the place of each key."""

    mark: Mark
    entries: dict[str, Node] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)


Node = Scalar | ListNode | MappingNode


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. Line and column 0: the file as a whole; `path`: empty if there is none."""

    name: str
    line: int
    column: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.name}:{self.line}:{self.column}" if self.line else self.name
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class Problems:
    """All problems of one file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._found: dict[tuple[Mark, str, str], Problem] = {}

    def add(self, mark: Mark, path: KeyPath, message: str) -> None:
        # A value that applies at several paths is reported once; two keys that a section lacks are two problems.
        key = str(path[-1]) if path else ""
        self._found.setdefault((mark, message, key), Problem(self.name, *mark, ".".join(map(str, path)), message))

    def marks(self) -> set[Mark]:
        return {mark for mark, _, _ in self._found}

    def __iter__(self) -> Iterator[Problem]:
        """Iterate in the order of the file."""
        return iter(self._found[found] for found in sorted(self._found))

    def __len__(self) -> int:
        return len(self._found)


class ConfigFileError(ConfigError):
    """The file is wrong. `found`: each problem, with its place."""

    def __init__(self, found: Iterable[Problem]) -> None:
        self.found = tuple(found)
        super().__init__(*map(str, self.found))


def suggest_key(found: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(found.lower(), known, n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {' '.join(known)}"


def raise_problems(problems: Problems) -> None:
    """Raise ConfigFileError if there are problems."""
    if problems:
        raise ConfigFileError(problems)


def parse_yaml(data: bytes, problems: Problems) -> list[MappingNode]:
    """Return the documents of a file; problems are recorded, and a document that is not a mapping is left out."""
    if (text := _text(data, problems)) is None:
        return []
    try:
        # Event by event, so a file that is too deep or too large is refused before the slow parser has read all of it.
        return _Builder(yaml.parse(text, Loader=yaml.SafeLoader), problems).documents()
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        mark = Mark(before.count("\n") + 1, error.position - before.rfind("\n"))
        problems.add(mark, (), f"expected text, found the character {error.character!r}")
        return []
    except yaml.MarkedYAMLError as error:
        # The library's own message quotes the line, which may contain a secret.
        problems.add(_mark(error.problem_mark), (), f"expected YAML: {error.context or ''} {error.problem}")
        return []


def _text(data: bytes, problems: Problems) -> str | None:
    """Return `data` without a byte order mark; None, with a problem recorded, if it is not UTF-8 text."""
    if len(data) > MAX_FILE_BYTES:
        problem = f"expected at most {MAX_FILE_BYTES} bytes, found more"
    elif data.startswith((b"\xff\xfe", b"\xfe\xff")):
        problem = "expected UTF-8 text, found UTF-16"
    else:
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            problem = f"expected UTF-8 text, found other bytes at offset {error.start}"
    problems.add(Mark(0, 0), (), problem)
    return None


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1) if mark is not None else Mark(0, 0)


class _Builder:
    """A builder of trees from the parser's events."""

    def __init__(self, events: Iterable[Any], problems: Problems) -> None:
        self._events, self._problems = iter(events), problems
        self._depth = self._nodes = 0

    def documents(self) -> list[MappingNode]:
        begins = (event for event in self._events if isinstance(event, yaml.DocumentStartEvent))
        found = [self._node(next(self._events), ()) for _ in begins]
        if not found:
            self._problems.add(Mark(1, 1), (), "expected a mapping, found an empty file")
        for node in found:
            if isinstance(node, ListNode):
                self._problems.add(node.mark, (), "expected a mapping at the top, found a list")
            elif isinstance(node, Scalar):
                what = "nothing" if node.value() is None else "a single value"
                self._problems.add(node.mark, (), f"expected a mapping at the top, found {what}")
        return [node for node in found if isinstance(node, MappingNode)]

    def _node(self, event: Any, path: KeyPath) -> Node:
        mark = _mark(event.start_mark)
        self._check_features(event, mark, path)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(mark, path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(mark, path)
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(mark, event.value, event.style is None)
        return Scalar(mark, "", True)  # an alias, refused above

    def _check_features(self, event: Any, mark: Mark, path: KeyPath) -> None:
        if isinstance(event, yaml.AliasEvent):
            self._problems.add(mark, path, f"expected a value, found the alias *{event.anchor}: write it out")
        elif event.anchor is not None:
            self._problems.add(mark, path, f"expected a value, found the anchor &{event.anchor}: remove it")
        elif event.tag is not None:
            self._problems.add(mark, path, f"expected a value, found the tag {event.tag}: remove it")
        self._nodes += 1
        for found, limit, what in ((self._depth, MAX_NESTING, "levels"), (self._nodes, MAX_NODES, "keys and values")):
            if found > limit:
                self._problems.add(mark, (), f"expected at most {limit} {what}, found more")
                raise_problems(self._problems)

    def _list(self, mark: Mark, path: KeyPath) -> ListNode:
        items: list[Node] = []
        self._depth += 1
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items))))
        self._depth -= 1
        return ListNode(mark, items)

    def _mapping(self, mark: Mark, path: KeyPath) -> MappingNode:
        keys = MappingNode(mark)
        self._depth += 1
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event, path)
            name = key.text if isinstance(key, Scalar) else "?"
            value = self._node(next(self._events), (*path, name))
            if self._check_key(key, keys, (*path, name)):
                keys.entries[name], keys.marks[name] = value, key.mark
        self._depth -= 1
        return keys

    def _check_key(self, key: Node, keys: MappingNode, path: KeyPath) -> bool:
        if not isinstance(key, Scalar):
            self._problems.add(key.mark, path[:-1], "expected a key, found a mapping or a list")
        elif key.text == "<<" and key.is_plain:
            self._problems.add(key.mark, path, "expected a key, found a merge key: write it out")
        elif key.text in keys.entries:
            first = keys.marks[key.text].line
            self._problems.add(key.mark, path, f"expected each key once, found it on line {first} too")
        else:
            return True
        return False


#: A section, and the source of keys that it does not have itself (`*`: any entry of a list).
FALLBACKS: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("egress", "nats"), ("nats",)),
    (("ingress", "nats"), ("nats",)),
    (("egress", "feeds", "*"), ("egress", "defaults")),
    (("ingress", "targets", "*", "sources", "*"), ("ingress", "defaults")),
)


@dataclass(frozen=True, slots=True)
class Place:
    """A value in the file. `node`: None if the file has no such key; then `mark` is the section's."""

    mark: Mark
    key_mark: Mark
    path: KeyPath
    node: Node | None


def locate(root: MappingNode, location: Sequence[str | int]) -> Place:
    wanted = [part for part in location if not str(part).startswith(("(", "["))]
    nearest = Place(root.mark, root.mark, (), root)
    places = [nearest]
    for index, part in enumerate(wanted):
        below = [found for place in places for found in _step(place, part)]
        pattern = tuple("*" if isinstance(each, int) else each for each in wanted[: index + 1])
        others = (locate(root, source) for section, source in FALLBACKS if section == pattern)
        below += [place for place in others if place.node is not None]
        if places and not below:
            nearest = places[0]
            if not isinstance(nearest.node, Scalar):  # one value counts as a list
                nearest = Place(nearest.mark, nearest.mark, (*nearest.path, *wanted[index:]), None)
        places = below  # none: a fallback may still be found further down
    return places[0] if places else nearest


def _step(place: Place, part: str | int) -> Iterator[Place]:
    node, path = place.node, (*place.path, part)
    if isinstance(node, MappingNode) and part in node.entries:
        below = node.entries[str(part)]
        yield Place(below.mark, node.marks[str(part)], path, below)
    elif isinstance(node, ListNode) and isinstance(part, int) and part < len(node.items):
        below = node.items[part]
        yield Place(below.mark, below.mark, path, below)
