"""Settlement of unclear outcomes: by a read of the target, and of the stored state if the target alone is unclear."""

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from common.clock import Backoff, Clock, doubling_delays
from common.errors import DataError, FloeError, LeaseLost, OutcomeUnknown, Unavailable
from common.logs import get_logger
from common.nats.api import RESTORING_CODE
from ingress.checkpoint import Intent, IntentPiece, StateChanged, StateStore, StoredState
from ingress.rows.rows import Rows
from ingress.verdict.verdict import (
    Doubt,
    Finding,
    IntentVerdict,
    NoOrigin,
    Origin,
    Sending,
    Settled,
    TargetErrors,
    TargetReading,
    TargetStream,
    judge,
    judge_shared,
    least_stored,
    piece_contradiction,
)

log = get_logger(__name__)


T = TypeVar("T")

CONFIRM_READINGS = 3  # equal readings before a verdict that stops
CONFIRM_INTERVAL_S = 10.0  # seconds between them
MAX_DOUBT_MESSAGES = 1000  # messages that are read at most to find a row of a doubtful intent
MESSAGES_PER_READ = 50
TARGET_ANSWER_TIMEOUT_S = 30.0  # seconds without an answer of the target before the whole delivery restarts
READ_PAUSES_S = doubling_delays(0.05, 5.0)  # seconds between two requests


class Leaseholder(Protocol):
    """The right to publish into the target (`common.nats.lease.Lease`)."""

    def is_usable(self) -> bool: ...


