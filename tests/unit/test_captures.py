"""Captures: one object for each, found by sequence or time, and validated when read."""

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.archive import captures as captures_module
from common.archive.captures import CapturedDeletions, CapturedRestore, CaptureStore, outside_effects, to_json
from common.archive.keys import CAPTURES, CaptureName, Layout
from common.chain import Chain
from common.clock import NS_PER_S, format_time, parse_time
from common.errors import DataError, Unavailable
from common.objects.local import LocalObjects
from tests.support.basics import raises_code
from tests.support.clock import ManualClock
from tests.support.stores import CountingObjects, DatedObjects, answering, refusing_conditions

CHAIN, LAYOUT = Chain("us-east", "NODES", 1), Layout("data")
NAME, CREATED = "us-east/NODES/0001/0", "2026-11-20T10:00:00.123456789Z"
BEGIN = 1_763_632_800  # seconds since 1970
CONSUMER = captures_module.CapturedConsumer({"name": "app", "ack_policy": "explicit"}, CREATED, 12, 11, 9, 8, 3, 1)


def at(second: int) -> str:
    return f"2026-11-20T10:00:{second:02d}Z"


def config(end: int, second: int = 0, ts: str = "", **keys: object) -> captures_module.CapturedConfig:
    return captures_module.CapturedConfig(at(second), end, CREATED, {"name": "NODES", **keys}, chain=NAME, ts=ts)


def deletions(second: int, end: int, first: int, last: int, *deleted: tuple[int, int]) -> CapturedDeletions:
    return CapturedDeletions(at(second), end, first, last, deleted, chain=NAME)


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


@pytest.fixture
def captures(objects: LocalObjects) -> CaptureStore:
    return CaptureStore(LAYOUT, objects)


def test_captures_come_back_as_they_were_made(captures: CaptureStore, objects: LocalObjects) -> None:
    found = (CONSUMER, msgspec.structs.replace(CONSUMER, paused=True))
    consumers = captures_module.CapturedConsumers(at(1), 10, found, chain=NAME, ts=at(2))
    gone = deletions(1, 10, 2, 12, (3, 3), (5, 9))
    for each in (config(10), consumers, gone):
        assert captures.put(CHAIN, each)
        assert not captures.put(Chain("us-east", "NODES", 1, 3), each), "the partition does not matter"
    reads = (captures.config, captures.consumers, captures.deletions)
    assert [read(CHAIN) for read in reads] == [config(10), consumers, gone]
    with pytest.raises(Unavailable, match="never read back"):
        CaptureStore(LAYOUT, refusing_conditions(objects).on("put", answering(None))).put(CHAIN, config(11))
    assert (consumers.consumers[0].name, to_json(config(5, b=1, a=2))) == ("app", to_json(config(5, a=2, b=1)))
    ranges = [captures_module.deleted_ranges(gone) for gone in ([], [3, 4, 5, 9, 11, 12])]
    assert ranges == [(), ((3, 5), (9, 9), (11, 12))]


def test_the_newest_at_or_below_a_sequence_is_meant(captures: CaptureStore, objects: LocalObjects) -> None:
    for end, second in ((5, 0), (100, 3), (100, 9), (20, 0)):
        captures.put(CHAIN, config(end, second))
    objects.put(f"{LAYOUT.captures_prefix(CHAIN, 'config')}{900:020d}-junk.json", b"{}")  # not a capture
    assert (captures.config(CHAIN), captures.config(CHAIN, 99)) == (config(100, 9), config(20))
    assert captures.config(CHAIN, None, parse_time(at(8))) == config(100, 3), "of egress, where the server told none"
    assert captures.config(CHAIN, 4) is captures.consumers(CHAIN) is None
    assert captures.config(Chain("us-east", "NODES", 2)) is None
    assert [ref.end for ref in captures.list_captures(CHAIN, "config")] == [5, 20, 100, 100]


