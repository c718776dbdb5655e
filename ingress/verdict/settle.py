"""Settles what is unclear: by reading the target, and the stored state where the target does not explain
itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from common.clock import Clock
from common.errors import DataError, FloeError, LeaseLost, OutcomeUnknown, Unavailable
from common.service.logs import get_logger
from ingress.checkpoints.state import StateMoved, Stored
from ingress.interfaces import Looker, StateKeeper, Tenure
from ingress.rows.rows import Rows
from ingress.verdict.verdict import (
    Doubt,
    Finding,
    Reading,
    Sending,
    Sent,
    Settled,
    Verdict,
    contradiction,
    judge,
    newest,
)
from ingress.verdicts.choices import Choices

log = get_logger("ingress.verdict.settle")

T = TypeVar("T")

LOOKS = 3  # equal answers before a verdict that stops
LOOK_SPACING = 10.0  # seconds between them
MOST_READ = 1000  # messages that are read to find one of an intent that is doubted
AT_ONCE = 50
PATIENCE = 30.0  # seconds without an answer of the target before everything is begun again
FIRST_PAUSE, LAST_PAUSE = 0.05, 5.0  # seconds between two questions


class Settler:
    """Looks at one exclusive target and its stored state (`ingress.interfaces.Settling`)."""

    steps_over = False

    def __init__(
        self,
        choices: Choices,
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

    async def first(self) -> tuple[Stored, Reading | None]:
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

    async def reading(self) -> Reading | None:
        """What the target says, asked again for a while if it does not answer."""
        return await self._patiently(self._looker.read)

    def _verdict(self, known: Stored, reading: Reading | None, rows: Rows | None) -> Verdict:
        """What the last sequence and the last message say."""
        return _judge(known, reading, rows, self.sending.of(known.revision))

    async def _proved_verdict(self, known: Stored, reading: Reading | None, rows: Rows | None) -> Verdict:
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
        self, known: Stored, reading: Reading | None, verdict: Verdict, rows: Rows | None
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

    async def _error(self, known: Stored, verdict: Verdict, seen: list[Reading]) -> FloeError:
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


def _is_answer(finding: Finding, seen: Sequence[Reading | None]) -> bool:
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


def _judge(known: Stored, reading: Reading | None, rows: Rows | None, sent: Sent | None) -> Verdict:
    state = known.state
    assert state is not None, "only what exists is settled"
    expected = None
    if reading is not None and rows is not None and state.intent is not None:
        last = reading.last_sequence - state.intent.base - 1
        expected = rows.sequence(last) if 0 <= last < rows.count else None
    return judge(state, reading, expected, sent)
