"""Spark data source `floe`: the archive as a table, each covered sequence once (`read`), or as a stream (`readStream`).

    spark.read.format("floe").option("config", "central.yaml").option("site", "us-east").load()

Spark finds the source by itself (`pyspark_floe.py`). One partition of the DataFrame for each stretch of the cover, so
that no row counts twice, as it would with a glob. Ranges of time exclude segments by their footers and row groups by
their statistics, as ranges of sequences do by names.

Filters are pushed down only with option `pushdown`: Spark refuses *every* read of a source that can push filters unless
`spark.sql.python.filterPushdown.enabled` is on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession, datasource, types
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from common.archive.columns import SCHEMA
from common.archive.documents import ChainStore
from common.archive.keys import Layout
from common.archive.reader import RowFilter
from common.archive.scan import EVERY_ROW, ChainArchive, Hole, Problem, Scan, with_current_listing
from common.archive.segment import SegmentRef
from common.archive.store import ONE_FETCH_BYTES, SegmentGone, SegmentStore
from common.archive.times import Timeline
from common.chain import Chain
from common.clock import SystemClock
from common.objects.open import open_objects
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch
from common.settings.root import StoreSettings
from common.settings.types import is_subject
from compaction.source_options import HEADERS_PARSED, ReadOptions, arrange_columns, parse_options
from compaction.stream import ArchiveStream, Positions, map_in_threads


def read_stretch(
    store: SegmentStore,
    stretch: Stretch[SegmentRef],
    columns: Sequence[str] = SCHEMA.names,
    row_filter: RowFilter = EVERY_ROW,
    *,
    is_fixed: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `stretch` that match `row_filter`, in order, with `columns` of the schema. No batch is empty.

    Includes the rows that others have of the segment's unread sequences (`common.archive.unread`). If the segment is
    gone or cannot be read, the rest is read through the cover of the remaining segments. Raises the segment's own error
    (SegmentGone, SegmentCorrupt) if nothing else accounts for the rows. `is_fixed`: no other segment counts.
    """
    chain = stretch.segment.chain

    def refuse(problem: Problem) -> None:
        if not isinstance(problem, Hole):
            return  # others may cover its rows
        floor = None if is_fixed else ChainStore(store.objects, store.layout).floor(chain)
        if floor is not None and problem.rows.first < floor.first:
            raise SegmentGone(f"{chain}: {floor}; load() again", code="E-FLOOR") from None
        raise problem.causes[-1] if problem.causes else SegmentGone(f"{chain}: {problem}")

    refs = (stretch.segment,)
    archive = ChainArchive(store, chain, refs, is_fixed=True) if is_fixed else ChainArchive.planned(store, stretch)
    for batch in Scan(archive, stretch.rows, refuse, columns=columns, row_filter=row_filter).batches():
        yield batch.select(columns)


def register(spark: SparkSession) -> None:
    """Register the source in a session that did not find it by itself: its Python does not have `pyspark_floe`."""
    try:
        spark.dataSource.register(FloeDataSource)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


