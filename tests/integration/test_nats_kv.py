"""State and leases in a bucket: compare-and-set, reads from the leader; one holder at a time, which knows its end."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from common.clock import SystemClock
from common.errors import ConfigError, OutcomeUnknown
from common.nats.client import FloeClient, connect, frame
from common.nats.kv import BucketDeleted, KeyValue, KvEntry, state_key
from common.nats.lease import Leases, new_owner
from common.settings.service import NatsSettings
from tests.support.basics import PATIENCE, cancelled, soon, unique
from tests.support.clock import ManualClock
from tests.support.proxies import TcpProxy

pytestmark = pytest.mark.simulated
ACK = '{{"stream":"{}","seq":{}}}'


@pytest.fixture
async def kv(client: FloeClient) -> KeyValue:
    return await KeyValue(client, unique("B")).ensure()


async def test_a_key_is_created_once_and_changed_by_revision(kv: KeyValue):
    assert await kv.get("a.b") is None
    first = await kv.create("a.b", b"1")
    assert (await kv.create("a.b", b"2"), await kv.get("a.b")) == (None, KvEntry(b"1", first))
    second = await kv.update("a.b", b"2", first)
    assert second > first
    assert (await kv.update("a.b", b"3", first), await kv.get("a.b")) == (None, KvEntry(b"2", second))
    for value in (b"", b"not json", b"\xff\x00", b"x" * (1 << 20 - 1)):
        third = await kv.put("a.b", value)
        assert await kv.get("a.b") == KvEntry(value, third)


async def test_a_deleted_key_is_absent_and_may_be_created_again(kv: KeyValue):
    first = await kv.create("k", b"1")
    assert not await kv.delete("k", first + 7)
    assert await kv.delete("k", first)
    assert await kv.get("k") is None
    assert not await kv.delete("k", first)
    second = await kv.create("k", b"2")
    assert second > first
    assert await kv.delete("k")
    assert (await kv.get("k"), await kv.update("k", b"3", second)) == (None, None)


MARKERS = (b"KV-Operation: PURGE", b"KV-Operation: DEL", b"Nats-Marker-Reason: MaxAge")


async def test_lists_the_keys_that_have_a_value_and_markers_of_others_are_absence(client: FloeClient, kv: KeyValue):
    assert await kv.keys() == []
    for key in ("a.1", "a.2", "b.1", "gone"):
        await kv.put(key, b"x")
    await kv.delete("gone")
    for line in MARKERS:
        await kv.put("k", b"1")
        block = b"NATS/1.0\r\n" + line + b"\r\n\r\n"
        await client.request_raw(f"$KV.{kv.bucket}.k".encode(), b"", block, timeout=PATIENCE)
        assert (await kv.get("k"), await kv.keys()) == (None, ["a.1", "a.2", "b.1"])
        assert await kv.create("k", b"2") is not None
    assert await kv.keys("a.") == ["a.1", "a.2"]


async def test_a_bucket_is_taken_as_it_is_but_for_its_ttl_and_read_from_its_leader(client: FloeClient, monkeypatch):
    bucket, ours = unique("B"), unique("B")
    await KeyValue(client, bucket, ttl=15.0).ensure()
    with pytest.raises(ConfigError, match=f"bucket {bucket}: expected a time to live of 30 s, found 15 s"):
        await KeyValue(client, bucket, ttl=30.0).ensure()
    with pytest.raises(ConfigError, match="expected a time to live of 0 s, found 15 s"):
        await KeyValue(client, bucket).ensure()
    # Made as by the `nats` command, and opened by many at once.
    config = {"name": f"KV_{ours}", "subjects": [f"$KV.{ours}.>"], "max_msgs_per_subject": 64, "discard": "new"}
    await client.api(f"STREAM.CREATE.KV_{ours}", {**config, "allow_direct": True})
    stores = await asyncio.gather(*(KeyValue(client, ours).ensure() for _ in range(10)))
    created = await asyncio.gather(*(store.create("k", b"%d" % i) for i, store in enumerate(stores)))
    assert [revision for revision in created if revision is not None] == [1]
    # A direct read is answered by a replica, which may be behind the leader.
    subjects, request_raw = set[bytes](), client.request_raw

    async def asked(subject: bytes, *given: Any, **named: Any) -> Any:
        subjects.add(subject)
        return await request_raw(subject, *given, **named)

    monkeypatch.setattr(client, "request_raw", asked)
    assert (await stores[0].get("k"), await stores[0].keys()) == (KvEntry(b"0", 1), ["k"])
    assert b"$JS.API.STREAM.MSG.GET.KV_%b" % ours.encode() in subjects
    assert b"DIRECT" not in b"".join(subjects)


async def test_a_deleted_bucket_is_not_an_empty_one(client: FloeClient, kv: KeyValue):
    revision = await kv.put("k", b"1")
    await client.api(f"STREAM.DELETE.KV_{kv.bucket}")
    writes = kv.create("k", b"2"), kv.update("k", b"2", revision), kv.put("k", b"2"), kv.delete("k")
    for attempt in (kv.get("k"), kv.keys(), *writes):
        with pytest.raises(BucketDeleted, match=f"bucket {kv.bucket} no longer exists"):
            await attempt
    await kv.ensure()
    assert await kv.get("k") is None


@pytest.mark.parametrize("answer", ["", "+OK", "[]", "{}", *map(ACK.format, ("OTHER", "%s", "%s"), ("9", '"9"', "1"))])
async def test_an_acknowledgement_that_is_none_is_an_unknown_outcome(client: FloeClient, answer: str):
    bucket = unique("B")
    kv = KeyValue(client, bucket, ttl=None, replicas=1)
    text = answer.replace("%s", f"KV_{bucket}").encode()
    await client.subscribe_raw(f"$KV.{bucket}.k", lambda _s, reply, _p, _h: client.send(frame(reply, text)))
    with pytest.raises(OutcomeUnknown, match="key k: expected an acknowledgement"):
        await kv.update("k", b"x", 1)


async def test_a_key_that_is_none_never_reaches_the_wire(kv: KeyValue):
    for key in ("", "a b", "a*", ">", "a..b", ".a", "a.", "a\r\nPUB x 0"):
        for call in (kv.get(key), kv.put(key, b"")):
            with pytest.raises(ValueError, match="expected tokens"):
                await call


def test_parts_of_keys_never_collide():
    parts = ["us-east", "ORDERS.x", "0000", "Größe", "a=b", "=3D", "*", "a b"]
    assert state_key(*parts) == "us-east.ORDERS=2Ex.0000.Gr=C3=B6=C3=9Fe.a=3Db.=3D3D.=2A.a=20b"
    assert state_key("a.b") != state_key("a", "b")
    for wrong in ((), ("",), ("a", "")):
        with pytest.raises(ValueError, match="not empty"):
            state_key(*wrong)


# Leases

TTL = 2.4  # seconds


@pytest.fixture
async def timed(client: FloeClient) -> KeyValue:
    return await KeyValue(client, unique("LEASES"), ttl=TTL).ensure()


def leases(timed: KeyValue, owner: str = "") -> Leases:
    return Leases(timed, owner or new_owner("test"), TTL, SystemClock())


async def test_a_cancellation_that_is_swallowed_still_ends_the_keeping(timed: KeyValue, monkeypatch):
    """`asyncio.wait_for` of Python 3.11 does so if it coincides with the answer."""
    lease = await leases(timed).acquire("k")
    real, asked = timed.update, asyncio.Event()

    async def swallowing(*args: Any) -> int | None:
        asked.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENCE)
        return await real(*args)

    monkeypatch.setattr(timed, "update", swallowing)
    keeping = asyncio.create_task(lease.run_renewals())
    await asked.wait()
    keeping.cancel()
    await asyncio.wait({keeping}, timeout=PATIENCE)
    assert keeping.cancelled()


async def test_a_lease_that_its_owner_already_has_is_rewritten(timed: KeyValue):
    """The rest of its time is unknown."""
    mine = leases(timed, "me")
    await mine.acquire("k")
    before = (await timed.get("k")).revision
    await asyncio.sleep(TTL / 2)
    again = await mine.acquire("k")
    assert (await timed.get("k")).revision > before
    await asyncio.sleep(TTL * 0.4)
    assert again.is_usable()
    await asyncio.sleep(TTL * 0.25)
    assert await leases(timed, "you").acquire("k") is None


@pytest.mark.parametrize("err_code", [10071, 10164])
async def test_a_refused_renewal_of_our_lease_is_tried_again(client, timed: KeyValue, err_code: int, monkeypatch):
    """A cluster that forms reports so in several ways; 10164: another write of the key is in flight."""
    lease = await leases(timed, "me").acquire("k")
    real, refused = client.request_raw, 0
    answer = b'{"error":{"code":400,"err_code":%d,"description":"wrong last sequence"}}' % err_code

    async def refusing(subject: bytes, *args: Any, **kwargs: Any) -> Any:
        nonlocal refused
        refused += subject.startswith(b"$KV.")
        return (answer, None) if subject.startswith(b"$KV.") and refused < 3 else await real(subject, *args, **kwargs)

    monkeypatch.setattr(client, "request_raw", refusing)
    keeping = asyncio.create_task(lease.run_renewals())
    await soon(lambda: refused >= 3)
    await asyncio.sleep(TTL / 2)
    assert lease.is_usable()
    await cancelled(keeping)
    await lease.release()
    assert await timed.get("k") is None


async def test_a_bucket_that_is_gone_is_found_gone_though_somebody_listens(client: FloeClient, timed: KeyValue):
    """A subscriber to a bucket's writes receives them: then the server does not report that nobody does."""
    await timed.subscribe("*", lambda *_: None)
    await client.api(f"STREAM.DELETE.KV_{timed.bucket}")
    assert await leases(timed, "me").acquire("k") is not None
    assert await leases(timed).get_owner("k") == "me"


