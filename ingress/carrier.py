"""Carries rows into one target: intent, publish, close, for ever. Start-up, repair and take-over are one
path.

The crash order, one step after the other:

    store the intent → publish its rows → (unclear: read the target) → all stored → close the intent

A crash anywhere leaves the checkpoint, or an open intent that whoever comes next finishes as it stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from common.chain import Chain
from common.clock import Clock
from common.errors import AnotherWriter, LeaseLost, OutcomeUnknown, Unavailable
from common.failpoints import failpoint
from common.service.logs import get_logger
from ingress import metrics
from ingress.blocks import Rows
from ingress.choices import Choices
from ingress.intent import Checkpoint, Intent, TargetState, close_intent, open_intent
from ingress.publisher import Outcome, Publisher
from ingress.replies import Unclear
from ingress.state import Stored
from ingress.verdict import Finding, Reading, Verdict, judge

log = get_logger("ingress.carrier")

LOOKS = 3  # equal answers before a verdict that stops
LOOK_SPACING = 10.0  # seconds between them
ROUNDS = 3  # looks at what another instance does before it is too much
ROUND_SPACING = 1.0  # seconds between them
PATIENCE = 30.0  # seconds without an answer of the target before everything is begun again
FIRST_PAUSE, LAST_PAUSE = 0.05, 5.0  # seconds between attempts that stored nothing
SLOW_ROUNDS = 8  # such attempts in a row before everything is begun again


class StateKeeper(Protocol):
    """Where the state is kept (`ingress.state.StateStore`)."""

    async def load(self) -> Stored: ...
    async def save(self, state: TargetState, revision: int) -> Stored | None: ...


class Looker(Protocol):
    """Who looks at the target (`ingress.target.Target`)."""

    async def read(self) -> Reading | None: ...
    async def read_fresh(self) -> Reading | None: ...


class Recaller(Protocol):
    """Who finds the rows of an open intent again (`ingress.recall.Recall`)."""

    async def rows(self, intent: Intent, stored: int) -> Rows: ...


class Rower(Protocol):
    """Who has rows ready (`ingress.supply.Supply`)."""

    @property
    def recall(self) -> Recaller: ...
    async def take(self, stop: asyncio.Event) -> Rows | None: ...
    def release(self, rows: Rows) -> None: ...
    def closed(self, positions: Mapping[Chain, int]) -> None: ...
    def reset(self, positions: Mapping[Chain, int]) -> None: ...


class Tenure(Protocol):
    """The right to carry (`common.jetstream.lease.Lease`)."""

    def is_usable(self) -> bool: ...


class _MovedError(Exception):
    """Another instance changed the stored state; it was taken over."""


class Carrier:
    """Carries into one target, as long as the lease may be used."""

    def __init__(
        self,
        choices: Choices,
        state: StateKeeper,
        looker: Looker,
        publisher: Publisher,
        supply: Rower,
        lease: Tenure,
        clock: Clock,
        *,
        look_spacing: float = LOOK_SPACING,
        round_spacing: float = ROUND_SPACING,
    ) -> None:
        self.target, self._choices = choices.target, choices
        self._keeper, self._looker, self._publisher = state, looker, publisher
        self._supply, self._lease, self._clock = supply, lease, clock
        self._look_spacing, self._round_spacing = look_spacing, round_spacing
        self._state = TargetState(Checkpoint(0, ""))
        self._revision = 0
        #: Why nothing is stored at the moment; empty while all is well.
        self.trouble = ""

    @property
    def state(self) -> TargetState:
        """What is stored, as far as this instance knows."""
        return self._state

    async def run(self, stop: asyncio.Event) -> None:
        """Carry until `stop` is set and no intent is open.

        Raises Stopped with the choices, AnotherWriter, LeaseLost; Unavailable and OutcomeUnknown where
        beginning again may help.
        """
        await self._begin()
        settled = False
        while True:
            try:
                if self._state.intent is not None:
                    await self._finish(self._state.intent, None)
                elif not settled:
                    await self._settle(None)
                elif not await self._carry(stop):
                    return
                settled = True
            except _MovedError:
                await self._wait_for_quiet()

    async def _begin(self) -> None:
        """Load the state, or make the first one for an empty target. Raises Stopped."""
        for look in range(1, LOOKS + 1):
            # The target before the state: whatever is stored there had an intent before.
            reading = await self._reading()
            stored = await self._keeper.load()
            if stored.state is not None:
                self._adopt(stored)
                return
            if reading is not None and reading.last_sequence == 0:
                self._adopt(Stored(TargetState(Checkpoint(0, reading.created)), 0))
                return
            if look < LOOKS:
                await self._clock.sleep(self._look_spacing)
        raise self._choices.no_checkpoint(reading)

    def _adopt(self, stored: Stored) -> None:
        assert stored.state is not None, "only what exists is taken over"
        self._state, self._revision = stored.state, stored.revision
        behind = self._state
        if behind.intent is not None:
            metrics.intents.labels(self.target, "taken_over").inc()
            behind = close_intent(behind)
        # What comes after the open intent may be decoded while it is being finished.
        self._supply.reset(behind.checkpoint.positions)

    # One intent

    async def _carry(self, stop: asyncio.Event) -> bool:
        """Open an intent over what is ready and finish it; False when `stop` was set."""
        rows = await self._supply.take(stop)
        if rows is None:
            return False
        try:
            self._check_lease()
            # A foreign message is better found before an intent stands open that can never be finished.
            await self._settle(None)
            await self._save(open_intent(self._state, rows.pieces()))
            metrics.intents.labels(self.target, "opened").inc()
            failpoint("ingress.after_intent")
            assert self._state.intent is not None, "it was just opened"
            await self._finish(self._state.intent, rows)
        finally:
            self._supply.release(rows)
        return True

    async def _finish(self, intent: Intent, rows: Rows | None) -> None:
        """Publish what of the open intent is not stored, and close it.

        `rows`: its messages if it was opened just now and nothing of it was sent; None: find out.
        """
        started = self._clock.monotonic()
        if rows is not None:
            await self._publish(intent, rows, 0)
        elif (stored := await self._settle(None)) < intent.count:
            rows = await self._supply.recall.rows(intent, stored)
            try:
                await self._publish(intent, rows, stored)
            finally:
                self._supply.release(rows)
        failpoint("ingress.before_close")
        await self._save(close_intent(self._state))
        failpoint("ingress.after_close")
        metrics.publish_seconds.labels(self.target).observe(self._clock.monotonic() - started)
        self._report(intent)
        self._supply.closed(self._state.checkpoint.positions)

    async def _publish(self, intent: Intent, rows: Rows, stored: int) -> None:
        """Publish until all rows of the intent are stored."""
        slow = 0
        while stored < intent.count:
            self._check_lease()
            outcome = await self._publisher.publish(rows, intent.base, stored)
            before, stored = stored, outcome.stored
            if outcome.unclear is not None:
                self._note(outcome)
                stored = await self._settle(rows)
                slow = 0 if stored > before else slow + 1
                await self._pause(slow, outcome.unclear)
        self.trouble = ""
        failpoint("ingress.after_commit")

    def _note(self, outcome: Outcome) -> None:
        unclear = outcome.unclear
        self.trouble = unclear.why if unclear else ""
        metrics.unclear.labels(self.target).inc()
        log.warning(
            "outcome unclear",
            action="unclear",
            target=self.target,
            acknowledged=outcome.stored,
            why=unclear and unclear.why,
        )

    async def _pause(self, slow: int, unclear: Unclear) -> None:
        """Wait the longer, the more attempts in a row stored nothing. Raises Unavailable where
        it is too many.
        """
        if slow >= SLOW_ROUNDS:
            message = f"target {self.target} takes nothing: {unclear.why}"
            raise Unavailable(message, code=f"E-JS-{unclear.err_code}" if unclear.err_code else "")
        if slow:
            await self._clock.sleep(min(LAST_PAUSE, FIRST_PAUSE * 2**slow))

    async def _save(self, state: TargetState) -> None:
        """Store the next state. Raises _MovedError where somebody else did."""
        stored = await self._keeper.save(state, self._revision)
        if stored is None:
            await self._check_moved()
            raise Unavailable(f"state of target {self.target}: neither stored nor changed by anybody")
        self._state, self._revision = state, stored.revision

    # Looking

    async def _settle(self, rows: Rows | None) -> int:
        """How many messages of the open intent are stored (0 without one), by the target itself.

        Raises _MovedError where another instance went on, Stopped or AnotherWriter where the
        target is not what the state says, three times over.
        """
        while True:
            reading = await self._reading()
            verdict = self._judge(reading, rows)
            if verdict.finding is Finding.STORED:
                return verdict.stored
            await self._check_moved()
            await self._confirm(reading, verdict, rows)

    def _judge(self, reading: Reading | None, rows: Rows | None) -> Verdict:
        expected = None
        if reading is not None and rows is not None and self._state.intent is not None:
            last = reading.last_sequence - self._state.intent.base - 1
            expected = rows.sequence(last) if 0 <= last < rows.count else None
        return judge(self._state, reading, expected)

    async def _reading(self) -> Reading | None:
        """What the target says, asked again for a while if it does not answer."""
        deadline, pause = self._clock.monotonic() + PATIENCE, FIRST_PAUSE
        while True:
            try:
                return await self._looker.read()
            except (Unavailable, OutcomeUnknown):
                if self._clock.monotonic() + pause >= deadline:
                    raise
            await self._clock.sleep(pause)
            pause = min(LAST_PAUSE, pause * 2)

    async def _check_moved(self) -> None:
        """Take over the stored state if somebody else changed it, and raise _MovedError."""
        stored = await self._keeper.load()
        if stored.revision == self._revision:
            return
        if stored.state is None:
            raise Unavailable(f"state of target {self.target} was removed", code="E-STATE-GONE")
        log.warning("state moved by another instance", action="moved", target=self.target)
        metrics.intents.labels(self.target, "lost").inc()
        self._adopt(stored)
        raise _MovedError

    async def _confirm(self, reading: Reading | None, verdict: Verdict, rows: Rows | None) -> None:
        """Look again, on fresh connections; returns if the answer changes, else raises what the
        verdict means.
        """
        finding, seen = verdict.finding, [reading]
        log.warning(
            "verdict to be confirmed",
            action="verdict",
            target=self.target,
            finding=finding.name,
            detail=verdict.detail,
        )
        for _ in range(LOOKS - 1):
            await self._clock.sleep(self._look_spacing)
            self._check_lease()
            seen.append(await self._looker.read_fresh())
            await self._check_moved()
            verdict = self._judge(seen[-1], rows)
            if verdict.finding is not finding:
                return
        raise self._choices.error(verdict, [each for each in seen if each is not None])

    def _check_lease(self) -> None:
        if not self._lease.is_usable():
            raise LeaseLost(f"lease of target {self.target} is not ours any more")

    async def _wait_for_quiet(self) -> None:
        """What another instance stored was progress; return once it stores nothing more.

        Raises LeaseLost where the lease is not ours, AnotherWriter where it is and the other one goes on
        and on.
        """
        for _ in range(ROUNDS):
            await self._clock.sleep(self._round_spacing)
            self._check_lease()
            stored = await self._keeper.load()
            if stored.revision == self._revision or stored.state is None:
                return
            self._adopt(stored)
        raise AnotherWriter(
            f"target {self.target}: another instance carries into it while the lease is ours",
            hint="stop all but one, or give them one lease bucket",
        )

    def _report(self, intent: Intent) -> None:
        metrics.intents.labels(self.target, "closed").inc()
        metrics.target_sequence.labels(self.target).set(intent.end)
        for piece in intent.pieces:
            chain = piece.chain
            labels = (self.target, chain.site, chain.feed, str(chain.partition))
            metrics.messages.labels(*labels).inc(piece.count)
            metrics.position.labels(*labels).set(piece.rows.last + 1)
        log.debug(
            "intent closed", action="intent_closed", target=self.target, base=intent.base, count=intent.count
        )
