"""Captures: one object for each, the newest at or below a sequence, read with doubt."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from common.chain import Chain
from common.errors import DataError
from common.objects.local import LocalObjects
from common.segments.captures import (
    Captured,
    CapturedConfig,
    CapturedConsumer,
    CapturedConsumers,
    CapturedDeletions,
    CapturedRestore,
    CaptureStore,
    deleted_ranges,
    to_json,
)
from common.segments.keys import CAPTURES, CaptureName, Layout

CHAIN, LAYOUT = Chain("us-east", "NODES", 1), Layout("data")
CREATED = "2026-11-20T10:00:00.123456789Z"
CONSUMER = CapturedConsumer({"name": "app", "ack_policy": "explicit"}, CREATED, 12, 11, 9, 8, 3, 1)


def at(second: int) -> str:
    return f"2026-11-20T10:00:{second:02d}Z"


def config(end: int, second: int = 0, **keys: object) -> CapturedConfig:
    return CapturedConfig(at(second), end, CREATED, {"name": "NODES", **keys})


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


@pytest.fixture
def captures(objects: LocalObjects) -> CaptureStore:
    return CaptureStore(LAYOUT, objects)


def test_captures_come_back_as_they_were_made(captures: CaptureStore) -> None:
    consumers = CapturedConsumers(at(1), 10, (CONSUMER, msgspec.structs.replace(CONSUMER, paused=True)))
    deletions = CapturedDeletions(at(1), 10, 2, 12, ((3, 3), (5, 9)))
    for each in (config(10), consumers, deletions):
        assert captures.put(CHAIN, each)
        assert not captures.put(Chain("us-east", "NODES", 1, 3), each), "the partition does not matter"
    assert captures.config(CHAIN) == config(10)
    assert captures.consumers(CHAIN) == consumers
    assert captures.deletions(CHAIN) == deletions
    assert consumers.consumers[0].name == "app"
    assert CapturedConsumers(at(1), 0, ()).consumers == ()


def test_the_newest_at_or_below_a_sequence_is_meant(captures: CaptureStore) -> None:
    for end in (5, 100, 20):
        captures.put(CHAIN, config(end))
    assert captures.config(CHAIN) == config(100)
    assert captures.config(CHAIN, 99) == captures.config(CHAIN, 20) == config(20)
    assert captures.config(CHAIN, 4) is None
    assert captures.consumers(CHAIN) is None
    assert captures.config(Chain("us-east", "NODES", 2)) is None
    assert [ref.end for ref in captures.ls(CHAIN, "config")] == [5, 20, 100]


def test_of_one_end_that_which_was_taken_last_is_meant(captures: CaptureStore) -> None:
    for second in (3, 9, 1):
        captures.put(CHAIN, config(7, second))
    assert captures.config(CHAIN) == config(7, 9)


def test_deletions_count_from_where_the_archive_has_what_the_stream_had(captures: CaptureStore) -> None:
    early, late = CapturedDeletions(at(0), 0, 1, 100, ()), CapturedDeletions(at(1), 100, 101, 200, ())
    for each in (early, late):
        captures.put(CHAIN, each)
    assert captures.deletions(CHAIN, 99) is None
    assert captures.deletions(CHAIN, 100) == captures.deletions(CHAIN, 199) == early
    assert captures.deletions(CHAIN, 200) == captures.deletions(CHAIN) == late
    # A restore to 150 lost what is behind it: the stream has others there since, also up to 200 and further.
    captures.put(CHAIN, CapturedRestore(at(2), 150, CREATED, CREATED, {}))
    assert captures.deletions(CHAIN, 300) == early
    since = CapturedDeletions(at(3), 160, 1, 300, ((7, 7),))
    captures.put(CHAIN, since)
    assert captures.deletions(CHAIN, 299) == early
    assert captures.deletions(CHAIN, 300) == since


def test_what_is_not_a_capture_is_passed_over(captures: CaptureStore, objects: LocalObjects) -> None:
    captures.put(CHAIN, config(5))
    objects.put(f"{LAYOUT.captures_prefix(CHAIN, 'config')}{9:020d}-junk.json", b"{}")
    assert captures.config(CHAIN) == config(5)


def stored(objects: LocalObjects, end: int, raw: bytes, kind: str = "config", digest: str = "") -> None:
    digest = digest or hashlib.sha256(raw).hexdigest()[:16]
    objects.put(LAYOUT.capture(CaptureName(CHAIN, kind, end, digest)), raw)


GOOD = to_json(config(5))


@pytest.mark.parametrize(
    ("raw", "digest", "why"),
    [
        (GOOD, "0" * 16, "digest of its name"),
        (to_json(config(6)), "", "expected end 5 of its name, found 6"),
        (GOOD.replace(b'"format_version":1', b'"format_version":2'), "", "format_version"),
        (GOOD.replace(at(0).encode(), b"yesterday"), "", "expected a time"),
        (GOOD.replace(b'"end":5', b'"end":-5'), "", "end: expected 0"),
        (b"not json", "", "malformed"),
    ],
)
def test_a_spoiled_capture_is_never_acted_on(
    captures: CaptureStore, objects: LocalObjects, raw: bytes, digest: str, why: str
) -> None:
    stored(objects, 5, raw, digest=digest)
    with pytest.raises(DataError, match=why) as refusal:
        captures.config(CHAIN)
    assert refusal.value.code == "E-STATE-JSON"


@pytest.mark.parametrize(
    "deleted",
    [((0, 1),), ((5, 4),), ((2, 3), (3, 4)), ((8, 13),), ((6, 6), (4, 4))],
    ids=["below", "reversed", "overlapping", "beyond", "descending"],
)
def test_deletions_are_ranges_of_the_stream_in_order(deleted: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="deleted: expected"):
        CapturedDeletions(at(0), 5, 1, 12, deleted)


def test_a_consumer_has_a_name_and_positions() -> None:
    wrongs: tuple[dict[str, object], ...] = (
        {"config": {}},
        {"delivered_stream": -1},
        {"ack_pending": 2**63},
        {"created": "soon"},
    )
    for wrong in wrongs:
        with pytest.raises(ValueError, match="expected"):
            CapturedConsumer(**{"config": {"name": "a"}, "created": CREATED, **wrong})  # type: ignore[arg-type]


def test_sequences_become_ranges() -> None:
    assert deleted_ranges([]) == ()
    assert deleted_ranges([3, 4, 5, 9, 11, 12]) == ((3, 5), (9, 9), (11, 12))


@pytest.mark.parametrize("kind", CAPTURES)
def test_the_key_of_a_capture_is_read_back_and_is_a_document(kind: str) -> None:
    name = CaptureName(CHAIN, kind, 0, "0123456789abcdef")
    key = LAYOUT.capture(name)
    assert key == f"data/_floe/site=us-east/feed=NODES/incarnation=0001/{kind}/{0:020d}-0123456789abcdef.json"
    assert LAYOUT.parse_capture(key) == name
    assert not LAYOUT.is_foreign(key)
    assert not LAYOUT.may_be_put_away(key)
    assert [LAYOUT.parse_segment(key), LAYOUT.parse_state(key), LAYOUT.parse_chain_document(key)] == [None] * 3
    for junk in (f"{key}x", key.replace(kind, "others"), key.replace(f"{0:020d}", "9" * 20)):
        assert LAYOUT.parse_capture(junk) is None
        assert LAYOUT.is_foreign(junk)
    for wrong in (CaptureName(CHAIN, "other", 0, "0" * 16), CaptureName(CHAIN, kind, -1, "0" * 16)):
        with pytest.raises(ValueError, match="expected"):
            LAYOUT.capture(wrong)


def test_what_is_captured_has_one_form(captures: CaptureStore) -> None:
    one: Captured = config(5, b=1, a=2)
    assert to_json(one) == to_json(config(5, a=2, b=1))


def test_a_restored_stream_is_known_by_each_time_that_a_cluster_may_say(captures: CaptureStore) -> None:
    alone = CapturedRestore(at(9), 10, created=at(5), was=at(2), ends={0: 10})
    clustered = msgspec.structs.replace(alone, seen=at(8))
    assert captures.put(CHAIN, clustered)
    assert captures.restored(CHAIN) == clustered
    assert [second for second in range(10) if alone.is_of(at(second))] == [5]
    # That of the lost one, and of those before it, is no time of this one; nor is what was made later.
    assert [second for second in range(10) if clustered.is_of(at(second))] == [3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="expected"):
        CapturedRestore(at(9), 10, at(5), at(2), {0: 10}, "soon")
