"""Work in Spark's executors: one row, one partition, one task for each item.

`spark.range(0, n, 1, n)` gives every item a task of its own (`repartition(n)` leaves half of them idle), the
first items first. Executors read and write the store through Floe's own object port, not through Hadoop's.
A task may be retried or doubled: it makes the same object again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from common.open import open_store
from common.segments.store import SegmentStore
from common.service.logs import get_logger
from common.service.version import version
from common.settings.root import Settings
from compaction.spark import DISTRIBUTION_PROBLEM, Spark, spark_error

log = get_logger("compaction.job")

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")
Batches = Iterable[pa.RecordBatch]

RESULT = "id long, result binary"
_RESULT_FIELDS: list[Any] = [pa.field("id", pa.int64()), pa.field("result", pa.binary())]
_RESULT = pa.schema(_RESULT_FIELDS)


class SparkRunner:
    """Spark as a place to work. `settings` travel to the executors, secrets included, and into no log."""

    def __init__(self, spark: Spark, settings: Settings) -> None:
        self._spark, self._settings = spark, settings

    def map(self, work: Callable[[SegmentStore, I], R], items: Sequence[I]) -> list[R]:
        """As `Runner.map`. Raises ConfigError (E-COMMON) for executors with other code, Unavailable."""
        session = self._spark.session()
        task = task_of(pickle.dumps((self._settings, work, list(items))), version())
        try:
            rows = session.range(0, len(items), 1, len(items)).mapInArrow(task, RESULT).collect()
        except Exception as error:  # Spark raises its own, py4j's and the tasks' errors
            raise spark_error(work.__name__, error) from error
        log.info("items done", action="items_done", work=work.__name__, items=len(items))
        # What our own executors answered, over Spark's own connection.
        return [pickle.loads(row.result) for row in sorted(rows, key=lambda row: row.id)]  # noqa: S301


def task_of(payload: bytes, expected: str) -> Callable[[Batches], Iterator[pa.RecordBatch]]:
    """The function that tasks run. It imports nothing of Floe before it knows whose `common` it would get."""
    marker = DISTRIBUTION_PROBLEM

    def task(batches: Batches) -> Iterator[pa.RecordBatch]:
        import importlib
        import os.path

        def root(name: str) -> str:
            return os.path.dirname(os.path.dirname(str(importlib.import_module(name).__file__)))

        try:
            is_one = root("common") == root("compaction")
            found = str(importlib.import_module("common.service.version").version())
        except (ImportError, AttributeError) as error:
            is_one, found = False, str(error)
        if not is_one or found != expected:
            raise RuntimeError(
                f"{marker}: common in executors: expected that of floe-jetstream {expected}, found {found}"
            )
        yield from importlib.import_module("compaction.job").run_items(payload, batches)

    return task


def run_items(payload: bytes, batches: Batches) -> Iterator[pa.RecordBatch]:
    """Do the items whose numbers the batches hold; in an executor."""
    settings, work, items = pickle.loads(payload)  # noqa: S301 - from our own driver
    store = open_store(settings)
    try:
        for batch in batches:
            numbers: list[Any] = batch.column(0).to_pylist()
            for number in numbers:
                yield _answer(number, work(store, items[number]))
    finally:
        store.close()


def _answer(number: int, result: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": [number], "result": [pickle.dumps(result)]}, schema=_RESULT)
