"""What is a key in a JSON payload: one table, which stands in docs/sampling.md too."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.segments.columns import Columns
from egress.sampling.key_reader import KeyReader, parse_path
from egress.sampling.settings import MAX_LEVELS, Sampling
from tests.support.sampling import sampling

DOCS = Path(__file__).parents[2] / "docs" / "sampling.md"
DEEP = 10_000


@dataclass(frozen=True)
class Case:
    what: str
    payload: bytes
    key: str | None
    path: str = "sender"
    text: str = ""
    says: str = ""

    def row(self) -> str:
        key = f"`{self.key}`" if self.key is not None else "none"
        payload = self.text or self.payload.decode()
        return f"| {self.what} | `{self.path}` | `{payload}` | {self.says or key} |"


def levels(count: int) -> bytes:
    return b"[" * count + b"]" * count


def sender(text: str) -> bytes:
    return b'{"sender": "' + text.encode() + b'"}'


def beside(value: bytes) -> bytes:
    return b'{"sender": "a", "x": ' + value + b"}"


OBJECTS = b'{"a":' * DEEP + b"1" + b"}" * DEEP
BESIDE = '{"sender": "a", "x": [[[…]]]}'
TABLE = [
    Case("text", b'{"sender": "a", "x": 1}', "a"),
    Case("text beyond ASCII", '{"sender": "é"}'.encode(), "é"),
    Case("escapes", rb'{"sender": "\u00e9\n\"\\"}', 'é\n"\\', says='`é`, a line feed, `"` and `\\`'),
    Case("a pair of surrogates", rb'{"sender": "\ud83d\ude00"}', "😀"),
    Case("a lone surrogate", rb'{"sender": "\ud800"}', None),
    Case("a lone surrogate elsewhere", rb'{"sender": "a", "x": "\ud800"}', None),
    Case("empty text", b'{"sender": ""}', None),
    Case("a number, as written", b'{"sender": 1}', "1"),
    Case("a number, as written", b'{"sender": 1.0}', "1.0"),
    Case("a number, as written", b'{"sender": 1e3}', "1e3"),
    Case("a number, as written", b'{"sender": -0.5}', "-0.5"),
    Case("a number of 30 digits", b'{"sender": ' + b"1" * 30 + b"}", "1" * 30),
    Case("a number beyond every range", b'{"sender": 1e999}', "1e999"),
    Case("true, false", b'{"sender": true}', "true"),
    Case("true, false", b'{"sender": false}', "false"),
    Case("null", b'{"sender": null}', None),
    Case("an object", b'{"sender": {"a": 1}}', None),
    Case("an array", b'{"sender": ["a"]}', None),
    Case("no such field", b'{"other": "a"}', None),
    Case("one name twice: the last counts", b'{"sender": "a", "sender": "b"}', "b"),
    Case("one name twice: the last counts", b'{"sender": "a", "sender": null}', None),
    Case("one name twice: the last counts", b'{"sender": 1, "sender": "b"}', "b"),
    Case("a field in a field", b'{"node": {"name": "a"}}', "a", "node.name"),
    Case("a field in a field, the way twice", b'{"node": {"name": "a"}, "node": {}}', None, "node.name"),
    Case("a field in a field, the way twice", b'{"node": 1, "node": {"name": "a"}}', "a", "node.name"),
    Case("the way leads through text", b'{"node": "name"}', None, "node.name"),
    Case("an item of an array", b'{"nodes": [{"name": "a"}, {"name": "b"}]}', "b", "nodes.1.name"),
    Case("an item beyond the end", b'{"nodes": ["a"]}', None, "nodes.1"),
    Case("digits may be a name", b'{"nodes": {"1": "a"}}', "a", "nodes.1"),
    Case("an array as payload", b'["a", "b"]', "b", "1"),
    Case("a dot in a name", b'{"node.name": "a"}', "a", r"node\.name"),
    Case("a quote in a name", rb'{"a\"b": "c"}', "c", 'a"b'),
    Case("an escape in a name", rb'{"send\u0065r": "a"}', "a"),
    Case("space around", b' \n{ "sender" : "a" }\t', "a", text=r' \n{ "sender" : "a" }\t'),
    Case("empty payload", b"", None, text=" ", says="none"),
    Case("text, not a document", b'"sender"', None),
    Case("no JSON", b"sender=a", None),
    Case("cut off", b'{"sender": "a", "x": [1, 2', None),
    Case("something behind", b'{"sender": "a"} x', None),
    Case("a comma too many", b'{"sender": "a",}', None),
    Case("NaN", b'{"sender": NaN}', None),
    Case("broken elsewhere", b'{"sender": "a", "x": 01}', None),
    Case("a byte order mark first", b'\xef\xbb\xbf{"sender": "a"}', None, text='EF BB BF {"sender": "a"}'),
    Case("UTF-16", '{"sender": "a"}'.encode("utf-16"), None, text='{"sender": "a"}', says="none"),
    Case("not UTF-8", b'{"sender": "\xff"}', None, text='{"sender": "<FF>"}'),
    Case("not UTF-8 elsewhere", b'{"sender": "a", "x": "\xff"}', "a", text='{"sender": "a", "x": "<FF>"}'),
    Case("a key of 1,024 bytes", sender("é" * 512), "é" * 512, text='{"sender": "éé…"}', says="`éé…`"),
    Case("a longer key", sender("é" * 512 + "a"), None, text='{"sender": "éé…a"}'),
    Case("500 levels", beside(levels(MAX_LEVELS - 1)), "a", text=BESIDE),
    Case("501 levels", beside(levels(MAX_LEVELS)), None, text=BESIDE),
    Case("10,000 levels elsewhere", beside(levels(DEEP)), None, text=BESIDE),
    Case("10,000 levels as the field", b'{"sender": ' + OBJECTS + b"}", None, text='{"sender": {"a":{"a":…}}}'),
    Case("10,000 levels on the way", b'{"node": ' + levels(DEEP) + b"}", None, "node.name", text='{"node": [[[…]]]}'),
]


def markdown() -> str:
    """The table as the documentation shows it."""
    return "\n".join(["| payload | path | for example | key |", "|---|---|---|---|", *(c.row() for c in TABLE)])


def read(how: Sampling, *payloads: bytes) -> list[str | None]:
    count = len(payloads)
    rows = Columns([*range(1, count + 1)], [0] * count, [b"s"] * count, [None] * count, list(payloads))
    return KeyReader(how).read(rows)[0]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"{case.path}-{case.what}")
def test_the_table(case: Case) -> None:
    how = sampling(inspect_field=case.path)
    assert read(how, case.payload) == [case.key]
    # Whatever was read before: a number turns the reader to another way, which must give the same.
    number = b'{"sender": 5, "node": {"name": 5}, "nodes": [{"name": 1}, 5], "node.name": 5, "a\\"b": 5}'
    assert read(how, number, case.payload, b"{", case.payload)[1::2] == [case.key] * 2
    # With a force field beside it the decoder is another one.
    both = sampling(inspect_field=case.path, inspect_force_field="force.copy")
    assert read(both, case.payload, number, case.payload)[::2] == [case.key] * 2
    # One path for both leaves only the walk.
    walk = sampling(inspect_field=case.path, inspect_force_field=case.path)
    assert read(walk, case.payload) == [case.key]


def test_the_documentation_shows_this_table() -> None:
    assert markdown() in DOCS.read_text()


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":', ' {"é" : [ '])
def test_no_depth_ends_the_process(opening: str) -> None:
    deep = opening.encode() * 200_000
    payloads = [b'{"x":' + deep, b'{"sender":' + deep, deep, b'{"sender":"a","x":' + deep]
    for path in ("sender", "x.a.a.a", "0.0.0", 'q"'):
        assert read(sampling(inspect_field=path), *payloads) == [None] * 4


def test_depth_ends_no_other_thread() -> None:
    # Given: a thread in the middle of a deep recursion of its own
    limit, turns = sys.getrecursionlimit(), []
    stop = threading.Event()

    def down(levels: int) -> int:
        return 0 if levels == 0 else 1 + down(levels - 1)

    def recurse() -> None:
        while not stop.is_set():
            turns.append(down(limit // 2))

    thread = threading.Thread(target=recurse)
    thread.start()
    deep = beside(levels(DEEP))
    # When: documents are read that are too deep
    try:
        assert read(sampling(), *[deep, b'{"sender": "a"}'] * 200) == [None, "a"] * 200
    finally:
        stop.set()
        thread.join()
    # Then: the limit is what it was, for everybody
    assert sys.getrecursionlimit() == limit
    assert set(turns) == {limit // 2}


def test_a_usual_depth_is_no_matter_and_a_wrong_force_field_costs_no_key() -> None:
    nested = b'{"a":[' * 200 + b"1" + b"]}" * 200
    assert read(sampling(), beside(nested)) == ["a"]
    how = sampling(inspect_force_field="force.copy")
    assert read(how, b'{"sender": "a", "force": 5}', b'{"sender": 6, "force": []}') == ["a", "6"]


TRUE = [b'{"sender": "a", "force_copy": true}', b'{"force_copy": true}', b'{"sender": 7, "force_copy": true}']
NOT_TRUE = ["false", "null", '"true"', "1", "{}", "[true]", 'true, "force_copy": false']
OTHERS = [*(f'{{"sender": "a", "force_copy": {each}}}'.encode() for each in NOT_TRUE)]
OTHERS += [b'{"sender": "a"}', b'{"force_copy": true', b""]


@pytest.mark.parametrize("by", ["inspect_field", "inspect_subject_token"])
def test_only_true_forces(by: str) -> None:
    # stream-replicator forces where the field merely exists, even where it is false
    value = {"inspect_field": "sender", "inspect_subject_token": 1}[by]
    how = sampling(**{"inspect_field": ""} | {by: value, "inspect_force_field": "force_copy"})
    for payload in (*TRUE, *OTHERS):
        rows = Columns([1, 2], [0, 0], [b"s", b"s"], [None, None], [b'{"sender": 1}', payload])
        assert KeyReader(how).read(rows)[1] == [False, payload in TRUE], payload


@pytest.mark.parametrize(
    ("key", "force", "payload", "found"),
    [
        ("node.name", "node.force", b'{"node": {"name": "a", "force": true}}', "a"),
        ("node.name", "force", b'{"node": {"name": "a"}, "force": true}', "a"),
        ("node.name", "nodes.0", b'{"node": {"name": "a"}, "nodes": [true]}', "a"),
        ("node", "node.force", b'{"node": {"force": true}}', None),
        ("node", "node", b'{"node": true}', "true"),
    ],
)
def test_the_force_field_may_stand_anywhere(key: str, force: str, payload: bytes, found: str | None) -> None:
    rows = Columns([1], [0], [b"s"], [None], [payload])
    assert KeyReader(sampling(inspect_field=key, inspect_force_field=force)).read(rows) == ([found], [True])


def test_paths() -> None:
    paths = {"sender": ("sender",), "a.b.c": ("a", "b", "c"), r"a\.b.c": ("a.b", "c"), r"a\\.b": ("a\\", "b")}
    paths |= {r"\a": ("a",), "a\\": ("a\\",), "a..b": ("a", "", "b")}
    assert {text: parse_path(text) for text in paths} == paths
