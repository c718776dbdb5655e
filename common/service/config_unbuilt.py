"""Refuses what is a valid configuration and cannot be run: features not in this version, loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from common.service.config_document import Document
from common.service.config_problems import add_combinations
from common.service.positions import locate
from common.settings.base import Section
from common.settings.docs import default_of, default_text, fields_of
from common.settings.unbuilt import UNBUILT
from common.settings.yaml import KeyPath, Problems, refuse


class _Found(NamedTuple):
    location: KeyPath
    section: type[Section]
    value: Any


def refuse_unbuilt(document: Document) -> None:
    """Raises ConfigError with a line for each key that is set and whose feature is not built."""
    problems = Problems(document.name)
    _add_unbuilt(document, problems)
    refuse(problems)


def refuse_loops(document: Document) -> None:
    """Raises ConfigError with a line for each target that flows into itself."""
    problems = Problems(document.name)
    add_combinations((), document.settings.loops(), document.root, problems)
    refuse(problems)


def refuse_unrunnable(document: Document) -> None:
    """As `refuse_unbuilt` and `refuse_loops`, all problems at once."""
    problems = Problems(document.name)
    _add_unbuilt(document, problems)
    add_combinations((), document.settings.loops(), document.root, problems)
    refuse(problems)


def _add_unbuilt(document: Document, problems: Problems) -> None:
    for path in UNBUILT:
        for found in _values(document.settings, path.split("."), ()):
            if _is_asked_for(found):
                place = locate(document.root, found.location)
                problems.add(place.mark, place.path, _message(found))


def _values(value: Any, parts: Sequence[str], location: KeyPath) -> Iterator[_Found]:
    """The values that the path `parts` names below `value`."""
    part, *rest = parts
    if part == "*":
        for index, item in enumerate(value):
            yield from _values(item, rest, (*location, index))
    elif rest:
        yield from _values(getattr(value, part), rest, (*location, part))
    else:
        yield _Found((*location, part), type(value), getattr(value, part))


def _is_asked_for(found: _Found) -> bool:
    return bool(found.value != default_of(found.section, str(found.location[-1])))


def _message(found: _Found) -> str:
    default = default_text(fields_of(found.section)[str(found.location[-1])])
    return f"not built yet in this version; remove it or leave it at its default ({default})"