async def test_a_lease_is_not_used_in_the_last_third_of_its_time_nor_after_a_late_wake_up(timed: KeyValue):
    clock = ManualClock()
    lease = await Leases(timed, "me", TTL, clock).acquire("k")
    clock.advance(TTL * 2 / 3 - 0.01)
    assert lease.is_usable()
    clock.advance(0.02)
    assert (lease.is_usable(), lease.lost.is_set) == (False, False)
    clock.advance(TTL * 5)
    await lease.run_renewals()
    assert (lease.is_usable(), lease.lost.is_set) == (False, True)
    assert round(clock.monotonic() / TTL * 90, 6).is_integer(), "many leases share a wake"


async def test_a_lease_that_another_took_or_deleted_is_lost(timed: KeyValue):
    lease, other = await leases(timed, "me").acquire("k"), await leases(timed, "me").acquire("other")
    await timed.put("k", b"you")
    await timed.delete("other")
    for each in (lease, other):
        await asyncio.wait_for(each.run_renewals(), PATIENCE)
        assert each.lost.is_set
    await lease.release()
    assert await leases(timed).get_owner("k") == "you"


async def test_any_other_value_of_the_key_is_another_owner(timed: KeyValue):
    for value in (b"", b"\xff\x00", b"me ", b"x" * 100_000):
        await timed.put("k", value)
        assert await leases(timed, "me").acquire("k") is None
        assert await leases(timed, "me").get_owner("k") is not None
    with pytest.raises(ValueError, match=r"expected a time to live of 30 s, found 2\.4 s"):
        Leases(timed, "me", 30.0, SystemClock())


