"""Corrections of a state by an operator: the state afterwards, and the cases that are refused."""

from dataclasses import replace

import pytest

from common.chain import Chain
from common.nats.headers import Provenance, build_block
from ingress.checkpoint import (
    Checkpoint,
    IntentPiece,
    ParkedNames,
    TargetState,
    close_intent,
    from_json,
    open_intent,
    to_json,
)
from ingress.operator import corrections
from ingress.operator.corrections import CorrectionRefused, ParkedMarks, TargetScan, accept, forget, move, rebuild
from ingress.parked import ParkedEntry, ParkedName
from ingress.verdict.verdict import Finding, IntentVerdict, NoOrigin, Origin, judge
from tests.support.ingress import piece, reading
from tests.unit.test_ingress_verdict import CLOSED, OPEN, A, B


def row_of(chain: Chain, sequence: int) -> bytes:
    return build_block([Provenance(chain.site, chain.feed, chain.incarnation, chain.partition, sequence, 1).line()])


def scan(after: int, last: int, *held: tuple[int, Chain | None, int], state: TargetState | None = None) -> TargetScan:
    """Return a scan of messages: target sequence, chain (None: foreign), sequence; `state`: for its open intent."""
    found = corrections.scan_after_checkpoint(state.intent, after, last) if state else TargetScan(after, last)
    for at, chain, sequence in held:
        found.add(at, row_of(chain, sequence) if chain else None)
    return found


def positions(state: TargetState | None) -> dict[Chain, int]:
    assert state.intent is None
    return dict(state.checkpoint.positions)


# One chain


def test_a_moved_chain_names_what_is_never_carried_or_stored_twice() -> None:
    correction = move(CLOSED, A, 15)
    effect = f"{A}: 11 to 14 are no longer delivered"
    assert (correction.effects, positions(correction.after)) == ([effect], {A: 15, B: 5})
    twice = "those already stored are stored twice, at most 8 messages"
    assert move(CLOSED, A, 3).effects == [f"{A}: 3 to 10 are delivered again: {twice}"]
    assert move(CLOSED, A, 11).effects == []


def test_a_chain_of_an_open_intent_is_neither_moved_nor_forgotten_and_others_are() -> None:
    other = Chain("us-east", "OTHER")
    checkpoint = replace(OPEN.checkpoint, positions={**OPEN.checkpoint.positions, other: 7})
    assert move(OPEN, other, 7).after == replace(OPEN, checkpoint=checkpoint)
    with pytest.raises(CorrectionRefused, match="expected no open intent with rows of it, found one"):
        move(OPEN, A, 15)
    for parked, names in (((), None), ((A, B), ParkedNames("t0", ((B, 0),)))):
        after = corrections.forget_unlisted(CLOSED, {("us-east", "NODES")}, parked).after
        assert (positions(after), after.checkpoint.parked) == ({A: 11}, names)
    assert corrections.forget_unlisted(OPEN, set(), {A}).after == OPEN


# The target as it is


def test_a_target_is_accepted_with_what_it_holds_and_without_what_it_lost() -> None:
    foreign = accept(CLOSED, reading(102, NoOrigin.FOREIGN), scan(100, 102, (101, None, 0), (102, None, 0)), {})
    assert foreign.after == TargetState(Checkpoint(102, "t0", {A: 11, B: 5}, foreign_upto=102))
    assert foreign.effects == ["2 foreign messages will stay"]
    lost = accept(CLOSED, reading(90), scan(100, 90), {})
    assert positions(lost.after) == {A: 11, B: 5}
    assert lost.effects[0].startswith("10 stored messages are gone")
    # Messages parked for the former stream of the name were never stored: they stay parked.
    again = accept(CLOSED, reading(2, Origin(B, 8), "t1"), scan(0, 2, (1, None, 0), (2, B, 8)), {})
    assert again.after == TargetState(Checkpoint(2, "t1", {A: 11, B: 5}, foreign_upto=2, parked=ParkedNames("t0")))
    assert again.effects[0].startswith("another stream of the same name")


def test_rows_of_an_open_intent_with_a_foreign_message_among_them_are_found_where_they_are() -> None:
    seen = scan(100, 106, (101, A, 11), (102, A, 13), (103, None, 0), (104, A, 14), (105, A, 19), (106, B, 5))
    assert positions(accept(OPEN, reading(106, NoOrigin.FOREIGN), seen, {}).after) == {A: 20, B: 6}
    # A chain without a message there keeps its position.
    seen = scan(100, 102, (101, A, 11), (102, None, 0))
    assert positions(accept(OPEN, reading(102, NoOrigin.FOREIGN), seen, {}).after) == {A: 12, B: 5}
    # Missing messages before the newest of a chain do not change its position.
    seen = scan(100, 105, (103, A, 14), (104, B, 5), (105, None, 0))
    assert positions(accept(OPEN, reading(105, NoOrigin.FOREIGN), seen, {}).after) == {A: 15, B: 6}


