"""The tables of the configuration page: `python -m tests.support.config_tables docs/configuration.md`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from common.settings.root import UNBUILT, Settings, default_text, fields_of, sections_of
from common.settings.types import OneOrMore, Range, Section, TypeName


class Key(NamedTuple):
    """One key: its path (`*` for an entry of a list), and its entry in the documentation."""

    path: tuple[str, ...]
    type: str
    default: str
    range: str
    meaning: str


def every_key(section: type[Section] = Settings, path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Yield every key with a value, those of nested sections included, in the order of the models."""
    for name, field in fields_of(section).items():
        # egress.nats and ingress.nats have the keys of nats
        inner = [] if path and name == "nats" else sections_of(field.annotation)
        is_list = get_origin(field.annotation) is tuple
        if not inner or is_list or type(None) in get_args(field.annotation):
            yield _key((*path, name), field)
        for below in inner:
            yield from every_key(below, (*path, name, "*") if is_list else (*path, name))


def _key(path: tuple[str, ...], field: FieldInfo) -> Key:
    limits = "; ".join(str(m) for m in field.metadata if isinstance(m, Range))
    unbuilt = " *(so far only the default)*" if ".".join(path) in UNBUILT else ""
    meaning = (field.description or "") + unbuilt
    default = "{}" if path[-1] == "nats" else default_text(field)
    return Key(path, type_name(field), default, limits, meaning)


def type_name(field: FieldInfo) -> str:
    """Return the name of a key's type in the documentation."""
    names = [m.name for m in field.metadata if isinstance(m, TypeName)]
    if OneOrMore in field.metadata:
        return f"{_annotation_name(get_args(field.annotation)[0])}, or a list"
    return names[-1] if names else _annotation_name(field.annotation)


def _annotation_name(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " \\| ".join(inner)
    if origin is tuple:
        return f"list of {_annotation_name(inner[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(_annotation_name(part) for part in inner if part is not type(None))
    if origin is dict or sections_of(annotation):
        return "mapping"
    kinds = [part.name for part in inner if isinstance(part, TypeName)]
    return kinds[-1] if kinds else _annotation_name(inner[0]) if inner else "text"


BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"


def tables() -> str:
    """Return the tables of all keys, one for each section, in Markdown."""
    groups: dict[tuple[str, ...], list[Key]] = {}
    for key in every_key():
        groups.setdefault(key.path[:-1], []).append(key)
    return "\n".join(_table(group, rows) for group, rows in groups.items())


def _table(group: tuple[str, ...], rows: list[Key]) -> str:
    title = f"`{'.'.join(group)}`" if group else "At the top"
    lines = [f"### {title}", "", "| key | type | default | range | meaning |", "|---|---|---|---|---|"]
    for row in rows:
        default = row.default if row.default == "required" else f"`{row.default}`"
        lines.append(f"| `{row.path[-1]}` | {row.type} | {default} | {row.range} | {row.meaning} |")
    return "\n".join([*lines, ""])


def with_tables(page: str) -> str:
    """Return `page` with the tables between its two marks brought up to date."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    import sys

    for name in sys.argv[1:]:
        Path(name).write_text(with_tables(Path(name).read_text()))
