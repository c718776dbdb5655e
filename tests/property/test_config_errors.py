"""Problems of a configuration file: each is found at its line and column, in any layout of the file."""

import copy
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from common.settings.loader import parse_documents
from common.settings.root import Settings, fields_of, sections_of
from common.settings.types import Range, Section, TypeName, parse_size
from common.settings.yaml import ConfigFileError, Problems, parse_yaml
from tests.support.config_keys import plain, type_name

ROOT = Path(__file__).parents[2]
Where = tuple[str | int, ...]
Mark = tuple[int, int]  # line, column
Place = tuple[int, int, str]  # line, column, path

NOT_TEXT = [5, 1.5, True, [], {}, None]
WRONG: dict[str, list[Any]] = {
    "text": NOT_TEXT,
    "path": NOT_TEXT,
    "secret": NOT_TEXT,
    "URL": [*NOT_TEXT, "somewhere"],
    "name": [*NOT_TEXT, "a b", "a/b"],
    "subject": [*NOT_TEXT, "a..b", "a b"],
    "time": [*NOT_TEXT, "now", "2026-02-30T00:00:00Z"],
    "address": [*NOT_TEXT, "9464"],
    "number": ["x", "5", 1.5, True, [], {}, None],
    "true or false": ["yes", "true", 1, None, []],
    "duration": [5, 1.5, True, None, [], "5", "5 minutes", "-5s", "1e99h", "NaN"],
    "duration or never": [5, 1.5, True, None, [], "5", "sometimes", "-5s", "1e99h", "NaN"],
    "size": [-1, 1.5, True, None, [], "10X", "-5K"],
    "mapping": [5, "x", []],
    "list": [5, "x", {}],
}


def _reference() -> dict[str, Any]:
    [root] = parse_yaml((ROOT / "floe.reference.yaml").read_bytes(), Problems(""))
    document = plain(root)
    document["egress"]["feeds"].append({"stream": "OTHER", "segment": {"max_age": "1m"}})
    document["ingress"]["targets"].append({"stream": "FLEET", "sources": [{"site": ["a", "b"], "feed": "f"}]})
    document["nats"]["url"] = ["nats://a:4222", "nats://b:4222"]
    return document


VALID = _reference()


# Places that can be broken in a document


@dataclass(frozen=True)
class Spot:
    """The place of a value, and wrong values for it."""

    where: Where
    wrong: tuple[Any, ...]


def spots(value: dict[str, Any], section: type[Section], where: Where = ()) -> list[Spot]:
    """Return each value of a section and of its subsections."""
    found = []
    for name, model in fields_of(section).items():
        if name not in value:
            continue
        here, below = (*where, name), sections_of(model.annotation)
        if isinstance(value[name], dict) and below:
            found += [Spot(here, (5, "x")), *spots(value[name], below[0], here)]
        elif isinstance(value[name], list) and below:
            for index, item in enumerate(value[name]):
                found += [Spot((*here, index), (5, "x", [])), *spots(item, below[0], (*here, index))]
        elif name != "create":
            found.append(Spot(here, tuple(_wrong(model))))
    return found


def _wrong(model: Any) -> list[Any]:
    name = type_name(model)
    if name.endswith("or a list"):
        return [5, True, None, {}, *([] if model.default == () else [[]])]
    if " | " in name.replace("\\", "") and not name.startswith("list of"):
        return ["zzz", 5, None, [], *([] if name.startswith("true") else [True])]
    kind = "list" if name.startswith("list of") else name
    wrong = list(WRONG[kind if any(isinstance(m, TypeName) for m in model.metadata) or kind in WRONG else "text"])
    for limits in (m for m in model.metadata if isinstance(m, Range)):
        wrong += _outside(kind, limits)
    return wrong


def _outside(kind: str, limits: Range) -> list[Any]:
    if kind == "duration":
        return ["1ms", "5000w"][: 1 + (limits.maximum is not None)]
    bounds = ((limits.minimum, -1), (limits.maximum, 1))
    return [(parse_size(str(b)) if kind == "size" else b) + out for b, out in bounds if b is not None]


def mappings(value: Any, where: Where = ()) -> list[Where]:
    """Return the sections to which an unknown key can be added; those with free keys are left out."""
    if isinstance(value, list):
        return [found for index, item in enumerate(value) for found in mappings(item, (*where, index))]
    if not isinstance(value, dict) or where[-1:] in (("headers",), ("conf",), ("defaults",)):
        return []
    return [where, *[found for name, item in value.items() for found in mappings(item, (*where, name))]]


def at(document: Any, where: Where) -> Any:
    for part in where:
        document = document[part]
    return document


