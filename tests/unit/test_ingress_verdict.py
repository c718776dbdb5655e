"""What the target's last sequence and message mean, and what an operator is told."""

from __future__ import annotations

import re
import shlex

import pytest

from common.chain import Chain
from common.errors import AnotherWriter, Stopped
from common.segments.layout import SegmentName
from common.sequences import SequenceRange
from ingress.checkpoints.cli import checkpoint_set
from ingress.checkpoints.intent import Checkpoint, Ending, Piece, TargetState, open_intent
from ingress.verdicts.choices import Choices
from ingress.verdicts.verdict import Finding, Origin, Reading, Unread, Verdict, contradiction, judge

A, B, C = Chain("us-east", "NODES"), Chain("eu-west", "NODES"), Chain("eu-west", "OTHER")


def piece(first: int, last: int, count: int, chain: Chain = A) -> Piece:
    return Piece(SegmentName(chain, 0, SequenceRange(1, 1000), "0" * 16), SequenceRange(first, last), count)


CLOSED = TargetState(Checkpoint(100, "t0", {A: 11, B: 5}))
OPEN = open_intent(CLOSED, [piece(11, 20, 4), piece(5, 9, 5, B)])


def reading(last: int, tail: Origin | Unread = Unread.GONE, created: str = "t0") -> Reading:
    return Reading(last, created, tail)


@pytest.mark.parametrize("stored", [0, 1, 4, 5, 9])
def test_the_arithmetic_holds_where_the_last_message_cannot_be_read(stored: int) -> None:
    assert judge(OPEN, reading(100 + stored)) == Verdict(Finding.STORED, stored)


@pytest.mark.parametrize(
    ("last", "tail"),
    [
        (101, Origin(A, 11)),
        (104, Origin(A, 20)),
        (105, Origin(B, 5)),
        (109, Origin(B, 9)),
        (100, Origin(B, 4)),
    ],
)
def test_a_last_message_that_stands_there_by_the_intent_agrees(last: int, tail: Origin) -> None:
    assert judge(OPEN, reading(last, tail)).finding is Finding.STORED


@pytest.mark.parametrize(
    ("last", "tail"),
    [
        (104, Unread.FOREIGN),
        (104, Origin(B, 5)),
        (105, Origin(A, 20)),
        (104, Origin(A, 21)),
        (100, Origin(A, 11)),
        (100, Unread.FOREIGN),
    ],
)
def test_a_last_message_that_is_another_one_speaks_against_going_on(last: int, tail: Origin | Unread) -> None:
    assert judge(OPEN, reading(last, tail)).finding is Finding.FOREIGN


def test_where_the_exact_sequence_is_known_it_must_be_that_one() -> None:
    assert judge(OPEN, reading(102, Origin(A, 13)), 13).finding is Finding.STORED
    verdict = judge(OPEN, reading(102, Origin(A, 13)), 14)
    assert verdict.finding is Finding.FOREIGN
    assert verdict.detail == "message 102 is us-east/NODES/0000/0 13, expected us-east/NODES/0000/0 14"


@pytest.mark.parametrize("base", [100, 130])
@pytest.mark.parametrize("stored", [0, 4, 9])
def test_an_intent_that_others_may_stand_in_is_never_counted(base: int, stored: int) -> None:
    """`exclusive: false` became `true` while it was open: what stands behind the checkpoint may be theirs."""
    pieces = [piece(11, 20, 4), piece(5, 9, 5, B)]
    shared = open_intent(CLOSED, pieces, base, is_shared=True)

    assert judge(shared, reading(base + stored)).finding is Finding.MIXED
    assert judge(shared, reading(base + 9, Origin(B, 9))).finding is Finding.MIXED
    # Another stream is not vouched for either.
    assert judge(shared, reading(base + 9, Origin(B, 9), "t1")).finding is Finding.RECREATED
    # A state of a version that did not write down for whom it was.
    assert judge(open_intent(CLOSED, pieces, 130), reading(130)).finding is Finding.MIXED


