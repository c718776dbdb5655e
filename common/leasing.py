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

from common import tasks
from common.errors import FloeError, OutcomeUnknown, Refused, Unavailable
from common.logs import get_logger
from common.nats.client import FloeClient, RawSubscription
from common.nats.kv import BucketDeleted, BucketFull, state_key
from common.nats.lease import Lease, Leases
from common.nats.protocol import ApiError
from common.observe.monitor import Health
from common.tasks import Stop, StopReason, cancel, first_of, wait_for

log = get_logger(__name__)


class GroupMembership:
    """This process as a member of a group with keys that begin with `prefix`, and the keys of all members.

    A member that was killed counts until its key expires, one lease time at most.
    """

    def __init__(self, leases: Leases, prefix: str) -> None:
        self._leases, self.prefix, self.key = leases, prefix, prefix + state_key(leases.owner)
        self._lease: Lease | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Become a member (again); do nothing if it is one. Raises Unavailable, OutcomeUnknown."""
        if self._lease is not None and not self._lease.lost.is_set:
            return
        await self.aclose()
        self._lease = await self._leases.acquire(self.key)
        if self._lease is not None:
            self._keeping = tasks.spawn(self._lease.run_renewals(), tasks.raise_fatal, name="member")

    async def member_keys(self) -> set[str]:
        """Return the keys of all members, including this one's. Raises Unavailable if they cannot be read."""
        try:
            return {*await self._leases.kv.keys(self.prefix), self.key}
        except BucketDeleted:
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
            await cancel(keeping)
        self._lease = None


SUBSCRIBE_RETRY_S = 10.0  # seconds until a failed subscription is retried


class LeaseWatcher:
    """Watch on the leases `keys` under `pattern`, and on members of the group whose keys begin with `prefix`.

    The owner may change `keys`, and sets `prefix`, which begins with `groups`.

    `woken` is set when there is a reason to check; `free_keys` holds the keys that became free.

    `written_keys` holds the keys that were written; its reader removes them. `former_holder_until`: one lease time
    after the last time that the connection came back or the bucket was gone (monotonic seconds). `needs_full_check`:
    the reason concerns every lease: members changed, or the connection was down for a while. `members`: the member keys
    that are already known, so that their renewals wake no task.
    """

    def __init__(self, leases: Leases, client: FloeClient, pattern: str, groups: str, keys: Collection[str]) -> None:
        self._leases, self._client, self._keys, self._pattern = leases, client, keys, pattern
        self._groups, self.prefix, self.woken = groups, groups, asyncio.Event()
        self.free_keys: set[str] = set()
        self.written_keys: set[str] = set()
        self.former_holder_until = 0.0
        self.members: set[str] = set()
        self.needs_full_check = False

    async def run(self, stop: Stop) -> None:
        """Listen until `stop` is set; without the permission it never receives anything."""
        patterns: dict[str, Callable[[str, bytes | None], None]] = {
            self._pattern: self._on_lease,
            self._groups + "*.*": self._on_member,
        }
        subscriptions: list[RawSubscription] = []
        pending = tasks.PendingError()
        forget = self._client.add_listener(tasks.report_errors(self._on_connection, pending.set))
        try:
            for pattern, on_message in patterns.items():
                if (found := await self._subscribe(pattern, on_message, pending.set, stop)) is not None:
                    subscriptions.append(found)
            await first_of(stop.wait(), pending.event.wait())
            pending.raise_if_set()
        finally:
            forget()
            for subscription in subscriptions:
                await subscription.unsubscribe()

    async def _subscribe(
        self, pattern: str, on_message: Callable[[str, bytes | None], None], report_error: tasks.ReportError, stop: Stop
    ) -> RawSubscription | None:
        """Return the subscription once the server has it; None if it is refused or `stop` is set first."""
        while not stop.is_set:
            try:
                return await self._leases.kv.subscribe(pattern, on_message, report_error)
            except Refused as error:
                log.warning("lease watch refused", action="lease_watch_refused", error=str(error))
                return None
            except FloeError as error:
                log.info("lease watch deferred", action="lease_watch_deferred", error=str(error))
                await wait_for(stop, SUBSCRIBE_RETRY_S)
        return None

    def wake(self, *, full_check: bool = False) -> None:
        """Wake the waiting task, to check the released leases, or with `full_check` every lease."""
        self.needs_full_check |= full_check
        self.woken.set()

    def take_reason(self) -> bool:
        full_check, self.needs_full_check = self.needs_full_check, False
        self.woken.clear()
        return full_check

    def _on_lease(self, key: str, value: bytes | None) -> None:
        if key not in self._keys:
            return
        if value is None:
            self.free_keys.add(key)
            self.wake()
        else:
            self.free_keys.discard(key)
            self.written_keys.add(key)

    def _on_member(self, key: str, value: bytes | None) -> None:
        if key.startswith(self.prefix) and (value is None) == (key in self.members):
            self.members.symmetric_difference_update({key})
            self.wake(full_check=True)

    def _on_connection(self, is_up: bool) -> None:
        if is_up:
            self.record_bucket_loss()
            self.wake(full_check=True)

    def record_bucket_loss(self) -> None:
        """Record that the bucket may have lost entries: former holders come first until `former_holder_until`."""
        self.former_holder_until = self._leases.clock.monotonic() + self._leases.ttl


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


