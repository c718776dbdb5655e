"""Where reading goes on: pure, from what is known of the archive and what the source still holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.sequences import SequenceRange


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


def position(first: int, end: int, gaps: Iterable[SequenceRange], source_first: int) -> Position:
    """The first sequence from `first` (where the chain begins) that is not covered and can still be covered.

    `end`: where coverage ends, 0 where there is none. `gaps`: the holes below it that are known, ascending.
    A hole is read again as far as the source holds it, from `source_first` on; what is before stays a hole.
    """
    if end < first:
        return Position(first)
    within = [each for gap in gaps if (each := gap.intersection(SequenceRange(first, end)))]
    lost = tuple(
        SequenceRange(gap.first, min(gap.last, source_first - 1))
        for gap in within
        if gap.first < source_first
    )
    held = next((gap for gap in within if gap.last >= source_first), None)
    if held is None:
        return Position(end + 1, None, lost)
    return Position(max(held.first, source_first), held.last, lost)
