"""`floe report latest` and `floe report traffic`: tables of the archive, made with Spark and kept current.

    list → rows that are not in the report yet → Spark: the newest of each key, or hours → add the former file → replace

A report is one Parquet file. Its metadata say which sequences of each chain are in it, so result and position are
replaced in one step: a run that is killed leaves the former report whole, and the next run reads only what is new.
What compaction does in between changes nothing, because sequences stay what they are.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from heapq import merge as merged_in_order
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from common.chain import Chain
from common.clock import NS_PER_S, format_time
from common.documents import JsonForm
from common.errors import DataError, FloeError, UsageError
from common.jetstream.headers import header
from common.logs import get_logger
from common.objects.open import open_objects
from common.objects.port import ObjectStore, sha256_of
from common.segments.archive import search
from common.segments.columns import SCHEMA, microseconds
from common.segments.segment import Footer, Reason, SegmentRef
from common.segments.store import SegmentStore
from common.sequences import MAX_SEQUENCE, Covered, SequenceRange, Stretch, cover
from common.settings.root import Settings
from compaction.spark import LOOK, Spark, spark_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = get_logger(__name__)

FORMAT = "floe_report"
METADATA = b"floe.report"
HOUR_NS = 3600 * NS_PER_S
STRETCHES = 10_000  # that are read before the report is replaced
ROUNDS = 3  # of looking again, because segments were gone or damaged
REQUESTS_AT_ONCE = 8
TASKS_OF_A_CORE = 4


# Where a report is


class ReportPlace(Protocol):
    """Where the files of a report are. One that is put replaces the former in one step."""

    def get(self, name: str, path: Path) -> bool:
        """Write the file `name` to `path`; False if there is none."""

    def put(self, name: str, path: Path) -> None:
        """Make what is at `path` the file `name`."""


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
        new, folder = self._folder / f".{name}.new", os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # another run would write the same new file
            shutil.copyfile(path, new)
            with new.open("rb") as file:
                os.fsync(file.fileno())
            new.replace(self._folder / name)
            os.fsync(folder)
        finally:
            os.close(folder)


class BucketPlace:
    """Keys of a bucket that begin with `prefix`."""

    def __init__(self, objects: ObjectStore, prefix: str) -> None:
        self._objects, self._prefix = objects, prefix

    def get(self, name: str, path: Path) -> bool:
        return self._objects.download(self._prefix + name, path)

    def put(self, name: str, path: Path) -> None:
        self._objects.put(self._prefix + name, path, sha256=sha256_of(path))


class _AsidePlace:
    """One file on the disk of the spool: what a report is made in that replaces another one as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, _name: str, path: Path) -> bool:
        shutil.copyfile(self.path, path)
        return True

    def put(self, _name: str, path: Path) -> None:
        shutil.copyfile(path, self.path)


