"""Small predicates by which tests and scenarios judge Floe's promises; ids as in `docs/promises.md`."""

from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from common.archive.segment import Message
from common.sequences import SequenceRange, Stretch
from tests.support.basics import is_gapless


def in_order(sequences: Iterable[int]) -> bool:
    """I1, and I2 within one chain: each sequence is greater than the one before, so none is repeated."""
    return all(before < after for before, after in pairwise(sequences))


def accounts_once(stretches: Sequence[Stretch[Any]], within: SequenceRange) -> bool:
    """I5: true if a cover accounts once for each sequence of `within`, by segments that cover it."""
    rows = [stretch.rows for stretch in stretches]
    return (
        bool(rows)
        and (rows[0].first, rows[-1].last) == (within.first, within.last)
        and is_gapless(rows)
        and all(stretch.segment.coverage.encloses(stretch.rows) for stretch in stretches)
    )


def first_difference(
    expected: Iterable[Message], found: Iterable[Message]
) -> tuple[Message | None, Message | None] | None:
    """Return the first pair that differs, with None for a missing message; None if all are equal."""
    return next(((one, other) for one, other in zip_longest(expected, found) if one != other), None)
