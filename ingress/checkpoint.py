"""The intent and the checkpoint of a target: values, the functions that derive the next state, and their storage.

    checkpoint ──open_intent──► checkpoint + intent ──close_intent──► checkpoint

The intent is stored before the first of its rows is published, and the server accepts row n only at base + n. So
after any unclear outcome `last sequence of the target − base` rows are stored. An open intent is finished unchanged
and never replaced. Late messages of a paused instance are then exactly the messages that its successor sends.

A stored value is untrusted: one that this version did not write stops the target, and only an operator overwrites it.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import msgspec

from common.archive.keys import Layout, SegmentName
from common.chain import Chain
from common.errors import DataError, Stopped
from common.exits import checkpoint_command, choices
from common.nats.kv import Bucket, Codec, KvDocument, state_key
from common.sequences import SequenceRange

MAX_INTENT_ROWS = 100_000
MAX_INTENT_BYTES = 64 * 1024 * 1024
# Keeps the stored value far below the 1 MiB that a message may have by default (about 150 bytes each).
MAX_INTENT_PIECES = 1_000
# Parked messages that an intent names (about 12 bytes each).
MAX_INTENT_PARKED = 10_000


class StateConflict(DataError):
    """Conflict with the state: rows that are not at the position, or an intent open or missing. Nothing is changed."""

    default_code = "E-CHECKPOINT"


@dataclass(frozen=True, slots=True)
class Gap:
    """Placeholder that a piece holds instead of a segment name: its sequences are an accepted or a skipped gap."""

    chain: Chain


@dataclass(frozen=True, slots=True)
class IntentPiece:
    """A range of one segment: `count` messages (perhaps none) account for the sequences `rows`.

    `parked`: sequences of parked messages that the segment holds, ascending; they are not part of `count`.
    `is_retry`: True for parked messages that are retried. They are below the chain's position and do not move it.
    """

    segment: SegmentName | Gap
    rows: SequenceRange
    count: int
    parked: tuple[int, ...] = ()
    is_retry: bool = False

    @property
    def chain(self) -> Chain:
        return self.segment.chain

    def merge_with(self, following: IntentPiece) -> IntentPiece | None:
        """Return both as one piece; None unless `following` continues this one in the same segment, both in turn."""
        is_continued = following.segment == self.segment and following.rows.follows(self.rows)
        if not is_continued or self.is_retry or following.is_retry:
            return None
        rows = SequenceRange(self.rows.first, following.rows.last)
        return IntentPiece(self.segment, rows, self.count + following.count, self.parked + following.parked)


@dataclass(frozen=True, slots=True)
class Intent:
    """The rows that are about to be published, in this order, after target sequence `base`.

    `is_shared`: messages of other publishers may be between them, so a count does not show how many are stored.
    """

    base: int
    pieces: tuple[IntentPiece, ...]
    is_shared: bool = False

    @property
    def count(self) -> int:
        return sum(piece.count for piece in self.pieces)

    @property
    def end(self) -> int:
        """The target sequence of its last message; `base` if it has no messages."""
        return self.base + self.count

    @property
    def last_message(self) -> LastMessage | None:
        last = next((piece for piece in reversed(self.pieces) if piece.count), None)
        return None if last is None else LastMessage(last.chain, last.rows)

    def placed_pieces(self) -> Iterator[tuple[int, IntentPiece]]:
        """Yield the pieces, each after the number of messages before it."""
        return zip(accumulate((piece.count for piece in self.pieces), initial=0), self.pieces, strict=False)

    def pieces_by_end(self, stored: int) -> dict[int, IntentPiece]:
        """Map each target sequence at which a piece with messages ends to that piece, within the first `stored`."""
        ends = ((before + piece.count, piece) for before, piece in self.placed_pieces())
        return {self.base + end: piece for end, piece in ends if piece.count and end <= stored}

    def piece_at(self, index: int) -> tuple[int, IntentPiece]:
        """Return the piece that holds message `index` (from 0), and the number of messages before that piece."""
        for before, piece in self.placed_pieces():
            if index < before + piece.count:
                return before, piece
        raise IndexError(f"message {index} of an intent of {self.count}")


@dataclass(frozen=True, slots=True)
class LastMessage:
    """The message that a checkpoint ends with: one of `rows` of `chain`."""

    chain: Chain
    rows: SequenceRange


class ChainPositions(dict[Chain, int]):
    """The next sequence of each chain, as a value: it never changes after it was made.

    `by_text`: the same by the text of the chain, in the order of the chains, as it is stored. It follows each step, so
    that a step costs two flat copies, and not the text and the order of ten thousand chains.
    """

    by_text: dict[str, int]
    _order: list[Chain]

    @classmethod
    def of(cls, positions: Mapping[Chain, int]) -> ChainPositions:
        if isinstance(positions, ChainPositions):
            return positions
        found = cls(positions)
        found._order = sorted(positions)
        found.by_text = {str(chain): positions[chain] for chain in found._order}
        return found

    def replaced(self, moved: Mapping[Chain, int]) -> ChainPositions:
        """Return the positions with those of `moved` in place of their former ones, or added."""
        found = ChainPositions(self)
        found.update(moved)
        found._order, found.by_text = self._order, self.by_text.copy()
        if new := [chain for chain in moved if chain not in self]:
            found._order, rows = self._order.copy(), list(self.by_text.items())
            for chain in new:
                at = bisect(found._order, chain)
                found._order.insert(at, chain)
                rows.insert(at, (str(chain), 0))
            found.by_text = dict(rows)
        found.by_text.update((str(chain), at) for chain, at in moved.items())
        return found


@dataclass(frozen=True, slots=True)
class ParkedNames:
    """The names under which the parked messages of a target are stored.

    `created`: creation time of the stream when the first message was parked. `repeats`: one entry for each repeat that
    an operator ordered: its chain (None: all chains), and the sequence from which on messages parked before do not
    count.
    """

    created: str
    repeats: tuple[tuple[Chain | None, int], ...] = ()

    def name_for(self, chain: Chain, sequence: int) -> str:
        """Return the name for one message. It changes with each repeat of its chain."""
        times = sum(each in (None, chain) and sequence >= first for each, first in self.repeats)
        return self.all_names()[times]

    def all_names(self) -> list[str]:
        return [self.created, *(f"{self.created}+{times}" for times in range(1, len(self.repeats) + 1))]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The rows that are known to be stored: everything below `positions`, up to `target_sequence` of the target.

    `target_created` distinguishes this target from another of the same name. A chain without a position has not begun.
    `foreign_upto`: messages at or below this target sequence existed before Floe, or an operator accepted them; Floe
    need not have published them. `last_message`: the message at `target_sequence`; None if it is not known. `parked`:
    None if no repeat was ever ordered and the stream is the first one. `writers`: random names of the last deliveries
    of this centre, the newest first, by which it recognises its positions in the bucket; empty: those that are there
    are taken over, because an operator decided about the state, or it is older than these names.
    """

    target_sequence: int
    target_created: str
    positions: Mapping[Chain, int] = field(default_factory=dict)
    foreign_upto: int = 0
    last_message: LastMessage | None = None
    parked: ParkedNames | None = None
    writers: tuple[str, ...] = ()

    @property
    def parked_names(self) -> ParkedNames:
        return self.parked or ParkedNames(self.target_created)


