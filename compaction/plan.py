"""Which segments become one: a pure function of a listing, a policy and the store's time.

Per level, on stored bytes: segments that overlap stay together; runs of adjacent segments, all older than
`min_age`, are cut before they pass `max_size` or `max_count`; what is left at a run's end is merged when it
reaches `min_size`, or holds `min_count` and its oldest is older than `max_wait`, so that a quiet chain is
compacted too. An output never spans a hole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from common.chain import Chain
from common.segments.segment import SegmentRef
from common.sequences import SequenceRange
from compaction.supersede import outstanding


class Policy(Protocol):
    """What is merged from level `from_` to level `to`. Ages: seconds by the store's clock; sizes: stored."""

    @property
    def from_(self) -> int: ...
    @property
    def to(self) -> int: ...
    @property
    def min_age(self) -> float: ...
    @property
    def max_wait(self) -> float: ...
    @property
    def min_count(self) -> int: ...
    @property
    def max_count(self) -> int: ...
    @property
    def min_size(self) -> int: ...
    @property
    def max_size(self) -> int: ...


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

    @property
    def is_disjoint(self) -> bool:
        """Whether no two inputs overlap."""
        return len(self.coverage) == sum(len(s.coverage) for s in self.inputs)

    def log_context(self) -> dict[str, object]:
        return {
            **self.chain.log_context(),
            "level": self.level,
            "first": self.coverage.first,
            "last": self.coverage.last,
            "inputs": len(self.inputs),
            "bytes": self.size,
        }


def plan(
    segments: Sequence[SegmentRef], policy: Policy, now: float, *, damaged: AbstractSet[str] = frozenset()
) -> list[Output]:
    """The outputs that are due among one chain's `segments` (all levels), ascending; empty if none is.

    `now`: seconds since 1970 UTC by the store's clock. `damaged`: keys of segments that cannot be read; they
    are left out as if they were not there, and the runs end beside them.
    """
    sound = [s for s in segments if s.key not in damaged]
    ready = [b for b in _blocks(outstanding(sound, policy.from_)) if now - b.newest >= policy.min_age]
    outputs = []
    for run in _runs(ready):
        *closed, last = _cut(run, policy)
        due = [g for g in closed if g.count > 1 or g.reaches_minimum(policy)]
        if last.reaches_minimum(policy) or last.has_waited(policy, now):
            due.append(last)
        outputs += [Output(policy.to, tuple(group.segments)) for group in due]
    return outputs


@dataclass(frozen=True, slots=True)
class _Block:
    """Segments connected by overlaps: they are merged together or not at all, whatever their size."""

    segments: tuple[SegmentRef, ...]
    coverage: SequenceRange

    @property
    def size(self) -> int:
        return sum(s.size for s in self.segments)

    @property
    def newest(self) -> float:
        return max(s.modified for s in self.segments)


@dataclass(slots=True)
class _Group:
    """Adjacent blocks that become one output."""

    segments: list[SegmentRef] = field(default_factory=list)
    size: int = 0

    @property
    def count(self) -> int:
        return len(self.segments)

    def add(self, block: _Block) -> None:
        self.segments += block.segments
        self.size += block.size

    def has_room(self, block: _Block, policy: Policy) -> bool:
        fits = self.size + block.size <= policy.max_size
        return fits and self.count + len(block.segments) <= policy.max_count

    def reaches_minimum(self, policy: Policy) -> bool:
        # A single segment is promoted only for its size: rewriting it alone for its count would gain nothing.
        return self.size >= policy.min_size or 1 < self.count >= policy.max_count

    def has_waited(self, policy: Policy, now: float) -> bool:
        enough = self.count >= max(policy.min_count, 2)
        return enough and now - min(s.modified for s in self.segments) > policy.max_wait


def _blocks(segments: Iterable[SegmentRef]) -> Iterator[_Block]:
    """The overlapping segments together, ascending; no two blocks overlap."""
    members: list[SegmentRef] = []
    coverage: SequenceRange | None = None
    for segment in sorted(segments, key=lambda s: (s.coverage, s.name)):
        if coverage is not None and segment.coverage.overlaps(coverage):
            members.append(segment)
            coverage = SequenceRange(coverage.first, max(coverage.last, segment.coverage.last))
            continue
        if coverage is not None:
            yield _Block(tuple(members), coverage)
        members, coverage = [segment], segment.coverage
    if coverage is not None:
        yield _Block(tuple(members), coverage)


def _runs(blocks: Iterable[_Block]) -> list[list[_Block]]:
    """The blocks cut wherever one does not begin exactly where the one before ends."""
    runs: list[list[_Block]] = []
    for block in blocks:
        if runs and block.coverage.follows(runs[-1][-1].coverage):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _cut(run: list[_Block], policy: Policy) -> list[_Group]:
    """One run as groups, each closed before it would pass a maximum; the last is still open."""
    groups = [_Group()]
    for block in run:
        if groups[-1].segments and not groups[-1].has_room(block, policy):
            groups.append(_Group())
        groups[-1].add(block)
    return groups
