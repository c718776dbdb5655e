"""Tables of the archive, made with Spark and kept current; one of them: the newest message of each sample key.

    list → rows that are not in the report yet → Spark: the newest of each key, or hours → add the former file → replace

A report is one Parquet file. Its metadata state the sequences of each chain that are in it, so result and position are
replaced in one step: a run that is killed leaves the former report whole, and the next run reads only new data.
Compaction in between changes nothing, because sequences do not change.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import merge as merged_in_order
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from common.archive.columns import SCHEMA, microseconds
from common.archive.keys import MAX_LEVEL
from common.archive.scan import ChainArchive
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.archive.times import search
from common.chain import Chain
from common.clock import format_time
from common.documents import JsonCodec
from common.errors import DataError, FloeError, UsageError
from common.logs import get_logger
from common.nats.headers import header_value
from common.objects.local import replace_file
from common.objects.open import open_objects
from common.objects.port import ObjectStore, sha256_of
from common.sequences import MAX_SEQUENCE, CoverageSet, SequenceRange, Stretch, cover
from common.settings.root import Settings
from compaction.run import batched, in_parallel
from compaction.spark import Spark, spark_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = get_logger(__name__)

METADATA = b"floe.report"
STRETCHES_PER_PART = 10_000  # that are read before the report is replaced
READ_ROUNDS = MAX_LEVEL + 2  # of reading: segments of each level may be gone or damaged
TASKS_PER_CORE = 4


# Place of a report


class ReportPlace(Protocol):
    """Place of the files of a report. A file that is put replaces the former one in one step."""

    def get(self, name: str, path: Path) -> bool:
        """Write the file `name` to `path`; return False if there is none."""

    def put(self, name: str, path: Path) -> None:
        """Store the file at `path` as the file `name`."""


class FolderPlace:
    """A directory of this host. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str, path: Path) -> bool:
        try:
            shutil.copyfile(self._folder / name, path)
        except FileNotFoundError:
            return False
        return True

    def put(self, name: str, path: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as whole, replace_file(self._folder / name) as file:
            shutil.copyfileobj(whole, file)


class BucketPlace:
    """Keys of a bucket that begin with `prefix`."""

    def __init__(self, objects: ObjectStore, prefix: str) -> None:
        self._objects, self._prefix = objects, prefix

    def get(self, name: str, path: Path) -> bool:
        return self._objects.download(self._prefix + name, path)

    def put(self, name: str, path: Path) -> None:
        self._objects.put(self._prefix + name, path, sha256=sha256_of(path))


def open_place(output: str, settings: Settings) -> ReportPlace:
    """Return the place of `output`: a directory, or `s3://BUCKET/PREFIX` in the store's bucket, beside the archive.

    Raises UsageError for another bucket, and for a place inside the archive: every file would be a foreign key there.
    """
    scheme, is_address, rest = output.partition("://")
    if not is_address:
        return FolderPlace(Path(output))
    bucket, _, prefix = rest.partition("/")
    prefix = f"{prefix.strip('/')}/"
    if scheme != "s3" or settings.store.url.rstrip("/") != f"s3://{bucket}":
        raise UsageError(f"--output: expected a directory or an address in {settings.store.url}, found {output}")
    root = f"{settings.store.prefix}/" if settings.store.prefix else ""
    if prefix == "/" or prefix.startswith(root):
        where = f"outside of s3://{bucket}/{root}, which is the archive"
        raise UsageError(f"--output: expected a prefix {where}, found {output}", hint="or give a directory")
    return BucketPlace(open_objects(settings.store), prefix)


# State of a report


class ReportState(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="format_version", tag=1):
    """The data in a report. `chains`: the name of its chains; `since`: nothing before was read, ns since 1970.

    `accounted`: by the name of a chain, the first and the last sequence of each range that is in it, with or without
    rows.
    """

    report: str
    store: str
    chains: str
    accounted: dict[str, list[tuple[int, int]]]
    since: int | None = None

    def covered(self, chain: Chain) -> CoverageSet:
        found = CoverageSet()
        for first, last in self.accounted.get(str(chain), ()):
            found.add(SequenceRange(first, last))
        return found

    def plus(self, more: Iterable[tuple[Chain, SequenceRange]]) -> ReportState:
        grown: dict[Chain, CoverageSet] = {}
        for chain, rows in more:
            grown.setdefault(chain, self.covered(chain)).add(rows)
        added = {str(chain): [(e.first, e.last) for e in each.stretches()] for chain, each in grown.items()}
        return msgspec.structs.replace(self, accounted=self.accounted | added)

    def to_json(self) -> bytes:
        return _FORM.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> ReportState:
        """Parse the metadata of a report. Raises ValueError."""
        state = _FORM.decode(raw)
        for chain in state.accounted:
            state.covered(Chain.parse(chain))  # checks the ranges
        return state


_FORM = JsonCodec(ReportState)


def uncovered(refs: Sequence[SegmentRef], accounted: CoverageSet, *, finest: bool) -> list[Stretch[SegmentRef]]:
    """Return the rows of `refs`, of one chain, that are not in `accounted`, each once, ascending.

    `finest`: by the lowest level that has them; otherwise by the cover.
    """
    done, found = CoverageSet(), list[Stretch[SegmentRef]]()
    for each in accounted.stretches():
        done.add(each)
    levels = sorted({ref.level for ref in refs}) if finest else [None]
    for level in levels:
        some = [ref for ref in refs if level in (None, ref.level)]
        for hole in done.holes(SequenceRange(1, MAX_SEQUENCE)):
            found += cover(some, hole.first, hole.last)
        for stretch in found:
            done.add(stretch.rows)
    return sorted(found, key=lambda stretch: stretch.rows.first)


@dataclass(slots=True)
class ReportRun:
    """Result of a run. `size`: stored bytes of the `segments` that it read, whole or in part; `rows`: of the report;
    `damaged`: keys of segments that were left out, because nothing in them can be trusted.
    """

    chains: int = 0
    segments: int = 0
    size: int = 0
    rows: int = 0
    damaged: list[str] = field(default_factory=list)


class ArchiveReport:
    """A report as one file in `place`. Blocking."""

    name = ""
    is_finest = False  # True: it reads the lowest level that has a row

    def __init__(self, spark: Spark, store: SegmentStore, place: ReportPlace) -> None:
        self._spark, self.store, self.place = spark, store, place

    @property
    def file(self) -> str:
        return f"{self.name}.parquet"

    def run(self, wanted: ReportState, chains: Sequence[Chain], *, full: bool) -> ReportRun:
        """Bring the report up to date. `wanted`: the requested state, `accounted` empty; `full`: make it again.

        Raises UsageError if the file in its place is of something else, ConfigError if Java or PySpark is missing,
        Unavailable if Spark or the store fails; rows that were read until then stay in the report, unless `full`.
        """
        current = self.store.new_spool()
        try:
            former = None if full or not self.place.get(self.file, current) else self._state_of(current)
            state = self._initial_state(former, wanted, chains)
            if former is None:
                self._replace(current, state, None, full=full)
            done = self._run(current, state, chains, full=full)
            if full:
                self.place.put(self.file, current)
            return done
        finally:
            current.unlink(missing_ok=True)

    def _run(self, current: Path, state: ReportState, chains: Sequence[Chain], *, full: bool) -> ReportRun:
        """Read the parts that are not in the report at `current` yet."""
        done, damaged = ReportRun(len(chains)), set[str]()
        for number in range(1, READ_ROUNDS + 1):
            bad = set[str]()
            for part in batched(self._stretches(chains, state, damaged), STRETCHES_PER_PART):
                self._spark.check()
                try:
                    with self._spark.cancelled_on_stop():
                        more = state.plus((stretch.segment.chain, stretch.rows) for stretch in part)
                        self._replace(current, more, part, full=full)
                        state = more
                except (FloeError, pa.ArrowException) as error:
                    self._spark.check()
                    if not (found := self._find_damaged(part)) or number == READ_ROUNDS:
                        raise
                    log.info("report repeated", action="report_repeated", segments=len(found), error=str(error)[:300])
                    bad |= found
                    continue
                done.segments += len(part)
                done.size += sum(stretch.segment.size for stretch in part)
                log.info("report part read", action="report_part_read", segments=len(part), bytes=done.size)
            damaged |= bad
            if not bad:
                break
        done.damaged = sorted(key for key in damaged if self.store.objects.head(key) is not None)
        done.rows = pq.read_metadata(current).num_rows
        return done

    def _initial_state(self, former: ReportState | None, wanted: ReportState, chains: Sequence[Chain]) -> ReportState:
        state = former or wanted
        place = (wanted.report, wanted.store, wanted.chains)
        if (found := (state.report, state.store, state.chains)) != place:
            text = f"{self.file}: expected a report of {_describe(place)}, found one of {_describe(found)}"
            raise UsageError(text, hint="give each its own --output, or begin again with --full")
        if state.since is not None and wanted.since is not None and wanted.since < state.since:
            text = f"{self.file}: expected --since {format_time(state.since)} or later, where it begins"
            raise UsageError(f"{text}, found {format_time(wanted.since)}", hint="begin again with --full")
        skipped = []
        for chain in chains:
            if state.since is not None and str(chain) not in state.accounted:
                found_at, behind = search(self.store, chain, state.since)
                if (last := (found_at or behind) - 1) > 0:
                    skipped.append((chain, SequenceRange(1, last)))
        return state.plus(skipped)

    def _state_of(self, path: Path) -> ReportState:
        """Return the state of the report at `path`. Raises DataError if it is not a report."""
        try:
            if (raw := (pq.read_schema(path).metadata or {}).get(METADATA)) is None:
                raise ValueError("a file without Floe's metadata")
            return ReportState.from_json(raw)
        except (ValueError, pa.ArrowException) as error:
            hint = "give another --output, or replace it with --full"
            raise DataError(f"{self.file}: expected a report of Floe, found {error}", hint=hint) from error

    def _stretches(
        self, chains: Sequence[Chain], state: ReportState, damaged: AbstractSet[str]
    ) -> Iterator[Stretch[SegmentRef]]:
        """Yield the stretches that are not in the report yet."""
        for chain in chains:
            accounted = state.covered(chain)
            position = accounted.holes(SequenceRange(1, MAX_SEQUENCE))[0].first
            listed = ChainArchive.listed(self.store, chain, position)
            refs = [ref for ref in listed.refs if ref.key not in damaged]
            yield from uncovered(refs, accounted, finest=self.is_finest)

    def _replace(
        self, current: Path, state: ReportState, part: Sequence[Stretch[SegmentRef]] | None, *, full: bool
    ) -> None:
        """Add the rows of `part` to the report, of which `current` is a copy. `part` None: make an empty report.

        `full`: only the copy is replaced; the report stays as it was until all is read.
        """
        new = self.store.new_spool()
        try:
            self._write(new, None if part is None else current, part or (), state)
            if not full:
                self.place.put(self.file, new)
            new.replace(current)
        finally:
            new.unlink(missing_ok=True)

    def _write(self, path: Path, former: Path | None, part: Sequence[Stretch[SegmentRef]], state: ReportState) -> None:
        """Write to `path` the rows of `former`, updated with those of `part`."""
        raise NotImplementedError

    def _frame(self, part: Sequence[Stretch[SegmentRef]], columns: Sequence[str]) -> DataFrame:
        """Return the rows of `part`; column `segment` is the place of their stretch in it."""
        session = self._spark.session()
        self._spark.check()  # the session takes seconds to start
        from compaction.source import make_frame

        frame = make_frame(self._spark, part, columns)
        # With a task for each stretch, a result would have as many parts as there are segments.
        return frame.coalesce(session.sparkContext.defaultParallelism * TASKS_PER_CORE)

    def _find_damaged(self, part: Sequence[Stretch[SegmentRef]]) -> set[str]:
        refs = {stretch.segment.key: stretch.segment for stretch in part}
        sound = in_parallel(self.store.is_intact, refs.values())
        return {key for key, is_sound in zip(refs, sound, strict=True) if not is_sound}


def _describe(place: tuple[str, str, str]) -> str:
    report, store, chains = place
    return f"{report} of {chains} in {store}"


# The newest message of each key

FEED_FIELDS: list[Any] = [pa.field("site", pa.string()), pa.field("feed", pa.string())]
_HISTORY_FIELDS: list[Any] = [pa.field("incarnation", pa.int32()), pa.field("partition", pa.int32())]
_ROW_FIELDS: list[Any] = [each.remove_metadata() for each in SCHEMA]
LATEST_SCHEMA: pa.Schema = pa.schema([*FEED_FIELDS, *_HISTORY_FIELDS, *_ROW_FIELDS, pa.field("operation", pa.string())])
GROUP_ROWS, GROUP_BYTES = 20_000, 32 * 1024 * 1024  # of a row group, about

Row = Mapping[str, Any]


def key_of(row: Row) -> tuple[str, str, bool, str, bytes]:
    """Return the key of a registry row, in the order of Spark: the sample key, or without one the subject."""
    is_bare = row["sample_key"] is None
    name = row["subject"] if is_bare else row["sample_key"]
    return row["site"], row["feed"], is_bare, name, (row["subject_raw"] or b"") if is_bare else b""


def newest_row(rows: Iterable[Row]) -> Row:
    """Return the newest row. Sequences are those of the stream, so they also order the partitions of a feed."""
    return max(rows, key=lambda row: (row["incarnation"], row["sequence"], row["partition"]))


def operation_of(headers: bytes | None) -> str | None:
    """Return the operation of a message that gives its key no value: `DEL` or `PURGE` of a key-value bucket, or the
    server's reason for a marker (`MaxAge`, `Purge`, `Remove`); None for a value.
    """
    found = header_value(headers, b"KV-Operation") or header_value(headers, b"Nats-Marker-Reason")
    return None if found in (None, b"", b"PUT") else found.decode("utf-8", "backslashreplace")


class LatestReport(ArchiveReport):
    """The newest message of each sample key of each feed; of messages without one, the newest of each subject."""

    name = "latest"

    def _write(self, path: Path, former: Path | None, part: Sequence[Stretch[SegmentRef]], state: ReportState) -> None:
        both = merged_in_order(_stored(former), self._newest(part), key=key_of)
        schema = LATEST_SCHEMA.with_metadata({METADATA: state.to_json()})
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for batch in _batches(newest_row(rows) for _, rows in groupby(both, key_of)):
                writer.write_batch(batch)

    def _newest(self, part: Sequence[Stretch[SegmentRef]]) -> Iterator[Row]:
        """Yield the newest rows of `part`, in the order of `key_of`."""
        if not part:
            return
        names = [name for name in LATEST_SCHEMA.names if name not in ("timestamp", "operation")]
        try:
            frame = self._frame(part, names)
            from pyspark.sql import functions as f

            is_bare = f.col("sample_key").isNull()
            name = f.coalesce("sample_key", "subject")
            raw = f.when(is_bare, f.coalesce("subject_raw", f.lit(b""))).otherwise(f.lit(b""))
            order = f.struct("incarnation", "sequence", "partition")
            grouped = frame.groupBy("site", "feed", is_bare.alias("_bare"), name.alias("_name"), raw.alias("_raw"))
            found = grouped.agg(f.max_by(f.struct(*names), order).alias("row"))
            for row in found.orderBy("site", "feed", "_bare", "_name", "_raw").select("row.*").toLocalIterator():
                values = row.asDict()
                yield {n: bytes(v) if isinstance(v, bytearray) else v for n, v in values.items()}
        except Exception as error:  # Spark raises its own, py4j's and the source's errors
            raise as_floe_error("report latest", error) from error


def as_floe_error(what: str, error: Exception) -> FloeError:
    return error if isinstance(error, FloeError) else spark_error(what, error)


def _stored(path: Path | None) -> Iterator[Row]:
    if path is not None:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1000):
                yield from batch.to_pylist()


def _batches(rows: Iterable[Row]) -> Iterator[pa.RecordBatch]:
    held, size = list[Row](), 0
    for row in rows:
        held.append(row)
        size += len(row["payload"]) + len(row["headers"] or b"")
        if len(held) >= GROUP_ROWS or size >= GROUP_BYTES:
            yield _batch(held)
            held, size = [], 0
    if held:
        yield _batch(held)


def _batch(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = {each.name: pa.array([row.get(each.name) for row in rows], each.type) for each in LATEST_SCHEMA}
    times = microseconds(columns["timestamp_ns"])
    columns["timestamp"] = times.cast(LATEST_SCHEMA.field("timestamp").type)
    columns["operation"] = pa.array([operation_of(row["headers"]) for row in rows], pa.string())
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=LATEST_SCHEMA)
