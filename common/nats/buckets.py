"""The two buckets of a service: its state, and the leases that its instances share."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from common.clock import Clock
from common.errors import FloeError, OutcomeUnknown, Refused, Unavailable
from common.nats.api import max_replicas, stream_info, stream_names
from common.nats.client import FloeClient, connect
from common.nats.kv import KeyValue
from common.nats.lease import Leases, RenewalThread
from common.settings.egress import EgressSettings
from common.settings.ingress import IngressSettings, TargetSettings
from common.settings.root import Settings
from common.settings.service import ServiceSettings


async def kv_replicas(client: FloeClient, settings: ServiceSettings, target: str = "") -> int:
    """Return the configured `kv_replicas`; if 0, the highest replica count of the service's streams, with the planned
    count of a target that does not exist. `target`: the target stream of a replay; it counts too.
    """
    if settings.kv_replicas:
        return settings.kv_replicas
    streams = [target] if target else []
    if isinstance(settings, EgressSettings):
        streams += [feed.stream for feed in settings.feeds]
        if settings.patterns:
            with suppress(Refused):
                streams += [name for name in await stream_names(client) if settings.feeds_of(name)]
        return await max_replicas(client, streams)
    assert isinstance(settings, IngressSettings), "there is no third service"
    found = [await _replicas(client, each) for each in settings.targets]
    return max([await max_replicas(client, streams), *found])


async def _replicas(client: FloeClient, target: TargetSettings) -> int:
    if (info := await stream_info(client, target.stream)) is not None:
        return int(info.config.get("num_replicas", 1))
    return 1 if target.create is None else target.create.replicas


async def open_state(client: FloeClient, settings: ServiceSettings, *, target: str = "") -> KeyValue:
    """Return the state bucket; create it if it is missing. `target`: as in `kv_replicas`."""
    replicas = partial(kv_replicas, client, settings, target)
    return await KeyValue(client, settings.state_bucket, replicas=replicas, max_bytes=settings.kv_max_bytes).ensure()


def optional_state(client: FloeClient, settings: ServiceSettings) -> KeyValue:
    """The state bucket for a command that may only read. A missing bucket is empty; the first write creates it."""
    replicas, size = partial(kv_replicas, client, settings), settings.kv_max_bytes
    return KeyValue(client, settings.state_bucket, replicas=replicas, optional=True, max_bytes=size)


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


T = TypeVar("T")
CLAIM_ATTEMPTS = 5  # a try fails if the claim is settled between `create` and `get`, or if an answer is lost
CLAIM_TIMEOUT_S = 60.0  # seconds for all tries; each request has its own limit


class BucketClaims:
    """Claims on documents that are put once, under `claims.` in the bucket `state`: `PutOnceClaims` of the chain store.

    Create it in the event loop; call it from threads.
    """

    def __init__(self, state: KeyValue) -> None:
        self._state, self._loop = state, asyncio.get_running_loop()

    def claim(self, key: str, body: bytes) -> tuple[bytes, int]:
        return self._wait(self._claim(key, body))

    async def _claim(self, key: str, body: bytes) -> tuple[bytes, int]:
        for _ in range(CLAIM_ATTEMPTS):
            with suppress(OutcomeUnknown):  # the read below settles it
                if (revision := await self._state.create(_claim_key(key), body)) is not None:
                    return body, revision
            if (entry := await self._state.get(_claim_key(key))) is not None:
                return entry.value, entry.revision
        raise Unavailable(f"claim of {key}: lost to other writers {CLAIM_ATTEMPTS} times", code="E-STORE-CONTENDED")

    def settle(self, key: str, revision: int) -> None:
        with suppress(FloeError):
            self._wait(self._state.delete(_claim_key(key), revision))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        doing = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return doing.result(CLAIM_TIMEOUT_S)
        except TimeoutError:
            doing.cancel()
            raise Unavailable(f"claims in {self._state.bucket}: no answer within {CLAIM_TIMEOUT_S:g} s") from None


def _claim_key(key: str) -> str:
    return f"claims.{sha256(key.encode()).hexdigest()[:32]}"


@asynccontextmanager
async def open_ingress_state(settings: Settings, name: str) -> AsyncIterator[tuple[FloeClient, KeyValue]]:
    """Open a connection for the command `name`, and through it the bucket with the states of the targets.

    Raises the errors of `connect`.
    """
    client = await connect(settings.nats_for("ingress"), name=name)
    try:
        yield client, optional_state(client, settings.ingress)
    finally:
        await client.aclose()
