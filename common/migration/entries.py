"""YAML with comments, and the origin of each of its values."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.settings.yaml import Mark, Scalar

# Comment lines of 100 characters.
_WRAPPER = textwrap.TextWrapper(
    100, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
)

_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*|[0-9]+[A-Za-z]+")


@dataclass(slots=True)
class YamlEntry:
    """A key of a mapping.

    `value`: text, a number, true or false; a list of text; entries of a mapping; or a list of such mappings.
    `mark`: the origin of the value. `notes`: comments above it.
    """

    key: str
    value: Any
    mark: Mark | None = None
    notes: Sequence[str] = field(default_factory=tuple)


class Variable(str):
    """Text in which `${VAR}` is a variable; in other text it is escaped."""

    __slots__ = ()


class Entries(list[YamlEntry]):
    """A mapping. `notes`: comments above it, if it is an item of a list."""

    def __init__(self, entries: Iterable[YamlEntry] = (), notes: Sequence[str] = ()) -> None:
        super().__init__(entries)
        self.notes = tuple(notes)


def render(entries: Entries) -> str:
    return "".join(f"{line}\n" for line in _mapping(entries))


def _mapping(entries: Entries) -> Iterator[str]:
    for entry in entries:
        yield from comment(entry.notes)
        yield from _entry(entry)


def _entry(entry: YamlEntry) -> Iterator[str]:
    key, value = scalar(entry.key), entry.value
    if isinstance(value, Entries):
        yield f"{key}:" if value else f"{key}: {{}}"
        yield from (f"  {line}" for line in _mapping(value))
    elif isinstance(value, list) and value and isinstance(value[0], Entries):
        yield f"{key}:"
        for item in value:
            yield from (f"  {line}" for line in _item(item))
    elif isinstance(value, list | tuple):
        yield f"{key}: [{', '.join(map(scalar, value))}]"
    else:
        yield f"{key}: {scalar(value)}"


def _item(entries: Entries) -> Iterator[str]:
    yield from comment(entries.notes)
    lines = list(_mapping(entries))
    first = next((n for n, line in enumerate(lines) if not line.startswith("#")), 0)
    yield from lines[:first]  # the dash comes before the first key
    yield f"- {lines[first]}"
    yield from (f"  {line}" for line in lines[first + 1 :])


def comment(notes: Sequence[str]) -> Iterator[str]:
    """Write the notes as comment lines, wrapped; nothing in them can end the comment."""
    for note in notes:
        yield from _WRAPPER.wrap(_printable(note)) or ["#"]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def scalar(value: Any) -> str:
    """Write a value on one line; text is quoted if it could be read as something else."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return str(value)
    is_text = isinstance(Scalar(Mark(0, 0), value, True).value(), str)
    value = value if isinstance(value, Variable) else value.replace("${", "$${")
    if _BARE.fullmatch(value) and is_text:
        return str(value)
    value = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_printable(value)}"'


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def origins(entries: Entries, path: str = "") -> dict[str, Mark]:
    found: dict[str, Mark] = {}
    for entry in entries:
        key_path = f"{path}.{entry.key}" if path else entry.key
        if entry.mark is not None:
            found[key_path] = entry.mark
        if isinstance(entry.value, Entries):
            found |= origins(entry.value, key_path)
        elif isinstance(entry.value, list):
            for number, item in enumerate(entry.value):
                found |= origins(item, f"{key_path}.{number}") if isinstance(item, Entries) else {}
    return found
