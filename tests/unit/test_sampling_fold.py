"""The sampler, case by case: cases that the models of the other tests do not reach."""

from typing import Any

import pytest

from egress.advisories.advisory import Advisory, AdvisoryEvent
from egress.sampling.filters import IdleClock
from egress.sampling.sampler import CHUNK_VALUES, Notice, SampledBatch, Sampler, period_ns
from tests.support.sampling import HOUR, MINUTE, SECOND, START, batch, known_keys, sampling

HOW, WARN = sampling(size_trigger="1K"), 12 * MINUTE


def fold_keys(sampler: Sampler, *messages: tuple[Any, ...]) -> SampledBatch:
    """Fold messages given as (key, time[, size[, forced]])."""
    whole = [(*message, *(100, False)[len(message) - 2 :]) for message in messages]
    keys, times, sizes, forced = (list(column) for column in zip(*whole, strict=True))
    return sampler.fold_keys(keys, forced, times, sizes)


def known(sampler: Sampler) -> dict[str, tuple[int, int, int, Notice]]:
    return {k.value: (k.seen_ns, k.copied_ns, k.size, k.notice) for k in known_keys(sampler.freeze())}


def test_a_batch_is_read_and_counted() -> None:
    how = sampling(inspect_force_field="force")
    documents = [b'{"sender": "a"}', b'{"sender": "a"}', b"no", b'{"sender": "a", "force": true}', b'{"force": true}']
    choices = Sampler(how).fold(batch([(START + n, raw) for n, raw in enumerate(documents)]))
    assert (list(choices.kept), choices.keys) == ([1, 0, 1, 1, 1], ["a", "a", None, "a", None])
    assert (choices.missing, choices.forced) == (2, 2)
    assert choices.advisories == [Advisory(AdvisoryEvent.NEW, "a", START, START)]


def test_the_period_ends_to_the_nanosecond() -> None:
    period = period_ns("a", HOUR)
    for early, kept in ((1, 0), (0, 1)):
        sampler = Sampler(HOW)
        regular = [("a", time) for time in range(START, START + period - early, 5 * MINUTE)]
        choices = fold_keys(sampler, *regular, ("a", START + period - early))
        assert list(choices.kept) == [1, *[0] * (len(regular) - 1), kept]


def test_the_servers_time_changes_no_choice() -> None:
    """Advance by a server with a clock ahead of the one that stamps messages."""
    sampler = Sampler(HOW)
    fold_keys(sampler, ("a", START))
    assert [a.event for a in sampler.advance(START + WARN + 1)] == [AdvisoryEvent.TIMEOUT]
    assert fold_keys(sampler, ("a", START + 1)).advisories == [Advisory(AdvisoryEvent.RECOVER, "a", START, START + 1)]
    assert fold_keys(sampler, ("a", START + 2)).advisories == []
    assert [a.event for a in sampler.advance(START + 2 * HOUR)] == [AdvisoryEvent.TIMEOUT, AdvisoryEvent.EXPIRE]
    assert sampler.value_count == 0
    # The message times decide which messages are kept; a value reported as expired is reported as new when it returns.
    choices = fold_keys(sampler, ("a", START + MINUTE), ("a", START + 2 * MINUTE))
    assert list(choices.kept) == [0, 0]
    assert choices.advisories == [Advisory(AdvisoryEvent.NEW, "a", START + MINUTE, START + MINUTE)]
    assert sampler.value_count == 1


