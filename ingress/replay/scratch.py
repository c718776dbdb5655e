"""The scratch stream of a drill: made, removed, and found again where a killed drill left one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from common.clock import Clock
from common.errors import FloeError, Unavailable
from common.jetstream.api import STREAM_NOT_FOUND, ask, create_stream
from common.jetstream.client import FloeClient
from common.jetstream.kv import BucketGone, KeyValue, state_key
from common.jetstream.lease import Lease, Leases, new_owner
from common.jetstream.requests import ApiError
from common.service.logs import get_logger
from common.settings.service import ServiceSettings
from ingress.deps import open_bucket
from ingress.replay.receipt import receipt_key

log = get_logger("ingress.replay.scratch")

NAME = "FLOE_DRILL_"
ROOT = "_floe_drill"


def scratch_config(stream: str, prefix: str, storage: str, most_bytes: int) -> dict[str, object]:
    """A stream that takes nobody else's subjects."""
    return {
        "name": stream,
        "description": "scratch of floe drill; may be deleted",
        "subjects": [f"{prefix}.>"],
        "storage": storage,
        "num_replicas": 1,
        "retention": "limits",
        "discard": "new",
        "max_bytes": most_bytes,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_batched": True,
    }


class Scratch:
    """The scratch streams of one server. `settings`: whose buckets are used."""

    def __init__(self, client: FloeClient, settings: ServiceSettings, instance: str, clock: Clock) -> None:
        self._client, self._settings, self._clock = client, settings, clock
        self._owner = new_owner(instance)

    async def make(self, stream: str, prefix: str, storage: str, most_bytes: int) -> None:
        """Make the stream; `claimed` must hold it."""
        await create_stream(self._client, scratch_config(stream, prefix, storage, most_bytes))

    @asynccontextmanager
    async def claimed(self, stream: str) -> AsyncIterator[Lease]:
        """The lease that says that the stream is in use; the stream and its state are removed at the end."""
        lease = await (await self._leases()).acquire(_key(stream))
        if lease is None:
            raise Unavailable(f"drill {stream}: another one has this name")
        try:
            yield lease
        finally:
            await self.remove(stream)
            await lease.release()

    async def remove(self, stream: str) -> None:
        """Delete the stream and what is remembered of it; what fails here, the next drill does."""
        try:
            await _delete(self._client, stream)
            state = KeyValue(self._client, self._settings.state_bucket, ttl=None, replicas=1)
            with suppress(BucketGone):
                if await state.get(receipt_key(stream)) is not None:
                    await state.delete(receipt_key(stream))
        except FloeError as error:
            log.warning("scratch left behind", action="drill_left", stream=stream, error=str(error))

    async def sweep(self) -> list[str]:
        """Remove what killed drills left; the names of their streams."""
        leases = await self._leases()
        answer = await ask(self._client, "STREAM.NAMES", {"subject": f"{ROOT}.>"})
        names = [str(name) for name in answer.get("streams") or [] if str(name).startswith(NAME)]
        left = [name for name in names if await leases.holder(_key(name)) is None]
        for name in left:
            await self.remove(name)
        return left

    async def _leases(self) -> Leases:
        settings = self._settings
        ttl = settings.lease_ttl
        bucket = await open_bucket(self._client, settings, settings.lease_bucket, ttl=ttl)
        return Leases(bucket, self._owner, ttl, self._clock)


def _key(stream: str) -> str:
    return state_key("drill", stream)


async def _delete(client: FloeClient, stream: str) -> None:
    try:
        await client.api(f"STREAM.DELETE.{stream}")
    except ApiError as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
