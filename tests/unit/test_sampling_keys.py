"""Keys from headers and subjects, the settings of sampling, and when a key is due again."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from common.segments.columns import Columns
from common.settings.egress import FeedSettings
from egress.sampling.key_reader import KeyReader
from egress.sampling.key_table import period_ns
from egress.sampling.sampler import Sampler
from egress.sampling.settings import Sampling
from tests.support.sampling import HOUR, MINUTE, SECOND, START, sampling


def keys_of(how: Sampling, subjects: list[bytes], blocks: list[bytes | None]) -> list[str | None]:
    count = len(subjects)
    return KeyReader(how).read(Columns([*range(count)], [0] * count, subjects, blocks, [b"{}"] * count))[0]


def by_header(name: str, *blocks: bytes | None) -> list[str | None]:
    return keys_of(sampling(inspect_field="", inspect_header=name), [b"s"] * len(blocks), list(blocks))


def header(line: bytes) -> bytes:
    return b"NATS/1.0\r\n" + line + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("block", "key"),
    [
        (None, None),
        (b"NATS/1.0\r\n\r\n", None),
        (header(b"Node: a"), "a"),
        (header(b"Node:a"), "a"),
        (header(b"Node:  a b \t"), "a b"),
        (header(b"Node: a\r\nNode: b"), "a"),
        (header(b"node: a\r\nNode: b"), "a"),
        (header(b"Nodes: a\r\nXNode: b"), None),
        (header(b"X: Node: a"), None),
        (header(b"Node:"), None),
        (header(b"Node\r\nX: a"), None),
        (header(b"Node: \xe9"), "\\xe9"),
        (header("Node: é".encode()), "é"),
        (header(b"Node: " + b"a" * 1024), "a" * 1024),
        (header(b"Node: " + b"a" * 1025), None),
        (b"NATS/1.0 503\r\nNode: a\r\n\r\n", "a"),
        (b"Node: a", None),
        (b"", None),
    ],
)
def test_the_first_header_of_the_name(block: bytes | None, key: str | None) -> None:
    assert by_header("Node", block) == [key]
    assert by_header("N.de", block, header(b"N.de: b")) == [None, "b"], "a name is text and no pattern"


@pytest.mark.parametrize(
    ("token", "subject", "key"),
    [
        (1, b"a.b.c", "a"),
        (3, b"a.b.c", "c"),
        (4, b"a.b.c", None),
        (255, b"a", None),
        (-1, b"a.b.c", "a.b.c"),
        (2, b"a.\xff.c", "\\xff"),
        (2, "a.é".encode(), "é"),
        (2, b"a..c", None),
        (-1, b"\xff", "\\xff"),
        (1, b"a" * 1025, None),
    ],
)
def test_a_token_of_the_subject(token: int, subject: bytes, key: str | None) -> None:
    assert keys_of(sampling(inspect_field="", inspect_subject_token=token), [subject], [None]) == [key]


@pytest.mark.parametrize(
    "by", [{"inspect_header": "Node"}, {"inspect_subject_token": 2}, {"inspect_subject_token": -1}]
)
def test_headers_and_subjects_really_sample(by: dict[str, Any]) -> None:
    # stream-replicator builds its limiter only for inspect_field, and copies everything here
    sampler = Sampler(sampling(inspect_field="", **by))
    times = [START + minute * MINUTE for minute in range(0, 180, 5) for _ in "ab"]
    blocks: list[bytes | None] = [header(b"Node: a"), header(b"Node: b")]
    choices = sampler.fold(Columns([*range(1, 73)], times, [b"n.a", b"n.b"] * 36, blocks * 36, [b"the same"] * 72))
    kept = [number // 2 * 5 for number in range(0, 72, 2) if choices.kept[number]]
    assert kept[0] == 0
    assert 3 <= len(kept) <= 4
    assert all(50 <= after - before <= 60 for before, after in pairwise(kept))
    assert (sampler.values, choices.missing) == (2, 0)


def test_a_feed_without_a_key_is_not_sampled_and_values_are_in_nanoseconds() -> None:
    assert Sampling.of(FeedSettings.model_validate({"stream": "S", "max_age": 60.0, "relay": True})) is None
    how = sampling(inspect_duration=90.5, warn_duration=0.0, size_trigger="1K", max_age=30.0, relay=True)
    assert (how.duration_ns, how.warn_ns) == (90_500_000_000, 45_250_000_000)
    assert (how.size_trigger, how.max_age_ns, how.relay) == (1024, 30 * SECOND, True)


def test_the_digest_follows_what_changes_choices_and_nothing_else() -> None:
    changes = [
        {},
        {"inspect_field": "sender2"},
        {"inspect_field": "", "inspect_header": "sender"},
        {"inspect_field": "", "inspect_subject_token": 1},
        {"inspect_field": "", "inspect_subject_token": 2},
        {"inspect_force_field": "force"},
        {"inspect_duration": 3601.0},
        {"size_trigger": "1K"},
        {"max_age": 60.0},
        {"relay": True},
    ]
    digests = [sampling(**change).digest for change in changes]
    assert len(set(digests)) == len(changes)
    assert all(len(digest) == 64 for digest in digests)
    for same in ({"warn_duration": 60.0}, {"snapshot_interval": 5.0}, {"advisory": {"subject": "A"}}):
        assert sampling(**same).digest == digests[0]


def test_the_digest_is_that_of_every_release() -> None:
    # A change of it makes every site rebuild its samplers: raise FOLD for that, never by accident.
    text = (
        '{"fold":1,"inspect_duration_ns":3600000000000,"inspect_field":"sender","inspect_force_field":"",'
        '"inspect_header":"","inspect_subject_token":0,"max_age_ns":0,"relay":false,"size_trigger":0}'
    )
    assert sampling().digest == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("duration", [SECOND, MINUTE, HOUR, 24 * HOUR, 365 * 24 * HOUR])
def test_the_spread_is_a_tenth_and_even(duration: int) -> None:
    slack = min(SECOND, duration // 100)
    spreads = [duration - slack - period_ns(f"node-{number}", duration) for number in range(5000)]
    assert 0 <= min(spreads) < duration // 1000
    assert duration // 10 - duration // 1000 < max(spreads) < duration // 10
    tenths = [0] * 10
    for spread in spreads:
        tenths[spread * 100 // duration] += 1
    assert all(400 < count < 600 for count in tenths)


def test_the_spread_is_that_of_every_release_and_process() -> None:
    ask = "from egress.sampling.key_table import period_ns;print(*[period_ns(k, 3600 * 10**9) for k in ('a', 'é', '')])"
    found = {
        subprocess.run(
            [sys.executable, "-c", ask], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    expected = []
    for key in ("a", "é", ""):
        u = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
        expected.append(3599 * SECOND - (u * 360 * SECOND >> 64))
    assert found == {" ".join(map(str, expected)) + "\n"}
