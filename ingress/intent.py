"""The intent and the checkpoint of a target: values, and the only ways to go from one to the next.

    checkpoint ──open_intent──► checkpoint + intent ──close_intent──► checkpoint

The intent is stored before the first of its rows is published and the server takes row n only at base + n, so
after any unclear outcome `last sequence of the target − base` rows are stored. An open intent is
finished as it stands and never replaced: a paused twin's late messages are then the very messages its
successor sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from common.chain import Chain
from common.errors import DataError
from common.segments.layout import SegmentName
from common.sequences import SequenceRange

MAX_ROWS = 100_000
MAX_BYTES = 64 * 1024 * 1024
# Keeps the stored value far below the 1 MiB that a message may have by default (about 150 bytes each).
MAX_PIECES = 1_000


class CheckpointConflict(DataError):
    """Rows that do not continue from where the checkpoint stands; nothing was changed."""

    default_code = "E-CHECKPOINT"


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one segment: the sequences `rows` are accounted for by `count` messages of it,
    perhaps none.
    """

    segment: SegmentName
    rows: SequenceRange
    count: int

    @property
    def chain(self) -> Chain:
        return self.segment.chain

    def joined(self, following: Piece) -> Piece | None:
        """Both as one piece; None unless `following` continues this one in the same segment."""
        if following.segment != self.segment or not following.rows.follows(self.rows):
            return None
        return Piece(
            self.segment, SequenceRange(self.rows.first, following.rows.last), self.count + following.count
        )


@dataclass(frozen=True, slots=True)
class Intent:
    """Which rows are about to be published, in this order, after target sequence `base`."""

    base: int
    pieces: tuple[Piece, ...]

    @property
    def count(self) -> int:
        """How many messages it holds; 0 where all pieces are without rows."""
        return sum(piece.count for piece in self.pieces)

    @property
    def end(self) -> int:
        """The target sequence of its last message; `base` without messages."""
        return self.base + self.count

    def piece_at(self, index: int) -> tuple[int, Piece]:
        """Which piece holds message `index` (0 is the first), and how many messages stand before
        that piece.
        """
        before = 0
        for piece in self.pieces:
            if index < before + piece.count:
                return before, piece
            before += piece.count
        raise IndexError(f"message {index} of an intent of {before}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is stored for good: everything below `positions`, up to `target_sequence` of the target.

    `target_created` tells this target from another of the same name. A chain without a position has
    not begun.
    """

    target_sequence: int
    target_created: str
    positions: Mapping[Chain, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TargetState:
    """Everything ingress remembers of one target: the checkpoint, and the open intent if there is one."""

    checkpoint: Checkpoint
    intent: Intent | None = None

    @property
    def expected_sequence(self) -> int:
        """The greatest last sequence that the target can have by our own doing."""
        return self.checkpoint.target_sequence if self.intent is None else self.intent.end


def open_intent(state: TargetState, pieces: Sequence[Piece]) -> TargetState:
    """`state` with an intent over `pieces`. Raises CheckpointConflict where one is open or a piece
    does not fit.
    """
    if state.intent is not None:
        raise CheckpointConflict(f"expected no open intent, found one after sequence {state.intent.base}")
    advanced(state.checkpoint.positions, pieces)
    return replace(state, intent=Intent(state.checkpoint.target_sequence, tuple(pieces)))


def close_intent(state: TargetState) -> TargetState:
    """The checkpoint behind the open intent; call it only when all rows are stored. Raises
    CheckpointConflict.
    """
    if state.intent is None:
        raise CheckpointConflict("expected an open intent, found none")
    positions = advanced(state.checkpoint.positions, state.intent.pieces)
    return TargetState(replace(state.checkpoint, target_sequence=state.intent.end, positions=positions))


def advanced(positions: Mapping[Chain, int], pieces: Sequence[Piece]) -> dict[Chain, int]:
    """`positions` behind `pieces`; each piece must begin exactly where its chain stands (a new one:
    anywhere).

    Raises CheckpointConflict, naming both sequences.
    """
    moved = dict(positions)
    for piece in pieces:
        have = moved.get(piece.chain, piece.rows.first)
        if piece.rows.first != have:
            raise CheckpointConflict(
                f"chain {piece.chain}: expected rows from {have}, got {piece.rows.first}"
            )
        moved[piece.chain] = piece.rows.last + 1
    return moved


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """`pieces` with neighbours that continue each other joined; the order of the messages is unchanged."""
    joined: list[Piece] = []
    for piece in pieces:
        both = joined[-1].joined(piece) if joined else None
        if both is None:
            joined.append(piece)
        else:
            joined[-1] = both
    return joined
