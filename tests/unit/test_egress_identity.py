"""The identity table, row by row with the edges between rows; and the options of an operator, each with its price."""

from typing import Any

import pytest

from common.archive.segment import Tip
from egress import identity
from egress import identity as identity_module
from egress.identity import Evidence, HeldMessage, SourceStream, VerdictKind, Witness, first_difference_text

OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-02T00:00:00Z"
EQUAL, DIFFERENT, ABSENT = HeldMessage.EQUAL, HeldMessage.DIFFERENT, HeldMessage.ABSENT
SAME, UNKNOWN, RECREATED = VerdictKind.SAME, VerdictKind.UNKNOWN, VerdictKind.RECREATED
ROLLED_BACK = VerdictKind.ROLLED_BACK


def source(last: int, created: str = OLD, first: int = 1, first_ns: int | None = 1_000) -> SourceStream:
    return SourceStream(created, first, last, first_ns)


def witness(sequence: int, held: HeldMessage) -> Witness:
    return Witness(Tip(sequence, sequence * 10, "0" * 32), held)


def verdict(
    found: SourceStream | None, *tips: tuple[int, HeldMessage], end: int = 100, **more: Any
) -> identity_module.SourceVerdict:
    return identity_module.judge(Evidence(found, OLD, end, tuple(witness(*tip) for tip in tips), **more))


SOURCES = [
    (source(100), [(100, EQUAL)], SAME, ""),
    (source(250, NEW), [(100, ABSENT), (50, EQUAL)], SAME, ""),
    # A held tip is equal, and the source ends before the archive; or a newer one differs.
    (source(60), [(100, ABSENT), (50, EQUAL)], ROLLED_BACK, "sequence 50 is as archived, but the stream ends at 60"),
    (source(60, NEW), [(100, ABSENT), (50, EQUAL)], ROLLED_BACK, "sequence 50 is as archived, but the stream ends"),
    *(
        (source(200, created), [(100, DIFFERENT), (75, DIFFERENT), (50, EQUAL)], ROLLED_BACK, "sequence 50 is as")
        for created in (OLD, NEW)
    ),
    # Held tips differ, or the source is shorter.
    (source(200, NEW), [(100, DIFFERENT)], RECREATED, ""),
    (source(3, NEW), [(100, ABSENT)], RECREATED, ""),
    (source(200), [(100, DIFFERENT)], UNKNOWN, ""),
    # All held messages are later, or none is held; or they are not later than the newest tip.
    (source(150, OLD, 101, 1_001), [(100, ABSENT)], VerdictKind.UNVERIFIED, ""),
    (source(150, OLD, 101, None), [(100, ABSENT)], VerdictKind.UNVERIFIED, ""),
    (source(150), [(100, ABSENT)], UNKNOWN, ""),
    (source(150, OLD, 60, 2_000), [(100, ABSENT)], UNKNOWN, ""),  # a later time at an earlier sequence
    # No held message gives more evidence.
    (source(150, NEW, 101, 2_000), [(100, ABSENT)], UNKNOWN, ""),
    (source(60, OLD, 61, None), [(100, ABSENT)], UNKNOWN, "the archive ends at 100, the stream holds 61..60"),
]


@pytest.mark.parametrize(("found", "tips", "kind", "why"), SOURCES)
def test_a_source_is_judged_by_what_it_still_holds_of_the_archive(
    found: SourceStream, tips: list[tuple[int, HeldMessage]], kind: VerdictKind, why: str
) -> None:
    answer = verdict(found, *tips)
    assert (answer.kind, answer.has_drifted) == (kind, kind is SAME and found.created == NEW)
    assert why in answer.reason


def test_where_nothing_is_archived_creation_times_decide() -> None:
    kinds = [verdict(found, end=0).kind for found in (source(3), source(3, NEW), None)]
    assert kinds == [SAME, RECREATED, VerdictKind.GONE]


@pytest.mark.parametrize("tips", [[], [(100, DIFFERENT)]])
def test_forked_when_an_older_incarnation_matches(tips: list[tuple[int, HeldMessage]]) -> None:
    answer = verdict(source(200, NEW), *tips, older_match=2, end=100 if tips else 0)
    assert (answer.kind, "incarnation 0002" in answer.reason) == (VerdictKind.FORKED, True)