@dataclass(frozen=True, slots=True)
class TargetState:
    """The stored state of one target: the checkpoint, and the open intent if there is one."""

    checkpoint: Checkpoint
    intent: Intent | None = None

    @property
    def expected_sequence(self) -> int:
        """The greatest last sequence that the target can have if only Floe publishes to it."""
        return self.checkpoint.target_sequence if self.intent is None else self.intent.end


def open_intent(
    state: TargetState, pieces: Sequence[IntentPiece], base: int | None = None, *, is_shared: bool = False
) -> TargetState:
    """Return the state with an open intent. Raises StateConflict if one is already open or a piece does not fit.

    `base`: the target sequence before its first row, if foreign messages follow the checkpoint (None: there are
    none). `is_shared`: as in `Intent`.
    """
    if state.intent is not None:
        raise StateConflict(f"expected no open intent, found one after sequence {state.intent.base}")
    moved_positions(state.checkpoint.positions, pieces)
    base = state.checkpoint.target_sequence if base is None else base
    return replace(state, intent=Intent(base, tuple(pieces), is_shared))


def share_intent(state: TargetState) -> TargetState:
    """Mark the open intent as shared: foreign messages may be between its rows. Raises StateConflict."""
    if state.intent is None:
        raise StateConflict("expected an open intent, found none")
    return replace(state, intent=replace(state.intent, is_shared=True))


