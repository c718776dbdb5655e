"""Advisories: documents for stream-replicator's readers, ids, loops; and the outbox, which loses nothing."""

import json
from typing import Any

import pytest

from common.chain import Chain
from common.clock import NS_PER_S, format_time
from common.errors import FloeError, OutcomeUnknown, Unavailable
from common.nats.api import StreamInfo
from common.nats.protocol import ApiError
from common.settings.egress import FeedSettings
from egress.advisories import advisory as advisory_module
from egress.advisories import senders
from egress.advisories.advisory import Advisory, AdvisoryEvent, encode_ksuid, event_id, loop_error, parse_advisory
from egress.partition import partitions_of
from tests.support.basics import seeded
from tests.support.clock import ManualClock

CHAIN, SEEN = Chain("US_EAST", "NODE_DATA"), 1_647_351_430 * NS_PER_S
# The example in stream-replicator's documentation.
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
    event: AdvisoryEvent = AdvisoryEvent.TIMEOUT,
    value: str = "node1",
    seen_ns: int = SEEN,
    event_time_ns: int = SEEN + 662 * NS_PER_S,
) -> Advisory:
    return Advisory(event, value, seen_ns, event_time_ns)


def written(each: Advisory) -> dict[str, Any]:
    return json.loads(advisory_module.build_document(CHAIN, "sender", each).to_json())  # type: ignore[no-any-return]


# The published layout of KSUIDs: README of segmentio/ksuid, and its least and greatest values.
def test_a_ksuid_follows_its_specification_and_a_time_out_of_range_is_cut() -> None:
    assert (
        encode_ksuid(1_507_608_047, bytes.fromhex("B5A1CD34B5F99D1154FB6853345C9735")) == "0ujtsYcgvSTl8PAuAdqWYSMnLOv"
    )
    assert [encode_ksuid(each, bytes(16)) for each in (1_400_000_000, 0)] == ["0" * 27] * 2
    latest = [encode_ksuid(each, b"\xff" * 16) for each in (1_400_000_000 + 2**32 - 1, 10**12)]
    assert latest == ["aWgEPTl1tmebfsQzFP4bxwgy80V"] * 2


def test_a_document_has_the_keys_and_types_of_stream_replicator() -> None:
    theirs, ours = json.loads(SR), written(advisory(value="some.host.example.net"))
    kinds, expected = ([(key, type(value)) for key, value in each.items()] for each in (ours, theirs))
    assert kinds == expected
    own = {"event_id": ours["event_id"], "age": 662, "replicator": "US_EAST", "timestamp": 1_647_352_092}
    assert ours == theirs | own


