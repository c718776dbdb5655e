"""Planning of merges: a pure function of a listing, a policy and the store's time selects the segments that become one.

Per level, on stored bytes: segments that overlap stay together. Runs of adjacent segments, all older than `min_age`,
are cut before they exceed `max_size` or `max_count`. The rest at the end of a run is merged once it reaches `min_size`,
or once it holds `min_count` and its oldest segment is older than `max_wait`, so that a quiet chain is compacted too. An
output never spans a hole. Late segments with rows of their own are merged under any policy: they are united with the
segments that contain them, or overlap them in part (`unite`). A chain is planned window by window
(`common.archive.table`). The cuts between windows make no difference, because a group that is open at the end of one
continues in the next.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from common.archive.keys import MAX_LEVEL
from common.archive.segment import SegmentRef
from common.chain import Chain
from common.sequences import SequenceRange
from compaction.supersede import by_coverage, unsuperseded

if TYPE_CHECKING:
    from common.settings.root import LevelSettings


#: Segments that overlap, ascending by coverage.
Block = tuple[SegmentRef, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """A segment to make. `inputs`: ascending by coverage, without a hole between them, never empty."""

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
    """Planner of one chain by one policy. `now`: seconds since 1970 UTC by the store's clock. `waiting`: collects the
    segments that are not due at that time.

    Leave unreadable segments out of the windows, as if they did not exist: runs end next to them.
    """

    def __init__(self, policy: LevelSettings, now: float, waiting: WaitingSegments | None = None) -> None:
        self._policy, self._now, self._waiting = policy, now, waiting
        self._group = _Group()

    @property
    def open_segments(self) -> Sequence[SegmentRef]:
        """Segments of the group that is not closed yet: a later window may turn them into an output."""
        return self._group.segments

    @property
    def old_before(self) -> float:
        """The time of storage up to which segments have the policy's `min_age`."""
        return self._now - self._policy.min_age

    def add(self, window: Iterable[Block], taken: AbstractSet[str] = frozenset()) -> list[Output]:
        """Add the blocks of the next window, of all levels, ascending; return the outputs that are then final.

        `taken`: keys of segments that other outputs merge.
        """
        outputs, level = [], self._policy.from_
        for block in window:
            if len(block) == 1:  # nearly always: nothing can supersede it, no other output merges it
                if block[0].level == level:
                    outputs += self._take(SegmentBlock.of(block))
                continue
            for left in blocks(s for s in unsuperseded(block, level) if s.key not in taken):
                outputs += self._take(SegmentBlock.of(left))
        return outputs

    def end(self) -> list[Output]:
        return self._close(is_full=False)

    def is_any_due(self, waiting: Iterable[SegmentBlock]) -> bool:
        """True if any of these blocks, ascending, are due. Only for a planner with no other use."""
        return any(self._take(block) for block in waiting) or bool(self.end())

    def _take(self, block: SegmentBlock) -> list[Output]:
        outputs: list[Output] = []
        is_young = self._now < block.newest + self._policy.min_age
        if is_young or block.first != self._group.last + 1:
            outputs = self.end()
        elif self._group.blocks and not self._group.has_room(block, self._policy):
            outputs = self._close(is_full=True)
        if not is_young:
            self._group.add(block)
        elif self._waiting is not None:
            self._waiting.add_young(block)
        return outputs

    def _close(self, *, is_full: bool) -> list[Output]:
        closed, self._group = self._group, _Group()
        if self._now >= closed.due_at(self._policy, is_full=is_full):
            return [Output(self._policy.to, tuple(closed.segments))]
        if closed.blocks and self._waiting is not None:
            self._waiting.add_small(closed)
        return []


@dataclass(slots=True)
class WaitingSegments:
    """Segments of one chain that wait for a merge by one policy at `now`, and the reasons; a few numbers in any case.

    `young`: segments that are younger than `min_age`, or overlap one that is; `young_until`: the time at which the
    first of them is old enough. `small`: the others, in `runs` that are neither large nor old enough; `largest`: stored
    bytes of the largest run; `too_few`: those in runs with too few segments for `max_wait` to apply. Times: seconds
    since 1970 UTC.
    """

    chain: Chain
    policy: LevelSettings
    now: float
    young: int = field(default=0, init=False)
    young_bytes: int = field(default=0, init=False)
    young_until: float = field(default=math.inf, init=False)
    small: int = field(default=0, init=False)
    small_bytes: int = field(default=0, init=False)
    runs: int = field(default=0, init=False)
    largest: int = field(default=0, init=False)
    too_few: int = field(default=0, init=False)
    # Adjacent blocks that may be merged before `_merge_at`, the earliest time so far, by the policy key `_merge_key`.
    _blocks: list[SegmentBlock] = field(default_factory=list, init=False)
    _last: int = field(default=0, init=False)
    _limit: int = field(default=1000, init=False)
    _merge_at: float = field(default=math.inf, init=False)
    _merge_key: str = field(default="", init=False)

    @property
    def segments(self) -> int:
        return self.young + self.small

    @property
    def size(self) -> int:
        return self.young_bytes + self.small_bytes

    def add_young(self, block: SegmentBlock) -> None:
        self.young += len(block.segments)
        self.young_bytes += block.size
        self.young_until = min(self.young_until, block.newest + self.policy.min_age)
        self._add_block(block)

    def add_small(self, group: _Group) -> None:
        self.small += len(group.segments)
        self.small_bytes += group.size
        self.runs += 1
        self.largest = max(self.largest, group.size)
        self.too_few += len(group.segments) if group.due_at(self.policy, is_full=False) == math.inf else 0
        for block in group.blocks:
            self._add_block(block)

    def next_merge(self) -> tuple[float, str]:
        """Return the time of the next merge if nothing else arrives, and its policy key; `inf` and empty if there is
        none. No later block may be adjacent to those so far.

        From that time on, and not before, a planner makes an output of waiting segments. It is found by planning at
        each time at which a block gets old enough. If some blocks make an output at one time, they make one at any
        later time too, with more of them: so by bisection.
        """
        found = {_max_wait_time(each.oldest, self.policy): "max_wait" for each in self._blocks}
        found |= {each.newest + self.policy.min_age: "min_age" for each in self._blocks}
        moments = sorted(at for at in found if at < self._merge_at)
        place = bisect_left(moments, True, key=lambda at: Planner(self.policy, at).is_any_due(self._blocks))
        if place < len(moments):
            self._merge_at, self._merge_key = moments[place], found[moments[place]]
        self._blocks = []
        return self._merge_at, self._merge_key

    def _add_block(self, block: SegmentBlock) -> None:
        is_late = self._is_late(block)
        if is_late or block.first != self._last + 1:
            self.next_merge()
        self._last = block.last
        if is_late:
            return
        self._blocks.append(block)
        if len(self._blocks) >= self._limit:
            kept = self._blocks
            self.next_merge()
            late = [number for number, each in enumerate(kept, 1) if self._is_late(each)]
            self._blocks = kept[late[-1] if late else 0 :]
            self._limit = max(1000, 2 * len(self._blocks))

    def _is_late(self, block: SegmentBlock) -> bool:
        return block.newest + self.policy.min_age >= self._merge_at


