"""Runs of compaction in processes of their own, which die or stop where a test says."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from common import failpoints
from compaction.run import Compaction, LocalRunner, ReadingProver, Report, Selection
from tests.compaction_archive import Archive
from tests.compaction_refs import TestPolicy
from tests.support import PATIENCE, eventually

DUE = TestPolicy(min_age=60, max_wait=600, min_count=3, min_size=10**9, max_size=10**9)
SECOND = TestPolicy(from_=1, to=2, min_age=0, max_wait=-1, min_count=2, min_size=10**9, max_size=10**9)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.compaction_jobs"])


def run(folder: Path, *, grace: float = 0) -> Report:
    """One run, without Spark, over the archive in `folder`."""
    store = Archive(folder).store
    runner = LocalRunner(store)
    try:
        return Compaction(store, [DUE, SECOND], grace, runner, ReadingProver(runner)).run(Selection())
    finally:
        store.close()


def _job(folder: Path, points: str) -> None:
    failpoints._points = failpoints._parse(points)
    run(folder)


class Job:
    """A run in another process, with failpoints as FLOE_FAILPOINTS names them."""

    def __init__(self, folder: Path, points: str = "") -> None:
        self._process: ForkServerProcess = _context.Process(target=_job, args=(folder, points))
        self._process.start()

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code; -9 if it was killed."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"still running after {seconds} s"
        return code

    def wait_until_stopped(self) -> None:
        """Until it has stopped itself at a failpoint."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def go_on(self) -> None:
        """Let it run after that."""
        assert self._process.pid
        os.kill(self._process.pid, signal.SIGCONT)
