"""Verdict on an open intent, from the target's last sequence and its last message; and the reads of the target.

It never relies on lost acknowledgements. The arithmetic (`last sequence − base` rows are stored) holds even if the
messages can no longer be read. If the last one can be read, its provenance must agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from common.archive.segment import Message, decode_subject
from common.chain import Chain
from common.clock import NS_PER_S, format_time
from common.errors import FloeError, OtherWriter, Stopped
from common.exits import checkpoint_command, choices
from common.nats.api import STREAM_NOT_FOUND, query_message, ready_stream_info
from common.nats.client import FloeClient
from common.nats.headers import split_provenance
from ingress.checkpoint import Checkpoint, Intent, IntentPiece, LastMessage, TargetState


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a message of the target by its provenance: its chain and its sequence there."""

    chain: Chain
    sequence: int

    def is_of(self, part: IntentPiece | LastMessage) -> bool:
        return self.chain == part.chain and self.sequence in part.rows


class NoOrigin(Enum):
    """Reason why the last message of the target proves nothing, or contradicts the state."""

    GONE = "not held any more, or there is none"
    FOREIGN = "has no header Floe-Source: Floe did not write it"


@dataclass(frozen=True, slots=True)
class TargetReading:
    """One reading of the target: its last sequence, its creation time, and the origin of its last message.

    `may_drop_last`: the stream may remove its last message by itself. Then a missing last message proves nothing.
    """

    last_sequence: int
    created: str
    last_origin: Origin | NoOrigin
    may_drop_last: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """Knowledge of this process about the rows of an open intent: the first `acknowledged` are certainly stored; those
    after the first `handed_upto` were never given to the connection (None: any of them may have been sent).
    """

    acknowledged: int
    handed_upto: int | None = None


@dataclass(slots=True)
class Sending:
    """Record of the rows that were sent of the intent stored at `revision`, for one lease: a process that takes over an
    intent may send any of it.
    """

    revision: int = 0
    _sent: Sent = Sent(0)

    def open(self, revision: int) -> None:
        self.revision, self._sent = revision, Sent(0, 0)

    def record_settled(self, revision: int, stored: int) -> None:
        before = self.sent_of(revision) or Sent(0)
        self.revision, self._sent = revision, replace(before, acknowledged=max(before.acknowledged, stored))

    def begin(self) -> Sent:
        """Record that rows are about to be sent: until `end`, any may be in flight. Return the record before that."""
        before, self._sent = self._sent, replace(self._sent, handed_upto=None)
        return before

    def end(self, before: Sent, stored: int, handed_upto: int) -> None:
        most = None if before.handed_upto is None else max(before.handed_upto, stored, handed_upto)
        self._sent = Sent(max(before.acknowledged, stored), most)

    def sent_of(self, revision: int) -> Sent | None:
        """Return the record; None if nothing is known of the intent stored at that revision."""
        return self._sent if revision == self.revision else None


class Finding(Enum):
    """Meaning of a reading; `IntentVerdict.detail` names both sides."""

    STORED = "the arithmetic holds"
    AHEAD = "the target is ahead of its stored state"
    FOREIGN = "a message is not the one that the stored state expects"
    UNREAD = "rows count as stored that cannot be read, and that the stream does not drop by itself"
    MIXED = "foreign messages may be among those of the open intent"
    BEHIND = "the target ends before the checkpoint"
    RECREATED = "another stream of the same name"
    GONE = "there is no such stream"


SHARED_INTENT_DETAIL = "expected one that was opened with `exclusive: true`, found one of `exclusive: false`"


@dataclass(frozen=True, slots=True)
class IntentVerdict:
    """Finding about the open intent. `stored`: the number of its messages that are stored; 0 unless the finding is
    STORED. `at`: target sequence of the message that contradicts the state; 0: none. `doubt`: doubt about the count.
    """

    finding: Finding
    stored: int = 0
    detail: str = ""
    at: int = field(default=0, compare=False)
    doubt: Doubt | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Doubt about a count. Of the `count` rows of the open intent the first `certain` are stored; `counted` are stored
    by the last sequence, which something else may have moved.
    """

    certain: int
    counted: int
    count: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Settled outcome. `stored`: the number of messages of the open intent that are stored (0 without one). `base`: row
    n of the intent must be at target sequence base + n, from the first row that is not stored on.
    """

    base: int
    stored: int


_GONE = IntentVerdict(Finding.GONE, detail="expected the stream, found none")


