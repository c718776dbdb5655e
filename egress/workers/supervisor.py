"""The supervisor of the workers of one parent: starts them, restarts one that ends unexpectedly, ends all together."""

import asyncio
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial

from common.clock import Backoff, Clock, SystemClock
from common.errors import FloeError
from common.exits import is_debug, requested_context
from common.logs import flush, get_logger
from common.metrics import counter, gauge
from common.observe.monitor import Health, Monitor
from common.service.process import SystemdNotifier, exit_at_once, handle_signal, on_hangup, on_quit, stop_on_signals
from common.service.progress import ProcessLog
from common.settings.root import Settings
from common.tasks import BACKOFF_RESET_S, Stop, cancel, raise_fatal, spawn, wait_for
from egress.partition import require_feeds
from egress.workers.pages import WorkerPages, fetch_from_all
from egress.workers.process import FATAL_EXIT_CODES, WorkerProcess, worst_exit_code

log = get_logger(__name__)


KILL_MARGIN_S = 10.0  # seconds beyond the shutdown timeout until a worker that does not end is killed


WORKER_LABELS = ("worker",)
running_workers = gauge("egress_worker_running", "1 while the process runs under this monitor.", WORKER_LABELS)
restarts = counter("egress_worker_restarts", "Restarts of the worker after an unexpected end.", WORKER_LABELS)


class Supervisor:
    """The workers of one parent. `shutdown_timeout`: seconds that each may take to drain, at most."""

    def __init__(
        self, workers: Sequence[WorkerProcess], shutdown_timeout: float, clock: Clock, rng: random.Random
    ) -> None:
        self.workers = workers
        self._kill_after_s, self._clock, self._rng = shutdown_timeout + KILL_MARGIN_S, clock, rng
        self._stop = Stop()

    async def run(self, stop: Stop) -> int:
        """Run until all have ended, and return the worst of their exit codes.

        They end after `stop` is set, or after one of them ends with a code in `FATAL_EXIT_CODES`.
        """
        self._stop = Stop(stop)
        async with asyncio.TaskGroup() as tasks:
            worker_tasks = [tasks.create_task(self._run_with_restarts(worker)) for worker in self.workers]
        return worst_exit_code(task.result() for task in worker_tasks)

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to all; may be called from a signal handler."""
        for worker in self.workers:
            worker.send_signal(signal_number)

    def flush(self) -> None:
        """Have all close their open segments. One without a port has no signal handler yet: SIGUSR1 would kill it."""
        for worker in self.workers:
            if worker.port:
                worker.send_signal(signal.SIGUSR1)

    async def _run_with_restarts(self, worker: WorkerProcess) -> int:
        backoff = Backoff(self._rng)
        while True:
            started = self._clock.monotonic()
            if (code := await self._run_once(worker)) in FATAL_EXIT_CODES and not self._stop.is_set:
                log.error("workers stopped", action="workers_stopped", worker=worker.index, exit_code=code)
                self._stop.set()
            if self._stop.is_set:
                return code
            if self._clock.monotonic() - started > BACKOFF_RESET_S:
                backoff.reset()
            seconds = backoff.next_delay()
            context = {"worker": worker.index, "exit_code": code, "seconds": round(seconds, 2)}
            log.error("worker restart scheduled", action="worker_restart_scheduled", **context)
            if await wait_for(self._stop, seconds):
                return code
            worker.restarts += 1
            restarts.labels(str(worker.index)).inc()

    async def _run_once(self, worker: WorkerProcess) -> int:
        running = running_workers.labels(str(worker.index))
        running.set(1)
        try:
            return await worker.run_once(self._stop, self._kill_after_s)
        except OSError as error:
            log.error("worker start failed", action="worker_start_failed", worker=worker.index, error=str(error))
            return 1
        finally:
            running.set(0)


def worker_command(config: str) -> list[str]:
    """Return the command line of a worker: this Python, this Floe, the same file in the same context."""
    # Run as a script, its own folder comes first in the module path, not the working directory of the parent.
    if (found := importlib.util.find_spec("floe")) is None or found.origin is None:
        raise FloeError("floe: expected the command among the modules, found none", code="E-UNEXPECTED")
    context = ["--context", name] if (name := requested_context()) else []
    return [sys.executable, found.origin, "egress", "run", "-c", config, *context]


async def run_workers(config: str, settings: Settings, count: int) -> int:
    """Run `count` workers of the configuration file `config` until a signal; return the worst of their exit codes.

    On the first signal they drain. The second kills them.
    """
    require_feeds(settings.egress.feeds_)
    clock = SystemClock()
    environment = {**os.environ, **({"FLOE_DEBUG": "1"} if is_debug() else {})}
    workers = [WorkerProcess(index, count, worker_command(config), environment) for index in range(count)]
    supervisor = Supervisor(workers, settings.egress.shutdown_timeout, clock, random.SystemRandom())
    health = Health(clock, service="egress", site=settings.site, instance=settings.instance)
    pages, wanted = WorkerPages(health, partial(fetch_from_all, workers)), settings.egress.monitor
    monitor = Monitor(wanted.listen, health, pages=pages, tls=wanted.tls)
    monitor.start()
    log_fields = {"feeds": [each.label for each in settings.egress.feeds_], "workers": count, "monitor": wanted.listen}
    with closing(monitor), ProcessLog("egress", settings, clock, {}, list, **log_fields) as life:
        status_page = monitor.page_text if wanted.listen else lambda _path: (200, f"{count} workers, not checked")
        code = await supervise(supervisor, health, SystemdNotifier(status_page, clock))
        life.add_end_fields(exit_code=code)
        return code


async def supervise(supervisor: Supervisor, health: Health, notifier: SystemdNotifier | None = None) -> int:
    """Run the workers until a signal, and return the exit code. Raises any error of this process."""

    def kill(signal_number: int) -> None:
        supervisor.send_signal(signal.SIGKILL)
        flush()
        exit_at_once(signal_number)

    hang_up, quit_ = partial(supervisor.send_signal, signal.SIGHUP), partial(supervisor.send_signal, signal.SIGQUIT)
    on_hangup.append(hang_up)
    on_quit.append(quit_)
    with handle_signal(signal.SIGUSR1, supervisor.flush):
        async with stop_on_signals(second=kill) as stop:
            heartbeat_task = spawn(health.keep_beating(), raise_fatal, name="beat")
            try:
                async with notifier.while_running(stop) if notifier else nullcontext():
                    return await supervisor.run(stop)
            finally:
                on_hangup.remove(hang_up)
                on_quit.remove(quit_)
                await cancel(heartbeat_task)