def test_a_received_message_shows_the_same_history_but_makes_no_rollback_and_overrules_no_archived_one() -> None:
    drifted = verdict(source(20, NEW), end=0, received=witness(7, EQUAL))
    assert (drifted.kind, drifted.has_drifted) == (SAME, True)
    assert verdict(source(100), (100, EQUAL), received=witness(120, ABSENT)).kind is SAME
    assert verdict(source(200), (100, DIFFERENT), received=witness(150, EQUAL)).kind is UNKNOWN


def test_a_stream_that_was_set_back_remains_so_until_a_message_after_that_is_as_archived() -> None:
    def judged(
        found: SourceStream, *tips: tuple[int, HeldMessage]
    ) -> tuple[identity_module.IdentityRecord | None, Any]:
        given = Evidence(found, OLD, 100, tuple(witness(*tip) for tip in tips))
        answer = identity.judge_with(given, record)
        return identity.remember(record, given, answer), answer.kind

    record = None
    assert judged(source(100), (100, EQUAL)) == (None, SAME)
    record, kind = judged(source(60), (100, ABSENT), (50, EQUAL))
    assert (kind, record) == (ROLLED_BACK, identity.IdentityRecord(OLD, 0, 61))
    later, healed = [(100, ABSENT), (50, EQUAL)], [(100, ABSENT), (61, EQUAL)]
    assert judged(source(200), *later) == (record, ROLLED_BACK)
    assert judged(source(200, OLD, 150, 2_000), (100, ABSENT)) == (record, ROLLED_BACK)  # unverified without a record
    assert judged(source(200), (100, DIFFERENT)) == (record, ROLLED_BACK)
    assert judged(source(200), *healed) == (record, SAME)
    assert judged(source(200, NEW), *later) == (record, SAME), "of another stream"
    record = None
    assert judged(source(200), (100, DIFFERENT), (70, DIFFERENT), (50, EQUAL))[0] == identity.IdentityRecord(OLD, 0, 70)


# Options for the operator


def evidence(first: int, *tips: tuple[int, HeldMessage]) -> Evidence:
    return Evidence(SourceStream(OLD, first, 300, 1_000), OLD, 100, tuple(witness(*tip) for tip in tips))


def offered(found: Evidence, kind: VerdictKind, proposal: int | None, **more: bool) -> list[tuple[str, str]]:
    return [
        (each.options, each.meaning)
        for each in identity.choices(
            found, identity_module.SourceVerdict(kind, ""), proposal, **{"has_partitions": False, **more}
        )
    ]


def test_where_rows_agree_up_to_a_sequence_nothing_is_repeated_or_lost() -> None:
    found = evidence(1, (100, DIFFERENT), (1, EQUAL))
    [(options, meaning)] = offered(found, ROLLED_BACK, 51)
    assert options == "--new-incarnation --from 51"
    assert first_difference_text(found, 51) == "; the first sequence that is not as archived is 51"
    assert meaning.endswith("nothing is repeated, and nothing lost but a message up to 50 that was never archived")
    # With this first sequence, another partition would repeat messages or leave them out.
    [(options, meaning)] = offered(found, ROLLED_BACK, 51, has_partitions=True)
    assert (options, meaning.startswith("archive the stream as it is now, from 51 on")) == ("--new-incarnation", True)
    # The archive cannot be read.
    [(_, meaning)] = offered(found, ROLLED_BACK, None)
    assert meaning.endswith("100 sequences up to 100 could not be compared and may be archived twice")
    assert first_difference_text(found, None) == ""


def test_the_same_is_never_offered_where_a_message_differs() -> None:
    [(options, meaning)] = offered(evidence(1, (100, DIFFERENT)), UNKNOWN, 1)
    assert options == "--new-incarnation --from 1"
    assert meaning.endswith("none of its messages is archived, so nothing is repeated or lost")


def test_where_nothing_can_be_compared_both_prices_are_named_and_the_one_that_loses_is_last() -> None:
    new, same = offered(evidence(81, (100, ABSENT)), UNKNOWN, 81)
    assert (new[0], same[0]) == ("--new-incarnation --from 81", "--same")
    assert new[1].endswith("nothing is lost; 20 sequences up to 100 are archived twice if it is the same stream")
    assert "continues after 100: its 20 sequences up to there are not archived again" in same[1]
