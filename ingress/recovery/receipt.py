"""The receipt of a replay: its request, the ranges that it covers, the state of the target, its end.

All of it is stored under one key of the state bucket. The state of the target has the form that ingress uses, so the
same compare-and-set steps store it; the receipt is an envelope around it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from common.chain import Chain
from common.errors import FloeError, Stopped
from common.exits import choices
from common.nats.kv import KeyValue, state_key
from common.sequences import SequenceRange
from ingress.checkpoint import StateCodec, TargetState, from_json
from ingress.recovery.ranges import ChainRange
from ingress.recovery.request import ReplayHints, ReplayRequest

REPLAY_ROLE = "replay"
RECEIPT_VERSION = 1


def receipt_key(target: str) -> str:
    return state_key(REPLAY_ROLE, target)


@dataclass(frozen=True, slots=True)
class Receipt:
    """One replay. `ranges`: the ranges of the request at its start. `base`: the target's last sequence then.

    `rows`: how many messages; an upper bound unless `is_exact`. `begun`, `finished`: seconds since 1970; 0 for not
    finished. `skips_holes`: the operator allowed it.
    """

    request: ReplayRequest
    ranges: tuple[ChainRange, ...]
    base: int
    rows: int
    is_exact: bool
    begun: float
    finished: float = 0.0
    skips_holes: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "request": self.request.to_json(),
            "ranges": [[str(each.chain), each.rows.first, each.rows.last] for each in self.ranges],
            "base": self.base,
            "rows": self.rows,
            "exact": self.is_exact,
            "begun": self.begun,
            "finished": self.finished,
            "skips_holes": self.skips_holes,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Receipt:
        """Parse a receipt. Raises ValueError, KeyError, TypeError, FloeError."""
        request = ReplayRequest.from_json(document["request"])
        ranges = [
            ChainRange(Chain.parse(chain), SequenceRange(int(first), int(last)))
            for chain, first, last in document["ranges"]
        ]
        base, rows, is_exact = int(document["base"]), int(document["rows"]), bool(document["exact"])
        begun, finished = float(document["begun"]), float(document["finished"])
        return cls(request, tuple(ranges), base, rows, is_exact, begun, finished, bool(document["skips_holes"]))


@dataclass(frozen=True, slots=True)
class StoredReplay:
    """A stored replay: the receipt, the target's state, and the revision of the key."""

    receipt: Receipt
    state: TargetState
    revision: int


@dataclass(frozen=True, slots=True)
class UnreadableReplay:
    """A stored value that this version of Floe did not write: the reason, and the revision of the key."""

    reason: str
    revision: int


async def load_replay(bucket: KeyValue, target: str) -> StoredReplay | UnreadableReplay | None:
    """Return the last replay into `target`; None if there was none. Raises Unavailable."""
    if (entry := await bucket.get(receipt_key(target))) is None:
        return None
    try:
        receipt, inner = _parse(entry.value)
        return StoredReplay(receipt, from_json(target, inner), entry.revision)
    except (ValueError, Stopped) as error:
        return UnreadableReplay(str(error), entry.revision)


def unreadable_replay_error(hints: ReplayHints, reason: str) -> Stopped:
    return Stopped(
        f"stored state of the replay into {hints.request.target} cannot be read: {reason}",
        hint=hints.restart_hint(),
        code="E-STATE-KV",
    )


def other_replay_error(hints: ReplayHints, receipt: Receipt) -> Stopped:
    request, found = hints.request, receipt.request
    return Stopped(
        f"target {request.target}: another replay into it is not finished: expected {request.arguments()}, "
        f"found {found.arguments()}",
        hint=choices(("finish that one", ReplayHints(found).command()), hints.restart_hint("or ")),
        code="E-REPLAY-OTHER",
    )


class ReceiptCodec:
    """The stored form of the state of a target with `receipt` around it, for `ingress.checkpoint.StateStore`."""

    def __init__(self, receipt: Receipt) -> None:
        self.receipt, self._states = receipt, StateCodec(receipt.request.target)

    def encode(self, state: TargetState) -> bytes:
        head = json.dumps(self.receipt.to_json(), separators=(",", ":")).encode()
        return b'{"version":%d,"replay":%b,"state":%b}' % (RECEIPT_VERSION, head, self._states.encode(state))

    def decode(self, raw: bytes) -> TargetState:
        """Return the state alone. Raises Stopped if the receipt around it is unreadable, or of another replay."""
        hints = ReplayHints(self.receipt.request)
        try:
            receipt, inner = _parse(raw)
        except ValueError as error:
            raise unreadable_replay_error(hints, str(error)) from error
        if receipt.request.digest != hints.request.digest:
            raise other_replay_error(hints, receipt)
        return self._states.decode(inner)


def _parse(raw: bytes) -> tuple[Receipt, bytes]:
    """Return the receipt, and the state within. Raises ValueError."""
    try:
        document = json.loads(raw)
        if document["version"] != RECEIPT_VERSION:
            raise ValueError(f"version: expected {RECEIPT_VERSION}, found {document['version']!r:.40}")
        receipt = Receipt.from_json(document["replay"])
        return receipt, json.dumps(document["state"], separators=(",", ":")).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, FloeError) as error:
        raise ValueError(f"{error} (begins {raw[:40]!r})") from error
