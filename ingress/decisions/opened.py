"""The pauses of all targets of a configuration, for commands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.jetstream.client import connect
from common.jetstream.kv import KeyValue, state_key
from common.settings.root import Settings
from ingress.chains.pauses import PauseStore
from ingress.checkpoints.state import ROLE, StateStore
from ingress.deps import kv_replicas
from ingress.errors import check_targets


@asynccontextmanager
async def pause_stores(settings: Settings) -> AsyncIterator[dict[str, PauseStore]]:
    """A store for each target, by its name. Raises what connecting raises."""
    check_targets(settings.ingress)
    client = await connect(settings.nats_for("ingress"), name="floe chain")
    try:
        replicas = await kv_replicas(client, settings.ingress)
        bucket = KeyValue.optional(client, settings.ingress.state_bucket, replicas=replicas)
        names = [target.stream for target in settings.ingress.targets]
        yield {
            name: PauseStore(bucket, name, StateStore(bucket, state_key(ROLE, name), name)) for name in names
        }
    finally:
        await client.aclose()