def test_a_frozen_state_stays_as_it_was() -> None:
    # Given: more keys than one list holds, and some of them forgotten
    sampler, count = Sampler(HOW), CHUNK_VALUES * 2 + 5
    fold_keys(sampler, *[(f"k{number}", START + number) for number in range(count)])
    state = sampler.freeze()
    before, copy = {k.value: k for k in known_keys(state)}, Sampler(HOW, state)
    # When: every place changes
    fold_keys(sampler, ("later", START + HOUR + count // 2))
    sampler.advance(0)
    assert sampler.value_count == count - count // 2
    fold_keys(sampler, *[(f"n{number}", START + HOUR + count) for number in range(count)])
    sampler.advance(0)
    assert sampler.value_count == count + 1
    second = sampler.freeze()
    fold_keys(copy, *[(f"k{number}", START + count, 7000) for number in range(count)])
    # Then: the state does not
    assert {k.value: k for k in known_keys(state)} == before
    assert state.count() == len(before) == count
    assert second.count() == count + 1
    assert {k.value for k in known_keys(second)} == {f"n{number}" for number in range(count)} | {"later"}


def test_places_are_used_again() -> None:
    sampler = Sampler(sampling(inspect_duration=100.0, warn_duration=0.0), makes_advisories=False)
    sampler.advance(START)
    for round_ in range(50):
        now = START + round_ * 200 * SECOND
        fold_keys(sampler, *[(f"k{round_}-{number}", now) for number in range(1000)])
        sampler.advance(0)
        assert sampler.value_count == 1000
    assert len(sampler.freeze().notices) == 2000  # those of this round and of the former one


def test_settled_keys_count_as_seen_and_settling_takes_nothing_back() -> None:
    sampler = Sampler(HOW)
    fold_keys(sampler, ("a", START), ("b", START + MINUTE))
    sampler.mark_all_seen(START + 1)
    assert {key: entry[0] for key, entry in known(sampler).items()} == {"a": START + 1, "b": START + MINUTE}
    assert len(sampler.advance(START + MINUTE + WARN)) == 1
    sampler.mark_all_seen(START + 2 * WARN)
    assert {entry[3] for entry in known(sampler).values()} == {0}, "nobody is told of its return"
    sampler = Sampler(HOW)
    sampler.learn(["a", "b", None, "a"], [START, START + 1, START + 2, START + 3], [10, 20, 30, 40])
    assert known(sampler) == {"a": (START + 3, START + 3, 40, 0), "b": (START + 1, START + 1, 20, 0)}
    assert sampler.watermark_ns == START + 3
    at = START + 10 * HOUR
    sampler.mark_all_seen(at)
    assert sampler.advance(at + WARN) == []
    choices = fold_keys(sampler, ("a", at + 1), ("c", at + 2), (None, at + WARN + 2))
    assert (list(choices.kept), choices.advisories) == ([1, 1, 1], [Advisory(AdvisoryEvent.NEW, "c", at + 2, at + 2)])
    assert sampler.advance(0) == [
        Advisory(AdvisoryEvent.TIMEOUT, "b", at, at + WARN),
        Advisory(AdvisoryEvent.TIMEOUT, "a", at + 1, at + 1 + WARN),
    ]


@pytest.mark.parametrize("time", [2**63 - 1, 2**63 - HOUR // 2])
def test_a_message_of_the_last_hour_that_a_server_can_write_is_sampled_like_any_other(time: int) -> None:
    """Cap times beyond 2^63 ns, due or reported, at that limit; a clock set back returns to earlier times."""
    sampler = Sampler(HOW)
    choices = fold_keys(sampler, ("a", time - 3 * HOUR), ("a", time), ("b", time), ("b", time))
    assert list(choices.kept)[:3] == [1, 1, 1]
    found = [*choices.advisories, *sampler.advance(2**63 - 1)]
    assert all(0 <= each.seen_ns <= each.event_time_ns < 2**63 for each in found)
    state = sampler.freeze()
    assert Sampler(HOW, state).freeze() == state
    assert {each.value: each.seen_ns for each in known_keys(state)} == {"a": time, "b": time}
    assert list(fold_keys(sampler, ("a", START), ("a", START + HOUR)).kept) == [0, 1]
    assert known(sampler)["a"][0] == START + HOUR


# The conditions for trusting a server's clock about the time without messages


def test_a_time_is_believed_once_all_is_folded_that_a_later_answer_knows_of_and_one_missing_starts_again() -> None:
    quiet = IdleClock()
    quiet.record_answer(10, 1_000)
    assert quiet.idle_until(10) is None
    quiet.record_answer(10, 2_000)
    assert (quiet.idle_until(9), quiet.idle_until(10)) == (None, 1_000)
    quiet.record_answer(10, 3_000)
    assert quiet.idle_until(10) == 2_000
    quiet.forget()
    quiet.record_answer(10, 4_000)
    assert quiet.idle_until(10) is None


def test_a_deposed_leader_is_found_out() -> None:
    """Distrust a leader that answered at 1,000 with last sequence 10, while its successor holds an earlier 11."""
    quiet = IdleClock()
    quiet.record_answer(10, 1_000)
    quiet.record_answer(11, 2_000)
    assert (quiet.idle_until(10), quiet.has_unread(10), quiet.idle_until(11)) == (None, True, 1_000)


def test_what_comes_for_others_does_not_keep_time_from_passing() -> None:
    """Let time pass for a partition of a busy stream: each answer is further than the last, and heartbeats follow."""
    quiet = IdleClock()
    quiet.record_answer(100, 1_000)
    assert not quiet.has_unread(120)
    quiet.record_answer(200, 2_000)
    assert quiet.idle_until(210) == 1_000
    quiet.record_answer(300, 3_000)
    assert quiet.idle_until(300) == 2_000
