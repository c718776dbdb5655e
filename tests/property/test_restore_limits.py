"""A stream with limits that changed: it is restored as it was, or its plan gives the number of unknown messages."""

from collections.abc import Sequence
from typing import Any

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from common.archive.captures import CapturedConfig, CapturedDeletions, deleted_ranges
from common.archive.segment import Message
from common.clock import NS_PER_S, format_time
from common.sequences import SequenceRange, Stretch
from ingress.recovery.plan import RestorePlan, RestoreRequest, resurrected_lines
from ingress.recovery.ranges import ChainRange, ReplayChain, ReplayPart
from ingress.recovery.retention_filter import RetentionFilter
from tests.support import compaction
from tests.support.segments import CHAIN, batch_of, footer_of

Step = tuple[str, Any]
BEGIN = 1_700_000_000


class ChangingStream:
    """A stream that takes steps one by one, and the captures of egress each time that it reads the stream."""

    def __init__(self, *, with_deletions: bool) -> None:
        self._with_deletions = with_deletions
        self.config: dict[str, Any] = {"max_msgs_per_subject": 0, "max_msgs": 0, "allow_rollup_hdrs": True}
        self.rows, self.held, self._now = list[Message](), list[Message](), BEGIN
        self.configs, self.deletions = list[CapturedConfig](), list[CapturedDeletions]()
        self._before: int | None = None
        self.deleted = list[tuple[int, int]]()  # last sequence at a deletion, and the number of captures
        self.at = [list[int]()]  # by sequence: the sequences held when it came
        self._look()

    def take(self, steps: Sequence[Step]) -> None:
        for kind, value in steps:
            self._now += 1
            if kind == "restart":
                self._before = None
            elif kind == "look":
                self._look()
            elif kind == "put":
                self._put(*value)
            elif kind == "delete" and self.held:
                self.held.pop(value % len(self.held))
                self.deleted.append((len(self.rows), len(self.deletions)))
            elif kind == "capture":
                self._capture()
            elif kind != "delete":
                if self.config != self.configs[-1].config:
                    self._look()  # a change and its reverse between two looks leave no trace
                self.config = {**self.config, kind: value}
                self._trim()

    def _put(self, subject: bytes, rollup: str) -> None:
        rollup = rollup if self.config["allow_rollup_hdrs"] else ""
        headers = f"NATS/1.0\r\nNats-Rollup: {rollup}\r\n\r\n".encode() if rollup else None
        self.rows.append(Message(len(self.rows) + 1, self._now * NS_PER_S, subject, headers, b"x"))
        if rollup:
            self.held = [each for each in self.held if rollup == "sub" and each.subject != subject]
        self.held.append(self.rows[-1])
        self._trim()
        self.at.append([each.sequence for each in self.held])

    def _trim(self) -> None:
        if limit := self.config["max_msgs_per_subject"]:
            for subject in {each.subject for each in self.held}:
                for each in [each for each in self.held if each.subject == subject][:-limit]:
                    self.held.remove(each)
        if limit := self.config["max_msgs"]:
            self.held = self.held[-limit:]

    def _look(self) -> None:
        ts, last = format_time(self._now * NS_PER_S + 1), len(self.rows)
        if not self.configs or self.configs[-1].config != self.config:
            counts = self._first if last else 0, last, len(self.held)
            self.configs.append(CapturedConfig(ts, last, ts, dict(self.config), *counts, self._before, ts=ts))
            if self._with_deletions and len(self.configs) > 1:
                self._capture()
        self._before = last

    @property
    def _first(self) -> int:
        return self.held[0].sequence if self.held else len(self.rows) + 1

    def _capture(self) -> None:
        ts, last, held = format_time(self._now * NS_PER_S + 1), len(self.rows), {each.sequence for each in self.held}
        gone = deleted_ranges(each for each in range(self._first, last + 1) if each not in held)
        self.deletions.append(CapturedDeletions(ts, last, self._first, last, gone, ts=ts))

    def restored(self, size: int, end: int) -> tuple[list[int], list[str]]:
        """Return the rows up to `end` that are restored before the server applies its last limits, and the notes."""
        if not end:
            return [], []
        moment_ns = self._now * NS_PER_S + 1 if end == len(self.rows) else self.rows[end - 1].timestamp_ns
        configs = [each for each in self.configs if each.moment_ns <= moment_ns]
        known = [each for each in self.deletions if each.last <= end and each.moment_ns <= moment_ns]
        deletions = known[-1] if known else None
        config, rows = configs[-1].config, self.rows[:end]
        row_filter = RetentionFilter(config, deletions, configs, end)
        batches = [rows[at : at + size] for at in range(0, end, size)]
        while row_filter.passes_left:
            for each in batches:
                row_filter.observe(batch_of(each))
            row_filter.end_pass()
        left = [s for each in batches for s in row_filter.filter(batch_of(each)).column("sequence").to_pylist()]
        assert row_filter.rows_left == len(left) or not row_filter.needs_pass
        parts = [
            ReplayPart(Stretch(compaction.ref(within.first, within.last), within), footer_of(each, within))
            for each in batches
            for within in [SequenceRange(each[0].sequence, each[-1].sequence)]
        ]
        chains = (ReplayChain(ChainRange(CHAIN, SequenceRange(1, end)), tuple(parts)),)
        request, captured = RestoreRequest(CHAIN.site, CHAIN.feed), ((), deletions, tuple(configs))
        plan = RestorePlan(request, chains, CHAIN, 1, end, end, "", config, *captured)
        return left, [*resurrected_lines(plan)]


