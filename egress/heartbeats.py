"""Heartbeats: messages that one member of the site publishes to each configured subject, and an object of each process.

A lease elects the member. A paused leader finds its lease unusable as soon as it wakes up, so two heartbeats in one
turn are rare. A heartbeat is not sent again if its acknowledgement was lost.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import closing

from common import tasks
from common.archive.heartbeats import STANDBY, HeartbeatObject
from common.clock import Clock, parse_time
from common.errors import FloeError, OutcomeUnknown, Unavailable
from common.logs import get_logger
from common.nats.api import stream_info
from common.nats.client import FloeClient, RawSubscription
from common.nats.headers import build_block
from common.nats.kv import state_key
from common.nats.lease import Lease, Leases
from common.nats.protocol import ApiError, api_answer
from common.observe.monitor import Health
from common.service.process import ThreadPool
from common.settings.egress import HeartbeatSubjectSettings
from common.settings.root import Settings
from common.tasks import Stop, cancel, first_of, restart_on_error, run_until_stopped, wait_for, warn_if_slow
from egress import metrics
from egress.deps import EgressDeps
from egress.report import FeedReport

log = get_logger(__name__)


HEARTBEAT_TIMEOUT_S = 2.0  # seconds
FIRST_SPREAD_S = 10.0  # seconds over which the first heartbeats of a leader are spread, at most an interval
PART = "heartbeats"


def heartbeat_key(site: str) -> str:
    return state_key("egress", "heartbeats", site)


class SubjectHeartbeats:
    """Heartbeats of the site, published from `host`."""

    def __init__(
        self, settings: Settings, leases: Leases, client: FloeClient, host: str, rng: random.Random, health: Health
    ) -> None:
        self._settings, self._leases, self._client = settings.egress.heartbeats, leases, client
        self._site, self._host, self._key = settings.site, host, heartbeat_key(settings.site)
        self._clock, self._rng, self._health, self._released = client.clock, rng, health, asyncio.Event()
        self._failures: dict[str, str] = {}
        self._is_leader = False

    async def run(self, stop: Stop) -> None:
        """Publish while this member leads, and wait while another does, until `stop` is set.

        Begins again after an unexpected error.
        """
        await restart_on_error("heartbeats", lambda: self._run_election(stop), self._clock)

    async def _run_election(self, stop: Stop) -> None:
        pending = tasks.PendingError()
        subscription = await self._subscribe_to_release(pending)
        try:
            while not stop.is_set:
                pending.raise_if_set()
                self._show()
                self._released.clear()
                if (lease := await self._elect()) is None:
                    pause = self._leases.ttl / 3 * self._rng.uniform(0.8, 1.0)
                    await first_of(stop.wait(), self._released.wait(), pending.event.wait(), seconds=pause)
                else:
                    await self._lead(lease, stop, pending)
        finally:
            if subscription is not None:
                await subscription.unsubscribe()

    async def _subscribe_to_release(self, pending: tasks.PendingError) -> RawSubscription | None:
        """Listen for a leader that steps down. None without the right to: the lease is then tried periodically."""
        try:
            return await self._leases.kv.subscribe(self._key, self._on_write, pending.set)
        except FloeError as error:
            log.info("heartbeat subscription refused", action="heartbeats_unsubscribed", error=str(error))
            return None

    def _on_write(self, _key: str, value: bytes | None) -> None:
        if value is None:
            self._released.set()

    async def _elect(self) -> Lease | None:
        """Return the lease; None if another member leads, or if the leader is not known."""
        try:
            return await self._leases.acquire(self._key)
        except (Unavailable, OutcomeUnknown, ApiError) as error:
            log.debug("heartbeat election failed", action="election_failed", error=str(error))
            return None

    async def _lead(self, lease: Lease, stop: Stop, pending: tasks.PendingError) -> None:
        self._is_leader = True
        self._show()
        log.info("heartbeat leadership taken", action="leadership_taken", subjects=len(self._settings.subjects))
        try:
            async with asyncio.TaskGroup() as group:
                side_tasks = [group.create_task(lease.run_renewals(), name="lease of heartbeats")]
                side_tasks += [group.create_task(self._beat(each, lease)) for each in self._settings.subjects]
                await first_of(stop.wait(), lease.lost.wait(), pending.event.wait())
                await cancel(*side_tasks)
        finally:
            self._is_leader = False
            self._show()
            await lease.release()

    # One subject

    async def _beat(self, each: HeartbeatSubjectSettings, lease: Lease) -> None:
        interval = each.interval or self._settings.interval
        due = self._clock.monotonic() + self._rng.uniform(0, min(interval, FIRST_SPREAD_S))
        block = header_block(self._settings.headers, self._host, each.subject)
        while True:
            await self._clock.sleep(due - self._clock.monotonic())
            if lease.is_usable():
                await self._publish(each.subject, block)
            due = next_due(due, interval, self._clock.monotonic())

    async def _publish(self, subject: str, block: bytes) -> None:
        started = self._clock.monotonic()
        try:
            body = b"%d" % self._clock.now()
            answer, _ = await self._client.request_raw(subject.encode(), body, block, timeout=HEARTBEAT_TIMEOUT_S)
            check_stored(answer, subject)
        except FloeError as error:
            metrics.heartbeat_errors.labels(self._site).inc()
            if self._failures.get(subject) != error.code:
                self._failures[subject] = code = error.code
                context = {"subject": subject, "code": code, "error": str(error)}
                log.warning("heartbeat failed", action="heartbeat_failed", **context)
                self._show()
        else:
            metrics.heartbeats.labels(self._site).inc()
            metrics.heartbeat_seconds.labels(self._site).observe(self._clock.monotonic() - started)
            if self._failures.pop(subject, None) is not None:
                log.info("heartbeat recovered", action="heartbeat_recovered", subject=subject)
                self._show()

    def _show(self) -> None:
        metrics.heartbeats_leader.labels(self._site).set(self._is_leader)
        self._health.set_status(PART, {"leader": self._is_leader, "failures": dict(self._failures)})


def header_block(headers: dict[str, str], host: str, subject: str) -> bytes:
    """Return the header block. Raises ValueError for a value that a header cannot carry."""
    own = {"Floe-Originator": host, "Floe-Subject": subject}
    return build_block(f"{name}: {value}".encode() for name, value in {**headers, **own}.items())


def next_due(due: float, interval: float, now: float) -> float:
    """Return the time of the heartbeat after the one at `due`; turns that have passed by `now` are skipped."""
    missed = max(0.0, now - due) // interval
    return due + interval * (missed + 1)


def check_stored(answer: bytes, subject: str) -> None:
    """Raise ApiError, Unavailable or OutcomeUnknown unless `answer` confirms that a stream stored it."""
    document = api_answer(f"heartbeat to {subject}", answer)
    if not isinstance(document.get("seq"), int):
        raise OutcomeUnknown(f"heartbeat to {subject}: expected an acknowledgement, found {answer[:60]!r}")


RETRY_FRACTION = 1 / 6  # part of the interval: by then most chains have something to report, or the store is back
STARTING = (STANDBY, "starting", "checking")


class ProcessHeartbeat:
    """Heartbeat object of this process, under the name `process`.

    `reports`: of all its chains, which may become more; `owner`: the name of this process in its leases; `on_late`:
    called if the store has not answered after half of the interval.
    """

    def __init__(
        self,
        site: str,
        process: str,
        owner: str,
        reports: Sequence[FeedReport],
        deps: EgressDeps,
        client: FloeClient,
        on_late: Callable[[], None] = lambda: None,
    ) -> None:
        self._site, self._process, self._owner, self._reports = site, process, owner, reports
        self._chains, self._client, self._clock = deps.chains, client, deps.clock
        self._interval, self._on_late, self._failure = deps.tuning.intervals.alive, on_late, ""
        self._is_retry_due = False
        self._put_states: dict[FeedReport, str] = {}

    async def run(self, stop: Stop) -> None:
        await restart_on_error("alive", lambda: self._put_regularly(stop), self._clock)

    async def _put_regularly(self, stop: Stop) -> None:
        with closing(ThreadPool("alive", 1)) as threads:
            await wait_for(stop, self._interval * RETRY_FRACTION)
            while not stop.is_set:
                began = self._clock.monotonic()
                await run_until_stopped(stop, self._put_once(threads))
                # Until it is stored, the site appears silent at the centre: so put it soon after the store is back.
                until = began + self._interval * (RETRY_FRACTION if self._is_retry_due else 1)
                while (left := until - self._clock.monotonic()) > 0 and not stop.is_set:
                    await wait_for(stop, min(left, self._interval * RETRY_FRACTION))
                    if self._has_taken_over():
                        break

    async def _put_once(self, threads: ThreadPool) -> None:
        await self._read_sources()
        chains = tuple(report.heartbeat() for report in self._reports)
        self._put_states = dict(zip(self._reports, (each.state for each in chains), strict=True))
        alive = HeartbeatObject(self._site, self._owner, self._clock.now(), chains)
        try:
            put = asyncio.create_task(threads.run(self._chains.write_heartbeat, self._process, alive))
            await warn_if_slow(self._measure_while_putting(put), self._interval / 2, self._on_late)
        except FloeError as error:
            metrics.alive_errors.labels(self._site).inc()
            self._is_retry_due = isinstance(error, Unavailable | OutcomeUnknown)
            if self._failure != error.code:  # logged once for each code, until it works again
                self._failure = code = error.code
                log.warning("process heartbeat failed", action="process_heartbeat_failed", code=code, error=str(error))
        else:
            self._is_retry_due = False
            metrics.alive_put.labels(self._site).set(alive.time)
            if self._failure:
                self._failure = ""
                log.info("process heartbeat recovered", action="process_heartbeat_recovered")

    def _has_taken_over(self) -> bool:
        """True if a chain is worked on that the last heartbeat lacks, or shows as standby, or as only just begun."""
        waiting = [each for each in self._reports if self._put_states.get(each, STANDBY) in STARTING]
        return any(report.heartbeat().state not in STARTING for report in waiting)

    async def _measure_while_putting(self, put: asyncio.Task[None]) -> None:
        """Return the result of `put`. While the store is silent, keep measuring the lag that its silence causes."""
        try:
            while not (await asyncio.wait({put}, timeout=self._interval))[0]:
                await self._read_sources()
            put.result()
        finally:
            await cancel(put)

    async def _read_sources(self) -> None:
        # A session asks for the state of its stream too.
        asking = [report for report in self._reports if report.needs_source(self._interval / 2)]
        streams = sorted({report.stream for report in asking})
        answers = dict(zip(streams, await asyncio.gather(*map(self._read_stream, streams)), strict=True))
        for report in asking:
            if (answer := answers[report.stream]) is not None:
                report.record_source(*answer)

    async def _read_stream(self, stream: str) -> tuple[int, int | None] | None:
        """Return sequence and time of the last message; None if it cannot be queried, or if there is no such stream."""
        if not self._client.is_up:
            return None
        try:
            info = await stream_info(self._client, stream)
        except FloeError as error:
            log.debug("source not read", action="source_unread", stream=stream, error=str(error))
            return None
        if info is None:
            return None
        return info.last_sequence, parse_time(info.last_timestamp) if info.messages else None


class Reachability:
    """Reachability of the store and NATS, as metrics of this process; both begin as not reached. That of the store is
    in `health` too.
    """

    def __init__(self, clock: Clock, health: Health) -> None:
        self._clock, self._health, self._lines = clock, health, dict[str, bool]()
        for each in (metrics.store_reachable, metrics.nats_reachable):
            each.set(0)

    def set_store(self, has_answered: bool) -> None:
        """Record an answer of the store, or its absence. Callable from any thread."""
        metrics.store_reachable.set(has_answered)
        reason = "the store does not answer, or refuses the credential"
        self._health.set_ready("objects", has_answered, reason)
        if has_answered:
            metrics.store_answered.set(self._clock.now())

    def set_nats(self, line: str, is_up: bool) -> None:
        self._lines[line] = is_up
        are_up, now = all(self._lines.values()), self._clock.now()
        metrics.nats_reachable.set(are_up)
        metrics.nats_answered.set_function(self._clock.now if are_up else lambda: now)
