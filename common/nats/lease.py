"""Leases in a bucket with entries that expire: the right to work on something for a limited time.

A lease saves work, it does not guard data (promise I9): another instance may believe that it holds the same lease, so
no decision depends on the lease alone. Its holder uses it until its deadline less a margin, on the monotonic clock; a
paused process therefore finds it unusable the moment it wakes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket

from common.clock import Clock
from common.errors import FloeError, OutcomeUnknown
from common.logs import get_logger
from common.nats.kv import BucketDeleted, KeyValue
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


class Leases:
    """The leases of one owner in the bucket `kv` with a time to live of `ttl` seconds.

    Methods raise the errors of the bucket.
    """

    def __init__(self, kv: KeyValue, owner: str, ttl: float, clock: Clock) -> None:
        if kv.ttl != ttl:
            raise ValueError(f"bucket {kv.bucket}: expected a time to live of {ttl:g} s, found {kv.ttl or 0:g} s")
        self.kv, self.owner, self.ttl, self.clock = kv, owner, ttl, clock

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
        self._ttl, self._clock, self._deadline = leases.ttl, leases.clock, started + leases.ttl
        self._is_late = False

    def is_usable(self) -> bool:
        """True if new work may begin under this lease: more than a third of its time is left."""
        return not self.lost.is_set and self._clock.monotonic() < self._deadline - self._ttl / 3

    async def run_renewals(self) -> None:
        """Renew the lease every third of its time until it is lost. Run it as a task; cancel it before `release`.

        One cancellation ends it: a lease must not be renewed without a holder. If it ends in any other way, the lease
        counts as lost, and the holder sees that.
        """
        try:
            await self._run_renewals()
        except Exception as error:
            record_unexpected(error, "lease", f"lease {self.key}")
            self._mark_lost("its renewal failed unexpectedly")

    async def _run_renewals(self) -> None:
        pause = self._ttl / 3
        while not self.lost.is_set:
            await self._clock.sleep(pause)
            if self._clock.monotonic() >= self._deadline:
                self._mark_lost("it was not renewed in time")
            else:
                pause = self._ttl / (3 if await self._renew() else 10)
            # `asyncio.wait_for` in Python 3.11 loses a cancellation that comes together with its result.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError

    async def release(self) -> None:
        """Delete the lease, so that another owner need not wait; if this fails, it expires."""
        held = not self.lost.is_set
        self.lost.set(StopReason.LEASE_LOST)
        for _ in range(SETTLE_ATTEMPTS if held else 0):
            try:
                if await self._kv.delete(self.key, self._revision) or not await self._adopt():
                    return
            except FloeError as error:
                log.info("lease release failed", action="lease_release_failed", key=self.key, error=str(error))
                return

    async def _renew(self) -> bool:
        """Renew the lease; return False if that failed: the lease is lost, or the next attempt follows."""
        try:
            for _ in range(SETTLE_ATTEMPTS):
                started = self._clock.monotonic()
                if (revision := await self._rewrite()) is not None:
                    self._revision, self._deadline = revision, started + self._ttl
                    if self._is_late:
                        self._is_late = False
                        log.info("lease renewal recovered", action="lease_renewal_recovered", key=self.key)
                    return True
                if not await self._adopt():
                    self._mark_lost("another owner holds it, or it expired")
                    return False
        except FloeError as error:  # after any error, the remaining time decides
            log.warning("lease renewal failed", action="lease_renewal_failed", key=self.key, error=str(error))
            self._is_late = True
        return False

    async def _rewrite(self) -> int | None:
        """Write the value again and return its revision; None if the key holds another value or a deletion.

        If the key holds nothing although the lease has not expired, the server restarted without its stored data. The
        lease is then still ours: no other process knows that it is free.
        """
        try:
            if (revision := await self._kv.update(self.key, self._value, self._revision)) is not None:
                return revision
        except BucketDeleted:
            await self._kv.ensure()
        return await self._kv.update(self.key, self._value, 0)

    async def _adopt(self) -> bool:
        """Take the revision of our own write if its answer was lost; return False if the value is not ours.

        The deadline stays: it is unknown which of several attempts wrote the value. The next renewal sets the deadline.
        """
        if (entry := await self._kv.get(self.key)) is None or entry.value != self._value:
            return False
        self._revision = entry.revision
        return True

    def _mark_lost(self, reason: str) -> None:
        log.warning("lease lost", action="lease_lost", key=self.key, error=reason)
        self.lost.set(StopReason.LEASE_LOST)
