"""What went wrong with one piece of work, as a value: the others go on, and the report names it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.chain import Chain
from common.errors import FloeError, SegmentCorrupt
from common.segments.parquet_guard import Forked, SegmentGone
from common.segments.segment import SegmentRef

# Where several of these occurred, the operator has to see the first in this order.
_EXIT_ORDER = (78, 77, 3, 4, 75)


class UnreadableInput(SegmentCorrupt):
    """A segment that a merge cannot read; `key` names it."""

    def __init__(self, key: str, error: SegmentCorrupt) -> None:
        super().__init__(error.message, hint=error.hint, code=error.code)
        self.key = key


@contextmanager
def naming(segment: SegmentRef) -> Iterator[None]:
    """Turn SegmentCorrupt into UnreadableInput of `segment`."""
    try:
        yield
    except SegmentCorrupt as error:
        raise UnreadableInput(segment.key, error) from error


@dataclass(frozen=True, slots=True)
class Failure:
    """One piece of work that ended with an error. `what`: the piece, for people.

    `damaged`: the keys of segments that were found to be unreadable. `is_stale`: the archive has changed since the
    listing, so a new listing may help. `code`: of its error. `suspects`: the keys of objects that an operator may put
    away. `chain`: the one it is about, if it is about one.
    """

    what: str
    line: str
    exit_code: int
    damaged: frozenset[str] = frozenset()
    is_stale: bool = False
    code: str = ""
    suspects: tuple[str, ...] = ()
    chain: Chain | None = None

    @classmethod
    def of(cls, what: str, error: FloeError, chain: Chain | None = None) -> Failure:
        damaged = (error.key,) if isinstance(error, UnreadableInput) else ()
        suspects = error.keys if isinstance(error, Forked) else damaged
        is_stale = isinstance(error, SegmentGone)
        return cls(what, error.line(), error.exit_code, frozenset(damaged), is_stale, error.code, suspects, chain)


def exit_code(failures: Iterable[Failure]) -> int:
    """0 without failures, else the code of the most pressing one."""
    codes = {failure.exit_code for failure in failures}
    return next((code for code in _EXIT_ORDER if code in codes), 1 if codes else 0)