def test_where_messages_are_gone_the_operator_has_to_set_each_chain() -> None:
    seen = scan(100, 104, (101, A, 11), (104, None, 0))  # 102 and 103 were consumed
    with pytest.raises(CorrectionRefused) as caught:
        accept(OPEN, reading(104, NoOrigin.FOREIGN), seen, {})

    assert "2 messages after target sequence 100 cannot be read any more" in caught.value.message
    assert f"{B} at 5 or later, {A} at 12 or later" in caught.value.message
    chosen = {A: 13, B: 6}
    assert positions(accept(OPEN, reading(104, NoOrigin.FOREIGN), seen, chosen).after) == chosen
    assert positions(accept(OPEN, reading(104, NoOrigin.FOREIGN), seen, {}, repeats=True).after) == {A: 12, B: 5}


def test_what_is_no_row_of_the_open_intent_does_not_count() -> None:
    """Ignore a row that somebody forged, or an old row replayed into the target."""
    seen = scan(100, 103, (101, A, 11), (102, A, 500), (103, B, 2), state=OPEN)
    correction = accept(OPEN, reading(103, Origin(B, 2)), seen, {})

    assert positions(correction.after) == {A: 12, B: 5}
    assert "2 unexpected messages with the header Floe-Source will stay" in correction.effects
    closed = accept(CLOSED, reading(101), scan(100, 101, (101, A, 500), state=CLOSED), {})
    assert positions(closed.after) == {A: 11, B: 5}


def test_an_intent_whose_arithmetic_holds_needs_no_message_to_be_read() -> None:
    """Need no message: the rows not stored are gone from the archive, and the target is a work queue."""
    assert positions(accept(OPEN, reading(104), scan(100, 104), {}).after) == {A: 21, B: 5}
    assert positions(accept(OPEN, reading(106), scan(100, 106), {}).after) == {A: 21, B: 7}
    with pytest.raises(CorrectionRefused):  # proves nothing if the stream keeps its last message
        accept(OPEN, reading(104, forgets=False), scan(100, 104), {})
    with pytest.raises(CorrectionRefused):  # the third of four messages may be any of 11..20
        accept(OPEN, reading(103), scan(100, 103), {})
    assert positions(accept(OPEN, reading(103, Origin(A, 17)), scan(100, 103), {}).after) == {A: 18, B: 5}


def test_the_arithmetic_means_nothing_where_another_row_is_before_the_last_or_others_publish_too() -> None:
    """Let the last message agree by chance: two ingresses with a state bucket each began on one target."""
    rows = [(101, A, 11), (102, A, 12), (103, A, 900), (104, A, 19), (105, B, 5)]
    accepted = accept(OPEN, reading(105, Origin(B, 5)), scan(100, 105, *rows, state=OPEN), {})
    assert positions(accepted.after) == {A: 20, B: 6}
    seen = scan(100, 102, (101, None, 0), (102, A, 11))
    accepted = accept(OPEN, reading(102, Origin(A, 11)), seen, {}, exclusive=False)
    assert positions(accepted.after) == {A: 12, B: 5}


@pytest.mark.parametrize(("rows", "base"), [(0, 130), (9, 121)])
def test_an_operator_sets_how_many_rows_are_stored(rows: int, base: int) -> None:
    """Count from base 100 with the last sequence moved to 130."""
    correction = corrections.count_stored(OPEN, reading(130), rows)
    assert correction.after is not None

    assert judge(correction.after, reading(130, forgets=False)) == IntentVerdict(Finding.STORED, rows)
    assert close_intent(correction.after).checkpoint.target_sequence == base + 9
    assert correction.effects[0] == f"rows 1 to {rows} of the 9 of the open intent count as stored"
    for state, last, too_many in ((CLOSED, 100, 0), (OPEN, 104, 5), (OPEN, 130, 10), (OPEN, 9, 0)):
        with pytest.raises(CorrectionRefused):
            corrections.count_stored(state, reading(last), too_many)


# A state that is lost or old, or an empty target


def test_a_lost_state_is_found_in_a_target_that_holds_everything_and_an_old_one_is_a_lower_bound() -> None:
    correction = rebuild(None, reading(4, Origin(B, 2)), scan(0, 4, (1, A, 1), (2, B, 7), (3, A, 4), (4, B, 2)))
    assert correction.after == TargetState(Checkpoint(4, "t0", {A: 5, B: 8}, foreign_upto=4))
    assert correction.effects[1] == f"{A}: 2 messages found, 1 to 4"

    seen = scan(0, 120, (120, A, 30))
    with pytest.raises(CorrectionRefused, match="expected a target that holds all of its 120 messages, found 1"):
        rebuild(CLOSED, reading(120), seen)
    assert positions(rebuild(CLOSED, reading(120), seen, repeats=True).after) == {A: 31, B: 5}

    again = rebuild(CLOSED, reading(2), scan(0, 2, (1, A, 3), (2, A, 5)))  # restored from an old copy
    assert positions(again.after) == {A: 6}
    for part in ("the last 98 messages, which the target has lost", "get them twice"):
        assert any(part in line for line in again.effects)


