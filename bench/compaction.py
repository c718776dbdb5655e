"""`compaction.merge`: inputs to a verified output, beside pyarrow reading and writing the same rows."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from bench.floors import payloads
from bench.harness import Bench, Figure, paired
from common.chain import Chain
from common.objects.local import LocalObjects
from common.segments.keys import Layout
from common.segments.reader import SegmentWriter, record_batch
from common.segments.segment import Footer, Ledger, SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from compaction.merge import COMPRESSION_LEVEL, merge
from compaction.plan import Output

CHAIN = Chain("bench", "BENCH")
SEGMENTS, ROWS = 8, 50_000


def inputs(store: SegmentStore) -> list[SegmentRef]:
    """Adjacent segments of level 0 with messages of 1 KB, as egress writes them."""
    bodies = payloads()
    return [_segment(store, SequenceRange(n * ROWS + 1, (n + 1) * ROWS), bodies) for n in range(SEGMENTS)]


def _segment(store: SegmentStore, coverage: SequenceRange, bodies: list[bytes]) -> SegmentRef:
    sequences = list(range(coverage.first, coverage.last + 1))
    times = [1_700_000_000_000_000_000 + s for s in sequences]
    values = [bodies[s % len(bodies)] for s in sequences]
    subjects = [b"nodes.%d" % (s % 1000) for s in sequences]
    batch = record_batch(sequences, times, subjects, [None] * len(sequences), values)
    raw = sum(map(len, values)) + sum(map(len, subjects))
    writer = SegmentWriter(store.new_spool(), level=0, compression_level=1)
    writer.append(batch)
    footer = Footer(CHAIN, 0, coverage, ROWS, Ledger(), raw, times[0], times[-1], None, "bench")
    return store.put(writer.finish(footer))


def plain_copy(paths: list[Path], target: Path) -> float:
    """Seconds in which pyarrow reads the rows, row group by row group, and writes them, same codec."""
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


def merge_rate() -> Figure:
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

        return paired(
            "compaction.merge",
            "MB/s raw",
            floor=lambda: raw / plain_copy(paths, Path(folder) / "copy.parquet"),
            value=merged,
        )


BENCHES = [Bench("compaction.merge", "MB/s raw", "ratio >= 0.6", merge_rate)]
