"""Merges and proofs in several processes of this host: `floe compact --engine local --jobs N`.

Threads would share one interpreter, which small segments keep busy: two of them took longer than one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from common import logs
from common.archive.store import SegmentStore
from common.clock import SystemClock
from common.errors import Unavailable
from common.exits import is_verbose
from common.open import open_store
from common.settings.root import Settings
from common.settings.types import duration_words, size_words
from compaction.plan import Output, Supersession
from compaction.run import LocalRunner
from compaction.spark import POLL_INTERVAL_S, ItemLog, settings_of_tasks

T = TypeVar("T")
R = TypeVar("R")

MAX_DEFAULT_JOBS = 16
JOB_BYTES = 512 * 1024**2  # the most memory of a process that merges, at any size of its inputs
STOP_TIMEOUT_S = 25.0  # seconds in which a running item may end once the run is to stop
# The cost of a merge or a proof on one core, measured; from PROCESSES_FROM_S on, processes pay for their start.
SEGMENT_S, BYTES_PER_S, PROCESSES_FROM_S = 0.002, 40e6, 5.0
SPARK_FROM_S = 1800.0  # seconds of work for each job from which on a cluster is worthwhile

_store: SegmentStore | None = None  # of a process of `JobRunner`


def default_jobs() -> int:
    """Return the number of processors that this process may use, as far as free memory allows."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(processors, MAX_DEFAULT_JOBS, _free_memory() // JOB_BYTES))


def _free_memory() -> int:
    """Return the bytes that are free on this host, and in the control group of this process if that is less; those of
    two jobs if the host does not tell.
    """
    free = 2 * JOB_BYTES
    with suppress(OSError, ValueError):  # another system; no limit, another version of control groups, or none
        found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(found["MemAvailable"].split()[0]) * 1024
        group = Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2])
        return min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return free


def _seconds(segments: int, size: int) -> float:
    return segments * SEGMENT_S + size / BYTES_PER_S


def seconds_of(items: Sequence[object]) -> float:
    """Return the estimated time of merges and proofs on one core, in seconds."""
    merges = (each.inputs for each in items if isinstance(each, Output))
    proofs = ((*each.superseded, *each.superseding) for each in items if isinstance(each, Supersession))
    return sum(_seconds(len(segments), sum(each.size for each in segments)) for segments in chain(merges, proofs))


def spark_advice(segments: int, size: int, jobs: int) -> str:
    """Return a line that names Spark if merges of so many segments of `size` bytes, and their proofs, take long on this
    host; else an empty text.
    """
    if (seconds := 2 * _seconds(segments, size) / jobs) < SPARK_FROM_S:
        return ""
    took = f"{size_words(size)} take about {duration_words(seconds)} with --jobs {jobs}"
    return f"{took}; --engine spark divides them among several hosts"


class JobRunner(LocalRunner):
    """Runner in up to `jobs` processes; little work runs in this one. Close it at the end.

    `settings`: for the processes, which open the store by themselves.
    """

    def __init__(self, store: SegmentStore, settings: Settings, jobs: int, check: Callable[[], None]) -> None:
        super().__init__(store, check=check)
        self._settings, self._jobs = settings_of_tasks(settings), jobs
        self._log = (settings.log.level, settings.log.format) if is_verbose() else ("warning", "plain")
        self._pool: ProcessPoolExecutor | None = None
        self._calls: dict[Future[Any], int] = {}

    def map(self, work: Callable[[SegmentStore, T], R], items: Sequence[T]) -> list[R]:
        """Run `work` as `Runner.map`. Raises Unavailable if a process ends, as for lack of memory."""
        if min(self._jobs, len(items)) < 2 or seconds_of(items) < PROCESSES_FROM_S:
            return super().map(work, items)
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, context, _begin, (self._settings, *self._log))
        self._calls = calls = {self._pool.submit(_run, work, item): number for number, item in enumerate(items)}
        pending = set[Future[Any]](calls)
        with closing(ItemLog(work.__name__, items, SystemClock())) as item_log:
            try:
                while pending:
                    self._check()
                    done, pending = wait(pending, POLL_INTERVAL_S, FIRST_COMPLETED)
                    for each in done:
                        each.result()
                        item_log.add_done(calls[each])
            except BrokenProcessPool as error:
                hint = "perhaps for lack of memory: run it again, with a smaller --jobs"
                raise Unavailable("a process of --jobs ended unexpectedly", hint=hint, code="E-JOBS") from error
        return [each.result() for each in calls]

    def close(self) -> None:
        """End the processes: running items have STOP_TIMEOUT_S, which is no loss, since each may be interrupted."""
        if self._pool is not None:
            running = [each for each in self._calls if not each.cancel() and not each.done()]
            if wait(running, STOP_TIMEOUT_S).not_done:
                for process in multiprocessing.active_children():
                    process.kill()
            self._pool.shutdown()


def _begin(settings: Settings, log_level: str, log_format: str) -> None:
    global _store
    for number in (signal.SIGINT, signal.SIGTERM):  # the run decides when a process ends
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_run, daemon=True).start()
    logs.configure(log_level, log_format)
    _store = open_store(settings)


def _end_with_run() -> None:
    """End the process when that of the run is gone, even if it was killed: its queue would wait for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def _run(work: Callable[[SegmentStore, T], R], item: T) -> R:
    assert _store is not None, "a process begins before it works"
    return work(_store, item)