def open_place(output: str, settings: Settings) -> ReportPlace:
    """The place that `output` names: a directory, or `s3://BUCKET/PREFIX` in the store's bucket, beside the archive.

    Raises UsageError for another bucket, and for a place inside the archive, where every file would be a foreign key.
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


# What is in a report


class _ReportWire(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="format_version", tag=1):
    report: str
    store: str
    chains: str
    accounted: dict[str, list[tuple[int, int]]]
    since: int | None = None


_FORM = JsonForm(_ReportWire)


@dataclass(frozen=True, slots=True)
class ReportState:
    """What a report accounts for. `chains`: which were asked for; `since`: nothing before was read, ns since 1970.

    `accounted`: the sequences of each chain that are in it, rows or not.
    """

    report: str
    store: str
    chains: str
    since: int | None = None
    accounted: Mapping[Chain, tuple[SequenceRange, ...]] = field(default_factory=dict)

    def covered(self, chain: Chain) -> Covered:
        found = Covered()
        for each in self.accounted.get(chain, ()):
            found.add(each)
        return found

    def plus(self, more: Iterable[tuple[Chain, SequenceRange]]) -> ReportState:
        grown: dict[Chain, Covered] = {}
        for chain, rows in more:
            grown.setdefault(chain, self.covered(chain)).add(rows)
        accounted = {**self.accounted, **{chain: tuple(each.stretches()) for chain, each in grown.items()}}
        return ReportState(self.report, self.store, self.chains, self.since, accounted)

    def to_json(self) -> bytes:
        accounted = {str(chain): [(e.first, e.last) for e in each] for chain, each in self.accounted.items()}
        return _FORM.encode(_ReportWire(self.report, self.store, self.chains, accounted, self.since))

    @classmethod
    def from_json(cls, raw: bytes) -> ReportState:
        """Raises ValueError."""
        wire = _FORM.decode(raw)
        accounted = {Chain.parse(c): tuple(SequenceRange(*each) for each in e) for c, e in wire.accounted.items()}
        return cls(wire.report, wire.store, wire.chains, wire.since, accounted)


def unaccounted(refs: Sequence[SegmentRef], accounted: Covered, *, finest: bool) -> list[Stretch[SegmentRef]]:
    """Which rows of `refs`, of one chain, are not in `accounted`, each once, ascending.

    `finest`: by the lowest level that has them; otherwise by the cover.
    """
    done, found = Covered(), list[Stretch[SegmentRef]]()
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
    """What a run did. `size`: stored bytes of the `segments` that it read, whole or in part; `rows`: of the report;
    `damaged`: keys of segments that were left out, because nothing of them could be believed.
    """

    chains: int = 0
    segments: int = 0
    size: int = 0
    rows: int = 0
    damaged: list[str] = field(default_factory=list)


class ArchiveReport:
    """A report as one file in `place`. Blocking."""

    name = ""
    is_finest = False  # whether it reads the lowest level that has a row

    def __init__(self, spark: Spark, store: SegmentStore, place: ReportPlace) -> None:
        self._spark, self.store, self.place = spark, store, place

    @property
    def file(self) -> str:
        return f"{self.name}.parquet"

    def run(self, wanted: ReportState, chains: Sequence[Chain], *, full: bool) -> ReportRun:
        """Bring the report up to date. `wanted`: what is asked for, `accounted` empty; `full`: begin anew.

        Raises UsageError where the file in its place is of something else, ConfigError where Java or PySpark is
        missing, Unavailable where Spark or the store fails; what was read until then stays in the report.
        """
        if not full:
            return self._run(wanted, chains)
        whole, aside = self.place, _AsidePlace(self.store.new_spool())
        try:
            self.place = aside
            self._replace(wanted, None)
            done = self._run(wanted, chains)
            whole.put(self.file, aside.path)
        finally:
            self.place = whole
            aside.path.unlink(missing_ok=True)
        return done

    def _run(self, wanted: ReportState, chains: Sequence[Chain]) -> ReportRun:
        done, damaged = ReportRun(len(chains)), set[str]()
        state = self._begun(wanted, chains)
        for number in range(1, ROUNDS + 1):
            bad = set[str]()
            for part in self._parts(chains, state, damaged):
                self._spark.check()
                try:
                    with self._cancelled_if_asked():
                        state = self._account(state, part)
                except (FloeError, pa.ArrowException) as error:
                    self._spark.check()
                    if not (found := self._not_intact(part)) or number == ROUNDS:
                        raise
                    log.info("looking again", action="report_again", segments=len(found), error=str(error)[:300])
                    bad |= found
                    continue
                done.segments += len(part)
                done.size += sum(stretch.segment.size for stretch in part)
                log.info("part read", action="report_part", segments=len(part), bytes=done.size)
            damaged |= bad
            if not bad:
                break
        done.damaged = sorted(key for key in damaged if self.store.objects.head(key) is not None)
        with self._fetched() as path:
            done.rows = pq.read_metadata(path).num_rows if path else 0
        return done

    @contextmanager
    def _cancelled_if_asked(self) -> Iterator[None]:
        """Cancels what Spark does in the block once the run is to stop, also where it was asked before Spark began."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK):
                try:
                    self._spark.check()
                except FloeError:
                    self._spark.cancel()

        watching = threading.Thread(target=watch, name="report-stop", daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()

    @contextmanager
    def _fetched(self) -> Iterator[Path | None]:
        """A copy of the file as it is; None where there is none."""
        path = self.store.new_spool()
        try:
            yield path if self.place.get(self.file, path) else None
        finally:
            path.unlink(missing_ok=True)

    def _begun(self, wanted: ReportState, chains: Sequence[Chain]) -> ReportState:
        former = self._former()
        state = former or wanted
        place = (wanted.report, wanted.store, wanted.chains)
        if (found := (state.report, state.store, state.chains)) != place:
            text = f"{self.file}: expected a report of {_told(place)}, found one of {_told(found)}"
            raise UsageError(text, hint="give each its own --output, or begin anew with --full")
        if state.since is not None and wanted.since is not None and wanted.since < state.since:
            text = f"{self.file}: expected --since {format_time(state.since)} or later, where it begins"
            raise UsageError(f"{text}, found {format_time(wanted.since)}", hint="begin anew with --full")
        skipped = []
        for chain in chains:
            if state.since is not None and chain not in state.accounted:
                found_at, behind = search(self.store, chain, state.since)
                if (last := (found_at or behind) - 1) > 0:
                    skipped.append((chain, SequenceRange(1, last)))
        state = state.plus(skipped)
        if former is None:
            self._replace(state, None)
        return state

    def _former(self) -> ReportState | None:
        """What the report accounts for. Raises DataError where it is not one."""
        with self._fetched() as path:
            if path is None:
                return None
            try:
                if (raw := (pq.read_schema(path).metadata or {}).get(METADATA)) is None:
                    raise ValueError("nothing that says what is in it")
                return ReportState.from_json(raw)
            except (ValueError, pa.ArrowException) as error:
                hint = "give another --output, or replace it with --full"
                raise DataError(f"{self.file}: expected a report of Floe, found {error}", hint=hint) from error

    def _parts(
        self, chains: Sequence[Chain], state: ReportState, damaged: AbstractSet[str]
    ) -> Iterator[list[Stretch[SegmentRef]]]:
        part: list[Stretch[SegmentRef]] = []
        for chain in chains:
            accounted = state.covered(chain)
            position = accounted.holes(SequenceRange(1, MAX_SEQUENCE))[0].first
            refs = [ref for ref in self.store.list(chain, position=position) if ref.key not in damaged]
            for stretch in unaccounted(refs, accounted, finest=self.is_finest):
                part.append(stretch)
                if len(part) >= STRETCHES:
                    yield part
                    part = []
        if part:
            yield part

    def _account(self, state: ReportState, part: Sequence[Stretch[SegmentRef]]) -> ReportState:
        state = state.plus((stretch.segment.chain, stretch.rows) for stretch in part)
        self._replace(state, part)
        return state

    def _replace(self, state: ReportState, part: Sequence[Stretch[SegmentRef]] | None) -> None:
        """`part` None: an empty report."""
        new = self.store.new_spool()
        try:
            with self._fetched() if part is not None else nullcontext() as former:
                self._write(new, former, part or (), state)
            self.place.put(self.file, new)
        finally:
            new.unlink(missing_ok=True)

    def _write(self, path: Path, former: Path | None, part: Sequence[Stretch[SegmentRef]], state: ReportState) -> None:
        """Write to `path` what is in `former`, and the rows of `part`."""
        raise NotImplementedError

    def _frame(self, part: Sequence[Stretch[SegmentRef]], columns: Sequence[str]) -> DataFrame:
        """The rows of `part`; column `segment` is the place of their stretch in it."""
        session = self._spark.session()
        self._spark.check()  # it takes seconds to start
        from compaction.source import source_of

        session.dataSource.register(source_of(self._spark.settings, FORMAT))
        named = [[s.segment.key, [s.rows.first, s.rows.last]] for s in part]
        reader = session.read.format(FORMAT).option("segments", json.dumps(named))
        frame = reader.option("columns", ",".join(columns)).load()
        # A task for each stretch would hand on as many parts of a result as there are segments.
        return frame.coalesce(session.sparkContext.defaultParallelism * TASKS_OF_A_CORE)

    def _not_intact(self, part: Sequence[Stretch[SegmentRef]]) -> set[str]:
        refs = {stretch.segment.key: stretch.segment for stretch in part}
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            sound = pool.map(self.store.is_intact, refs.values())
            return {key for key, is_sound in zip(refs, sound, strict=True) if not is_sound}


def _told(place: tuple[str, str, str]) -> str:
    report, store, chains = place
    return f"{report} of {chains} in {store}"


def with_state(schema: pa.Schema, state: ReportState) -> pa.Schema:
    return schema.with_metadata({METADATA: state.to_json()})


# The newest message of each key

_CHAIN_FIELDS: list[Any] = [pa.field("site", pa.string()), pa.field("feed", pa.string())]
_HISTORY_FIELDS: list[Any] = [pa.field("incarnation", pa.int32()), pa.field("partition", pa.int32())]
_ROW_FIELDS: list[Any] = [each.remove_metadata() for each in SCHEMA]
LATEST: pa.Schema = pa.schema([*_CHAIN_FIELDS, *_HISTORY_FIELDS, *_ROW_FIELDS, pa.field("operation", pa.string())])
GROUP_ROWS, GROUP_BYTES = 20_000, 32 * 1024 * 1024  # of a row group, about

Row = Mapping[str, Any]


def key_of(row: Row) -> tuple[str, str, bool, str, bytes]:
    """What tells rows of a registry apart, in the order of Spark: the sample key, or without one the subject."""
    is_bare = row["sample_key"] is None
    name = row["subject"] if is_bare else row["sample_key"]
    return row["site"], row["feed"], is_bare, name, (row["subject_raw"] or b"") if is_bare else b""


def newest(rows: Iterable[Row]) -> Row:
    """Sequences are those of the stream, so they tell which is newer also between the partitions of a feed."""
    return max(rows, key=lambda row: (row["incarnation"], row["sequence"], row["partition"]))


def operation_of(headers: bytes | None) -> str | None:
    """What a message does to its key instead of giving it a value: `DEL` or `PURGE` of a key-value bucket, or why the
    server put a marker (`MaxAge`, `Purge`, `Remove`); None for a value.
    """
    found = header(headers, b"KV-Operation") or header(headers, b"Nats-Marker-Reason")
    return None if found in (None, b"", b"PUT") else found.decode("utf-8", "backslashreplace")


class LatestReport(ArchiveReport):
    """The newest message of each sample key of each feed; of messages without one, the newest of each subject."""

    name = "latest"

    def _write(self, path: Path, former: Path | None, part: Sequence[Stretch[SegmentRef]], state: ReportState) -> None:
        both = merged_in_order(_stored(former), self._newest(part), key=key_of)
        with pq.ParquetWriter(path, with_state(LATEST, state), compression="zstd") as writer:
            for batch in _batches(newest(rows) for _, rows in groupby(both, key_of)):
                writer.write_batch(batch)

    def _newest(self, part: Sequence[Stretch[SegmentRef]]) -> Iterator[Row]:
        """In the order of `key_of`."""
        if not part:
            return
        names = [name for name in LATEST.names if name not in ("timestamp", "operation")]
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
            raise _of_spark("report latest", error) from error


def _of_spark(what: str, error: Exception) -> FloeError:
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
    columns = {name: pa.array([row.get(name) for row in rows], LATEST.field(name).type) for name in LATEST.names}
    times = microseconds(columns["timestamp_ns"])
    columns["timestamp"] = times.cast(LATEST.field("timestamp").type)
    columns["operation"] = pa.array([operation_of(row["headers"]) for row in rows], pa.string())
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=LATEST)