def test_a_target_beyond_the_intent_was_written_by_somebody_else() -> None:
    assert judge(OPEN, reading(110)).finding is Finding.AHEAD
    assert judge(CLOSED, reading(101, Origin(A, 11))).finding is Finding.AHEAD


def test_a_target_before_the_checkpoint_has_lost_messages() -> None:
    verdict = judge(OPEN, reading(99))
    assert verdict == Verdict(Finding.BEHIND, detail="last sequence: expected at least 100, found 99")


def test_a_target_created_at_another_time_is_another_one() -> None:
    assert judge(OPEN, reading(0, created="t1")).finding is Finding.RECREATED
    assert judge(OPEN, reading(105, created="t1")).finding is Finding.RECREATED
    assert judge(OPEN, None).finding is Finding.GONE


def test_a_message_of_ours_in_its_place_vouches_for_a_creation_time_that_drifted() -> None:
    assert judge(OPEN, reading(105, Origin(B, 5), "t1")) == Verdict(Finding.STORED, 5)
    assert judge(CLOSED, reading(100, Origin(A, 10), "t1")).finding is Finding.STORED
    assert judge(CLOSED, reading(100, Origin(A, 11), "t1")).finding is Finding.RECREATED


def test_what_stands_at_or_below_begins_vouches_for_nothing() -> None:
    begun = TargetState(Checkpoint(100, "t0", {A: 11}, begins=100))

    assert judge(begun, reading(100, Unread.FOREIGN)).finding is Finding.STORED
    assert judge(begun, reading(100, Origin(A, 10), "t1")).finding is Finding.RECREATED


def test_a_checkpoint_knows_which_message_it_ends_with() -> None:
    """An old copy of the state, and a target that was filled anew in another order, to the same length."""
    ended = TargetState(Checkpoint(100, "t0", {A: 51, B: 51}, ending=Ending(B, SequenceRange(41, 50))))

    assert judge(ended, reading(100, Origin(B, 45))).finding is Finding.STORED
    assert judge(ended, reading(100, Origin(B, 20), "t1")).finding is Finding.RECREATED
    verdict = judge(ended, reading(100, Origin(A, 40)))
    assert verdict.finding is Finding.FOREIGN
    assert verdict.detail == "message 100 is us-east/NODES/0000/0 40, expected eu-west/NODES/0000/0 41..50"


def test_the_ends_of_the_pieces_before_the_last_message_must_be_ours_too() -> None:
    """Two ingresses with a state bucket each, on one target: the last message agrees by chance."""
    intent = open_intent(CLOSED, [piece(11, 15, 5), piece(5, 9, 5, B), piece(16, 20, 5)]).intent
    assert intent is not None

    assert contradiction(intent, {105: Origin(A, 15), 110: Unread.GONE, 115: Origin(A, 20)}) is None
    other = contradiction(intent, {105: Origin(A, 15), 110: Origin(C, 9)})
    assert other is not None
    assert other.detail == "message 110 is eu-west/OTHER/0000/0 9, expected eu-west/NODES/0000/0 5..9"
    foreign = contradiction(intent, {105: Unread.FOREIGN})
    assert foreign is not None
    assert foreign.finding is Finding.FOREIGN


@pytest.mark.parametrize("finding", [f for f in Finding if f is not Finding.STORED])
def test_every_stop_names_the_choices(finding: Finding) -> None:
    error = Choices("FLEET").error(Verdict(finding, detail="expected 1, found 2"), [reading(1), reading(1)])

    assert isinstance(error, Stopped)
    assert error.message.startswith("target FLEET: ")
    assert "expected 1, found 2" in error.message
    for command in (named := re.findall(r"floe checkpoint set ([^;]+)", error.hint)):
        # The command line takes it as it stands.
        context = checkpoint_set.make_context("set", shlex.split(command))
        assert context.params["target"] == "FLEET"
    assert named
    assert error.code.startswith("E-TARGET-")


def test_a_target_that_still_moves_has_another_writer() -> None:
    error = Choices("FLEET").error(Verdict(Finding.AHEAD, detail="both sides"), [reading(5), reading(7)])

    assert isinstance(error, AnotherWriter)
    assert error.exit_code == 4