def test_only_an_empty_target_is_filled_again() -> None:
    with pytest.raises(CorrectionRefused, match="expected an empty target, found 3 messages"):
        forget(CLOSED, reading(3), 3)
    assert forget(CLOSED, None, 0).after is forget(CLOSED, reading(0, created="t1"), 0).after is None
    purged = forget(CLOSED, reading(100), 0)
    parked = ParkedNames("t0", ((None, 0),))
    assert purged.after == TargetState(Checkpoint(100, "t0", {}, foreign_upto=100, parked=parked))
    assert purged.effects[1] == f"{A}: begins again; messages already stored are stored twice"


# Parked messages


def tried_again(sequence: int) -> IntentPiece:
    return replace(piece(sequence, sequence), is_retry=True)


def test_what_the_dropped_intent_passed_or_stored_of_parked_messages_is_marked() -> None:
    state = open_intent(CLOSED, [tried_again(3), replace(piece(11, 20, 4), parked=(12, 19))])

    whole = accept(state, reading(105, Origin(A, 20)), scan(100, 105, (101, A, 3), state=state), {})
    part = accept(state, reading(102, Origin(A, 13)), scan(100, 102, (101, A, 3), state=state), {})
    none = accept(state, reading(100, Origin(A, 10)), scan(100, 100, state=state), {})

    assert positions(whole.after)[A] == 21, "what is tried again moves nothing"
    assert whole.marks == ParkedMarks(((A, 12), (A, 19)), ((A, 3),))
    assert (positions(part.after)[A], part.marks) == (14, ParkedMarks(((A, 12),), ((A, 3),)))
    assert (positions(none.after)[A], none.marks) == (11, ParkedMarks())
    assert f"{A} 12, {A} 19: parked; floe parked retry delivers it" in whole.effects
    assert not [line for line in whole.effects if "not expected" in line]


def test_a_parked_message_behind_a_foreign_one_is_marked_by_what_is_there_or_refused() -> None:
    state = open_intent(CLOSED, [tried_again(3), tried_again(4), piece(11, 20, 4)])
    held = [(101, A, 3), (102, None, 0), (103, A, 11)]

    found = [accept(state, reading(103, Origin(A, 11)), scan(100, 103, *held, state=state), {})]
    gone = scan(100, 103, *held[:2], state=state)
    with pytest.raises(CorrectionRefused, match=f"proof that these parked ones are stored or not, .*: {A} 4"):
        accept(state, reading(103), gone, {A: 12})
    found.append(accept(state, reading(103), gone, {}, repeats=True))
    assert [each.marks for each in found] == [ParkedMarks((), ((A, 3),))] * 2


def parked_entry(sequence: int, created: str = "t0", **marks: bool) -> ParkedEntry:
    return ParkedEntry(ParkedName(A, sequence, created), has_message=True, **marks)


def test_the_marks_of_a_lost_state_are_found_in_the_target() -> None:
    """Mark 4, left out, and 6, retried and stored; not 5, carried in its turn, nor 9, not passed yet."""
    entries = [parked_entry(4), parked_entry(5), parked_entry(6, is_passed=True), parked_entry(9)]
    entries += [parked_entry(3, "other")]
    seen = TargetScan(0, 3, parked={(A, each) for each in (3, 4, 5, 6, 9)})
    for at, sequence in enumerate((5, 7, 6), 1):
        seen.add(at, row_of(A, sequence))

    correction = rebuild(None, reading(3, Origin(A, 6)), seen, entries=entries)

    assert correction.marks == ParkedMarks(((A, 4),), ((A, 6),))


def names_of(state: TargetState | None, *sequences: int) -> list[str]:
    assert from_json("T", to_json("T", state)) == state
    return [state.checkpoint.parked_names.name_for(A, sequence) for sequence in sequences]


def test_what_was_parked_counts_for_nothing_where_it_is_carried_again() -> None:
    """Rename it: else `parked retry` would also deliver a message that is carried in its turn this time."""
    back = move(CLOSED, A, 5).after
    assert (names_of(back, 4, 5), back.checkpoint.parked_names.name_for(B, 9)) == (["t0", "t0+1"], "t0")
    assert names_of(move(back, A, 3).after, 2, 3, 5) == ["t0", "t0+1", "t0+2"]
    assert names_of(move(CLOSED, A, 15).after, 5, 15) == ["t0", "t0"]
    assert names_of(forget(CLOSED, reading(100), 0).after, 1) == ["t0+1"]
    assert names_of(forget(CLOSED, reading(0), 0).after, 1) == ["t0+1"]
    assert names_of(forget(CLOSED, reading(7, created="t1"), 0).after, 1) == ["t1"]
    assert names_of(rebuild(CLOSED, reading(2), scan(0, 2, (1, A, 3), (2, A, 5))).after, 5, 6) == ["t0", "t0+1"]