# Traffic

REASONS = tuple(reason.value for reason in Reason)
LEFT_OUT = (Reason.SAMPLED_OUT, Reason.TOO_OLD, Reason.LOOPED)  # of messages that egress had and did not keep
_COUNTS = ("messages", "bytes", "kept", *REASONS, "lag_known", "lag_total_ms")
_HOUR = pa.timestamp("us", tz="UTC")
TRAFFIC: pa.Schema = pa.schema([
    *_CHAIN_FIELDS,
    pa.field("hour", _HOUR),
    *(pa.field(name, pa.int64()) for name in _COUNTS),
    pa.field("lag_max_ms", pa.int64()),
])  # fmt: skip
_KEYS = ["site", "feed", "hour"]


@dataclass(frozen=True, slots=True)
class HourOfRows:
    """The rows of one stretch whose messages were stored in one hour. `hour`: since 1970; `size`: raw bytes; `first`,
    `last`: sequences; `past_ms`: milliseconds from the beginning of the hour to each row, together; `earliest_ns`.
    """

    hour: int
    rows: int
    size: int
    first: int
    last: int
    past_ms: int
    earliest_ns: int


def missing_by_hour(rows: SequenceRange, hours: Sequence[HourOfRows], end: int) -> dict[int, int]:
    """How many sequences of `rows` have no row, by hour: each counts in the hour of the next row, behind the last row
    in the hour `end`.
    """
    ordered = sorted(hours, key=lambda each: each.last)
    sums, kept, last = [], 0, rows.first - 1
    for each in ordered:
        kept, last = kept + each.rows, max(last, each.last)
        sums.append(last - rows.first + 1 - kept)
    # Where timestamps run backwards, hours overlap: a later sum is the better one.
    for index in range(len(sums) - 2, -1, -1):
        sums[index] = min(sums[index], sums[index + 1])
    found, before = dict[int, int](), 0
    for each, total in zip(ordered, sums, strict=True):
        found[each.hour] = found.get(each.hour, 0) + total - before
        before = total
    found[end] = found.get(end, 0) + len(rows) - kept - before
    return {hour: count for hour, count in found.items() if count}


