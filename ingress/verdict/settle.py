"""Settles what is unclear: by reading the target, and the stored state where the target does not explain
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from common.clock import Clock
from common.errors import DataError, FloeError, LeaseLost, OutcomeUnknown, Unavailable
from common.service.logs import get_logger
from ingress.checkpoint import Intent, IntentPiece, TargetState
from ingress.checkpoint_store import StateMoved, Stored
from ingress.interfaces import Looker, StateKeeper, Tenure
from ingress.rows.rows import Rows
from ingress.verdict.verdict import (
    Doubt,
    Finding,
    IntentVerdict,
    Origin,
    Sending,
    Sent,
    Settled,
    TargetErrors,
    TargetReading,
    Unread,
    contradiction,
    judge,
    newest,
)

log = get_logger("ingress.verdict.settle")


T = TypeVar("T")

LOOKS = 3  # equal answers before a verdict that stops
LOOK_SPACING = 10.0  # seconds between them
MOST_READ = 1000  # messages that are read to find one of an intent that is doubted
AT_ONCE = 50
PATIENCE = 30.0  # seconds without an answer of the target before everything is begun again
FIRST_PAUSE, LAST_PAUSE = 0.05, 5.0  # seconds between two questions


class Reconciler:
    """Looks at one exclusive target and its stored state (`ingress.interfaces.Settling`)."""

    steps_over = False

    def __init__(
        self,
        choices: TargetErrors,
        keeper: StateKeeper,
        looker: Looker,
        lease: Tenure,
        clock: Clock,
        look_spacing: float = LOOK_SPACING,
        sending: Sending | None = None,
    ) -> None:
        self.target, self._choices = choices.target, choices
        self._keeper, self._looker, self._lease = keeper, looker, lease
        self._clock, self._look_spacing = clock, look_spacing
        self.sending = sending or Sending()
        self._proved = (0, 0)  # a revision, and the target sequence up to which its intent's pieces are ours

    async def settle(self, known: Stored, rows: Rows | None) -> Settled:
        """How many messages of the open intent of `known` are stored, by the target itself.

        `rows`: the intent's messages, where they are in memory. Raises StateMoved where another instance
        went on; Stopped or AnotherWriter where the target is not what the state says, three times over;
        LeaseLost.
        """
        while True:
            reading = await self.reading()
            verdict = await self._proved_verdict(known, reading, rows)
            if verdict.finding is Finding.STORED:
                return Settled(_base(known), verdict.stored)
            await self.check_moved(known)
            await self._confirm(known, reading, verdict, rows)

    async def check_moved(self, known: Stored) -> None:
        """Raises StateMoved where the stored state is not `known` any more."""
        stored = await self._keeper.load()
        if stored.revision == known.revision:
            return
        if stored.state is None:
            raise Unavailable(f"state of target {self.target} was removed", code="E-STATE-GONE")
        raise StateMoved(stored)

    def check_lease(self) -> None:
        """Raises LeaseLost where the lease may not be used any more."""
        if not self._lease.is_usable():
            raise LeaseLost(f"lease of target {self.target} is not ours any more")

    async def first(self) -> tuple[Stored, TargetReading | None]:
        """What is stored, and where nothing is: a look at a target that never held a message.

        Raises Stopped where nothing is stored and the target holds, or held, messages, three times over.
        """
        for look in range(LOOKS):
            if look:
                await self._clock.sleep(self._look_spacing)
            # The target before the state: whatever is stored there had an intent before.
            reading = await self.reading()
            stored = await self._keeper.load()
            if stored.state is not None or (reading is not None and reading.last_sequence == 0):
                return stored, reading
        raise self._choices.no_checkpoint(reading)

    async def reading(self) -> TargetReading | None:
        """What the target says, asked again for a while if it does not answer."""
        return await self._patiently(self._looker.read)

    def _verdict(self, known: Stored, reading: TargetReading | None, rows: Rows | None) -> IntentVerdict:
        """What the last sequence and the last message say."""
        return _judge(known, reading, rows, self.sending.of(known.revision))

    async def _proved_verdict(
        self, known: Stored, reading: TargetReading | None, rows: Rows | None
    ) -> IntentVerdict:
        """The verdict, and where rows are stored, what the ends of the pieces before the last one say."""
        verdict = self._verdict(known, reading, rows)
        intent = None if known.state is None else known.state.intent
        if verdict.finding is not Finding.STORED or intent is None:
            return verdict
        if self._proved[0] != known.revision:
            # What an operator accepted as it is need not be ours.
            self._proved = (known.revision, max(intent.base, _begins(known)))
        places = [at for at in intent.ends(verdict.stored) if at > self._proved[1]]
        found = await self._patiently(lambda: self._looker.origins(places)) if places else {}
        against = contradiction(intent, found)
        if against is not None:
            return against
        self._proved = (known.revision, max([self._proved[1], *places]))
        return verdict

    async def _patiently(self, question: Callable[[], Awaitable[T]]) -> T:
        deadline, pause = self._clock.monotonic() + PATIENCE, FIRST_PAUSE
        while True:
            try:
                return await question()
            except (Unavailable, OutcomeUnknown, DataError):
                if self._clock.monotonic() + pause >= deadline:
                    raise
            await self._clock.sleep(pause)
            pause = min(LAST_PAUSE, pause * 2)

    async def _confirm(
        self, known: Stored, reading: TargetReading | None, verdict: IntentVerdict, rows: Rows | None
    ) -> None:
        """Look again, on fresh connections; returns if the answer changes, else raises what it means.

        Where somebody else stores messages: the same answer three times, or one that still moves.
        """
        finding, seen = verdict.finding, [reading]
        log.warning(
            "verdict to be confirmed",
            action="verdict",
            target=self.target,
            finding=finding.name,
            detail=verdict.detail,
        )
        while not _is_answer(finding, seen):
            await self._clock.sleep(self._look_spacing)
            self.check_lease()
            seen.append(await self._looker.read_fresh())
            await self.check_moved(known)
            verdict = await self._proved_verdict(known, seen[-1], rows)
            if verdict.finding is not finding:
                return
        raise await self._error(known, verdict, [each for each in seen if each is not None])

    async def _error(self, known: Stored, verdict: IntentVerdict, seen: list[TargetReading]) -> FloeError:
        """What the verdict means for an operator, with what can be read of the messages that it is about."""
        if verdict.doubt is not None and verdict.doubt.certain < verdict.doubt.counted:
            verdict = replace(verdict, doubt=await self._less_doubt(known, verdict.doubt))
        described = ""
        if verdict.at and seen:
            for at in dict.fromkeys((verdict.at, seen[-1].last_sequence)):
                described = described or await self._described(at)
        return self._choices.error(verdict, seen, described)

    async def _described(self, at: int) -> str:
        return await self._patiently(lambda: self._looker.described(at))

    async def _less_doubt(self, known: Stored, doubt: Doubt) -> Doubt:
        """What of the rows that count as stored can be read, from the last one back, at most `MOST_READ`."""
        intent = None if known.state is None else known.state.intent
        assert intent is not None, "only rows of an open intent are doubted"
        above = intent.base + max(doubt.certain, doubt.counted - MOST_READ)
        places = range(intent.base + doubt.counted, above, -1)
        for start in range(0, len(places), AT_ONCE):
            stretch = places[start : start + AT_ONCE]
            found = await self._patiently(partial(self._looker.origins, stretch))
            if certain := newest(intent, found):
                return replace(doubt, certain=certain)
        return doubt


def _is_answer(finding: Finding, seen: Sequence[TargetReading | None]) -> bool:
    """Whether enough was seen for a verdict that stops; `seen`: the looks with this finding, oldest first."""
    if len(seen) < LOOKS:
        return False
    ends = [each.last_sequence for each in seen[-LOOKS:] if each is not None]
    still = len(set(ends)) <= 1 or finding not in (Finding.AHEAD, Finding.FOREIGN, Finding.UNREAD)
    return still or ends[-1] > ends[-2]


def _base(known: Stored) -> int:
    assert known.state is not None, "only what exists is settled"
    return known.state.checkpoint.target_sequence


def _begins(known: Stored) -> int:
    assert known.state is not None, "only what exists is settled"
    return known.state.checkpoint.begins


def _judge(
    known: Stored, reading: TargetReading | None, rows: Rows | None, sent: Sent | None
) -> IntentVerdict:
    state = known.state
    assert state is not None, "only what exists is settled"
    expected = None
    if reading is not None and rows is not None and state.intent is not None:
        last = reading.last_sequence - state.intent.base - 1
        expected = rows.sequence(last) if 0 <= last < rows.count else None
    return judge(state, reading, expected, sent)


# Messages of the target that are read for one open intent: behind more than that, an instance that comes back
# sends the rest of the intent again rather than read for minutes.
MOST_SCANNED = 50_000
FIRST_READ, LARGEST_READ = 16, 512  # messages that are asked for at the same time


@dataclass(frozen=True, slots=True)
class _Scan:
    """What was read for the intent stored at `revision`, up to target sequence `upto`: the `newest` of its
    rows that was found, and the target sequence `at` which it stands.
    """

    revision: int
    upto: int
    newest: Origin | None = None
    at: int = 0


class SharedSettler(Reconciler):
    """Looks at one target that is not exclusive, and its stored state (`ingress.interfaces.Settling`)."""

    steps_over = True
    _scan = _Scan(0, 0)
    _drifted: frozenset[str] = frozenset()

    async def settle(self, known: Stored, rows: Rows | None) -> Settled:
        """How many messages of the open intent are stored, and what stands between them and the end.

        The base is such that the next row is expected right behind the target's last message. Raises
        StateMoved where another instance went on; Stopped where the target is gone, another one, or shorter
        than its checkpoint, three times over; LeaseLost.
        """
        while True:
            reading = await self.reading()
            verdict = await self._proved_verdict(known, reading, rows)
            if verdict.finding is Finding.STORED and reading is not None:
                return await self._settled(known, rows, reading.last_sequence)
            await self.check_moved(known)
            await self._confirm(known, reading, verdict, rows)

    async def first(self) -> tuple[Stored, TargetReading | None]:
        """What is stored, and where nothing is: a look at the target, which may hold messages of others."""
        for look in range(LOOKS):
            if look:
                await self._clock.sleep(self._look_spacing)
            reading = await self.reading()
            stored = await self._keeper.load()
            if stored.state is not None or reading is not None:
                return stored, reading
        raise self._choices.no_checkpoint(None)

    async def _settled(self, known: Stored, rows: Rows | None, last: int) -> Settled:
        intent = _state(known).intent
        if intent is None:
            return Settled(last, 0)
        # Side by side: the longer it takes, the more likely somebody publishes meanwhile.
        stored, _ = await asyncio.gather(
            self._stored(known.revision, intent, rows, last), self.check_moved(known)
        )
        # Of a complete intent the base tells where it ends, whoever has published since.
        return Settled((self._scan.at if stored == intent.count else last) - stored, stored)

    # Reading the target

    async def _stored(self, revision: int, intent: Intent, rows: Rows | None, last: int) -> int:
        """How many rows of the intent stand at or below target sequence `last`, for certain."""
        former = self._scan if self._scan.revision == revision else _Scan(revision, intent.base)
        found = await self._newest(intent, former.upto, last)
        upto = max(last, former.upto)
        if found is None or _place(intent, found[0], rows) < _place(intent, former.newest, rows):
            self._scan = _Scan(revision, upto, former.newest, former.at)
        else:
            self._scan = _Scan(revision, upto, *found)
        return _place(intent, self._scan.newest, rows)

    async def _newest(self, intent: Intent, after: int, last: int) -> tuple[Origin, int] | None:
        """The newest message of the intent in (`after`, `last`], read from the end, and where it stands."""
        lowest, size = max(after, last - MOST_SCANNED), FIRST_READ
        while last > lowest:
            first = max(lowest, last - size) + 1
            origins = await self._origins(range(first, last + 1))
            for at in range(last, first - 1, -1):
                origin = origins[at]
                if isinstance(origin, Origin) and _piece_of(intent, origin) is not None:
                    return origin, at
            last, size = first - 1, min(LARGEST_READ, size * 2)
        return None

    async def _origins(self, places: Collection[int]) -> Mapping[int, Origin | Unread]:
        return await self._patiently(lambda: self._looker.origins(places))

    # Verdicts

    async def _proved_verdict(
        self, known: Stored, reading: TargetReading | None, _: Rows | None
    ) -> IntentVerdict:
        await self._look_for_drift(known, reading)
        return judge_shared(_state(known), reading, self._drifted)

    async def _look_for_drift(self, known: Stored, reading: TargetReading | None) -> None:
        """Some servers report another creation time after a restart; a row of ours in its place tells so."""
        checkpoint = _state(known).checkpoint
        if reading is None or reading.created in (checkpoint.target_created, *self._drifted):
            return
        if 0 < checkpoint.target_sequence <= reading.last_sequence:
            origin = (await self._origins([checkpoint.target_sequence]))[checkpoint.target_sequence]
            is_ours = isinstance(origin, Origin) and origin.sequence < checkpoint.positions.get(
                origin.chain, 0
            )
            if is_ours:
                self._drifted |= {reading.created}


def judge_shared(
    state: TargetState, reading: TargetReading | None, drifted: AbstractSet[str]
) -> IntentVerdict:
    """STORED (with 0: how much is read elsewhere), or what speaks against going on.

    `drifted`: creation times that are known to be those of the same stream.
    """
    if reading is None:
        return IntentVerdict(Finding.GONE, detail="expected the stream, found none")
    checkpoint = state.checkpoint
    if reading.created not in (checkpoint.target_created, *drifted):
        detail = f"created: expected {checkpoint.target_created}, found {reading.created}"
        return IntentVerdict(Finding.RECREATED, detail=detail)
    if reading.last_sequence < checkpoint.target_sequence:
        expected = f"expected at least {checkpoint.target_sequence}"
        return IntentVerdict(
            Finding.BEHIND, detail=f"last sequence: {expected}, found {reading.last_sequence}"
        )
    return IntentVerdict(Finding.STORED)


def _state(known: Stored) -> TargetState:
    assert known.state is not None, "only what exists is settled"
    return known.state


def _piece_of(intent: Intent, origin: Origin) -> tuple[int, IntentPiece] | None:
    """The piece that the message belongs to, and how many messages stand before that piece."""
    before = 0
    for piece in intent.pieces:
        is_part = piece.chain == origin.chain and origin.sequence in piece.rows
        if piece.count and is_part and origin.sequence not in piece.left_out:
            return before, piece
        before += piece.count
    return None


def _place(intent: Intent, origin: Origin | None, rows: Rows | None) -> int:
    """How many rows of the intent are stored for certain where `origin` is; 0 for None.

    Exact where its piece is in memory, else the least that is possible: of the sequences behind it in the
    piece each may have a row.
    """
    found = None if origin is None else _piece_of(intent, origin)
    if origin is None or found is None:
        return 0
    before, piece = found
    if rows is not None and rows.sequence(before) is not None:
        return _counted(rows, before, piece, origin.sequence)
    return before + max(1, piece.count - (piece.rows.last - origin.sequence))


def _counted(rows: Rows, before: int, piece: IntentPiece, sequence: int) -> int:
    """How many rows stand up to that sequence of the piece."""
    low, high = before, before + piece.count
    while low < high:
        middle = (low + high) // 2
        if (rows.sequence(middle) or 0) <= sequence:
            low = middle + 1
        else:
            high = middle
    return low