class SlotObserver(Protocol):
    """Observer of a slot: receives the reason why it has no lease."""

    def set_standby(self, holder: str | None) -> None: ...

    def set_waiting(self, error: FloeError) -> None: ...


class LeaseSlot:
    """The slot of the lease `key`. `observer` receives the name of another holder.

    `lease`: the lease that this member holds, from its acquisition until `give_up`. `retry_after`: the lease was given
    back, and is not taken again before this time (monotonic seconds) unless another member has had it since. `offered`:
    it was acquired, and `wait_for_lease` has not returned it yet. `holder`: the last other owner that was seen to have
    it; None: no other owner. `is_removed`: the work on it has ended, and its observer with it.
    """

    def __init__(self, key: str, observer: SlotObserver, on_vacated: Callable[[LeaseSlot, bool], None]) -> None:
        self.key, self.observer, self._on_vacated = key, observer, on_vacated
        self.lease: Lease | None = None
        self.retry_after, self.is_removed = 0.0, False
        self.holder: str | None = None
        self.offered = asyncio.Event()

    async def wait_for_lease(self, stop: Stop) -> Lease | None:
        """Return the lease as soon as this member holds it; None if `stop` is set first."""
        if not stop.is_set:
            await first_of(self.offered.wait(), stop.wait())
        self.offered.clear()
        return self.lease

    def give_up(self, *, lost: bool) -> None:
        self._on_vacated(self, lost)

    # Called by the group

    def set_lease(self, lease: Lease) -> None:
        self.lease, self.holder = lease, None
        self.offered.set()

    def remove_lease(self) -> Lease | None:
        self.offered.clear()
        lease, self.lease = self.lease, None
        return lease


HAND_OVER_REASONS = ("drained", "surplus", "lost")  # reasons why a lease changes hands


@dataclass(frozen=True, slots=True)
class LeaseScope:
    """A kind of work that is divided by leases.

    `leases`: the pattern of their keys in the bucket, such as `egress.us-east.*.*`. `members`: the prefix of the member
    keys; the name of a group and the owner follow, so it must not match `leases`. `component`: the name of the group in
    /status.
    """

    leases: str
    members: str
    component: str


@dataclass(frozen=True, slots=True)
class LeaseMetrics:
    """The metrics of one group. `hand_overs`: returns the counter for a reason, one of HAND_OVER_REASONS. `take_overs`:
    counts leases that another member was seen to hold before.
    """

    members: Gauge
    share: Gauge
    held: Gauge
    hand_overs: Callable[[str], Counter]
    take_overs: Counter


ACQUIRE_JITTER_S = 0.02  # seconds, so that members that receive one release do not all acquire it at once
PARALLEL_ACQUIRES = 16  # leases that are acquired in parallel
PARALLEL_ACQUIRES_SHARED = 4  # the same while other members acquire leases too
SIBLING_WAIT_S = 3.0  # seconds to wait for the other processes of this host before the first lease is taken
# Includes the answers of a cluster that is still forming, and a bucket that an operator may enlarge.
RETRYABLE_ERRORS = (Unavailable, OutcomeUnknown, ApiError, BucketFull)


