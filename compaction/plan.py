"""Which segments become one: a pure function of a listing, a policy and the store's time.

Per level, on stored bytes: segments that overlap stay together; runs of adjacent segments, all older than
`min_age`, are cut before they pass `max_size` or `max_count`; what is left at a run's end is merged when it
reaches `min_size`, or holds `min_count` and its oldest is older than `max_wait`, so that a quiet chain is
compacted too. An output never spans a hole. Late segments with rows of their own are merged whatever the policy:
they are united with what contains them, or overlaps them in part (`unite`). A chain is planned window by window
(`common.segments.table`); where these are cut makes no difference, because a group that is open at the end of one goes
on in the next.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from common.chain import Chain
from common.segments.keys import MAX_LEVEL
from common.segments.segment import SegmentRef
from common.sequences import SequenceRange
from compaction.supersede import outstanding

if TYPE_CHECKING:
    from common.settings.root import LevelSettings


#: Segments that overlap, ascending by coverage.
Block = tuple[SegmentRef, ...]

# By coverage, then by name, which has the digest behind the coverage.
_PLACE = attrgetter("segment.coverage.first", "segment.coverage.last", "segment.digest")


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
    """Plans one chain by one policy. `now`: seconds since 1970 UTC by the store's clock. `waiting`: is told what is
    not due at that time.

    Segments that cannot be read are left out of what is added, as if they did not exist: runs end beside them.
    """

    def __init__(self, policy: LevelSettings, now: float, waiting: Waiting | None = None) -> None:
        self._policy, self._now, self._waiting = policy, now, waiting
        self._group = _Group()

    @property
    def open(self) -> Sequence[SegmentRef]:
        """Segments of the group that is not closed yet: a later window may make an output of them."""
        return self._group.segments

    @property
    def old(self) -> float:
        """What was stored till then has the policy's `min_age`."""
        return self._now - self._policy.min_age

    def add(self, window: Iterable[Block], taken: AbstractSet[str] = frozenset()) -> list[Output]:
        """The outputs that are certain once the blocks of the next window are known, of all levels; ascending.

        `taken`: keys of those that are merged by others.
        """
        outputs, level = [], self._policy.from_
        for block in window:
            if len(block) == 1:  # nearly always: nothing can supersede it, nobody else merges it
                if block[0].level == level:
                    outputs += self._take(SegmentBlock.of(block))
                continue
            for left in blocks(s for s in outstanding(block, level) if s.key not in taken):
                outputs += self._take(SegmentBlock.of(left))
        return outputs

    def end(self) -> list[Output]:
        return self._close(is_full=False)

    def merges(self, waiting: Iterable[SegmentBlock]) -> bool:
        """Whether any of these blocks, ascending, are due. For a planner that is asked nothing else."""
        return any(self._take(block) for block in waiting) or bool(self.end())

    def _take(self, block: SegmentBlock) -> list[Output]:
        outputs: list[Output] = []
        is_young = self._now < block.newest + self._policy.min_age
        if is_young or block.first != self._group.reach + 1:
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
class Waiting:
    """What of one chain waits for a merge by one policy at `now`, and why; a few numbers, however much waits.

    `young`: segments that are younger than `min_age`, or overlap one that is; `old_at`: when the first of them is old
    enough. `small`: the others, in `runs` that are neither large nor old enough; `largest`: stored bytes of the largest
    run; `few`: those of them in runs that hold too few for `max_wait` to count. Times: seconds since 1970 UTC.
    """

    chain: Chain
    policy: LevelSettings
    now: float
    young: int = field(default=0, init=False)
    young_bytes: int = field(default=0, init=False)
    old_at: float = field(default=math.inf, init=False)
    small: int = field(default=0, init=False)
    small_bytes: int = field(default=0, init=False)
    runs: int = field(default=0, init=False)
    largest: int = field(default=0, init=False)
    few: int = field(default=0, init=False)
    _next: _Forecast = field(default_factory=lambda: _Forecast(), init=False)

    @property
    def segments(self) -> int:
        return self.young + self.small

    @property
    def size(self) -> int:
        return self.young_bytes + self.small_bytes

    def add_young(self, block: SegmentBlock) -> None:
        self.young += len(block.segments)
        self.young_bytes += block.size
        self.old_at = min(self.old_at, block.newest + self.policy.min_age)
        self._next.add(block, self.policy)

    def add_small(self, group: _Group) -> None:
        self.small += len(group.segments)
        self.small_bytes += group.size
        self.runs += 1
        self.largest = max(self.largest, group.size)
        self.few += len(group.segments) if group.due_at(self.policy, is_full=False) == math.inf else 0
        for block in group.blocks:
            self._next.add(block, self.policy)

    def next_merge(self) -> tuple[float, str]:
        """When some of it is merged if nothing else comes, and by which key; `inf` and none where it never is.

        From that moment on, and not before, a planner makes an output of what waits.
        """
        return self._next.end(self.policy)


