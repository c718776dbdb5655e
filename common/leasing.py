"""Sharing of leases: the members that are alive, the fair share, the group that takes and gives back leases.

Each member holds a key of its own, like a lease, and counts the keys of the others. It takes free leases up to its
share, and gives back those above it. It checks all leases three times in the life of one, so that it
takes over soon after one has expired; in between it wakes for the events of the watch. If the bucket cannot
be reached, it keeps the leases that it has.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import Counter, Gauge

from common.errors import FloeError, OutcomeUnknown, Refused, Unavailable
from common.jetstream.client import FloeClient, RawSubscription
from common.jetstream.kv import BucketFull, BucketGone, state_key
from common.jetstream.lease import Lease, Leases
from common.jetstream.requests import ApiError
from common.logs import get_logger
from common.service.monitor import Health
from common.tasks import Stop, StopReason, Tell, Trouble, again, end, first_of, guarded, orphaned, wait_for, watched

log = get_logger(__name__)


class Members:
    """This process as a member of a group with keys that begin with `prefix`, and the keys of all members.

    A member that was killed counts until its key expires, one lease time at most.
    """

    def __init__(self, leases: Leases, prefix: str) -> None:
        self._leases, self._prefix, self.key = leases, prefix, prefix + state_key(leases.owner)
        self._lease: Lease | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Become a member (again); do nothing if it is one. Raises Unavailable, OutcomeUnknown."""
        if self._lease is not None and not self._lease.lost.is_set:
            return
        await self.aclose()
        self._lease = await self._leases.acquire(self.key)
        if self._lease is not None:
            self._keeping = watched(self._lease.keep(), orphaned, name="member")

    async def listed(self) -> set[str]:
        """Return the keys of all members, including this one's. Raises Unavailable if they cannot be read."""
        try:
            return {*await self._leases.keys(self._prefix), self.key}
        except BucketGone:
            await self.aclose()  # this member's key is gone with the bucket, although it had time left
            raise

    async def leave(self) -> None:
        """Leave the group; if the release fails, the key expires by itself."""
        lease = self._lease
        await self.aclose()
        if lease is not None:
            await lease.release()

    async def aclose(self) -> None:
        if self._keeping is not None:
            keeping, self._keeping = self._keeping, None
            await end(keeping)
        self._lease = None


RETRY = 10.0  # seconds until a failed subscription is retried


class LeaseWatcher:
    """Watch on the leases `keys` under `pattern`, and on members with keys that begin with `prefix`.

    `woken` is set when there is a reason to check; `released` holds the keys that became free.

    `taken` holds the keys that were written; its reader removes them. `yields_until`: one lease time after the last
    time that the connection came back or the bucket was gone (monotonic seconds). `is_missed`: the reason concerns
    every lease: members changed, or the connection was down for a while. `members`: the member keys that are already
    known, so that their renewals wake no task.
    """

    def __init__(self, leases: Leases, client: FloeClient, pattern: str, prefix: str, keys: Collection[str]) -> None:
        self._leases, self._client, self._keys = leases, client, frozenset(keys)
        self._pattern, self._prefix, self.woken = pattern, prefix, asyncio.Event()
        self.released: set[str] = set()
        self.taken: set[str] = set()
        self.yields_until = 0.0
        self.members: set[str] = set()
        self.is_missed = False

    async def run(self, stop: Stop) -> None:
        """Listen until `stop` is set; without the permission it never receives anything."""
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
        """Return the subscription once the server has it; None if it is refused or `stop` is set first."""
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

    def wake(self, *, at_all: bool = False) -> None:
        """Wake the waiting task, to check the released leases, or with `at_all` every lease."""
        self.is_missed |= at_all
        self.woken.set()

    def look(self) -> bool:
        at_all, self.is_missed = self.is_missed, False
        self.woken.clear()
        return at_all

    def _on_lease(self, key: str, value: bytes | None) -> None:
        if key not in self._keys:
            return
        if value is None:
            self.released.add(key)
            self.wake()
        else:
            self.released.discard(key)
            self.taken.add(key)

    def _on_member(self, key: str, value: bytes | None) -> None:
        if (value is None) == (key in self.members):
            self.members.symmetric_difference_update({key})
            self.wake(at_all=True)

    def _on_connection(self, is_up: bool) -> None:
        if is_up:
            self.on_loss()
            self.wake(at_all=True)

    def on_loss(self) -> None:
        """Record that the bucket may have lost entries: former holders come first until `yields_until`."""
        self.yields_until = self._leases.clock.monotonic() + self._leases.ttl


