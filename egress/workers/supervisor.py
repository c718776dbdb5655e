"""The workers of one parent: started, started again where they end unexpectedly, and ended together."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Sequence

from common.clock import Clock, wait_for
from common.service.logs import get_logger
from egress.backoff import Backoff
from egress.workers import metrics
from egress.workers.codes import FINAL, worst
from egress.workers.process import WorkerProcess

log = get_logger("egress.workers")

GOOD_WHILE = 60.0  # seconds that a worker runs before its end counts as the first
KILL_MARGIN = 10.0  # seconds beyond the shutdown timeout until a worker that does not end is killed


class Crew:
    """Runs `workers`. `shutdown_timeout`: what each takes to drain, at most."""

    def __init__(
        self, workers: Sequence[WorkerProcess], shutdown_timeout: float, clock: Clock, rng: random.Random
    ) -> None:
        self.workers = workers
        self._patience, self._clock, self._rng = shutdown_timeout + KILL_MARGIN, clock, rng
        self._ending = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> int:
        """Until `stop` is set, or one ended as a restart would again, and all have ended.

        Returns the worst of their exit codes.
        """
        async with asyncio.TaskGroup() as tasks:
            passing = tasks.create_task(self._pass_on(stop))
            keeping = [tasks.create_task(self._keep(worker)) for worker in self.workers]
            await asyncio.wait(keeping)
            passing.cancel()
        return worst(task.result() for task in keeping)

    def kill(self) -> None:
        """SIGKILL for all; may be called from a signal handler."""
        for worker in self.workers:
            worker.send(signal.SIGKILL)

    def hang_up(self) -> None:
        """SIGHUP for all."""
        for worker in self.workers:
            worker.send(signal.SIGHUP)

    async def _pass_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._ending.set()

    async def _keep(self, worker: WorkerProcess) -> int:
        """Run one worker until all are to end; the exit code of its last process."""
        backoff = Backoff(self._rng)
        while True:
            started = self._clock.monotonic()
            code = await self._run_once(worker)
            if self._ending.is_set() or self._ends_all(worker, code):
                return code
            if self._clock.monotonic() - started > GOOD_WHILE:
                backoff.reset()
            if await self._pause(worker, code, backoff.next()):
                return code

    async def _run_once(self, worker: WorkerProcess) -> int:
        running = metrics.running.labels(str(worker.index))
        running.set(1)
        try:
            return await worker.run_once(self._ending, self._patience)
        except OSError as error:
            log.error("worker not started", action="worker_failed", worker=worker.index, error=str(error))
            return 1
        finally:
            running.set(0)

    def _ends_all(self, worker: WorkerProcess, code: int) -> bool:
        if code in FINAL:
            log.error("all workers end", action="workers_end", worker=worker.index, exit_code=code)
            self._ending.set()
        return code in FINAL

    async def _pause(self, worker: WorkerProcess, code: int, seconds: float) -> bool:
        """Wait before the next start; whether all are to end instead."""
        log.error(
            "worker ended, to be started again",
            action="worker_restart",
            worker=worker.index,
            exit_code=code,
            seconds=round(seconds, 2),
        )
        if not await wait_for(self._ending, seconds):
            worker.restarts += 1
            metrics.restarts.labels(str(worker.index)).inc()
        return self._ending.is_set()
