"""What an operator is offered where a stream is not what it was: no losses, and each price in numbers."""

from __future__ import annotations

from common.segments.segment import Tip
from egress.identity import Evidence, HeldMessage, SourceStream, SourceVerdict, VerdictKind, Witness, choices, parting

CREATED = "2026-01-01T00:00:00Z"


def evidence(first: int, last: int, *tips: Witness, end: int = 100) -> Evidence:
    return Evidence(SourceStream(CREATED, first, last, 1_000), CREATED, end, tips)


def witness(sequence: int, held: HeldMessage) -> Witness:
    return Witness(Tip(sequence, sequence * 10, "0" * 32), held)


def offered(found: Evidence, kind: VerdictKind, proposal: int | None) -> dict[str, str]:
    return {each.options: each.meaning for each in choices(found, SourceVerdict(kind, ""), proposal)}


def test_where_rows_agree_up_to_a_sequence_nothing_is_repeated_or_lost() -> None:
    found = evidence(1, 300, witness(100, HeldMessage.DIFFERENT), witness(1, HeldMessage.EQUAL))
    (way,) = offered(found, VerdictKind.ROLLED_BACK, 51).items()
    assert way[0] == "--new-incarnation --from 51"
    assert way[1].endswith("up to 50 it is as archived, so nothing is repeated or lost")
    assert parting(found, 51) == "; the first sequence that is not as archived is 51"


def test_a_feed_that_is_cut_is_offered_no_one_beginning_for_all_its_partitions() -> None:
    """The first sequence of this partition would be repeated or left out in another."""
    found = evidence(1, 300, witness(100, HeldMessage.DIFFERENT), witness(1, HeldMessage.EQUAL))
    (way,) = choices(found, SourceVerdict(VerdictKind.ROLLED_BACK, ""), 51, is_cut=True)
    assert way.options == "--new-incarnation"
    assert way.meaning.startswith("freeze what it is now, from 51 on")


def test_the_same_is_never_offered_where_a_message_differs() -> None:
    found = evidence(1, 300, witness(100, HeldMessage.DIFFERENT))
    (way,) = offered(found, VerdictKind.UNKNOWN, 1).items()
    assert way[0] == "--new-incarnation --from 1"
    assert way[1].endswith("nothing that it holds is archived, so nothing is repeated or lost")


def test_where_nothing_can_be_compared_both_prices_are_named_and_the_one_that_loses_stands_last() -> None:
    new, same = offered(evidence(81, 300, witness(100, HeldMessage.ABSENT)), VerdictKind.UNKNOWN, 81).items()
    assert new[0] == "--new-incarnation --from 81"
    assert new[1].endswith("nothing is lost; 20 sequences, up to 100, come twice if it is the same stream")
    assert same[0] == "--same"
    assert "goes on behind 100: of the 20 sequences that it holds up to there nothing is archived" in same[1]


def test_where_the_archive_cannot_be_read_it_is_said_that_messages_may_come_twice() -> None:
    found = evidence(1, 300, witness(100, HeldMessage.DIFFERENT), witness(1, HeldMessage.EQUAL))
    (way,) = offered(found, VerdictKind.ROLLED_BACK, None).items()
    assert way[1].endswith("100 sequences, up to 100, that could not be compared may come twice")
    assert parting(found, None) == ""
