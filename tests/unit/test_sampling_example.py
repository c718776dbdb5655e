"""The worked example of stream-replicator's documentation, three days of 500 nodes, message by message.

Each node publishes every five minutes; it is to be copied hourly, at once when its size changes by 1,024
bytes, and when it asks for it; warned about after 12 minutes, and forgotten after an hour. What must come of
it is computed here again, one node at a time, with nothing of the sampler's but the rule of the spread.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from common.chain import Chain
from common.segments.columns import Columns
from egress.advisories.advisory import Advisory, Event
from egress.sampling.sampler import Sampler
from egress.sampling.snapshot import Snapshot, decode, encode
from tests.support.sampling import HOUR, MINUTE, SECOND, START, sampling

NODES = 500
DAYS = 3
WARN = 12 * MINUTE
TRIGGER = 1024
HOW = sampling(size_trigger=TRIGGER, inspect_force_field="force_copy")


@dataclass(frozen=True)
class Sent:
    """A message as its node sent it; `node` is None where it does not say which it is."""

    time: int
    node: str | None
    size: int
    force: str

    def payload(self) -> bytes:
        sender = "" if self.node is None else f'"sender": "{self.node}", '
        text = f'{{{sender}"force_copy": {self.force}, "metadata": "'
        return (text + "x" * (self.size - len(text) - 2) + '"}').encode()


def life(node: str, dice: random.Random) -> Iterator[Sent]:
    """Three days of one node: every five minutes, with outages of all lengths, and changes of size."""
    now, size = START + dice.randrange(5 * MINUTE), dice.randrange(200, 3000)
    while now < START + DAYS * 24 * HOUR:
        chance = dice.random()
        if chance < 0.01:
            size = max(200, size + dice.choice([-1, 1]) * dice.choice([1, 500, 1023, 1024, 1025, 5000]))
        force = "true" if dice.random() < 0.003 else dice.choice(["false", "null", '"true"', "1"])
        yield Sent(now, None if dice.random() < 0.001 else node, size, force)
        now += pause(dice)


def pause(dice: random.Random) -> int:
    chance = dice.random()
    if chance < 0.004:
        return dice.randrange(6 * MINUTE, 12 * MINUTE)  # too short for a warning
    if chance < 0.006:
        return dice.choice([WARN - 1, WARN, WARN + 1, HOUR - 1, HOUR, HOUR + 1])
    if chance < 0.009:
        return dice.randrange(WARN, HOUR)
    if chance < 0.011:
        return dice.randrange(HOUR, 6 * HOUR)
    return 5 * MINUTE + dice.randrange(-2 * SECOND, 2 * SECOND)


def period(node: str) -> int:
    """The documented rule: less a second, less a share of a tenth of the hour that the name decides."""
    u = int.from_bytes(hashlib.blake2b(node.encode(), digest_size=8).digest(), "big") / 2**64
    return HOUR - SECOND - int(u * HOUR / 10)


@dataclass
class Naive:
    """What must come of the messages of one node."""

    copies: list[bool] = field(default_factory=list)
    advisories: list[Advisory] = field(default_factory=list)

    def run(self, node: str, messages: list[Sent], end: int) -> None:
        seen = copied = size = None
        for message in messages:
            now = message.time
            if seen is not None:
                self.silent(node, seen, now)
            if seen is None or now - seen >= HOUR:
                self.advisories.append(Advisory(Event.NEW, node, now, now))
                seen = None
            elif now - seen > WARN:
                self.advisories.append(Advisory(Event.RECOVER, node, seen, now))
            kept = seen is None or copied is None or size is None or now - copied >= period(node)
            if not kept and size is not None:
                kept = abs(message.size - size) >= TRIGGER or message.force == "true"
            self.copies.append(kept)
            seen, size, copied = now, message.size, now if kept else copied
        if seen is not None:
            self.silent(node, seen, end)

    def silent(self, node: str, seen: int, now: int) -> None:
        if now - seen > WARN:
            self.advisories.append(Advisory(Event.TIMEOUT, node, seen, seen + WARN))
        if now - seen >= HOUR:
            self.advisories.append(Advisory(Event.EXPIRE, node, seen, seen + HOUR))


def due(advisory: Advisory) -> int:
    """From when on time alone leads to it."""
    return advisory.moment_ns + (advisory.event is Event.TIMEOUT)


@pytest.fixture(scope="module")
def log() -> list[Sent]:
    dice = random.Random(20_000)
    messages = [sent for number in range(NODES) for sent in life(f"node-{number:03d}.example.net", dice)]
    return sorted(messages, key=lambda sent: sent.time)


@pytest.fixture(scope="module")
def naive(log: list[Sent]) -> tuple[list[bool], list[Advisory]]:
    """The copies, in the order of the log, and all advisories until seven hours after it."""
    places: dict[str | None, list[int]] = {}
    for place, sent in enumerate(log):
        places.setdefault(sent.node, []).append(place)
    copies, advisories = [True] * len(log), []
    for node, own in places.items():
        if node is not None:
            found = Naive()
            found.run(node, [log[place] for place in own], log[-1].time + 7 * HOUR)
            advisories += found.advisories
            for place, kept in zip(own, found.copies, strict=True):
                copies[place] = kept
    return copies, advisories


def rows(log: list[Sent], first: int, last: int) -> Columns:
    sent, count = log[first:last], last - first
    payloads = [one.payload() for one in sent]
    times = [one.time for one in sent]
    return Columns([*range(first + 1, last + 1)], times, [b"s"] * count, [None] * count, payloads)


def reborn(sampler: Sampler, place: int, outbox: list[Advisory]) -> tuple[Sampler, list[Advisory]]:
    """As another process goes on."""
    newest = sampler.watermark_ns
    before = Snapshot(Chain("s", "f"), place + 1, HOW.digest, newest, sampler.freeze(), tuple(outbox))
    after = decode(b"".join(encode(before)))
    return Sampler(HOW, after.state), list(after.outbox)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_worked_example(log: list[Sent], naive: tuple[list[bool], list[Advisory]], seed: int) -> None:
    copies, advisories = naive
    dice, sampler = random.Random(seed), Sampler(HOW)
    dues = sorted(map(due, advisories))
    kept, found, place, given = bytearray(), [], 0, 0
    missing = forced = 0
    while place < len(log):
        # When: batches of any size are folded, with idle calls between, and new processes now and then
        last = min(len(log), place + dice.choice([1, 10, 500, 3000, 9000]))
        choices = sampler.fold(rows(log, place, last))
        kept += choices.kept
        found += choices.advisories
        missing, forced = missing + choices.missing, forced + choices.forced
        place = last
        if dice.random() < 0.6:
            until = log[place].time if place < len(log) else log[-1].time
            now = dice.choice([sampler.watermark_ns, dice.randint(sampler.watermark_ns, until), until])
            told = sampler.advance(now)
            assert told == sorted(told, key=lambda advisory: (advisory.moment_ns, advisory.value))
            found += told
            # Then: all is told that is due, neither more nor less
            while given < len(dues) and dues[given] <= now:
                given += 1
            # (a message with the time `now` itself, not folded yet, may have led to one)
            assert given - 5 <= len(found) <= given
        if dice.random() < 0.1:
            sampler, found = reborn(sampler, place, found)
    found += sampler.advance(log[-1].time + 7 * HOUR)

    # Then: message by message and advisory by advisory it is what the model says
    differ = [place for place, (a, b) in enumerate(zip(kept, copies, strict=True)) if a != b]
    assert not differ, f"first at {log[differ[0]]}"
    assert Counter(found) == Counter(advisories)
    assert missing == sum(sent.node is None for sent in log)
    assert forced == sum(sent.force == "true" for sent in log)
    assert sampler.values == 0


def test_the_example_shows_what_it_is_for(log: list[Sent], naive: tuple[list[bool], list[Advisory]]) -> None:
    # The world above holds every case, often, or the test above would hold nothing.
    copies, advisories = naive
    events = Counter(advisory.event for advisory in advisories)
    assert len(log) > 380_000
    assert len(log) / 14 < sum(copies) < len(log) / 8
    assert events[Event.NEW] == events[Event.EXPIRE] > NODES + 500
    assert events[Event.RECOVER] > 1000
    assert events[Event.TIMEOUT] == events[Event.RECOVER] + events[Event.EXPIRE]
    gaps = Counter(advisory.moment_ns - advisory.seen_ns for advisory in advisories)
    assert gaps[WARN + 1] > 20
    assert gaps[WARN] == events[Event.TIMEOUT]
    assert gaps[HOUR - 1] > 20
    assert sum(sent.node is None for sent in log) > 300
    assert sum(sent.force == "true" for sent in log) > 1000
