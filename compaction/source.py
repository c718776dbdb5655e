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
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession, datasource, types
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition

from common.chain import Chain
from common.errors import SegmentCorrupt
from common.objects.open import open_objects
from common.segments.columns import SCHEMA
from common.segments.documents import ChainStore
from common.segments.keys import Layout
from common.segments.segment import SegmentRef
from common.segments.store import SegmentGone, SegmentStore
from common.segments.unread import open_stretch
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch, cover, holes
from common.settings.root import Settings
from compaction.source_options import HEADERS_PARSED, ReadOptions, arranged, parse_options


def read_stretch(
    store: SegmentStore, stretch: Stretch[SegmentRef], columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of `stretch` in order: `columns` of the segment schema, or all.

    Includes what others have of what its segment did not read (`common.segments.unread`). Where the segment is gone
    or cannot be read, the rest is read through the cover of the remaining segments. Raises the segment's own error
    (SegmentGone, SegmentCorrupt) where nothing else accounts for the rows.
    """
    wanted = [name for name in SCHEMA.names if columns is None or name in columns]
    pending, avoided = [stretch], set[str]()
    while pending:
        now = pending.pop(0)
        position, last = now.rows.first, now.rows.last
        try:
            with open_stretch(store, now, avoided=avoided) as reader:
                for batch in reader.batches(columns=[*{"sequence", *wanted}]):
                    yield batch.select(wanted)
                    position = batch.column("sequence")[-1].as_py() + 1
        except (SegmentGone, SegmentCorrupt):
            if position > last:
                continue  # nothing of the stretch is left to read
            avoided.add(now.segment.key)
            listed = store.list(now.segment.chain, position=position)
            others = cover([s for s in listed if s.key not in avoided], position, last)
            if missing := holes([s.rows for s in others], SequenceRange(position, last)):
                floor = ChainStore(store.objects, store.layout).floor(now.segment.chain)
                if floor is not None and missing[0].first < floor.first:
                    raise SegmentGone(f"{now.segment.chain}: {floor}; load() again", code="E-FLOOR") from None
                raise
            pending[:0] = others


def read_segment(
    store: SegmentStore, stretch: Stretch[SegmentRef], columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of `stretch` from its own segment only. Raises SegmentGone, SegmentCorrupt."""
    with store.open(stretch.segment, rows=stretch.rows) as reader:
        yield from reader.batches(rows=stretch.rows, columns=columns)


_LISTINGS_AT_ONCE = 8


def register(spark: SparkSession) -> None:
    spark.dataSource.register(FloeDataSource)


class FloeDataSource(DataSource):
    """Floe's archive. Options: `docs/compaction.md`."""

    @classmethod
    def name(cls) -> str:
        return "floe"

    def read_options(self) -> ReadOptions:
        return parse_options(self.options)

    def schema(self) -> types.StructType:
        fields = self.read_options().schema()
        return types.StructType([types.StructField(f.name, _SPARK_TYPES[f.type], f.nullable) for f in fields])

    def reader(self, schema: types.StructType) -> DataSourceReader:  # noqa: ARG002
        options = self.read_options()
        return _FilteringReader(options) if options.pushdown else _Reader(options)


def source_of(settings: Settings, name: str) -> type[FloeDataSource]:
    """The same source under `name`, its store given in code: no secret is passed as a Spark option."""

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
        store, stretches = _open_store(self._options), []
        for key, rows in self._options.segments or ():
            if (name := store.layout.parse_segment(key)) is None:
                raise SegmentCorrupt(f"option segments: expected the key of a segment, found {key!r}")
            if (info := store.objects.head(key)) is None:
                raise SegmentGone(f"segment {key}: not in the store any more")
            stretches.append(Stretch(SegmentRef(name, key, info.size, info.modified), rows or name.coverage))
        return stretches

    def _covers(self) -> list[Stretch[SegmentRef]]:
        store, rows = _open_store(self._options), self._options.rows
        chains = self._options.selected(ChainStore(store.objects, store.layout))

        def stretches(chain: Chain) -> list[Stretch[SegmentRef]]:
            return cover(store.list(chain, position=rows.first), rows.first, rows.last)

        with ThreadPoolExecutor(_LISTINGS_AT_ONCE) as pool:
            return [stretch for found in pool.map(stretches, chains) for stretch in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _Part):
            return  # Spark's way to say that there are no partitions
        schema, stretch = self._options.schema(), partition.stretch
        wanted = {*schema.names, *(["headers"] if HEADERS_PARSED.name in schema.names else [])}
        columns = [name for name in SCHEMA.names if name in wanted]
        # Named segments are wanted as they are: no other segment may replace them.
        reading = read_segment if self._options.segments is not None else read_stretch
        for batch in reading(_open_store(self._options), stretch, columns):
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
    if getattr(condition, "attribute", None) != ("sequence",):
        return 1, MAX_SEQUENCE
    match condition:
        case datasource.EqualTo(_, int(value)):
            return value, value
        case datasource.In(_, values) if values and all(isinstance(value, int) for value in values):
            return min(values), max(values)
        case datasource.GreaterThan(_, int(value)):
            return value + 1, MAX_SEQUENCE
        case datasource.GreaterThanOrEqual(_, int(value)):
            return value, MAX_SEQUENCE
        case datasource.LessThan(_, int(value)):
            return 1, value - 1
        case datasource.LessThanOrEqual(_, int(value)):
            return 1, value
    return 1, MAX_SEQUENCE


_HEADER = types.StructType([types.StructField(name, types.StringType()) for name in ("name", "value")])
_SPARK_TYPES: dict[pa.DataType, types.DataType] = {
    pa.int32(): types.IntegerType(),
    pa.int64(): types.LongType(),
    pa.timestamp("us", tz="UTC"): types.TimestampType(),
    pa.string(): types.StringType(),
    pa.binary(): types.BinaryType(),
    HEADERS_PARSED.type: types.ArrayType(_HEADER),
}

_stores: dict[str, SegmentStore] = {}


def _open_store(options: ReadOptions) -> SegmentStore:
    """Opened once in each process: Spark gives one Python process many small partitions."""
    settings = options.store
    identity = f"{settings.model_dump_json()} {settings.secret_access_key.get_secret_value()} {options.spool_dir}"
    if identity not in _stores:
        spool_dir = Path(options.spool_dir) if options.spool_dir else None
        _stores[identity] = SegmentStore(open_objects(settings), Layout(settings.prefix), spool_dir=spool_dir)
    return _stores[identity]