def unite(late: Iterable[Iterable[SegmentRef]], until: float = math.inf) -> list[Output]:
    """Return the merges that bring each group of `late` into one segment of the next higher level. In each group one
    segment lacks rows that the others have. Overlapping groups are merged together, and wait while any of their
    segments was stored after `until`.

    There is no level above 9: a late segment of level 9 stays as it is.
    """
    by_chain: defaultdict[Chain, dict[str, SegmentRef]] = defaultdict(dict)
    for found in late:
        for segment in found:
            by_chain[segment.chain][segment.key] = segment
    together = [block for _, one in sorted(by_chain.items()) for block in blocks(one.values())]
    old_before = [block for block in together if max(s.modified for s in block) <= until]
    outputs = [Output(1 + max(s.level for s in block), block) for block in old_before]
    return [output for output in outputs if output.level <= MAX_LEVEL]


class SegmentBlock(NamedTuple):
    """Overlapping segments, which are merged together or not at all, with the values that a policy needs. `oldest`,
    `newest`: times at which their objects were stored.
    """

    segments: tuple[SegmentRef, ...]
    first: int
    last: int
    size: int
    oldest: float
    newest: float

    @classmethod
    def of(cls, segments: tuple[SegmentRef, ...]) -> SegmentBlock:
        if len(segments) == 1:  # nearly always
            [((_, _, coverage, _), _, size, modified)] = segments
            return cls(segments, coverage.first, coverage.last, size, modified, modified)
        times, last = [s.modified for s in segments], max(s.coverage.last for s in segments)
        return cls(segments, segments[0].coverage.first, last, sum(s.size for s in segments), min(times), max(times))


@dataclass(slots=True)
class _Group:
    """Adjacent blocks that become one output."""

    blocks: list[SegmentBlock] = field(default_factory=list)
    segments: list[SegmentRef] = field(default_factory=list)
    size: int = 0
    oldest: float = math.inf

    @property
    def last(self) -> int:
        """The last sequence of the group; 0 if it is empty."""
        return self.blocks[-1].last if self.blocks else 0

    def add(self, block: SegmentBlock) -> None:
        self.blocks.append(block)
        self.segments += block.segments
        self.size += block.size
        self.oldest = min(self.oldest, block.oldest)

    def has_room(self, block: SegmentBlock, policy: LevelSettings) -> bool:
        fits = self.size + block.size <= policy.max_size
        return fits and len(self.segments) + len(block.segments) <= policy.max_count

    def due_at(self, policy: LevelSettings, *, is_full: bool) -> float:
        """Return the time from which it is merged; `inf`: not as it is. `is_full`: the next block does not fit."""
        count = len(self.segments)
        # A single segment is promoted only for its size: rewriting it alone for its count would gain nothing.
        if (count and self.size >= policy.min_size) or (count > 1 and (is_full or count >= policy.max_count)):
            return -math.inf
        return _max_wait_time(self.oldest, policy) if count >= max(policy.min_count, 2) else math.inf


def _max_wait_time(oldest: float, policy: LevelSettings) -> float:
    """Return the first moment at which an object that was stored at `oldest` is older than `max_wait`."""
    return math.nextafter(oldest + policy.max_wait, math.inf)


def blocks(segments: Iterable[SegmentRef]) -> Iterator[Block]:
    """Yield overlapping segments together, ascending; no two blocks overlap.

    The segments of one block are merged together or not at all, at any size.
    """
    members: list[SegmentRef] = []
    last = 0
    for segment in sorted(segments, key=by_coverage):
        coverage = segment.coverage
        if members and coverage.first > last:
            yield tuple(members)
            members = []
        members.append(segment)
        last = max(last, coverage.last)
    if members:
        yield tuple(members)


def unsuperseded_overlaps(found: Iterable[Block]) -> Iterator[Block]:
    """Yield groups of overlapping segments, of any levels, that no other segment of their block supersedes."""
    for block in found:
        staying = (s for level in {s.level for s in block} for s in unsuperseded(block, level))
        yield from (left for left in blocks(staying) if len(left) > 1)
