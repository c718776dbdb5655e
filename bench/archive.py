"""Benchmarks of reading and writing an archive: listings, compaction, replay and Spark queries.

`listing.1m`: the choice of the next segments in an archive of 1,000,000 of them.
`listing.egress_1m`: the memory that egress needs to find its position in such an archive, and to walk it for holes,
with at most 20 LISTs at the start of a session and one before each put.
`compaction.merge`: inputs to a verified output, beside pyarrow reading and writing the same rows.
`compaction.delete_small`: milliseconds for each segment of 15 messages that is proved to be in the remaining segments,
and deleted, by `local[2]` of Spark as in `compaction.spark`.
`compaction.spark`: four such outputs by `local[2]` of Spark, beside the same merges one after the other on one core;
without the start of the session and of its Python processes.
`memory.merge.small`, `memory.merge.large`: the peak of a process that merges 0.2 and 4 GB of rows.
`replay.bytes_read`: bytes read to replay 1 % of the time of 10,000 segments, over all their bytes.
`query.time_1pct`: the same share for the bytes that Spark reads in a query of all columns.
`compaction.stored.*`: stored bytes per message of an emulated fleet after one merge, beside those before it.

The object store of the listings is synthetic: it makes its keys on request, so that the figure is Floe's own work over
the pages of a listing, not a server's.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from functools import cache, partial
from pathlib import Path

import pyarrow.parquet as pq

from bench.harness import REPEATS, Bench, BenchResult, measure_paired, memory_mb, payloads, run_in_child
from common.archive.columns import record_batch
from common.archive.documents import ChainDocument, ChainStore, StreamDocument
from common.archive.keys import Layout, SegmentName
from common.archive.segment import Footer, Ledger, Reason, SegmentRef
from common.archive.store import LIST_PAGE_SEGMENTS, SegmentStore
from common.archive.writer import SegmentWriter, SpooledSegment
from common.chain import Chain
from common.clock import NS_PER_S, SystemClock, format_time
from common.nats.api import create_stream, stream_info
from common.objects.local import LocalObjects
from common.objects.port import ObjectInfo
from common.open import open_store
from common.sequences import CoverageSet, SequenceRange
from common.service.process import ThreadPool
from common.service.progress import Progress
from common.settings.loader import parse
from common.settings.root import Settings
from common.tasks import Stop
from compaction.merge import COMPRESSION_LEVEL, MergedSegment, merge
from compaction.plan import Output, supersession_of_merge
from compaction.run import Compaction, LocalRunner, Runner, Selection, merge_output
from compaction.tombstones import TombstoneStore
from egress.archive import Archive
from egress.deps import Pools
from infra.emulator import DEFAULT_SUBJECT, Fleet, read_facts
from infra.local.nats import NatsServer
from ingress.chains.plan import plan_from_listings
from ingress.recovery.replay import Replay
from ingress.recovery.request import RecoveryParts, ReplayOptions, ReplayRequest
from tests.support.stores import CountingObjects

CHAIN, LAYOUT = Chain("bench", "BENCH"), Layout("data")
LEVEL0_SEGMENTS, LEVEL1_SEGMENTS = 900_000, 100_000  # segments of level 0, and of level 1 before them
SEGMENT_ROWS = 1000  # sequences of a segment
SEARCHES = 300
SEED = 7


class SyntheticStore:
    """An object store with listings only, made on request. `requests`: the LISTs that a server would have needed."""

    def __init__(self) -> None:
        self.requests = 0
        # Of each level: its number, the sequences before it, and the number of its segments.
        self._levels = {
            LAYOUT.segments_prefix(CHAIN, 0): (0, LEVEL1_SEGMENTS * SEGMENT_ROWS, LEVEL0_SEGMENTS),
            LAYOUT.segments_prefix(CHAIN, 1): (1, 0, LEVEL1_SEGMENTS),
        }

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        if prefix == LAYOUT.partition_prefix(CHAIN):
            prefix = LAYOUT.segments_prefix(CHAIN, 0)
        level, before, count = self._levels.get(prefix, (0, 0, 0))

        def key(number: int) -> str:
            first = before + number * SEGMENT_ROWS + 1
            coverage = SequenceRange(first, first + SEGMENT_ROWS - 1)
            return LAYOUT.segment(SegmentName(CHAIN, level, coverage, f"{number:016x}"))

        start = bisect_right(range(count), start_after, key=key)
        stop = count if limit is None else min(count, start + limit)
        self.requests += max(1, -(-(stop - start) // LIST_PAGE_SEGMENTS))
        return [ObjectInfo(key(number), 100_000, 1.0, "e") for number in range(start, stop)]


def measure_search(store: SegmentStore, position: int) -> float:
    """Return the milliseconds that the choice of the next segments takes."""
    started = time.perf_counter()
    found = plan_from_listings(store, CHAIN, position, None, frozenset()).stretches
    elapsed = (time.perf_counter() - started) * 1000
    assert [each.rows.first for each in found[:1]] == [position], f"expected rows from {position}, found {found[:1]}"
    return elapsed


def measure_listing() -> BenchResult:
    """Measure the greater of two medians: at positions in level 0, and at positions that only level 1 covers."""
    store, rng = SegmentStore(SyntheticStore(), LAYOUT), random.Random(SEED)  # type: ignore[arg-type]
    old = [measure_search(store, rng.randint(1, LEVEL1_SEGMENTS * SEGMENT_ROWS)) for _ in range(SEARCHES)]
    new = [
        measure_search(
            store, rng.randint(LEVEL1_SEGMENTS * SEGMENT_ROWS + 1, (LEVEL1_SEGMENTS + LEVEL0_SEGMENTS) * SEGMENT_ROWS)
        )
        for _ in range(SEARCHES)
    ]
    return BenchResult(round(max(statistics.median(old), statistics.median(new)), 2))


class HighMarks:
    """The high-water mark of every chain: the last sequence of the archive."""

    async def get(self, _chain: Chain) -> int:
        return (LEVEL1_SEGMENTS + LEVEL0_SEGMENTS) * SEGMENT_ROWS


async def open_session(objects: SyntheticStore) -> Archive:
    """List as a session does before it reads, and before a put. Fails if it needs too many LISTs."""
    store = SegmentStore(objects, LAYOUT)  # type: ignore[arg-type]
    threads = ThreadPool("bench", 1)
    archive = Archive(CHAIN, 1, store, None, HighMarks(), Pools(threads, threads, threads))  # type: ignore[arg-type]
    await archive.load()
    end = (LEVEL1_SEGMENTS + LEVEL0_SEGMENTS) * SEGMENT_ROWS
    assert archive.end == end, f"expected the end {end}, found {archive.end}"
    assert objects.requests <= 20, f"expected at most 20 LISTs at the start, found {objects.requests}"
    before = objects.requests
    assert not await archive.is_covered(end + 1), "expected nothing behind the end"
    assert objects.requests == before + 1, f"expected one LIST before a put, found {objects.requests - before}"
    return archive


def measure_walk() -> BenchResult:
    """Measure the most MB by which the process grows while a session begins and the whole chain is walked."""
    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    archive, covered = asyncio.run(open_session(SyntheticStore())), CoverageSet()
    for page in archive.pages():
        for ref in page:
            covered.add(ref.coverage)
    assert covered.stretches() == [SequenceRange(1, archive.end)], "expected no hole"
    return BenchResult(round(memory_mb("VmHWM") - before, 1))


INPUTS, INPUT_ROWS = 8, 50_000


def inputs(
    store: SegmentStore, count: int = INPUTS, chain: Chain = CHAIN, rows: int = INPUT_ROWS, step: int = 1
) -> list[SegmentRef]:
    """Put `count` segments of `rows` messages each, one of every `step` sequences."""
    bodies, found = payloads(), list[SegmentRef]()
    for number in range(count):
        coverage = SequenceRange(number * rows * step + 1, (number + 1) * rows * step)
        sequences = range(coverage.first, coverage.last + 1, step)
        times = [START_S * NS_PER_S + s for s in sequences]
        subjects = [b"nodes.%d" % (s % 1000) for s in sequences]
        values = [bodies[s % len(bodies)] for s in sequences]
        spooled = spool_segment(store.new_spool(), chain, coverage, times, subjects, values)
        found.append(store.put(spooled))
        spooled.path.unlink()
    return found


def spool_segment(
    path: Path, chain: Chain, coverage: SequenceRange, times: list[int], subjects: list[bytes], bodies: list[bytes]
) -> SpooledSegment:
    """Write a segment as egress does, with messages of sequences of `coverage` at equal distances."""
    count = len(times)
    sequences = range(coverage.first, coverage.last + 1, len(coverage) // count)
    writer = SegmentWriter(path, level=0, compression_level=1)
    writer.append(record_batch(sequences, times, subjects, [None] * count, bodies))
    ledger = Ledger({Reason.DELETED: len(coverage) - count} if count < len(coverage) else {})
    # The writer adds raw bytes and times.
    return writer.finish(Footer(chain, 0, coverage, count, ledger, 0, None, None, None, "bench"))


def plain_copy(paths: list[Path], target: Path) -> float:
    """Return the seconds in which pyarrow reads the rows by row group, and writes them with the same codec."""
    started = time.perf_counter()
    with pq.ParquetFile(paths[0]) as first:
        schema = first.schema_arrow
    options = {"compression": "zstd", "compression_level": COMPRESSION_LEVEL, "use_dictionary": ["subject"]}
    with pq.ParquetWriter(target, schema, **options) as writer:
        for path in paths:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(group))
    return time.perf_counter() - started


def merge_rate() -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder:
        store = SegmentStore(LocalObjects(Path(folder)), Layout("data"))
        refs = inputs(store)
        raw = sum(store.footer(ref).raw_bytes for ref in refs) / 1e6
        output = Output(1, tuple(refs))
        paths = [Path(folder) / ref.key for ref in refs]

        def merged() -> float:
            started = time.perf_counter()
            ref = merge(store, output).ref
            elapsed = time.perf_counter() - started
            store.delete(ref)
            return raw / elapsed

        return measure_paired(floor=lambda: raw / plain_copy(paths, Path(folder) / "copy.parquet"), value=merged)


TINY_SEGMENTS, TINY_ROWS = 1_000, 15


def delete_rate() -> BenchResult:
    """Measure the ms for each small segment that a run proves and deletes; half of its sequences have a row."""
    from tests.support.spark import SharedSpark  # starts Java

    def measure_delete() -> float:
        with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder:
            settings = settings_in(folder)
            store = open_store(settings)
            ChainStore(store.objects, store.layout).create_chain(CHAIN, ChainDocument((), 1, 1))
            refs = inputs(store, TINY_SEGMENTS, rows=TINY_ROWS, step=2)
            above = merge(store, Output(1, tuple(refs[:-1]))).ref
            TombstoneStore(store.objects, store.layout).put(supersession_of_merge(above, refs[:-1]))
            run = Compaction(store, (), 0.0, SharedSpark(settings))
            started = time.perf_counter()
            report = run.run(Selection())
            elapsed = time.perf_counter() - started
            assert (len(report.deleted), report.failures) == (TINY_SEGMENTS - 1, [])
            return elapsed

    for _ in range(2):
        measure_delete()  # starts the Python processes, then has Java compile the code that runs often
    seconds = statistics.median(measure_delete() for _ in range(REPEATS))
    return BenchResult(round(1000 * seconds / TINY_SEGMENTS, 3))


#: Nodes of a fleet, and how many segments are merged: those of a day, or of a tenth of it for the largest fleet.
SEGMENTS_BY_NODES = {10: 288, 100: 288, 1000: 29}
INTERVAL_S = 300  # seconds; each node publishes once in it, and its messages are one segment


def stored_bytes(nodes: int) -> BenchResult:
    """Measure the bytes per message after a merge, beside those in segments of egress with default settings."""
    fleet, segments = Fleet(read_facts(), seed=SEED, nodes=nodes, interval=INTERVAL_S), SEGMENTS_BY_NODES[nodes]
    with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder:
        store = SegmentStore(LocalObjects(Path(folder)), Layout("data"))
        refs, count = list[SegmentRef](), nodes * segments
        for turn in range(segments):
            first = turn * nodes + 1
            times = [(START_S + turn * INTERVAL_S) * 10**9 + n * INTERVAL_S * 10**9 // nodes for n in range(nodes)]
            subjects = [DEFAULT_SUBJECT.format(sender=fleet.sender(node)).encode() for node in range(nodes)]
            bodies = [fleet.document(node, turn, time / 1e9) for node, time in enumerate(times)]
            coverage = SequenceRange(first, first + nodes - 1)
            refs.append(store.put(spool_segment(store.new_spool(), CHAIN, coverage, times, subjects, bodies)))
        after = merge(store, Output(1, tuple(refs))).ref.size
        store.close()
    before = sum(ref.size for ref in refs)
    return BenchResult(round(after / count, 1), round(before / count, 1), round(after / before, 3))


OUTPUTS = 4


def settings_in(folder: str) -> Settings:
    return parse(f"store: {{url: 'file://{folder}/store'}}\nspool_dir: '{folder}/spool'\n", "bench")[0]


def spark_rate() -> BenchResult:
    from tests.support.spark import SharedSpark  # starts Java

    with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder:
        settings = settings_in(folder)
        store, spark = open_store(settings), SharedSpark(settings)
        chains = [Chain("bench", f"BENCH_{number}") for number in range(OUTPUTS)]
        outputs = [Output(1, tuple(inputs(store, INPUTS, chain))) for chain in chains]
        raw = sum(store.footer(ref).raw_bytes for output in outputs for ref in output.inputs) / 1e6

        def rate(runner: Runner) -> float:
            started = time.perf_counter()
            made = runner.map(merge_output, outputs)
            elapsed = time.perf_counter() - started
            for each in made:
                assert isinstance(each, MergedSegment), each
                store.delete(each.ref)
            return raw / elapsed

        def on_one_core() -> float:
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {min(before)})  # this thread and those that it starts: a merge reads ahead in one
            try:
                return rate(LocalRunner(store))
            finally:
                os.sched_setaffinity(0, before)

        for _ in range(2):
            rate(spark)  # starts the Python processes, then has Java compile the code that runs often
        return measure_paired(floor=on_one_core, value=lambda: rate(spark))


MERGES = {"small": 4, "large": 80}  # inputs of about 50 MB raw


@cache
def merge_peak(size: str) -> float:
    """Return the peak MB of a merge in a process of its own: the median, since it varies with the reader's lead."""
    with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder:
        store = SegmentStore(LocalObjects(Path(folder)), Layout("data"))
        refs = inputs(store, MERGES[size])
        raw = sum(store.footer(ref).raw_bytes for ref in refs)
        store.close()
        found = [run_in_child("bench.archive", folder) for _ in range(REPEATS)]
        assert all(each["raw_bytes"] == raw for each in found), found
        return statistics.median(each["peak"] for each in found)