class LeaseGroup:
    """Group of the name `group` that shares those leases of `scope` that have slots, among all its members.

    `siblings`: the number of processes that were started together; the first leases wait until all of them are members,
    SIBLING_WAIT_S seconds at most. `owner`: the name under which this member holds leases.
    """

    def __init__(
        self,
        leases: Leases,
        client: FloeClient,
        scope: LeaseScope,
        group: str,
        rng: random.Random,
        health: Health,
        counts: LeaseMetrics,
        siblings: int = 1,
    ) -> None:
        self.owner, self._leases, self._clock = leases.owner, leases, leases.clock
        self._rng, self._health, self._scope = rng, health, scope
        self._siblings, self._counts, self._keys = siblings, counts, set[str]()
        self._members = GroupMembership(leases, "")  # it joins none
        self._watcher = LeaseWatcher(leases, client, scope.leases, scope.members, self._keys)
        self._slots: dict[str, LeaseSlot] = {}
        self._share, self._count, self._pending, self._failure = 0, 0, 0, ""
        self.regroup(group)

    def slot(self, key: str, observer: SlotObserver) -> LeaseSlot:
        """Return the slot for `key`, a new one unless there is one, and count the key for the fair share."""
        self._keys.add(key)
        self._watcher.wake(full_check=True)
        return self._slots.setdefault(key, LeaseSlot(key, observer, self._on_vacated))

    async def reacquire(self, slot: LeaseSlot) -> Lease | None:
        """Acquire the lease again, for work that a drain left; None if another member has it. Raises as the bucket."""
        slot.lease = await self._leases.acquire(slot.key)
        return slot.lease

    async def remove_slot(self, slot: LeaseSlot) -> None:
        """End this process's work on the key, and release its lease; the key still counts for the fair share."""
        self._slots.pop(slot.key, None)
        slot.is_removed = True
        if (lease := slot.remove_lease()) is not None:
            await lease.release()

    def drop_key(self, key: str) -> None:
        """Count the key no more, nor its lease while work on it still drains: no other lease moves for its sake."""
        self._keys.discard(key)

    def regroup(self, name: str) -> None:
        """Share with the group of this name from the next check on. Held leases stay; others are taken as at the start,
        once the siblings have come too.
        """
        self._watcher.prefix = f"{self._scope.members}{name}."
        self._watcher.wake(full_check=True)

    async def run(self, stop: Stop) -> None:
        """Take and give back leases until `stop` is set; then leave the group before anything else.

        Starts again after an unexpected error.
        """
        await tasks.restart_on_error("sharing", lambda: self._run_group(stop), self._clock)

    async def _run_group(self, stop: Stop) -> None:
        watching = tasks.restart_on_error("sharing", lambda: self._watcher.run(stop), self._clock)
        listening = tasks.spawn(watching, tasks.raise_fatal, name="lease watcher")
        try:
            await self._run_checks(stop)
            await self._members.leave()
            for slot in self._slots.values():
                # Acquired after its chain had ended.
                if slot.offered.is_set() and (lease := slot.remove_lease()) is not None:
                    await lease.release()
        finally:
            await cancel(listening)
            await self._members.aclose()

    async def _run_checks(self, stop: Stop) -> None:
        due = self._clock.monotonic()
        while not stop.is_set:
            full_check = self._watcher.take_reason()
            if self._members.prefix != self._watcher.prefix:
                await self._members.leave()
                self._members, self._watcher.members = GroupMembership(self._leases, self._watcher.prefix), set()
                await self._gather_siblings(stop)
            if self._clock.monotonic() >= due or full_check:
                due = self._clock.monotonic() + self._leases.ttl / 3 * self._rng.uniform(0.8, 1.0)
                await self._check_all(stop)
            else:
                await self._take(self._watcher.free_keys, stop)
                self._publish_status()
            await first_of(stop.wait(), self._watcher.woken.wait(), seconds=due - self._clock.monotonic())
            if self._watcher.woken.is_set():
                await self._clock.sleep(self._rng.uniform(0, ACQUIRE_JITTER_S))

    async def _gather_siblings(self, stop: Stop) -> None:
        until = self._clock.monotonic() + SIBLING_WAIT_S
        while self._siblings > 1 and not stop.is_set and self._clock.monotonic() < until:
            if await self._recount() and self._count >= self._siblings:
                return
            await first_of(stop.wait(), self._watcher.woken.wait(), seconds=0.2)
            self._watcher.take_reason()

    # One check of all leases

    async def _check_all(self, stop: Stop) -> None:
        if await self._recount() and self._members.prefix == self._watcher.prefix:
            self._give_back()
            await self._take(self._slots.keys(), stop)
        self._publish_status()

    async def _recount(self) -> bool:
        """Join again if needed, and count the members; return False if the bucket does not answer."""
        try:
            await self._members.join()
            found = await self._members.member_keys()
        except RETRYABLE_ERRORS as error:
            if isinstance(error, BucketDeleted):
                self._watcher.record_bucket_loss()
            self._report_failure(error)
            return False
        if self._failure:
            self._failure = ""
            log.info("member count recovered", action="members_count_recovered")
        self._watcher.members = found
        count, self._count = self._count, len(found)
        self._share = fair_share(len(self._keys), len(found))
        if count != self._count:
            log.info("members changed", action="members_changed", members=self._count, share=self._share)
        return True

    def _report_failure(self, error: FloeError) -> None:
        if error.message != self._failure:
            self._failure = error.message
            log.warning("member count failed", action="members_count_failed", code=error.code, error=str(error))
        for slot in self._slots.values():
            if slot.lease is None:
                slot.observer.set_waiting(error)

    def _give_back(self) -> None:
        for key in surplus(self._held(), self._share):
            if (lease := self._slots[key].lease) is not None and not lease.return_requested.is_set:
                log.info("lease return requested", action="lease_return_requested", key=key, members=self._count)
                lease.return_requested.set(StopReason.GIVE_BACK)

    async def _take(self, keys: Collection[str], stop: Stop) -> None:
        wanted = self._keys.intersection(keys)
        waiting = [slot for key, slot in self._slots.items() if key in wanted and slot.lease is None]
        self._rng.shuffle(waiting)
        while waiting and not stop.is_set:
            # Never more at a time than there is room for: a key that finds no room is not requested again in this pass,
            # and the one lease that was requested may be another member's.
            free = self._free_places()
            pace = PARALLEL_ACQUIRES if self._count == 1 or free <= 0 else min(PARALLEL_ACQUIRES_SHARED, free)
            batch, waiting = waiting[:pace], waiting[pace:]
            await asyncio.gather(*(self._try(slot) for slot in batch))
            if waiting and self._count > 1:
                await self._clock.sleep(self._rng.uniform(0, ACQUIRE_JITTER_S))

    async def _try(self, slot: LeaseSlot) -> None:
        try:
            if (lease := await self._acquire(slot)) is None:
                holder = await self._leases.get_owner(slot.key)
                if not slot.is_removed:
                    slot.observer.set_standby(holder)
                    slot.holder = holder or slot.holder
                return
        except RETRYABLE_ERRORS as error:
            if not slot.is_removed:
                slot.observer.set_waiting(error)
            return
        if slot.is_removed:  # while it was acquired
            await lease.release()
            return
        if slot.holder is not None and slot.holder != self.owner:
            self._counts.take_overs.inc()
            log.info("lease taken over", action="lease_taken_over", key=slot.key, held_before=slot.holder)
        self._watcher.free_keys.discard(slot.key)
        slot.set_lease(lease)

    async def _acquire(self, slot: LeaseSlot) -> Lease | None:
        """Acquire the lease of `slot`; return None if it is not free, or if this member may not take it now."""
        # Given back just now, and no other member has had it since.
        rests = self._clock.monotonic() < slot.retry_after and slot.key not in self._watcher.written_keys
        if self._free_places() <= 0 or rests or self._has_precedence(slot):
            return None
        self._pending += 1
        try:
            return await self._leases.acquire(slot.key)
        finally:
            self._pending -= 1

    def _has_precedence(self, slot: LeaseSlot) -> bool:
        """True if the former holder may still have the lease, and comes first.

        A server that comes back without its stored data shows the lease as free at once. The messages that the former
        holder received and did not put may exist nowhere else.
        """
        was_released = slot.key in self._watcher.free_keys
        is_others = slot.holder not in (None, self.owner)
        return is_others and not was_released and self._clock.monotonic() < self._watcher.former_holder_until

    def _free_places(self) -> int:
        return self._share - len(self._held()) - self._pending

    # Held leases

    def _held(self) -> list[str]:
        return [key for key, slot in self._slots.items() if slot.lease is not None and key in self._keys]

    def _on_vacated(self, slot: LeaseSlot, lost: bool) -> None:
        """Clear the slot. A lease that was given back is left to others for one lease time; others are retried now."""
        lease = slot.remove_lease()
        given_back = lease is not None and lease.return_requested.is_set
        self._counts.hand_overs("lost" if lost else "surplus" if given_back else "drained").inc()
        if given_back:
            slot.retry_after = self._clock.monotonic() + self._leases.ttl
            self._watcher.written_keys.discard(slot.key)
        else:
            self._watcher.free_keys.add(slot.key)
            self._watcher.wake()

    def _publish_status(self) -> None:
        held = self._held()
        self._counts.members.set(self._count)
        self._counts.share.set(self._share)
        self._counts.held.set(len(held))
        status = {"owner": self.owner, "members": self._count, "share": self._share}
        self._health.set_status(self._scope.component, status | {"held": held, "failure": self._failure})
