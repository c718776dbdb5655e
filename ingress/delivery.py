"""Delivery of rows into one target: intent, publish, close, in a loop. Start, repair and take-over use one path.

The crash order, one step after the other:

store the intent → publish its rows → (unclear: read the target) → all stored → mark parked messages → close

A crash at any step leaves the checkpoint, or an open intent that the next owner finishes unchanged.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Protocol

from common.chain import Chain
from common.clock import Clock
from common.errors import OtherWriter, Stopped, Unavailable
from common.exits import choices, floe_command
from common.failpoints import failpoint
from common.logs import get_logger
from common.nats.client import FloeClient, headers_disabled_error
from common.nats.protocol import WRONG_LAST_SEQUENCE_CODES
from common.tasks import Stop
from ingress import metrics
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.recall import Recall
from ingress.checkpoint import (
    Checkpoint,
    Intent,
    StateChanged,
    StateConflict,
    StateStore,
    StoredState,
    TargetState,
    close_intent,
    open_intent,
    share_intent,
)
from ingress.publishers.publisher import Outcome, Publisher, UnknownOutcome
from ingress.rows.rows import Rows
from ingress.verdict.settle import TargetReconciler
from ingress.verdict.verdict import Settled

log = get_logger(__name__)

MAX_EMPTY_ATTEMPTS = 8  # attempts in a row that store nothing, before the whole delivery restarts
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 5.0  # seconds between such attempts
PROGRESS_CHECKS = 3  # checks of another instance's progress, before OtherWriter
PROGRESS_CHECK_INTERVAL_S = 1.0  # seconds between them
STATE_CHECK_INTERVAL_S = 2.0  # seconds between two reads of the state while no rows are ready
MAX_LOGGED_CHAINS = 100  # chains with their positions in one line of the log
TARGET_CHECK_INTERVAL_S = 30.0  # seconds between two reads of the target while no rows are ready

# Writes that must be durable before an intent is closed, when all of its rows are stored.
BeforeClose = Callable[[Intent], Awaitable[None]]
# Returns `Checkpoint.writers` for a delivery that begins with a state; empty: not known yet.
NameWriters = Callable[[StoredState], Awaitable[tuple[str, ...]]]


class RowSource(Protocol):
    """A source of rows that are ready (`ingress.redelivery.ParkedSource`, `ingress.recovery.source.ReplaySource`)."""

    @property
    def recall(self) -> Recall: ...
    async def take(self, stop: Stop, seconds: float) -> Rows | None: ...
    def release(self, rows: Rows) -> None: ...
    def record_stored(self, positions: Mapping[Chain, int]) -> None: ...
    def reset(self, positions: Mapping[Chain, int]) -> None: ...


class ServerLimits:
    """Comparison of the server's limits now with the limits that the rows of one target were prepared for.

    `reset`: drops the rows that are ready, and restarts at the given positions. `hint`: the advice for a row of the
    open intent that is too large.
    """

    def __init__(
        self, client: FloeClient, chains: ChainRegistry, reset: Callable[[Mapping[Chain, int]], None], hint: str
    ) -> None:
        self._client, self._chains, self._reset, self._hint = client, chains, reset, hint

    def has_changed(self, rows: Rows) -> bool:
        """True if the server's limit is another one now. It may be known already, but not to `rows` that were ready."""
        limit = self._client.max_payload
        return self._chains.limits.max_payload != limit or rows.largest_message_bytes > limit

    async def renew(self, positions: Mapping[Chain, int]) -> None:
        """Prepare rows again from `positions`, which are stored. Raises as `ChainRegistry.renew_limits` does."""
        await self._chains.renew_limits()
        self._reset(positions)

    def check(self, rows: Rows, stored: int) -> None:
        """Check the limits right before rows of an open intent are written; the first `stored` rows are not sent again.

        Raises Stopped for a row that the server would refuse, ConfigError if it supports no headers.
        """
        limit = self._client.max_payload
        if not self._client.has_headers:
            raise headers_disabled_error()
        if rows.largest_message_bytes <= limit or (found := rows.first_above(limit, stored)) is None:
            return
        (chain, sequence, size), before = found, self._chains.limits.max_payload
        raise Stopped(
            f"chain {chain}: message {sequence} of the open intent needs {size} bytes with its headers: "
            f"expected a server with max_payload {before}, as when it was prepared, found {limit}",
            hint=self._hint,
            code="E-OVERSIZE-INTENT",
        )


