"""Ranges of stream sequences, and the one rule that chooses the segments that account for them.

A *sequence* is a JetStream stream sequence, 1 .. 2^63-1. *Coverage* is not rows: a segment that covers
1..1000 may hold 37 messages or none, and everything here is about coverage.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MAX_SEQUENCE = 2**63 - 1


@dataclass(frozen=True, slots=True, order=True)
class SequenceRange:
    """Sequences `first` to `last`, both included. Raises ValueError unless 1 <= first <= last <= 2^63-1."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last <= MAX_SEQUENCE:
            raise ValueError(f"range {self.first}..{self.last}: expected 1 <= first <= last < 2^63")

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, int) and self.first <= sequence <= self.last

    def __str__(self) -> str:
        return f"{self.first}..{self.last}"

    def follows(self, other: SequenceRange) -> bool:
        return self.first == other.last + 1

    def overlaps(self, other: SequenceRange) -> bool:
        return self.first <= other.last and other.first <= self.last

    def encloses(self, other: SequenceRange) -> bool:
        return self.first <= other.first and other.last <= self.last

    def intersection(self, other: SequenceRange) -> SequenceRange | None:
        """Return the sequences that are in both ranges; None if there are none."""
        first, last = max(self.first, other.first), min(self.last, other.last)
        return SequenceRange(first, last) if first <= last else None


class CoverCandidate(Protocol):
    """The properties of a segment that the cover rule needs."""

    @property
    def coverage(self) -> SequenceRange: ...
    @property
    def level(self) -> int: ...
    @property
    def name(self) -> str: ...


S = TypeVar("S", bound=CoverCandidate)


@dataclass(frozen=True, slots=True)
class Stretch(Generic[S]):
    """The rows `rows` of `segment` that a cover takes; never more than the segment covers."""

    segment: S
    rows: SequenceRange


def holes(ranges: Iterable[SequenceRange], within: SequenceRange) -> list[SequenceRange]:
    """Return the parts of `within` that no range accounts for, ascending; empty if all is covered."""
    found, position = [], within.first
    for current in sorted(ranges):
        if current.first > within.last:
            break
        if current.first > position:
            found.append(SequenceRange(position, current.first - 1))
        position = max(position, current.last + 1)
    if position <= within.last:
        found.append(SequenceRange(position, within.last))
    return found


class CoverageSet:
    """The sequences that the added ranges account for. Its size grows with the number of holes, not of ranges."""

    def __init__(self) -> None:
        self._firsts: list[int] = []  # of stretches without a hole, ascending
        self._lasts: list[int] = []

    @property
    def end(self) -> int:
        """The greatest sequence; 0 if there is none."""
        return self._lasts[-1] if self._lasts else 0

    def __contains__(self, sequence: object) -> bool:
        if not isinstance(sequence, int):
            return False
        index = bisect_right(self._firsts, sequence) - 1
        return index >= 0 and sequence <= self._lasts[index]

    def add(self, coverage: SequenceRange) -> None:
        first, last = coverage.first, coverage.last
        begin = bisect_left(self._lasts, first - 1)  # the first stretch that it touches
        behind = bisect_right(self._firsts, last + 1)
        if begin < behind:
            first, last = min(first, self._firsts[begin]), max(last, self._lasts[behind - 1])
        self._firsts[begin:behind] = [first]
        self._lasts[begin:behind] = [last]

    def stretches(self) -> list[SequenceRange]:
        return [*map(SequenceRange, self._firsts, self._lasts)]

    def holes(self, within: SequenceRange) -> list[SequenceRange]:
        return holes(self.stretches(), within)


def preference(segment: CoverCandidate) -> tuple[int, int, str]:
    """Sort key of segments that contain one position: furthest end, then higher level, then larger name."""
    return (segment.coverage.last, segment.level, segment.name)


def choose_segment(segments: Iterable[S], position: int) -> S | None:
    """Return the segment that the cover rule takes at `position`; None if none contains it (a hole)."""
    return max((s for s in segments if position in s.coverage), key=preference, default=None)


def cover(segments: Iterable[S], first: int, last: int = MAX_SEQUENCE) -> list[Stretch[S]]:
    """Return the stretches that account once for each covered sequence of first..last, ascending.

    At each position: among the segments that contain it, the one that reaches furthest; ties go to the higher
    level, then to the larger name; rows before the position are skipped. A hole is skipped: the next
    stretch then does not begin at the end of the one before (`holes` names it, `until_hole` stops there).
    """
    return list(_sweep(segments, first, last))


def leading_stretches(segments: Iterable[S], first: int, last: int = MAX_SEQUENCE) -> list[Stretch[S]]:
    """Return the stretches of the cover from `first` to its first hole; nothing behind the hole is computed."""
    return until_hole(_sweep(segments, first, last), first)


def _sweep(segments: Iterable[S], first: int, last: int) -> Iterator[Stretch[S]]:
    ascending = sorted(segments, key=lambda s: s.coverage.first)
    reach: list[tuple[_Descending, int]] = []
    position, index = first, 0
    while position <= last:
        while index < len(ascending) and ascending[index].coverage.first <= position:
            heapq.heappush(reach, (_Descending(preference(ascending[index])), index))
            index += 1
        while reach and ascending[reach[0][1]].coverage.last < position:
            heapq.heappop(reach)
        if reach:
            segment = ascending[reach[0][1]]
            rows = SequenceRange(position, min(segment.coverage.last, last))
            yield Stretch(segment, rows)
            position = rows.last + 1
        elif index < len(ascending):
            position = ascending[index].coverage.first
        else:
            return


@dataclass(frozen=True, slots=True)
class _Descending:
    key: tuple[int, int, str]

    def __lt__(self, other: _Descending) -> bool:
        return self.key > other.key


def until_hole(stretches: Iterable[Stretch[S]], position: int) -> list[Stretch[S]]:
    """Return the leading stretches that continue from `position` without a hole; empty if it begins with one."""
    taken: list[Stretch[S]] = []
    for stretch in stretches:
        if stretch.rows.first != position:
            break
        taken.append(stretch)
        position = stretch.rows.last + 1
    return taken