def test_a_capture_of_another_feed_is_refused_and_one_that_names_none_is_read(
    captures: CaptureStore, objects: LocalObjects
) -> None:
    other = Chain("us-east", "OTHER", 1)
    captures.put(other, config(5))
    [ref] = captures.list_captures(other, "config")
    raw = objects.get(ref.key) or b""
    stored(objects, 5, raw)
    with pytest.raises(DataError, match=f"expected chain {NAME} of its name, found us-east/OTHER/0001/0"):
        captures.config(CHAIN)
    objects.delete(LAYOUT.capture(CaptureName(CHAIN, "config", 5, ref.name.digest)))
    stored(objects, 5, raw.replace(b'"chain":"us-east/OTHER/0001/0",', b""))
    assert captures.config(CHAIN) == msgspec.structs.replace(config(5), chain="")


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40), st.integers(-1, 200), st.integers(0, 50))
def test_the_newest_of_many_captures_is_found_at_or_before_a_moment(
    steps: list[tuple[int, int]], moment: int, upto: int
) -> None:
    """Compare with a brute force on a store with whole seconds and a quiet stream with many captures of one end."""
    clock, put, end = ManualClock(BEGIN), list[CapturedDeletions](), 0
    with tempfile.TemporaryDirectory() as folder:
        captures = CaptureStore(LAYOUT, DatedObjects(LocalObjects(Path(folder)), clock))
        for number, (more, seconds) in enumerate(steps):
            clock.advance(seconds)
            end, ts = end + more, format_time(int(clock.now()) * NS_PER_S + number)
            put.append(CapturedDeletions(at(0), end, 1, end, (), chain=NAME, ts=ts))
            captures.put(CHAIN, put[-1])
        moment_ns = (BEGIN + moment) * NS_PER_S + 20
        fitting = [each for each in put if each.end <= upto and each.moment_ns <= moment_ns]
        assert captures.deletions(CHAIN, upto, moment_ns) == (fitting[-1] if fitting else None)


def test_a_moment_long_ago_is_found_by_few_reads(tmp_path: Path) -> None:
    clock, objects = ManualClock(BEGIN), CountingObjects(tmp_path)
    captures = CaptureStore(LAYOUT, DatedObjects(objects, clock))
    for _ in range(150):
        clock.advance(300)
        captures.put(CHAIN, config(7, ts=format_time(int(clock.now()) * NS_PER_S)))
    found = captures.config(CHAIN, 7, (BEGIN + 300 * 40 + 299) * NS_PER_S)
    assert found.moment_ns == (BEGIN + 300 * 40) * NS_PER_S
    assert objects.read <= 10 * len(to_json(found))


def test_deletions_count_from_where_the_archive_has_what_the_stream_had(captures: CaptureStore) -> None:
    early, late = deletions(0, 0, 1, 100), deletions(1, 100, 101, 200)
    for each in (early, late):
        captures.put(CHAIN, each)
    assert captures.deletions(CHAIN, 99) is None
    assert captures.deletions(CHAIN, 100) == captures.deletions(CHAIN, 199) == early
    assert captures.deletions(CHAIN, 200) == captures.deletions(CHAIN) == late
    # A restore to 150 lost all later messages: the stream has others there since, also up to 200 and further.
    captures.put(CHAIN, CapturedRestore(at(2), 150, CREATED, CREATED, {}))
    assert captures.deletions(CHAIN, 300) == early
    since = deletions(3, 160, 1, 300, (7, 7))
    captures.put(CHAIN, since)
    assert (captures.deletions(CHAIN, 299), captures.deletions(CHAIN, 300)) == (early, since)


def stored(objects: LocalObjects, end: int, raw: bytes, kind: str = "config", digest: str = "") -> None:
    digest = digest or hashlib.sha256(raw).hexdigest()[:16]
    objects.put(LAYOUT.capture(CaptureName(CHAIN, kind, end, digest)), raw)


GOOD, FOREIGN = to_json(config(5)), f"expected chain {NAME} of its name, found us-east/NODES/0000/0"


CORRUPTIONS = [
    (b'"end":5', b'"end":6', "expected end 5 of its name, found 6"),
    (b"NODES/0001", b"NODES/0000", FOREIGN),
    (b'"chain":"', b'"ts":"soon","chain":"', "expected a time"),
    (b'"format_version":1', b'"format_version":2', "format_version"),
    (at(0).encode(), b"yesterday", "expected a time"),
    (b'"end":5', b'"end":-5', "end: expected 0"),
    (GOOD, b"not json", "malformed"),
    (GOOD, GOOD, "digest of its name"),
]


@pytest.mark.parametrize(("right", "wrong", "why"), CORRUPTIONS)
def test_a_corrupt_capture_is_never_acted_on(
    captures: CaptureStore, objects: LocalObjects, right: bytes, wrong: bytes, why: str
) -> None:
    stored(objects, 5, GOOD.replace(right, wrong), digest="0" * 16 if right == wrong else "")
    with raises_code(DataError, "E-STATE-JSON", match=why):
        captures.config(CHAIN)


