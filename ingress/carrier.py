"""Carries rows into one target: intent, publish, close, for ever. Start-up, repair and take-over are one
path.

The crash order, one step after the other:

store the intent → publish its rows → (unclear: read the target) → all stored → close the intent

A crash anywhere leaves the checkpoint, or an open intent that whoever comes next finishes as it stands.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from common.clock import Clock
from common.errors import AnotherWriter, Unavailable
from common.failpoints import failpoint
from common.service.logs import get_logger
from ingress import metrics
from ingress.checkpoints.intent import Checkpoint, Intent, TargetState, close_intent, open_intent
from ingress.checkpoints.state import Stored
from ingress.ports import Looker, RowSource, StateKeeper, Tenure
from ingress.publishing.publisher import Outcome, Publisher
from ingress.publishing.replies import Unclear
from ingress.rows.blocks import Rows
from ingress.verdicts.choices import Choices
from ingress.verdicts.settler import LOOK_SPACING, Settled, Settler, StateMoved

log = get_logger("ingress.carrier")

ROUNDS = 3  # looks at what another instance does before it is too much
ROUND_SPACING = 1.0  # seconds between them
SLOW_ROUNDS = 8  # attempts in a row that stored nothing before everything is begun again
FIRST_PAUSE, LAST_PAUSE = 0.05, 5.0  # seconds between such attempts


class Carrier:
    """Carries into one target, as long as the lease may be used.

    `trouble`: why nothing is stored at the moment; empty while all is well.
    """

    def __init__(
        self,
        choices: Choices,
        keeper: StateKeeper,
        looker: Looker,
        publisher: Publisher,
        supply: RowSource,
        lease: Tenure,
        clock: Clock,
        *,
        look_spacing: float = LOOK_SPACING,
    ) -> None:
        self.target, self.trouble = choices.target, ""
        self._keeper, self._publisher, self._supply, self._clock = keeper, publisher, supply, clock
        self._settler = Settler(choices, keeper, looker, lease, clock, look_spacing)
        self._known = Stored(TargetState(Checkpoint(0, "")), 0)

    @property
    def state(self) -> TargetState:
        """What is stored, as far as this instance knows."""
        assert self._known.state is not None, "there is a state from the first on"
        return self._known.state

    async def run(self, stop: asyncio.Event) -> None:
        """Carry until `stop` is set and no intent is open.

        Raises Stopped with the choices, AnotherWriter, LeaseLost; Unavailable and OutcomeUnknown where
        beginning again may help.
        """
        await self._begin()
        settled = False
        while True:
            try:
                if self.state.intent is not None:
                    await self._finish(self.state.intent, None)
                elif not settled:
                    await self._settler.settle(self._known, None)
                elif not await self._carry(stop):
                    return
                settled = True
            except StateMoved as moved:
                log.warning("state moved by another instance", action="moved", target=self.target)
                metrics.intents.labels(self.target, "lost").inc()
                self._adopt(moved.stored)
                await self._wait_for_quiet()

    async def _begin(self) -> None:
        """Load the state, or make the first one for a target that never held a message."""
        stored, reading = await self._settler.first()
        if stored.state is None and reading is not None:
            stored = Stored(TargetState(Checkpoint(0, reading.created)), 0)
        self._adopt(stored)

    def _adopt(self, stored: Stored) -> None:
        self._known = stored
        behind = self.state
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
            self._settler.check_lease()
            # A foreign message is better found before an intent stands open that can never be finished.
            await self._settler.settle(self._known, None)
            await self._save(open_intent(self.state, rows.pieces()))
            metrics.intents.labels(self.target, "opened").inc()
            failpoint("ingress.after_intent")
            assert self.state.intent is not None, "it was just opened"
            await self._finish(self.state.intent, rows)
        finally:
            self._supply.release(rows)
        return True

    async def _finish(self, intent: Intent, rows: Rows | None) -> None:
        """Publish what of the open intent is not stored, and close it.

        `rows`: its messages if it was opened just now and nothing of it was sent; None: find out.
        """
        started = self._clock.monotonic()
        if rows is not None:
            base = await self._publish(intent, rows, Settled(intent.base, 0))
        else:
            base = await self._publish_rest(intent)
        failpoint("ingress.before_close")
        await self._save(close_intent(self.state, base))
        failpoint("ingress.after_close")
        metrics.publish_seconds.labels(self.target).observe(self._clock.monotonic() - started)
        metrics.closed(self.target, intent)
        self._supply.closed(self.state.checkpoint.positions)

    async def _publish_rest(self, intent: Intent) -> int:
        settled = await self._settler.settle(self._known, None)
        if settled.stored == intent.count:
            return settled.base
        rows = await self._supply.recall.rows(intent, settled.stored)
        try:
            return await self._publish(intent, rows, settled)
        finally:
            self._supply.release(rows)

    async def _publish(self, intent: Intent, rows: Rows, settled: Settled) -> int:
        """Publish until all rows of the intent are stored; the base that the last of them stands by."""
        slow = 0
        while settled.stored < intent.count:
            self._settler.check_lease()
            outcome = await self._publisher.publish(rows, settled.base, settled.stored)
            before, settled = settled.stored, replace(settled, stored=outcome.stored)
            if outcome.unclear is not None:
                self._note(outcome, outcome.unclear)
                settled = await self._settler.settle(self._known, rows)
                slow = 0 if settled.stored > before else slow + 1
                await self._pause(slow, outcome.unclear)
        self.trouble = ""
        failpoint("ingress.after_commit")
        return settled.base

    def _note(self, outcome: Outcome, unclear: Unclear) -> None:
        self.trouble = unclear.why
        metrics.unclear.labels(self.target).inc()
        log.warning(
            "outcome unclear",
            action="unclear",
            target=self.target,
            acknowledged=outcome.stored,
            why=unclear.why,
        )

    async def _pause(self, slow: int, unclear: Unclear) -> None:
        """Wait the longer, the more attempts in a row stored nothing. Raises Unavailable after too many."""
        if slow >= SLOW_ROUNDS:
            message = f"target {self.target} takes nothing: {unclear.why}"
            raise Unavailable(message, code=f"E-JS-{unclear.err_code}" if unclear.err_code else "")
        if slow:
            await self._clock.sleep(min(LAST_PAUSE, FIRST_PAUSE * 2**slow))

    async def _save(self, state: TargetState) -> None:
        """Store the next state. Raises StateMoved where somebody else did."""
        stored = await self._keeper.save(state, self._known.revision)
        if stored is None:
            await self._settler.check_moved(self._known)
            raise Unavailable(f"state of target {self.target}: neither stored nor changed by anybody")
        self._known = stored

    async def _wait_for_quiet(self) -> None:
        """What another instance stored was progress; return once it stores nothing more.

        Raises LeaseLost where the lease is not ours, AnotherWriter where it is and the other goes on and on.
        """
        for _ in range(ROUNDS):
            await self._clock.sleep(ROUND_SPACING)
            self._settler.check_lease()
            try:
                await self._settler.check_moved(self._known)
            except StateMoved as moved:
                self._adopt(moved.stored)
            else:
                return
        raise AnotherWriter(
            f"target {self.target}: another instance carries into it while the lease is ours",
            hint="stop all but one, or give them one lease bucket",
        )
