"""Publishes the rows of an open intent until all of them are stored; whatever is unclear is settled first."""

from __future__ import annotations

from dataclasses import replace

from common.clock import Clock
from common.errors import Unavailable
from common.failpoints import failpoint
from common.service.logs import get_logger
from ingress import metrics
from ingress.checkpoint import Intent
from ingress.checkpoints.state import Stored
from ingress.interfaces import Settling
from ingress.limits import ServerLimits
from ingress.publishers.publisher import WRONG_LAST_SEQUENCE, Unclear
from ingress.publishing.publisher import Outcome, Publisher
from ingress.rows.rows import Rows
from ingress.verdict.verdict import Settled

log = get_logger("ingress.sender")

SLOW_ROUNDS = 8  # attempts in a row that stored nothing before everything is begun again
FIRST_PAUSE, LAST_PAUSE = 0.05, 5.0  # seconds between such attempts


class Sender:
    """Publishes into one target. `trouble`: why nothing is stored at the moment; empty while all is well."""

    def __init__(
        self,
        target: str,
        settler: Settling,
        publisher: Publisher,
        clock: Clock,
        limits: ServerLimits | None = None,
    ) -> None:
        self.target, self.trouble, self._limits = target, "", limits
        self._settler, self._publisher, self._clock = settler, publisher, clock

    async def send(self, known: Stored, intent: Intent, rows: Rows, settled: Settled) -> int:
        """Publish until all rows of the open intent of `known` are stored; the base that the last of them
        stands by.

        `settled`: how many of them are stored already. Raises what settling raises, and Unavailable where the
        target takes nothing.
        """
        slow, sending = 0, self._settler.sending
        sending.settled(known.revision, settled.stored)
        while settled.stored < intent.count:
            self._settler.check_lease()
            if self._limits is not None:
                # What is written from here on goes to the server that is connected to now, or nowhere.
                self._limits.check(rows, settled.stored)
            sent = sending.begins()
            outcome = await self._publisher.publish(rows, settled.base, settled.stored)
            sending.ends(sent, outcome.stored, outcome.handed)
            before, settled = settled, replace(settled, stored=outcome.stored)
            if outcome.unclear is not None:
                self._note(outcome, outcome.unclear)
                settled = await self._settler.settle(known, rows)
                sending.settled(known.revision, settled.stored)
                if self._settler.steps_over:
                    settled = _at_least(outcome.stored, settled)
                # What others stored meanwhile explains a refusal, and waiting would not help.
                foreign = settled.base > before.base and outcome.unclear.err_code in WRONG_LAST_SEQUENCE
                metrics.stepped_over(self.target, settled.base - before.base)
                slow = 0 if foreign or settled.stored > before.stored else slow + 1
                await self._pause(slow, outcome.unclear)
        self.trouble = ""
        failpoint("ingress.after_commit")
        return settled.base

    def _note(self, outcome: Outcome, unclear: Unclear) -> None:
        metrics.unclear.labels(self.target).inc()
        if unclear.err_code:
            metrics.refused_batches.labels(self.target, str(unclear.err_code)).inc()
        if self._settler.steps_over and unclear.err_code in WRONG_LAST_SEQUENCE:
            return
        self.trouble = unclear.why
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


def _at_least(acknowledged: int, settled: Settled) -> Settled:
    """Rows that were acknowledged are stored, even where others are read that cannot be found any more."""
    if settled.stored >= acknowledged:
        return settled
    return Settled(settled.base + settled.stored - acknowledged, acknowledged)
