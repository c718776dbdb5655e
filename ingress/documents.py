"""The JSON form of what ingress remembers of a target. Read back, it is untrusted: a value that is not
what this
version wrote stops the target and is never overwritten."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from common.chain import Chain
from common.errors import Stopped
from common.segments.layout import Layout, SegmentName
from common.sequences import SequenceRange
from ingress.intent import Checkpoint, Intent, Piece, TargetState

VERSION = 1


def to_json(target: str, state: TargetState) -> bytes:
    """The stored form of `state`."""
    checkpoint = state.checkpoint
    return json.dumps(
        {
            "version": VERSION,
            "target": target,
            "target_sequence": checkpoint.target_sequence,
            "target_created": checkpoint.target_created,
            "positions": {str(chain): at for chain, at in sorted(checkpoint.positions.items())},
            "intent": state.intent and _intent_json(state.intent),
        },
        separators=(",", ":"),
    ).encode()


def from_json(target: str, raw: bytes) -> TargetState:
    """What `to_json` wrote for this target. Raises Stopped (E-STATE-KV), naming what is wrong."""
    try:
        document = json.loads(raw)
        if not isinstance(document, dict):
            raise TypeError(f"expected an object, found {type(document).__name__}")
        if document.get("version") != VERSION:
            raise ValueError(f"version: expected {VERSION}, found {document.get('version')!r:.40}")
        if document.get("target") != target:
            raise ValueError(f"target: expected {target}, found {document.get('target')!r:.80}")
        return TargetState(_checkpoint(document), _intent(document["intent"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _refuse(target, error, raw)


def _refuse(target: str, error: Exception, raw: bytes) -> NoReturn:
    raise Stopped(
        f"stored state of target {target} cannot be read: {error} (begins {raw[:40]!r})",
        hint="restore the key from a backup of the bucket, or begin again with an empty target",
        code="E-STATE-KV",
    ) from error


def _intent_json(intent: Intent) -> dict[str, Any]:
    return {"base": intent.base, "rows": [_piece_json(piece) for piece in intent.pieces]}


def _piece_json(piece: Piece) -> list[str | int]:
    name = piece.segment
    segment = f"{name.level}/{name.coverage.last}-{name.coverage.first}-{name.digest}"
    return [str(piece.chain), segment, piece.rows.first, piece.rows.last, piece.count]


def _checkpoint(document: dict[str, Any]) -> Checkpoint:
    positions = {Chain.parse(chain): _count(at, "position") for chain, at in document["positions"].items()}
    created = document["target_created"]
    if not isinstance(created, str):
        raise TypeError(f"target_created: expected text, found {created!r:.40}")
    return Checkpoint(_count(document["target_sequence"], "target_sequence"), created, positions)


def _intent(document: Any) -> Intent | None:
    if document is None:
        return None
    return Intent(_count(document["base"], "base"), tuple(_piece(*row) for row in document["rows"]))


def _piece(chain: str, segment: str, first: int, last: int, count: int) -> Piece:
    level, _, name = segment.partition("/")
    segment_last, segment_first, digest = name.split("-")
    coverage = SequenceRange(int(segment_first), int(segment_last))
    name_of = SegmentName(Chain.parse(chain), int(level), coverage, digest)
    Layout().segment(name_of)  # raises ValueError for a level or a digest that no key has
    rows = SequenceRange(_count(first, "first"), _count(last, "last"))
    if not coverage.encloses(rows) or not 0 <= _count(count, "count") <= len(rows):
        raise ValueError(f"piece {segment}: expected rows {rows} inside {coverage}, {count} of them")
    return Piece(name_of, rows, count)


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: expected a number from 0, found {value!r:.40}")
    return value