def judge(
    state: TargetState, reading: TargetReading | None, expected: int | None = None, sent: Sent | None = None
) -> IntentVerdict:
    """Judge how much of the open intent (if any) is stored, or find a contradiction.

    `reading`: None if there is no such stream. `expected`: the exact sequence of the chain's message that must be
    last, if the caller knows it. `sent`: the caller's knowledge of the rows.
    """
    if reading is None:
        return _GONE
    checkpoint, last = state.checkpoint, reading.last_sequence
    is_explained = checkpoint.target_sequence <= last <= state.expected_sequence and can_count(state)
    against = _tail_contradiction(state, reading, expected) if is_explained else ""
    # Some servers report another creation time after a restart; a message of ours in its place proves the same stream.
    proves = is_explained and not against and isinstance(reading.last_origin, Origin) and last > checkpoint.foreign_upto
    is_same = reading.created == checkpoint.target_created or proves
    if (replaced := _replaced_verdict(checkpoint, reading, is_same)) is not None:
        return replaced
    if not can_count(state):
        return IntentVerdict(Finding.MIXED, detail=SHARED_INTENT_DETAIL)
    if last > state.expected_sequence:
        return _ahead(state, reading, state.expected_sequence, sent)
    if against:
        return IntentVerdict(Finding.FOREIGN, detail=against, at=last)
    stored = last - checkpoint.target_sequence
    return _uncountable(state, reading, stored, sent or Sent(0)) or IntentVerdict(Finding.STORED, stored)


def judge_shared(state: TargetState, reading: TargetReading | None, drifted: AbstractSet[str]) -> IntentVerdict:
    """Return STORED (with 0: the count is read elsewhere), or a contradiction.

    `drifted`: creation times that are known to be those of the same stream.
    """
    if reading is None:
        return _GONE
    is_same = reading.created in (state.checkpoint.target_created, *drifted)
    return _replaced_verdict(state.checkpoint, reading, is_same) or IntentVerdict(Finding.STORED)


def _replaced_verdict(checkpoint: Checkpoint, reading: TargetReading, is_same: bool) -> IntentVerdict | None:
    """Return a contradiction in the stream as a whole; None without one."""
    last, least = reading.last_sequence, checkpoint.target_sequence
    if not is_same:
        detail = f"created: expected {checkpoint.target_created}, found {reading.created}"
        return IntentVerdict(Finding.RECREATED, detail=detail)
    if last < least:
        return IntentVerdict(Finding.BEHIND, detail=f"last sequence: expected at least {least}, found {last}")
    return None


def _ahead(state: TargetState, reading: TargetReading, most: int, sent: Sent | None) -> IntentVerdict:
    """Return the verdict that the target ends after `most`, the last sequence that Floe's own writes explain."""
    last, intent, doubt = reading.last_sequence, state.intent, None
    if intent is not None and reading.last_origin is NoOrigin.GONE:
        certain = sent.acknowledged if sent else 0
        doubt = Doubt(certain, min(intent.count, last - intent.base), intent.count)
    detail = f"last sequence: expected at most {most}, found {last}"
    return IntentVerdict(Finding.AHEAD, detail=detail, at=most + 1, doubt=doubt)


def _uncountable(state: TargetState, reading: TargetReading, stored: int, sent: Sent) -> IntentVerdict | None:
    """Return the verdict against counting a last row that cannot be read; None if it counts.

    A purge up to a sequence beyond the end moves the last sequence although nothing was stored. Rows that this process
    never sent were not stored. For rows that it may have sent, the stream must be one that removes its last message by
    itself. A row that can be read proves itself, from any process.
    """
    intent, last = state.intent, reading.last_sequence
    if intent is None or reading.last_origin is not NoOrigin.GONE or last <= state.checkpoint.foreign_upto:
        return None
    if sent.handed_upto is not None and stored > sent.handed_upto:
        return _ahead(state, reading, intent.base + sent.handed_upto, sent)
    if stored <= sent.acknowledged or reading.may_drop_last:
        return None
    found = f"message {last}, row {stored} of the {intent.count} of the open intent, is gone"
    doubt = Doubt(sent.acknowledged, stored, intent.count)
    return IntentVerdict(Finding.UNREAD, detail=f"{found}; known to be stored: {sent.acknowledged}", doubt=doubt)


def least_stored(intent: Intent, read: Mapping[int, Origin | NoOrigin]) -> int:
    """Return how many rows of the intent are stored at least, from messages that were `read`, by target sequence."""
    for at in sorted(read, reverse=True):
        origin, row = read[at], at - intent.base
        if 1 <= row <= intent.count and isinstance(origin, Origin) and origin.is_of(intent.piece_at(row - 1)[1]):
            return row
    return 0


def can_count(state: TargetState) -> bool:
    """True if the arithmetic holds for the open intent, if there is one: no foreign messages may be before or between
    its rows.
    """
    intent = state.intent
    return intent is None or (not intent.is_shared and intent.base == state.checkpoint.target_sequence)


