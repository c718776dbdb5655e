"""What Floe promises, by id, and the small predicates by which tests, `verify` and metrics judge it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import pairwise, zip_longest
from typing import Any

from common.segments.segment import Footer, Message
from common.sequences import SequenceRange, Stretch
from tests.support.basics import is_gapless


class Promise(Enum):
    """The promises, each in one line; `docs/architecture.md` has them in full."""

    I1 = "within a chain, messages reach the target in sequence order"
    I2 = "each message of a chain is stored exactly once in an exclusive target, elsewhere at least once"
    I3 = "a hole stops its chain until it is filled or accepted"
    I4 = "nothing is acknowledged, closed or deleted before what replaces it is durable and read back"
    I5 = "no row of a superseded segment is missing from the cover, and none appears twice"
    I6 = "a message comes back as it was, byte for byte"
    I7 = "rows and ledger together account for every sequence of a coverage, and what is gone is named"
    I8 = "sampling is a pure fold over the log: same settings, same messages, same choices"
    I9 = "a second, a paused and a late instance waste work only"

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


def in_order(sequences: Iterable[int]) -> bool:
    """I1, and I2 within one chain: each sequence is greater than the one before, so none is repeated."""
    return all(before < after for before, after in pairwise(sequences))


def repeated(sequences: Iterable[int]) -> list[int]:
    """I2: the sequences that occur more than once, ascending; empty is good."""
    return sorted(sequence for sequence, times in Counter(sequences).items() if times > 1)


def continues(position: int, rows: SequenceRange) -> bool:
    """I3: whether going on with `rows` passes over no sequence from `position` on."""
    return rows.first == position


def accounts_once(stretches: Sequence[Stretch[Any]], within: SequenceRange) -> bool:
    """I5: whether a cover accounts once for each sequence of `within`, by segments that cover it."""
    rows = [stretch.rows for stretch in stretches]
    return (
        bool(rows)
        and (rows[0].first, rows[-1].last) == (within.first, within.last)
        and is_gapless(rows)
        and all(stretch.segment.coverage.encloses(stretch.rows) for stretch in stretches)
    )


def same_rows(expected: Iterable[Message], found: Iterable[Message]) -> bool:
    """I5 and I6: the same messages in the same order, byte for byte, with their sequences and nanoseconds."""
    return first_difference(expected, found) is None


def first_difference(
    expected: Iterable[Message], found: Iterable[Message]
) -> tuple[Message | None, Message | None] | None:
    """The first pair that differs, None standing for a message that is missing; None where all are equal."""
    pairs = zip_longest(expected, found)
    return next(((one, other) for one, other in pairs if one != other), None)


def rows_balance(footer: Footer) -> bool:
    """I7: whether the rows and the ledger of `footer` sum to its coverage."""
    return footer.is_balanced()


def unread_is_named(footer: Footer) -> bool:
    """I7: whether `footer` says where the sequences are that it counts as gone, and inside its coverage."""
    return footer.is_unread_named()