class FloeDataSource(DataSource):
    """Data source of Floe's archive. Options: `docs/guides/query.md`."""

    @classmethod
    def name(cls) -> str:
        return "floe"

    def read_options(self) -> ReadOptions:
        return parse_options(self.options, SystemClock().now())

    def schema(self) -> types.StructType:
        return _spark_schema(self.read_options().schema())

    def reader(self, schema: types.StructType) -> DataSourceReader:  # noqa: ARG002
        options = self.read_options()
        options.check_allowed(streams=False)
        return _FilteringReader(options) if options.pushdown else _Reader(options)

    def streamReader(self, schema: types.StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        options = self.read_options()
        options.check_allowed(streams=True)
        return _StreamReader(options)


def _spark_schema(schema: pa.Schema) -> types.StructType:
    return types.StructType([types.StructField(f.name, _SPARK_TYPES[f.type], f.nullable) for f in schema])


@dataclass
class _Partition(InputPartition):
    """One stretch. `is_at_edge`: at an edge of the range of time."""

    stretch: Stretch[SegmentRef]
    is_at_edge: bool = False


class _Reader(DataSourceReader):
    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        store = _open_store(self._options.store, self._options.spool_dir)
        chains = self._options.selected(ChainStore(store.objects, store.layout))
        planned = map_in_threads(lambda chain: _plan_chain(store, chain, self._options), chains)
        return [partition for partitions in planned for partition in partitions]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read_partition(self._options, partition)


def _plan_chain(store: SegmentStore, chain: Chain, options: ReadOptions) -> list[_Partition]:
    rows, begin, end = options.rows, options.row_filter.begin, options.row_filter.end

    def plan(refs: list[SegmentRef]) -> list[_Partition]:
        timeline = Timeline(store, refs, rows.first)
        stretches = timeline.between(begin, end, rows.last, options.margin_ns)
        return [_Partition(each, timeline.is_at_edge(each.segment, begin, end)) for each in stretches]

    return with_current_listing(store, chain, plan, rows.first, options.level)


def _read_partition(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, _Partition):
        return  # Spark passes another object if there are no partitions
    schema, stretch, store = options.schema(), partition.stretch, _open_store(options.store, options.spool_dir)
    wanted = {*schema.names, *(["headers"] if HEADERS_PARSED.name in schema.names else [])}
    columns = [name for name in SCHEMA.names if name in wanted]
    is_large, is_whole = stretch.segment.size > ONE_FETCH_BYTES, stretch.rows.encloses(stretch.segment.coverage)
    is_little = not is_whole or "payload" not in columns or bool(options.row_filter.subjects)
    if partition.is_at_edge or (is_large and is_little):
        store = store.with_partial_reads(always=True)
    # A segment of a single level is read as it is: no other may replace it.
    for batch in read_stretch(store, stretch, columns, options.row_filter, is_fixed=options.level is not None):
        yield arrange_columns(batch, schema, stretch.segment.chain.log_context())


class _FilteringReader(_Reader):
    """Reader that reads less if filters allow it; Spark applies every filter again."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        first, last = self._options.rows.first, self._options.rows.last
        wanted = self._options.row_filter
        for condition in filters:
            match getattr(condition, "attribute", None):
                case ("sequence",):
                    low, high = _bounds(condition)
                    first, last = max(first, low), min(last, high)
                case ("timestamp_ns",):
                    wanted = _with_times(wanted, *_bounds(condition), 1)
                case ("timestamp",):
                    wanted = _with_times(wanted, *_bounds(condition), 1_000)
                case ("subject",):
                    wanted = _with_subject(wanted, condition)
        if first > last:  # a range cannot be empty, and no segment reaches the very last sequence
            first = last = MAX_SEQUENCE
        self._options = replace(self._options, rows=SequenceRange(first, last), row_filter=wanted)
        return filters


def _bounds(condition: Filter) -> tuple[int, int]:
    """Return the least and the greatest value that the filter may let through, a time as microseconds since 1970."""
    if not isinstance(given := getattr(condition, "value", None), tuple | list):
        given = [given]
    values = [number for each in given if (number := _number(each)) is not None]
    if values and len(values) == len(given):
        match condition:
            case datasource.EqualTo() | datasource.In():
                return min(values), max(values)
            case datasource.GreaterThan():
                return values[0] + 1, MAX_SEQUENCE
            case datasource.GreaterThanOrEqual():
                return values[0], MAX_SEQUENCE
            case datasource.LessThan():
                return _MIN_VALUE, values[0] - 1
            case datasource.LessThanOrEqual():
                return _MIN_VALUE, values[0]
    return _MIN_VALUE, MAX_SEQUENCE


_MIN_VALUE = -MAX_SEQUENCE
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _number(value: object) -> int | None:
    if isinstance(value, datetime):
        return (value - _EPOCH) // timedelta(microseconds=1) if value.tzinfo else None
    return value if isinstance(value, int) else None


def _with_times(wanted: RowFilter, low: int, high: int, unit: int) -> RowFilter:
    """Return `wanted` within times `low` to `high`, in `unit` nanoseconds; the extremes of their range set no limit."""
    if low > _MIN_VALUE:
        begin = max(_MIN_VALUE, min(low * unit, MAX_SEQUENCE))
        wanted = replace(wanted, begin=begin if wanted.begin is None else max(begin, wanted.begin))
    if high < MAX_SEQUENCE:
        end = max(_MIN_VALUE, min((high + 1) * unit, MAX_SEQUENCE))
        wanted = replace(wanted, end=end if wanted.end is None else min(end, wanted.end))
    return wanted


def _with_subject(wanted: RowFilter, condition: Filter) -> RowFilter:
    match condition:
        # A backslash may represent a byte that is not text.
        case datasource.EqualTo(_, str(subject)) if is_subject(subject) and "\\" not in subject and not wanted.subjects:
            return replace(wanted, subjects=(subject,))
    return wanted


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a stream. Spark requests positions from it on the driver; executors call `read`, in a copy."""

    def __init__(self, options: ReadOptions) -> None:
        self._given = options
        self._archive: ArchiveStream | None = None
        # It begins at a position; from there on every row counts, of any time.
        self._options = replace(
            options, rows=SequenceRange(1, MAX_SEQUENCE), row_filter=replace(options.row_filter, begin=None)
        )

    @property
    def _stream(self) -> ArchiveStream:
        if self._archive is None:
            store = _open_store(self._given.store, self._given.spool_dir)
            self._archive = ArchiveStream(store, self._given, SystemClock())
        return self._archive

    def initialOffset(self) -> Positions:  # noqa: N802
        return {}  # called again if the first batch was not done: so it must never change

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        limits = self._given.stream
        if limits.rows:
            return ReadMaxRows(limits.rows)
        return ReadMaxFiles(limits.segments) if limits.segments else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._stream.limit_to_present()

    def latestOffset(self, start: Positions, limit: ReadLimit) -> Positions:  # noqa: N802
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        segments = limit.max_files if isinstance(limit, ReadMaxFiles) else None
        return self._stream.latest(start, rows, segments)

    def reportLatestOffset(self) -> Positions | None:  # noqa: N802
        return self._stream.ends() or None

    def partitions(self, start: Positions, end: Positions) -> list[InputPartition]:
        return [_Partition(stretch) for stretch in self._stream.stretches(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read_partition(self._options, partition)


_HEADER = types.StructType([types.StructField(name, types.StringType()) for name in ("name", "value")])
_SPARK_TYPES: dict[pa.DataType, types.DataType] = {
    pa.int32(): types.IntegerType(),
    pa.int64(): types.LongType(),
    pa.timestamp("us", tz="UTC"): types.TimestampType(),
    pa.string(): types.StringType(),
    pa.binary(): types.BinaryType(),
    HEADERS_PARSED.type: types.ArrayType(_HEADER),
}


@cache
def _open_store(settings: StoreSettings, spool_dir: str) -> SegmentStore:
    """Return the store, opened once in each process: Spark gives one Python process many small partitions."""
    spool = Path(spool_dir) if spool_dir else None
    return SegmentStore(open_objects(settings), Layout(settings.prefix), spool_dir=spool)
