"""JSON form and storage of the state that ingress holds of a target.

A stored value is untrusted: one that this version did not write stops the target, and only an operator overwrites it.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from common.archive.keys import Layout, SegmentName
from common.chain import Chain
from common.errors import Stopped
from common.exits import choices
from common.hints import checkpoint_command
from common.nats.kv import Bucket, Codec, KvDocument, state_key
from common.sequences import SequenceRange
from ingress.checkpoint import (
    ChainPositions,
    Checkpoint,
    Gap,
    Intent,
    IntentPiece,
    LastMessage,
    ParkedNames,
    StateConflict,
    TargetState,
    moved_positions,
)

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
    return Checkpoint(at, created, ChainPositions.of(positions), begins, ending, parked)


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

    `on_state`: called with each state that is loaded, and with each one before it is saved. `codec`: None for that of
    the target.
    """

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        target: str,
        on_state: Callable[[TargetState], None] = lambda _: None,
        codec: Codec[TargetState] | None = None,
    ) -> None:
        self._document, self._on_state = KvDocument(bucket, key, codec or StateCodec(target), Stopped), on_state

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
