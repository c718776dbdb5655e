"""Who may replay into a target: one, and no ingress meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.clock import Clock, wait_for
from common.errors import LeaseLost
from common.jetstream.client import FloeClient
from common.jetstream.kv import BucketGone, KeyValue, state_key
from common.jetstream.lease import Lease, Leases, owner_text
from common.service.pasting import ways
from common.settings.service import ServiceSettings
from common.tasks import end, orphaned, watched
from ingress.checkpoints.state import ROLE as INGRESS
from ingress.deps import open_bucket
from ingress.replay.advice import Advice
from ingress.replay.progress import Teller
from ingress.replay.receipt import receipt_key


class HeldError(LeaseLost):
    """Somebody else holds the target, and goes on holding it."""

    default_code = "E-REPLAY-RUNS"


class Tenures:
    """The right to carry while all of `leases` may be used (`ingress.interfaces.Tenure`)."""

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
    ttl = settings.lease_ttl
    bucket = await open_bucket(client, settings, settings.lease_bucket, ttl=ttl, target=target)
    waiting = _Waiting(Leases(bucket, owner, ttl, clock), target, clock, teller, stop, advice)
    held: dict[Lease, asyncio.Task[None]] = {}
    try:
        for key in (receipt_key(target), state_key(INGRESS, target)):
            lease = await waiting.acquired(key)
            # From now on: planning may take longer than a lease lives.
            held[lease] = watched(lease.keep(), orphaned, name=f"keep-{key}")
        yield Tenures(*held)
    finally:
        for lease, keeping in held.items():
            await end(keeping)
            await lease.release()


async def check_free(client: FloeClient, settings: ServiceSettings, target: str, advice: Advice) -> None:
    """Raises HeldError where somebody holds a lease on `target` now. Makes no bucket and takes no lease."""
    bucket = KeyValue(client, settings.lease_bucket, ttl=settings.lease_ttl, replicas=1)
    for key in (receipt_key(target), state_key(INGRESS, target)):
        try:
            entry = await bucket.get(key)
        except BucketGone:
            return
        if entry is not None:
            raise held_error(advice, target, key, owner_text(entry.value.decode("utf-8", "backslashreplace")))


def held_error(advice: Advice, target: str, key: str, holder: str) -> HeldError:
    """What to say where `holder` holds the lease `key` on the target."""
    what, then = "a replay", "wait until it is done, or stop it there"
    if key == state_key(INGRESS, target):
        what, then = "ingress", "stop that ingress, or replay into another stream (--target)"
    return HeldError(
        f"target {target}: {what} by {holder} carries into it",
        hint=ways((f"{then}; then", advice.same())),
    )


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
                raise held_error(self._advice, self._target, key, holder)
            if not self._told:
                self._teller.say(f"waiting for the lease of {holder}")
                self._told = True
            await wait_for(self._stop, min(0.5, self._leases.ttl / 4))
        return lease
