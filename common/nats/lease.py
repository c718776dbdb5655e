"""Leases in a bucket with entries that expire: the right to work on something for a limited time.

A lease saves work, it does not guard data (promise I9): another instance may believe that it holds the same lease, so
no decision depends on the lease alone. Its holder uses it until its deadline less a margin, on the monotonic clock; a
paused process therefore finds it unusable the moment it wakes.

A service renews its leases on a thread (`RenewalThread`), so that work which holds the event loop for long loses none.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Self, TypeVar

from common.clock import Clock, sleep_in_step
from common.errors import FloeError, OutcomeUnknown, Unavailable
from common.logs import get_logger
from common.nats.client import FloeClient
from common.nats.kv import BucketDeleted, KeyValue, kv_replicas
from common.settings.service import ServiceSettings
from common.tasks import Stop, StopReason, record_unexpected

log = get_logger(__name__)

SETTLE_ATTEMPTS = 3  # attempts to settle a write after its answer was lost


def new_owner(instance: str) -> str:
    """Return a name that no other process has, on any host: `instance/host/pid/random`."""
    return f"{instance or '-'}/{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"


def format_owner(owner: str) -> str:
    """Return an owner for people: `label on host (process 370)`; text that `new_owner` did not make stays as it is."""
    parts = owner.rsplit("/", 3)
    if len(parts) < 4:
        return owner
    instance, host, process, _ = parts
    return f"{instance} on {host} (process {process})" if instance != "-" else f"{host} (process {process})"


T = TypeVar("T")

#: Renews a lease in the given bucket until it is lost, and returns the reason. It calls the function before each
#: renewal; that raises Unavailable if there must be none.
Renew = Callable[[KeyValue, Callable[[], None]], Coroutine[Any, Any, str]]

MAX_SILENCE_S = 60.0  # seconds without a sign of life of the work, after which none of its leases is renewed


class RenewalThread:
    """Renewals on a thread with an event loop and a connection of its own, for as long as the block runs.

    `connect` is called on the thread. `silence` returns the seconds since the last sign of life of the work: nothing is
    renewed while that is more than MAX_SILENCE_S, as a process that hangs must lose its leases.
    """

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, FloeClient]], silence: Callable[[], float]) -> None:
        self._connect, self._silence, self._loop = connect, silence, asyncio.new_event_loop()
        self._client: FloeClient | None = None
        self._bucket: KeyValue | None = None
        self._is_connected: Callable[[], bool] = lambda: True

    async def __aenter__(self) -> Self:
        here = asyncio.get_running_loop()
        # An error without an owner ends the service, also if it comes from the thread.
        self._loop.set_exception_handler(
            lambda _, context: here.call_soon_threadsafe(here.call_exception_handler, context)
        )
        threading.Thread(target=self._run_loop, name="leases", daemon=True).start()
        return self

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._call(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def open(self, bucket: Callable[[FloeClient], KeyValue], is_connected: Callable[[], bool]) -> None:
        """Connect, unless that is done; `bucket` returns the bucket of the leases. Raises the errors of `connect`.

        `is_connected`: True while the work has its own connection. Without it nothing is renewed: another holder may
        have one.
        """
        if self._client is None:
            self._client = await self._call(self._connect())
        self._bucket, self._is_connected = bucket(self._client), is_connected

    async def run(self, renew: Renew) -> str:
        """Run `renew` on the thread to its end. If this is cancelled, `renew` is, and has ended when this ends."""
        assert self._bucket is not None, "a lease is acquired after `open`"
        return await self._call(renew(self._bucket, self._check_alive))

    def _check_alive(self) -> None:
        if (seconds := self._silence()) > MAX_SILENCE_S:
            raise Unavailable(f"expected a sign of life of the work within {MAX_SILENCE_S:.0f} s, found {seconds:.0f}")
        if not self._is_connected():
            raise Unavailable("the connection of the work is down")

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        here, tasks = asyncio.get_running_loop(), list[asyncio.Task[T]]()
        result: asyncio.Future[T] = here.create_future()

        def pass_on(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                result.cancel()
            elif (error := task.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(task.result())

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: here.call_soon_threadsafe(pass_on, task))

        self._loop.call_soon_threadsafe(begin)
        try:
            await asyncio.wait({result})
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            await asyncio.wait({result})
            raise
        return result.result()


class Leases:
    """The leases of one owner in the bucket `kv` with a time to live of `ttl` seconds.

    `thread`: renews them; None: the event loop and the connection of the work do. Methods raise the errors of the
    bucket.
    """

    def __init__(self, kv: KeyValue, owner: str, ttl: float, clock: Clock, thread: RenewalThread | None = None) -> None:
        if kv.ttl != ttl:
            raise ValueError(f"bucket {kv.bucket}: expected a time to live of {ttl:g} s, found {kv.ttl or 0:g} s")
        self.kv, self.owner, self.ttl, self.clock, self.thread = kv, owner, ttl, clock, thread

    async def acquire(self, key: str) -> Lease | None:
        """Acquire the lease; return None if another owner holds it. Raises Unavailable, OutcomeUnknown."""
        try:
            return await self._acquire(key)
        except BucketDeleted:
            await self.kv.ensure()
            return await self._acquire(key)

    async def _acquire(self, key: str) -> Lease | None:
        started = self.clock.monotonic()
        try:
            revision = await self.kv.create(key, self.owner.encode())
        except OutcomeUnknown:
            revision = None  # the write may have happened; the value below settles it
        if revision is None:
            # If this owner already holds the lease, write it again: its remaining time is unknown.
            started = self.clock.monotonic()
            if (entry := await self.kv.get(key)) is None or entry.value != self.owner.encode():
                return None
            if (revision := await self.kv.update(key, entry.value, entry.revision)) is None:
                return None
        return Lease(self, key, revision, started)

    async def get_owner(self, key: str) -> str | None:
        """Return the owner; None if the lease is free."""
        entry = await self.kv.get(key)
        return None if entry is None else entry.value.decode("utf-8", "backslashreplace")


class Lease:
    """One lease that this owner held at `started` (monotonic seconds).

    `lost` is set when another owner holds the lease, when it was deleted, or when the deadline passed; it stays set.
    The group that shares leases sets `return_requested`: the work then ends at the next suitable point.
    """

    def __init__(self, leases: Leases, key: str, revision: int, started: float) -> None:
        self.key, self.lost, self.return_requested = key, Stop(), Stop()
        self._kv, self._value, self._revision = leases.kv, leases.owner.encode(), revision
        self._ttl, self._clock, self._thread = leases.ttl, leases.clock, leases.thread
        self._deadline = started + leases.ttl  # read by the work at any time, moved by the renewals alone
        self._is_late = False

    def is_usable(self) -> bool:
        """True if new work may begin under this lease: more than a third of its time is left."""
        return not self.lost.is_set and self._clock.monotonic() < self._deadline - self._ttl / 3

    async def run_renewals(self) -> None:
        """Renew the lease every third of its time until it is lost. Run it as a task; cancel it before `release`.

        One cancellation ends it: a lease must not be renewed without a holder. If it ends in any other way, the lease
        counts as lost, and the holder sees that.
        """
        renew = self._renew_until_lost
        try:
            reason = await (self._thread.run(renew) if self._thread else renew(self._kv, lambda: None))
        except Exception as error:
            record_unexpected(error, "lease", f"lease {self.key}")
            reason = "its renewal failed unexpectedly"
        if reason:
            log.warning("lease lost", action="lease_lost", key=self.key, error=reason)
            self.lost.set(StopReason.LEASE_LOST)

    async def _renew_until_lost(self, kv: KeyValue, check_alive: Callable[[], None]) -> str:
        """Renew the lease by `kv`. Return the reason why it is lost; empty if the holder knows."""
        pause = self._ttl / 3
        while not self.lost.is_set:
            await sleep_in_step(self._clock, pause)
            if self._clock.monotonic() >= self._deadline:
                return "it was not renewed in time"
            if (is_renewed := await self._renew(kv, check_alive)) is None:
                self._deadline = float("-inf")  # for a holder that looks before it learns of the loss
                return "another process holds it, or it expired"
            pause = self._ttl / (3 if is_renewed else 10)
            # `asyncio.wait_for` in Python 3.11 loses a cancellation that comes together with its result.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError
        return ""

    async def release(self) -> None:
        """Delete the lease, so that another owner need not wait; if this fails, it expires."""
        held = not self.lost.is_set
        self.lost.set(StopReason.LEASE_LOST)
        for _ in range(SETTLE_ATTEMPTS if held else 0):
            try:
                if await self._kv.delete(self.key, self._revision) or not await self._adopt(self._kv):
                    return
            except FloeError as error:
                log.info("lease release failed", action="lease_release_failed", key=self.key, error=str(error))
                return

    async def _renew(self, kv: KeyValue, check_alive: Callable[[], None]) -> bool | None:
        """Renew the lease; return False if that failed and the next attempt follows, None if the lease is lost."""
        try:
            check_alive()
            for _ in range(SETTLE_ATTEMPTS):
                started = self._clock.monotonic()
                if (revision := await self._rewrite(kv)) is not None:
                    self._revision, self._deadline = revision, started + self._ttl
                    if self._is_late:
                        self._is_late = False
                        log.info("lease renewal recovered", action="lease_renewal_recovered", key=self.key)
                    return True
                if not await self._adopt(kv):
                    return None
        except FloeError as error:  # after any error, the remaining time decides
            log.warning("lease renewal failed", action="lease_renewal_failed", key=self.key, error=str(error))
            self._is_late = True
        return False

    async def _rewrite(self, kv: KeyValue) -> int | None:
        """Write the value again and return its revision; None if the key holds another value or a deletion.

        If the key holds nothing although the lease has not expired, the server restarted without its stored data. The
        lease is then still ours: no other process knows that it is free.
        """
        try:
            if (revision := await kv.update(self.key, self._value, self._revision)) is not None:
                return revision
        except BucketDeleted:
            await kv.ensure()
        return await kv.update(self.key, self._value, 0)

    async def _adopt(self, kv: KeyValue) -> bool:
        """Take the revision of our own write if its answer was lost; return False if the value is not ours.

        The deadline stays: it is unknown which of several attempts wrote the value. The next renewal sets the deadline.
        """
        if (entry := await kv.get(self.key)) is None or entry.value != self._value:
            return False
        self._revision = entry.revision
        return True


async def open_leases(
    client: FloeClient,
    settings: ServiceSettings,
    owner: str,
    clock: Clock,
    *,
    target: str = "",
    replicas: int = 0,
    thread: RenewalThread | None = None,
) -> Leases:
    """Return the leases of `owner`; create their bucket if it is missing. `target`: as in `kv_replicas`; `replicas`: of
    a bucket that is created, for a caller that may not read the streams (0: as `kv_replicas`). `thread`: as in
    `Leases`; it connects if it has not.
    """
    bucket = partial(_lease_bucket, settings=settings, target=target, replicas=replicas)
    here = await bucket(client).ensure()
    if thread is not None:
        await thread.open(bucket, lambda: client.is_up)
    return Leases(here, owner, settings.lease_ttl, clock, thread)


def optional_leases(client: FloeClient, settings: ServiceSettings, owner: str, clock: Clock) -> Leases:
    return Leases(_lease_bucket(client, settings, optional=True), owner, settings.lease_ttl, clock)


def _lease_bucket(
    client: FloeClient, settings: ServiceSettings, target: str = "", replicas: int = 0, optional: bool = False
) -> KeyValue:
    count = replicas or partial(kv_replicas, client, settings, target)
    ttl, size = settings.lease_ttl, settings.lease_bytes
    return KeyValue(client, settings.lease_bucket, ttl=ttl, replicas=count, optional=optional, max_bytes=size)
