"""Rules by which segments may supersede others: a strict order, so that two jobs can never delete each other's output.

A segment may be superseded only by segments of a higher level, or by one of the same level and coverage with a larger
name. Contained means: the cover of the superseding segments, together, accounts for its whole coverage. A contained
segment is only a candidate: `compaction.compare` reads its rows before a tombstone is written, and
`compaction.tombstones` decides which segments may be deleted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from common.archive.segment import SegmentRef
from common.sequences import SequenceRange, Stretch, cover

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
