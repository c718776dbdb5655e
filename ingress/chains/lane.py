"""One chain on its way into a target."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.chain import Chain
from common.errors import FloeError
from common.segments.segment import SegmentRef
from common.sequences import Stretch
from common.service.logs import get_logger
from ingress.chains.plan import ChainPlan, Phase
from ingress.rows.prepare import Preparer

log = get_logger("ingress.chains.lane")


@dataclass(slots=True, eq=False)
class Lane:
    """What is known of a chain, and how far it is decoded.

    `position`: the next sequence to decode; 0 while it is not known where the chain begins. `end`: where its
    incarnation ended, None while it has not. `archived`: the end of coverage as the chain's tail
    says, a hint; 0 where unknown. `stopped`: why nothing more of it is carried until ingress is
    started again. `waits_for`: why it has not begun.
    """

    chain: Chain
    preparer: Preparer
    position: int = 0
    end: int | None = None
    archived: int = 0
    stretches: deque[Stretch[SegmentRef]] = field(default_factory=deque)
    plan: ChainPlan = field(default_factory=lambda: ChainPlan(Phase.IDLE))
    damaged: set[str] = field(default_factory=set)
    stopped: FloeError | None = None
    waits_for: str = ""
    look_everywhere: bool = True
    looked_at: float = float("-inf")
    is_due: bool = True
    is_queued: bool = False
    is_busy: bool = False
    again: bool = False
    failed: bool = False

    @property
    def has_begun(self) -> bool:
        return self.position > 0

    @property
    def is_done(self) -> bool:
        """Whether everything up to the end of the incarnation is decoded and its tail names no more."""
        return self.end is not None and self.position > self.end and self.archived <= self.end

    @property
    def waits(self) -> bool:
        """Whether it has to be looked at again soon."""
        if self.stopped is not None:
            return False
        return (
            not self.has_begun
            or self.failed
            or self.plan.phase in (Phase.LATE, Phase.DAMAGED)
            or (self.archived >= self.position and self.plan.phase is not Phase.DONE)
        )

    def replan(self, *, everywhere: bool = False) -> None:
        """Forget what was going to be read; with `everywhere` look at all levels next time."""
        self.stretches.clear()
        self.look_everywhere = self.look_everywhere or everywhere

    def fail(self) -> None:
        """The last look or read did not come to its end: everything is to be looked at again."""
        self.failed = True
        self.replan(everywhere=True)

    def forget_damage(self) -> None:
        """Give damaged segments another chance: somebody may have put them right."""
        if self.damaged:
            self.damaged.clear()
            self.replan(everywhere=True)

    def ends_at(self, end: int | None) -> None:
        """The incarnation ended at `end` (None: it has not)."""
        if end != self.end:
            self.end = end
            self.stretches.clear()

    def looked(self, plan: ChainPlan, now: float) -> None:
        """Take over a new plan, made at `now` (monotonic seconds); what is new about it is logged."""
        if plan.hole is not None and plan.hole != self.plan.hole:
            log.warning(
                "chain waits",
                action="chain_waits",
                phase=str(plan.phase),
                hole=str(plan.hole),
                since=plan.waiting_since,
                **self.chain.log_context(),
            )
        if plan.beyond != self.plan.beyond:
            log.warning(
                "coverage behind the end of the incarnation is not carried",
                action="beyond_end",
                end=self.end,
                found=plan.beyond,
                **self.chain.log_context(),
            )
        self.plan, self.looked_at = plan, now
        self.look_everywhere = False
        self.stretches.extend(plan.stretches)

    def status(self, positions: Mapping[Chain, int]) -> dict[str, Any]:
        """What /status shows of it."""
        state: dict[str, Any] = {
            "position": positions.get(self.chain, 0),
            "archived": self.archived,
            "phase": str(self.plan.phase),
        }
        if self.plan.hole is not None:
            state["hole"] = str(self.plan.hole)
        if self.waits_for:
            state["waits_for"] = self.waits_for
        if self.stopped is not None:
            state["stopped"] = self.stopped.message
        return state
