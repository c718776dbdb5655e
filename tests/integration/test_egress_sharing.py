"""Members that share leases: one alone has all of them, several no more than their share, and none is left over."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest

from common.clock import SystemClock
from common.errors import Unavailable
from common.leasing import LeaseGroup, fair_share, group_name
from common.nats.client import FloeClient, connect
from common.nats.kv import KeyValue, state_key
from common.nats.lease import Lease, Leases, new_owner
from common.observe.monitor import Health
from common.settings.service import NatsSettings
from common.tasks import Stop, cancel, first_of
from egress.deps import Intervals, Tuning
from egress.service import share_site
from tests.support.basics import PATIENCE, cancelled, soon, unique
from tests.support.egress import QUICK, SITE, Bench, Running, connected
from tests.support.stores import FaultyStore

pytestmark = pytest.mark.simulated

TTL = 4.0  # seconds
SHARED = Tuning(QUICK.pulling, Intervals(tick=0.05, check=0.3, hand_over=0.5), QUICK.confirming)


@dataclass
class Member:
    """A member without any work."""

    sharing: LeaseGroup
    owner: str
    keys: Sequence[str]
    held: dict[str, Lease] = field(default_factory=dict)
    most: int = 0

    def __post_init__(self) -> None:
        self.stop = Stop()
        self.observers = {key: Mock() for key in self.keys}
        self._slots = [self.sharing.slot(key, self.observers[key]) for key in self.keys]
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.sharing.run(self.stop))
            for slot in self._slots:
                tasks.create_task(self._work(slot))

    async def _work(self, slot: Any) -> None:
        while (lease := await slot.wait_for_lease(self.stop)) is not None:
            self.held[slot.key] = lease
            self.most = max(self.most, len(self.held))
            keeping = asyncio.create_task(lease.run_renewals())
            try:
                await first_of(self.stop.wait(), lease.return_requested.wait(), lease.lost.wait())
            finally:
                await cancel(keeping)
            lost = lease.lost.is_set
            del self.held[slot.key]
            await lease.release()
            slot.give_up(lost=lost)

    async def leave(self) -> None:
        """Stop as on SIGTERM."""
        self.stop.set()
        await self.task

    async def die(self) -> None:
        """Stop as on SIGKILL, if not quite."""
        await cancelled(self.task)


@dataclass
class Group:
    """Members over one bucket."""

    url: str
    kv: KeyValue
    keys: list[str]
    site: str
    clients: list[FloeClient] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)

    async def join(self, *, siblings: int = 1) -> Member:
        client = await connect(NatsSettings(url=self.url), name="member", ping_interval=1.0)
        self.clients.append(client)
        leases = Leases(await KeyValue(client, self.kv.bucket, ttl=TTL).ensure(), new_owner("m"), TTL, SystemClock())
        clock, rng = SystemClock(), random.Random(1)
        sharing = share_site(leases, client, self.site, group_name(self.keys), rng, Health(clock), siblings)
        self.members.append(Member(sharing, leases.owner, self.keys))
        return self.members[-1]

    def counts(self) -> list[int]:
        return sorted(len(member.held) for member in self.members if not member.task.done())

    async def owners(self) -> dict[str, str | None]:
        try:
            entries = [await self.kv.get(key) for key in self.keys]
        except Unavailable:
            return {}
        return {key: e.value.decode() if e else None for key, e in zip(self.keys, entries, strict=True)}

    async def is_fair(self) -> bool:
        """True if every lease is held by a live member, and none has more than a fair share."""
        alive = [member for member in self.members if not member.task.done()]
        owners = await self.owners()
        held = {key: member.owner for member in alive for key in member.held}
        share = fair_share(len(self.keys), len(alive))
        return owners == held and all(len(member.held) <= share for member in alive)


def lease_keys(site: str, count: int) -> list[str]:
    return [state_key("egress", site, "FEED", str(number)) for number in range(count)]


@pytest.fixture
async def group(nats_url: str) -> AsyncIterator[Group]:
    client, site = await connected(nats_url), unique("s")
    kv = await KeyValue(client, unique("L"), ttl=TTL).ensure()
    group = Group(nats_url, kv, lease_keys(site, 4), site)
    yield group
    for member in group.members:
        await member.die()
    for each in (*group.clients, client):
        await each.aclose()


# Shares


async def test_a_member_that_comes_later_gets_its_share_and_no_lease_stays_free(group: Group) -> None:
    first = await group.join()
    await soon(lambda: len(first.held) == 4)
    await group.join()
    await soon(lambda: group.counts() == [2, 2])
    await group.join()
    await soon(group.is_fair)
    assert group.counts()[-1] <= 2
    before = await group.owners()
    await asyncio.sleep(1.5 * TTL)
    assert await group.owners() == before, "who has no more than a share keeps what it has"


async def test_a_stop_hands_over_at_once_and_a_killed_member_is_replaced_within_two_lease_times(group: Group) -> None:
    """Polling alone would need a third of the lease's time."""
    first, second = await group.join(), await group.join()
    await soon(group.is_fair)
    await first.leave()
    await soon(lambda: len(second.held) == 4, 0.2 * TTL)
    third = await group.join()
    await soon(group.is_fair)
    await second.die()
    await soon(lambda: len(third.held) == 4, 2 * TTL)