def close_intent(state: TargetState, base: int | None = None) -> TargetState:
    """Return the checkpoint after the open intent. Call only when all rows are stored. Raises StateConflict.

    `base`: the target sequence of the last row minus the number of rows, if foreign messages in between have moved it
    (None: there are none).
    """
    if state.intent is None:
        raise StateConflict("expected an open intent, found none")
    positions = advance_positions(state.checkpoint.positions, state.intent.pieces)
    end = (state.intent.base if base is None else base) + state.intent.count
    last = state.intent.last_message or state.checkpoint.last_message
    return TargetState(replace(state.checkpoint, target_sequence=end, positions=positions, last_message=last))


def advance_positions(positions: Mapping[Chain, int], pieces: Sequence[IntentPiece]) -> ChainPositions:
    """Return `positions` after `pieces`. Raises as `moved_positions` does."""
    return ChainPositions.of(positions).replaced(moved_positions(positions, pieces))


def moved_positions(positions: Mapping[Chain, int], pieces: Sequence[IntentPiece]) -> dict[Chain, int]:
    """Return the positions that `pieces` move, after them. Each piece must begin exactly at its chain's position (a new
    chain: anywhere). A piece out of turn moves nothing and is not checked.

    Raises StateConflict, which names both sequences.
    """
    moved: dict[Chain, int] = {}
    for piece in pieces:
        if piece.is_retry:
            continue
        have = moved.get(piece.chain) or positions.get(piece.chain, piece.rows.first)
        if piece.rows.first != have:
            raise StateConflict(f"chain {piece.chain}: expected rows from {have}, found {piece.rows.first}")
        moved[piece.chain] = piece.rows.last + 1
    return moved


def merge_pieces(pieces: Sequence[IntentPiece]) -> list[IntentPiece]:
    joined: list[IntentPiece] = []
    for piece in pieces:
        both = joined[-1].merge_with(piece) if joined else None
        if both is None:
            joined.append(piece)
        else:
            joined[-1] = both
    return joined


# Storage

STATE_VERSION = 1
_GAP = "gap"  # instead of a segment name
_ENCODER = msgspec.json.Encoder()


def to_json(target: str, state: TargetState) -> bytes:
    checkpoint, ending, parked = state.checkpoint, state.checkpoint.last_message, state.checkpoint.parked
    repeats = [[chain and str(chain), first] for chain, first in parked.repeats] if parked else []
    document = {
        "version": STATE_VERSION,
        "target": target,
        "target_sequence": checkpoint.target_sequence,
        "target_created": checkpoint.target_created,
        "positions": ChainPositions.of(checkpoint.positions).by_text,
        "intent": state.intent and _intent_json(state.intent),
        **({"begins": checkpoint.foreign_upto} if checkpoint.foreign_upto else {}),
        **({"ending": [str(ending.chain), ending.rows.first, ending.rows.last]} if ending else {}),
        **({"parked": [parked.created, *repeats]} if parked else {}),
        **({"writers": checkpoint.writers} if checkpoint.writers else {}),
    }
    with suppress(UnicodeEncodeError):  # half of a surrogate pair, in a name
        if (raw := _ENCODER.encode(document)).isascii():
            return raw
    # Other characters are stored escaped.
    return json.dumps(document, separators=(",", ":")).encode()