def break_it(rng: random.Random, breaks: int) -> tuple[dict[str, Any], dict[Where, str]]:
    """Return a broken document and its broken places: each problem points at the `value` or the `key`."""
    document, broken = copy.deepcopy(VALID), {}
    choices = spots(VALID, Settings)
    for _ in range(breaks):
        if rng.random() < 0.3:
            where = (*rng.choice(mappings(VALID)), f"unknown{rng.randrange(10**6)}")
            wrong, kind = rng.choice(["x", 5, [1], {"a": 1}]), "key"
        else:
            spot = rng.choice(choices)
            where, wrong, kind = spot.where, rng.choice(spot.wrong), "value"
        if any(where[: len(b)] == b or b[: len(where)] == where for b in broken):
            continue
        _insert(rng, at(document, where[:-1]), where[-1], copy.deepcopy(wrong))
        broken[where] = kind
    return document, broken


def _insert(rng: random.Random, into: Any, name: str | int, value: Any) -> None:
    if name in into or isinstance(into, list):
        into[name] = value
        return
    items = list(into.items())
    items.insert(rng.randint(0, len(items)), (str(name), value))
    into.clear()
    into.update(items)


# A document written in some layout, and the place of each key and value in it


def nodes(node: Any, where: Where = ()) -> Iterator[tuple[Where, Any]]:
    yield where, node
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from nodes(value, (*where, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from nodes(item, (*where, index))


class Written:
    """A document in a layout that `rng` chooses, and the place of each key and value."""

    def __init__(self, rng: random.Random, document: Any) -> None:
        root = yaml.compose(json.dumps(document))
        for where, node in [*nodes(root)]:
            if not isinstance(node, yaml.ScalarNode):
                node.flow_style = bool(where) and rng.random() < 0.3
            if isinstance(node, yaml.MappingNode):
                for key, _ in node.value:
                    key.style = rng.choice([None, None, '"', "'"])
        lines = yaml.serialize(root, indent=rng.choice([2, 3, 5]), width=10**9).splitlines(keepends=True)
        noise = ["", "", "", "", "\n", "# \u00e4: comment\n", "   # {\n"]
        self.text = "".join(rng.choice(noise) + line for line in lines)
        self.keys: dict[Where, Mark] = {}
        self.values: dict[Where, Mark] = {}
        for where, node in nodes(yaml.compose(self.text)):
            self.values[where] = mark_of(node)
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                self.keys[*where, key.value] = mark_of(key)


def mark_of(node: Any) -> Mark:
    return node.start_mark.line + 1, node.start_mark.column + 1


def found_at(text: str) -> set[Place]:
    try:
        parse_documents(text.encode(), "f.yaml", {})
    except ConfigFileError as error:
        return {(problem.line, problem.column, problem.path) for problem in error.found}
    return set()


@given(seed=st.integers(0, 2**32), breaks=st.integers(0, 8))
def test_each_broken_value_and_each_unknown_key_is_found_exactly_at_its_place(seed: int, breaks: int):
    rng = random.Random(seed)
    document, broken = break_it(rng, breaks)
    writer = Written(rng, document)
    expected = {
        (*(writer.keys if kind == "key" else writer.values)[where], ".".join(map(str, where)))
        for where, kind in broken.items()
    }
    assert found_at(writer.text) == expected, writer.text


def check(wrong: list[tuple[Where, Any]]) -> None:
    """Put these values in their places, and check that each is found, and nothing else."""
    document = copy.deepcopy(VALID)
    for where, value in wrong:
        at(document, where[:-1])[where[-1]] = copy.deepcopy(value)
    writer = Written(random.Random(0), document)
    assert found_at(writer.text) == {(*writer.values[where], ".".join(map(str, where))) for where, _ in wrong}, wrong


def test_each_kind_of_wrong_value_is_found_in_every_key_at_once_and_every_section_that_is_no_mapping():
    found = spots(VALID, Settings)
    leaves = [spot for spot in found if not isinstance(at(VALID, spot.where), dict)]
    for turn in range(max(len(spot.wrong) for spot in leaves)):
        check([(spot.where, spot.wrong[turn % len(spot.wrong)]) for spot in leaves])
    for spot in found:
        if spot not in leaves:
            check([(spot.where, spot.wrong[0])])


@given(seed=st.integers(0, 2**32), cuts=st.integers(1, 6))
def test_a_file_that_was_torn_is_refused_or_taken_and_nothing_else(seed: int, cuts: int):
    rng = random.Random(seed)
    text = bytearray(Written(rng, VALID).text.encode())
    for _ in range(cuts):
        begin = rng.randrange(len(text))
        end = begin + rng.choice([0, 1, 1, 5, 200])
        text[begin:end] = rng.choice(
            [b"", bytes([rng.randrange(256)]), text[: rng.randrange(80)], b"\n", b": ", b"'", b"- "]
        )
    with suppress(ConfigFileError):  # any other error fails
        parse_documents(bytes(text), "f.yaml", {})
