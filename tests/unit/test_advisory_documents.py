"""Advisories: documents as stream-replicator's readers expect them, ids that follow from content, and loops."""

from __future__ import annotations

import json
from typing import Any

from common.chain import Chain
from common.clock import NS_PER_S
from common.jetstream.api import StreamInfo
from common.settings.egress import FeedSettings
from egress.advisories.advisory import (
    Advisory,
    Event,
    document_of,
    event_id,
    fed_back,
    inspect_field,
    ksuid,
    loop_of,
    parse,
)
from egress.partition import partitions_of

CHAIN = Chain("US_EAST", "NODE_DATA")
SEEN = 1_647_351_430 * NS_PER_S
# The example of stream-replicator's documentation.
SR = b"""{
  "protocol": "io.choria.sr.v2.age_advisory",
  "event_id": "26QSY17sb9aJL6UPPG6MLOVjIrE",
  "inspect_field": "sender",
  "age": 3600,
  "seen": 1647351430,
  "replicator": "US-EAST",
  "timestamp": 1647355030,
  "event": "timeout",
  "value": "some.host.example.net"
}"""


def advisory(
    event: Event = Event.TIMEOUT, value: str = "node1", seen_ns: int = SEEN, moment_ns: int = SEEN + 662 * NS_PER_S
) -> Advisory:
    return Advisory(event, value, seen_ns, moment_ns)


def written(each: Advisory) -> dict[str, Any]:
    return json.loads(document_of(CHAIN, "sender", each).to_json())  # type: ignore[no-any-return]


# The published layout of KSUIDs: README of segmentio/ksuid, and its least and greatest values.
def test_a_ksuid_is_what_its_authors_say_and_a_time_that_it_cannot_hold_is_cut() -> None:
    assert ksuid(1_507_608_047, bytes.fromhex("B5A1CD34B5F99D1154FB6853345C9735")) == "0ujtsYcgvSTl8PAuAdqWYSMnLOv"
    assert [ksuid(each, bytes(16)) for each in (1_400_000_000, 0)] == ["0" * 27] * 2
    latest = [ksuid(each, b"\xff" * 16) for each in (1_400_000_000 + 2**32 - 1, 10**12)]
    assert latest == ["aWgEPTl1tmebfsQzFP4bxwgy80V"] * 2


def test_a_document_has_the_keys_and_types_of_stream_replicator() -> None:
    theirs, ours = json.loads(SR), written(advisory(value="some.host.example.net"))
    kinds, expected = ([(key, type(value)) for key, value in each.items()] for each in (ours, theirs))
    assert kinds == expected
    own = {"event_id": ours["event_id"], "age": 662, "replicator": "US_EAST", "timestamp": 1_647_352_092}
    assert ours == theirs | own


