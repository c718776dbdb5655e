"""Keys from payloads, headers and subjects, the settings of sampling, and when a key is due again."""

import hashlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from common.archive.columns import Columns
from common.settings.egress import FeedSettings
from egress.sampling.keys import MAX_JSON_DEPTH, KeyReader, SamplingSettings, parse_path
from egress.sampling.sampler import period_ns
from tests.support.sampling import HOUR, SECOND, sampling

# Payloads

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "sample.md"
DEEP = 10_000


def levels(count: int) -> bytes:
    return b"[" * count + b"]" * count


def sender(text: str) -> bytes:
    return b'{"sender": "' + text.encode() + b'"}'


def beside(value: bytes) -> bytes:
    return b'{"sender": "a", "x": ' + value + b"}"


# Payloads and keys that the page cannot show verbatim
PAYLOADS = {
    "space around": b' \n{ "sender" : "a" }\t',
    "empty payload": b"",
    "a byte order mark first": b"\xef\xbb\xbf" + sender("a"),
    "UTF-16": sender("a").decode().encode("utf-16"),
    "not UTF-8": b'{"sender": "\xff"}',
    "not UTF-8 elsewhere": beside(b'"\xff"'),
    "a key of 1,024 bytes": sender("é" * 512),
    "a longer key": sender("é" * 512 + "a"),
    "500 levels": beside(levels(MAX_JSON_DEPTH - 1)),
    "501 levels": beside(levels(MAX_JSON_DEPTH)),
    "10,000 levels elsewhere": beside(levels(DEEP)),
    "10,000 levels as the field": b'{"sender": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "10,000 levels on the way": b'{"node": ' + levels(DEEP) + b"}",
}
KEYS = {"escapes": 'é\n"\\', "a key of 1,024 bytes": "é" * 512}
TABLE = (
    DOCS.read_text().partition("| payload | path | for example | key |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
)
CASES = [row[2:-2].split(" | ") for row in TABLE.splitlines()]


def read(how: SamplingSettings, *payloads: bytes, subject: bytes = b"s", blocks: Any = None) -> list[str | None]:
    count = len(payloads)
    rows = Columns([*range(1, count + 1)], [0] * count, [subject] * count, blocks or [None] * count, list(payloads))
    return KeyReader(how).read(rows)[0]


@pytest.mark.parametrize(("what", "path", "payload", "key"), CASES)
def test_the_table_of_the_documentation(what: str, path: str, payload: str, key: str) -> None:
    path, raw = path.strip("`"), PAYLOADS.get(what, payload[1:-1].encode())
    found = KEYS.get(what, None if key == "none" else key.strip("`"))
    how = sampling(inspect_field=path)
    assert read(how, raw) == [found]
    # Payloads read before make no difference: after a number the reader uses another method, with the same result.
    number = b'{"sender": 5, "node": {"name": 5}, "nodes": [{"name": 1}, 5], "node.name": 5, "a\\"b": 5}'
    assert read(how, number, raw, b"{", raw)[1::2] == [found] * 2
    # A force field makes no difference, on another path or on the same.
    assert read(sampling(inspect_field=path, inspect_force_field="force.copy"), raw, number, raw)[::2] == [found] * 2
    assert read(sampling(inspect_field=path, inspect_force_field=path), raw) == [found]


def test_the_table_has_what_it_cannot_show() -> None:
    assert len(CASES) > 50
    assert PAYLOADS.keys() | KEYS.keys() <= {what for what, *_ in CASES}


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":', ' {"é" : [ '])
def test_no_depth_ends_the_process(opening: str) -> None:
    deep = opening.encode() * 200_000
    payloads = [b'{"x":' + deep, b'{"sender":' + deep, deep, b'{"sender":"a","x":' + deep]
    for path in ("sender", "x.a.a.a", "0.0.0", 'q"'):
        assert read(sampling(inspect_field=path), *payloads) == [None] * 4


def test_depth_ends_no_other_thread() -> None:
    # Given: a thread in the middle of a deep recursion of its own
    limit, turns, stop = sys.getrecursionlimit(), list[int](), threading.Event()

    def down(levels: int) -> int:
        return 0 if levels == 0 else 1 + down(levels - 1)

    def recurse() -> None:
        while not stop.is_set():
            turns.append(down(limit // 2))

    thread = threading.Thread(target=recurse)
    thread.start()
    # When: too deep documents are read
    try:
        assert read(sampling(), *[beside(levels(DEEP)), sender("a")] * 100) == [None, "a"] * 100
    finally:
        stop.set()
        thread.join()
    # Then: the limit is unchanged for all threads
    assert (sys.getrecursionlimit(), {*turns}) == (limit, {limit // 2})


TRUE = [b'{"sender": "a", "force_copy": true}', b'{"force_copy": true}', b'{"sender": 7, "force_copy": true}']
NOT_TRUE = ["false", "null", '"true"', "1", "{}", "[true]", 'true, "force_copy": false']
OTHERS = [*(f'{{"sender": "a", "force_copy": {each}}}'.encode() for each in NOT_TRUE)]
OTHERS += [b'{"sender": "a"}', b'{"force_copy": true', b""]


@pytest.mark.parametrize("by", ["inspect_field", "inspect_subject_token"])
def test_only_true_forces_and_another_value_costs_no_key(by: str) -> None:
    # stream-replicator forces if the field merely exists, even if it is false
    value = {"inspect_field": "sender", "inspect_subject_token": 1}[by]
    how = sampling(**{"inspect_field": ""} | {by: value, "inspect_force_field": "force_copy"})
    for payload in (*TRUE, *OTHERS):
        rows = Columns([1, 2], [0, 0], [b"s", b"s"], [None, None], [b'{"sender": 1}', payload])
        assert KeyReader(how).read(rows)[1] == [False, payload in TRUE], payload
    how = sampling(inspect_force_field="force.copy")
    assert read(how, b'{"sender": "a", "force": 5}', b'{"sender": 6, "force": []}') == ["a", "6"]


def test_paths() -> None:
    paths = {"sender": ("sender",), "a.b.c": ("a", "b", "c"), r"a\.b.c": ("a.b", "c"), r"a\\.b": ("a\\", "b")}
    paths |= {r"\a": ("a",), "a\\": ("a\\",), "a..b": ("a", "", "b")}
    assert {text: parse_path(text) for text in paths} == paths


# Headers and subjects


def by_header(name: str, *blocks: bytes | None) -> list[str | None]:
    return read(sampling(inspect_field="", inspect_header=name), *[b"{}"] * len(blocks), blocks=[*blocks])


def header(line: bytes) -> bytes:
    return b"NATS/1.0\r\n" + line + b"\r\n\r\n"


def test_the_first_header_of_the_name() -> None:
    for block, key in (
        (None, None),
        (header(b"Node: a"), "a"),
        (header(b"Node:a"), "a"),
        (header(b"Node:  a b \t"), "a b"),
        (header(b"node: a\r\nNode: b"), "a"),
        (header(b"Nodes: a\r\nXNode: b"), None),
        (header(b"X: Node: a"), None),
        (header(b"Node:"), None),
        (header(b"Node: \xe9"), "\\xe9"),
        (header(b"Node: " + b"a" * 1024), "a" * 1024),
        (header(b"Node: " + b"a" * 1025), None),
        (b"Node: a", None),
        (b"", None),
    ):
        assert by_header("Node", block) == [key]
        assert by_header("N.de", block, header(b"N.de: b")) == [None, "b"], "a name is text and no pattern"


def test_a_token_of_the_subject() -> None:
    for token, subject, key in (
        (1, b"a.b.c", "a"),
        (3, b"a.b.c", "c"),
        (4, b"a.b.c", None),
        (-1, b"a.b.c", "a.b.c"),
        (2, b"a.\xff.c", "\\xff"),
        (2, b"a..c", None),
        (1, b"a" * 1025, None),
    ):
        assert read(sampling(inspect_field="", inspect_subject_token=token), b"{}", subject=subject) == [key]


def test_a_feed_without_a_key_is_not_sampled_and_values_are_in_nanoseconds() -> None:
    assert (
        SamplingSettings.from_feed(FeedSettings.model_validate({"stream": "S", "max_age": 60.0, "relay": True})) is None
    )
    how = sampling(inspect_duration=90.5, warn_duration=0.0, size_trigger="1K", max_age=30.0, relay=True)
    assert (how.duration_ns, how.warn_ns) == (90_500_000_000, 45_250_000_000)
    assert (how.size_trigger, how.max_age_ns, how.relay) == (1024, 30 * SECOND, True)


def test_the_digest_follows_what_changes_choices_and_nothing_else() -> None:
    by_another = {"inspect_header": "sender"}, {"inspect_subject_token": 1}, {"inspect_subject_token": 2}
    changes = [{}, {"inspect_field": "sender2"}, *({"inspect_field": ""} | key for key in by_another)]
    changes += [{"inspect_force_field": "force"}, {"inspect_duration": 3601.0}, {"size_trigger": "1K"}]
    changes += [{"max_age": 60.0}, {"relay": True}]
    digests = [sampling(**change).digest for change in changes]
    assert len(set(digests)) == len(changes)
    assert all(len(digest) == 64 for digest in digests)
    for same in ({"warn_duration": 60.0}, {"snapshot_interval": 5.0}, {"advisory": {"subject": "A"}}):
        assert sampling(**same).digest == digests[0]


def test_the_digest_is_that_of_every_release() -> None:
    # A change of the digest makes every site rebuild its samplers: change it only by raising FOLD.
    text = (
        '{"fold":1,"inspect_duration_ns":3600000000000,"inspect_field":"sender","inspect_force_field":"",'
        '"inspect_header":"","inspect_subject_token":0,"max_age_ns":0,"relay":false,"size_trigger":0}'
    )
    assert sampling().digest == hashlib.sha256(text.encode()).hexdigest()


def test_the_spread_is_a_tenth_and_even() -> None:
    for duration in (SECOND, HOUR, 365 * 24 * HOUR):
        slack = min(SECOND, duration // 100)
        spreads = [duration - slack - period_ns(f"node-{number}", duration) for number in range(5000)]
        assert 0 <= min(spreads) < duration // 1000
        assert duration // 10 - duration // 1000 < max(spreads) < duration // 10
        tenths = [0] * 10
        for spread in spreads:
            tenths[spread * 100 // duration] += 1
        assert all(400 < count < 600 for count in tenths)


def test_the_spread_is_that_of_every_release_and_process() -> None:
    for key in ("a", "é", ""):
        share = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
        assert period_ns(key, HOUR) == 3599 * SECOND - (share * 360 * SECOND >> 64)
