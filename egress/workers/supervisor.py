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
from common.exits import asked_context, is_debug
from common.logs import flush, get_logger
from common.metrics import counter, gauge
from common.service.life import Life
from common.service.monitor import Health, Monitor
from common.service.process import SystemdNotifier, exit_at_once, hangups, on_signal, quits, stop_on_signals
from common.settings.root import Settings
from common.tasks import GOOD_WHILE, Stop, end, orphaned, wait_for, watched
from egress.partition import require_feeds
from egress.workers.pages import WorkerPages, ask_all
from egress.workers.process import FINAL, WorkerProcess, worst

log = get_logger(__name__)


KILL_MARGIN = 10.0  # seconds beyond the shutdown timeout until a worker that does not end is killed


WORKER = ("worker",)
running_workers = gauge("egress_worker_running", "1 while the process runs under this monitor.", WORKER)
restarts = counter("egress_worker_restarts", "Times it was started again after an unexpected end.", WORKER)


class Supervisor:
    """The workers of one parent. `shutdown_timeout`: seconds that each may take to drain, at most."""

    def __init__(
        self, workers: Sequence[WorkerProcess], shutdown_timeout: float, clock: Clock, rng: random.Random
    ) -> None:
        self.workers = workers
        self._patience, self._clock, self._rng = shutdown_timeout + KILL_MARGIN, clock, rng
        self._ending = Stop()

    async def run(self, stop: Stop) -> int:
        """Run until all have ended, and return the worst of their exit codes.

        They end after `stop` is set, or after one of them ends with a code in `FINAL`.
        """
        self._ending = Stop(stop)
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(self._keep(worker)) for worker in self.workers]
        return worst(task.result() for task in keeping)

    def send(self, number: int) -> None:
        """Send a signal to all; may be called from a signal handler."""
        for worker in self.workers:
            worker.send(number)

    def flush(self) -> None:
        """Have all close their open segments. One without a port has no signal handler yet: SIGUSR1 would kill it."""
        for worker in self.workers:
            if worker.port:
                worker.send(signal.SIGUSR1)

    async def _keep(self, worker: WorkerProcess) -> int:
        backoff = Backoff(self._rng)
        while True:
            started = self._clock.monotonic()
            if (code := await self._run_once(worker)) in FINAL and not self._ending.is_set:
                log.error("all workers end", action="workers_end", worker=worker.index, exit_code=code)
                self._ending.set()
            if self._ending.is_set:
                return code
            if self._clock.monotonic() - started > GOOD_WHILE:
                backoff.reset()
            seconds = backoff.next()
            context = {"worker": worker.index, "exit_code": code, "seconds": round(seconds, 2)}
            log.error("worker ended, to be started again", action="worker_restart", **context)
            if await wait_for(self._ending, seconds):
                return code
            worker.restarts += 1
            restarts.labels(str(worker.index)).inc()

    async def _run_once(self, worker: WorkerProcess) -> int:
        running = running_workers.labels(str(worker.index))
        running.set(1)
        try:
            return await worker.run_once(self._ending, self._patience)
        except OSError as error:
            log.error("worker not started", action="worker_failed", worker=worker.index, error=str(error))
            return 1
        finally:
            running.set(0)


def command(config: str) -> list[str]:
    """Return the command line of a worker: this Python, this Floe, the same file in the same context."""
    # Run as a script, its own folder comes first in the module path, not the working directory of the parent.
    if (found := importlib.util.find_spec("floe")) is None or found.origin is None:
        raise FloeError("floe: expected the command among the modules, found none", code="E-UNEXPECTED")
    context = ["--context", name] if (name := asked_context()) else []
    return [sys.executable, found.origin, "egress", "run", "-c", config, *context]


async def run_workers(config: str, settings: Settings, count: int) -> int:
    """Run `count` workers of the configuration file `config` until a signal; return the worst of their exit codes.

    On the first signal they drain. The second kills them.
    """
    require_feeds(settings.egress.feeds)
    clock = SystemClock()
    environment = {**os.environ, **({"FLOE_DEBUG": "1"} if is_debug() else {})}
    workers = [WorkerProcess(index, count, command(config), environment) for index in range(count)]
    supervisor = Supervisor(workers, settings.egress.shutdown_timeout, clock, random.SystemRandom())
    health = Health(clock)
    pages, wanted = WorkerPages(health, partial(ask_all, workers)), settings.egress.monitor
    monitor = Monitor(wanted.listen, health, pages=pages, tls=wanted.tls)
    monitor.start()
    what = {"feeds": [each.name for each in settings.egress.feeds], "workers": count, "monitor": wanted.listen}
    with closing(monitor), Life("egress", settings, clock, {}, None, **what) as life:
        says = (
            monitor.says if settings.egress.monitor.listen else lambda _path: (200, f"{count} workers, not looked into")
        )
        code = await supervise(supervisor, health, SystemdNotifier(says, clock))
        life.results(exit_code=code)
        return code


async def supervise(supervisor: Supervisor, health: Health, notifier: SystemdNotifier | None = None) -> int:
    """Run the workers until a signal, and return the exit code. Raises any error of this process."""

    def kill(number: int) -> None:
        supervisor.send(signal.SIGKILL)
        flush()
        exit_at_once(number)

    hang_up, quit_ = partial(supervisor.send, signal.SIGHUP), partial(supervisor.send, signal.SIGQUIT)
    hangups.append(hang_up)
    quits.append(quit_)
    with on_signal(signal.SIGUSR1, supervisor.flush):
        async with stop_on_signals(second=kill) as stop:
            beating = watched(health.keep_beating(), orphaned, name="beat")
            try:
                async with notifier.while_running(stop) if notifier else nullcontext():
                    return await supervisor.run(stop)
            finally:
                hangups.remove(hang_up)
                quits.remove(quit_)
                await end(beating)