def by_reason(missing: Mapping[int, int], footer: Footer) -> dict[int, dict[str, int]]:
    """Why the sequences that are `missing` in each hour have no row: the ledger, in proportion where it has several
    reasons. Over a whole segment the sums are those of the ledger.
    """
    left, found = dict[str, int](), dict[int, dict[str, int]]()
    for reason, number in footer.ledger.to_json().items():
        known = reason if reason in REASONS else Reason.UNATTRIBUTED.value
        left[known] = left.get(known, 0) + number
    for hour, count in sorted(missing.items()):
        total, taken = sum(left.values()), dict[str, int]()
        for reason, number in left.items():
            taken[reason] = number * min(count, total) // total if total else 0
        for reason in sorted(left, key=lambda each: left[each] - taken[each], reverse=True):
            more = min(left[reason] - taken[reason], count - sum(taken.values()))
            taken[reason] += more
        rest = count - sum(taken.values())
        for reason, number in taken.items():
            left[reason] -= number
        if rest:
            taken[Reason.UNATTRIBUTED.value] = taken.get(Reason.UNATTRIBUTED.value, 0) + rest
        found[hour] = {reason: number for reason, number in taken.items() if number}
    return found


def hours_of(stretch: Stretch[SegmentRef], hours: Sequence[HourOfRows], footer: Footer | None) -> list[dict[str, Any]]:
    """The rows of the traffic of one stretch. `footer`: of its segment; None where no sequence lacks a row.

    The lag is known at level 0, where an object is as old as the put that made the messages visible.
    """
    segment, found = stretch.segment, dict[int, dict[str, Any]]()

    def of(hour: int) -> dict[str, Any]:
        empty = {"site": segment.chain.site, "feed": segment.chain.feed, "hour": hour * 3_600_000_000}
        return found.setdefault(hour, {**empty, **dict.fromkeys(_COUNTS, 0), "lag_max_ms": None})

    for each in hours:
        row = of(each.hour)
        row["kept"], row["messages"], row["bytes"] = each.rows, each.rows, each.size
        if segment.level == 0:
            put = int(segment.modified * 1000)
            row["lag_known"] = each.rows
            row["lag_total_ms"] = (put - each.hour * 3_600_000) * each.rows - each.past_ms
            row["lag_max_ms"] = put - each.earliest_ns // 1_000_000
    if footer is not None:
        end = footer.tip.timestamp_ns // HOUR_NS if footer.tip else int(segment.modified) // 3600
        if hours and (footer.tip is None or stretch.rows.last != footer.coverage.last):
            end = max(each.hour for each in hours)
        for hour, reasons in by_reason(missing_by_hour(stretch.rows, hours, end), footer).items():
            row = of(hour)
            for reason, count in reasons.items():
                row[reason] += count
                row["messages"] += count if reason in LEFT_OUT else 0
    return list(found.values())


