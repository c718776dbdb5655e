"""The identity table, row by row, and the edges between its rows."""

from __future__ import annotations

import pytest

from common.segments.segment import Tip
from egress.identity import Evidence, HeldMessage, SourceStream, SourceVerdict, VerdictKind, Witness, judge

OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-02T00:00:00Z"


def source(last: int, *, created: str = OLD, first: int = 1, first_ns: int | None = 1_000) -> SourceStream:
    return SourceStream(created, first, last, first_ns)


def witness(sequence: int, held: HeldMessage) -> Witness:
    return Witness(Tip(sequence, sequence * 10, "0" * 32), held)


def verdict(found: SourceStream | None, *tips: Witness, end: int = 100, **more: object) -> SourceVerdict:
    return judge(Evidence(found, OLD, end, tips, **more))


def test_same_when_a_held_tip_is_equal_and_the_source_reaches_the_end() -> None:
    answer = verdict(source(100), witness(100, HeldMessage.EQUAL))
    assert (answer.kind, answer.drifted) == (VerdictKind.SAME, False)


def test_same_but_drifted_when_only_created_differs() -> None:
    answer = verdict(source(250, created=NEW), witness(100, HeldMessage.ABSENT), witness(50, HeldMessage.EQUAL))
    assert (answer.kind, answer.drifted) == (VerdictKind.SAME, True)


@pytest.mark.parametrize("created", [OLD, NEW])
def test_rolled_back_when_a_tip_is_equal_but_the_source_ends_before_the_archive(created: str) -> None:
    answer = verdict(source(60, created=created), witness(100, HeldMessage.ABSENT), witness(50, HeldMessage.EQUAL))
    assert answer.kind is VerdictKind.ROLLED_BACK
    assert answer.why == "sequence 50 is as archived, but the stream ends at 60, the archive at 100"


@pytest.mark.parametrize("created", [OLD, NEW])
def test_rolled_back_when_a_newer_tip_differs(created: str) -> None:
    tips = (witness(100, HeldMessage.DIFFERENT), witness(75, HeldMessage.DIFFERENT), witness(50, HeldMessage.EQUAL))
    answer = verdict(source(200, created=created), *tips)
    assert answer.kind is VerdictKind.ROLLED_BACK
    assert answer.why.startswith("sequence 50 is as archived, sequence 75 is not")


def test_recreated_when_held_tips_differ_and_created_differs() -> None:
    assert verdict(source(200, created=NEW), witness(100, HeldMessage.DIFFERENT)).kind is VerdictKind.RECREATED


def test_recreated_when_the_source_is_shorter_and_created_differs() -> None:
    assert verdict(source(3, created=NEW), witness(100, HeldMessage.ABSENT)).kind is VerdictKind.RECREATED


def test_recreated_when_nothing_is_archived_and_created_differs() -> None:
    assert verdict(source(3, created=NEW), end=0).kind is VerdictKind.RECREATED


def test_same_when_nothing_is_archived_and_created_is_equal() -> None:
    assert verdict(source(3), end=0).kind is VerdictKind.SAME


@pytest.mark.parametrize("first_ns", [1_001, None])
def test_unverified_when_all_that_is_held_is_later_or_nothing_is_held(first_ns: int | None) -> None:
    found = source(150, first=101, first_ns=first_ns)
    assert verdict(found, witness(100, HeldMessage.ABSENT)).kind is VerdictKind.UNVERIFIED


def test_unknown_when_the_first_held_message_is_not_later_than_the_newest_tip() -> None:
    assert verdict(source(150, first_ns=1_000), witness(100, HeldMessage.ABSENT)).kind is VerdictKind.UNKNOWN


def test_unknown_when_nothing_is_held_and_created_differs_but_the_source_is_long_enough() -> None:
    found = source(150, created=NEW, first=101, first_ns=2_000)
    assert verdict(found, witness(100, HeldMessage.ABSENT)).kind is VerdictKind.UNKNOWN


def test_unknown_when_the_same_stream_ends_early_and_nothing_tells_more() -> None:
    answer = verdict(source(60, first=61, first_ns=None), witness(100, HeldMessage.ABSENT))
    assert answer.kind is VerdictKind.UNKNOWN
    assert "the archive ends at 100, the stream holds 61..60" in answer.why


def test_unknown_when_held_tips_differ_under_the_same_created() -> None:
    assert verdict(source(200), witness(100, HeldMessage.DIFFERENT)).kind is VerdictKind.UNKNOWN


@pytest.mark.parametrize("tips", [(), (witness(100, HeldMessage.DIFFERENT),)])
def test_forked_when_an_older_incarnation_matches(tips: tuple[Witness, ...]) -> None:
    answer = verdict(source(200, created=NEW), *tips, older=2, end=100 if tips else 0)
    assert answer.kind is VerdictKind.FORKED
    assert "incarnation 0002" in answer.why


def test_gone_without_a_stream() -> None:
    assert verdict(None, end=0).kind is VerdictKind.GONE


def test_a_received_message_that_is_still_held_shows_the_same_history_before_anything_is_archived() -> None:
    drifted = verdict(source(20, created=NEW), end=0, received=witness(7, HeldMessage.EQUAL))
    assert (drifted.kind, drifted.drifted) == (VerdictKind.SAME, True)


def test_a_received_message_that_is_not_held_does_not_make_a_rollback() -> None:
    answer = verdict(source(100), witness(100, HeldMessage.EQUAL), received=witness(120, HeldMessage.ABSENT))
    assert answer.kind is VerdictKind.SAME


def test_a_received_message_does_not_overrule_archived_ones_that_differ() -> None:
    answer = verdict(source(200), witness(100, HeldMessage.DIFFERENT), received=witness(150, HeldMessage.EQUAL))
    assert answer.kind is VerdictKind.UNKNOWN
