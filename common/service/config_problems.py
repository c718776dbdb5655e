"""From what pydantic reports to lines that say where, what was expected and what was found."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from common.service.positions import Place, locate
from common.settings.docs import fields_of, is_secret, section_at
from common.settings.yaml import Items, KeyPath, Keys, Problems

MAX_FOUND = 60  # characters of a value in a message

_MAPPING = "a mapping"
_LIST = "a list"
_EXPECTED = {
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "dict_type": _MAPPING,
    "tuple_type": _LIST,
    "list_type": _LIST,
}
_SECRET_NAME = re.compile(r"secret|passw", re.IGNORECASE)
_FREE = ("conf", "headers")  # mappings whose keys are the user's, secrets perhaps among them


def explain(error: ValidationError, root: Keys, problems: Problems) -> None:
    """Note each problem of `error` at its place in the document `root`."""
    spoiled = problems.marks()  # values that could not be expanded have their problem already
    for detail in error.errors(include_url=False, include_input=False):
        location = detail["loc"]
        if detail["type"] == "floe_combination":
            add_combinations(location, detail["ctx"]["problems"], root, problems)
            continue
        place = locate(root, location)
        if place.mark not in spoiled or place.node is None:
            mark = place.key_mark if detail["type"] == "extra_forbidden" else place.mark
            problems.add(mark, place.path, _message(detail, place))


def add_combinations(
    location: Sequence[str | int], found: Iterable[tuple[str, str]], root: Keys, problems: Problems
) -> None:
    """Note what is wrong between keys of the section at `location`."""
    for key, problem in found:
        parts = (int(part) if part.isdecimal() else part for part in key.split("."))
        place = locate(root, (*location, *parts))
        problems.add(place.mark, place.path, problem)


def _message(detail: Mapping[str, Any], place: Place) -> str:
    kind = detail["type"]
    if kind == "extra_forbidden":
        return _unknown(detail["loc"])
    if kind == "missing":
        return "expected a value (required), found nothing"
    return f"expected {_expected(detail)}, found {found_text(place)}"


def _expected(detail: Mapping[str, Any]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "floe_value":
        return str(context["expected"])
    if kind == "literal_error":
        return "one of " + re.sub(r"'|,| or", "", str(context["expected"])).replace(" ", " | ")
    return _EXPECTED.get(kind, str(detail["msg"]))


def _unknown(location: Sequence[str | int]) -> str:
    """Asked by where the key would count, which for a key of defaults is the entry."""
    section = section_at([part for part in location[:-1] if not str(part).startswith("(")])
    known = list(fields_of(section)) if section else []
    known += [f"{name}_file" for name in known if is_secret(section, name)]
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    if close:
        return f"unknown key; did you mean {close[0]}?"
    return f"unknown key; expected one of {' '.join(known)}"


def found_text(place: Place) -> str:
    """What stands at `place`, for a message: no secret, no password of a URL, no content of a variable."""
    node = place.node
    if isinstance(node, Keys):
        return _MAPPING
    if isinstance(node, Items):
        return _LIST if node.items else "an empty list"
    if node is None or node.value() is None:
        return "nothing"
    if _is_private(place.path):
        return "a secret"
    text = node.text if len(node.text) <= MAX_FOUND else node.text[:MAX_FOUND] + "…"
    if "@" in node.text:
        text = "***" + node.text[node.text.rindex("@") :][:MAX_FOUND]
    return text if node.is_plain else f'"{text}"'


def _is_private(path: KeyPath) -> bool:
    names = [part for part in path if isinstance(part, str)]
    if any(name in _FREE for name in names[:-1]):
        return True
    return bool(names) and (
        _SECRET_NAME.search(names[-1]) is not None or is_secret(section_at(path[:-1]), names[-1])
    )
