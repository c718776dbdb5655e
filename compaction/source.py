"""`spark.read.format("floe")`: the archive as a table, each covered sequence once.

    from compaction.source import register
    register(spark)
    spark.read.format("floe").option("config", "central.yaml").option("site", "us-east").load()

One partition of the DataFrame for each stretch of the cover, so a glob's double counting cannot happen.
Filters are pushed down only with option `pushdown`: Spark refuses *every* read of a source that can push
filters unless `spark.sql.python.filterPushdown.enabled` is on.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from common.chain import Chain
from common.errors import DataError, SegmentCorrupt
from common.objects.open import open_objects
from common.objects.port import ObjectStore
from common.segments.columns import SCHEMA
from common.segments.documents import ChainStore
from common.segments.keys import Layout
from common.segments.segment import SegmentRef
from common.segments.store import SegmentGone, SegmentStore
from common.segments.unread import open_stretch
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch, cover, holes
from common.settings.root import Settings
from compaction.source_options import (
    HEADERS_PARSED,
    ReadOptions,
    arranged,
    has_pushdown,
    parse_options,
    segment_columns,
)


def read_stretch(
    store: SegmentStore, stretch: Stretch[SegmentRef], columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of `stretch` in order: `columns` of the segment schema, or all.

    With what others have of what its segment did not read (`common.segments.unread`). Where the segment is
    gone or cannot be read, the rest is read through the cover of what else is there. Raises the segment's own
    error (SegmentGone, SegmentCorrupt) where nothing else accounts for the rows.
    """
    wanted = [name for name in SCHEMA.names if columns is None or name in columns]
    for batch in _Reading(store, stretch).batches([*{"sequence", *wanted}]):
        yield batch.select(wanted)


