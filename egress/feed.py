"""Run of the partitions of all feeds: one task for each, under its lease; readiness and drain.

A feed never ends the service. An error that only an operator can repair stops its own chain, which is examined again
later. An unreachable server or store is retried. An instance without the lease is a standby. An unexpected error ends
the session, which begins again after a growing pause (`common/clock.py`).
"""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Protocol

from common.clock import Backoff, Clock
from common.errors import FloeError, LeaseLost, OutcomeUnknown, Unavailable, Unforeseen
from common.jetstream.lease import Lease
from common.leasing import LeaseGroup
from common.logs import get_logger
from common.service.monitor import Health
from common.service.process import Threads
from common.tasks import GOOD_WHILE, Stop, StopReason, again, end, orphaned, wait_for, watched
from egress import metrics
from egress.deps import EgressDeps, Pools
from egress.partition import Partition, lease_key
from egress.report import FeedReport
from egress.session import Flush
from egress.worker import Worker

log = get_logger(__name__)

BEAT = 1.0  # seconds
RESCUE = 2.0  # seconds between attempts to put the messages that were left at the loss of a lease
RENEWED = 0.2  # seconds between checks if a lease that was not renewed in time is usable again
ABANDON = 2.0  # seconds for cancelled tasks to end after the shutdown timeout


class Feed:
    """Partition of a feed in this process: waits for its lease, works under it, gives it back."""

    def __init__(self, partition: Partition, deps: EgressDeps, sharing: LeaseGroup, health: Health) -> None:
        self.chain = self._chain = partition.chain
        name = f"{self._chain.feed}-{self._chain.partition}"
        self._pools = Pools(Threads(f"egress-{name}", 5), Threads(f"encode-{name}", 1))
        self.report = self._report = FeedReport(self._chain, partition.stream, health, deps.clock)
        self._report.state("starting", ready=False, why="nobody knows yet who holds its lease")
        self._sharing = sharing
        self._slot = sharing.slot(lease_key(self._chain), self._report)
        self._deps = deps.of(partition, self._report, self._pools)
        self._worker, self._backoff = Worker(self._deps), Backoff(deps.rng)

    def flush(self, incarnation: int = 0, least: int = 0) -> Flush | None:
        """Flush as `Session.flush`; return None also if this process does not read the partition."""
        return self._worker.flush(incarnation, least)

    async def run(self, stop: Stop) -> None:
        try:
            with closing(self._pools):
                while (lease := await self._occupy(stop)) is not None:
                    await self._hold(lease, stop)
                while self._worker.is_holding:
                    await self._put_left(stop)
        finally:
            self._worker.end()

    async def _occupy(self, stop: Stop) -> Lease | None:
        """Return the lease; None at a stop. Meanwhile, put messages left from a lost lease if their stream is gone."""
        rescue = again("rescue", self._rescue, self._deps.clock)
        side = watched(rescue, orphaned, name=f"rescue {self._chain}")
        try:
            return await self._slot.occupy(stop)
        finally:
            await end(side)

    async def _rescue(self) -> None:
        while self._worker.is_holding:
            stuck = None
            try:
                self._report.holds(stuck := await self._worker.rescue())
            except FloeError as error:
                log.info(
                    "held rows not yet put", action="rescue_put_off", error=str(error), **self._chain.log_context()
                )
            await self._deps.clock.sleep(RESCUE if stuck is None else self._deps.tuning.pace.reexamine)
        self._report.holds(None)

    async def _put_left(self, stop: Stop) -> None:
        """Retry the drain. The deadline of the drain ends it."""
        try:
            if await self._worker.needs_nothing():
                self._worker.discard()
            elif (lease := await self._sharing.claim(self._slot)) is not None:
                await self._hold(lease, stop)
            else:
                await self._worker.rescue()
        except FloeError as error:
            self._report.waits(error)
        if self._worker.is_holding:
            await self._deps.clock.sleep(self._backoff.next())

    async def _hold(self, lease: Lease, stop: Stop) -> None:
        """Work under the lease until it is lost or to be given back, or `stop` is set.

        It is given back only once no upload is in progress: another instance would begin beside it.
        """
        self._report.working()
        leave = Stop(stop, lease.lost, lease.give_back)
        sides = [
            watched(lease.keep(), orphaned, name=f"lease {self._chain}"),
            watched(self._halt(leave), orphaned, name=f"halt {self._chain}"),
        ]
        try:
            while not lease.lost.is_set and (not leave.is_set or self._worker.is_holding):
                if lease.is_usable():
                    await self._work(lease, leave)
                else:  # not released: another would take it before it expires, without the messages held here
                    await wait_for(lease.lost, RENEWED)
            await self._pools.idle()
        finally:
            await end(*sides)
        was_lost = lease.lost.is_set
        await lease.release()
        self._slot.vacate(lost=was_lost)

    async def _halt(self, leave: Stop) -> None:
        await leave.wait()
        await self._deps.clock.sleep(self._deps.tuning.pace.hand_over)
        leave.set(StopReason.SHUTDOWN)

    async def _pause(self, lease: Lease, leave: Stop, seconds: float) -> None:
        # At a drain `leave` is set already: the pause lasts all the same, so that retries are not continuous.
        await wait_for(lease.lost if leave.is_set and self._worker.is_holding else leave, seconds)

    async def _work(self, lease: Lease, leave: Stop) -> None:
        began = self._deps.clock.monotonic()
        try:
            await self._worker.run(lease, leave)
            self._backoff.reset()
        except LeaseLost as error:
            log.warning("lease lost", action="lease_lost", error=str(error), **self._chain.log_context())
            lease.lost.set(StopReason.LEASE_LOST)
        except (Unavailable, OutcomeUnknown) as error:
            self._report.waits(error)
            await self._pause(lease, leave, self._backoff.next())
        except Exception as error:
            if isinstance(error, FloeError) and not isinstance(error, Unforeseen):
                self._report.stopped(error)
                await self._pause(lease, leave, self._deps.tuning.pace.reexamine)
                return
            if self._deps.clock.monotonic() - began >= GOOD_WHILE:
                self._backoff.reset()
            self._report.fails(error)
            await self._pause(lease, leave, self._backoff.next())