class TargetReconciler:
    """Comparison of one exclusive target with its stored state.

    `sending`: the rows of the open intent that this process sent. `is_shared`: True if messages of other publishers
    may be between the rows.
    """

    is_shared = False

    def __init__(
        self,
        errors: TargetErrors,
        store: StateStore,
        stream: TargetStream,
        lease: Leaseholder,
        clock: Clock,
        confirm_interval_s: float = CONFIRM_INTERVAL_S,
        sending: Sending | None = None,
    ) -> None:
        self.target, self._errors = errors.target, errors
        self._store, self._stream, self._lease = store, stream, lease
        self._clock, self._confirm_interval_s = clock, confirm_interval_s
        self.sending = sending or Sending()
        self.pending_reason = ""  # the reason why the target may have to stop, while it is being confirmed
        self._proved_upto = (0, 0)  # a revision, and the target sequence up to which the pieces of its intent are ours

    async def settle(self, known: StoredState, rows: Rows | None) -> Settled:
        """Read from the target how many messages of the open intent of `known` are stored.

        `rows`: the intent's messages, if they are in memory. Raises StateChanged if another instance changed the state;
        Stopped or OtherWriter if the target contradicts the state three times; LeaseLost; and the error of the target
        if it gives no answer for `TARGET_ANSWER_TIMEOUT_S` seconds.
        """
        while True:
            reading = await self._read_with_retry(self._stream.read)
            verdict = await self._judge(known, reading, rows)
            if verdict.finding is Finding.STORED and reading is not None:
                self.pending_reason = ""
                return await self._settle_base(known, rows, reading, verdict)
            await self.check_moved(known)
            self.pending_reason = f"checked again before it stops: {verdict.detail or verdict.finding.name}"
            await self._confirm(known, reading, verdict, rows)

    async def check_moved(self, known: StoredState) -> None:
        """Raise StateChanged if the stored state is no longer `known`, Unavailable if it was removed."""
        stored = await self._store.load()
        if stored.revision == known.revision:
            return
        if stored.state is None:
            raise Unavailable(f"state of target {self.target} was removed", code="E-STATE-GONE")
        raise StateChanged(stored)

    def check_lease(self) -> None:
        """Raise LeaseLost if the lease may no longer be used."""
        if not self._lease.is_usable():
            raise LeaseLost(f"lease of target {self.target}: no longer held by this process")

    async def load_first(self) -> tuple[StoredState, TargetReading | None]:
        """Return the stored state and a reading of the target; without a state, a target with which one may begin.

        Raises Stopped if there is no state, and three readings show a target with which none may begin.
        """
        for reading_number in range(CONFIRM_READINGS):
            if reading_number:
                await self._clock.sleep(self._confirm_interval_s)
            # Read the target before the state: every stored row had an intent before.
            reading = await self._read_with_retry(self._stream.read)
            stored = await self._store.load()
            if stored.state is not None or (reading is not None and self._may_begin_with(reading)):
                return stored, reading
        raise self._errors.no_checkpoint(reading)

    # Overridden for a shared target

    def _may_begin_with(self, reading: TargetReading) -> bool:
        """True if the target never held a message; only then may a state begin with it."""
        return reading.last_sequence == 0

    async def _settle_base(
        self, known: StoredState, _rows: Rows | None, _reading: TargetReading, verdict: IntentVerdict
    ) -> Settled:
        return Settled(known.existing.checkpoint.target_sequence, verdict.stored)

    async def _judge(self, known: StoredState, reading: TargetReading | None, rows: Rows | None) -> IntentVerdict:
        intent, expected = known.existing.intent, None
        if reading is not None and rows is not None and intent is not None:
            last = reading.last_sequence - intent.base - 1
            expected = rows.sequence(last) if 0 <= last < rows.count else None
        verdict = judge(known.existing, reading, expected, self.sending.sent_of(known.revision))
        if verdict.finding is not Finding.STORED or intent is None:
            return verdict
        if self._proved_upto[0] != known.revision:
            # Messages that an operator accepted need not be ours.
            self._proved_upto = (known.revision, max(intent.base, known.existing.checkpoint.foreign_upto))
        places = [at for at in intent.pieces_by_end(verdict.stored) if at > self._proved_upto[1]]
        against = piece_contradiction(intent, await self._origins(places) if places else {})
        if against is not None:
            return against
        self._proved_upto = (known.revision, max([self._proved_upto[1], *places]))
        return verdict

    # Reading

    async def _read_with_retry(self, question: Callable[[], Awaitable[T]]) -> T:
        deadline, pauses = self._clock.monotonic() + TARGET_ANSWER_TIMEOUT_S, Backoff(None, READ_PAUSES_S)
        while True:
            pause = pauses.next_delay()
            try:
                return await question()
            except (Unavailable, OutcomeUnknown, DataError) as error:
                if error.code == RESTORING_CODE or self._clock.monotonic() + pause >= deadline:
                    raise
            await self._clock.sleep(pause)

    async def _origins(self, places: Collection[int]) -> Mapping[int, Origin | NoOrigin]:
        return await self._read_with_retry(lambda: self._stream.read_origins(places))

    async def _confirm(
        self, known: StoredState, reading: TargetReading | None, verdict: IntentVerdict, rows: Rows | None
    ) -> None:
        """Read again, on fresh connections. Return if the finding changes, else raise its error.

        `CONFIRM_READINGS` readings must agree. For a finding that another writer may cause, the last sequence must also
        be still in all of them, or have moved in the last one.
        """
        finding, seen = verdict.finding, [reading]
        context = {"target": self.target, "finding": finding.name, "error": verdict.detail}
        log.warning("verdict deferred until confirmed", action="verdict_deferred", **context)
        while not is_confirmed(finding, seen):
            await self._clock.sleep(self._confirm_interval_s)
            self.check_lease()
            seen.append(await self._stream.read_fresh())
            await self.check_moved(known)
            verdict = await self._judge(known, seen[-1], rows)
            if verdict.finding is not finding:
                return
        raise await self._error(known, verdict, [each for each in seen if each is not None])

    async def _error(self, known: StoredState, verdict: IntentVerdict, seen: list[TargetReading]) -> FloeError:
        if verdict.doubt is not None and verdict.doubt.certain < verdict.doubt.counted:
            verdict = replace(verdict, doubt=await self._narrow_doubt(known, verdict.doubt))
        described = ""
        if verdict.at and seen:
            for at in dict.fromkeys((verdict.at, seen[-1].last_sequence)):
                described = described or await self._read_with_retry(partial(self._stream.describe, at))
        return self._errors.error(verdict, seen, described)

    async def _narrow_doubt(self, known: StoredState, doubt: Doubt) -> Doubt:
        intent = known.existing.intent
        assert intent is not None, "only rows of an open intent are doubted"
        above = intent.base + max(doubt.certain, doubt.counted - MAX_DOUBT_MESSAGES)
        places = range(intent.base + doubt.counted, above, -1)
        for start in range(0, len(places), MESSAGES_PER_READ):
            if certain := least_stored(intent, await self._origins(places[start : start + MESSAGES_PER_READ])):
                return replace(doubt, certain=certain)
        return doubt


def is_confirmed(finding: Finding, seen: Sequence[TargetReading | None]) -> bool:
    """True if enough was read for a verdict that stops; `seen`: the readings with this finding, oldest first."""
    if len(seen) < CONFIRM_READINGS:
        return False
    ends = [each.last_sequence for each in seen[-CONFIRM_READINGS:] if each is not None]
    still = len(set(ends)) <= 1 or finding not in (Finding.AHEAD, Finding.FOREIGN, Finding.UNREAD)
    return still or ends[-1] > ends[-2]


