"""Where reading goes on: pure, from the coverage that the archive has and what the source still holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.sequences import SequenceRange, holes


@dataclass(frozen=True, slots=True)
class Position:
    """Where to read.

    `first`: the sequence to begin with. `until`: the last one to cover, None where reading goes on without
    end. `lost`: holes below `first` or above it, under existing coverage, that the source no longer holds:
    they were archived once, so nothing may cover them again. `is_end`: nothing lies behind `until`, the chain
    ends there.
    """

    first: int
    until: int | None = None
    lost: tuple[SequenceRange, ...] = ()
    is_end: bool = False

    @property
    def fills_hole(self) -> bool:
        """Whether there is coverage behind `until`."""
        return self.until is not None and not self.is_end


def end_of(coverages: Iterable[SequenceRange]) -> int:
    """The greatest sequence covered; 0 if none is."""
    return max((coverage.last for coverage in coverages), default=0)


def position(first: int, coverages: Iterable[SequenceRange], source_first: int) -> Position:
    """The first sequence from `first` (where the chain begins) that is not covered and can still be covered.

    A hole below existing coverage is read again as far as the source holds it, from `source_first` on; what
    is before that stays a hole.
    """
    ranges = list(coverages)
    end = end_of(ranges)
    if end < first:
        return Position(first)
    gaps = holes(ranges, SequenceRange(first, end))
    lost = tuple(
        SequenceRange(gap.first, min(gap.last, source_first - 1)) for gap in gaps if gap.first < source_first
    )
    held = next((gap for gap in gaps if gap.last >= source_first), None)
    if held is None:
        return Position(end + 1, None, lost)
    return Position(max(held.first, source_first), held.last, lost)
