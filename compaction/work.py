"""The two kinds of work that can be done anywhere, and this process as a place to do it.

Each is a function of a store and one item whose answer is a value, errors included; running it twice, or
twice at once, gives the same objects. `compaction.job` does the same in Spark's executors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from common.errors import FloeError, SegmentCorrupt
from common.segments.store import SegmentStore
from common.service.logs import get_logger
from compaction.compare import prove_by_reading
from compaction.failures import Failure
from compaction.merge import Merged, merge
from compaction.plan import Output
from compaction.supersede import Supersession

log = get_logger("compaction.work")

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")


class Runner(Protocol):
    """Somewhere to work."""

    def map(self, work: Callable[[SegmentStore, I], R], items: Sequence[I]) -> list[R]:
        """What `work` answers for each item, in their order; the first items are begun first."""
        ...


class Prover(Protocol):
    """Proves I5, by other code than wrote the segments."""

    def prove(self, supersessions: Sequence[Supersession]) -> list[Failure | None]:
        """For each of them None where every superseded row was found, else why it was not."""
        ...


class LocalRunner:
    """This process, one item after the other."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store

    def map(self, work: Callable[[SegmentStore, I], R], items: Sequence[I]) -> list[R]:
        results = []
        for number, item in enumerate(items, 1):
            results.append(work(self._store, item))
            log.info("item done", action="item_done", work=work.__name__, item=number, of=len(items))
        return results


class ReadingProver:
    """Reads both sides again and compares them row by row."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def prove(self, supersessions: Sequence[Supersession]) -> list[Failure | None]:
        return self._runner.map(prove_one, supersessions)


def merge_one(store: SegmentStore, output: Output) -> Merged | Failure:
    """Make one output."""
    try:
        merged = merge(store, output)
    except FloeError as error:
        return Failure.of(
            f"merge of {output.coverage} of {output.chain} to level {output.level}", error, output.chain
        )
    log.info("segment merged", action="segment_merged", **output.log_context(), rows=merged.rows)
    return merged


def prove_one(store: SegmentStore, supersession: Supersession) -> Failure | None:
    """Prove one supersession by reading."""
    try:
        prove_by_reading(store, supersession)
    except FloeError as error:
        return unproved(store, supersession, error)
    return None


def unproved(store: SegmentStore, supersession: Supersession, error: FloeError) -> Failure:
    """The failure of a proof, and which of the superseding segments are damaged in the store."""
    first, last = supersession.superseded[0], supersession.superseding[-1]
    count = len(supersession.superseded)
    failure = Failure.of(
        f"proof of {first.chain}: {count} segments by {last.name} of level {last.level}", error, first.chain
    )
    if not isinstance(error, SegmentCorrupt):
        return failure
    damaged = frozenset(s.key for s in supersession.superseding if not store.is_intact(s))
    return replace(failure, damaged=damaged)
