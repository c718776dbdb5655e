"""Keys of any document, against a reader of the whole document; anything else gives None."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from egress.sampling.keys import JsonReader, key_of_json

NAMES = st.sampled_from(["a", "b", "0", "1", "é", "", 'q"', "a.b"])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5)
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(tuple)


class Members(list[tuple[str, Any]]):
    """An object with its names in their order, repeats included."""


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(st.tuples(NAMES, inner), max_size=4).map(Members)),
    max_leaves=12,
)


def text(value: Any) -> str:
    if isinstance(value, Members):
        return "{" + ", ".join(f"{json.dumps(name)}:{text(inner)}" for name, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def at(value: Any, path: tuple[str, ...]) -> Any:
    """Return the value at a path; the last of equal names counts."""
    for name in path:
        if isinstance(value, Members):
            value = dict(value).get(name)
        elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def expected(document: Any, path: tuple[str, ...]) -> str | None:
    found = at(document, path)
    if found is None or isinstance(found, list):
        return None
    return found or None if isinstance(found, str) else text(found)


def key_reader(path: tuple[str, ...]) -> JsonReader[str]:
    return JsonReader(path, str, key_of_json)


@given(st.lists(VALUES, max_size=5), PATHS, PATHS)
@settings(max_examples=150)
def test_as_a_reader_of_the_whole_document(documents: list[Any], key: tuple[str, ...], force: tuple[str, ...]) -> None:
    payloads = [text(document).encode() for document in documents]
    assert key_reader(key).values(payloads) == [expected(document, key) for document in documents]
    forced = JsonReader(force, bool, lambda raw: raw == b"true").values(payloads)
    assert [*map(bool, forced)] == [at(document, force) is True for document in documents]


@given(VALUES, PATHS, st.data())
@settings(max_examples=150)
def test_damage_gives_a_key_or_none_and_the_same_whatever_came_before(
    document: Any, path: tuple[str, ...], data: st.DataObject
) -> None:
    raw = bytearray(text(document).encode())
    place = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        del raw[place:]
    else:
        raw[place] = data.draw(st.integers(0, 255))
    fresh = key_reader(path).values([bytes(raw)])
    turned = key_reader(path)
    turned.values([b'{"a":1}', b'{"a":{"b":1}}', b'{"b":5}'])
    assert turned.values([bytes(raw)]) == fresh
    try:
        json.loads(bytes(raw).decode())
    except (ValueError, RecursionError):
        return  # msgspec does not check UTF-8 in the parts that it skips
    assert fresh[0] is None or isinstance(fresh[0], str)
