"""Planning of merges: a pure function of a listing, a policy and the store's time selects the segments that become one.

Per level, on stored bytes: segments that overlap stay together. Runs of adjacent segments, all older than `min_age`,
are cut before they exceed `max_size` or `max_count`. The rest at the end of a run is merged once it reaches `min_size`,
or once it holds `min_count` and its oldest segment is older than `max_wait`, so that a quiet chain is compacted too. An
output never spans a hole. Late segments with rows of their own are merged under any policy: they are united with the
segments that contain them, or overlap them in part (`unite`). A chain is planned window by window
(`common.archive.table`). The cuts between windows make no difference, because a group that is open at the end of one
continues in the next.

Which segments may supersede others is a strict order, so that two jobs can never delete each other's output. A segment
may be superseded only by segments of a higher level, or by one of the same level and coverage with a larger name.
Contained means: the cover of the superseding segments, together, accounts for its whole coverage. A contained segment
is only a candidate: `compaction.compare` reads its rows before a tombstone is written, and `compaction.tombstones`
decides which segments may be deleted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from common.archive.keys import MAX_LEVEL
from common.archive.segment import SegmentRef
from common.chain import Chain
from common.sequences import SequenceRange, Stretch, cover

if TYPE_CHECKING:
    from common.settings.root import LevelSettings

Stretches = tuple[Stretch[SegmentRef], ...]

#: Sort key of segments: by coverage, then by name, which has the digest after the coverage.
by_coverage = attrgetter("segment.coverage.first", "segment.coverage.last", "segment.digest")


@dataclass(frozen=True, slots=True)
class Supersession:
    """Segments, and the stretches that account for them from now on.

    `superseded`: ascending by coverage. `stretches`: the rows of the superseding segments that readers take there,
    ascending. `is_exact`: the superseding segment was made from exactly these, so it holds no other rows.
    """

    superseded: tuple[SegmentRef, ...]
    stretches: Stretches
    is_exact: bool = False

    @property
    def superseding(self) -> tuple[SegmentRef, ...]:
        return tuple({s.segment.key: s.segment for s in self.stretches}.values())

    @property
    def is_disjoint(self) -> bool:
        return all(not b.coverage.overlaps(a.coverage) for a, b in pairwise(self.superseded))

    def parts(self, limit: int) -> list[Supersession]:
        """Return the same, cut into parts of at most `limit` superseded segments; if cut, no part is `is_exact`."""
        if len(self.superseded) <= limit:
            return [self]
        cut = [self.superseded[n : n + limit] for n in range(0, len(self.superseded), limit)]
        return [Supersession(part, self._within(part)) for part in cut]

    def _within(self, part: tuple[SegmentRef, ...]) -> Stretches:
        rows = SequenceRange(min(s.coverage.first for s in part), max(s.coverage.last for s in part))
        common = [(stretch.segment, stretch.rows.intersection(rows)) for stretch in self.stretches]
        return tuple(Stretch(segment, both) for segment, both in common if both)


def may_supersede(upper: SegmentRef, lower: SegmentRef) -> bool:
    """True if `upper` is above `lower` in the strict order."""
    if upper.chain != lower.chain:
        return False
    if upper.level == lower.level:
        return upper.coverage == lower.coverage and upper.name > lower.name
    return upper.level > lower.level


def supersession_of_merge(output: SegmentRef, inputs: Iterable[SegmentRef]) -> Supersession:
    ascending = tuple(sorted(inputs, key=by_coverage))
    return Supersession(ascending, (Stretch(output, output.coverage),), is_exact=True)


def find_supersessions(segments: Sequence[SegmentRef]) -> list[Supersession]:
    """Return the supersessions of one chain's `segments` by others of them, grouped by the superseding segments.

    Leave out segments that a tombstone supersedes already: they supersede nothing.
    """
    groups: defaultdict[object, list[tuple[Stretches, SegmentRef]]] = defaultdict(list)
    for stretches, segment in _contained(segments):
        # All segments that one segment replaces stay together: the usual case, a merge's inputs.
        groups[stretches if len(stretches) > 1 else stretches[0].segment.key].append((stretches, segment))
    found = []
    for group in sorted(groups.values(), key=lambda group: len(group[0][0]) == 1):
        if len(stretches := group[0][0]) == 1:
            rows = [part.rows for (part,), _ in group]
            whole = SequenceRange(min(r.first for r in rows), max(r.last for r in rows))
            stretches = (Stretch(stretches[0].segment, whole),)
        superseded = sorted((segment for _, segment in group), key=by_coverage)
        found.append(Supersession(tuple(superseded), stretches))
    return found


def unsuperseded(segments: Sequence[SegmentRef], level: int) -> list[SegmentRef]:
    """Return the segments of `level` that nothing supersedes yet: those that a merge of the level has to read."""
    above = SegmentCover([s for s in segments if s.level > level])
    largest = _largest_by_coverage(s for s in segments if s.level == level)
    return [s for s in largest.values() if not above.stretches(s.coverage)]


def _contained(segments: Sequence[SegmentRef]) -> Iterator[tuple[Stretches, SegmentRef]]:
    # Top down, so that a segment is replaced by segments that stay, and not by replaced ones.
    staying: list[SegmentRef] = []
    for level in sorted({s.level for s in segments}, reverse=True):
        above, same = SegmentCover(staying), [s for s in segments if s.level == level]
        largest = _largest_by_coverage(same)
        for segment in same:
            twin = largest[segment.coverage]
            if stretches := above.stretches(segment.coverage):
                yield stretches, segment
            elif twin is not segment:
                yield (Stretch(twin, twin.coverage),), segment
            else:
                staying.append(segment)


def _largest_by_coverage(segments: Iterable[SegmentRef]) -> dict[SequenceRange, SegmentRef]:
    found: dict[SequenceRange, SegmentRef] = {}
    for segment in segments:
        twin = found.setdefault(segment.coverage, segment)
        if twin is not segment and twin.name < segment.name:
            found[segment.coverage] = segment
    return found


class SegmentCover:
    """The cover of some segments, computed once for many queries."""

    def __init__(self, segments: Sequence[SegmentRef]) -> None:
        self._stretches = cover(segments, 1)
        self._firsts = [stretch.rows.first for stretch in self._stretches]

    def stretches(self, coverage: SequenceRange) -> Stretches:
        """Return the stretches that account for all of `coverage`, trimmed to it; empty if any of it is a hole."""
        taken: list[Stretch[SegmentRef]] = []
        position = coverage.first
        index = bisect_right(self._firsts, position) - 1
        while 0 <= index < len(self._stretches) and position in self._stretches[index].rows:
            stretch = self._stretches[index]
            rows = SequenceRange(position, min(stretch.rows.last, coverage.last))
            taken.append(Stretch(stretch.segment, rows))
            if rows.last == coverage.last:
                return tuple(taken)
            position, index = rows.last + 1, index + 1
        return ()


#: Segments that overlap, ascending by coverage.
Block = tuple[SegmentRef, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """A segment to make. `inputs`: ascending by coverage, without a hole between them, never empty. `due`: the time
    from which they, or the first of them, were to be merged.
    """

    level: int
    inputs: tuple[SegmentRef, ...]
    due: float = field(default=0.0, compare=False)

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
    """Planner of one chain by one policy. `now`: seconds since 1970 UTC by the store's clock.

    Leave unreadable segments out of the windows, as if they did not exist: runs end next to them.
    """

    def __init__(self, policy: LevelSettings, now: float) -> None:
        self._policy, self._now = policy, now
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
        return self._close()

    def _take(self, block: SegmentBlock) -> list[Output]:
        outputs: list[Output] = []
        is_young = self._now < block.newest + self._policy.min_age
        if is_young or block.first != self._group.last + 1:
            outputs = self.end()
        elif self._group.blocks and not self._group.has_room(block, self._policy):
            outputs = self._close(full_at=block.newest + self._policy.min_age)
        if not is_young:
            self._group.add(block)
        return outputs

    def _close(self, full_at: float = math.inf) -> list[Output]:
        closed, self._group = self._group, _Group()
        due = closed.due(self._policy, full_at)
        return [Output(self._policy.to, tuple(closed.segments), due)] if due <= self._now else []


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
    newest = ((block, max(s.modified for s in block)) for block in together)
    outputs = [Output(1 + max(s.level for s in block), block, stored) for block, stored in newest if stored <= until]
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

    @property
    def last(self) -> int:
        """The last sequence of the group; 0 if it is empty."""
        return self.blocks[-1].last if self.blocks else 0

    def add(self, block: SegmentBlock) -> None:
        self.blocks.append(block)
        self.segments += block.segments
        self.size += block.size

    def has_room(self, block: SegmentBlock, policy: LevelSettings) -> bool:
        fits = self.size + block.size <= policy.max_size
        return fits and len(self.segments) + len(block.segments) <= policy.max_count

    def due(self, policy: LevelSettings, full_at: float) -> float:
        """Return the time from which it is merged, or its first blocks were; inf if it needs more of them. `full_at`:
        the time from which the next block, which does not fit, is old enough.
        """
        count, size, old_at, oldest, due = 0, 0, 0.0, math.inf, math.inf
        for block in self.blocks:
            count, size = count + len(block.segments), size + block.size
            old_at, oldest = max(old_at, block.newest + policy.min_age), min(oldest, block.oldest)
            # A single segment is promoted only for its size: rewriting it alone for its count would gain nothing.
            if size >= policy.min_size or count >= max(policy.max_count, 2):
                return min(due, old_at)
            if count >= max(policy.min_count, 2):
                due = min(due, max(old_at, oldest + policy.max_wait))
        return min(due, full_at) if count > 1 else due


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
