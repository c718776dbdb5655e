"""The sampler, case by case: what the models of the other tests do not reach."""

from __future__ import annotations

from typing import Any

import pytest

from egress.advisories.advisory import Advisory, Event
from egress.sampling.key_table import CHUNK, Notice, period_ns
from egress.sampling.sampler import SampledBatch, Sampler
from egress.sampling.stage import Quiet
from tests.support.sampling import HOUR, MINUTE, SECOND, START, batch, sampling

HOW = sampling(size_trigger="1K")
WARN = 12 * MINUTE


def choose(sampler: Sampler, *messages: tuple[Any, ...]) -> SampledBatch:
    """Messages as (key, time[, size[, forced]])."""
    whole = [(*message, *(100, False)[len(message) - 2 :]) for message in messages]
    keys, times, sizes, forced = (list(column) for column in zip(*whole, strict=True))
    return sampler.choose(keys, forced, times, sizes)


def known(sampler: Sampler) -> dict[str, tuple[int, int, int, Notice]]:
    return {k.value: (k.seen_ns, k.copied_ns, k.size, k.notice) for k in sampler.freeze().known()}


def test_a_batch_is_read_and_counted() -> None:
    how = sampling(inspect_force_field="force")
    documents = [b'{"sender": "a"}', b'{"sender": "a"}', b"no", b'{"sender": "a", "force": true}', b'{"force": true}']
    choices = Sampler(how).fold(batch([(START + n, raw) for n, raw in enumerate(documents)]))
    assert list(choices.kept) == [1, 0, 1, 1, 1]
    assert choices.keys == ["a", "a", None, "a", None]
    assert (choices.missing, choices.forced) == (2, 2)
    assert choices.advisories == [Advisory(Event.NEW, "a", START, START)]


def test_the_period_ends_to_the_nanosecond() -> None:
    period = period_ns("a", HOUR)
    for early, kept in ((1, 0), (0, 1)):
        sampler = Sampler(HOW)
        regular = [("a", time) for time in range(START, START + period - early, 5 * MINUTE)]
        choices = choose(sampler, *regular, ("a", START + period - early))
        assert list(choices.kept) == [1, *[0] * (len(regular) - 1), kept]


