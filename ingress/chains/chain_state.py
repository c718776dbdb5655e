"""One chain on its way into a target."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.chain import Chain
from common.errors import FloeError
from common.segments.segment import SegmentRef
from common.sequences import SequenceRange, Stretch
from common.service.logs import get_logger
from ingress import hints
from ingress.chains.plan import ChainPlan, Phase
from ingress.chains.search import Search
from ingress.rows.decoder import FromHole
from ingress.rows.prepare import Preparer

log = get_logger("ingress.chains.chain_state")


@dataclass(slots=True, eq=False)
class Lane:
    """What is known of a chain, and how far it is decoded.

    `position`: the next sequence to decode; 0 while it is not known where the chain begins. `end`: where its
    incarnation ended, None while it has not. `archived`: the end of coverage as the chain's tail
    says, a hint; 0 where unknown. `given_up`: what is passed next without a row; `is_beginning`: that is what
    the chain leaves out before it begins. `rechecked`: the position at which damaged segments were read once
    more. `surveyed`: a lost hole for which everything was looked through, and what of it nothing covers.
    `gone`: where it stands because a hole was filled and something was missing by then; `stands_since`: its
    first sequence, and since when by the store's clock; `passed`: what of such ranges is given up. `stopped`:
    why nothing more of it is carried until it is looked at again, at `retry_at` (in monotonic seconds) or
    when an operator asks for it. `paused`: an operator wants nothing of it carried. `waits_for`: why it has
    not begun. `unreached`: an end of coverage that was still before the moment at which it is to begin; 0:
    none was.
    """

    chain: Chain
    preparer: Preparer
    position: int = 0
    end: int | None = None
    archived: int = 0
    stretches: deque[Stretch[SegmentRef]] = field(default_factory=deque)
    given_up: SequenceRange | None = None
    is_beginning: bool = False
    plan: ChainPlan = field(default_factory=lambda: ChainPlan(Phase.IDLE))
    search: Search = field(default_factory=Search)
    damaged: set[str] = field(default_factory=set)
    rechecked: int = 0
    surveyed: tuple[SequenceRange, SequenceRange] | None = None
    gone: FromHole | None = None
    stands_since: tuple[int, float] | None = None
    passed: list[SequenceRange] = field(default_factory=list)
    stopped: FloeError | None = None
    retry_at: float = float("inf")
    is_retried: bool = False
    paused: bool = False
    waits_for: str = ""
    unreached: int = 0
    look_everywhere: bool = True
    look_behind: bool = True
    looked_at: float = float("-inf")
    looked_everywhere_at: float = float("-inf")
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
        if self.stopped is not None or self.paused:
            return False
        return (
            not self.has_begun
            or self.failed
            or self.plan.waits
            or (self.archived >= self.position and self.plan.phase is not Phase.DONE)
        )

    def begins(self, first: int, start: int) -> None:
        """It begins at `start`. What of the archive is before, from `first` on, is given up, and stored so
        with the positions: a restart begins at the same sequence.
        """
        self.position = first
        self.is_beginning = start > first
        self.given_up = SequenceRange(first, start - 1) if self.is_beginning else None

    def passes(self) -> None:
        """What is given up is on its way."""
        self.given_up, self.is_beginning = None, False

    def replan(self, *, everywhere: bool = False) -> None:
        """Forget what was going to be read; with `everywhere` look at all levels next time."""
        self.stretches.clear()
        if self.is_beginning:
            # Nothing says yet what it leaves out: from its position it would be carried whole.
            self.position = 0
        self.passes()
        self.look_everywhere = self.look_everywhere or everywhere

    def stands(self, gone: FromHole) -> None:
        """Nothing is read from where `gone` begins until what is missing comes, or is given up.

        Compaction puts the segment anew, with a new LastModified: that does not begin the waiting again.
        """
        first, since = gone.rows.first, gone.segment.modified
        before = self.stands_since[1] if self.stands_since and self.stands_since[0] == first else since
        self.gone, self.stands_since = gone, (first, min(before, since))
        self.replan()

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
            self.replan()

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
        self.stretches.extend(plan.stretches)
        if plan.stretches:
            # A notification wakes without the tail being read; the listing knows better anyway.
            self.archived = max(self.archived, plan.stretches[-1].rows.last)

    # Stopping

    @property
    def may_run(self) -> bool:
        """Whether it may be looked at now."""
        return not self.paused and (self.stopped is None or self.is_retried)

    def stop(self, error: FloeError, retry_at: float) -> bool:
        """Nothing more of it is carried until `retry_at`; whether that, or the reason, is new."""
        is_new = self.stopped is None or str(self.stopped) != str(error)
        self.stopped, self.retry_at, self.is_retried, self.again = error, retry_at, False, False
        self.replan(everywhere=True)
        return is_new

    def retry(self, retry_at: float) -> None:
        """Look again: whether what stopped it is mended, and whether damaged segments are; if that does not
        come to an end, once more at `retry_at`.
        """
        self.is_retried, self.retry_at = self.stopped is not None, retry_at
        self.damaged.clear()
        self.replan(everywhere=True)

    def goes_on(self) -> None:
        """What stopped it is mended."""
        if self.stopped is None:
            return
        self.stopped, self.is_retried, self.retry_at = None, False, float("inf")
        log.info("chain goes on", action="chain_goes_on", **self.chain.log_context())

    def status(self, positions: Mapping[Chain, int]) -> dict[str, Any]:
        """What /status shows of it."""
        state: dict[str, Any] = {
            "position": positions.get(self.chain, 0),
            "archived": self.archived,
            "phase": str(self.plan.phase),
        }
        if self.plan.hole is not None:
            state["hole"] = str(self.plan.hole)
            state["waiting_since"] = self.plan.waiting_since
            away = sorted(self.damaged) if self.plan.phase is Phase.DAMAGED else []
            if self.gone:
                state["hint"] = hints.way_out_filled(self.chain, self.plan.hole)
            else:
                state["hint"] = hints.way_out_of(self.chain, self.plan.hole, away)
        if self.waits_for:
            state["waits_for"] = self.waits_for
        if self.paused:
            state["paused"] = True
        if self.stopped is not None:
            state |= {
                "stopped": self.stopped.message,
                "code": self.stopped.code,
                "hint": self.stopped.hint,
            }
        return state