def from_json(target: str, raw: bytes) -> TargetState:
    """Parse the stored state. Raises Stopped (E-STATE-KV), which names the error."""
    try:
        document = json.loads(raw)
        if not isinstance(document, dict):
            raise TypeError(f"expected an object, found {type(document).__name__}")
        if document.get("version") != STATE_VERSION:
            raise ValueError(f"version: expected {STATE_VERSION}, found {document.get('version')!r:.40}")
        if document.get("target") != target:
            raise ValueError(f"target: expected {target}, found {document.get('target')!r:.80}")
        state = TargetState(_checkpoint(document), _intent(document["intent"]))
        moved_positions(state.checkpoint.positions, state.intent.pieces if state.intent else ())
        return state
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, StateConflict) as error:
        remedy = f"restore {state_key(STATE_ROLE, target)} of the state bucket; or continue after the target's messages"
        raise Stopped(
            f"stored state of target {target} cannot be read: {error} (begins {raw[:40]!r})",
            hint=choices((remedy, checkpoint_command(target, "--from-target"))),
            code="E-STATE-KV",
        ) from error


def _intent_json(intent: Intent) -> dict[str, Any]:
    document = {"base": intent.base, "rows": [_piece_json(piece) for piece in intent.pieces]}
    return {**document, "shared": True} if intent.is_shared else document


def _piece_json(piece: IntentPiece) -> list[Any]:
    name, text = piece.segment, _GAP
    if not isinstance(name, Gap):
        text = f"{name.level}/{name.coverage.last}-{name.coverage.first}-{name.digest}"
    row = [str(piece.chain), text, piece.rows.first, piece.rows.last, piece.count]
    return [*row, list(piece.parked), piece.is_retry] if piece.parked or piece.is_retry else row


def _checkpoint(document: dict[str, Any]) -> Checkpoint:
    positions = {Chain.parse(chain): _count(at, "position") for chain, at in document["positions"].items()}
    created = document["target_created"]
    if not isinstance(created, str):
        raise TypeError(f"target_created: expected text, found {created!r:.40}")
    begins = _count(document.get("begins", 0), "begins")
    ending, parked = _ending(document.get("ending")), _parked(document.get("parked"))
    at = _count(document["target_sequence"], "target_sequence")
    writers = tuple(map(str, document.get("writers", ())))
    return Checkpoint(at, created, ChainPositions.of(positions), begins, ending, parked, writers)


def _parked(document: Any) -> ParkedNames | None:
    if document is None:
        return None
    created, *repeats = document
    if not isinstance(created, str):
        raise TypeError(f"parked: expected text, found {created!r:.40}")
    named = ((None if chain is None else Chain.parse(chain), _count(at, "parked")) for chain, at in repeats)
    return ParkedNames(created, tuple(named))


def _ending(document: Any) -> LastMessage | None:
    if document is None:
        return None
    chain, first, last = document
    return LastMessage(Chain.parse(chain), SequenceRange(_count(first, "first"), _count(last, "last")))


def _intent(document: Any) -> Intent | None:
    if document is None:
        return None
    pieces = tuple(_piece(*row) for row in document["rows"])
    return Intent(_count(document["base"], "base"), pieces, document.get("shared", False) is True)


