"""The members of a circle: each holds a key of its own, like a lease, and counts the others'."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from common.errors import FloeError, Refused
from common.jetstream.client import FloeClient, RawSubscription
from common.jetstream.kv import BucketGone, state_key
from common.jetstream.lease import Lease, Leases
from common.service.logs import get_logger
from common.tasks import Stop, Tell, Trouble, end, first_of, guarded, orphaned, wait_for, watched

log = get_logger("sharing.bell")


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
        if self._lease is not None and not self._lease.lost.is_set:
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


RETRY = 10.0  # seconds until a subscription that failed is tried again


class LeaseWatcher:
    """Hears of the leases `keys` under `pattern`, and of members whose keys begin with `prefix`.

    `rung` is set when there is a reason to look; `released` holds the keys heard to be free.

    `taken` collects the keys that somebody has written, for whoever empties it.
    `is_missed`: the reason concerns every lease: members changed, or nothing was heard for a while.
    `members`: the member keys known to whoever looks, so that their renewals ring nothing.
    """

    def __init__(
        self, leases: Leases, client: FloeClient, pattern: str, prefix: str, keys: Collection[str]
    ) -> None:
        self._leases, self._client, self._keys = leases, client, frozenset(keys)
        self._pattern, self._prefix = pattern, prefix
        self.rung = asyncio.Event()
        self.released: set[str] = set()
        self.taken: set[str] = set()
        self.members: set[str] = set()
        self.is_missed = False

    async def run(self, stop: Stop) -> None:
        """Listen until `stop` is set; without the permission nothing is ever heard."""
        patterns: dict[str, Callable[[str, bytes | None], None]] = {
            self._pattern: self._on_lease,
            self._prefix + "*": self._on_member,
        }
        subscriptions: list[RawSubscription] = []
        trouble = Trouble()
        forget = self._client.add_listener(guarded(self._on_connection, trouble.tell))
        try:
            for pattern, heard in patterns.items():
                if (found := await self._subscribe(pattern, heard, trouble.tell, stop)) is not None:
                    subscriptions.append(found)
            await first_of(stop.wait(), trouble.told.wait())
            trouble.check()
        finally:
            forget()
            for subscription in subscriptions:
                await subscription.unsubscribe()

    async def _subscribe(
        self, pattern: str, heard: Callable[[str, bytes | None], None], tell: Tell, stop: Stop
    ) -> RawSubscription | None:
        """The subscription once it stands; None where it is refused or `stop` came first."""
        while not stop.is_set:
            try:
                return await self._leases.listen(pattern, heard, tell)
            except Refused as error:
                log.warning("releases are not heard", action="bell_refused", error=str(error))
                return None
            except FloeError as error:
                log.info("releases are not heard yet", action="bell_waits", error=str(error))
                await wait_for(stop, RETRY)
        return None

    def ring(self, *, at_all: bool = False) -> None:
        """Have whoever waits look now: at what is released, or `at_all`."""
        self.is_missed |= at_all
        self.rung.set()

    def silence(self) -> bool:
        """Whoever waited looks now; whether at every lease."""
        at_all, self.is_missed = self.is_missed, False
        self.rung.clear()
        return at_all

    def _on_lease(self, key: str, value: bytes | None) -> None:
        if key not in self._keys:
            return
        if value is None:
            self.released.add(key)
            self.ring()
        else:
            self.released.discard(key)
            self.taken.add(key)

    def _on_member(self, key: str, value: bytes | None) -> None:
        if (value is None) == (key in self.members):
            self.members.symmetric_difference_update({key})
            self.ring(at_all=True)

    def _on_connection(self, is_up: bool) -> None:
        """What was said meanwhile was missed."""
        if is_up:
            self.ring(at_all=True)
