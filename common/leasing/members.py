"""The members of a circle: each holds a key of its own, like a lease, and counts the others'."""

from __future__ import annotations

import asyncio

from common.jetstream.kv import BucketGone, state_key
from common.jetstream.lease import Lease, Leases
from common.tasks import end, orphaned, watched


class Members:
    """This process as a member of a circle, whose keys begin with `prefix`, and how many there are.

    A member that was killed counts until its key expires, one lease time at most.
    """

    def __init__(self, leases: Leases, prefix: str) -> None:
        self._leases, self._prefix = leases, prefix
        self.key = prefix + state_key(leases.owner)
        self._lease: Lease | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Be a member (again); nothing where it is one. Raises Unavailable, OutcomeUnknown."""
        if self._lease is not None and not self._lease.lost.is_set():
            return
        await self._stop_keeping()
        self._lease = await self._leases.acquire(self.key)
        if self._lease is not None:
            self._keeping = watched(self._lease.keep(), orphaned, name="member")

    async def listed(self) -> set[str]:
        """The keys of all members, this one's among them. Raises Unavailable where nobody can say."""
        try:
            return {*await self._leases.keys(self._prefix), self.key}
        except BucketGone:
            await self.aclose()  # with the bucket went the own key, whatever its time
            raise

    async def leave(self) -> None:
        """Be no member any more; where that fails the key expires by itself."""
        await self._stop_keeping()
        if self._lease is not None:
            lease, self._lease = self._lease, None
            await lease.release()

    async def aclose(self) -> None:
        """Renew nothing any more, without a word to anybody."""
        await self._stop_keeping()
        self._lease = None

    async def _stop_keeping(self) -> None:
        if self._keeping is not None:
            keeping, self._keeping = self._keeping, None
            await end(keeping)
