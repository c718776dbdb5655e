"""The outbox: nothing lost, one at a time for each value, doubtful ones kept back with what follows them."""

from __future__ import annotations

import json

import pytest

from common.errors import FloeError, OutcomeUnknown, Unavailable
from common.jetstream.requests import ApiError
from egress.advisories.advisory import Advisory, Event
from egress.advisories.outbox import HIGH_WATER, LIMIT, WAVE, Outbox, SendResult, is_late, judge_ack
from tests.support.basics import cases, seeded
from tests.support.clock import ManualClock

SECOND = 1_000_000_000
HOUR = 3600 * SECOND


def new(value: str, at: int = 1) -> Advisory:
    return Advisory(Event.NEW, value, at, at)


def test_a_wave_holds_one_of_each_value_is_bounded_and_values_that_fail_do_not_hold_up_the_others() -> None:
    outbox = Outbox()
    outbox.add([new("0"), *(new(str(n), 2) for n in range(WAVE + 10))])
    first = list(outbox.wave())
    assert first == [new("0"), *(new(str(n), 2) for n in range(1, WAVE))]
    for advisory in first:
        outbox.put_back(advisory, doubtful=False)

    assert [each.value for each in outbox.wave()[:10]] == [str(n) for n in range(WAVE, WAVE + 10)]


def test_what_is_doubtful_waits_with_all_that_follows_it() -> None:
    outbox = Outbox()
    outbox.add([new("a", 1), new("b", 1)], doubtful=True)
    outbox.add([new("a", 2), new("c", 1)])

    assert outbox.wave() == [new("c", 1)]
    assert list(outbox.doubtful) == [new("a", 1), new("b", 1)]

    outbox.remove(new("a", 1))
    outbox.trust([new("b", 1)])
    assert set(outbox.wave()) == {new("a", 2), new("b", 1), new("c", 1)}
    assert not outbox.doubtful


def test_what_a_snapshot_holds_and_reading_again_finds_is_there_once_and_a_lost_answer_makes_doubtful() -> None:
    outbox = Outbox()
    outbox.add([new("a", 1)], doubtful=True)
    outbox.add([new("a", 1), new("a", 2)], doubtful=True)

    assert (outbox.pending(), len(outbox)) == ((new("a", 1), new("a", 2)), 2)
    outbox.trust(list(outbox.doubtful))
    outbox.put_back(new("a", 1), doubtful=True)
    assert (outbox.wave(), outbox.pending()) == ([], (new("a", 1), new("a", 2)))


def test_room_ends_before_the_limit_and_what_is_on_its_way_still_fits() -> None:
    outbox = Outbox()
    outbox.add(new(str(n)) for n in range(HIGH_WATER - 1))
    assert outbox.has_room
    outbox.add([new("x")])
    assert not outbox.has_room
    outbox.add(new(f"y{n}") for n in range(LIMIT - HIGH_WATER))

    assert len(outbox) == len(outbox.pending()) == LIMIT
    outbox.remove(new("x"))
    assert not outbox.has_room


@pytest.mark.parametrize("seed", range(8))
def test_any_course_of_events_sends_all_in_order_for_each_value(seed: int) -> None:
    random = seeded(seed)
    found = [new(str(random.randrange(40)), at) for at in range(600)]
    outbox, done = Outbox(), set[Advisory]()
    outbox.add(found[:300], doubtful=True)
    outbox.add(found[300:])
    while len(outbox):
        if random.random() < 0.3:
            doubtful = list(outbox.doubtful)
            for advisory in doubtful:
                if random.random() < 0.5:
                    outbox.remove(advisory)
                    done.add(advisory)
            outbox.trust(doubtful)
        for advisory in outbox.wave():
            before = [each for each in found[: advisory.moment_ns] if each.value == advisory.value]
            assert done.issuperset(before), "sent before its predecessor was done"
            chance = random.random()
            if chance < 0.6:
                outbox.remove(advisory)
                done.add(advisory)
            else:
                outbox.put_back(advisory, doubtful=chance < 0.8)
        assert done.isdisjoint(outbox.pending())
        assert done.union(outbox.pending()) == set(found)
        assert len(outbox) == len(outbox.pending())


def ack(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@cases(
    "payload, error",
    *((each, OutcomeUnknown) for each in (b"", b"+OK", b"[]", ack(), ack(stream="A"), ack(stream="", seq=7))),
    *((ack(stream="A", seq=each), OutcomeUnknown) for each in (0, True, "7")),
    (ack(stream="A", seq=7, duplicate="no"), OutcomeUnknown),
    (ack(error={"code": 503, "err_code": 10077, "description": "maximum messages exceeded"}), ApiError),
    (ack(error={"code": 503, "err_code": 10008, "description": "no leader"}), Unavailable),
    (ack(stream="A", seq=7, error={"code": 400}), ApiError),
)
def test_only_an_acknowledgement_of_a_stream_counts(payload: bytes, error: type[FloeError]) -> None:
    with pytest.raises(error):
        judge_ack("s", payload)
    assert judge_ack("s", ack(stream="A", domain="hub", seq=7)) is SendResult.STORED
    assert judge_ack("s", ack(stream="A", seq=7, duplicate=True)) is SendResult.DUPLICATE


@pytest.mark.parametrize(("duration", "limit"), [(HOUR, 2 * HOUR), (SECOND, 300 * SECOND)], ids=["long", "short"])
def test_two_durations_or_a_restart_later_it_is_no_news_but_new_stays_true(duration: int, limit: int) -> None:
    now = int(ManualClock().now()) * SECOND
    for event in Event:
        late = [is_late(Advisory(event, "a", 0, now - gap), now, duration) for gap in (limit + 1, limit, -duration)]
        assert late == [event is not Event.NEW, False, False]