def piece_contradiction(intent: Intent, read: Mapping[int, Origin | NoOrigin]) -> IntentVerdict | None:
    """Return the contradiction at the ends of the intent's pieces that were `read`, by target sequence; None
    without one. Messages that are gone prove nothing.

    The last message alone could agree by chance if another writer stored other rows before it.
    """
    for at, piece in intent.pieces_by_end(intent.count).items():
        origin = read.get(at, NoOrigin.GONE)
        if origin is NoOrigin.GONE or (isinstance(origin, Origin) and origin.is_of(piece)):
            continue
        found = origin.value if isinstance(origin, NoOrigin) else f"is {origin.chain} {origin.sequence}"
        detail = f"message {at} {found}, expected {piece.chain} {piece.rows}"
        return IntentVerdict(Finding.FOREIGN, detail=detail, at=at)
    return None


def _tail_contradiction(state: TargetState, reading: TargetReading, expected: int | None) -> str:
    checkpoint, last, tail = state.checkpoint, reading.last_sequence, reading.last_origin
    if tail is NoOrigin.GONE or last <= checkpoint.foreign_upto:
        return ""
    if not isinstance(tail, Origin):
        return f"message {last} {tail.value}"
    stored = last - checkpoint.target_sequence
    if state.intent is not None and stored > 0:
        piece = state.intent.piece_at(stored - 1)[1]
        is_ours = tail.is_of(piece) and expected in (None, tail.sequence)
        wanted = f"{piece.chain} {piece.rows if expected is None else expected}"
    elif checkpoint.last_message is not None:
        is_ours = tail.is_of(checkpoint.last_message)
        wanted = f"{checkpoint.last_message.chain} {checkpoint.last_message.rows}"
    else:
        is_ours = tail.sequence < checkpoint.positions.get(tail.chain, 0)
        wanted = "a row before the position of its chain"
    return "" if is_ours else f"message {last} is {tail.chain} {tail.sequence}, expected {wanted}"


class TargetErrors:
    """Errors about one target."""

    def __init__(self, target: str) -> None:
        self.target, self._accept = target, checkpoint_command(target, "--accept")
        self._from_target = checkpoint_command(target, "--from-target")
        self._forget = checkpoint_command(target, "--forget")

    def no_checkpoint(self, reading: TargetReading | None) -> FloeError:
        if reading is None:
            return self.error(_GONE, [])
        return Stopped(
            f"target {self.target}: expected a checkpoint or an empty stream, found last sequence "
            f"{reading.last_sequence} and no checkpoint",
            hint=choices(("restore the state bucket; or continue after the messages in the target", self._from_target)),
            code="E-TARGET-NOT-EMPTY",
        )

    def error(self, verdict: IntentVerdict, seen: Sequence[TargetReading], described: str = "") -> FloeError:
        """Return the error for a verdict. `seen`: the readings, oldest first. `described`: the message that contradicts
        the state, as far as it can be read.
        """
        message = f"target {self.target}: {verdict.finding.value}: {verdict.detail}"
        message = f"{message}; {described}" if described else message
        if verdict.finding in (Finding.GONE, Finding.RECREATED):
            return Stopped(message, hint=self._replaced_remedies(seen), code=f"E-TARGET-{verdict.finding.name}")
        if verdict.finding is Finding.BEHIND:
            again = "restore a newer copy; or deliver the lost messages again (their readers get them twice)"
            hint = choices((again, self._from_target), ("or continue without them", self._accept))
            return Stopped(message, hint=hint, code="E-TARGET-BEHIND")
        if verdict.finding is Finding.MIXED:
            drop = "or drop the rest of the intent, and leave the other messages in place"
            hint = choices(("set `exclusive: false` again until the intent is closed; " + drop, self._accept))
            return Stopped(message, hint=hint, code="E-TARGET-SHARED")
        if verdict.finding is Finding.UNREAD and verdict.doubt is not None:
            return Stopped(message, hint=self._count_remedies(verdict.doubt), code="E-TARGET-UNREAD")
        return self._foreign_error(message, verdict.doubt, seen)

    def _replaced_remedies(self, seen: Sequence[TargetReading]) -> str:
        if not seen or seen[-1].last_sequence == 0:
            return choices(("restore the stream; or fill an empty one from the archive", self._forget))
        same = "or, if only its creation time changed, or if delivered messages must not come again"
        behind = "restore the stream; or continue after the messages in this one"
        return choices((behind, self._from_target), (same, self._accept))

    def _foreign_error(self, message: str, doubt: Doubt | None, seen: Sequence[TargetReading]) -> FloeError:
        hint = choices(("stop its other publisher; then leave those messages in place", self._accept))
        if doubt is not None:
            hint = choices("stop its other publisher or purger; then choose", self._count_remedies(doubt))
        # A writer that stored messages only before the last two readings has ended.
        if len(seen) > 1 and seen[-1].last_sequence > seen[-2].last_sequence:
            return OtherWriter(f"{message}; its last sequence still grows", hint=hint, code="E-TARGET-SHARED")
        if seen and isinstance(seen[-1].last_origin, Origin):
            hint = choices(hint, ("or, if the state bucket is an old copy", self._from_target))
        return Stopped(message, hint=hint, code="E-TARGET-SHARED")

    def _count_remedies(self, doubt: Doubt) -> str:
        rest = f"of the {doubt.count} rows of the open intent"
        again = f"{rest}, send those from row {doubt.certain + 1} on (those already stored come twice)"
        count = f"or count {doubt.counted} {rest} as stored (those not stored are lost)"
        stored = [checkpoint_command(self.target, f"--stored {rows}") for rows in (doubt.certain, doubt.counted)]
        return choices((again, stored[0]), (count, stored[1]))


