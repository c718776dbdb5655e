"""Fill an archive of nats-server with the rows of a plan: read, filter, encode, and hand the pieces to a sink.

A restore fills a server. An export fills a folder, as a backup of the command `nats` that nats-server 2.15 restores:

DIR/stream.arc.s2   the archive of the stream (ADR-63), as a restore sends it
DIR/backup.json     its configuration and state; written last, so a folder without it is no backup
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.archive.captures import CapturedConsumer
from common.archive.columns import lengths
from common.clock import Clock
from common.errors import ConfigError, Unavailable, UsageError
from common.failpoints import failpoint
from common.objects.local import sync, sync_folder
from common.service.process import ThreadPool
from common.service.progress import format_share
from common.settings.types import duration_words, format_count, size_words
from common.tasks import Stop, wait_done
from ingress.recovery.guard import check_lossless
from ingress.recovery.history import ArchivedHistory, repeat_command
from ingress.recovery.plan import RestorePlan, RestoreRequest, with_source_starts
from ingress.recovery.read_back import Digests
from ingress.recovery.request import RecoveryParts
from ingress.recovery.stream_archive import ArchiveState, ArchiveWriter, LogicalWriter, split_batch

ARCHIVE_THREADS = 4
ENCODE_AHEAD_BYTES = 2 * 1024 * 1024  # bytes that are encoded while others are sent
# Bytes of rows between two returns of free memory, which cost as much as 1 MB of rows.
RELEASE_INTERVAL_BYTES = 64 * 1024 * 1024
REPORT_INTERVAL_S = 1.0  # seconds until long work reports its progress, and between two reports or checks for a stop
ROW_COLUMNS = ("sequence", "timestamp_ns", "subject", "subject_raw", "headers", "payload")
FILTER_COLUMNS = ("sequence", "timestamp_ns", "subject", "headers")  # columns that the retention filter needs
DATA_FILE, META_FILE = "stream.arc.s2", "backup.json"  # of a backup
T = TypeVar("T")


class ArchiveWork:
    """The long work of a command on the archive of one stream: it shows its progress, and ends if `check_stop` raises.
    Close it.
    """

    def __init__(self, request: RestoreRequest, parts: RecoveryParts, check_stop: Callable[[], None]) -> None:
        self._request, self._clock, self._progress, self.check_stop = request, parts.clock, parts.progress, check_stop
        self.threads = ThreadPool("restore", ARCHIVE_THREADS)
        self.history = ArchivedHistory(request, parts, self.threads)
        self._started = self._clock.monotonic()

    def close(self) -> None:
        with closing(self.threads):
            self.history.close()

    async def plan(self) -> RestorePlan:
        """Return `ArchivedHistory.plan`; print the progress if it takes long."""
        begun = f"planning: reading the archive of {self._request.site}/{self._request.feed}"
        return await self._wait(self.history.plan(), lambda: self.history.progress_text, begun)

    async def _wait(self, call: Awaitable[T], text: Callable[[], str], begun: str = "") -> T:
        """Return the result of `call`. `text`: its progress; `begun`: a line that stays, printed if it takes long."""
        work = asyncio.ensure_future(call)
        try:
            while not await wait_done(work, REPORT_INTERVAL_S, self._clock):
                self.check_stop()
                if begun:
                    self._progress.print(begun)
                begun = ""
                self._progress.update(text(), self._clock.monotonic())
            return work.result()
        finally:
            work.cancel()

    async def read(self, call: Callable[[], T]) -> T:
        return await self._wait(self.threads.run(call), lambda: "reading of the archive")

    def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.ensure_future(self.threads.run(call))

    def update(self, done: int, total: int, text: str) -> None:
        at = self._clock.monotonic()
        self._progress.update(f"{format_share(done, total, at - self._started)}  {text}", at)


class ArchiveSink(Protocol):
    """The destination of an archive: a server that restores from it, or a file. `sent`: bytes so far."""

    sent: int

    async def send(self, piece: bytes) -> None:
        """Take the next piece, which consists of whole frames."""

    async def wait_for(self, work: asyncio.Future[Any]) -> bool:
        """Wait for the work that makes the next piece, for some seconds. Return True if it is done."""

    async def finish(self) -> None:
        """Mark the end of the archive, and return once it is whole and durable."""

    async def aclose(self) -> None: ...


#: Begin an archive, of a `request` with its `config` and `state`, as nats-server expects them.
BeginArchive = Callable[[Mapping[str, Any]], Awaitable[ArchiveSink]]


class ArchiveFiller:
    """The rows of one plan on their way into an archive; used once. `stop` ends the wait for an unavailable store.

    `digests`: of the rows that were handed over; `sourced`: the sequences of the newest messages of sources among them.
    """

    def __init__(self, plan: RestorePlan, work: ArchiveWork, stop: Stop) -> None:
        self._plan, self._work, self._stop = plan, work, stop
        self._row_filter = plan.retention_filter()
        self.digests, self.sourced = Digests(is_compared=plan.request.verify != "state"), set[int]()

    async def run(
        self,
        begin: BeginArchive,
        writer: ArchiveWriter,
        config_for: Callable[[ArchiveState], Mapping[str, Any]],
        consumers: Sequence[CapturedConsumer],
        max_row_bytes: int | None = None,
    ) -> int:
        """Write the whole archive, and return its number of bytes. `config_for`: the configuration of the stream, for
        its state. Raises ConfigError for a row above `max_row_bytes` bytes, the errors of reading and of the sink.
        """
        while self._row_filter.passes_left:
            await self._run_filter_pass()
        rows = self._rows_to_send(max_row_bytes)
        first = await self._work.read(partial(next, rows, None))
        count = self._row_filter.rows_left if self._row_filter.needs_pass else self._plan.rows
        state = self._plan.archive_state(first, count)
        config = config_for(state)
        head = b"".join(writer.encode_head(config, self._plan.created, state, consumers))
        async with aclosing(await begin({"config": config, "state": state.to_json(len(consumers))})) as sink:
            await sink.send(head)
            async with aclosing(self._encode(rows, writer, first, sink)) as pieces:
                async for piece in pieces:
                    await sink.send(piece)
                    self._show_progress(count, sink.sent)
            failpoint("restore.sent")
            await sink.finish()
        self.digests.close()
        return sink.sent

    async def _encode(
        self, rows: Iterator[pa.RecordBatch], writer: ArchiveWriter, batch: pa.RecordBatch | None, sink: ArchiveSink
    ) -> AsyncGenerator[bytes]:
        """Yield the archive's bytes of `batch`, of the other `rows` and of its end. A batch is read and encoded while
        the bytes before it are sent. However long the store takes, `sink` keeps a restore alive meanwhile.
        """

        def encode(batch: pa.RecordBatch | None) -> tuple[list[bytes], pa.RecordBatch | None]:
            """Return the archive's bytes of `batch`, and the next batch; without a batch, the end of the archive."""
            if batch is None:
                return list(writer.encode_tail()), None
            return list(writer.encode_rows(batch)), next(rows, None)

        ahead = self._work.start(partial(encode, batch))
        try:
            while True:
                while not await sink.wait_for(ahead):
                    self._work.check_stop()
                self._work.check_stop()
                pieces, following = ahead.result()
                failpoint("restore.sending")
                if batch is not None:
                    ahead = self._work.start(partial(encode, following))
                for piece in pieces:
                    yield piece
                if batch is None:
                    return
                batch = following
        finally:
            ahead.cancel()

    async def _run_filter_pass(self) -> None:
        """Make one pass of the retention filter over all rows: collect the effects of later rows on earlier ones."""
        rows, seen = self._work.history.rows(self._plan, self._plan.begin, FILTER_COLUMNS, self._stop), 0

        def observe() -> int | None:
            for batch in rows:
                self._row_filter.observe(batch)
                return batch.num_rows
            self._row_filter.end_pass()
            return None

        while (count := await self._work.read(observe)) is not None:
            self._work.check_stop()
            seen += count
            self._work.update(seen, self._plan.rows, f"{format_count(seen, 'message')} examined")

    def _rows_to_send(self, max_row_bytes: int | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows to send, and add them to `digests`. Blocking."""
        newest, unreleased = [row.sequence for row in self._plan.sourced.values()], 0
        for batch in self._work.history.rows(self._plan, self._plan.begin, ROW_COLUMNS, self._stop):
            if (left := self._row_filter.filter(batch)).num_rows:
                if max_row_bytes is not None:
                    _check_sizes(left, max_row_bytes)
                self.digests.add(left)
                if newest:
                    self.sourced |= {*np.intersect1d(left.column("sequence"), newest).tolist()}
                yield from split_batch(left, ENCODE_AHEAD_BYTES)
            if (unreleased := unreleased + batch.nbytes) >= RELEASE_INTERVAL_BYTES:
                unreleased = 0
                pa.default_memory_pool().release_unused()  # otherwise the allocator keeps freed memory

    def _show_progress(self, count: int, size: int) -> None:
        rows = self.digests.rows
        self._work.update(min(rows, count), count, f"{format_count(rows, 'message')}, {size_words(size)}")


def _check_sizes(batch: pa.RecordBatch, max_payload: int) -> None:
    """Raise ConfigError for a row that the server would store and could not deliver."""
    parts = [lengths(batch.column(name)).fill_null(0) for name in ("headers", "payload")]
    sizes = pc.add(*parts)
    if (largest := pc.max(sizes).as_py()) > max_payload:
        sequence = batch.column("sequence")[pc.index(sizes, largest).as_py()]
        text = f"sequence {sequence}: expected at most {max_payload} bytes (max_payload), found {largest}"
        raise ConfigError(text, hint="raise max_payload of the server", code="E-RESTORE-PAYLOAD")


def transfer_text(act: str, rows: int, size: int, seconds: float) -> str:
    """Return the amount and the speed of a transfer, as text. `act`: a participle, such as `sent`; `size`: bytes."""
    rate = f"{rows / max(seconds, 0.001):,.0f} msg/s"
    return f"{format_count(rows, 'message')}, {size_words(size)} {act} in {duration_words(seconds)}, {rate}"


# The export


class BackupFolder:
    """An `ArchiveSink`: the files of one backup. `request`: their configuration and state."""

    def __init__(self, folder: Path, request: Mapping[str, Any], threads: ThreadPool, clock: Clock) -> None:
        self._folder, self._request, self._threads, self._clock = folder, request, threads, clock
        self._file: BinaryIO | None = None
        self.sent = 0

    async def send(self, piece: bytes) -> None:
        await self._threads.run(self._write, piece)
        self.sent += len(piece)

    def _write(self, piece: bytes) -> None:
        try:
            if self._file is None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = (self._folder / DATA_FILE).open("ab")
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                check_folder(self._folder)  # again: another export may have ended since the plan
                self._file.truncate(0)
            self._file.write(piece)
        except OSError as error:
            raise _folder_error(self._folder, error) from error

    async def wait_for(self, work: asyncio.Future[Any]) -> bool:
        return await wait_done(work, REPORT_INTERVAL_S, self._clock)

    async def finish(self) -> None:
        await self._threads.run(self._finish)

    def _finish(self) -> None:
        assert self._file is not None, "an archive has a head"
        meta = self._folder / META_FILE
        try:
            sync(self._file)
            with meta.with_suffix(".tmp").open("wb") as file:
                file.write(json.dumps(self._request, indent=2).encode())
                sync(file)
            meta.with_suffix(".tmp").rename(meta)
            sync_folder(self._folder)
        except OSError as error:
            raise _folder_error(self._folder, error) from error

    async def aclose(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # of bytes that were not written: the error of the export is known
                self._file.close()


def _folder_error(folder: Path, error: OSError) -> Unavailable:
    found, act = str(error), "let this user write there"
    if isinstance(error, BlockingIOError):
        found, act = "another export writes there", "wait until it is done"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        act = "make room there"
    hint = f"{act}, or name another folder; the same command begins again"
    return Unavailable(f"{folder}: {found}", hint=hint, code="E-EXPORT-FOLDER")


def check_folder(folder: Path) -> None:
    """Raise UsageError unless the folder is missing, empty, or was left by an export that did not end."""
    try:
        found = sorted(each.name for each in folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{folder}: expected a folder, found: {error.strerror}") from error
    if META_FILE in found or {*found} - {DATA_FILE, "backup.tmp"}:
        raise UsageError(f"{folder}: expected an empty folder or none, found {', '.join(found[:3])}")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export. `rows`, `bytes`: written, the bytes with the overhead of the form."""

    plan: RestorePlan
    rows: int
    bytes: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        folder = str(Path(self.plan.request.directory).absolute())
        written = {"folder": folder, "rows": self.rows, "written_bytes": self.bytes, "seconds": round(self.seconds, 3)}
        return {**self.plan.as_json(), **written}

    def lines(self) -> Iterator[str]:
        written = transfer_text("written", self.rows, self.bytes, self.seconds)
        yield f"stream {self.plan.name}: {written}, in {self.plan.request.directory}"


def export_notes(plan: RestorePlan) -> Iterator[str]:
    """Yield, as text, what a backup of nats-server 2.15 cannot hold of this stream."""
    yield (
        f"a backup holds no time of creation, here {plan.created}: the restored stream gets a new one, so streams that "
        "source from it read it from its beginning again"
    )
    expires = [key for key in ("max_age", "allow_msg_ttl") if plan.config.get(key)]
    if expires and plan.rows:
        yield f"messages that expire ({', '.join(expires)}) before the backup is restored do not come back"


class Export:
    """One export; `request.directory` names its folder."""

    def __init__(self, request: RestoreRequest, parts: RecoveryParts, stop: Stop) -> None:
        self._request, self._clock, self._stop = request, parts.clock, stop
        self._folder, self._work = Path(request.directory), ArchiveWork(request, parts, self._check_stop)

    def _check_stop(self) -> None:
        if self._stop.is_set:
            hint = f"it cannot be continued; begin again:\n{repeat_command(self._request)}"
            raise Unavailable("the export was stopped before its end", hint=hint, code="E-EXPORT-STOPPED")

    async def plan(self) -> RestorePlan:
        """Return the plan, as that of a restore, with the notes on a backup. Raises as `ArchivedHistory.plan`,
        UsageError for a folder in use.
        """
        check_folder(self._folder)
        plan = await self._work.plan()
        return replace(plan, notes=(*plan.notes, *export_notes(plan)))

    async def run(self, plan: RestorePlan) -> ExportReport:
        """Write the backup. Raises Stopped for an archive that lacks messages, Unavailable if the folder cannot be
        written, or after a stop; the folder then has no `backup.json`.
        """
        check_lossless(plan)
        filler, started = ArchiveFiller(plan, self._work, self._stop), self._clock.monotonic()
        config = with_source_starts(plan.config, plan.sourced, lambda _: False)

        async def begin(request: Mapping[str, Any]) -> BackupFolder:
            return BackupFolder(self._folder, request, self._work.threads, self._clock)

        size = await filler.run(begin, LogicalWriter(), lambda _: config, plan.consumers)
        return ExportReport(plan, filler.digests.rows, size, self._clock.monotonic() - started)

    def close(self) -> None:
        self._work.close()
