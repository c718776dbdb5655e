"""The keys of the configuration with their types, defaults and ranges, for the reference and its tests."""

import json
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from common.settings.root import Settings, fields_of, sections_of
from common.settings.types import OneOrMore, Range, Section, TypeName
from common.settings.yaml import ListNode, MappingNode, Node


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
    default = "{}" if path[-1] == "nats" else _yaml_text(_default_as_written(field))
    return Key(path, type_name(field), default, limits, field.description or "")


def _default_as_written(field: FieldInfo) -> Any:
    """Return the default of a key as in a file; `required` for a key without one."""
    if field.default == {} and (inner := sections_of(field.annotation)):
        return {name: _default_as_written(below) for name, below in fields_of(inner[0]).items()}
    return "required" if field.default is PydanticUndefined else field.default


# Values without quotes in a file: a word, a duration, a size with its unit.
_UNQUOTED = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*|[0-9]+[A-Za-z]+")


def _yaml_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml_text, value)) + "]"
    if isinstance(value, str):
        return value if _UNQUOTED.fullmatch(value) else json.dumps(value)
    return json.dumps(value)


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


def plain(node: Node) -> Any:
    """Return a value of a file in types of Python."""
    if isinstance(node, MappingNode):
        return {name: plain(value) for name, value in node.entries.items()}
    return [plain(item) for item in node.items] if isinstance(node, ListNode) else node.value()