PARALLEL_MESSAGE_READS = 32  # messages that are requested at the same time


class TargetStream:
    """The target stream as one client sees it; `connect` opens a client for verdicts that need a fresh reading."""

    def __init__(
        self,
        client: FloeClient,
        stream: str,
        connect: Callable[[], Awaitable[FloeClient]],
        control_headers: frozenset[bytes] = frozenset(),
    ) -> None:
        self._client, self._stream, self._connect = client, stream, connect
        self._control_headers = control_headers

    async def read(self) -> TargetReading | None:
        """Read the target; None if there is no such stream. Raises Unavailable, OutcomeUnknown."""
        return await read_target(self._client, self._stream, self._control_headers)

    async def read_fresh(self) -> TargetReading | None:
        """Read it over a new connection, which cannot be one to a deposed leader. Otherwise as `read`."""
        async with aclosing(await self._connect()) as client:
            return await read_target(client, self._stream, self._control_headers)

    async def read_origins(self, places: Collection[int]) -> dict[int, Origin | NoOrigin]:
        """Read the origins of the messages at these target sequences. Raises as `read`."""
        gate = asyncio.Semaphore(PARALLEL_MESSAGE_READS)

        async def one(place: int) -> Origin | NoOrigin:
            async with gate:
                return await _read_origin(self._client, self._stream, place)

        found = await asyncio.gather(*map(one, places))
        return dict(zip(places, found, strict=True))

    async def describe(self, place: int) -> str:
        """Describe the message at this target sequence, for people; empty if it is gone. Raises as `read`."""
        if (message := await _message(self._client, self._stream, place)) is None:
            return ""
        provenance, _ = split_provenance(message.headers)
        at = format_time(message.timestamp_ns // NS_PER_S * NS_PER_S)
        header = "without" if provenance is None else "with"
        subject = decode_subject(message.subject)
        return f"message {place} has subject {subject!r}, was stored at {at}, {header} the header Floe-Source"


async def read_target(
    client: FloeClient, stream: str, control_headers: frozenset[bytes] = frozenset()
) -> TargetReading | None:
    if (info := await ready_stream_info(client, stream)) is None:
        return None
    tail = await _read_origin(client, stream, info.last_sequence)
    may_drop = may_drop_last(info.config, control_headers, client.max_payload)
    return TargetReading(info.last_sequence, info.created, tail, may_drop)


def may_drop_last(config: Mapping[str, Any], control_headers: frozenset[bytes], largest: int) -> bool:
    """True if the stream may remove its last message by itself: it is consumed, it expires, or it is larger than all
    that the stream may hold. Every other limit removes older messages first.

    `largest`: the most bytes of a message.
    """
    is_consumed = config.get("retention", "limits") != "limits"
    expires = int(config.get("max_age") or 0) > 0 or b"nats-ttl" in control_headers
    return is_consumed or expires or 0 < int(config.get("max_bytes") or -1) < largest


async def _read_origin(client: FloeClient, stream: str, sequence: int) -> Origin | NoOrigin:
    message = await _message(client, stream, sequence) if sequence else None
    return NoOrigin.GONE if message is None else origin_of(message.headers)


async def _message(client: FloeClient, stream: str, sequence: int) -> Message | None:
    """Read a message; None if it is gone. Its subject is for people only: the JSON cannot represent every subject."""
    return await query_message(client, stream, {"seq": sequence}, STREAM_NOT_FOUND)


def origin_of(headers: bytes | None) -> Origin | NoOrigin:
    provenance, _ = split_provenance(headers)
    try:
        return NoOrigin.FOREIGN if provenance is None else Origin(provenance.chain, provenance.sequence)
    except ValueError:
        return NoOrigin.FOREIGN