def fair_share(chains: int, members: int) -> int:
    """Return the most leases of `chains` that one member holds: enough that all are held.

    Fewer than one member counts as one, the caller.
    """
    return -(-chains // max(1, members))


def surplus(held: Collection[str], share: int) -> list[str]:
    """Return the keys of `held` above `share`; the same keys whenever the same are held."""
    return sorted(held)[share:]


def group_name(keys: Iterable[str]) -> str:
    """Return a name for a set of leases, in any order: members with the same set share it among themselves.

    A member with another configuration is in another group. If they were counted together, a chain that only one of
    them has could be above its share, and would have no owner.
    """
    text = "\n".join(sorted(set(keys)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Told(Protocol):
    """Observer of a slot: receives the reason why it has no lease."""

    def standby(self, holder: str | None) -> None: ...

    def waits(self, error: FloeError) -> None: ...


class LeaseSlot:
    """The slot of the lease `key`. `told` receives the name of another holder.

    `lease`: the lease that this member holds, from its acquisition until `vacate`. `rests_until`: the lease was given
    back, and is not taken again before this time (monotonic seconds) unless another member has had it since. `offered`:
    it was acquired, and `occupy` has not returned it yet. `holder`: the last other owner that was seen to have it;
    None: no other owner.
    """

    def __init__(self, key: str, told: Told, vacated: Callable[[LeaseSlot, bool], None]) -> None:
        self.key, self.told, self._vacated = key, told, vacated
        self.lease: Lease | None = None
        self.rests_until = 0.0
        self.holder: str | None = None
        self.offered = asyncio.Event()

    async def occupy(self, stop: Stop) -> Lease | None:
        """Return the lease as soon as this member holds it; None if `stop` is set first."""
        if not stop.is_set:
            await first_of(self.offered.wait(), stop.wait())
        self.offered.clear()
        return self.lease

    def vacate(self, *, lost: bool) -> None:
        self._vacated(self, lost)

    # Called by the group

    def offer(self, lease: Lease) -> None:
        self.lease, self.holder = lease, None
        self.offered.set()

    def clear(self) -> Lease | None:
        self.offered.clear()
        lease, self.lease = self.lease, None
        return lease


HAND_OVERS = ("drained", "surplus", "lost")  # reasons why a lease changes hands


@dataclass(frozen=True, slots=True)
class LeaseScope:
    """A kind of work that is divided by leases.

    `leases`: the pattern of their keys in the bucket, such as `egress.us-east.*.*`. `members`: the prefix of the member
    keys; the name of the group and the owner follow, so it must not match `leases`. `part`: the name of this group in
    /status.
    """

    leases: str
    members: str
    part: str


@dataclass(frozen=True, slots=True)
class LeaseMetrics:
    """The metrics of one group. `hand_overs`: returns the counter for a reason, one of HAND_OVERS. `take_overs`: counts
    leases that another member was seen to hold before.
    """

    members: Gauge
    share: Gauge
    held: Gauge
    hand_overs: Callable[[str], Counter]
    take_overs: Counter


JITTER = 0.02  # seconds, so that members that receive one release do not all acquire it at once
AT_ONCE = 16  # leases that are acquired in parallel
BESIDE_OTHERS = 4  # the same while other members acquire leases too
FOR_SIBLINGS = 3.0  # seconds to wait for the other processes of this host before the first lease is taken
# Includes the answers of a cluster that is still forming, and a bucket that an operator may enlarge.
NO_ANSWER = (Unavailable, OutcomeUnknown, ApiError, BucketFull)


class LeaseGroup:
    """Group that shares the leases `keys` of `scope` among all members that have the same keys.

    `siblings`: the number of processes that were started together; the first leases wait until all of them are members,
    FOR_SIBLINGS seconds at most. `owner`: the name under which this member holds leases.
    """

    def __init__(
        self,
        leases: Leases,
        client: FloeClient,
        scope: LeaseScope,
        keys: Iterable[str],
        rng: random.Random,
        health: Health,
        counts: LeaseMetrics,
        siblings: int = 1,
    ) -> None:
        self.owner, self._leases, self._clock = leases.owner, leases, leases.clock
        self._rng, self._health = rng, health
        self._siblings, self._counts, self._part = siblings, counts, scope.part
        self._keys = sorted(set(keys))
        members = f"{scope.members}{group_name(self._keys)}."
        self._members = Members(leases, members)
        self._watcher = LeaseWatcher(leases, client, scope.leases, members, self._keys)
        self._slots: dict[str, LeaseSlot] = {}
        self._share, self._count, self._asking, self._failure = 0, 0, 0, ""

    def slot(self, key: str, told: Told) -> LeaseSlot:
        """Return a new slot for `key`. Call it once for each key."""
        self._slots[key] = LeaseSlot(key, told, self._vacated)
        return self._slots[key]

    async def claim(self, slot: LeaseSlot) -> Lease | None:
        """Acquire the lease again, for work that a drain left; None if another member has it. Raises as the bucket."""
        slot.lease = await self._leases.acquire(slot.key)
        return slot.lease

    async def retire(self, slot: LeaseSlot) -> None:
        """End this process's work on the key, and release its lease; the key still counts for the fair share."""
        self._slots.pop(slot.key, None)
        if (lease := slot.clear()) is not None:
            await lease.release()

    async def run(self, stop: Stop) -> None:
        """Take and give back leases until `stop` is set; then leave the group before anything else.

        Starts again after an unexpected error.
        """
        await again("sharing", lambda: self._share_out(stop), self._clock)

    async def _share_out(self, stop: Stop) -> None:
        hearing = again("sharing", lambda: self._watcher.run(stop), self._clock)
        listening = watched(hearing, orphaned, name="lease watcher")
        try:
            await self._gather_siblings(stop)
            await self._look_on(stop)
            await self._members.leave()
            for slot in self._slots.values():
                # Acquired after its chain had ended.
                if slot.offered.is_set() and (lease := slot.clear()) is not None:
                    await lease.release()
        finally:
            await end(listening)
            await self._members.aclose()

    async def _look_on(self, stop: Stop) -> None:
        due = self._clock.monotonic()
        while not stop.is_set:
            at_all = self._watcher.look()
            if self._clock.monotonic() >= due or at_all:
                due = self._clock.monotonic() + self._leases.ttl / 3 * self._rng.uniform(0.8, 1.0)
                await self._look(stop)
            else:
                await self._take(self._watcher.released, stop)
                self._show()
            await first_of(stop.wait(), self._watcher.woken.wait(), seconds=due - self._clock.monotonic())
            if self._watcher.woken.is_set():
                await self._clock.sleep(self._rng.uniform(0, JITTER))

    async def _gather_siblings(self, stop: Stop) -> None:
        until = self._clock.monotonic() + FOR_SIBLINGS
        while self._siblings > 1 and not stop.is_set and self._clock.monotonic() < until:
            if await self._recount() and self._count >= self._siblings:
                return
            await first_of(stop.wait(), self._watcher.woken.wait(), seconds=0.2)
            self._watcher.look()

    # One check of all leases

    async def _look(self, stop: Stop) -> None:
        if await self._recount():
            self._give_back()
            await self._take(self._keys, stop)
        self._show()

    async def _recount(self) -> bool:
        """Join again if needed, and count the members; return False if the bucket does not answer."""
        try:
            await self._members.join()
            found = await self._members.listed()
        except NO_ANSWER as error:
            if isinstance(error, BucketGone):
                self._watcher.on_loss()
            self._fails(error)
            return False
        if self._failure:
            self._failure = ""
            log.info("members counted again", action="over")
        self._watcher.members = found
        count, self._count = self._count, len(found)
        self._share = fair_share(len(self._keys), len(found))
        if count != self._count:
            log.info("members counted", action="members", members=self._count, share=self._share)
        return True

    def _fails(self, error: FloeError) -> None:
        if error.message != self._failure:
            self._failure = error.message
            log.warning("members not counted", action="members_unknown", code=error.code, error=str(error))
        for slot in self._slots.values():
            if slot.lease is None:
                slot.told.waits(error)

    def _give_back(self) -> None:
        for key in surplus(self._held(), self._share):
            if (lease := self._slots[key].lease) is not None and not lease.give_back.is_set:
                log.info("lease to be given back", action="give_back", key=key, members=self._count)
                lease.give_back.set(StopReason.GIVE_BACK)

    async def _take(self, keys: Collection[str], stop: Stop) -> None:
        waiting = [slot for key, slot in self._slots.items() if key in keys and slot.lease is None]
        self._rng.shuffle(waiting)
        while waiting and not stop.is_set:
            # Never more at a time than there is room for: a key that finds no room is not requested again in this pass,
            # and the one lease that was requested may be another member's.
            pace = AT_ONCE if self._count == 1 or self._room() <= 0 else min(BESIDE_OTHERS, self._room())
            batch, waiting = waiting[:pace], waiting[pace:]
            await asyncio.gather(*(self._try(slot) for slot in batch))
            if waiting and self._count > 1:
                await self._clock.sleep(self._rng.uniform(0, JITTER))

    async def _try(self, slot: LeaseSlot) -> None:
        try:
            if (lease := await self._ask(slot)) is None:
                holder = await self._leases.holder(slot.key)
                slot.told.standby(holder)
                slot.holder = holder or slot.holder
                return
        except NO_ANSWER as error:
            slot.told.waits(error)
            return
        if slot.holder is not None and slot.holder != self.owner:
            self._counts.take_overs.inc()
            log.info("lease taken over", action="take_over", key=slot.key, held_before=slot.holder)
        self._watcher.released.discard(slot.key)
        slot.offer(lease)

    async def _ask(self, slot: LeaseSlot) -> Lease | None:
        """Acquire the lease of `slot`; return None if it is not free, or if this member may not take it now."""
        # Given back just now, and no other member has had it since.
        rests = self._clock.monotonic() < slot.rests_until and slot.key not in self._watcher.taken
        if self._room() <= 0 or rests or self._yields(slot):
            return None
        self._asking += 1
        try:
            return await self._leases.acquire(slot.key)
        finally:
            self._asking -= 1

    def _yields(self, slot: LeaseSlot) -> bool:
        """True if the former holder may still have the lease, and comes first.

        A server that comes back without its stored data shows the lease as free at once. The messages that the former
        holder received and did not put may exist nowhere else.
        """
        was_released = slot.key in self._watcher.released
        is_others = slot.holder not in (None, self.owner)
        return is_others and not was_released and self._clock.monotonic() < self._watcher.yields_until

    def _room(self) -> int:
        return self._share - len(self._held()) - self._asking

    # Held leases

    def _held(self) -> list[str]:
        return [key for key, slot in self._slots.items() if slot.lease is not None]

    def _vacated(self, slot: LeaseSlot, lost: bool) -> None:
        """Clear the slot. A lease that was given back is left to others for one lease time; others are retried now."""
        lease = slot.clear()
        given_back = lease is not None and lease.give_back.is_set
        self._counts.hand_overs("lost" if lost else "surplus" if given_back else "drained").inc()
        if given_back:
            slot.rests_until = self._clock.monotonic() + self._leases.ttl
            self._watcher.taken.discard(slot.key)
        else:
            self._watcher.released.add(slot.key)
            self._watcher.wake()

    def _show(self) -> None:
        held = self._held()
        self._counts.members.set(self._count)
        self._counts.share.set(self._share)
        self._counts.held.set(len(held))
        status = {"owner": self.owner, "members": self._count, "share": self._share}
        self._health.set_status(self._part, status | {"held": held, "failure": self._failure})
