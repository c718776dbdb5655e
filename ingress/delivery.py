"""Carries rows into one target: intent, publish, close, for ever. Start-up, repair and take-over are one
path.

The crash order, one step after the other:

store the intent → publish its rows → (unclear: read the target) → all stored → mark what is parked → close

A crash anywhere leaves the checkpoint, or an open intent that whoever comes next finishes as it stands.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Protocol

from common.chain import Chain
from common.clock import Clock
from common.errors import AnotherWriter, Stopped, Unavailable
from common.exits import command, ways
from common.failpoints import failpoint
from common.jetstream.client import FloeClient, no_headers
from common.logs import get_logger
from common.tasks import Stop
from ingress import metrics
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.recall import Recall
from ingress.checkpoint import (
    Checkpoint,
    CheckpointConflict,
    Intent,
    TargetState,
    close_intent,
    open_intent,
    share_intent,
)
from ingress.checkpoint_store import StateMoved, StateStore, Stored
from ingress.publishers.publisher import WRONG_LAST_SEQUENCE, Outcome, Publisher, UnknownOutcome
from ingress.rows.rows import Rows
from ingress.verdict.settle import Reconciler
from ingress.verdict.verdict import Settled

log = get_logger("ingress.delivery")

SLOW_ROUNDS = 8  # attempts in a row that stored nothing before everything is begun again
FIRST_PAUSE, LAST_PAUSE = 0.05, 5.0  # seconds between such attempts
ROUNDS = 3  # looks at what another instance does before it is too much
ROUND_SPACING = 1.0  # seconds between them
IDLE_SPACING = 2.0  # seconds between two looks at the state while nothing is ready
IDLE_LOOK = 30.0  # seconds between two looks at the target meanwhile

# What else has to be durable before an intent, all of whose rows are stored, is closed.
BeforeClose = Callable[[Intent], Awaitable[None]]


class RowSource(Protocol):
    """Who has rows ready (`ingress.redelivery.ParkedSource`, `ingress.replay.source.ReplaySource`)."""

    @property
    def recall(self) -> Recall: ...
    async def take(self, stop: Stop, seconds: float) -> Rows | None: ...
    def release(self, rows: Rows) -> None: ...
    def closed(self, positions: Mapping[Chain, int]) -> None: ...
    def reset(self, positions: Mapping[Chain, int]) -> None: ...


class ServerLimits:
    """The limits of the server, beside those that the rows of one target were made ready for.

    `reset`: drops what is ready, and begins again at positions. `hint`: what is done about a row of the open
    intent that is too large.
    """

    def __init__(
        self, client: FloeClient, chains: ChainRegistry, reset: Callable[[Mapping[Chain, int]], None], hint: str
    ) -> None:
        self._client, self._chains, self._reset, self._hint = client, chains, reset, hint

    @property
    def are_outdated(self) -> bool:
        """Whether rows were made ready for another server than the one that is connected to now."""
        return self._chains.limits.max_payload != self._client.max_payload

    async def renew(self, positions: Mapping[Chain, int]) -> None:
        """Have rows made ready anew from `positions`, which are stored. Raises what asking raises."""
        await self._chains.renew_limits()
        self._reset(positions)

    def check(self, rows: Rows, stored: int) -> None:
        """Right before rows of an open intent are written, of which the first `stored` are not.

        Raises Stopped for a row that the server would not take, ConfigError where it takes no headers.
        """
        most = self._client.max_payload
        if not self._client.takes_headers:
            raise no_headers()
        if rows.most <= most or (found := rows.above(most, stored)) is None:
            return
        (chain, sequence, size), before = found, self._chains.limits.max_payload
        raise Stopped(
            f"chain {chain}: message {sequence} of the open intent needs {size} bytes with its headers: "
            f"expected a server with max_payload {before}, as it was made ready for, found {most}",
            hint=self._hint,
            code="E-OVERSIZE-INTENT",
        )


class Delivery:
    """Carries into one target, as long as the lease may be used.

    `is_settled`: whether target and state agreed since this began. `trouble`: why nothing is stored at the
    moment; empty while all is well.
    """

    def __init__(
        self,
        target: str,
        store: StateStore,
        reconciler: Reconciler,
        publisher: Publisher,
        source: RowSource,
        clock: Clock,
        before_close: BeforeClose | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self.target, self.is_settled, self.trouble = target, False, ""
        self._store, self._reconciler, self._publisher, self._limits = store, reconciler, publisher, limits
        self._source, self._clock, self._before_close = source, clock, before_close
        self._known, self._looked_at = Stored(TargetState(Checkpoint(0, "")), 0), clock.monotonic()

    @property
    def state(self) -> TargetState:
        """What is stored, as far as this instance knows."""
        return self._known.there

    async def run(self, stop: Stop) -> None:
        """Carry until `stop` is set and no intent is open.

        Raises Stopped with the choices, AnotherWriter, LeaseLost; Unavailable and OutcomeUnknown where
        beginning again may help.
        """
        await self.begin()
        while True:
            try:
                if self.state.intent is not None:  # ours, or of whoever crashed
                    await self._finish(self.state.intent)
                elif not self.is_settled:
                    await self._reconciler.settle(self._known, None)
                elif (rows := await self._take(stop)) is None:
                    return
                else:
                    await self._deliver(rows)
                self.is_settled = True
            except StateMoved as moved:  # by an operator, or another instance
                log.warning("state moved by another instance", action="moved", target=self.target)
                metrics.intents.labels(self.target, "lost").inc()
                self._adopt(moved.stored)
                await self.wait_for_quiet()

    async def begin(self) -> None:
        """Load the state, or make the first one for a target that never held a message."""
        stored, reading = await self._reconciler.first()
        if stored.state is None and reading is not None:
            # What a target that others publish to holds at the first start was there before.
            last = reading.last_sequence
            stored = Stored(TargetState(Checkpoint(last, reading.created, begins=last)), 0)
        self._adopt(stored)

    def _adopt(self, stored: Stored) -> None:
        self._known = stored
        behind = self.state
        if behind.intent is not None:
            metrics.intents.labels(self.target, "taken_over").inc()
            behind = close_intent(behind)
        # What comes after the open intent may be decoded while it is being finished.
        self._source.reset(behind.checkpoint.positions)

    # One intent

    async def _take(self, stop: Stop) -> Rows | None:
        """Rows that are ready; None when `stop` was set. Raises StateMoved where somebody corrected the state
        while nothing was ready.
        """
        # Asked here too: whoever has rows ready gives them without waiting, for ever in a backlog.
        while not stop.is_set:
            if (rows := await self._source.take(stop, IDLE_SPACING)) is not None:
                return rows
            if not stop.is_set:
                await self._reconciler.check_moved(self._known)
                # A target that was deleted or set back is found before the next row comes.
                if self._clock.monotonic() - self._looked_at >= IDLE_LOOK:
                    self._looked_at = self._clock.monotonic()
                    await self._reconciler.settle(self._known, None)
        return None

    async def _deliver(self, rows: Rows) -> None:
        """Open an intent over `rows` and finish it."""
        try:
            self._reconciler.check_lease()
            # A foreign message is better found before an intent stands open that can never be finished.
            settled = await self._reconciler.settle(self._known, None)
            if self._limits is not None and self._limits.are_outdated:
                # What the server does not take any more must not get into an intent.
                await self._limits.renew(self.state.checkpoint.positions)
                return
            metrics.stepped_over(self.target, settled.base - self.state.checkpoint.target_sequence)
            intent = await self._save(self._opened(rows, settled.base))
            self._reconciler.sending.opens(self._known.revision)
            metrics.intents.labels(self.target, "opened").inc()
            failpoint("ingress.after_intent")
            assert intent is not None, "it was just opened"
            await self._finish(intent, rows)
        finally:
            self._source.release(rows)

    async def _finish(self, intent: Intent, rows: Rows | None = None) -> None:
        """Publish what of the open intent is not stored, and close it.

        `rows`: its messages if it was opened just now and nothing of it was sent; None: find out.
        """
        started = self._clock.monotonic()
        if rows is not None:
            base = await self._publish(intent, rows, Settled(intent.base, 0))
        else:
            base = await self._publish_rest(intent)
        failpoint("ingress.before_close")
        if self._before_close is not None:
            await self._before_close(intent)
        await self._save(close_intent(self.state, base))
        failpoint("ingress.after_close")
        metrics.publish_seconds.labels(self.target).observe(self._clock.monotonic() - started)
        metrics.closed(self.target, intent)
        self._source.closed(self.state.checkpoint.positions)

    async def _publish_rest(self, intent: Intent) -> int:
        if self._reconciler.steps_over and not intent.is_shared:
            # Before another row is sent it says that messages of others may stand in it.
            await self._save(share_intent(self.state))
            intent = replace(intent, is_shared=True)
        settled = await self._reconciler.settle(self._known, None)
        if settled.stored == intent.count:
            return settled.base
        rows = await self._source.recall.rows(intent, settled.stored)
        try:
            if self._reconciler.steps_over:
                # With the rows at hand it is known exactly.
                settled = await self._reconciler.settle(self._known, rows)
            return await self._publish(intent, rows, settled)
        finally:
            self._source.release(rows)

    async def _publish(self, intent: Intent, rows: Rows, settled: Settled) -> int:
        """Publish until all rows of the open intent are stored, `settled.stored` of which are already; the
        base that the last of them stands by.

        Raises what settling raises, and Unavailable where the target takes nothing.
        """
        slow, sending = 0, self._reconciler.sending
        sending.settled(self._known.revision, settled.stored)
        while settled.stored < intent.count:
            self._reconciler.check_lease()
            if self._limits is not None:
                # What is written from here on goes to the server that is connected to now, or nowhere.
                self._limits.check(rows, settled.stored)
            sent = sending.begins()
            outcome = await self._publisher.publish(rows, settled.base, settled.stored)
            sending.ends(sent, outcome.stored, outcome.handed)
            before, settled = settled, replace(settled, stored=outcome.stored)
            if outcome.unclear is not None:
                self._note(outcome, outcome.unclear)
                settled = await self._reconciler.settle(self._known, rows)
                sending.settled(self._known.revision, settled.stored)
                if self._reconciler.steps_over and settled.stored < outcome.stored:
                    # Acknowledged rows are stored, even where others are read that cannot be found any more.
                    settled = Settled(settled.base + settled.stored - outcome.stored, outcome.stored)
                # What others stored meanwhile explains a refusal, and waiting would not help.
                foreign = settled.base > before.base and outcome.unclear.err_code in WRONG_LAST_SEQUENCE
                metrics.stepped_over(self.target, settled.base - before.base)
                slow = 0 if foreign or settled.stored > before.stored else slow + 1
                await self._pause(slow, outcome.unclear)
        self.trouble = ""
        failpoint("ingress.after_commit")
        return settled.base

    def _note(self, outcome: Outcome, unclear: UnknownOutcome) -> None:
        metrics.unclear.labels(self.target).inc()
        if unclear.err_code:
            metrics.refused_batches.labels(self.target, str(unclear.err_code)).inc()
        if self._reconciler.steps_over and unclear.err_code in WRONG_LAST_SEQUENCE:
            return
        self.trouble = unclear.why
        log.warning(
            "outcome unclear", action="unclear", target=self.target, acknowledged=outcome.stored, why=unclear.why
        )

    async def _pause(self, slow: int, unclear: UnknownOutcome) -> None:
        """Wait the longer, the more attempts in a row stored nothing. Raises Unavailable after too many."""
        if slow >= SLOW_ROUNDS:
            message = f"target {self.target} takes nothing: {unclear.why}"
            raise Unavailable(message, code=f"E-JS-{unclear.err_code}" if unclear.err_code else "")
        if slow:
            await self._clock.sleep(min(LAST_PAUSE, FIRST_PAUSE * 2**slow))

    # The state

    def _opened(self, rows: Rows, base: int) -> TargetState:
        try:
            return open_intent(self.state, rows.pieces(), base, is_shared=self._reconciler.steps_over)
        except CheckpointConflict as error:
            error.hint = ways(("a defect: keep the log; it is tried again by itself, see", command("status")))
            raise

    async def _save(self, state: TargetState) -> Intent | None:
        """Store the next state; its open intent. Raises StateMoved where somebody else stored one."""
        if (stored := await self._store.save(state, self._known.revision)) is None:
            await self._reconciler.check_moved(self._known)
            raise Unavailable(f"state of target {self.target}: neither stored nor changed by anybody")
        self._known = stored
        return state.intent

    async def wait_for_quiet(self) -> None:
        """What another instance stored was progress; return once it stores nothing more.

        An operator who corrects positions is no instance that carries. Raises LeaseLost where the lease is
        not ours, AnotherWriter where it is and the other goes on and on.
        """
        for _ in range(ROUNDS):
            await self._clock.sleep(ROUND_SPACING)
            self._reconciler.check_lease()
            try:
                await self._reconciler.check_moved(self._known)
                return
            except StateMoved as moved:
                before = self.state
                self._adopt(moved.stored)
            has_carried = before.checkpoint.target_sequence != self.state.checkpoint.target_sequence
            if not has_carried and before.intent == self.state.intent:
                return  # only positions differ
        one = "stop all but one, or give them one lease bucket; what is stored and the open intent"
        message = f"target {self.target}: another instance carries into it while the lease is ours"
        raise AnotherWriter(message, hint=ways((one, command("checkpoint ls"))))