def read_segment(
    store: SegmentStore, stretch: Stretch[SegmentRef], columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of `stretch` from its own segment and no other. Raises SegmentGone, SegmentCorrupt."""
    with store.open(stretch.segment, rows=stretch.rows) as reader:
        yield from reader.batches(rows=stretch.rows, columns=columns)


class _Reading:
    """One stretch being read. `_avoided`: keys of segments that failed."""

    def __init__(self, store: SegmentStore, stretch: Stretch[SegmentRef]) -> None:
        self._store, self._pending = store, [stretch]
        self._avoided: set[str] = set()

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        while self._pending:
            stretch = self._pending.pop(0)
            position = stretch.rows.first
            try:
                with open_stretch(self._store, stretch, avoided=self._avoided) as reader:
                    for batch in reader.batches(columns=columns):
                        yield batch
                        position = batch.column("sequence")[-1].as_py() + 1
            except (SegmentGone, SegmentCorrupt) as error:
                with suppress(ValueError):  # nothing of the stretch is left to read
                    rest = SequenceRange(position, stretch.rows.last)
                    self._pending[:0] = self._elsewhere(stretch.segment, rest, error)

    def _elsewhere(self, failed: SegmentRef, rows: SequenceRange, error: DataError) -> list[Stretch[SegmentRef]]:
        self._avoided.add(failed.key)
        listed = self._store.list(failed.chain, position=rows.first)
        stretches = cover([s for s in listed if s.key not in self._avoided], rows.first, rows.last)
        if holes([s.rows for s in stretches], rows):
            raise error
        return stretches


_LISTINGS_AT_ONCE = 8


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("floe")` known to the session."""
    spark.dataSource.register(FloeDataSource)


class FloeDataSource(DataSource):
    """Floe's archive. Options: `docs/compaction.md`."""

    @classmethod
    def name(cls) -> str:
        return "floe"

    def read_options(self) -> ReadOptions:
        """What the options ask for."""
        return parse_options(self.options)

    def schema(self) -> StructType:
        return StructType([_spark_field(field) for field in self.read_options().schema()])

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        options = self.read_options()
        return _FilteringReader(options) if has_pushdown(self.options) else _Reader(options)


def source_of(settings: Settings, name: str) -> type[FloeDataSource]:
    """The same source under `name`, its store given in code: no secret travels as a Spark option."""

    class _Given(FloeDataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def read_options(self) -> ReadOptions:
            asked = parse_options({"url": settings.store.url, **self.options})
            return replace(asked, store=settings.store, spool_dir=settings.spool_dir)

    return _Given


@dataclass
class _Part(InputPartition):
    """One stretch, and its number among the partitions of the read."""

    stretch: Stretch[SegmentRef]
    number: int


class _Reader(DataSourceReader):
    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        stretches = self._covers() if self._options.segments is None else self._named()
        return [_Part(stretch, number) for number, stretch in enumerate(stretches)]

    def _named(self) -> list[Stretch[SegmentRef]]:
        objects, store = _open_store(self._options)
        stretches = []
        for key, rows in self._options.segments or ():
            if (name := store.layout.parse_segment(key)) is None:
                raise SegmentCorrupt(f"option segments: expected the key of a segment, found {key!r}")
            if (info := objects.head(key)) is None:
                raise SegmentGone(f"segment {key}: not in the store any more")
            stretches.append(Stretch(SegmentRef(name, key, info.size, info.modified), rows or name.coverage))
        return stretches

    def _covers(self) -> list[Stretch[SegmentRef]]:
        objects, store = _open_store(self._options)
        rows = self._options.rows
        chains = self._options.selected(ChainStore(objects, store.layout))

        def stretches(chain: Chain) -> list[Stretch[SegmentRef]]:
            return cover(store.list(chain, position=rows.first), rows.first, rows.last)

        with ThreadPoolExecutor(_LISTINGS_AT_ONCE) as pool:
            found = pool.map(stretches, chains)
            return [stretch for chain_stretches in found for stretch in chain_stretches]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _Part):
            return  # Spark's way to say that there are no partitions
        schema, stretch = self._options.schema(), partition.stretch
        _objects, store = _open_store(self._options)
        # Segments that are named are wanted as they are: nothing else may stand in for them.
        reading = read_segment if self._options.segments is not None else read_stretch
        for batch in reading(store, stretch, segment_columns(schema)):
            yield arranged(batch, schema, stretch.segment.chain, partition.number)


class _FilteringReader(_Reader):
    """Reads less where filters allow it; Spark applies every filter again."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        first, last = self._options.rows.first, self._options.rows.last
        for condition in filters:
            low, high = _bounds(condition)
            first, last = max(first, low), min(last, high)
        if first > last:  # an empty range has no value of its own, and no segment reaches the very last one
            first = last = MAX_SEQUENCE
        self._options = replace(self._options, rows=SequenceRange(first, last))
        return filters


def _bounds(condition: Filter) -> tuple[int, int]:
    """The least and the greatest sequence that `condition` can be true for."""
    if getattr(condition, "attribute", None) != ("sequence",):
        return 1, MAX_SEQUENCE
    match condition:
        case EqualTo(_, int(value)):
            return value, value
        case In(_, values) if values and all(isinstance(value, int) for value in values):
            return min(values), max(values)
        case GreaterThan(_, int(value)):
            return value + 1, MAX_SEQUENCE
        case GreaterThanOrEqual(_, int(value)):
            return value, MAX_SEQUENCE
        case LessThan(_, int(value)):
            return 1, value - 1
        case LessThanOrEqual(_, int(value)):
            return 1, value
    return 1, MAX_SEQUENCE


def _spark_field(field: Any) -> StructField:
    kind = ArrayType(_HEADER) if field.name == HEADERS_PARSED.name else _SPARK_TYPES[field.type]
    return StructField(field.name, kind, field.nullable)


_HEADER = StructType([StructField("name", StringType()), StructField("value", StringType())])
_SPARK_TYPES: dict[pa.DataType, DataType] = {
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.timestamp("us", tz="UTC"): TimestampType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
}

_stores: dict[str, tuple[ObjectStore, SegmentStore]] = {}


def _open_store(options: ReadOptions) -> tuple[ObjectStore, SegmentStore]:
    """The store, opened once in each process: Spark gives one Python process many small partitions."""
    settings = options.store
    identity = f"{settings.model_dump_json()} {settings.secret_access_key.get_secret_value()} {options.spool_dir}"
    if identity not in _stores:
        objects = open_objects(settings)
        spool_dir = Path(options.spool_dir) if options.spool_dir else None
        _stores[identity] = objects, SegmentStore(objects, Layout(settings.prefix), spool_dir=spool_dir)
    return _stores[identity]