def test_the_age_is_rounded_as_go_does_and_never_negative_and_times_are_cut_to_seconds() -> None:
    halves = {0: 0, NS_PER_S // 2 - 1: 0, NS_PER_S // 2: 1, 3 * NS_PER_S // 2: 2, 5 * NS_PER_S // 2: 3, -NS_PER_S: 0}
    assert {gap: written(advisory(moment_ns=SEEN + gap))["age"] for gap in halves} == halves
    late = written(advisory(Event.NEW, seen_ns=SEEN + NS_PER_S - 1, moment_ns=SEEN + NS_PER_S - 1))
    assert (late["seen"], late["timestamp"], late["age"]) == (1_647_351_430, 1_647_351_430, 0)


def test_an_id_says_everything_about_its_advisory_and_nothing_else() -> None:
    chains = [CHAIN, Chain("US_EAS", "TNODE_DATA"), CHAIN.next_incarnation(), Chain("US_EAST", "NODE_DATA", 0, 1)]
    changes: list[dict[str, Any]] = [{}, {"event": Event.EXPIRE}, {"value": "node11"}, {"seen_ns": SEEN + 1}]
    changes.append({"moment_ns": SEEN + 662 * NS_PER_S + 1})
    ids = [event_id(chain, advisory(**change)) for chain in chains for change in changes]

    assert len(set(ids)) == len(ids)
    later = [event_id(CHAIN, advisory(moment_ns=SEEN + n * NS_PER_S)) for n in (0, 1, 59, 3600, 86_400, 10**8)]
    assert (later, {*map(len, later)}) == (sorted(later), {27})
    assert event_id(Chain("US_EAST", "NODE_DATA"), advisory()) == ids[0]
    assert ids[0] == "26QNx2nKoE3iRd6dKcLDD66eh5O"  # must never change: streams know it


def test_any_value_is_json_and_comes_back() -> None:
    for value in ("ü☃", 'a"b\\c', "a\nb\x00", "\ud800", "x" * 1024):
        raw = document_of(CHAIN, "sender", advisory(value=value)).to_json()
        assert (b"\n" in raw, parse(raw).value) == (False, value.encode("utf-8", "backslashreplace").decode())


def test_documents_of_stream_replicator_are_read() -> None:
    found = parse(SR)
    assert (found.event, found.age, found.replicator, found.seen) == ("timeout", 3600, "US-EAST", 1_647_351_430)
    assert parse(SR.replace(b"3600", b"3600.5")).age == 3600.5
    assert parse(SR.replace(b"1647351430", b"-62135596800")).seen == -62_135_596_800  # never seen
    for payload in (b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000):
        assert parse(payload) is None
    for right, wrong in ((b"v2", b"v1"), (b"3600", b'"3600"'), (b"1647351430", b"1e400")):
        assert parse(SR.replace(right, wrong)) is None


def test_inspect_field_names_what_is_sampled_by() -> None:
    keys: list[dict[str, Any]] = [{"inspect_field": "a.b"}, {"inspect_header": "X-Node"}]
    keys += [{"inspect_subject_token": each} for each in (2, -1)]
    feeds = [FeedSettings.model_validate({"stream": "S", "inspect_duration": "1h", **each}) for each in keys]
    assert [*map(inspect_field, feeds)] == ["a.b", "X-Node", "subject.2", "subject"]


# Advisories that would come back into the stream that they tell about


def test_what_can_come_back_is_named_and_nothing_else() -> None:
    found = {
        ("loop.adv.%s.%v", "loop.>", ""): ("loop.adv.new.>", "loop.>"),
        ("adv.%s.%v", "loop.> adv.*.a.b", ""): ("adv.new.>", "adv.*.a.b"),
        ("adv.%s", "adv.expire", ""): ("adv.expire", "adv.expire"),
        ("loop.adv.%s", "loop.>", "loop.*.recover"): ("loop.adv.recover", "loop.>"),
        ("loop.adv.%v", "loop.*.a loop.data.>", "loop.*.*"): ("loop.adv.>", "loop.*.a"),
        ("adv.%s.%v", "loop.>", ""): None,
        ("loop.%s", "loop.data loop.*.x", ""): None,  # no event is called data
        ("loop.adv.%s.%v", "loop.>", "loop.data.>"): None,
        ("loop.adv.%s.%v", "loop.>", "loop.adv"): None,
        ("loop.adv.%s", "loop.adv.x loop.data.>", "loop.>"): None,
        ("adv.%s.%v", "", ""): None,  # a mirror
    }
    assert {each: fed_back(each[0], each[1].split(), each[2]) for each in found} == found


def stream(*subjects: str) -> StreamInfo:
    return StreamInfo("LOOP", "", {"name": "LOOP", "subjects": list(subjects)}, 0, 0, 0, "", "", "")


def feed(**keys: object) -> FeedSettings:
    sampled = {"inspect_subject_token": -1, "inspect_duration": "1h"}
    return FeedSettings.model_validate({"stream": "LOOP", **sampled, **keys})


def test_the_error_names_the_subjects_and_the_ways_out() -> None:
    [part] = partitions_of("site", feed(advisory={"subject": "loop.adv.%s.%v"}))
    error = loop_of(part, part.chain, stream("loop.>"))
    told = "site/LOOP/0000/0: advisories on loop.adv.new.> would be messages of stream LOOP itself (loop.>)"
    assert (error.code, error.message.startswith(told)) == ("E-ADVISORY-LOOP", True)
    for way in ("advisory.subject", "filter_subject that leaves loop.adv.*.> out"):
        assert way in error.hint
    [part] = partitions_of("site", feed())
    assert loop_of(part, part.chain, stream(">")) is None, "a feed without advisories"
    parts = partitions_of("site", feed(advisory={"subject": "loop.adv.%s"}, partitions=["loop.a.>", "loop.adv.>"]))
    first, second = [loop_of(part, part.chain, stream("loop.>")) for part in parts]
    assert first is None, "only the partition that reads them stops"
    assert "(loop.>, of which loop.adv.> is read)" in second.message