SUBJECTS = st.sampled_from([b"a", b"b.c", b"\xff"])
PUT = st.tuples(st.just("put"), st.tuples(SUBJECTS, st.sampled_from(["", "", "", "", "", "", "sub", "sub", "all"])))
LIMIT = st.tuples(st.just("max_msgs_per_subject"), st.integers(0, 3))
MOST = st.tuples(st.just("max_msgs"), st.sampled_from([0, 2, 4, 8]))
ROLLS = st.tuples(st.just("allow_rollup_hdrs"), st.booleans())
LOOK, RESTART = st.just(("look", None)), st.just(("restart", None))
PLAIN = st.tuples(st.just("put"), st.tuples(SUBJECTS, st.just("")))
DELETE, CAPTURE = st.tuples(st.just("delete"), st.integers(0, 9)), st.just(("capture", None))


@settings(max_examples=60)
@given(
    st.one_of(
        st.lists(st.one_of(PUT, PUT, PUT, LIMIT, ROLLS, LOOK, RESTART), min_size=12, max_size=60),
        # If rollups leave less than `max_msgs` again, only a capture records the messages that the limit had dropped.
        st.lists(st.one_of(PLAIN, PLAIN, PLAIN, LIMIT, MOST, LOOK, RESTART), min_size=12, max_size=60),
    ),
    st.lists(PLAIN, max_size=9),
    st.integers(1, 12),
)
def test_what_was_captured_with_each_change_leaves_what_the_stream_held(
    steps: list[Step], more: list[Step], size: int
) -> None:
    stream = ChangingStream(with_deletions=True)
    stream.take([*steps, ("look", None), *more])
    left, notes = stream.restored(size, len(stream.rows))
    if most := stream.config["max_msgs"]:
        left = left[-most:]
    assert left == [each.sequence for each in stream.held]
    assert notes == []


@settings(max_examples=80)
@given(
    st.lists(st.one_of(PUT, PUT, PUT, LIMIT, ROLLS, LOOK, RESTART), min_size=12, max_size=60),
    st.lists(st.one_of(PUT, PUT, MOST), max_size=9),
    st.integers(1, 12),
)
def test_if_only_counts_were_captured_nothing_is_missing_and_the_plan_names_how_many_come_back_too_many(
    steps: list[Step], more: list[Step], size: int
) -> None:
    stream = ChangingStream(with_deletions=False)
    stream.take([*steps, ("look", None)])
    left, notes = stream.restored(size, len(stream.rows))
    assert {*left} >= {each.sequence for each in stream.held}
    assert len(left) - len(stream.held) <= sum(int(note.split("up to ")[1].split()[0]) for note in notes)
    stream.take([*more, ("look", None)])
    left, notes = stream.restored(size, len(stream.rows))
    assert {*left} >= {each.sequence for each in stream.held}
    event(f"says {len(notes)}")


@settings(max_examples=60)
@given(
    st.lists(st.one_of(PUT, PUT, PUT, LIMIT, ROLLS), min_size=12, max_size=60),
    st.booleans(),
    st.integers(1, 12),
    st.floats(0, 1),
)
@example(
    # A rollup after a limit that had dropped messages, of a subject that is not the oldest.
    steps=[
        ("max_msgs_per_subject", 1),
        *(("put", (subject, "")) for subject in (b"b", b"a", b"a")),
        ("max_msgs_per_subject", 3),
        *(("put", (b"a", rollup)) for rollup in ("sub", "")),
    ],
    with_deletions=False,
    size=3,
    share=1.0,
)
def test_a_change_that_is_seen_at_once_leaves_what_the_stream_held_at_any_sequence(
    steps: list[Step], with_deletions: bool, size: int, share: float
) -> None:
    stream = ChangingStream(with_deletions=with_deletions)
    for step in steps:
        stream.take([step, ("look", None)])
    left, notes = stream.restored(size, len(stream.rows))
    assert (left, notes) == ([each.sequence for each in stream.held], [])
    if 0 < (end := int(len(stream.rows) * share)) < len(stream.rows):
        assert stream.restored(size, end) == (stream.at[end], [])


@settings(max_examples=60)
@given(st.lists(st.one_of(PUT, DELETE, CAPTURE), max_size=40), st.integers(0, 2), st.integers(1, 12), st.floats(0, 1))
def test_nothing_that_lived_at_the_end_is_left_out_for_what_was_captured_later(
    steps: list[Step], per_subject: int, size: int, share: float
) -> None:
    stream = ChangingStream(with_deletions=False)
    stream.take([("max_msgs_per_subject", per_subject), ("look", None), *steps])
    end = int(len(stream.rows) * share)
    before = end - (end < len(stream.rows))  # the last sequence before the moment of `end`
    held = stream.at[end] if before < end else [each.sequence for each in stream.held]
    left, _ = stream.restored(size, end)
    captures = sum(each.last <= before for each in stream.deletions)
    if not any(last <= before and known >= captures for last, known in stream.deleted):
        assert left == held
    elif not per_subject:
        assert {*held} <= {*left}