class TrafficReport(ArchiveReport):
    """Per site, feed and hour: messages, bytes, what was kept, why the others were not, and the lag."""

    name, is_finest = "traffic", True

    def _write(self, path: Path, former: Path | None, part: Sequence[Stretch[SegmentRef]], state: ReportState) -> None:
        rows = [row for row in self._hours(part) if state.since is None or row["hour"] * 1000 >= state.since]
        tables = [pa.Table.from_pylist(rows, TRAFFIC)]
        if former is not None:
            tables.append(pq.read_table(former, columns=TRAFFIC.names).cast(TRAFFIC))
        sums: list[Any] = [(name, "sum") for name in _COUNTS]
        grouped = pa.concat_tables(tables).group_by(_KEYS).aggregate([*sums, ("lag_max_ms", "max")])
        whole = grouped.select([*_KEYS, *(f"{n}_sum" for n in _COUNTS), "lag_max_ms_max"]).rename_columns(TRAFFIC.names)
        ordered = whole.cast(TRAFFIC).sort_by([(name, "ascending") for name in _KEYS])
        pq.write_table(ordered.replace_schema_metadata({METADATA: state.to_json()}), path, compression="zstd")

    def table(self) -> pa.Table:
        """All of the report."""
        with self._fetched() as path:
            return TRAFFIC.empty_table() if path is None else pq.read_table(path).cast(TRAFFIC)

    def _hours(self, part: Sequence[Stretch[SegmentRef]]) -> Iterator[dict[str, Any]]:
        if not part:
            return
        found: dict[int, list[HourOfRows]] = {}
        for number, *numbers in self._counted(part):
            found.setdefault(number, []).append(HourOfRows(*numbers))
        lacking = [n for n, s in enumerate(part) if sum(each.rows for each in found.get(n, ())) < len(s.rows)]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            footers = dict(zip(lacking, pool.map(self.store.footer, (part[n].segment for n in lacking)), strict=True))
        for number, stretch in enumerate(part):
            yield from hours_of(stretch, found.get(number, []), footers.get(number))

    def _counted(self, part: Sequence[Stretch[SegmentRef]]) -> list[Any]:
        columns = ("segment", "sequence", "timestamp_ns", "subject", "subject_raw", "headers", "payload")
        try:
            frame = self._frame(part, columns)
            from pyspark.sql import functions as f

            subject = f.coalesce(f.octet_length("subject_raw"), f.octet_length("subject"))
            size = subject + f.coalesce(f.octet_length("headers"), f.lit(0)) + f.octet_length("payload")
            hour = f.expr(f"timestamp_ns div {HOUR_NS}")
            grouped = frame.groupBy("segment", hour.alias("hour")).agg(
                f.count(f.lit(1)),
                f.sum(size),
                f.min("sequence"),
                f.max("sequence"),
                f.sum(f.expr(f"(timestamp_ns % {HOUR_NS}) div 1000000")),
                f.min("timestamp_ns"),
            )
            return list(grouped.collect())
        except Exception as error:  # Spark raises its own, py4j's and the source's errors
            raise _of_spark("report traffic", error) from error
