"""Export a stream from the archive as a backup of the command `nats`: a folder from which nats-server 2.15 restores it.

DIR/stream.arc.s2   the archive of the stream (ADR-63), as a restore sends it
DIR/backup.json     its configuration and state; written last, so a folder without it is no backup
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from common.clock import Clock
from common.errors import Unavailable, UsageError
from common.objects.local import sync
from common.service.process import ThreadPool
from common.settings.types import duration_words, format_count, size_words
from common.tasks import Stop, wait_done
from ingress.recovery.fill import ArchiveFiller, ArchiveWork
from ingress.recovery.history import repeat_command
from ingress.recovery.plan import RestorePlan, RestoreRequest, with_source_starts
from ingress.recovery.preflight import check_lossless
from ingress.recovery.request import RecoveryParts
from ingress.recovery.stream_archive import LogicalWriter

DATA_FILE, META_FILE = "stream.arc.s2", "backup.json"
REPORT_INTERVAL_S = 1.0  # seconds between two checks for a stop


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
                self._file = (self._folder / DATA_FILE).open("wb")
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
        except OSError as error:
            raise _folder_error(self._folder, error) from error

    async def aclose(self) -> None:
        if self._file is not None:
            self._file.close()


def _folder_error(folder: Path, error: OSError) -> Unavailable:
    act = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "let this user write there"
    hint = f"{act}, or name another folder; the same command begins again"
    return Unavailable(f"{folder}: {error}", hint=hint, code="E-EXPORT-FOLDER")


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
        rate = f"{self.rows / max(self.seconds, 0.001):,.0f} msg/s"
        took = f"{size_words(self.bytes)} written in {duration_words(self.seconds)}, {rate}"
        yield f"stream {self.plan.name}: {format_count(self.rows, 'message')}, {took}, in {self.plan.request.directory}"


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