class Delivery:
    """Delivery of rows into one target, as long as the lease may be used.

    `is_settled`: True once target and state have agreed since this began. `trouble`: the reason why nothing is stored
    at the moment; empty without trouble. `sending_times`: for each chain in the rows that were sent last, the time at
    which its first message was published at the source, in seconds since 1970. `name_writers`: called before the first
    rows, and again after another writer changed the state; None: nobody else reads its positions.
    """

    def __init__(
        self,
        target: str,
        store: StateStore,
        reconciler: TargetReconciler,
        publisher: Publisher,
        source: RowSource,
        clock: Clock,
        before_close: BeforeClose | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self.target, self.is_settled, self.trouble = target, False, ""
        self.sending_times: Mapping[Chain, float] = {}
        self._store, self._reconciler, self._publisher, self._limits = store, reconciler, publisher, limits
        self._source, self._clock, self._before_close = source, clock, before_close
        self.name_writers: NameWriters | None = None
        self._writers: tuple[str, ...] = ()
        self._stored, self._target_read_at = StoredState(TargetState(Checkpoint(0, "")), 0), clock.monotonic()

    @property
    def stored(self) -> StoredState:
        return self._stored

    @property
    def state(self) -> TargetState:
        return self._stored.existing

    @property
    def unready_reason(self) -> str:
        """The reason why nothing may be stored now; empty if target and state agree."""
        return self.trouble or self._reconciler.pending_reason or ("" if self.is_settled else "checking its state")

    async def run(self, stop: Stop) -> None:
        """Deliver until `stop` is set and no intent is open.

        Raises Stopped with the choices, OtherWriter, LeaseLost; Unavailable and OutcomeUnknown if a new attempt
        may help.
        """
        await self.begin()
        while True:
            try:
                if self.state.intent is not None:  # from this process, or from an instance that crashed
                    await self._finish(self.state.intent)
                elif not self.is_settled:
                    await self._reconciler.settle(self._stored, None)
                elif (rows := await self._take(stop)) is None:
                    return
                else:
                    await self._deliver(rows)
                self.is_settled = True
            except StateChanged as moved:  # by an operator, or another instance
                log.warning("state changed by another writer", action="state_changed", target=self.target)
                metrics.intents.labels(self.target, "lost").inc()
                self._adopt(moved.stored)
                await self.wait_for_other_instance()

    async def begin(self) -> None:
        stored, reading = await self._reconciler.load_first()
        if stored.state is None and reading is not None:
            # All messages in a shared target at the first start existed before Floe.
            last = reading.last_sequence
            stored = StoredState(TargetState(Checkpoint(last, reading.created, foreign_upto=last)), 0)
        self._adopt(stored)
        state = self.state
        positions = sorted(state.checkpoint.positions.items())
        log.info(
            "delivery resumed",
            action="delivery_resumed",
            target=self.target,
            target_sequence=state.checkpoint.target_sequence,
            open_intent=None if state.intent is None else state.intent.count,
            chains={str(chain): at for chain, at in positions[:MAX_LOGGED_CHAINS]},
        )

    def _adopt(self, stored: StoredState) -> None:
        self._stored, self._writers = stored, ()
        behind = self.state
        if behind.intent is not None:
            metrics.intents.labels(self.target, "taken_over").inc()
            behind = close_intent(behind)
        # Rows after the open intent may be decoded while it is being finished.
        self._source.reset(behind.checkpoint.positions)

    # One intent

    async def _take(self, stop: Stop) -> Rows | None:
        """Return ready rows, None if `stop` is set. Raises StateChanged if the state is corrected while it waits."""
        if self.name_writers is not None and not self._writers:
            self._writers = await self.name_writers(self._stored)
        # Check it first: with a backlog, rows are always ready and taking them never waits.
        while not stop.is_set:
            if (rows := await self._source.take(stop, STATE_CHECK_INTERVAL_S)) is not None:
                return rows
            if not stop.is_set:
                await self._reconciler.check_moved(self._stored)
                # Find a target that was deleted or set back before the next row arrives.
                if self._clock.monotonic() - self._target_read_at >= TARGET_CHECK_INTERVAL_S:
                    self._target_read_at = self._clock.monotonic()
                    await self._reconciler.settle(self._stored, None)
        return None

    async def _deliver(self, rows: Rows) -> None:
        try:
            self._reconciler.check_lease()
            # Find a foreign message before an intent is opened that could then never be finished.
            settled = await self._reconciler.settle(self._stored, None)
            if self._limits is not None and self._limits.has_changed(rows):
                # A row that the server no longer accepts must not get into an intent.
                await self._limits.renew(self.state.checkpoint.positions)
                return
            metrics.count_foreign(self.target, settled.base - self.state.checkpoint.target_sequence)
            intent = await self._save(self._open_intent(rows, settled.base))
            self._reconciler.sending.open(self._stored.revision)
            metrics.intents.labels(self.target, "opened").inc()
            failpoint("ingress.after_intent")
            assert intent is not None, "it was just opened"
            await self._finish(intent, rows)
        finally:
            self._source.release(rows)

    async def _finish(self, intent: Intent, rows: Rows | None = None) -> None:
        """Publish the missing rows of the open intent, and close it.

        `rows`: its messages if it was opened just now and none of them was sent; None: read them and the target.
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
        metrics.count_closed_intent(self.target, intent, self._clock.now())
        self._source.record_stored(self.state.checkpoint.positions)

    async def _publish_rest(self, intent: Intent) -> int:
        if self._reconciler.is_shared and not intent.is_shared:
            # Mark the intent as shared before another row is sent.
            await self._save(share_intent(self.state))
            intent = replace(intent, is_shared=True)
        settled = await self._reconciler.settle(self._stored, None)
        if settled.stored == intent.count:
            return settled.base
        rows = await self._source.recall.rows(intent, settled.stored)
        try:
            if self._reconciler.is_shared:
                # With the rows in memory the number of stored rows is exact.
                settled = await self._reconciler.settle(self._stored, rows)
            return await self._publish(intent, rows, settled)
        finally:
            self._source.release(rows)

    async def _publish(self, intent: Intent, rows: Rows, settled: Settled) -> int:
        """Publish until all rows of the open intent are stored; `settled.stored` of them already are. Return the base
        of the last row.

        Raises as `TargetReconciler.settle` does, and Unavailable if several attempts in a row store nothing.
        """
        slow, sending, self.sending_times = 0, self._reconciler.sending, rows.first_times()
        sending.record_settled(self._stored.revision, settled.stored)
        while settled.stored < intent.count:
            self._reconciler.check_lease()
            if self._limits is not None:
                # Rows written from here on reach the server that is connected now, or none.
                self._limits.check(rows, settled.stored)
            sent = sending.begin()
            outcome = await self._publisher.publish(rows, settled.base, settled.stored)
            sending.end(sent, outcome.stored, outcome.handed_upto)
            before, settled = settled, replace(settled, stored=outcome.stored)
            if outcome.unclear is not None:
                self._record_unclear(outcome, outcome.unclear)
                settled = await self._reconciler.settle(self._stored, rows)
                sending.record_settled(self._stored.revision, settled.stored)
                if self._reconciler.is_shared and settled.stored < outcome.stored:
                    # Acknowledged rows are stored, even if a read no longer finds them.
                    settled = Settled(settled.base + settled.stored - outcome.stored, outcome.stored)
                # Foreign messages stored meanwhile explain a refusal, and a pause would not help.
                foreign = settled.base > before.base and outcome.unclear.err_code in WRONG_LAST_SEQUENCE_CODES
                metrics.count_foreign(self.target, settled.base - before.base)
                slow = 0 if foreign or settled.stored > before.stored else slow + 1
                await self._back_off(slow, outcome.unclear)
        if self.trouble:
            log.info("publish recovered", action="publish_recovered", target=self.target, trouble=self.trouble)
            self.trouble = ""
        metrics.delivered_bytes.labels(self.target).inc(rows.message_bytes)
        failpoint("ingress.after_commit")
        return settled.base

    def _record_unclear(self, outcome: Outcome, unclear: UnknownOutcome) -> None:
        metrics.unclear.labels(self.target).inc()
        if unclear.err_code:
            metrics.refused_batches.labels(self.target, str(unclear.err_code)).inc()
        if self._reconciler.is_shared and unclear.err_code in WRONG_LAST_SEQUENCE_CODES:
            return
        self.trouble = unclear.reason
        context = {"target": self.target, "acknowledged": outcome.stored, "error": unclear.reason}
        log.warning("publish outcome unclear", action="publish_unclear", **context)

    async def _back_off(self, slow: int, unclear: UnknownOutcome) -> None:
        """Wait longer after each attempt in a row that stores nothing. Raises Unavailable after too many."""
        if slow >= MAX_EMPTY_ATTEMPTS:
            message = f"target {self.target} accepts no messages: {unclear.reason}"
            raise Unavailable(message, code=f"E-JS-{unclear.err_code}" if unclear.err_code else "")
        if slow:
            await self._clock.sleep(min(MAX_PAUSE_S, MIN_PAUSE_S * 2**slow))

    # The state

    def _open_intent(self, rows: Rows, base: int) -> TargetState:
        try:
            checkpoint = replace(self.state.checkpoint, writers=self._writers or self.state.checkpoint.writers)
            state = replace(self.state, checkpoint=checkpoint)
            return open_intent(state, rows.pieces(), base, is_shared=self._reconciler.is_shared)
        except StateConflict as error:
            error.hint = choices(("a defect: keep the log; ingress retries by itself; see", floe_command("status")))
            raise

    async def _save(self, state: TargetState) -> Intent | None:
        """Store `state` and return its open intent. Raises StateChanged if another instance stored one."""
        if (stored := await self._store.save(state, self._stored.revision)) is None:
            await self._reconciler.check_moved(self._stored)
            raise Unavailable(f"state of target {self.target}: neither stored nor changed by another instance")
        self._stored = stored
        return state.intent

    async def wait_for_other_instance(self) -> None:
        """Wait until another instance, which stored progress, stores nothing more.

        A correction by an operator does not count as another instance. Raises LeaseLost if the lease is not ours,
        OtherWriter if it is ours and the other instance does not stop.
        """
        for _ in range(PROGRESS_CHECKS):
            await self._clock.sleep(PROGRESS_CHECK_INTERVAL_S)
            self._reconciler.check_lease()
            try:
                await self._reconciler.check_moved(self._stored)
                return
            except StateChanged as moved:
                before = self.state
                self._adopt(moved.stored)
            has_delivered = before.checkpoint.target_sequence != self.state.checkpoint.target_sequence
            if not has_delivered and before.intent == self.state.intent:
                return  # only positions differ: an operator's correction
        remedy = "stop all but one, or give them one lease bucket; to show the stored state and the open intent"
        message = f"target {self.target}: another instance delivers into it while this one holds the lease"
        raise OtherWriter(message, hint=choices((remedy, floe_command("checkpoint ls"))))
