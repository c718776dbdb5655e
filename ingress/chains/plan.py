"""Plans of the next reads, chain by chain: pure functions over listings, positions and ends of incarnations; and
the order of turns.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Generic, TypeVar

from common.archive.documents import AcceptedGap, accepted_part
from common.archive.segment import SegmentRef
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch, leading_stretches, reaches
from common.settings.ingress import SourceSettings
from common.settings.types import format_duration


class Phase(StrEnum):
    """Phase of a chain. A plan has only the first six; `ChainState` has all."""

    READY = "ready"  # rows can be read now
    IDLE = "idle"  # the chain is at the end of the archive
    LATE = "late"  # a hole: a segment after it exists, the segment that continues does not
    LOST = "lost"  # a hole that has been late for too long; an operator must decide
    DAMAGED = "damaged"  # only damaged segments would continue
    DONE = "done"  # its incarnation ended, and is read to its end
    BEGINNING = "beginning"  # its first sequence is not known
    SEARCHING = "searching"  # nothing is planned
    SKIPPING_START = "skipping start"  # the range that it skips before it begins is next
    SKIPPING_HOLE = "skipping hole"  # the skipped range of a hole is next
    FAILED = "failed"  # the last turn ended with an error
    STOPPED = "stopped"  # for a reason that needs an operator
    PAUSED = "paused"  # by an operator


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """The stretches of one chain that can be read, ascending and without a hole from its position on.

    `hole`: the missing sequences, if the phase is LATE, LOST or DAMAGED. `waiting_since`: the earliest LastModified
    of the segments after the hole (or of the damaged ones), in seconds by the store's clock, so that waiting
    survives restarts; None if no segment is after it, because the incarnation ended there. `late_end`: the greatest
    end of coverage after the end of the incarnation, which is reported and never replayed; 0 if there is none.
    """

    phase: Phase
    stretches: tuple[Stretch[SegmentRef], ...] = ()
    hole: SequenceRange | None = None
    waiting_since: float | None = None
    late_end: int = 0

    @property
    def is_waiting(self) -> bool:
        return self.phase in (Phase.LATE, Phase.LOST, Phase.DAMAGED)

    def with_wait_of(self, former: ChainPlan) -> ChainPlan:
        """Return this plan; if `former` was late at the same sequence, late since then.

        Compaction rewrites segments after a hole, with a new LastModified. Time of damage does not count as time of
        being late.
        """
        if not self.hole or not former.hole or self.hole.first != former.hole.first:
            return self
        if Phase.DAMAGED in (self.phase, former.phase):
            return self
        times = [t for t in (self.waiting_since, former.waiting_since) if t is not None]
        return replace(self, waiting_since=min(times, default=None))


def plan_chain(
    segments: Iterable[SegmentRef], position: int, end: int | None, damaged: AbstractSet[str] = frozenset()
) -> ChainPlan:
    """Plan the stretches from `position` to the first hole, or to `end` (inclusive) if the incarnation ended there.

    `damaged`: keys of segments to leave out.
    """
    found = list(segments)
    last = MAX_SEQUENCE if end is None else end
    late_end = max((ref.coverage.last for ref in found if ref.coverage.last > last), default=0)
    if position > last:
        return ChainPlan(Phase.DONE, late_end=late_end)
    usable = [ref for ref in found if ref.key not in damaged]
    if stretches := tuple(leading_stretches(usable, position, last)):
        return ChainPlan(Phase.READY, stretches, late_end=late_end)
    broken = [ref for ref in found if ref.key in damaged and reaches(ref.coverage, position)]
    behind = [ref for ref in usable if ref.coverage.first > position]
    if not broken and not behind and end is None:
        return ChainPlan(Phase.IDLE, late_end=late_end)
    ends = [ref.coverage.first - 1 for ref in behind] or [ref.coverage.last for ref in broken]
    ends += [] if end is None else [end]
    since = min((ref.modified for ref in broken or behind), default=None)
    phase = Phase.DAMAGED if broken else Phase.LATE
    return ChainPlan(phase, (), SequenceRange(position, min(ends)), since, late_end)


def first_position(first: int, floor: int | None) -> int:
    return max(first, floor or 1)


@dataclass(frozen=True, slots=True)
class GapDecision:
    """The leading `part` of a hole is skipped, or lost and an operator must decide (`needs_operator`)."""

    part: SequenceRange
    reason: str
    needs_operator: bool = False


def decide_hole(plan: ChainPlan, gaps: Sequence[AcceptedGap], now: float, source: SourceSettings) -> GapDecision | None:
    """Decide about the hole of `plan`, which is LATE or DAMAGED; None: wait, it may still be filled.

    `gaps`: gaps that operators accepted, and gaps that this target skipped before. `now`: seconds by the store's clock.
    Damage never turns into a lost hole by itself: the object exists, and waiting does not make it worse.
    """
    assert plan.hole is not None, "only holes are decided about"
    part = accepted_part(plan.hole, (gap.range for gap in gaps))
    if part is not None:
        gap = next(gap for gap in gaps if part.first in gap.range)
        return GapDecision(part, f"accepted by {gap.decided_by or 'someone'}" + (f": {gap.note}" if gap.note else ""))
    timeout = source.lost_segment_timeout
    if plan.phase is Phase.DAMAGED or plan.waiting_since is None or now - plan.waiting_since < timeout:
        return None
    return GapDecision(plan.hole, f"no segment within {format_duration(timeout)}", source.on_lost != "skip")


Item = TypeVar("Item")


class TurnQueue(Generic[Item]):
    """Queue of turns, fair by site and then in order. `max_per_site`: turns of one site at a time; fewer than there
    are, so that a site that begins to wait finds one.
    """

    def __init__(self, max_per_site: int) -> None:
        self._max_per_site, self._changed = max_per_site, asyncio.Event()
        self.waiting: dict[str, list[Item]] = {}  # first the site that has waited longest for a turn
        self._active = Counter[str]()

    def put(self, site: str, waiting: Item) -> None:
        self.waiting.setdefault(site, []).append(waiting)
        self._changed.set()

    async def begin_turn(self) -> tuple[str, Item]:
        """Wait for the next turn and begin it; `end_turn` ends it."""
        while (site := next((site for site in self.waiting if self._active[site] < self._max_per_site), None)) is None:
            self._changed.clear()
            await self._changed.wait()
        self._active[site] += 1
        first, *rest = self.waiting.pop(site)
        if rest:
            self.waiting[site] = rest
        return site, first

    def end_turn(self, site: str) -> None:
        self._active[site] -= 1
        self._changed.set()
