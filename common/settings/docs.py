"""What the models say of themselves: sections, keys, defaults; for messages and the documentation."""

import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import SecretStr, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from common.settings.root import UNBUILT, Settings
from common.settings.types import OneOrMore, Range, Section, TypeName

# What a file needs no quotes for: a word, a duration, a size with its unit.
_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*|[0-9]+[A-Za-z]+")


class Key(NamedTuple):
    """One key: its path (`*` for an entry of a list), and what the documentation says of it."""

    path: tuple[str, ...]
    type: str
    default: str
    range: str
    meaning: str


def sections_of(annotation: Any) -> list[type[Section]]:
    """The sections that a value of this type may be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_of(inner)]


def fields_of(section: type[Section]) -> dict[str, FieldInfo]:
    """The keys of a section as a file writes them."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def section_at(path: Sequence[str | int]) -> type[Section] | None:
    """The section at `path`, positions in lists included; None if there is none."""
    section: type[Section] | None = Settings
    for part in path:
        if isinstance(part, str) and section is not None:
            field = fields_of(section).get(part)
            section = next(iter(sections_of(field.annotation)), None) if field else None
    return section


@cache
def default_of(section: type[Section], key: str) -> Any:
    """The default as the program sees it; None for a key without one."""
    field = fields_of(section)[key]
    if field.default is PydanticUndefined:
        return None
    adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
    return adapter.validate_python(field.default)


def is_secret(section: type[Section] | None, key: str) -> bool:
    """Whether the value of `key` must never be shown."""
    field = fields_of(section).get(key) if section else None
    return field is not None and field.annotation is SecretStr


def every_key(section: type[Section] = Settings, path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key with a value, those of sections below included, in the order of the models."""
    for name, field in fields_of(section).items():
        # egress.nats and ingress.nats have the keys of nats
        inner = [] if path and name == "nats" else sections_of(field.annotation)
        is_list = get_origin(field.annotation) is tuple
        if not inner or is_list or type(None) in get_args(field.annotation):
            yield _key((*path, name), field)
        for below in inner:
            yield from every_key(below, (*path, name, "*") if is_list else (*path, name))


def default_text(field: FieldInfo) -> str:
    """The default of a key as a file writes it; `required` for one without."""
    if field.default is PydanticUndefined:
        return "required"
    if field.default == {} and (inner := sections_of(field.annotation)):
        return yaml_text({name: _Raw(default_text(below)) for name, below in fields_of(inner[0]).items()})
    return yaml_text(field.default)


class _Raw(str):
    """Text that is written already."""

    __slots__ = ()


def _key(path: tuple[str, ...], field: FieldInfo) -> Key:
    limits = "; ".join(str(m) for m in field.metadata if isinstance(m, Range))
    unbuilt = " *(so far only the default)*" if ".".join(path) in UNBUILT else ""
    meaning = (field.description or "") + unbuilt
    default = "{}" if path[-1] == "nats" else default_text(field)
    return Key(path, type_name(field), default, limits, meaning)


def type_name(field: FieldInfo) -> str:
    """What the documentation calls the type of a key."""
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


def yaml_text(value: Any) -> str:
    """A default as a file writes it, on one line."""
    if isinstance(value, _Raw):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {yaml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_text, value)) + "]"
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) else json.dumps(value)
    return json.dumps(value)


BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"


def tables() -> str:
    """The tables of all keys, one for each section, in Markdown."""
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
    """`page` with the tables between its two marks brought up to date."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    import sys

    for name in sys.argv[1:]:
        Path(name).write_text(with_tables(Path(name).read_text()))
