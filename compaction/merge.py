"""Merge of one output: read, unite, spool, put, read back.

It does not use Spark: Spark tasks and `--engine local` call it. Segments that do not overlap are passed through, batch
by batch.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute

from common.archive.columns import count_up_to
from common.archive.guard import MIB
from common.archive.reader import SegmentReader
from common.archive.segment import UNREAD_REASONS, Footer, Ledger, MergeInputs, Reason, SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import Batches, SegmentBatches, check_forks, merge_windows
from common.archive.writer import SegmentWriter, SpooledSegment
from common.errors import SegmentCorrupt, Unavailable
from common.failpoints import failpoint
from common.metrics import version
from common.sequences import SequenceRange, Stretch, cover, preference
from compaction.plan import Output

pc: Any = pyarrow.compute  # its stubs do not type kernels, nor the arrays that these accept


class RowTally:
    """Count of rows by stretch of the inputs' cover.

    `late`: the largest possible number of rows that one input has and another had not read, and the range that holds
    them; set by `ledger`. `footers`: those of the inputs, by key, each present before rows of its coverage are added.
    """

    def __init__(self, output: Output, footers: Mapping[str, Footer]) -> None:
        coverage = output.coverage
        self.stretches: list[Stretch[SegmentRef]] = cover(output.inputs, coverage.first, coverage.last)
        self.rows = [0] * len(self.stretches)
        self.late: tuple[int, SequenceRange] | None = None
        self._footers = footers
        self._unread: dict[int, _MissingSequences] = {}
        self._index = 0

    def add(self, sequences: Any) -> None:
        """Count rows by their sequences, which ascend from call to call and lie in the coverage."""
        while len(sequences):
            last = self.stretches[self._index].rows.last
            inside = len(sequences) if sequences[-1].as_py() <= last else count_up_to(sequences, last)
            self.rows[self._index] += inside
            if (gaps := self._gaps(self._index)) is not None:
                gaps.add(sequences.slice(0, inside))
            sequences = sequences.slice(inside)
            self._index += bool(len(sequences))

    def _gaps(self, index: int) -> _MissingSequences | None:
        """Return the missing sequences in the unread part of the stretch; None if its segment read all of it."""
        stretch = self.stretches[index]
        unread = self._footers[stretch.segment.key].unread
        within = unread and unread.intersection(stretch.rows)
        return None if within is None else self._unread.setdefault(index, _MissingSequences(within))

    def ledger(self) -> tuple[Ledger, SequenceRange | None]:
        """Return the ledger of sequences without a row, and the range of the unread ones. Sets `late`: call it once."""
        total, unread = Ledger(), None
        for index, (stretch, rows) in enumerate(zip(self.stretches, self.rows, strict=True)):
            found, gaps = self._footers[stretch.segment.key], self._gaps(index)
            ledger = _ledger_of_missing(len(stretch.rows) - rows, found, gaps)
            total = total.plus(ledger)
            if gaps is None:
                continue
            within, still = gaps.within, ledger.unread()
            if (count := min(found.ledger.unread(), len(within)) - still) > 0:
                before, begin = self.late or (0, within)
                self.late = before + count, SequenceRange(begin.first, within.last)
            if still:
                here = gaps.span()
                unread = SequenceRange((unread or here).first, here.last)
        return total, unread


class _MissingSequences:
    """The sequences of `within` that have no row. Rows are added in ascending order."""

    def __init__(self, within: SequenceRange) -> None:
        self.within, self._next = within, within.first
        self._first = self._last = self._missing = 0

    def add(self, sequences: Any) -> None:
        first, last = (count_up_to(sequences, n) for n in (self.within.first - 1, self.within.last))
        for sequence in sequences.slice(first, last - first).to_pylist():
            self._add_missing(sequence - 1)
            self._next = sequence + 1

    def _add_missing(self, last: int) -> None:
        if self._next <= last:
            self._first, self._last = self._first or self._next, last
            self._missing += last - self._next + 1
            self._next = last + 1

    @property
    def missing(self) -> int:
        """Their number. Only valid once all rows are added."""
        self._add_missing(self.within.last)
        return self._missing

    def span(self) -> SequenceRange:
        """Return the range from the first to the last. Only valid once all rows are added, and if some are missing."""
        self._add_missing(self.within.last)
        return SequenceRange(self._first, self._last)


def _ledger_of_missing(missing: int, footer: Footer, gaps: _MissingSequences | None) -> Ledger:
    """Return the part of an input's ledger that belongs to `missing` sequences of a stretch of it, as far as it is
    known; the rest counts as `unattributed`.

    A ledger counts sequences and does not name them. Gone sequences lie in `unread`; a sequence of which another input
    has a row is no longer gone. For the other reasons, the part is known if all sequences that the input lacks lie in
    the stretch, or if all have the same reason.
    """
    ledger = footer.ledger
    others = Ledger({r: count for r, count in ledger.counts.items() if count and r not in UNREAD_REASONS})
    gone = Ledger()
    if gaps is not None and footer.unread is not None:
        is_all_gone = ledger.unread() == len(footer.unread) or not others.counts
        gone = _ledger_of_gone(gaps.missing if is_all_gone else min(gaps.missing, ledger.unread()), ledger)
    rest = missing - gone.total()
    if rest == others.total():
        return gone.plus(others)
    if len(others.counts) == 1 and rest < others.total():
        return gone.plus(Ledger(dict.fromkeys(others.counts, rest) if rest else {}))
    return gone.plus(Ledger({Reason.UNATTRIBUTED: rest} if rest else {}))


def _ledger_of_gone(count: int, ledger: Ledger) -> Ledger:
    """Return `count` of the sequences that `ledger` counts as gone; the worse of two reasons if either is possible."""
    reasons: dict[Reason | str, int] = {r: ledger.counts[r] for r in UNREAD_REASONS if ledger.counts.get(r)}
    if not count:
        return Ledger()
    if sum(reasons.values()) == count:
        return Ledger(reasons)
    return Ledger({next(iter(reasons)) if len(reasons) == 1 else Reason.GONE_FROM_HOLE: count})


def merged_footer(output: Output, footers: Mapping[str, Footer], tally: RowTally) -> Footer:
    """Return the footer of the output, without raw bytes and timestamps: the writer adds them.

    It holds no time of the merge and no host, so that two jobs, or a repeated one, write the same bytes.
    """
    sampling, sampling_digest = _sampling(footers.values())
    ledger, unread = tally.ledger()
    # The tip of the input that reaches furthest among those with a tip; None if no message was examined for any.
    furthest = sorted(output.inputs, key=preference, reverse=True)
    tip = next((found for s in furthest if (found := footers[s.key].tip)), None)
    return Footer(
        chain=output.chain,
        level=output.level,
        coverage=output.coverage,
        rows=sum(tally.rows),
        ledger=ledger,
        raw_bytes=0,
        first_timestamp_ns=None,
        last_timestamp_ns=None,
        tip=tip,
        writer=f"floe {version()} compaction",
        sampling=sampling,
        sampling_digest=sampling_digest,
        inputs=MergeInputs.of([s.name for s in output.inputs]),
        unread=unread,
    )


def _sampling(footers: Iterable[Footer]) -> tuple[Mapping[str, Any] | None, str]:
    """Return the settings that left messages out, and their digest: those of all inputs if equal, else
    `{"merged": {digest: settings}}`.

    The digest of a copy without sampling is empty. A merge of sampled and whole segments is a sampled one (I8).
    """
    found: dict[str, Any] = {}
    for footer in footers:
        parts = (footer.sampling or {}).get("merged")
        found |= parts if isinstance(parts, dict) else {footer.sampling_digest: footer.sampling}
    if len(found) == 1:
        [(digest, settings)] = found.items()
        return settings, digest
    return {"merged": found}, hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


def union(segments: Iterable[SegmentRef], open_segment: Callable[[SegmentRef], SegmentReader]) -> Batches:
    """Yield the rows of `segments` in ascending order; rows of one sequence in several segments once, in bounded
    memory: of overlapping segments, the rows up to the sequence that every open one has reached are merged, one batch
    of each at a time. Equal sequences must have equal content; otherwise two histories share one name (a fork).

    A segment is opened when its coverage is reached and closed after its last row. Raises DataError (E-FORK) that names
    two segments with different rows of one sequence, UnreadableSegment, and the errors of the store.
    """

    def read(segment: SegmentRef) -> Batches:
        with open_segment(segment) as reader:
            yield from reader.batches()

    # Of equal rows the first is kept: the row of the segment that the cover rule prefers.
    with closing(merge_windows(segments, read)) as windows:
        for parts in windows:
            yield parts[0][1] if len(parts) == 1 else _merge_batches(parts)


def _merge_batches(parts: SegmentBatches) -> pa.RecordBatch:
    """Return the rows of overlapping batches, sorted, the first row of each sequence. Raises DataError for a fork."""
    table = pa.Table.from_batches([batch for _, batch in parts])
    order: Any = pc.sort_indices(table.column("sequence"))  # stable: equal sequences keep the order of the parts
    merged = table.take(order)
    sequences: Any = merged.column("sequence").combine_chunks()
    repeats: Any = pc.equal(sequences[1:], sequences[:-1])
    if pc.any(repeats).as_py():
        check_forks(parts)
        merged = merged.filter(pa.concat_arrays([pa.array([True]), pc.invert(repeats)]))
    [batch] = merged.combine_chunks().to_batches()
    return batch


T = TypeVar("T")


def prefetch(items: Generator[T, None, None], depth: int = 4) -> Iterator[T]:
    """Yield `items` in order, up to `depth` of them made before they are requested; an error is raised at its place.

    If the caller stops early, `items` is closed before this returns.
    """
    pool = ThreadPoolExecutor(1, "floe-ahead")
    making: deque[Future[T | None]] = deque()
    try:
        making.extend(pool.submit(next, items, None) for _ in range(depth + 1))
        while (item := making.popleft().result()) is not None:
            making.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)  # waits for the item that is being made
        items.close()


# The stubs describe an older pyarrow.
concat_batches: Any = pa.concat_batches  # type: ignore[attr-defined]
COMBINED_BYTES = MIB  # of rows that are handed on together: handing on a batch costs more than a few rows


def combine(batches: Batches) -> Batches:
    """Yield the rows of `batches` in fewer ones, of COMBINED_BYTES or more except the last."""
    parts: list[pa.RecordBatch] = []
    size = 0
    with closing(batches):
        for batch in batches:
            parts.append(batch)
            size += batch.nbytes
            if size >= COMBINED_BYTES:
                yield batch if len(parts) == 1 else concat_batches(parts)
                parts, size = [], 0
        if parts:
            yield concat_batches(parts)


COMPRESSION_LEVEL = 3
# Page and file metadata may make an output a little larger than its inputs.
SPOOL_SIZE_FACTOR = 1.1
RELEASE_BYTES = 64 * MIB  # of rows written between two releases of free memory


@dataclass(frozen=True, slots=True)
class MergedSegment:
    """An output that was stored and read back, `ref`. `inputs`: the number of inputs; `size`: their stored bytes.
    `raw_bytes`: of its rows, before compression. `late`: the number of rows that came with one input and that another
    had not read, and the range that holds them; None if there were none.
    """

    ref: SegmentRef
    inputs: int
    size: int
    rows: int
    raw_bytes: int
    late: tuple[int, SequenceRange] | None = None


def merge(store: SegmentStore, output: Output) -> MergedSegment:
    """Make `output`; return after it was read back without error. The same inputs always give the same bytes.

    Memory is bounded by two row groups of the output and one of each input that overlaps them. Raises
    UnreadableSegment for an invalid or deleted input, DataError (E-FORK) for inputs that contradict each other,
    Unavailable (E-SPOOL) if the spool disk has too little space.
    """
    # Order at a crash: nothing refers to a spool file. The stored output is a complete, contained segment that readers
    # may already use. Only a later step, with its own proof, writes a tombstone.
    spooled, late = _spool(store, output)
    try:
        failpoint("compaction.put")
        ref = store.put(spooled)
    finally:
        spooled.path.unlink(missing_ok=True)
    failpoint("compaction.read_back")
    check_read_back(store, ref, spooled.footer)
    return MergedSegment(ref, len(output.inputs), output.size, spooled.footer.rows, spooled.footer.raw_bytes, late)


def check_read_back(store: SegmentStore, ref: SegmentRef, footer: Footer) -> None:
    """Check footer, order and row count of a segment; `put` compared the bytes. Raises SegmentCorrupt."""
    with store.open_part(ref) as reader:
        if reader.footer != footer:
            raise SegmentCorrupt(f"segment {ref.key}: the footer read back differs from the one written")
        rows = sum(batch.num_rows for batch in reader.batches(columns=["sequence"]))
    if rows != footer.rows:
        raise SegmentCorrupt(f"segment {ref.key}: expected {footer.rows} rows, read back {rows}")


def _spool(store: SegmentStore, output: Output) -> tuple[SpooledSegment, tuple[int, SequenceRange] | None]:
    path = store.new_spool()
    needed = int(output.size * SPOOL_SIZE_FACTOR) + max(s.size for s in output.inputs)
    if (free := shutil.disk_usage(path.parent).free) < needed:
        text = f"spool folder {path.parent}: expected {needed} free bytes to merge {output.coverage}, found {free}"
        raise Unavailable(text, hint="make room there, or set spool_dir", code="E-SPOOL")
    footers: dict[str, Footer] = {}
    tally = RowTally(output, footers)

    def open_input(segment: SegmentRef) -> SegmentReader:
        failpoint("compaction.open")
        reader = store.open(segment)
        footers[segment.key] = reader.footer
        return reader

    pool, released = pa.default_memory_pool(), 0
    with ThreadPoolExecutor(1, "floe-write") as aside:
        writer = SegmentWriter(
            path,
            level=output.level,
            compression_level=COMPRESSION_LEVEL,
            subject_statistics=store.subject_statistics,
            pool=aside,
        )
        try:
            for batch in prefetch(combine(union(output.inputs, open_input))):
                failpoint("compaction.merge")
                tally.add(batch.column("sequence"))
                writer.append(batch)
                if writer.raw_bytes - released >= RELEASE_BYTES:
                    # Row groups leave some 100 MB free in pieces in a long merge. Most of it belongs to the thread that
                    # writes, and a thread can release only its own.
                    aside.submit(pool.release_unused)
                    released = writer.raw_bytes
            failpoint("compaction.spool_full")
            return writer.finish(merged_footer(output, footers, tally)), tally.late
        except BaseException:
            writer.abort()
            raise