def merge_in_child(folder: Path) -> None:
    """Merge all segments of the bench in this process; print its peak in MB as JSON."""
    store = SegmentStore(LocalObjects(folder), Layout("data"))
    merged = merge(store, Output(1, tuple(store.list(CHAIN, level=0))))
    print(json.dumps({"peak": memory_mb("VmHWM"), "raw_bytes": merged.raw_bytes}))
    store.delete(merged.ref)


def large_merge() -> BenchResult:
    small, large = merge_peak("small"), merge_peak("large")
    return BenchResult(large, floor=small, ratio=round(large / small, 3))


SMALL_SEGMENTS, SMALL_ROWS, PAYLOAD_BYTES = 10_000, 50, 1000
START_S = 1_700_000_000  # seconds; one message a second
REPLAY_DIVISOR = 100  # of the archive, one of which is replayed


def fill_folder(folder: Path) -> int:
    """Write segments as egress does, directly into the folder; return their bytes."""
    layout, noise, total = Layout("data"), random.Random(1).randbytes(PAYLOAD_BYTES + SMALL_ROWS * SMALL_SEGMENTS), 0
    for number in range(SMALL_SEGMENTS):
        coverage = SequenceRange(number * SMALL_ROWS + 1, (number + 1) * SMALL_ROWS)
        sequences = range(coverage.first, coverage.last + 1)
        times = [(START_S + s) * NS_PER_S for s in sequences]
        bodies = [noise[s : s + PAYLOAD_BYTES] for s in sequences]
        done = spool_segment(folder / "spool.parquet", CHAIN, coverage, times, [b"bench.a"] * SMALL_ROWS, bodies)
        path = folder / layout.segment(SegmentName(CHAIN, 0, coverage, done.sha256[:16]))
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(done.path, path)
        total += done.size
    return total