class Runs(Protocol):
    """Task that runs until `stop` is set and its work is finished."""

    async def run(self, stop: Stop) -> None: ...


async def run_feeds(
    feeds: Sequence[Runs], deps: EgressDeps, health: Health, stop: Stop, shutdown_timeout: float
) -> bool:
    """Run until `stop` is set and all `feeds` have drained. Return True if they have, within `shutdown_timeout`
    seconds.

    `feeds` includes other tasks that run as long as the feeds do. A feed that was not drained keeps its lease until it
    expires: its uploads may still be in progress.
    """
    tasks = {
        asyncio.create_task(_run_all(feeds, stop), name="feeds"),
        asyncio.create_task(_deadline(stop, deps.clock, shutdown_timeout), name="deadline"),
        asyncio.create_task(_beat(deps, health), name="beat"),
    }
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=ABANDON)
    for task in done:
        task.result()
    return any(task.get_name() == "feeds" for task in done)


async def _run_all(feeds: Sequence[Runs], stop: Stop) -> None:
    async with asyncio.TaskGroup() as tasks:
        for feed in feeds:
            tasks.create_task(feed.run(stop))


async def _deadline(stop: Stop, clock: Clock, seconds: float) -> None:
    await stop.wait()
    await clock.sleep(seconds)
    log.error("not drained in time", action="drain_timeout", seconds=seconds)


async def _beat(deps: EgressDeps, health: Health) -> None:
    metrics.memory_limit.set(deps.budget.limit)
    while True:
        health.beat()
        metrics.memory_used.set(deps.budget.used)
        await deps.clock.sleep(BEAT)
