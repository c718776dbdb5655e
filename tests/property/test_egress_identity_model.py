"""The identity verdict against a brute-force model: what really happened to a stream, and what egress can see
of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from common.segments.segment import Tip
from egress.identity import Evidence, HeldMessage, SourceStream, VerdictKind, Witness, judge


@dataclass(frozen=True)
class Stream:
    """A stream with its whole truth: `log` is what every sequence ever held, `gone` what it holds no more."""

    created: str
    log: tuple[str, ...] = ()
    gone: frozenset[int] = frozenset()

    @property
    def last(self) -> int:
        return len(self.log)

    def held(self, sequence: int) -> str | None:
        return self.log[sequence - 1] if 1 <= sequence <= self.last and sequence not in self.gone else None

    def source(self) -> SourceStream:
        held = [s for s in range(1, self.last + 1) if s not in self.gone]
        first = held[0] if held else self.last + 1
        return SourceStream(self.created, first, self.last, timestamp(self.log[first - 1]) if held else None)


def timestamp(content: str) -> int:
    return int(content.partition("@")[2])


def tip(stream: Stream, sequence: int) -> Tip:
    content = stream.log[sequence - 1]
    return Tip(sequence, timestamp(content), hashlib.sha256(content.encode()).hexdigest()[:32])


@dataclass
class World:
    """A stream, what was archived of it (`archived`: the truth behind the tips), and disks to go back to."""

    stream: Stream
    created: str
    archived: tuple[str, ...] = ()
    tips: list[Tip] = field(default_factory=list)
    disks: list[Stream] = field(default_factory=list)
    time: int = 0
    births: int = 0

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.time += 1
            self.stream = replace(self.stream, log=(*self.stream.log, f"message@{self.time}"))

    def archive(self) -> None:
        if self.stream.last > len(self.archived):
            self.archived = self.stream.log
            held = [s for s in range(1, self.stream.last + 1) if s not in self.stream.gone]
            if held:
                self.tips.insert(0, tip(self.stream, held[-1]))

    def expire(self, count: int) -> None:
        first = self.stream.source().first
        self.stream = replace(self.stream, gone=self.stream.gone | set(range(1, first + count)))

    def recreate(self) -> None:
        self.births += 1
        self.time += 1
        self.stream = Stream(f"created {self.births}")

    def drift(self) -> None:
        self.births += 1
        self.stream = replace(self.stream, created=f"created {self.births}")

    def save(self) -> None:
        self.disks.append(self.stream)

    def go_back(self) -> None:
        if self.disks:
            self.stream = self.disks[-1]

    def evidence(self) -> Evidence:
        witnesses = []
        for archived in self.tips:
            content = self.stream.held(archived.sequence)
            if content is None:
                witnesses.append(Witness(archived, HeldMessage.ABSENT))
                continue
            equal = tip(self.stream, archived.sequence) == archived
            witnesses.append(Witness(archived, HeldMessage.EQUAL if equal else HeldMessage.DIFFERENT))
        newest = self.tips[0].sequence if self.tips else 0
        behind = (s for s in range(newest + 1, len(self.archived) + 1) if self.stream.held(s) is not None)
        witnesses[:0] = [Witness(tip(self.stream, s), HeldMessage.DIFFERENT) for s in list(behind)[:1]]
        return Evidence(self.stream.source(), self.created, len(self.archived), tuple(witnesses))

    @property
    def continues(self) -> bool:
        """Whether the stream's true past begins with exactly what was archived."""
        return self.stream.log[: len(self.archived)] == self.archived

    @property
    def newest_place_is_held(self) -> bool:
        """Whether the source holds something at the archive's end, be it a tip's place or not."""
        return self.stream.held(len(self.archived)) is not None


ACTION = st.sampled_from(["publish", "publish", "archive", "expire", "recreate", "drift", "save", "go_back"])
STEPS = st.lists(st.tuples(ACTION, st.integers(1, 6)), min_size=1, max_size=14)


def play(steps: list[tuple[str, int]], *, drifting: bool = True) -> World:
    """The world after `steps`; archiving happens only while the verdict allows it, as in egress."""
    world = World(Stream("created 0"), "created 0")
    for action, count in steps:
        if action in ("publish", "expire"):
            getattr(world, action)(count)
        elif action == "archive":
            if world.continues and judge(world.evidence()).is_same:
                world.archive()
        elif action != "drift" or drifting:
            getattr(world, action)()
    return world


@given(STEPS)
@settings(max_examples=600)
def test_never_same_for_another_history_that_holds_the_archive_s_end(steps: list[tuple[str, int]]) -> None:
    world = play([("publish", 3), ("archive", 1), *steps])
    if world.newest_place_is_held and judge(world.evidence()).kind is VerdictKind.SAME:
        assert world.continues


@given(STEPS)
@settings(max_examples=600)
def test_never_recreated_for_a_stream_that_holds_what_was_archived(steps: list[tuple[str, int]]) -> None:
    world = play(steps)
    shares = any(w.held is HeldMessage.EQUAL for w in world.evidence().tips)
    if judge(world.evidence()).kind is VerdictKind.RECREATED:
        assert not shares


@given(STEPS)
@settings(max_examples=600)
def test_recreated_is_true_where_created_does_not_drift(steps: list[tuple[str, int]]) -> None:
    world = play(steps, drifting=False)
    if judge(world.evidence()).kind is VerdictKind.RECREATED:
        assert not (world.archived and world.continues)
        assert world.stream.created != world.created


@given(STEPS)
@settings(max_examples=600)
def test_an_undisturbed_stream_is_always_the_same(steps: list[tuple[str, int]]) -> None:
    world = play([(action, count) for action, count in steps if action in ("publish", "archive", "expire")])
    assert judge(world.evidence()).is_same


@given(STEPS, st.integers(1, 6))
@settings(max_examples=400)
def test_a_fresh_recreation_after_archiving_is_recreated_never_same(steps: list[tuple[str, int]], more: int) -> None:
    world = play([(action, count) for action, count in steps if action in ("publish", "archive", "expire")])
    world.recreate()
    world.publish(more)
    end = len(world.archived)
    if not end or world.stream.held(end) or world.stream.last < end:
        assert judge(world.evidence()).kind is VerdictKind.RECREATED
    else:
        assert not judge(world.evidence()).is_same
