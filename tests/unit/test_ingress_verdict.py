"""What the target's last sequence and message mean, and what an operator is told."""

from __future__ import annotations

import pytest

from common.chain import Chain
from common.errors import AnotherWriter, Stopped
from common.segments.layout import SegmentName
from common.sequences import SequenceRange
from ingress.checkpoints.intent import Checkpoint, Piece, TargetState, open_intent
from ingress.verdicts.choices import Choices
from ingress.verdicts.verdict import Finding, Origin, Reading, Unread, Verdict, judge

A, B = Chain("us-east", "NODES"), Chain("eu-west", "NODES")


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


@pytest.mark.parametrize("finding", [f for f in Finding if f is not Finding.STORED])
def test_every_stop_names_the_choices(finding: Finding) -> None:
    error = Choices("FLEET", "nats kv del S ingress.FLEET").error(
        Verdict(finding, detail="expected 1, found 2"), [reading(1), reading(1)]
    )

    assert isinstance(error, Stopped)
    assert error.message.startswith("target FLEET: ")
    assert "expected 1, found 2" in error.message
    assert "nats kv del S ingress.FLEET" in error.hint
    assert error.code.startswith("E-TARGET-")


def test_a_target_that_still_moves_has_another_writer() -> None:
    error = Choices("FLEET", "forget").error(
        Verdict(Finding.AHEAD, detail="both sides"), [reading(5), reading(7)]
    )

    assert isinstance(error, AnotherWriter)
    assert error.exit_code == 4
