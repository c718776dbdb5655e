"""Who may replay into a target: one, and no ingress meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.clock import Clock, wait_for
from common.errors import LeaseLost
from common.jetstream.client import FloeClient
from common.jetstream.kv import KeyValue, state_key
from common.jetstream.lease import Lease, Leases, owner_text
from common.settings.service import ServiceSettings
from common.tasks import end
from ingress.checkpoints.state import ROLE as INGRESS
from ingress.replay.advice import Advice
from ingress.replay.progress import Teller
from ingress.replay.receipt import receipt_key


class HeldError(LeaseLost):
    """Somebody else holds the target, and goes on holding it."""

    default_code = "E-REPLAY-RUNS"


class Tenures:
    """The right to carry while all of `leases` may be used (`ingress.ports.Tenure`)."""

    def __init__(self, *leases: Lease) -> None:
        self.leases = leases

    def is_usable(self) -> bool:
        return all(lease.is_usable() for lease in self.leases)

    @property
    def is_lost(self) -> bool:
        return any(lease.lost.is_set() for lease in self.leases)


@asynccontextmanager
async def leased(
    client: FloeClient,
    settings: ServiceSettings,
    target: str,
    owner: str,
    clock: Clock,
    teller: Teller,
    stop: asyncio.Event,
    advice: Advice,
) -> AsyncIterator[Tenures]:
    """The leases of replay and of ingress on `target`; those of a killed holder are waited for.

    An ingress that is told of the target meanwhile then waits too. Raises HeldError where a holder lives on,
    or `stop` is set first.
    """
    ttl, replicas = settings.lease_ttl, settings.kv_replicas or 1
    bucket = await KeyValue.open(client, settings.lease_bucket, ttl=ttl, replicas=replicas)
    waiting = _Waiting(Leases(bucket, owner, ttl, clock), target, clock, teller, stop, advice)
    held: dict[Lease, asyncio.Task[None]] = {}
    try:
        for key in (receipt_key(target), state_key(INGRESS, target)):
            lease = await waiting.acquired(key)
            # From now on: planning may take longer than a lease lives.
            held[lease] = asyncio.create_task(lease.keep(), name=f"keep-{key}")
        yield Tenures(*held)
    finally:
        for lease, keeping in held.items():
            await end(keeping)
            await lease.release()


class _Waiting:
    """Waits for leases, longer than a killed holder's live."""

    def __init__(
        self,
        leases: Leases,
        target: str,
        clock: Clock,
        teller: Teller,
        stop: asyncio.Event,
        advice: Advice,
    ) -> None:
        self._advice = advice
        self._leases, self._target, self._clock, self._teller = leases, target, clock, teller
        self._stop, self._told = stop, False

    async def acquired(self, key: str) -> Lease:
        deadline = self._clock.monotonic() + 1.5 * self._leases.ttl + 1
        while (lease := await self._leases.acquire(key)) is None:
            holder = owner_text(await self._leases.holder(key) or "nobody any more")
            if self._stop.is_set() or self._clock.monotonic() > deadline:
                raise self._held(key, holder)
            if not self._told:
                self._teller.say(f"waiting for the lease of {holder}")
                self._told = True
            await wait_for(self._stop, min(0.5, self._leases.ttl / 4))
        return lease

    def _held(self, key: str, holder: str) -> HeldError:
        what, then = "a replay", "wait until it is done, or stop it there"
        if key == state_key(INGRESS, self._target):
            what, then = "ingress", "stop that ingress, or replay into another stream (--target)"
        return HeldError(
            f"target {self._target}: {what} by {holder} carries into it",
            hint=f"{then}; then: {self._advice.same()}",
        )