def test_time_is_told_once_and_in_order() -> None:
    sampler = Sampler(HOW)
    choose(sampler, *[(key, START + place // 2) for place, key in enumerate("dcba")])

    def told(at: int) -> list[tuple[Event, str]]:
        return [(a.event, a.value) for a in sampler.advance(at)]

    assert told(START + WARN) == []
    assert told(START + WARN + 1) == [(Event.TIMEOUT, "c"), (Event.TIMEOUT, "d")]
    ends = [(Event.TIMEOUT, "a"), (Event.TIMEOUT, "b"), (Event.EXPIRE, "c"), (Event.EXPIRE, "d")]
    assert (told(START + HOUR), sampler.values) == (ends, 2)
    assert told(START + HOUR) == told(0) == []
    assert told(START + HOUR + 1) == [(Event.EXPIRE, "a"), (Event.EXPIRE, "b")]
    assert (told(START + 1000 * HOUR), sampler.values) == ([], 0)


def test_the_servers_time_tells_and_changes_no_choice() -> None:
    """A server whose clock is ahead of the one that stamps messages."""
    sampler = Sampler(HOW)
    choose(sampler, ("a", START))
    assert [a.event for a in sampler.advance(START + WARN + 1)] == [Event.TIMEOUT]
    assert choose(sampler, ("a", START + 1)).advisories == [Advisory(Event.RECOVER, "a", START, START + 1)]
    assert choose(sampler, ("a", START + 2)).advisories == []
    assert [a.event for a in sampler.advance(START + 2 * HOUR)] == [Event.TIMEOUT, Event.EXPIRE]
    assert sampler.values == 0
    # The messages decide what is kept, and who was told of its end is told of its return.
    choices = choose(sampler, ("a", START + MINUTE), ("a", START + 2 * MINUTE))
    assert list(choices.kept) == [0, 0]
    assert choices.advisories == [Advisory(Event.NEW, "a", START + MINUTE, START + MINUTE)]
    assert sampler.values == 1


def test_a_frozen_state_stays_as_it_was() -> None:
    # Given: more keys than one list holds, and some of them forgotten
    sampler = Sampler(HOW)
    count = CHUNK * 2 + 5
    choose(sampler, *[(f"k{number}", START + number) for number in range(count)])
    state = sampler.freeze()
    before = {k.value: k for k in state.known()}
    copy = Sampler(HOW, state)
    # When: every place changes
    choose(sampler, ("later", START + HOUR + count // 2))
    sampler.advance(0)
    assert sampler.values == count - count // 2
    choose(sampler, *[(f"n{number}", START + HOUR + count) for number in range(count)])
    sampler.advance(0)
    assert sampler.values == count + 1
    second = sampler.freeze()
    choose(copy, *[(f"k{number}", START + count, 7000) for number in range(count)])
    # Then: the state does not
    assert {k.value: k for k in state.known()} == before
    assert state.count() == len(before) == count
    assert second.count() == count + 1
    assert {k.value for k in second.known()} == {f"n{number}" for number in range(count)} | {"later"}


def test_places_are_used_again() -> None:
    sampler = Sampler(sampling(inspect_duration=100.0, warn_duration=0.0), tracks=False)
    sampler.advance(START)
    for round_ in range(50):
        now = START + round_ * 200 * SECOND
        choose(sampler, *[(f"k{round_}-{number}", now) for number in range(1000)])
        sampler.advance(0)
        assert sampler.values == 1000
    assert len(sampler.freeze().notices) == 2000  # those of one round, and of the one before


def test_settled_keys_count_as_seen_and_settling_takes_nothing_back() -> None:
    sampler = Sampler(HOW)
    choose(sampler, ("a", START), ("b", START + MINUTE))
    sampler.settle(START + 1)
    assert {key: entry[0] for key, entry in known(sampler).items()} == {"a": START + 1, "b": START + MINUTE}
    assert len(sampler.advance(START + MINUTE + WARN)) == 1
    sampler.settle(START + 2 * WARN)
    assert {entry[3] for entry in known(sampler).values()} == {0}, "nobody is told of its return"
    sampler = Sampler(HOW)
    sampler.learn(["a", "b", None, "a"], [START, START + 1, START + 2, START + 3], [10, 20, 30, 40])
    assert known(sampler) == {"a": (START + 3, START + 3, 40, 0), "b": (START + 1, START + 1, 20, 0)}
    assert sampler.watermark_ns == START + 3
    at = START + 10 * HOUR
    sampler.settle(at)
    assert sampler.advance(at + WARN) == []
    choices = choose(sampler, ("a", at + 1), ("c", at + 2), (None, at + WARN + 2))
    assert list(choices.kept) == [1, 1, 1]
    assert choices.advisories == [Advisory(Event.NEW, "c", at + 2, at + 2)]
    assert sampler.advance(0) == [
        Advisory(Event.TIMEOUT, "b", at, at + WARN),
        Advisory(Event.TIMEOUT, "a", at + 1, at + 1 + WARN),
    ]


@pytest.mark.parametrize("time", [2**63 - 1, 2**63 - HOUR // 2])
def test_a_message_of_the_last_hour_that_a_server_can_write_is_sampled_like_any_other(time: int) -> None:
    """What is due or told of behind 2^63 ns counts as due then; a clock set back brings time back."""
    sampler = Sampler(HOW)
    choices = choose(sampler, ("a", time - 3 * HOUR), ("a", time), ("b", time), ("b", time))
    assert list(choices.kept)[:3] == [1, 1, 1]
    found = [*choices.advisories, *sampler.advance(2**63 - 1)]
    assert all(0 <= each.seen_ns <= each.moment_ns < 2**63 for each in found)
    state = sampler.freeze()
    assert Sampler(HOW, state).freeze() == state
    assert {each.value: each.seen_ns for each in state.known()} == {"a": time, "b": time}
    assert list(choose(sampler, ("a", START), ("a", START + HOUR)).kept) == [0, 1]
    assert known(sampler)["a"][0] == START + HOUR


# When the clock of a server may be believed to say how long nothing has come


def test_a_time_is_believed_once_all_is_folded_in_that_a_later_answer_knows_of_and_one_missing_begins_anew() -> None:
    quiet = Quiet()
    quiet.heard(10, 1_000)
    assert quiet.until(10) is None
    quiet.heard(10, 2_000)
    assert (quiet.until(9), quiet.until(10)) == (None, 1_000)
    quiet.heard(10, 3_000)
    assert quiet.until(10) == 2_000
    quiet.forget()
    quiet.heard(10, 4_000)
    assert quiet.until(10) is None


def test_a_deposed_leader_is_found_out() -> None:
    """It answered at 1,000 that nothing had come since 10; its successor knows of 11, which came before."""
    quiet = Quiet()
    quiet.heard(10, 1_000)
    quiet.heard(11, 2_000)
    assert (quiet.until(10), quiet.waits(10), quiet.until(11)) == (None, True, 1_000)


def test_what_comes_for_others_does_not_keep_time_from_passing() -> None:
    """A partition of a busy stream: each answer is further than the last, heartbeats follow."""
    quiet = Quiet()
    quiet.heard(100, 1_000)
    assert not quiet.waits(120)
    quiet.heard(200, 2_000)
    assert quiet.until(210) == 1_000
    quiet.heard(300, 3_000)
    assert quiet.until(300) == 2_000
