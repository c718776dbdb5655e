"""Failures of single pieces of work, as values: the other pieces continue, and the report names each failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.archive.guard import ForkError, SegmentGone
from common.archive.segment import SegmentRef
from common.chain import Chain
from common.errors import FloeError, SegmentCorrupt

# If several of these occurred, the operator must see the first in this order.
_EXIT_ORDER = (78, 77, 3, 4, 75)


class UnreadableInput(SegmentCorrupt):
    """Error of a segment that a merge cannot read; `key`: that of the segment."""

    def __init__(self, key: str, error: SegmentCorrupt) -> None:
        super().__init__(error.message, hint=error.hint, code=error.code)
        self.key = key


@contextmanager
def as_unreadable_input(segment: SegmentRef) -> Iterator[None]:
    """Convert SegmentCorrupt in the block into UnreadableInput of `segment`."""
    try:
        yield
    except SegmentCorrupt as error:
        raise UnreadableInput(segment.key, error) from error


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
    def of(cls, work: str, error: FloeError, chain: Chain | None = None) -> Failure:
        damaged = (error.key,) if isinstance(error, UnreadableInput) else ()
        suspects = error.keys if isinstance(error, ForkError) else damaged
        is_stale = isinstance(error, SegmentGone)
        return cls(work, error.as_text(), error.exit_code, frozenset(damaged), is_stale, error.code, suspects, chain)


def exit_code(failures: Iterable[Failure]) -> int:
    """Return the most urgent exit code of `failures`: 0 if there are none, 1 if all are outside `_EXIT_ORDER`."""
    codes = {failure.exit_code for failure in failures}
    return next((code for code in _EXIT_ORDER if code in codes), 1 if codes else 0)
