"""Whether two filters can take the same subject: then two partitions would archive a message twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, zip_longest


def overlaps(one: str, other: str) -> bool:
    """Whether some subject matches both filters, by the rules of NATS; the empty filter takes all."""
    if not one or not other:
        return True
    for left, right in zip_longest(one.split("."), other.split(".")):
        if left is None or right is None:
            return False  # the shorter one takes no subject of that many tokens
        if ">" in (left, right):
            return True  # it takes whatever is left of the other, one token at least
        if left != right and "*" not in (left, right):
            return False
    return True


def first_overlap(filters: Sequence[str]) -> tuple[str, str] | None:
    """The first two of `filters` that overlap; None if no two do."""
    return next((pair for pair in combinations(filters, 2) if overlaps(*pair)), None)


def first_repeated(filters: Sequence[str]) -> str | None:
    """The first of `filters` that stands in it once more; None if none does."""
    return next((each for place, each in enumerate(filters) if each in filters[:place]), None)
