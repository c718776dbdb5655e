"""Run of the partitions of all feeds: one task for each, under its lease; readiness and drain.

A feed never ends the service. An error that only an operator can repair stops its own chain, which is examined again
later. An unreachable server or store is retried. An instance without the lease is a standby. An unexpected error ends
the session, which begins again after a growing pause (`common/clock.py`).
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Protocol

from common.clock import Backoff, Clock
from common.errors import FloeError, LeaseLost, OutcomeUnknown, Unavailable, UnexpectedError
from common.exits import choices, nats_command
from common.leasing import LeaseGroup
from common.logs import get_logger
from common.nats.api import LIMITS
from common.nats.lease import Lease
from common.observe.monitor import Health
from common.settings.egress import FeedSettings
from common.tasks import BACKOFF_RESET_S, Stop, StopReason, cancel, raise_fatal, restart_on_error, spawn, wait_for
from egress import metrics
from egress.consumers import WantedMessages, own_durables
from egress.deps import EgressDeps, ProcessThreads
from egress.partition import Partition, lease_key, partitions_of
from egress.report import FeedReport, watch_unmatched
from egress.session import SessionFlush
from egress.worker import Worker

log = get_logger(__name__)

HEALTH_BEAT_S = 1.0  # seconds
RESCUE_INTERVAL_S = 2.0  # seconds between attempts to put the messages that were left at the loss of a lease
LEASE_RECHECK_S = 0.2  # seconds between checks if a lease that was not renewed in time is usable again
CANCEL_TIMEOUT_S = 2.0  # seconds for cancelled tasks to end after the shutdown timeout


class PartitionFeed:
    """Partition of a feed in this process: waits for its lease, works under it, gives it back.

    `wanted`: the partition, or the one that begins in its place after its end; None: none does.
    """

    def __init__(
        self, partition: Partition, deps: EgressDeps, sharing: LeaseGroup, health: Health, threads: ProcessThreads
    ) -> None:
        self.chain = partition.chain
        self.partition = partition
        self.wanted: Partition | None = partition
        self._pools = threads.pools()
        self.report = FeedReport(self.chain, partition.stream, health, deps.clock)
        self.report.set_state("starting", ready=False, reason="the holder of its lease is not known yet")
        self._sharing = sharing
        self._slot = sharing.slot(lease_key(self.chain), self.report)
        self._deps = deps.for_partition(partition, self.report, self._pools)
        self._worker, self._backoff = Worker(self._deps), Backoff(deps.rng)
        self._removed = Stop()

    def replace(self, wanted: Partition | None) -> None:
        """End as soon as everything is put. The last call decides what begins then."""
        self.wanted = wanted
        if wanted is None:
            self._sharing.drop_key(self._slot.key)
        self._removed.set()

    def flush(self, incarnation: int | None = None, least: int = 0) -> SessionFlush | None:
        """Flush as `Session.flush`; return None also if this process does not read the partition."""
        return self._worker.flush(incarnation, least)

    async def run(self, stop: Stop) -> None:
        """Work until `stop` is set, or `replace` was called, and everything is put."""
        stop = Stop(stop, self._removed)
        try:
            with closing(self._pools):
                while (lease := await self._wait_for_lease(stop)) is not None:
                    await self._work_under_lease(lease, stop)
                while self._worker.has_unput_rows:
                    await self._put_remaining(stop)
        finally:
            self._worker.log_and_discard()

    async def leave(self) -> None:
        """Leave the group that shares the leases, and remove the report, after the end of `run`."""
        await self._sharing.remove_slot(self._slot)
        self.report.remove()

    async def _wait_for_lease(self, stop: Stop) -> Lease | None:
        """Return the lease; None at a stop. Meanwhile, put messages left from a lost lease if their stream is gone."""
        rescue = restart_on_error("rescue", self._rescue, self._deps.clock)
        rescue_task = spawn(rescue, raise_fatal, name=f"rescue {self.chain}")
        try:
            return await self._slot.wait_for_lease(stop)
        finally:
            await cancel(rescue_task)

    async def _rescue(self) -> None:
        while self._worker.has_unput_rows:
            held = None
            try:
                self.report.set_held(held := await self._worker.put_if_stream_gone())
            except FloeError as error:
                log.info(
                    "held rows deferred", action="held_rows_deferred", error=str(error), **self.chain.log_context()
                )
            await self._deps.clock.sleep(RESCUE_INTERVAL_S if held is None else self._deps.tuning.intervals.reexamine)
        self.report.set_held(None)

    async def _put_remaining(self, stop: Stop) -> None:
        """Retry the drain. The deadline of the drain ends it."""
        try:
            if await self._worker.can_discard():
                self._worker.discard()
            elif (lease := await self._sharing.reacquire(self._slot)) is not None:
                await self._work_under_lease(lease, stop)
            else:
                await self._worker.put_if_stream_gone()
        except FloeError as error:
            self.report.set_waiting(error)
        if self._worker.has_unput_rows:
            await self._deps.clock.sleep(self._backoff.next_delay())

    async def _work_under_lease(self, lease: Lease, stop: Stop) -> None:
        """Work under the lease until it is lost or to be given back, or `stop` is set.

        It is given back only once no upload is in progress: another instance would begin beside it.
        """
        self.report.set_starting()
        local_stop = Stop(stop, lease.lost, lease.return_requested)
        args = self.partition, self._deps.client, self._pools.io, self.report, self._deps.clock
        watch = restart_on_error("unmatched", lambda: watch_unmatched(*args), self._deps.clock)
        side_tasks = [
            spawn(watch, raise_fatal, name=f"unmatched {self.chain}"),
            spawn(lease.run_renewals(), raise_fatal, name=f"lease {self.chain}"),
            spawn(self._stop_after_hand_over(local_stop), raise_fatal, name=f"halt {self.chain}"),
        ]
        try:
            while not lease.lost.is_set and (not local_stop.is_set or self._worker.has_unput_rows):
                if lease.is_usable():
                    await self._run_worker(lease, local_stop)
                else:  # not released: another would take it before it expires, without the messages held here
                    await wait_for(lease.lost, LEASE_RECHECK_S)
            await self._pools.idle()
        finally:
            await cancel(*side_tasks)
        was_lost = lease.lost.is_set
        await lease.release()
        self._slot.give_up(lost=was_lost)

    async def _stop_after_hand_over(self, local_stop: Stop) -> None:
        await local_stop.wait()
        await self._deps.clock.sleep(self._deps.tuning.intervals.hand_over)
        local_stop.set(StopReason.SHUTDOWN)

    async def _pause(self, lease: Lease, local_stop: Stop, seconds: float) -> None:
        # At a drain `local_stop` is set already: the pause lasts all the same, so that retries are not continuous.
        await wait_for(lease.lost if local_stop.is_set and self._worker.has_unput_rows else local_stop, seconds)

    async def _run_worker(self, lease: Lease, local_stop: Stop) -> None:
        began = self._deps.clock.monotonic()
        try:
            await self._worker.run(lease, local_stop)
            self._backoff.reset()
        except LeaseLost as error:
            log.warning("lease lost", action="lease_lost", error=str(error), **self.chain.log_context())
            lease.lost.set(StopReason.LEASE_LOST)
        except (Unavailable, OutcomeUnknown) as error:
            self.report.set_waiting(error)
            await self._pause(lease, local_stop, self._backoff.next_delay())
        except Exception as error:
            if isinstance(error, FloeError) and not isinstance(error, UnexpectedError):
                self.report.set_stopped(error)
                await self._pause(lease, local_stop, self._deps.tuning.intervals.reexamine)
                return
            if self._deps.clock.monotonic() - began >= BACKOFF_RESET_S:
                self._backoff.reset()
            self.report.record_failure(error)
            await self._pause(lease, local_stop, self._backoff.next_delay())


class FeedSet:
    """Partitions of this process, which come and go while it runs. `feeds`, `reports`: those at this moment."""

    def __init__(
        self, site: str, deps: EgressDeps, sharing: LeaseGroup, health: Health, threads: ProcessThreads
    ) -> None:
        self._site, self._deps, self._sharing, self._health, self._threads = site, deps, sharing, health, threads
        self.feeds: list[PartitionFeed] = []
        self.reports: list[FeedReport] = []
        self._begin: Callable[[PartitionFeed], object] = lambda _: None

    def change(self, name: str, feed: FeedSettings | None) -> None:
        """Let `feed` take the place of the feed `name`, if there is one, each partition once the former one has
        drained; None: nothing does. New partitions begin at once if the others have begun.
        """
        wanted = {each.number: each for each in partitions_of(self._site, feed)} if feed else {}
        for running in self.feeds:
            if running.chain.feed == name:
                running.replace(wanted.pop(running.chain.partition, None))
        for each in wanted.values():
            self._add(each)

    def _add(self, partition: Partition) -> None:
        added = PartitionFeed(partition, self._deps, self._sharing, self._health, self._threads)
        self.feeds.append(added)
        self.reports.append(added.report)
        self._deps.budget.chains = len(self.feeds)
        self._begin(added)

    def matched(self) -> dict[str, PartitionFeed]:
        """Return the feeds of streams that patterns match, by name; each has one partition."""
        return {each.chain.feed: each for each in self.feeds if each.wanted and each.wanted.settings.streams}

    async def _run_feed(self, feed: PartitionFeed, stop: Stop) -> None:
        await feed.run(stop)
        if stop.is_set:
            return
        await feed.leave()
        self.feeds.remove(feed)
        self.reports.remove(feed.report)
        self._deps.budget.chains = len(self.feeds)
        if feed.wanted is not None:
            self._add(feed.wanted)
            return
        hint, stream = "its archive stays, and a feed of this name continues it", feed.partition.stream
        with suppress(FloeError):
            for each in await own_durables(self._deps.client, WantedMessages(feed.partition, LIMITS)):
                keeps = f"once no process archives it: {stream} keeps messages for it until"
                hint = choices(hint, (keeps, nats_command("consumer rm", stream, each)))
        log.warning("feed removed", action="feed_removed", hint=hint, **feed.chain.log_context())

    async def run(self, stop: Stop) -> None:
        """Run all feeds until `stop` is set and they have drained."""
        async with asyncio.TaskGroup() as tasks:
            self._begin = lambda feed: tasks.create_task(self._run_feed(feed, stop))
            for feed in self.feeds:
                self._begin(feed)
            await stop.wait()
            self._begin = lambda _: None


class Runnable(Protocol):
    """Task that runs until `stop` is set and its work is finished."""

    async def run(self, stop: Stop) -> None: ...


async def run_feeds(
    feeds: Sequence[Runnable], deps: EgressDeps, health: Health, stop: Stop, shutdown_timeout: float
) -> bool:
    """Run until `stop` is set and all `feeds` have drained. Return True if they have, within `shutdown_timeout`
    seconds.

    `feeds` includes other tasks that run as long as the feeds do. A feed that was not drained keeps its lease until it
    expires: its uploads may still be in progress.
    """
    running = asyncio.create_task(_run_all(feeds, stop), name="feeds")
    tasks = {
        running,
        asyncio.create_task(_deadline(stop, deps.clock, shutdown_timeout), name="deadline"),
        asyncio.create_task(_beat(deps, health), name="beat"),
    }
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)
    for task in done:
        task.result()
    return running in done


async def _run_all(feeds: Sequence[Runnable], stop: Stop) -> None:
    async with asyncio.TaskGroup() as tasks:
        for feed in feeds:
            tasks.create_task(feed.run(stop))


async def _deadline(stop: Stop, clock: Clock, seconds: float) -> None:
    await stop.wait()
    await clock.sleep(seconds)
    log.error("drain timed out", action="drain_timed_out", seconds=seconds)


async def _beat(deps: EgressDeps, health: Health) -> None:
    metrics.memory_limit.set(deps.budget.limit)
    while True:
        health.beat()
        metrics.memory_used.set(deps.budget.used)
        await deps.clock.sleep(HEALTH_BEAT_S)
