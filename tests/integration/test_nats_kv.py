"""State in a bucket: compare-and-set, read from the leader, and every lost answer told as such."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from common.errors import ConfigError, FloeError, OutcomeUnknown, Unavailable
from common.jetstream.client import FloeClient, connect, frame
from common.jetstream.kv import BucketGone, KeyValue, KvEntry, state_key
from common.settings.service import NatsSettings
from infra.local.nats import NatsCluster, NatsServer
from tests.support.basics import PATIENCE, soon, unique
from tests.support.proxies import TcpProxy
from tests.support.servers import placing

pytestmark = pytest.mark.simulated
ACK = '{{"stream":"{}","seq":{}}}'


@pytest.fixture
async def kv(client: FloeClient) -> KeyValue:
    return await KeyValue(client, unique("B")).ensure()


async def test_a_key_is_created_once_and_changed_by_revision(kv: KeyValue):
    assert await kv.get("a.b") is None
    first = await kv.create("a.b", b"1")
    assert await kv.create("a.b", b"2") is None
    assert await kv.get("a.b") == KvEntry(b"1", first)
    second = await kv.update("a.b", b"2", first)
    assert second > first
    assert await kv.update("a.b", b"3", first) is None
    assert await kv.get("a.b") == KvEntry(b"2", second)
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
    assert await kv.get("k") is None
    assert await kv.update("k", b"3", second) is None


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
        assert await kv.get("k") is None
        assert await kv.keys() == ["a.1", "a.2", "b.1"]
        assert await kv.create("k", b"2") is not None
    assert await kv.keys("a.") == ["a.1", "a.2"]


async def test_a_bucket_is_taken_as_it_is_but_for_its_time_to_live(client: FloeClient):
    bucket, ours = unique("B"), unique("B")
    await KeyValue(client, bucket, ttl=15.0).ensure()
    with pytest.raises(ConfigError, match=f"bucket {bucket}: expected a time to live of 30 s, found 15 s"):
        await KeyValue(client, bucket, ttl=30.0).ensure()
    with pytest.raises(ConfigError, match="expected a time to live of 0 s, found 15 s"):
        await KeyValue(client, bucket).ensure()
    # As the `nats` command makes it, opened by many at once.
    config = {"name": f"KV_{ours}", "subjects": [f"$KV.{ours}.>"], "max_msgs_per_subject": 64, "discard": "new"}
    await client.api(f"STREAM.CREATE.KV_{ours}", config)
    stores = await asyncio.gather(*(KeyValue(client, ours).ensure() for _ in range(10)))
    created = await asyncio.gather(*(store.create("k", b"%d" % i) for i, store in enumerate(stores)))
    assert [revision for revision in created if revision is not None] == [1]


async def test_a_deleted_bucket_is_not_an_empty_one(client: FloeClient, kv: KeyValue):
    revision = await kv.put("k", b"1")
    await client.api(f"STREAM.DELETE.KV_{kv.bucket}")
    writes = kv.create("k", b"2"), kv.update("k", b"2", revision), kv.put("k", b"2"), kv.delete("k")
    for attempt in (kv.get("k"), kv.keys(), *writes):
        with pytest.raises(BucketGone, match=f"bucket {kv.bucket} does not exist any more"):
            await attempt
    await kv.ensure()
    assert await kv.get("k") is None


@pytest.mark.real
async def test_a_write_whose_answer_is_lost_is_settled_by_reading(nats_server: NatsServer, client: FloeClient):
    async with TcpProxy(nats_server.port) as proxy:
        proxied = await connect(NatsSettings(url=proxy.url), name="proxied", ping_interval=0.5)
        kv = await KeyValue(proxied, unique("B")).ensure()
        direct = await KeyValue(client, kv.bucket).ensure()
        first = await kv.put("k", b"1")
        proxy.blackhole("down")
        asked = asyncio.create_task(kv.update("k", b"2", first))
        await soon(lambda: holds(direct, b"2"))
        with pytest.raises(OutcomeUnknown):
            await asked
        proxy.heal()
        entry = await kv.get("k")
        assert entry.value == b"2"
        assert await kv.update("k", b"3", first) is None

        proxy.blackhole("up")
        with pytest.raises(OutcomeUnknown):
            await kv.update("k", b"3", entry.revision)
        proxy.heal()
        assert await kv.get("k") == entry
        await proxied.aclose()


async def holds(kv: KeyValue, value: bytes) -> bool:
    entry = await kv.get("k")
    return entry is not None and entry.value == value


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


async def test_reads_come_from_the_leader_and_survive_its_move():
    with NatsCluster() as cluster:
        await asyncio.to_thread(placing, cluster)
        client = await connect(NatsSettings(url=cluster.urls), name="test")
        kv = KeyValue(client, "STATE", replicas=3)
        kv._timeout = 1.0  # what a lost answer costs; an election may take longer than a short time to live
        revision = (await soon(lambda: begun(kv))).revision
        for number in range(1, 3):
            await soon(lambda: stepped_down(client))
            revision = await moved_on(kv, b"%d" % number, revision)
        await client.aclose()


async def stepped_down(client: FloeClient) -> bool:
    with suppress(FloeError):
        await client.api("STREAM.LEADER.STEPDOWN.KV_STATE")
        return True
    return False


async def begun(kv: KeyValue) -> KvEntry | None:
    """The bucket's first value, once it has one."""
    with suppress(OutcomeUnknown, Unavailable):
        await kv.ensure()
        await kv.create("k", b"0")
        return await kv.get("k")
    return None


async def moved_on(kv: KeyValue, value: bytes, revision: int) -> int:
    """Write `value` over `revision`, settling unclear outcomes by reading, as a user of the store does."""
    while True:
        with suppress(OutcomeUnknown, Unavailable):
            if (written := await kv.update("k", value, revision)) is not None:
                return written
        with suppress(Unavailable):
            entry = await kv.get("k")
            if entry.value == value:  # a write whose answer was lost, and which may have come late
                return entry.revision
            assert entry.revision == revision
        await asyncio.sleep(0.1)
