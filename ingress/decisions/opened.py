"""The pauses of all targets of a configuration, for commands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.jetstream.client import connect
from common.jetstream.kv import KeyValue
from common.settings.root import Settings
from ingress.decisions.pauses import PauseStore


@asynccontextmanager
async def pause_stores(settings: Settings) -> AsyncIterator[dict[str, PauseStore]]:
    """A store for each target, by its name. Raises what connecting raises."""
    client = await connect(settings.nats_for("ingress"), name="floe chain")
    try:
        replicas = settings.ingress.kv_replicas or 1
        bucket = await KeyValue.open(client, settings.ingress.state_bucket, replicas=replicas)
        yield {target.stream: PauseStore(bucket, target.stream) for target in settings.ingress.targets}
    finally:
        await client.aclose()