def test_the_age_is_rounded_as_go_does_and_never_negative_and_times_are_cut_to_seconds() -> None:
    halves = {0: 0, NS_PER_S // 2 - 1: 0, NS_PER_S // 2: 1, 3 * NS_PER_S // 2: 2, 5 * NS_PER_S // 2: 3, -NS_PER_S: 0}
    assert {gap: written(advisory(event_time_ns=SEEN + gap))["age"] for gap in halves} == halves
    late = written(advisory(AdvisoryEvent.NEW, seen_ns=SEEN + NS_PER_S - 1, event_time_ns=SEEN + NS_PER_S - 1))
    assert (late["seen"], late["timestamp"], late["age"]) == (1_647_351_430, 1_647_351_430, 0)


def test_an_id_depends_on_its_advisory_and_on_nothing_else() -> None:
    chains = [CHAIN, Chain("US_EAS", "TNODE_DATA"), CHAIN.next_incarnation(), Chain("US_EAST", "NODE_DATA", 0, 1)]
    changes: list[dict[str, Any]] = [{}, {"event": AdvisoryEvent.EXPIRE}, {"value": "node11"}, {"seen_ns": SEEN + 1}]
    changes.append({"event_time_ns": SEEN + 662 * NS_PER_S + 1})
    ids = [event_id(chain, advisory(**change)) for chain in chains for change in changes]

    assert len(set(ids)) == len(ids)
    later = [event_id(CHAIN, advisory(event_time_ns=SEEN + n * NS_PER_S)) for n in (0, 1, 59, 3600, 86_400, 10**8)]
    assert (later, {*map(len, later)}) == (sorted(later), {27})
    assert event_id(Chain("US_EAST", "NODE_DATA"), advisory()) == ids[0]
    assert ids[0] == "26QNx2nKoE3iRd6dKcLDD66eh5O"  # must never change: streams know it


def test_any_value_is_json_and_comes_back() -> None:
    for value in ("ü☃", 'a"b\\c', "a\nb\x00", "\ud800", "x" * 1024):
        raw = advisory_module.build_document(CHAIN, "sender", advisory(value=value)).to_json()
        assert (b"\n" in raw, parse_advisory(raw).value) == (False, value.encode("utf-8", "backslashreplace").decode())


def test_documents_of_stream_replicator_are_read() -> None:
    found = parse_advisory(SR)
    assert (found.event, found.age, found.replicator, found.seen) == ("timeout", 3600, "US-EAST", 1_647_351_430)
    assert parse_advisory(SR.replace(b"3600", b"3600.5")).age == 3600.5
    assert parse_advisory(SR.replace(b"1647351430", b"-62135596800")).seen == -62_135_596_800  # never seen
    for payload in (b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000):
        assert parse_advisory(payload) is None
    for right, wrong in ((b"v2", b"v1"), (b"3600", b'"3600"'), (b"1647351430", b"1e400")):
        assert parse_advisory(SR.replace(right, wrong)) is None


def test_inspect_field_names_what_is_sampled_by() -> None:
    keys: list[dict[str, Any]] = [{"inspect_field": "a.b"}, {"inspect_header": "X-Node"}]
    keys += [{"inspect_subject_token": each} for each in (2, -1)]
    feeds = [FeedSettings.model_validate({"stream": "S", "inspect_duration": "1h", **each}) for each in keys]
    assert [*map(advisory_module.key_name, feeds)] == ["a.b", "X-Node", "subject.2", "subject"]


# Advisories that would come back into the stream that they report on


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
    assert {each: advisory_module.find_loop(each[0], each[1].split(), each[2]) for each in found} == found


def stream(*subjects: str) -> StreamInfo:
    return StreamInfo("LOOP", "", {"name": "LOOP", "subjects": list(subjects)}, 0, 0, 0, "", "", "")


def feed(**keys: object) -> FeedSettings:
    sampled = {"inspect_subject_token": -1, "inspect_duration": "1h"}
    return FeedSettings.model_validate({"stream": "LOOP", **sampled, **keys})


def test_the_error_names_the_subjects_and_the_ways_out() -> None:
    [part] = partitions_of("site", feed(advisory={"subject": "loop.adv.%s.%v"}))
    error = loop_error(part, part.chain, stream("loop.>"))
    text = "site/LOOP/0000/0: advisories on loop.adv.new.> would be messages of stream LOOP itself (loop.>)"
    assert (error.code, error.message.startswith(text)) == ("E-ADVISORY-LOOP", True)
    for way in ("advisory.subject", "filter_subject that excludes loop.adv.*.>"):
        assert way in error.hint
    [part] = partitions_of("site", feed())
    assert loop_error(part, part.chain, stream(">")) is None, "a feed without advisories"
    parts = partitions_of("site", feed(advisory={"subject": "loop.adv.%s"}, partitions=["loop.a.>", "loop.adv.>"]))
    first, second = [loop_error(part, part.chain, stream("loop.>")) for part in parts]
    assert first is None, "only the partition that reads them stops"
    assert "(loop.>, of which loop.adv.> is read)" in second.message


SECOND = 1_000_000_000
HOUR = 3600 * SECOND


def new(value: str, at: int = 1) -> Advisory:
    return Advisory(AdvisoryEvent.NEW, value, at, at)


def test_a_wave_holds_one_of_each_value_is_bounded_and_values_that_fail_do_not_hold_up_the_others() -> None:
    outbox = senders.Outbox()
    outbox.add([new("0"), *(new(str(n), 2) for n in range(senders.MAX_IN_FLIGHT + 10))])
    first = list(outbox.next_batch())
    assert first == [new("0"), *(new(str(n), 2) for n in range(1, senders.MAX_IN_FLIGHT))]
    for advisory in first:
        outbox.requeue(advisory, doubtful=False)

    assert [each.value for each in outbox.next_batch()[:10]] == [
        str(n) for n in range(senders.MAX_IN_FLIGHT, senders.MAX_IN_FLIGHT + 10)
    ]


def test_what_a_snapshot_holds_and_reading_again_finds_is_there_once_and_a_lost_answer_makes_doubtful() -> None:
    outbox = senders.Outbox()
    outbox.add([new("a", 1)], doubtful=True)
    outbox.add([new("a", 1), new("a", 2)], doubtful=True)

    assert (outbox.pending(), len(outbox)) == ((new("a", 1), new("a", 2)), 2)
    outbox.mark_not_stored(list(outbox.doubtful))
    outbox.requeue(new("a", 1), doubtful=True)
    assert (outbox.next_batch(), outbox.pending()) == ([], (new("a", 1), new("a", 2)))


def test_room_ends_before_the_limit_and_what_is_on_its_way_still_fits() -> None:
    outbox = senders.Outbox()
    outbox.add(new(str(n)) for n in range(senders.HIGH_WATER_ADVISORIES - 1))
    assert outbox.has_room
    outbox.add([new("x")])
    assert not outbox.has_room
    outbox.add(new(f"y{n}") for n in range(senders.MAX_WAITING_ADVISORIES - senders.HIGH_WATER_ADVISORIES))

    assert len(outbox) == len(outbox.pending()) == senders.MAX_WAITING_ADVISORIES
    outbox.remove(new("x"))
    assert not outbox.has_room


@pytest.mark.parametrize("seed", range(8))
def test_any_course_of_events_sends_all_in_order_for_each_value(seed: int) -> None:
    random = seeded(seed)
    found = [new(str(random.randrange(40)), at) for at in range(600)]
    outbox, done = senders.Outbox(), set[Advisory]()
    outbox.add(found[:300], doubtful=True)
    outbox.add(found[300:])
    while len(outbox):
        if random.random() < 0.3:
            doubtful = list(outbox.doubtful)
            for advisory in doubtful:
                if random.random() < 0.5:
                    outbox.remove(advisory)
                    done.add(advisory)
            outbox.mark_not_stored(doubtful)
        assert outbox.doubtful.isdisjoint(outbox.next_batch())
        for advisory in outbox.next_batch():
            before = [each for each in found[: advisory.event_time_ns] if each.value == advisory.value]
            assert done.issuperset(before), "sent before its predecessor was done"
            chance = random.random()
            if chance < 0.6:
                outbox.remove(advisory)
                done.add(advisory)
            else:
                outbox.requeue(advisory, doubtful=chance < 0.8)
        assert done.isdisjoint(outbox.pending())
        assert (done.union(outbox.pending()), len(outbox)) == (set(found), len(outbox.pending()))


def ack(**fields: object) -> bytes:
    return json.dumps(fields).encode()


ACKNOWLEDGEMENTS = [
    *((each, OutcomeUnknown) for each in (b"", b"+OK", b"[]", ack(), ack(stream="A"), ack(stream="", seq=7))),
    *((ack(stream="A", seq=each), OutcomeUnknown) for each in (0, True, "7")),
    (ack(stream="A", seq=7, duplicate="no"), OutcomeUnknown),
    (ack(error={"code": 503, "err_code": 10077, "description": "maximum messages exceeded"}), ApiError),
    (ack(error={"code": 503, "err_code": 10008, "description": "no leader"}), Unavailable),
    (ack(stream="A", seq=7, error={"code": 400}), ApiError),
]


@pytest.mark.parametrize(("payload", "error"), ACKNOWLEDGEMENTS)
def test_only_an_acknowledgement_of_a_stream_counts(payload: bytes, error: type[FloeError]) -> None:
    with pytest.raises(error):
        senders.parse_ack("s", payload)
    assert senders.parse_ack("s", ack(stream="A", domain="hub", seq=7)) is senders.SendResult.STORED
    assert senders.parse_ack("s", ack(stream="A", seq=7, duplicate=True)) is senders.SendResult.DUPLICATE


@pytest.mark.parametrize(("duration", "limit"), [(HOUR, 2 * HOUR), (SECOND, 300 * SECOND)], ids=["long", "short"])
def test_two_durations_or_a_restart_later_it_is_no_news_but_new_stays_true(duration: int, limit: int) -> None:
    now = int(ManualClock().now()) * SECOND
    for event in AdvisoryEvent:
        late = [
            senders.is_late(Advisory(event, "a", 0, now - gap), now, duration) for gap in (limit + 1, limit, -duration)
        ]
        assert late == [event is not AdvisoryEvent.NEW, False, False]


async def test_a_step_of_the_hosts_clock_makes_no_advisory_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    checks = senders.LatenessCheck(Any, "S", HOUR, clock)  # type: ignore[arg-type]

    async def stream_info(*_: object) -> StreamInfo:
        return StreamInfo("S", "", {}, 1, 1, 1, "", "", "", format_time(int(clock.now()) * SECOND))

    monkeypatch.setattr(senders, "stream_info", stream_info)
    found = Advisory(AdvisoryEvent.TIMEOUT, "a", 0, (int(clock.now()) - 3 * 3600) * SECOND)
    assert await checks.find_late([found]) == {found}
    fresh = Advisory(AdvisoryEvent.TIMEOUT, "a", 0, int(clock.now()) * SECOND)
    clock._now += 3 * 3600
    assert await checks.find_late([fresh, found]) == {found}
