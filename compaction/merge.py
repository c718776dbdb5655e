"""Makes one output: read, unite, spool, put, read back. No Spark here: tasks and `--engine local` call it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import SegmentCorrupt, Unavailable
from common.failpoints import failpoint
from common.segments.parquet import SegmentReader, SegmentWriter, SpooledSegment
from common.segments.segment import Footer, SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from compaction.ahead import ahead
from compaction.ledgers import Tally, merged_footer
from compaction.plan import Output
from compaction.union import union

COMPRESSION_LEVEL = 3
# Page and file metadata may make an output a little larger than its inputs were.
SPOOL_MARGIN = 1.1


@dataclass(frozen=True, slots=True)
class Merged:
    """An output that is in the store and read back, `ref`. `inputs`: how many it was made of, `size` their
    stored bytes. `raw_bytes`: of its rows, before compression. `late`: how many rows came with an input that
    another had not read, and between which sequences; None: none did."""

    ref: SegmentRef
    inputs: int
    size: int
    rows: int
    raw_bytes: int
    late: tuple[int, SequenceRange] | None = None


def merge(store: SegmentStore, output: Output) -> Merged:
    """Make `output` and return it once it read back well. The same inputs always give the same bytes.

    Memory is bounded by a row group of the output and one of each input that overlaps it. Raises
    SegmentCorrupt for an input that cannot be believed, DataError (E-FORK) for inputs that contradict each
    other, SegmentGone for one that was deleted, Unavailable (E-SPOOL) without the disk space.
    """
    # The crash order: a spool file is nobody's; what is put is a complete, contained segment that readers may
    # already use; only a later step, with its own proof, writes a tombstone.
    spooled, late = _spool(store, output)
    try:
        failpoint("compaction.put")
        ref = store.put(spooled)
    finally:
        spooled.path.unlink(missing_ok=True)
    failpoint("compaction.read_back")
    check_read_back(store, ref, spooled.footer)
    return Merged(ref, len(output.inputs), output.size, spooled.footer.rows, spooled.footer.raw_bytes, late)


def check_read_back(store: SegmentStore, ref: SegmentRef, footer: Footer) -> None:
    """Read order and coverage of a segment from the store again. Raises SegmentCorrupt."""
    with store.open(ref) as reader:
        if reader.footer != footer:
            raise SegmentCorrupt(f"segment {ref.key}: the footer read back is not the one written")
        rows = sum(batch.num_rows for batch in reader.batches(columns=["sequence"]))
    if rows != footer.rows:
        raise SegmentCorrupt(f"segment {ref.key}: expected {footer.rows} rows, read back {rows}")


def _spool(store: SegmentStore, output: Output) -> tuple[SpooledSegment, tuple[int, SequenceRange] | None]:
    path = store.new_spool()
    _check_space(shutil.disk_usage(path.parent).free, output)
    writer = SegmentWriter(
        path,
        level=output.level,
        compression_level=COMPRESSION_LEVEL,
        subject_statistics=store.subject_statistics,
    )
    with _aborted_on_error(writer):
        footers: dict[str, Footer] = {}
        tally = Tally(output, footers)
        spooled = _write(store, output, writer, footers, tally)
    return spooled, tally.late


def _write(
    store: SegmentStore, output: Output, writer: SegmentWriter, footers: dict[str, Footer], tally: Tally
) -> SpooledSegment:

    def opened(segment: SegmentRef) -> SegmentReader:
        failpoint("compaction.open")
        reader = store.open(segment)
        footers[segment.key] = reader.footer
        return reader

    for batch in ahead(union(output.inputs, opened)):
        failpoint("compaction.merge")
        tally.add(batch.column("sequence"))
        writer.append(batch)
    failpoint("compaction.spool_full")
    return writer.finish(merged_footer(output, footers, tally))


@contextmanager
def _aborted_on_error(writer: SegmentWriter) -> Iterator[None]:
    try:
        yield
    except BaseException:
        writer.abort()
        raise


def _check_space(free: int, output: Output) -> None:
    needed = int(output.size * SPOOL_MARGIN) + max(s.size for s in output.inputs)
    if free < needed:
        raise Unavailable(
            f"spool folder: expected {needed} free bytes to merge {output.coverage}, found {free}",
            hint="free space there or set spool_dir",
            code="E-SPOOL",
        )