async def test_members_that_come_together_never_take_more_than_their_share_for_long(group: Group) -> None:
    group.keys = lease_keys(group.site, 20)
    await asyncio.gather(*(group.join() for _ in range(5)))
    await soon(group.is_fair)
    assert group.counts() == [4] * 5


async def test_processes_of_one_host_wait_for_each_other_before_they_take_but_not_for_ever(group: Group) -> None:
    alone = await group.join(siblings=2)
    await soon(lambda: len(alone.held) == 4)
    await alone.leave()
    members = await asyncio.gather(*(group.join(siblings=2) for _ in range(2)))
    await soon(group.is_fair)
    assert [member.most for member in members] == [2, 2]


# Faults


async def test_members_that_cannot_be_listed_change_nothing(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await group.join()
    await soon(lambda: len(first.held) == 4)

    async def nobody_answers(*_: object) -> list[str]:
        raise Unavailable("no answer")

    monkeypatch.setattr(KeyValue, "keys", nobody_answers)
    second = await group.join()
    await soon(lambda: all(observer.set_waiting.called for observer in second.observers.values()))
    await asyncio.sleep(TTL)
    assert (len(first.held), len(second.held)) == (4, 0)
    monkeypatch.undo()
    await soon(group.is_fair)


async def test_a_deleted_bucket_is_made_again_and_shared_again(group: Group) -> None:
    """F09."""
    await group.join()
    await group.join()
    await soon(group.is_fair)
    before = await group.owners()
    for _ in range(3):
        await group.clients[0].api(f"STREAM.DELETE.KV_{group.kv.bucket}")
        await soon(group.is_fair)
        assert (await group.owners(), group.counts()) == (before, [2, 2])


# Whole egress


def states(running: Running, names: Sequence[str]) -> list[str]:
    return [running.state(name) for name in names]


async def sharing(bench: Bench, count: int, **feed: Any) -> tuple[str, list[str], list[dict[str, Any]]]:
    """A stream, and the names and the settings of `count` feeds of it."""
    stream, names = await bench.make_stream(unique("T")), [unique("F") for _ in range(count)]
    return stream, names, [{"name": name, "stream": stream, **feed} for name in names]


@pytest.mark.parametrize("segment", [{}, {"max_age": "1h"}], ids=["at a segment's end", "open for an hour"])
async def test_feeds_move_to_a_second_instance_and_back_when_it_stops(bench: Bench, segment: dict[str, str]) -> None:
    """An open segment does not keep a lease for ever."""
    stream, names, feeds = await sharing(bench, 4, segment=segment)
    first = bench.start(bench.settings(*feeds), SHARED)
    await soon(lambda: states(first, names) == ["reading"] * 4)
    await bench.publish(stream, [b"x"] * 50)
    second = bench.start(bench.settings(*feeds), SHARED)
    await soon(lambda: states(second, names).count("reading") == 2)
    await soon(lambda: states(first, names).count("standby") == 2)
    assert min(bench.end(name) for name in names if second.state(name) == "reading") == 50
    assert not first.health.problems()
    await bench.publish(stream, [b"y"] * 50)
    if not segment:
        for name in names:
            await bench.archived_to(name, 100)
    await second.drain()
    await soon(lambda: states(first, names) == ["reading"] * 4)
    await bench.publish(stream, [b"z"] * 50)
    for name in names:
        await (first.received(name, 150) if segment else bench.archived_to(name, 150))
    await first.drain()
    for name in names:
        await bench.same(name, stream)


# A lease that ends at the wrong moment


@pytest.mark.real
async def test_a_lease_that_ends_during_a_put_announces_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """F05: the object may be stored; tail and mark belong to the process that holds the lease."""
    stream, begun, lost = await bench.make_stream(unique("T")), list[str](), threading.Event()

    def slowly(real: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if key.endswith(".parquet"):
            begun.append(key)
            assert lost.wait(PATIENCE)
        return real(key, *args, **kwargs)

    objects = FaultyStore(bench.objects).on("put_if_absent", slowly).on("put", slowly)
    kv = KeyValue(bench.client, bench.lease_bucket)  # with the patience of a bucket without a time to live
    key = state_key("egress", SITE, stream, "0")
    running = bench.start(bench.settings({"stream": stream}, lease_ttl="6s"), SHARED, objects=objects)
    await soon(lambda: running.state(stream) == "reading")
    await bench.publish(stream, [b"x"] * 10)
    await soon(lambda: begun)
    more = 5
    while more:
        await kv.put(key, b"somebody else")
        await asyncio.sleep(0.2)
        if "lease lost" in caplog.text:
            lost.set()
        more -= bool(bench.refs(stream))
    assert await bench.mark(stream) in (None, 0)
    assert not bench.chains.read_tail(bench.chain(stream))
    await kv.delete(key)
    await soon(lambda: bench.chains.read_tail(bench.chain(stream)) == 10)
    await running.drain()
    await bench.same(stream, stream)