def _piece(
    chain: str, segment: str, first: int, last: int, count: int, left_out: Any = (), out_of_turn: Any = False
) -> IntentPiece:
    rows = SequenceRange(_count(first, "first"), _count(last, "last"))
    without = tuple(_count(sequence, "left out") for sequence in left_out)
    most = len(rows) - len(without)
    if not 0 <= _count(count, "count") <= most or any(sequence not in rows for sequence in without):
        raise ValueError(f"piece {segment}: expected at most {most} of {rows}, found {count}")
    return IntentPiece(_segment(Chain.parse(chain), segment, rows), rows, count, without, out_of_turn is True)


def _segment(chain: Chain, text: str, rows: SequenceRange) -> SegmentName | Gap:
    if text == _GAP:
        return Gap(chain)
    level, _, name = text.partition("/")
    last, first, digest = name.split("-")
    coverage = SequenceRange(int(first), int(last))
    found = SegmentName(chain, int(level), coverage, digest)
    Layout().segment(found)  # raises ValueError for a level or a digest that no key has
    if not coverage.encloses(rows):
        raise ValueError(f"piece {text}: expected rows {rows} inside {coverage}")
    return found


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: expected a number from 0, found {value!r:.40}")
    return value


STATE_ROLE = "ingress"
MAX_STATE_BYTES = 900 * 1024  # bytes; a server accepts messages of up to 1 MiB by default


@dataclass(frozen=True, slots=True)
class StoredState:
    """The state that was read or written (None: there is none yet) and its revision (0: none yet)."""

    state: TargetState | None
    revision: int

    @property
    def existing(self) -> TargetState:
        assert self.state is not None, "only what exists is settled"
        return self.state


class StateChanged(Exception):
    """A change of the stored state by another instance or an operator; `stored` is the present value."""

    def __init__(self, stored: StoredState) -> None:
        super().__init__("state changed by another instance")
        self.stored = stored


class StateCodec:
    """The stored form of the state of one target, with a bound on its size. The last state is kept: most reads find it
    unchanged.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._last: tuple[bytes, TargetState] | None = None

    def encode(self, state: TargetState) -> bytes:
        """Encode the state. Raises Stopped (E-STATE-SIZE) if it is too large."""
        value = to_json(self._target, state)
        if len(value) > MAX_STATE_BYTES:
            message = f"state of target {self._target}: expected at most {MAX_STATE_BYTES} bytes, found {len(value)}"
            spread = "spread its sources over several targets; or forget chains that are no longer listed"
            forget = checkpoint_command(self._target, "--forget-unlisted")
            raise Stopped(message, hint=choices((spread, forget)), code="E-STATE-SIZE")
        self._last = value, state
        return value

    def decode(self, raw: bytes) -> TargetState:
        if self._last is None or self._last[0] != raw:
            self._last = raw, from_json(self._target, raw)
        return self._last[1]


class StateStore:
    """The stored state of one target, under one key.

    `on_state`: called with each state that is loaded, and with each one before it is saved. `key`, `codec`: of another
    kind of state; empty and None for those of a delivery.
    """

    def __init__(
        self,
        bucket: Bucket,
        target: str,
        on_state: Callable[[TargetState], None] = lambda _: None,
        *,
        key: str = "",
        codec: Codec[TargetState] | None = None,
    ) -> None:
        key, self._on_state = key or state_key(STATE_ROLE, target), on_state
        self._document = KvDocument(bucket, key, codec or StateCodec(target), Stopped)

    async def load(self) -> StoredState:
        """Load the state. Raises Stopped if it cannot be parsed, Unavailable, OutcomeUnknown."""
        state, revision = await self._document.get()
        if state is not None:
            self._on_state(state)
        return StoredState(state, revision)

    async def save(self, state: TargetState, revision: int) -> StoredState | None:
        """Store `state` if the revision still is `revision` (0: if there is no value yet).

        None if it does not: another writer was first. A lost answer is settled by a read (`KvDocument`). Raises Stopped
        if the state is too large, Unavailable, and OutcomeUnknown if the read does not settle it.
        """
        self._on_state(state)
        written = await self._document.update(state, revision)
        return None if written is None else StoredState(state, written)