async def replay_part(folder: Path, url: str) -> int:
    """Replay a part of the time in the middle; return the bytes that were read."""
    objects = CountingObjects(folder)
    store, documents = SegmentStore(objects, Layout("data")), ChainStore(objects, Layout("data"))
    documents.create_stream(CHAIN, StreamDocument({"name": "BENCH"}, "t0", None))
    documents.create_chain(CHAIN, ChainDocument((), 1, 1))
    settings = parse(f"nats: {{url: '{url}'}}\nstore: {{url: 'file://{folder}', prefix: data}}\n", "bench")[0]
    whole = SMALL_SEGMENTS * SMALL_ROWS
    first = START_S + whole // 2 + 7
    begin, end = format_time(first * NS_PER_S), format_time((first + whole // REPLAY_DIVISOR) * NS_PER_S)
    request = ReplayRequest("bench", "BENCH", "BACK", from_time=begin, to_time=end)
    work = Replay(settings, request, ReplayOptions(), RecoveryParts(store, documents, SystemClock(), Progress()))
    objects.read = 0
    async with work.open_connection() as client:
        await create_stream(
            client, {"name": "BACK", "subjects": ["bench.>"], "allow_batched": True, "allow_atomic": True}
        )
        await work.run(client, Stop())
        info = await stream_info(client, "BACK")
    assert info is not None
    assert info.messages == whole // REPLAY_DIVISOR, info.messages
    store.close()
    return objects.read


def bytes_read() -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="floe-bench-") as name, NatsServer() as server:
        folder = Path(name) / "store"
        folder.mkdir()
        total = fill_folder(folder)
        read = asyncio.run(replay_part(folder, server.url))
    return BenchResult(round(read / total, 4))


def measure_query() -> BenchResult:
    """Measure the bytes that driver and executors read for a part of the time in the middle, planning included."""
    from tests.support.spark import counted_bytes, counting_source, spark_session  # starts Java

    with tempfile.TemporaryDirectory(prefix="floe-bench-") as name:
        folder, counts, whole = Path(name) / "store", Path(name) / "counts", SMALL_SEGMENTS * SMALL_ROWS
        folder.mkdir()
        counts.mkdir()
        total = fill_folder(folder)
        ChainStore(LocalObjects(folder), Layout("data")).create_chain(CHAIN, ChainDocument((), 1, 1))
        spark_session().dataSource.register(counting_source(counts))
        first = START_S + whole // 2 + 7
        begin, end = format_time(first * NS_PER_S), format_time((first + whole // REPLAY_DIVISOR) * NS_PER_S)
        options = {"url": f"file://{folder}", "since": begin, "until": end}
        frame = spark_session().read.format("floe_counted").options(**options).load()
        sizes = [row.size for row in frame.selectExpr("octet_length(payload) AS size").collect()]
        assert len(sizes) == whole // REPLAY_DIVISOR, len(sizes)
        return BenchResult(round(counted_bytes(counts) / total, 4))


BENCHES = [
    Bench("listing.1m", "ms", "value <= 10", measure_listing),
    Bench("listing.egress_1m", "MB", "value <= 20", measure_walk),
    Bench("replay.bytes_read", "1", "<= 0.03", bytes_read),
    Bench("query.time_1pct", "1", "value <= 0.03", measure_query),
    *(
        Bench(f"compaction.stored.{n}", "B/message", "ratio <= 0.8", partial(stored_bytes, n))
        for n in SEGMENTS_BY_NODES
    ),
    Bench("compaction.delete_small", "ms", "value <= 1.5", delete_rate),
    Bench("compaction.merge", "MB/s raw", "ratio >= 0.85", merge_rate),
    Bench("compaction.spark", "MB/s raw", "ratio >= 1.4", spark_rate),
    Bench("memory.merge.small", "MB", "value <= 600", lambda: BenchResult(merge_peak("small"))),
    Bench("memory.merge.large", "MB", "ratio <= 1.15, value <= 600", large_merge),
]

if __name__ == "__main__":
    merge_in_child(Path(sys.argv[1]))