@pytest.mark.parametrize("gone", ["STREAM.DELETE", "STREAM.PURGE"])
async def test_a_lease_outlives_the_bucket_that_lost_it(client: FloeClient, timed: KeyValue, gone: str):
    lease = await leases(timed, "me").acquire("k")
    keeping = asyncio.create_task(lease.run_renewals())
    await client.api(f"{gone}.KV_{timed.bucket}")
    await soon(partial(is_held, timed))
    await asyncio.sleep(TTL * 1.5)
    assert await is_held(timed)
    assert lease.is_usable()
    await cancelled(keeping)


async def is_held(timed: KeyValue) -> bool:
    with suppress(BucketDeleted):
        return await leases(timed).get_owner("k") == "me"
    return False


async def renewed(timed: KeyValue, revision: int) -> bool:
    entry = await timed.get("k")
    return entry is not None and entry.revision > revision


@pytest.mark.real
async def test_a_lease_is_unusable_before_it_is_free_and_outlives_a_lost_answer(nats_server, timed: KeyValue):
    async with TcpProxy(nats_server.port) as proxy:
        client = await connect(NatsSettings(url=proxy.url), name="proxied", ping_interval=TTL)
        lease = await leases(await KeyValue(client, timed.bucket, ttl=TTL).ensure(), "me").acquire("k")
        keeping = asyncio.create_task(lease.run_renewals())
        revision = (await timed.get("k")).revision
        proxy.blackhole("down")
        await soon(lambda: renewed(timed, revision))
        proxy.heal()
        revision = (await timed.get("k")).revision
        await soon(lambda: renewed(timed, revision))
        await soon(lease.is_usable)  # the answer comes after the write that is read here; one that is lost stays lost
        proxy.blackhole()
        await soon(lambda: leases(timed, "you").acquire("k"))
        assert not lease.is_usable()
        await asyncio.wait_for(lease.lost.wait(), PATIENCE)
        await asyncio.wait_for(keeping, PATIENCE)
        await lease.release()
        proxy.heal()
        await client.aclose()
    assert await leases(timed).get_owner("k") == "you"
