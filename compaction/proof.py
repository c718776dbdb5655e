"""I5 by a job of its own: Spark reads both sides through Floe's data source and compares what they add up to.

    made of exactly these, disjoint   rows, least and greatest sequence and the sum of a hash of every column,
                                      per segment; nothing is shuffled but the sums
    made of exactly these, overlapping   the same, over the distinct rows of the inputs
    found contained                   no (sequence, hash) of the inputs is missing above (a left anti join)

It does not use the code of the merge: hashes, sums and joins are Spark's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import DataError, FloeError
from common.segments.columns import CONTENT_COLUMNS, SCHEMA
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import Stretch
from compaction.failures import Failure
from compaction.run import unproved
from compaction.spark import Spark, spark_error
from compaction.supersede import Supersession

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SEGMENTS_AT_ONCE = 20_000


@dataclass(frozen=True, slots=True)
class Sums:
    """What the rows of some segments add up to; `least` and `greatest` are None without rows."""

    rows: int = 0
    least: int | None = None
    greatest: int | None = None
    hashes: int = 0


class SparkProver:
    """Proves with Spark. `store`: shows which segments are damaged when a proof cannot be made."""

    def __init__(self, spark: Spark, store: SegmentStore) -> None:
        self._spark, self._store = spark, store

    def prove(self, supersessions: Sequence[Supersession]) -> list[Failure | None]:
        summed = [s for s in supersessions if s.exact and s.is_disjoint]
        verdicts = {id(s): verdict for part in _parts(summed) for s, verdict in self._by_sums(part)}
        return [verdicts[id(s)] if id(s) in verdicts else self._one(s) for s in supersessions]

    def _by_sums(self, part: list[Supersession]) -> Iterable[tuple[Supersession, Failure | None]]:
        self._spark.check()
        try:
            sums = self._sums([each for s in part for each in (*map(_whole, s.superseded), *s.stretches)])
        except FloeError as error:
            if len(part) == 1:
                return [(part[0], unproved(self._store, part[0], error))]
            # A segment that cannot be read must not hide the others.
            middle = len(part) // 2
            return [*self._by_sums(part[:middle]), *self._by_sums(part[middle:])]
        verdicts, place = [], 0
        for supersession in part:
            middle = place + len(supersession.superseded)
            end = middle + len(supersession.stretches)
            below, above = _total(sums, range(place, middle)), _total(sums, range(middle, end))
            verdicts.append((supersession, self._compared(supersession, below, above)))
            place = end
        return verdicts

    def _one(self, supersession: Supersession) -> Failure | None:
        self._spark.check()
        try:
            if supersession.exact:
                return self._compared(supersession, *self._distinct_sums(supersession))
            return self._missing(supersession)
        except FloeError as error:
            return unproved(self._store, supersession, error)

    def _compared(self, supersession: Supersession, below: Sums, above: Sums) -> Failure | None:
        if below == above:
            return None
        upper = supersession.superseding[0]
        error = DataError(
            f"{upper.key}: expected {below} as of what it was made of, found {above}",
            hint="nothing was deleted; keep the segments and report this",
            code="E-ROWS-DIFFER",
        )
        return unproved(self._store, supersession, error)

    # What Spark does

    def _sums(self, stretches: Sequence[Stretch[SegmentRef]]) -> dict[int, Sums]:
        frame = self._frame(stretches)
        grouped = frame.groupBy("segment").agg(*_sum_columns(_hash(SCHEMA.names)))
        return {row["segment"]: _as_sums(row) for row in _collected(grouped)}

    def _distinct_sums(self, supersession: Supersession) -> tuple[Sums, Sums]:
        from pyspark.sql.functions import col

        sides = [frame.agg(*_sum_columns(col("hash"))) for frame in self._contents(supersession)]
        [below], [above] = map(_collected, sides)
        return _as_sums(below), _as_sums(above)

    def _missing(self, supersession: Supersession) -> Failure | None:
        below, above = self._contents(supersession)
        if not (rows := _collected(below.join(above, ["sequence", "hash"], "left_anti").limit(1))):
            return None
        error = DataError(
            f"sequence {rows[0]['sequence']} of {supersession.superseded[0].chain}: no such row in "
            f"{', '.join(s.key for s in supersession.superseding)}, which covers it",
            hint="the segments below stay; compare them with `floe segments cat`",
            code="E-ROWS-MISSING",
        )
        return unproved(self._store, supersession, error)

    def _contents(self, supersession: Supersession) -> tuple[DataFrame, DataFrame]:
        below = self._frame([_whole(s) for s in supersession.superseded])
        return _content(below).distinct(), _content(self._frame(supersession.stretches))

    def _frame(self, stretches: Sequence[Stretch[SegmentRef]]) -> DataFrame:
        from compaction.source import frame_of

        return frame_of(self._spark, stretches)


def _parts(supersessions: Sequence[Supersession]) -> list[list[Supersession]]:
    """Some at a time: the options of one read name every segment."""
    parts: list[list[Supersession]] = []
    room = 0
    for supersession in supersessions:
        size = len(supersession.superseded) + 1
        if size > room:
            parts.append([])
            room = max(SEGMENTS_AT_ONCE, size)
        parts[-1].append(supersession)
        room -= size
    return parts


def _whole(segment: SegmentRef) -> Stretch[SegmentRef]:
    return Stretch(segment, segment.coverage)


def _hash(columns: Sequence[str]) -> Column:
    """Nulls are part of the hash, so that a value moved from one column to another is noticed."""
    from pyspark.sql.functions import col, xxhash64

    return xxhash64(*(part for name in columns for part in (col(name), col(name).isNull())))


def _content(frame: DataFrame) -> DataFrame:
    return frame.select("sequence", _hash(["sequence", *CONTENT_COLUMNS]).alias("hash"))


def _sum_columns(row_hash: Column) -> list[Column]:
    from pyspark.sql import functions as f

    return [
        f.count(f.lit(1)).alias("rows"),
        f.min("sequence").alias("least"),
        f.max("sequence").alias("greatest"),
        # 2^63 rows could not overflow 38 digits.
        f.sum(row_hash.cast("decimal(38,0)")).alias("hashes"),
    ]


def _as_sums(row: Any) -> Sums:
    return Sums(row["rows"], row["least"], row["greatest"], int(row["hashes"] or 0))


def _total(sums: Mapping[int, Sums], places: Iterable[int]) -> Sums:
    found = [sums[place] for place in places if place in sums]
    leasts, greatests = [s.least for s in found if s.least], [s.greatest for s in found if s.greatest]
    rows, hashes = sum(s.rows for s in found), sum(s.hashes for s in found)
    return Sums(rows, min(leasts, default=None), max(greatests, default=None), hashes)


def _collected(frame: DataFrame) -> list[Any]:
    try:
        return list(frame.collect())
    except Exception as error:  # Spark raises its own, py4j's and the source's errors
        raise spark_error("proof", error) from error
