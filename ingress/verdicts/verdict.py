"""What the target's last sequence and its last message say about an intent: a pure verdict.

Nothing here trusts an acknowledgement that was lost. The arithmetic (`last sequence − base` rows are
stored) holds whether or not the messages can still be read; where the last one can be read, its
provenance must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from common.chain import Chain
from ingress.checkpoints.intent import Intent, TargetState


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a message of the target says it comes from: its chain and its sequence there."""

    chain: Chain
    sequence: int


class Unread(Enum):
    """Why the last message of the target testifies to nothing, or against us."""

    GONE = "not held any more, or there is none"
    FOREIGN = "carries no provenance: Floe did not write it"


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the target: its last sequence, when it was created, and what its last message says."""

    last_sequence: int
    created: str
    tail: Origin | Unread


class Finding(Enum):
    """What a reading means; `Verdict.detail` names both sides."""

    STORED = "the arithmetic holds"
    AHEAD = "the target is further than this state explains"
    FOREIGN = "the last message is not the one that stands there by the intent"
    MIXED = "messages of others may stand among those of the open intent"
    BEHIND = "the target ends before the checkpoint"
    RECREATED = "another stream of the same name"
    GONE = "there is no such stream"


NOT_COUNTED = "expected one that was opened with `exclusive: true`, found one of `exclusive: false`"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`stored`: how many messages of the open intent are stored; 0 unless the finding is STORED."""

    finding: Finding
    stored: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    """`stored`: how many messages of the open intent are stored (0 without one). `base`: row n of the intent
    is to stand at target sequence base + n, from the first row that is not stored on.
    """

    base: int
    stored: int


def judge(state: TargetState, reading: Reading | None, expected: int | None = None) -> Verdict:
    """How much of the open intent (if any) is stored, or what speaks against going on.

    `reading`: None where there is no such stream. `expected`: the exact sequence of the chain's
    message that must stand last, where the caller knows it.
    """
    if reading is None:
        return Verdict(Finding.GONE, detail="expected the stream, found none")
    checkpoint = state.checkpoint
    agrees = _agrees(state, reading, expected)
    if reading.created != checkpoint.target_created and not _vouches(reading, agrees, checkpoint.begins):
        return Verdict(
            Finding.RECREATED,
            detail=f"created: expected {checkpoint.target_created}, found {reading.created}",
        )
    if reading.last_sequence < checkpoint.target_sequence:
        detail = (
            f"last sequence: expected at least {checkpoint.target_sequence}, found {reading.last_sequence}"
        )
        return Verdict(Finding.BEHIND, detail=detail)
    if not counts(state):
        return Verdict(Finding.MIXED, detail=NOT_COUNTED)
    if reading.last_sequence > state.expected_sequence:
        detail = f"last sequence: expected at most {state.expected_sequence}, found {reading.last_sequence}"
        return Verdict(Finding.AHEAD, detail=detail)
    if not agrees:
        return Verdict(Finding.FOREIGN, detail=_disagreement(state, reading, expected))
    return Verdict(Finding.STORED, reading.last_sequence - checkpoint.target_sequence)


def counts(state: TargetState) -> bool:
    """Whether the arithmetic holds for the open intent, if there is one: nobody else's messages may stand
    before or between its rows.
    """
    intent = state.intent
    return intent is None or (not intent.is_shared and intent.base == state.checkpoint.target_sequence)


def contradiction(intent: Intent, read: Mapping[int, Origin | Unread]) -> Verdict | None:
    """What speaks against the intent among the ends of its pieces that were `read`, by target sequence; None:
    nothing. What is not held any more speaks for nothing.

    The last message alone could agree by chance where another writer stored other rows before it.
    """
    for at, piece in intent.ends(intent.count).items():
        origin = read.get(at, Unread.GONE)
        expected = f"expected {piece.chain} {piece.rows}"
        if origin is Unread.FOREIGN:
            return Verdict(Finding.FOREIGN, detail=f"message {at} {origin.value}, {expected}")
        if isinstance(origin, Origin) and (origin.chain != piece.chain or origin.sequence not in piece.rows):
            found = f"message {at} is {origin.chain} {origin.sequence}"
            return Verdict(Finding.FOREIGN, detail=f"{found}, {expected}")
    return None


def _vouches(reading: Reading, agrees: bool, begins: int) -> bool:
    """Some servers report another creation time after a restart; a message of ours in its place tells so."""
    return agrees and isinstance(reading.tail, Origin) and reading.last_sequence > begins


def _agrees(state: TargetState, reading: Reading, expected: int | None) -> bool:
    if not state.checkpoint.target_sequence <= reading.last_sequence <= state.expected_sequence:
        return False
    if not counts(state):
        return False
    if reading.tail is Unread.GONE or reading.last_sequence <= state.checkpoint.begins:
        return True
    return isinstance(reading.tail, Origin) and _stands_there(
        state, reading.last_sequence, reading.tail, expected
    )


def _stands_there(state: TargetState, last_sequence: int, tail: Origin, expected: int | None) -> bool:
    checkpoint, ending = state.checkpoint, state.checkpoint.ending
    stored = last_sequence - checkpoint.target_sequence
    if state.intent is None or stored == 0:
        if ending is not None:
            return tail.chain == ending.chain and tail.sequence in ending.rows
        return tail.sequence < checkpoint.positions.get(tail.chain, 0)
    piece = state.intent.piece_at(stored - 1)[1]
    return tail.chain == piece.chain and tail.sequence in piece.rows and expected in (None, tail.sequence)


def _disagreement(state: TargetState, reading: Reading, expected: int | None) -> str:
    if not isinstance(reading.tail, Origin):
        return f"message {reading.last_sequence} {Unread.FOREIGN.value}"
    found = f"message {reading.last_sequence} is {reading.tail.chain} {reading.tail.sequence}"
    stored = reading.last_sequence - state.checkpoint.target_sequence
    if state.intent is None or stored == 0:
        ending = state.checkpoint.ending
        wanted = "one below the positions" if ending is None else f"{ending.chain} {ending.rows}"
        return f"{found}, expected {wanted}"
    piece = state.intent.piece_at(stored - 1)[1]
    return f"{found}, expected {piece.chain} {piece.rows if expected is None else expected}"
