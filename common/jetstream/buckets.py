"""The two buckets of a service: its state, and the leases that its instances share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from common.clock import Clock
from common.jetstream.api import most_replicas, stream_info
from common.jetstream.client import FloeClient, connect
from common.jetstream.kv import KeyValue
from common.jetstream.lease import Leases
from common.settings.egress import EgressSettings
from common.settings.ingress import IngressSettings, TargetSettings
from common.settings.root import Settings
from common.settings.service import ServiceSettings


async def kv_replicas(client: FloeClient, settings: ServiceSettings, target: str = "") -> int:
    """What the configuration says; else as many as the most replicated of its streams has, or will have when it is
    created. `target`: of a replay; it counts as well.
    """
    if settings.kv_replicas:
        return settings.kv_replicas
    streams = [target] if target else []
    if isinstance(settings, EgressSettings):
        return await most_replicas(client, [*streams, *(feed.stream for feed in settings.feeds)])
    assert isinstance(settings, IngressSettings), "there is no third service"
    found = [await _replicas(client, each) for each in settings.targets]
    return max([await most_replicas(client, streams), *found])


async def _replicas(client: FloeClient, target: TargetSettings) -> int:
    if (info := await stream_info(client, target.stream)) is not None:
        return int(info.config.get("num_replicas", 1))
    return 1 if target.create is None else target.create.replicas


async def open_state(client: FloeClient, settings: ServiceSettings, *, target: str = "") -> KeyValue:
    """The bucket of the state, created if it is missing. `target`: as in `kv_replicas`."""
    replicas = partial(kv_replicas, client, settings, target)
    most = settings.kv_max_bytes
    return await KeyValue.open(client, settings.state_bucket, replicas=replicas, max_bytes=most)


def optional_state(client: FloeClient, settings: ServiceSettings) -> KeyValue:
    """For a command that may only read: a missing bucket is empty, and is created by the first write."""
    replicas = partial(kv_replicas, client, settings)
    most = settings.kv_max_bytes
    return KeyValue(client, settings.state_bucket, replicas=replicas, optional=True, max_bytes=most)


async def open_leases(
    client: FloeClient, settings: ServiceSettings, owner: str, clock: Clock, *, target: str = "", replicas: int = 0
) -> Leases:
    """The leases of `owner`; their bucket is created if it is missing. `target`: as in `kv_replicas`; `replicas`: of a
    bucket that is created, for who may not ask for the streams (0: as `kv_replicas`).
    """
    ttl, most, size = (
        settings.lease_ttl,
        replicas or partial(kv_replicas, client, settings, target),
        settings.lease_bytes,
    )
    bucket = await KeyValue.open(client, settings.lease_bucket, ttl=ttl, replicas=most, max_bytes=size)
    return Leases(bucket, owner, ttl, clock)


def optional_leases(client: FloeClient, settings: ServiceSettings, owner: str, clock: Clock) -> Leases:
    ttl, replicas, size = settings.lease_ttl, partial(kv_replicas, client, settings), settings.lease_bytes
    bucket = KeyValue(client, settings.lease_bucket, ttl=ttl, replicas=replicas, optional=True, max_bytes=size)
    return Leases(bucket, owner, ttl, clock)


@asynccontextmanager
async def state_of_ingress(settings: Settings, name: str) -> AsyncIterator[tuple[FloeClient, KeyValue]]:
    """A connection for the command `name`, and through it the bucket with the states of the targets.

    Raises what `connect` raises.
    """
    client = await connect(settings.nats_for("ingress"), name=name)
    try:
        yield client, optional_state(client, settings.ingress)
    finally:
        await client.aclose()
