"""Scratch streams of drills: held by a lease while in use, and removed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from common.clock import Clock
from common.errors import FloeError, LeaseLost, Unavailable
from common.logs import get_logger
from common.nats.api import RESTORE_PREFIX, SCRATCH_PREFIX, delete_stream, query
from common.nats.buckets import open_leases
from common.nats.client import FloeClient
from common.nats.kv import BucketDeleted, KeyValue, state_key
from common.nats.lease import Leases, new_owner
from common.service.progress import Progress
from common.settings.service import ServiceSettings
from ingress.recovery.guard import run_with_renewal
from ingress.recovery.receipt import receipt_key

log = get_logger(__name__)

T = TypeVar("T")

SCRATCH_SUBJECT_ROOT = "_floe_drill"


def scratch_config(stream: str, prefix: str, storage: str, most_bytes: int) -> dict[str, object]:
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


class ScratchStreams:
    """The scratch streams of one server. `settings`: of the service that the buckets belong to."""

    def __init__(
        self, client: FloeClient, settings: ServiceSettings, instance: str, clock: Clock, progress: Progress
    ) -> None:
        self._client, self._settings, self._clock, self._progress = client, settings, clock, progress
        self._owner = new_owner(instance)

    async def run(self, stream: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Remove the leftovers of former drills; return the result of `work`, which may create the stream.

        A lease marks the stream as in use meanwhile. Its loss ends the work, because the next drill then takes the
        stream for a leftover. The stream and its state are removed in every case. Raises Unavailable, LeaseLost, and
        the errors of `work`.
        """
        await self.remove_leftovers()
        if (lease := await (await self._leases()).acquire(state_key("drill", stream))) is None:
            raise Unavailable(f"drill {stream}: another one has this name")
        try:
            lost = LeaseLost(f"drill {stream}: its lease was lost", hint="run the same command again")
            return await run_with_renewal(lease, work(), lost)
        finally:
            await self._remove(stream)
            await lease.release()

    async def remove_leftovers(self) -> None:
        """Remove the streams that former drills left, also exact ones, and print their names."""
        leases, names = await self._leases(), list[str]()
        for subject in (f"{SCRATCH_SUBJECT_ROOT}.>", f"{RESTORE_PREFIX}>"):
            answer = await query(self._client, "STREAM.NAMES", {"subject": subject})
            names += [str(name) for name in answer.get("streams") or [] if str(name).startswith(SCRATCH_PREFIX)]
        for name in names:
            if await leases.get_owner(state_key("drill", name)) is None:
                await self._remove(name)
                self._progress.print(f"removed {name}, a leftover of an earlier drill")

    async def _remove(self, stream: str) -> None:
        try:
            await delete_stream(self._client, stream)
            state = KeyValue(self._client, self._settings.state_bucket)
            with suppress(BucketDeleted):
                if await state.get(receipt_key(stream)) is not None:
                    await state.delete(receipt_key(stream))
        except FloeError as error:
            log.warning("scratch stream kept", action="scratch_stream_kept", stream=stream, error=str(error))

    async def _leases(self) -> Leases:
        return await open_leases(self._client, self._settings, self._owner, self._clock)
