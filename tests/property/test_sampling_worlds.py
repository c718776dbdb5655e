"""The sampler in small worlds full of edges; the model lets time pass for every key at every message."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from common.chain import Chain
from egress.advisories.advisory import Advisory, AdvisoryEvent
from egress.sampling.keys import SamplingSettings
from egress.sampling.sampler import Sampler, period_ns
from egress.sampling.snapshot import Snapshot, decode, encode
from tests.support.sampling import SECOND, START, KnownKey, known_keys, sampling

DURATION, WARN = 100 * SECOND, 30 * SECOND
TRIGGER = 10
EDGES = [0, 1, WARN - 1, WARN, WARN + 1, DURATION - 1, DURATION, DURATION + 1, 3 * DURATION]


@dataclass(frozen=True)
class Sent:
    key: str | None
    time: int
    size: int
    forced: bool


@dataclass
class Model:
    """The rules of docs/guides/sample.md, for one key after the other."""

    trigger: int
    newest: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)
    size: dict[str, int] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    advisories: list[Advisory] = field(default_factory=list)

    def passes(self, sent: Sent) -> bool:
        if sent.time < self.newest - DURATION:
            self.set_back(sent.time)
        self.newest = max(self.newest, sent.time)
        self.time_is(self.newest)
        return sent.key is None or self.of_key(sent.key, self.newest, sent)

    def set_back(self, to: int) -> None:
        for key in self.seen:
            if self.seen[key] > to:
                self.seen[key] = to
                self.warned.discard(key)
            self.copied[key] = min(self.copied[key], to)
        self.newest = to

    def time_is(self, now: int) -> None:
        for key, seen in list(self.seen.items()):
            if now - seen > WARN and key not in self.warned:
                self.warned.add(key)
                self.advisories.append(Advisory(AdvisoryEvent.TIMEOUT, key, seen, seen + WARN))
            if now - seen >= DURATION:
                self.advisories.append(Advisory(AdvisoryEvent.EXPIRE, key, seen, seen + DURATION))
                self.warned.remove(key)
                for known in (self.seen, self.copied, self.size):
                    del known[key]

    def of_key(self, key: str, now: int, sent: Sent) -> bool:
        if key not in self.seen:
            self.advisories.append(Advisory(AdvisoryEvent.NEW, key, now, now))
            passes = True
        else:
            if key in self.warned:
                self.warned.remove(key)
                self.advisories.append(Advisory(AdvisoryEvent.RECOVER, key, self.seen[key], now))
            size = self.size[key]
            passes = (
                sent.forced
                or now - self.copied[key] >= period_ns(key, DURATION)
                or (self.trigger > 0 and abs(sent.size - size) >= self.trigger)
                or (size == 0 and sent.size != 0)
            )
        self.seen[key], self.size[key] = now, sent.size
        if passes:
            self.copied[key] = now
        return passes

    def known(self) -> set[tuple[Any, ...]]:
        return {(key, self.seen[key], self.copied[key], self.size[key]) for key in self.seen}


def how(trigger: int) -> SamplingSettings:
    return sampling(inspect_duration=100.0, warn_duration=30.0, size_trigger=str(trigger))


def known(sampler: Sampler) -> set[tuple[Any, ...]]:
    return {(k.value, k.seen_ns, k.copied_ns, k.size) for k in known_keys(sampler.freeze())}


@st.composite
def worlds(draw: st.DrawFn, backwards: bool = True) -> list[Sent]:
    """Generate messages of a few keys, with pauses at the edges of every rule; the clock may run backwards."""
    back = [-1, -SECOND, -DURATION, -DURATION - 1, -5 * DURATION] if backwards else []
    pauses = st.one_of(st.sampled_from(EDGES), st.integers(0, 40 * SECOND), st.sampled_from(EDGES + back))
    now, found = START, []
    for _ in range(draw(st.integers(1, 40))):
        now += draw(pauses)
        key = draw(st.sampled_from(["a", "b", "c", "d", None]))
        found.append(Sent(key, now, draw(st.sampled_from([0, 1, 9, 10, 11, 20, 21])), draw(st.integers(0, 9)) == 0))
    return found


CUTS = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def fold_keys(sampler: Sampler, sent: list[Sent]) -> Any:
    return sampler.fold_keys(
        [s.key for s in sent], [s.forced for s in sent], [s.time for s in sent], [s.size for s in sent]
    )


def batches(world: list[Sent], cuts: list[int]) -> list[list[Sent]]:
    found, first = [], 0
    while first < len(world):
        count = cuts[len(found) % len(cuts)]
        found.append(world[first : first + count])
        first += count
    return found


@given(worlds(), CUTS, st.sampled_from([0, TRIGGER]), st.integers(0, 1 << 40))
@settings(max_examples=150)
def test_as_the_model(world: list[Sent], cuts: list[int], trigger: int, coins: int) -> None:
    model, sampler = Model(trigger), Sampler(how(trigger))
    expected = [model.passes(sent) for sent in world]
    kept, advisories = bytearray(), []
    for number, some in enumerate(batches(world, cuts)):
        choices = fold_keys(sampler, some)
        kept += choices.kept
        advisories += choices.advisories
        coin = coins >> (2 * number) & 3
        if coin & 1:
            advisories += sampler.advance(sampler.watermark_ns)
        if coin == 2:
            sampler = reborn(sampler, how(trigger))
    advisories += sampler.advance(0)
    event(f"kept {sum(kept) * 4 // len(kept)} quarters")
    assert ([*map(bool, kept)], Counter(advisories)) == (expected, Counter(model.advisories))
    assert (known(sampler), sampler.watermark_ns) == (model.known(), model.newest)
    # and when no more messages come
    end = model.newest + 2 * DURATION
    model.time_is(end)
    advisories += sampler.advance(end)
    assert (Counter(advisories), sampler.value_count) == (Counter(model.advisories), 0)


def reborn(sampler: Sampler, sampled: SamplingSettings, *, makes_advisories: bool = True) -> Sampler:
    before = Snapshot(Chain("s", "f"), 1, sampled.digest, 0, sampler.freeze())
    return Sampler(sampled, decode(b"".join(encode(before))).state, makes_advisories=makes_advisories)


@given(worlds(), CUTS, st.lists(st.tuples(st.integers(0, 3), st.integers(-500, 5000)), max_size=20))
@settings(max_examples=80)
def test_nothing_but_the_log_changes_a_choice(world: list[Sent], cuts: list[int], times: list[tuple[int, int]]) -> None:
    # Given: the result of one fold of all messages
    plain = Sampler(how(TRIGGER))
    expected, silent = fold_keys(plain, world).kept, Sampler(how(TRIGGER), makes_advisories=False)
    found = fold_keys(silent, world)
    assert (found.kept, found.advisories, silent.advance(world[-1].time)) == (expected, [], [])
    # When: the fold is cut anywhere, with any times between, advisories or not, and new processes
    sampler, kept = Sampler(how(TRIGGER)), bytearray()
    for number, some in enumerate(batches(world, cuts)):
        kept += fold_keys(sampler, some).kept
        if number < len(times):
            what, seconds = times[number]
            sampler.advance(some[-1].time + seconds * SECOND)
            if what:
                sampler = reborn(sampler, how(TRIGGER), makes_advisories=what > 1)
    # Then: the same messages are kept, and the same is known of the copied ones
    assert kept == expected
    plain.advance(0)
    sampler.advance(0)
    assert known(sampler) == known(plain)


@given(worlds(), worlds(backwards=False), CUTS)
def test_what_was_archived_is_learned(archived: list[Sent], world: list[Sent], cuts: list[int]) -> None:
    sampler = Sampler(how(0))
    for some in batches(archived, cuts):
        sampler.learn([s.key for s in some], [s.time for s in some], [s.size for s in some])
    found: dict[str, KnownKey] = {k.value: k for k in known_keys(sampler.freeze())}
    for entry in found.values():
        assert entry.size == [s for s in archived if s.key == entry.value][-1].size
        assert entry.seen_ns == entry.copied_ns >= 0
        assert entry.seen_ns <= sampler.watermark_ns
    # settled: no advisory for values that ended long ago
    at = sampler.watermark_ns
    sampler.mark_all_seen(at)
    assert sampler.advance(at + WARN) == []
    advisories = sampler.advance(at + DURATION)
    assert Counter(a.event for a in advisories) == Counter(
        {AdvisoryEvent.TIMEOUT: len(found), AdvisoryEvent.EXPIRE: len(found)} if found else {}
    )
    assert {a.seen_ns for a in advisories} <= {at}
    assert len(fold_keys(sampler, world).kept) == len(world)
