"""Settles what is unclear about a target that others publish to as well: their messages are stepped over.

How much of the open intent is stored is read from the target itself: the newest of its rows that stands there
tells, because rows are stored in order. What cannot be read any more counts as not stored. So a message may
come twice, but none is lost, and no message comes for the first time before one that belongs before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ingress.checkpoint import Intent, Piece, TargetState
from ingress.checkpoints.state import Stored
from ingress.rows.rows import Rows
from ingress.verdict.settle import LOOKS, Settler
from ingress.verdict.verdict import Finding, Origin, Reading, Settled, Unread, Verdict

# Messages of the target that are read for one open intent: behind more than that, an instance that comes back
# sends the rest of the intent again rather than read for minutes.
MOST_READ = 50_000
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


class SharedSettler(Settler):
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

    async def first(self) -> tuple[Stored, Reading | None]:
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
        lowest, size = max(after, last - MOST_READ), FIRST_READ
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

    async def _proved_verdict(self, known: Stored, reading: Reading | None, _: Rows | None) -> Verdict:
        await self._look_for_drift(known, reading)
        return judge_shared(_state(known), reading, self._drifted)

    async def _look_for_drift(self, known: Stored, reading: Reading | None) -> None:
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


def judge_shared(state: TargetState, reading: Reading | None, drifted: AbstractSet[str]) -> Verdict:
    """STORED (with 0: how much is read elsewhere), or what speaks against going on.

    `drifted`: creation times that are known to be those of the same stream.
    """
    if reading is None:
        return Verdict(Finding.GONE, detail="expected the stream, found none")
    checkpoint = state.checkpoint
    if reading.created not in (checkpoint.target_created, *drifted):
        detail = f"created: expected {checkpoint.target_created}, found {reading.created}"
        return Verdict(Finding.RECREATED, detail=detail)
    if reading.last_sequence < checkpoint.target_sequence:
        expected = f"expected at least {checkpoint.target_sequence}"
        return Verdict(Finding.BEHIND, detail=f"last sequence: {expected}, found {reading.last_sequence}")
    return Verdict(Finding.STORED)


def _state(known: Stored) -> TargetState:
    assert known.state is not None, "only what exists is settled"
    return known.state


def _piece_of(intent: Intent, origin: Origin) -> tuple[int, Piece] | None:
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


def _counted(rows: Rows, before: int, piece: Piece, sequence: int) -> int:
    """How many rows stand up to that sequence of the piece."""
    low, high = before, before + piece.count
    while low < high:
        middle = (low + high) // 2
        if (rows.sequence(middle) or 0) <= sequence:
            low = middle + 1
        else:
            high = middle
    return low