# Messages of the target that are read for one open intent. Beyond that, an instance that takes over sends the rest of
# the intent again rather than read for minutes.
MAX_SCANNED_MESSAGES = 50_000
MIN_SCAN_MESSAGES, MAX_SCAN_MESSAGES = 16, 512  # messages that are requested at the same time


@dataclass(frozen=True, slots=True)
class _Scan:
    """Result of the reads for the intent stored at `revision`, up to target sequence `upto`: the `newest` of its rows
    that was found, and its target sequence `at`.
    """

    revision: int
    upto: int
    newest: Origin | None = None
    at: int = 0


class SharedTargetReconciler(TargetReconciler):
    """Comparison of one target that is not exclusive with its stored state. Foreign messages between the rows of the
    open intent and the end are stepped over. The base is chosen so that the next row is expected right after the
    target's last message.
    """

    is_shared = True
    _scan = _Scan(0, 0)
    _drifted: frozenset[str] = frozenset()

    def _may_begin_with(self, _reading: TargetReading) -> bool:
        return True  # it holds only foreign messages

    async def _settle_base(
        self, known: StoredState, rows: Rows | None, reading: TargetReading, _verdict: IntentVerdict
    ) -> Settled:
        intent, last = known.existing.intent, reading.last_sequence
        if intent is None:
            return Settled(last, 0)
        # In parallel: the longer it takes, the more likely is a foreign message meanwhile.
        stored, _ = await asyncio.gather(self._stored(known.revision, intent, rows, last), self.check_moved(known))
        # The base of a complete intent gives its end, independent of later messages; one without rows has no end.
        return Settled((self._scan.at if 0 < stored == intent.count else last) - stored, stored)

    async def _judge(self, known: StoredState, reading: TargetReading | None, _rows: Rows | None) -> IntentVerdict:
        checkpoint = known.existing.checkpoint
        is_drifted = reading and reading.created not in (checkpoint.target_created, *self._drifted)
        if reading and is_drifted and 0 < checkpoint.target_sequence <= reading.last_sequence:
            # Some servers report another creation time after a restart; a row of ours there proves the same stream.
            origin = (await self._origins([checkpoint.target_sequence]))[checkpoint.target_sequence]
            if isinstance(origin, Origin) and origin.sequence < checkpoint.positions.get(origin.chain, 0):
                self._drifted |= {reading.created}
        return judge_shared(known.existing, reading, self._drifted)

    async def _stored(self, revision: int, intent: Intent, rows: Rows | None, last: int) -> int:
        former = self._scan if self._scan.revision == revision else _Scan(revision, intent.base)
        found = await self._newest(intent, former.upto, last)
        upto = max(last, former.upto)
        if found is None or _stored_upto(intent, found[0], rows) < _stored_upto(intent, former.newest, rows):
            self._scan = _Scan(revision, upto, former.newest, former.at)
        else:
            self._scan = _Scan(revision, upto, *found)
        return _stored_upto(intent, self._scan.newest, rows)

    async def _newest(self, intent: Intent, after: int, last: int) -> tuple[Origin, int] | None:
        lowest, size = max(after, last - MAX_SCANNED_MESSAGES), MIN_SCAN_MESSAGES
        while last > lowest:
            first = max(lowest, last - size) + 1
            origins = await self._origins(range(first, last + 1))
            for at in range(last, first - 1, -1):
                origin = origins[at]
                if isinstance(origin, Origin) and _piece_of(intent, origin) is not None:
                    return origin, at
            last, size = first - 1, min(MAX_SCAN_MESSAGES, size * 2)
        return None


def _piece_of(intent: Intent, origin: Origin) -> tuple[int, IntentPiece] | None:
    for before, piece in intent.placed_pieces():
        if piece.count and origin.is_of(piece) and origin.sequence not in piece.parked:
            return before, piece
    return None


def _stored_upto(intent: Intent, origin: Origin | None, rows: Rows | None) -> int:
    """Return how many rows of the intent are certainly stored if `origin` is; 0 for None.

    Exact if its piece is in memory, else the least that is possible: each sequence after it in the piece may have a
    row.
    """
    found = None if origin is None else _piece_of(intent, origin)
    if origin is None or found is None:
        return 0
    before, piece = found
    if rows is not None and rows.sequence(before) is not None:
        places = range(before, before + piece.count)
        return before + bisect_right(places, origin.sequence, key=lambda at: rows.sequence(at) or 0)
    return before + max(1, piece.count - (piece.rows.last - origin.sequence))
