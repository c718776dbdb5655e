"""Writer of one segment file in the spool: rows in, a hashed file with its footer out."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from common.archive.columns import DELTA_COLUMNS, DICTIONARY_COLUMNS, SCHEMA, STATISTICS_COLUMNS, row_sizes, total
from common.archive.guard import MIB, WRITER_ROW_BYTES, row_group_bytes
from common.archive.keys import DIGEST_LENGTH, SegmentName
from common.archive.segment import FOOTER_KEY, Footer, Reason
from common.errors import Unavailable
from common.objects.port import body_size, sha256_of

_SPOOL_PREFIX = "floe-spool-"
_LOCK = "lock"


class Spool:
    """A folder of mode 0700 under `parent` (None: the system's temporary folder), created at first use.

    It is removed when the process ends. Safe to use from several threads. Raises Unavailable, code E-SPOOL, if the
    disk is full or read-only.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent, self._guard = parent or Path(tempfile.gettempdir()), threading.Lock()
        self._folder: Path | None = None
        self._lock: int | None = None
        self._owner = 0

    def new_file(self) -> Path:
        try:
            handle, name = tempfile.mkstemp(dir=self._private_folder())
        except OSError as error:
            raise spool_error(self._parent, error) from error
        os.close(handle)
        return Path(name)

    def new_folder(self) -> Path:
        """Create a folder in the spool. Raises as `new_file`."""
        try:
            return Path(tempfile.mkdtemp(dir=self._private_folder()))
        except OSError as error:
            raise spool_error(self._parent, error) from error

    def size(self) -> int:
        """Return the bytes of the files in the folder."""
        with self._guard:
            folder = self._folder
        total = 0
        with suppress(OSError):  # closed, or a file is removed just now
            for entry in os.scandir(folder) if folder else ():
                with suppress(FileNotFoundError):
                    total += entry.stat().st_size
        return total

    def close(self) -> None:
        """Remove the folder with its content; `new_file` creates another."""
        with self._guard:
            folder, lock = self._folder, self._lock
            self._folder = self._lock = None
        # A process that was forked from the owner has a copy of this object, but does not own the folder.
        if folder is not None and lock is not None and os.getpid() == self._owner:
            atexit.unregister(self.close)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def _private_folder(self) -> Path:
        with self._guard:
            if self._folder is None or self._owner != os.getpid():
                self._parent.mkdir(parents=True, exist_ok=True)
                _sweep(self._parent)
                self._folder = Path(tempfile.mkdtemp(prefix=_SPOOL_PREFIX, dir=self._parent))
                self._lock, self._owner = _lock_folder(self._folder), os.getpid()
                atexit.register(self.close)
            return self._folder


def spool_error(folder: Path, error: OSError) -> Unavailable:
    return Unavailable(f"spool folder {folder}: {error}", hint="make room there, or set spool_dir", code="E-SPOOL")


def _lock_folder(folder: Path) -> int:
    # Lock under another name first: once `lock` is visible it is locked, unless its owner is dead.
    handle = os.open(folder / "locking", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(folder / "locking", folder / _LOCK)
    return handle


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_SPOOL_PREFIX}*"):
        with suppress(OSError):
            _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    # O_NOFOLLOW and the owner: in a shared temporary folder others may create names like ours.
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


# A page is compressed alone. Messages of one fleet repeat each other, so merged segments have larger pages.
_PAGE_BYTES, _PAGE_BYTES_MERGED = MIB, 4 * MIB
_MAX_ROWS_PER_WRITE = 1024
FIRST_GROUP_DIVISOR = 8  # of the size of the first row group of a merged segment, so that writing begins early


@dataclass(frozen=True, slots=True)
class SpooledSegment:
    """A finished segment file in the spool. `sha256`: 64 hex digits over its `size` bytes. `left_out_bytes`: raw bytes
    of the received messages that it does not hold, by reason; not stored.
    """

    path: Path
    footer: Footer
    size: int
    sha256: str
    left_out_bytes: Mapping[Reason, int] = field(default_factory=dict)

    @property
    def segment_name(self) -> SegmentName:
        footer = self.footer
        return SegmentName(footer.chain, footer.level, footer.coverage, self.sha256[:DIGEST_LENGTH])


class SegmentWriter:
    """Writer of rows of ascending sequences into the file `path`; holds at most one row group in memory.

    `rows`, `raw_bytes`: totals of the appended rows (raw bytes: subjects, header blocks and payloads). Every
    call raises Unavailable, code E-SPOOL, if the disk is full or fails; then call `abort`.
    `subject_statistics`: put the least and the greatest subject of each row group and page into its metadata, for
    readers that skip by subject. `group_bytes`: raw bytes of a row group; 0: the default of the level. `pool`: a
    pool of one thread that writes a row group while the next is gathered. Then two are in memory, and an error is
    raised by a later call. None: the caller's thread writes.
    """

    def __init__(
        self,
        path: Path,
        *,
        level: int,
        compression_level: int,
        subject_statistics: bool = True,
        group_bytes: int = 0,
        pool: Executor | None = None,
    ) -> None:
        self.rows = self.raw_bytes = 0
        self._path, self._compression_level = path, compression_level
        self._group_bytes = group_bytes or row_group_bytes(level)
        self._limit = self._group_bytes if level == 0 or group_bytes else self._group_bytes // FIRST_GROUP_DIVISOR
        self._page_bytes = _PAGE_BYTES if level == 0 else _PAGE_BYTES_MERGED
        self._statistics = [c for c in STATISTICS_COLUMNS if subject_statistics or c != "subject"]
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._times: tuple[int, int] | None = None
        self._first = self._last = 0
        self._file: pq.ParquetWriter | None = None
        self._pool, self._writing = pool, Future[None]()
        self._writing.set_result(None)

    def append(self, batch: pa.RecordBatch) -> None:
        """Append rows of `SCHEMA`. Raises ValueError unless the sequences ascend and follow those before."""
        if not batch.schema.equals(SCHEMA):
            raise ValueError(f"batch: expected columns {SCHEMA.names} with their types, found {batch.schema}")
        if not batch.num_rows:
            return
        sequences = batch.column("sequence")
        first, last = sequences[0].as_py(), sequences[-1].as_py()
        if first <= self._last or pc.greater_equal(sequences[:-1], sequences[1:]).true_count:
            raise ValueError(f"sequences {first}..{last}: expected ascending ones after {self._last}")
        self._first, self._last = self._first or first, last
        times = batch.column("timestamp_ns")
        self._times = (self._times or (times[0].as_py(), 0))[0], times[-1].as_py()
        sizes = row_sizes(batch)
        self.rows += batch.num_rows
        self.raw_bytes += total(sizes)
        self._split(batch, pc.add(sizes, pa.scalar(WRITER_ROW_BYTES, pa.int64())))

    def _split(self, batch: pa.RecordBatch, weights: pa.Array[Any]) -> None:
        ends = pc.cumulative_sum(weights)
        begin, before = 0, 0
        while begin < batch.num_rows:
            # The number of the ascending `ends` that still fit.
            most = pa.scalar(before + self._limit - self._pending_bytes, pa.int64())
            if (end := pc.less_equal(ends, most).true_count) <= begin and not self._pending:
                end = begin + 1
            if end > begin:
                after = ends[end - 1].as_py()
                self._pending.append(batch.slice(begin, end - begin))
                self._pending_bytes += after - before
                begin, before = end, after
            if begin < batch.num_rows or self._pending_bytes >= self._limit:
                self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        batches, size = self._pending, self._pending_bytes
        self._pending, self._pending_bytes, self._limit = [], 0, self._group_bytes
        self._writing.result()
        if self._pool is None:
            self._write(batches, size)
        else:
            self._writing = self._pool.submit(self._write, batches, size)

    def _write(self, batches: list[pa.RecordBatch], size: int) -> None:
        table = pa.Table.from_batches(batches)
        batches.clear()  # the caller's thread may hold the list for longer
        with spool_errors(self._path.parent):
            self._open(size // table.num_rows).write_table(table, row_group_size=table.num_rows)

    def _open(self, row_bytes: int = 1) -> pq.ParquetWriter:
        if self._file is None:
            self._file = pq.ParquetWriter(
                str(self._path),
                SCHEMA,
                compression="zstd",
                compression_level=self._compression_level,
                use_dictionary=list(DICTIONARY_COLUMNS),  # type: ignore[arg-type]
                column_encoding=dict.fromkeys(DELTA_COLUMNS, "DELTA_BINARY_PACKED"),
                write_statistics=self._statistics,
                write_page_index=True,
                write_page_checksum=True,
                data_page_version="1.0",
                data_page_size=self._page_bytes,
                # A page is closed only between writes: after 1,024 large messages it would be huge.
                write_batch_size=max(1, min(_MAX_ROWS_PER_WRITE, self._page_bytes // row_bytes)),
                sorting_columns=[pq.SortingColumn(SCHEMA.get_field_index("sequence"))],
                # The Parquet schema alone restores every type; readers need no Arrow schema.
                store_schema=False,
            )
        return self._file

    def finish(self, footer: Footer) -> SpooledSegment:
        """Write pending rows and the footer, close the file and hash it.

        The footer's `rows`, coverage and ledger must agree with the appended rows, else ValueError; its `raw_bytes` and
        timestamps are replaced by those of the rows.
        """
        first, last = self._times or (None, None)
        footer = replace(footer, raw_bytes=self.raw_bytes, first_timestamp_ns=first, last_timestamp_ns=last)
        self._check_footer(footer)
        self._flush()
        self._writing.result()
        with spool_errors(self._path.parent):
            file = self._open()
            file.add_key_value_metadata({FOOTER_KEY.decode(): footer.to_json().decode()})
            file.close()
            return SpooledSegment(self._path, footer, body_size(self._path), sha256_of(self._path))

    def _check_footer(self, footer: Footer) -> None:
        if footer.rows != self.rows:
            raise ValueError(f"footer rows: expected {self.rows} as appended, found {footer.rows}")
        if not footer.is_balanced():
            raise ValueError(
                f"footer: expected {len(footer.coverage)} sequences accounted for, "
                f"found {footer.rows} rows and {footer.ledger.total()} in the ledger"
            )
        if not footer.has_valid_unread():
            raise ValueError(
                f"footer: expected unread to hold the {footer.ledger.unread()} sequences counted as gone, "
                f"found {footer.unread}"
            )
        if self.rows and not (self._first in footer.coverage and self._last in footer.coverage):
            raise ValueError(f"rows {self._first}..{self._last}: expected them in {footer.coverage}")

    def abort(self) -> None:
        self._pending = []
        wait([self._writing])
        if self._file is not None:
            with suppress(OSError, pa.ArrowException):
                self._file.close()
        self._path.unlink(missing_ok=True)


@contextmanager
def spool_errors(folder: Path) -> Iterator[None]:
    """Turn the errors of the disk under a file of the spool into Unavailable, code E-SPOOL, that names `folder`."""
    try:
        yield
    except OSError as error:
        raise spool_error(folder, error) from error
