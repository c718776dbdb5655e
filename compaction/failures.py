"""Failures of single pieces of work, as values: the other pieces continue, and the report names each failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.archive.guard import ForkError, SegmentGone
from common.archive.unread import UnreadableSegment
from common.chain import Chain
from common.errors import FloeError

# If several of these occurred, the operator must see the first in this order.
_EXIT_ORDER = (78, 77, 3, 4, 75)


@dataclass(frozen=True, slots=True)
class Failure:
    """One piece of work that ended with an error. `work`: a description of the piece, for people.

    `damaged`: keys of segments that are unreadable. `is_stale`: the archive has changed since the listing, so a new
    listing may help. `code`: the error code. `suspects`: keys of objects that an operator may quarantine. `chain`: the
    chain that the failure concerns; None if it concerns no single chain.
    """

    work: str
    line: str
    exit_code: int
    damaged: frozenset[str] = frozenset()
    is_stale: bool = False
    code: str = ""
    suspects: tuple[str, ...] = ()
    chain: Chain | None = None

    @classmethod
    def of(cls, work: str, error: FloeError | UnreadableSegment, chain: Chain | None = None) -> Failure:
        damaged: tuple[str, ...] = ()
        if isinstance(error, UnreadableSegment):
            damaged, error = () if error.is_gone else (error.segment.key,), error.error
        suspects = error.keys if isinstance(error, ForkError) else damaged
        is_stale = isinstance(error, SegmentGone)
        return cls(work, error.as_text(), error.exit_code, frozenset(damaged), is_stale, error.code, suspects, chain)


def exit_code(failures: Iterable[Failure]) -> int:
    """Return the most urgent exit code of `failures`: 0 if there are none, 1 if all are outside `_EXIT_ORDER`."""
    codes = {failure.exit_code for failure in failures}
    return next((code for code in _EXIT_ORDER if code in codes), 1 if codes else 0)