def test_deletions_are_ranges_of_the_stream_in_order_and_a_consumer_has_a_name_and_positions() -> None:
    below, overlapping, descending = ((0, 1),), ((2, 3), (3, 4)), ((6, 6), (4, 4))
    for deleted in (below, overlapping, descending, ((5, 4),), ((8, 13),)):
        with pytest.raises(ValueError, match="deleted: expected"):
            CapturedDeletions(at(0), 5, 1, 12, deleted)
    wrongs: tuple[dict[str, Any], ...] = ({"config": {}}, {"delivered_stream": -1}, {"ack_pending": 2**63})
    for wrong in (*wrongs, {"created": "soon"}):
        with pytest.raises(ValueError, match="expected"):
            captures_module.CapturedConsumer(**{"config": {"name": "a"}, "created": CREATED, **wrong})


ODD_NAMES = ("..", "a/b", "a.b", ">", "", "a\\b", "a b", "\n", 5)
ODD_SOURCES = ({"name": "UP"}, ["UP"], [{}], [{"name": 1}], [{"name": "UP", "external": 1}])
ODD_CONFIGS: list[dict[str, Any]] = [
    *({key: name} for key in ("name", "durable_name") for name in ODD_NAMES),
    *({"subjects": found} for found in ("a.>", [1], {"a": 1})),
    *({key: "1"} for key in ("num_replicas", "max_age", "max_msgs", "first_seq", "allow_rollup_hdrs")),
    *({"sources": found} for found in ODD_SOURCES),
    *({key: ["a"]} for key in ("metadata", "mirror", "republish", "deliver_subject")),
]


@pytest.mark.parametrize("config", ODD_CONFIGS)
def test_names_and_types_of_a_configuration_are_checked_before_it_is_used(
    captures: CaptureStore, objects: LocalObjects, config: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=re.escape(next(iter(config)))):
        captures_module.check_config(config)
    document = {"format_version": 1, "at": at(0), "end": 5, "created": CREATED, "config": config}
    stored(objects, 5, json.dumps(document).encode())
    with raises_code(DataError, "E-STATE-JSON"):
        captures.config(CHAIN)
    with pytest.raises((ValueError, TypeError)):
        captures_module.CapturedConsumer({"name": "plain", **config}, CREATED)


@pytest.mark.parametrize("kind", CAPTURES)
def test_a_key_that_is_almost_one_of_a_capture_is_foreign(kind: str) -> None:
    key = LAYOUT.capture(CaptureName(CHAIN, kind, 0, "0123456789abcdef"))
    for junk in (f"{key}x", key.replace(kind, "others"), key.replace(f"{0:020d}", "9" * 20)):
        assert (LAYOUT.parse_capture(junk), LAYOUT.is_foreign(junk)) == (None, True)
    for wrong in (CaptureName(CHAIN, "other", 0, "0" * 16), CaptureName(CHAIN, kind, -1, "0" * 16)):
        with pytest.raises(ValueError, match="expected"):
            LAYOUT.capture(wrong)


def test_a_restored_stream_is_known_by_each_time_a_cluster_may_report(captures: CaptureStore) -> None:
    alone = CapturedRestore(at(9), 10, created=at(5), was=at(2), ends={0: 10})
    clustered = msgspec.structs.replace(alone, seen=at(8), chain=NAME)
    assert captures.put(CHAIN, clustered)
    assert captures.restored(CHAIN) == clustered
    assert [second for second in range(10) if alone.has_created(at(second))] == [5]
    # The creation time of the lost stream or of an earlier one does not match this one; nor does a later time.
    assert [second for second in range(10) if clustered.has_created(at(second))] == [3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="expected"):
        CapturedRestore(at(9), 10, at(5), at(2), {0: 10}, "soon")


def test_a_stream_name_of_a_bucket_that_is_not_the_feeds_is_an_effect_elsewhere() -> None:
    assert [*outside_effects("other", {"name": "KV_R"}, {})] == ["stream 'KV_R': the name of a bucket, expected other"]
    assert [*outside_effects("KV_R", {"name": "KV_R"}, {})] == [*outside_effects("other", {"name": "R"}, {})] == []