@dataclass(slots=True)
class _Forecast:
    """From when on blocks that wait would be merged: the planner is asked, at the moments at which they get old enough.

    Once there is an output of some blocks there is always one, later and with more of them: so the moment is found by
    bisection. Of adjacent blocks no more are kept than may be merged before the earliest moment so far.
    """

    at: float = math.inf
    key: str = ""
    _blocks: list[SegmentBlock] = field(default_factory=list)
    _reach: int = 0
    _limit: int = 1000

    def add(self, block: SegmentBlock, policy: LevelSettings) -> None:
        is_late = block.newest + policy.min_age >= self.at
        if is_late or block.first != self._reach + 1:
            self.end(policy)
        self._reach = block.reach
        if is_late:
            return
        self._blocks.append(block)
        if len(self._blocks) >= self._limit:
            kept = self._blocks
            self.end(policy)
            late = [n for n, each in enumerate(kept, 1) if each.newest + policy.min_age >= self.at]
            self._blocks = kept[late[-1] if late else 0 :]
            self._limit = max(1000, 2 * len(self._blocks))

    def end(self, policy: LevelSettings) -> tuple[float, str]:
        """The earliest moment so far, and the key that it is of; nothing that comes later is beside these blocks."""
        found = {_waited_at(each.oldest, policy): "max_wait" for each in self._blocks}
        found |= {each.newest + policy.min_age: "min_age" for each in self._blocks}
        moments = sorted(at for at in found if at < self.at)
        place = bisect_left(moments, True, key=lambda at: Planner(policy, at).merges(self._blocks))
        if place < len(moments):
            self.at, self.key = moments[place], found[moments[place]]
        self._blocks = []
        return self.at, self.key


def unite(late: Iterable[Iterable[SegmentRef]], until: float = math.inf) -> list[Output]:
    """The merges that bring `late`, each some segments of which one lacks rows that the others have, into one segment
    of the next higher level; what overlaps is merged together, and waits while any of it was stored after `until`.

    There is no level above 9: what is late in a segment of level 9 stays as it is.
    """
    by_chain: defaultdict[Chain, dict[str, SegmentRef]] = defaultdict(dict)
    for found in late:
        for segment in found:
            by_chain[segment.chain][segment.key] = segment
    together = [block for _, one in sorted(by_chain.items()) for block in blocks(one.values())]
    old = [block for block in together if max(s.modified for s in block) <= until]
    outputs = [Output(1 + max(s.level for s in block), block) for block in old]
    return [output for output in outputs if output.level <= MAX_LEVEL]


class SegmentBlock(NamedTuple):
    """Segments that overlap, which are merged together or not at all, and what a policy asks of them. `oldest`,
    `newest`: when their objects were stored.
    """

    segments: tuple[SegmentRef, ...]
    first: int
    reach: int
    size: int
    oldest: float
    newest: float

    @classmethod
    def of(cls, segments: tuple[SegmentRef, ...]) -> SegmentBlock:
        if len(segments) == 1:  # nearly always
            [((_, _, coverage, _), _, size, modified)] = segments
            return cls(segments, coverage.first, coverage.last, size, modified, modified)
        times, reach = [s.modified for s in segments], max(s.coverage.last for s in segments)
        return cls(segments, segments[0].coverage.first, reach, sum(s.size for s in segments), min(times), max(times))


@dataclass(slots=True)
class _Group:
    """Adjacent blocks that become one output."""

    blocks: list[SegmentBlock] = field(default_factory=list)
    segments: list[SegmentRef] = field(default_factory=list)
    size: int = 0
    oldest: float = math.inf

    @property
    def reach(self) -> int:
        """Where it ends; 0 where it is empty."""
        return self.blocks[-1].reach if self.blocks else 0

    def add(self, block: SegmentBlock) -> None:
        self.blocks.append(block)
        self.segments += block.segments
        self.size += block.size
        self.oldest = min(self.oldest, block.oldest)

    def has_room(self, block: SegmentBlock, policy: LevelSettings) -> bool:
        fits = self.size + block.size <= policy.max_size
        return fits and len(self.segments) + len(block.segments) <= policy.max_count

    def due_at(self, policy: LevelSettings, *, is_full: bool) -> float:
        """From when on it is merged; `inf`: never, as it is. `is_full`: the next block has no room in it."""
        count = len(self.segments)
        # A single segment is promoted only for its size: rewriting it alone for its count would gain nothing.
        if (count and self.size >= policy.min_size) or (count > 1 and (is_full or count >= policy.max_count)):
            return -math.inf
        return _waited_at(self.oldest, policy) if count >= max(policy.min_count, 2) else math.inf


def _waited_at(oldest: float, policy: LevelSettings) -> float:
    """The first moment at which what was stored at `oldest` is older than `max_wait`."""
    return math.nextafter(oldest + policy.max_wait, math.inf)


def blocks(segments: Iterable[SegmentRef]) -> Iterator[Block]:
    """Overlapping segments together, ascending; no two blocks overlap.

    The segments of one block are merged together or not at all, whatever their size.
    """
    members: list[SegmentRef] = []
    reach = 0
    for segment in sorted(segments, key=_PLACE):
        coverage = segment.coverage
        if members and coverage.first > reach:
            yield tuple(members)
            members = []
        members.append(segment)
        reach = max(reach, coverage.last)
    if members:
        yield tuple(members)


def overlapping(found: Iterable[Block]) -> Iterator[Block]:
    """Of some blocks the segments, of whatever levels, that overlap though nothing supersedes any of them."""
    for block in found:
        staying = (s for level in {s.level for s in block} for s in outstanding(block, level))
        yield from (left for left in blocks(staying) if len(left) > 1)
