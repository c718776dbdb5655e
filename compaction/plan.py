"""Which segments become one: a pure function of a listing, a policy and the store's time.

Per level, on stored bytes: segments that overlap stay together; runs of adjacent segments, all older than
`min_age`, are cut before they pass `max_size` or `max_count`; what is left at a run's end is merged when it
reaches `min_size`, or holds `min_count` and its oldest is older than `max_wait`, so that a quiet chain is
compacted too. An output never spans a hole. Late segments with rows of their own are merged whatever the policy:
they are united with what contains them (`unite`). A chain is planned window by window (`common.segments.table`); where
these are cut makes no difference, because a group that is open at the end of one goes on in the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.chain import Chain
from common.segments.keys import MAX_LEVEL
from common.segments.segment import SegmentRef
from common.sequences import SequenceRange
from compaction.supersede import Supersession, outstanding

if TYPE_CHECKING:
    from common.settings.root import LevelSettings


@dataclass(frozen=True, slots=True)
class Output:
    """A segment to be made. `inputs`: ascending by coverage, without a hole between them, never empty."""

    level: int
    inputs: tuple[SegmentRef, ...]

    @property
    def chain(self) -> Chain:
        return self.inputs[0].chain

    @property
    def coverage(self) -> SequenceRange:
        return SequenceRange(self.inputs[0].coverage.first, max(s.coverage.last for s in self.inputs))

    @property
    def size(self) -> int:
        """Stored bytes of the inputs."""
        return sum(s.size for s in self.inputs)

    def log_context(self) -> dict[str, object]:
        return {
            **self.chain.log_context(),
            "segment_level": self.level,  # `level` is the level of a log line
            "first": self.coverage.first,
            "last": self.coverage.last,
            "inputs": len(self.inputs),
            "bytes": self.size,
        }


class Planner:
    """Plans one chain by one policy. `now`: seconds since 1970 UTC by the store's clock.

    Segments that cannot be read are left out of what is added, as if they did not exist: runs end beside them.
    """

    def __init__(self, policy: LevelSettings, now: float) -> None:
        self._policy, self._now, self._group = policy, now, _Group()
        self._reach = 0  # where the run ends so far

    @property
    def open(self) -> Sequence[SegmentRef]:
        """Segments of the group that is not closed yet: a later window may make an output of them."""
        return self._group.segments

    def add(self, window: Sequence[SegmentRef]) -> list[Output]:
        """The outputs that are certain once the segments of the next window are known, of all levels; ascending."""
        outputs: list[Output] = []
        for block in blocks(outstanding(window, self._policy.from_)):
            if self._now - max(s.modified for s in block) < self._policy.min_age:
                continue
            if block[0].coverage.first != self._reach + 1:
                outputs += self.end()
            elif self._group.segments and not self._group.has_room(block, self._policy):
                outputs += self._close(len(self._group.segments) > 1 or self._group.reaches_minimum(self._policy))
            self._group.add(block)
            self._reach = max(s.coverage.last for s in block)
        return outputs

    def end(self) -> list[Output]:
        group, policy = self._group, self._policy
        return self._close(group.reaches_minimum(policy) or group.has_waited(policy, self._now))

    def _close(self, is_due: bool) -> list[Output]:
        closed, self._group = self._group, _Group()
        return [Output(self._policy.to, tuple(closed.segments))] if is_due and closed.segments else []


def unite(late: Iterable[Supersession]) -> list[Output]:
    """The merges that bring `late`, segments found contained in others and with rows of their own, into one segment
    with those others, of the next higher level; what overlaps is merged together.

    There is no level above 9: what only level 9 contains stays as it is.
    """
    by_chain: defaultdict[Chain, dict[str, SegmentRef]] = defaultdict(dict)
    for supersession in late:
        for segment in (*supersession.superseded, *supersession.superseding):
            by_chain[segment.chain][segment.key] = segment
    together = [block for _, found in sorted(by_chain.items()) for block in blocks(found.values())]
    outputs = [Output(1 + max(s.level for s in block), block) for block in together]
    return [output for output in outputs if output.level <= MAX_LEVEL]


@dataclass(slots=True)
class _Group:
    """Adjacent blocks that become one output."""

    segments: list[SegmentRef] = field(default_factory=list)
    size: int = 0

    def add(self, block: Sequence[SegmentRef]) -> None:
        self.segments += block
        self.size += sum(s.size for s in block)

    def has_room(self, block: Sequence[SegmentRef], policy: LevelSettings) -> bool:
        fits = self.size + sum(s.size for s in block) <= policy.max_size
        return fits and len(self.segments) + len(block) <= policy.max_count

    def reaches_minimum(self, policy: LevelSettings) -> bool:
        # A single segment is promoted only for its size: rewriting it alone for its count would gain nothing.
        return self.size >= policy.min_size or 1 < len(self.segments) >= policy.max_count

    def has_waited(self, policy: LevelSettings, now: float) -> bool:
        enough = len(self.segments) >= max(policy.min_count, 2)  # so the age of an empty group is never asked for
        return enough and now - min(s.modified for s in self.segments) > policy.max_wait


def blocks(segments: Iterable[SegmentRef]) -> Iterator[tuple[SegmentRef, ...]]:
    """Overlapping segments together, ascending; no two blocks overlap.

    The segments of one block are merged together or not at all, whatever their size.
    """
    members: list[SegmentRef] = []
    reach = 0
    for segment in sorted(segments, key=lambda s: (s.coverage, s.name)):
        if members and segment.coverage.first > reach:
            yield tuple(members)
            members = []
        members.append(segment)
        reach = max(reach, segment.coverage.last)
    if members:
        yield tuple(members)
