"""Failures of single pieces of work, as values: the other pieces continue, and the report names each failure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from common.archive.guard import ForkError, SegmentGone
from common.archive.keys import Layout, digest_of
from common.archive.unread import UnreadableSegment
from common.chain import Chain
from common.errors import DataError, FloeError
from common.objects.port import ObjectStore

# If several of these occurred, the operator must see the first in this order.
_EXIT_ORDER = (78, 77, 3, 4, 75)
RECORD_MAX_BYTES = 64 * 1024  # of one record


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


@contextmanager
def noting(failures: list[Failure], work: str, chain: Chain | None = None) -> Iterator[None]:
    """Add an error of the block to `failures`, and leave the block. `work`, `chain`: of the failure."""
    try:
        yield
    except FloeError as error:
        failures.append(Failure.of(work, error, chain))


def exit_code(failures: Iterable[Failure]) -> int:
    """Return the most urgent exit code of `failures`: 0 if there are none, 1 if all are outside `_EXIT_ORDER`."""
    codes = {failure.exit_code for failure in failures}
    return next((code for code in _EXIT_ORDER if code in codes), 1 if codes else 0)


class KnownFailures:
    """Records of the failures that were reported for the chains of one store."""

    def __init__(self, objects: ObjectStore, layout: Layout) -> None:
        self._objects, self._layout = objects, layout

    def known(self, failures: Iterable[Failure]) -> list[Failure]:
        known = self._listed()
        return [failure for failure in failures if self._key(failure) in known]

    def update(self, chains: Sequence[Chain], failures: Iterable[Failure]) -> None:
        """Record the new ones of `failures`, all present failures of `chains`; remove the records of past ones."""
        known = self._listed()
        found = {key: failure for failure in failures if (key := self._key(failure))}
        for key, failure in found.items():
            if key not in known:
                body = {"what": failure.work, "error": failure.line, "objects": failure.suspects}
                self._objects.put(key, json.dumps(body, sort_keys=True).encode())
        prefixes = tuple(map(self._layout.reported_prefix, chains))
        for key in sorted(known - found.keys()):
            if key.startswith(prefixes) and self._is_over(key):
                self._objects.delete(key)

    def _is_over(self, key: str) -> bool:
        """True if the record at `key` is unreadable, names no object, or names one that no longer exists."""
        raw = self._objects.get(key, length=RECORD_MAX_BYTES) or b""
        try:
            named = json.loads(raw)["objects"]
            return not named or any(self._objects.head(str(each)) is None for each in named)
        except (ValueError, KeyError, TypeError, RecursionError):
            return True

    def _listed(self) -> set[str]:
        return {info.key for info in self._objects.list(self._layout.reported_prefix())}

    def _key(self, failure: Failure) -> str:
        """Return the key of the failure's record; empty for a failure that does not concern the data of one chain."""
        if failure.chain is None or failure.exit_code != DataError.exit_code:
            return ""
        return f"{self._layout.reported_prefix(failure.chain)}{digest_of(failure.line.encode())}.json"
