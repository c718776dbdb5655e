"""One Spark session for a whole test run: it takes seconds to start."""

import os
import signal
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType

from common.archive.store import SegmentStore
from common.settings.root import Settings, StoreSettings
from compaction import source
from compaction.source import FloeDataSource
from compaction.source_options import ReadOptions
from compaction.spark import Spark, start_session
from tests.support.basics import PATIENCE
from tests.support.stores import CountingObjects


@cache
def spark_session() -> SparkSession:
    """Return the session, started on first use with the settings that Floe itself starts one with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # py4j and pyspark warn about their own code
        return start_session("local[2]", {})


def finished(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Start a query that ends by itself, and return it then. Spark gives its Python process ten seconds to start,
    whatever else runs on the machine: on exactly this error the query is started again.
    """
    while True:
        query = start()
        try:
            query.awaitTermination()
            return query
        except StreamingQueryException as error:
            if "Python worker failed to connect back" not in str(error):
                raise


class SharedSpark(Spark):
    """A session that a run uses as its own; the run does not stop it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._session = spark_session()

    def __exit__(self, *_: object) -> None:
        pass


def counting_source(counts: Path) -> type[FloeDataSource]:
    """Return the source `floe` as `floe_counted`: it counts the bytes that are read, planning included, in `counts`."""

    class Counted(FloeDataSource):
        @classmethod
        def name(cls) -> str:
            return "floe_counted"

        def read_options(self) -> ReadOptions:
            return replace(super().read_options(), spool_dir=str(counts))  # so that it shares no open store

        def reader(self, schema: StructType) -> DataSourceReader:
            reader = super().reader(schema)
            filters = type(reader).pushFilters is not DataSourceReader.pushFilters
            return (CountedFilteringReader if filters else CountedReader)(reader, counts)

    return Counted


def counted_bytes(counts: Path) -> int:
    """Return the bytes that were read since the last call."""
    files = list(counts.glob("*.count"))
    total = sum(int(path.read_text()) for path in files)
    for path in files:
        path.unlink()
    return total


class CountedReader(DataSourceReader):
    """A reader of a store in a folder that counts the bytes of objects that it reads."""

    _opened: ClassVar[defaultdict[Path, list[CountingObjects]]] = defaultdict(list)

    def __init__(self, reader: DataSourceReader, counts: Path) -> None:
        self._reader, self._counts = reader, counts

    def partitions(self) -> Sequence[InputPartition]:
        with self._counted():
            return self._reader.partitions()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        with self._counted():
            yield from self._reader.read(partition)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        opened, former = self._opened[self._counts], source.open_objects

        def counting(settings: StoreSettings) -> CountingObjects:
            opened.append(CountingObjects(Path(settings.url.removeprefix("file://"))))
            return opened[-1]

        source.open_objects = counting  # type: ignore[assignment]
        before = sum(each.read for each in opened)
        try:
            yield
        finally:
            source.open_objects = former
            (self._counts / f"{uuid.uuid4().hex}.count").write_text(str(sum(each.read for each in opened) - before))


class CountedFilteringReader(CountedReader):
    """A reader that takes filters: Spark checks if there is such a method."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._reader.pushFilters(filters)


# Work for executors, which import it from here.


def wait_for_file(_store: SegmentStore, path: str) -> str:
    """Return at once if `path` is empty, else once that file exists."""
    deadline = time.monotonic() + PATIENCE
    while path and not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: nobody made it")
        time.sleep(0.05)
    return path


def kill_once(_store: SegmentStore, marker: Path) -> str:
    """Kill the first executor that tries this, as by SIGKILL."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return "done"
    os.kill(os.getpid(), signal.SIGKILL)
    return "unreachable"


def failing(_store: SegmentStore, _item: int) -> None:
    """Raise an error that nobody expects."""
    raise RuntimeError("something nobody foresaw")
