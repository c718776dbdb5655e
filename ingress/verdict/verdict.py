"""What the target's last sequence and its last message say about an intent: a pure verdict.

Nothing here trusts an acknowledgement that was lost. The arithmetic (`last sequence − base` rows are
stored) holds whether or not the messages can still be read; where the last one can be read, its
provenance must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from common.chain import Chain
from ingress.checkpoint import Intent, TargetState


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
    """One look at the target: its last sequence, when it was created, and what its last message says.

    `forgets`: the stream may let go of its last message by itself, so that it proves nothing that it is gone.
    """

    last_sequence: int
    created: str
    tail: Origin | Unread
    forgets: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """What this process knows of the rows of an open intent: the first `acknowledged` are stored for certain;
    those behind the first `handed` were never given to the connection (None: another process may have sent
    them).
    """

    acknowledged: int
    handed: int | None = None


@dataclass(slots=True)
class Sending:
    """Remembers what was sent of the intent that was stored at `revision`, for as long as one lease lasts:
    another process may send whatever it likes of an intent that it takes over.
    """

    revision: int = 0
    _sent: Sent = Sent(0)

    def opens(self, revision: int) -> None:
        """This process opened the intent, and nothing of it was sent."""
        self.revision, self._sent = revision, Sent(0, 0)

    def settled(self, revision: int, stored: int) -> None:
        """So many rows of the intent are known to be stored, whoever opened it."""
        before = self.of(revision) or Sent(0)
        self.revision, self._sent = revision, replace(before, acknowledged=max(before.acknowledged, stored))

    def begins(self) -> Sent:
        """Rows are about to be sent: until `ends` says more, any of them may be on its way."""
        before, self._sent = self._sent, replace(self._sent, handed=None)
        return before

    def ends(self, before: Sent, stored: int, handed: int) -> None:
        """`stored` rows are acknowledged; those from `handed` on were not given to the connection."""
        most = None if before.handed is None else max(before.handed, stored, handed)
        self._sent = Sent(max(before.acknowledged, stored), most)

    def of(self, revision: int) -> Sent | None:
        """What is known of the intent stored at that revision; None: nothing."""
        return self._sent if revision == self.revision else None


class Finding(Enum):
    """What a reading means; `Verdict.detail` names both sides."""

    STORED = "the arithmetic holds"
    AHEAD = "the target is further than this state explains"
    FOREIGN = "the last message is not the one that stands there by the intent"
    UNREAD = "rows count as stored that nobody can read, and that the stream does not let go of by itself"
    MIXED = "messages of others may stand among those of the open intent"
    BEHIND = "the target ends before the checkpoint"
    RECREATED = "another stream of the same name"
    GONE = "there is no such stream"


NOT_COUNTED = "expected one that was opened with `exclusive: true`, found one of `exclusive: false`"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`stored`: how many messages of the open intent are stored; 0 unless the finding is STORED. `at`: where
    the message stands that speaks against going on; 0: none does. `doubt`: how far the counting is trusted.
    """

    finding: Finding
    stored: int = 0
    detail: str = ""
    at: int = field(default=0, compare=False)
    doubt: Doubt | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Of the `count` rows of the open intent the first `certain` are stored; `counted` are by the last
    sequence, which something else may have moved.
    """

    certain: int
    counted: int
    count: int


@dataclass(frozen=True, slots=True)
class Settled:
    """`stored`: how many messages of the open intent are stored (0 without one). `base`: row n of the intent
    is to stand at target sequence base + n, from the first row that is not stored on.
    """

    base: int
    stored: int


def judge(
    state: TargetState, reading: Reading | None, expected: int | None = None, sent: Sent | None = None
) -> Verdict:
    """How much of the open intent (if any) is stored, or what speaks against going on.

    `reading`: None where there is no such stream. `expected`: the exact sequence of the chain's
    message that must stand last, where the caller knows it. `sent`: what the caller knows of its rows.
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
        return _ahead(state, reading, state.expected_sequence, sent)
    if not agrees:
        detail = _disagreement(state, reading, expected)
        return Verdict(Finding.FOREIGN, detail=detail, at=reading.last_sequence)
    stored = reading.last_sequence - checkpoint.target_sequence
    return _unread(state, reading, stored, sent or Sent(0)) or Verdict(Finding.STORED, stored)


def _ahead(state: TargetState, reading: Reading, most: int, sent: Sent | None) -> Verdict:
    """The target ends behind `most`, the last sequence that our own doing explains."""
    last, intent, doubt = reading.last_sequence, state.intent, None
    if intent is not None and reading.tail is Unread.GONE:
        certain = sent.acknowledged if sent else 0
        doubt = Doubt(certain, min(intent.count, last - intent.base), intent.count)
    detail = f"last sequence: expected at most {most}, found {last}"
    return Verdict(Finding.AHEAD, detail=detail, at=most + 1, doubt=doubt)


def _unread(state: TargetState, reading: Reading, stored: int, sent: Sent) -> Verdict | None:
    """What speaks against counting a last row that cannot be read; None: nothing does.

    A purge up to a sequence beyond the end moves the last sequence without anything having been stored. What
    this process never sent was stored by nobody; for what it may have sent, the stream must be one that lets
    go of its last message. A row that can be read proves itself, whoever sent it.
    """
    intent, last = state.intent, reading.last_sequence
    if intent is None or reading.tail is not Unread.GONE or last <= state.checkpoint.begins:
        return None
    if sent.handed is not None and stored > sent.handed:
        return _ahead(state, reading, intent.base + sent.handed, sent)
    if stored <= sent.acknowledged or reading.forgets:
        return None
    found = f"message {last}, row {stored} of the {intent.count} of the open intent, is gone"
    doubt = Doubt(sent.acknowledged, stored, intent.count)
    return Verdict(Finding.UNREAD, detail=f"{found}; known to be stored: {sent.acknowledged}", doubt=doubt)


def newest(intent: Intent, read: Mapping[int, Origin | Unread]) -> int:
    """How many rows of the intent are stored at least, by what was `read` of the target, by its sequences."""
    for at in sorted(read, reverse=True):
        origin, index = read[at], at - intent.base - 1
        if isinstance(origin, Origin) and 0 <= index < intent.count:
            piece = intent.piece_at(index)[1]
            if origin.chain == piece.chain and origin.sequence in piece.rows:
                return index + 1
    return 0


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
            return Verdict(Finding.FOREIGN, detail=f"message {at} {origin.value}, {expected}", at=at)
        if isinstance(origin, Origin) and (origin.chain != piece.chain or origin.sequence not in piece.rows):
            found = f"message {at} is {origin.chain} {origin.sequence}"
            return Verdict(Finding.FOREIGN, detail=f"{found}, {expected}", at=at)
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
