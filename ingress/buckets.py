"""The buckets of commands of ingress, and how many replicas one gets that a command is the first to make."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.jetstream.api import most_replicas, stream_info
from common.jetstream.client import FloeClient, connect
from common.jetstream.kv import KeyValue
from common.settings.egress import EgressSettings
from common.settings.ingress import IngressSettings, TargetSettings
from common.settings.root import Settings
from common.settings.service import ServiceSettings


@asynccontextmanager
async def state_bucket(
    settings: Settings, name: str, *, makes: bool = False
) -> AsyncIterator[tuple[FloeClient, KeyValue]]:
    """A connection for the command `name`, and over it the bucket with the states of the targets.

    `makes`: the command may be the first to write there. Raises what connecting raises.
    """
    client = await connect(settings.nats_for("ingress"), name=name)
    try:
        replicas = await kv_replicas(client, settings.ingress) if makes else 1
        yield client, KeyValue.optional(client, settings.ingress.state_bucket, replicas=replicas)
    finally:
        await client.aclose()


async def kv_replicas(client: FloeClient, settings: IngressSettings) -> int:
    """What the configuration says; else as many as the most replicated of the targets has, or will have when
    it is created.
    """
    if settings.kv_replicas:
        return settings.kv_replicas
    return max([await _replicas(client, target) for target in settings.targets], default=1)


async def open_bucket(
    client: FloeClient, settings: ServiceSettings, bucket: str, *, ttl: float | None = None, target: str = ""
) -> KeyValue:
    """The bucket for a replay or a drill; made, where it is missing, as `service_replicas` says.

    Where it is there no other stream is asked: one without a leader must not keep a restore waiting.
    """
    found = await stream_info(client, f"KV_{bucket}")
    if found is None:
        replicas = await service_replicas(client, settings, target)
    else:
        replicas = int(found.config.get("num_replicas", 1))
    return await KeyValue.open(client, bucket, ttl=ttl, replicas=replicas)


async def service_replicas(client: FloeClient, settings: ServiceSettings, target: str = "") -> int:
    """As many as the service gives its buckets whose `settings` these are: ingress, or egress where a replay
    goes back into a source. `target`: of a replay; it counts as well.
    """
    if settings.kv_replicas:
        return settings.kv_replicas
    own = await most_replicas(client, [target] if target else [])
    if isinstance(settings, EgressSettings):
        return max(own, await most_replicas(client, (feed.stream for feed in settings.feeds)))
    assert isinstance(settings, IngressSettings), "there is no third service"
    return max(own, await kv_replicas(client, settings))


async def _replicas(client: FloeClient, target: TargetSettings) -> int:
    info = await stream_info(client, target.stream)
    if info is not None:
        return int(info.config.get("num_replicas", 1))
    return 1 if target.create is None else target.create.replicas
