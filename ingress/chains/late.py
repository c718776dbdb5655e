"""What becomes of a hole: a pure function of the plan, the decisions and the store's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.segments.gaps import AcceptedGap, accepted_part
from common.sequences import SequenceRange
from common.settings.units import format_duration
from ingress.chains.plan import ChainPlan, Phase


class Fate(StrEnum):
    """What a chain does at a hole."""

    WAIT = "wait"  # late: the segment may still come
    GIVE_UP = "give up"  # given up: go on behind `part`
    HALT = "halt"  # lost, and nobody has decided


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a hole is late (seconds, from `lost_segment_timeout`), and whether a lost one is skipped."""

    timeout: float
    skip: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """`part`: the leading part of the hole that is given up, where that is its fate. `why`: in words."""

    fate: Fate
    part: SequenceRange | None = None
    why: str = ""


def decide(plan: ChainPlan, gaps: Sequence[AcceptedGap], now: float, patience: Patience) -> Decision:
    """What to do about the hole of `plan`, whose phase is LATE or DAMAGED.

    `gaps`: what operators accepted and what this target gave up before. `now`: seconds by the store's clock.
    Damage never becomes lost by itself: the object is there, and no waiting makes it worse.
    """
    assert plan.hole is not None, "only holes have a fate"
    part = accepted_part(plan.hole, (gap.range for gap in gaps))
    if part is not None:
        return Decision(Fate.GIVE_UP, part, _accepted_by(part, gaps))
    if plan.phase is Phase.DAMAGED or plan.waiting_since is None:
        return Decision(Fate.WAIT)
    if now - plan.waiting_since < patience.timeout:
        return Decision(Fate.WAIT)
    why = f"no segment within {format_duration(patience.timeout)}"
    return Decision(Fate.GIVE_UP, plan.hole, why) if patience.skip else Decision(Fate.HALT, plan.hole, why)


def _accepted_by(part: SequenceRange, gaps: Sequence[AcceptedGap]) -> str:
    gap = next(gap for gap in gaps if part.first in gap.range)
    return f"accepted by {gap.by or 'somebody'}" + (f": {gap.note}" if gap.note else "")
