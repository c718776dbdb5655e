"""Leases: one holder at a time while all goes well, and a holder that knows when it no longer does."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from common.clock import SystemClock
from common.jetstream.client import FloeClient, connect
from common.jetstream.kv import BucketGone, KeyValue
from common.jetstream.lease import Leases, new_owner
from common.settings.service import NatsSettings
from infra.local.nats import NatsServer
from tests.support.basics import PATIENCE, cancelled, soon, unique
from tests.support.clock import ManualClock
from tests.support.proxies import TcpProxy

pytestmark = pytest.mark.simulated

TTL = 2.4  # seconds


@pytest.fixture
async def kv(client: FloeClient) -> KeyValue:
    return await KeyValue(client, unique("LEASES"), ttl=TTL).ensure()


def leases(kv: KeyValue, owner: str = "") -> Leases:
    return Leases(kv, owner or new_owner("test"), TTL, SystemClock())


async def test_one_owner_holds_a_lease_until_it_gives_it_up(kv: KeyValue):
    assert new_owner("a") != new_owner("a")
    mine, yours = leases(kv, "me"), leases(kv, "you")
    lease = await mine.acquire("k")
    assert lease.is_usable()
    assert await yours.acquire("k") is None
    assert await yours.holder("k") == "me"
    await lease.release()
    assert not lease.is_usable()
    assert await yours.holder("k") is None
    assert await yours.acquire("k") is not None


async def test_a_lease_that_is_kept_outlives_its_time(kv: KeyValue):
    lease = await leases(kv).acquire("k")
    keeping = asyncio.create_task(lease.keep())
    began = time.monotonic()
    while time.monotonic() - began < 2.5 * TTL:
        assert lease.is_usable()
        assert await leases(kv).acquire("k") is None
        await asyncio.sleep(0.1)
    await cancelled(keeping)
    await lease.release()
    assert await leases(kv).acquire("k") is not None


@pytest.mark.timing
async def test_a_lease_that_nobody_keeps_is_free_after_its_time(kv: KeyValue):
    lease = await leases(kv).acquire("k")
    began = time.monotonic()
    await soon(lambda: leases(kv).acquire("k"), 2 * TTL + 1)
    assert TTL * 0.9 < time.monotonic() - began < 2 * TTL
    assert not lease.is_usable()


async def test_a_cancellation_that_is_swallowed_still_ends_the_keeping(kv: KeyValue, monkeypatch: pytest.MonkeyPatch):
    """As `asyncio.wait_for` of Python 3.11 does where it comes together with the answer."""
    lease = await leases(kv).acquire("k")
    real, asked = kv.update, asyncio.Event()

    async def swallowing(*args: Any) -> int | None:
        asked.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENCE)
        return await real(*args)

    monkeypatch.setattr(kv, "update", swallowing)
    keeping = asyncio.create_task(lease.keep())
    await asked.wait()
    keeping.cancel()
    await asyncio.wait({keeping}, timeout=PATIENCE)
    assert keeping.cancelled()


async def test_a_lease_that_is_the_owners_already_is_written_anew(kv: KeyValue):
    """Nobody knows how much of its time is left."""
    mine = leases(kv, "me")
    await mine.acquire("k")
    before = (await kv.get("k")).revision
    await asyncio.sleep(TTL / 2)
    again = await mine.acquire("k")
    assert (await kv.get("k")).revision > before
    await asyncio.sleep(TTL * 0.4)
    assert again.is_usable()
    await asyncio.sleep(TTL * 0.25)
    assert await leases(kv, "you").acquire("k") is None


@pytest.mark.parametrize("err_code", [10071, 10164])
async def test_a_refused_renewal_of_a_lease_that_is_ours_is_tried_again(
    client: FloeClient, kv: KeyValue, err_code: int, monkeypatch: pytest.MonkeyPatch
):
    """A cluster that finds itself says so in several ways; 10164: another write of the key is in flight."""
    lease = await leases(kv, "me").acquire("k")
    real, refused = client.request_raw, 0
    answer = b'{"error":{"code":400,"err_code":%d,"description":"wrong last sequence"}}' % err_code

    async def refusing(subject: bytes, *args: Any, **kwargs: Any) -> Any:
        nonlocal refused
        refused += subject.startswith(b"$KV.")
        return (answer, None) if subject.startswith(b"$KV.") and refused < 3 else await real(subject, *args, **kwargs)

    monkeypatch.setattr(client, "request_raw", refusing)
    keeping = asyncio.create_task(lease.keep())
    await soon(lambda: refused >= 3)
    await asyncio.sleep(TTL / 2)
    assert lease.is_usable()
    await cancelled(keeping)
    await lease.release()
    assert await kv.get("k") is None


async def test_writes_are_heard_and_so_are_releases(kv: KeyValue):
    heard: list[tuple[str, bytes | None]] = []
    await leases(kv).listen("a.*.*", lambda *what: heard.append(what))
    lease = await leases(kv, "me").acquire("a.b.c")
    await leases(kv, "me").acquire("b.b.c")
    await lease.release()
    await soon(lambda: heard == [("a.b.c", b"me"), ("a.b.c", None)])


async def test_a_bucket_that_is_gone_is_found_gone_though_somebody_listens(client: FloeClient, kv: KeyValue):
    """Whoever listens to a bucket's writes receives them: then the server does not say that nobody does."""
    await leases(kv).listen("*", lambda *_: None)
    await client.api(f"STREAM.DELETE.KV_{kv.bucket}")
    assert await leases(kv, "me").acquire("k") is not None
    assert await leases(kv).holder("k") == "me"


async def test_a_lease_is_not_used_in_the_last_third_of_its_time_nor_by_who_wakes_behind_it(kv: KeyValue):
    clock = ManualClock()
    lease = await Leases(kv, "me", TTL, clock).acquire("k")
    clock.advance(TTL * 2 / 3 - 0.01)
    assert lease.is_usable()
    clock.advance(0.02)
    assert (lease.is_usable(), lease.lost.is_set) == (False, False)
    clock.advance(TTL * 5)
    await lease.keep()
    assert (lease.is_usable(), lease.lost.is_set) == (False, True)


async def test_a_lease_that_another_took_or_deleted_is_lost(kv: KeyValue):
    lease, other = await leases(kv, "me").acquire("k"), await leases(kv, "me").acquire("other")
    await kv.put("k", b"you")
    await kv.delete("other")
    for each in (lease, other):
        await asyncio.wait_for(each.keep(), PATIENCE)
        assert each.lost.is_set
    await lease.release()
    assert await leases(kv).holder("k") == "you"


async def test_whatever_stands_in_the_key_it_is_another_owner(kv: KeyValue):
    for value in (b"", b"\xff\x00", b"me ", b"x" * 100_000):
        await kv.put("k", value)
        assert await leases(kv, "me").acquire("k") is None
        assert await leases(kv, "me").holder("k") is not None
    with pytest.raises(ValueError, match=r"expected a time to live of 30 s, found 2\.4 s"):
        Leases(kv, "me", 30.0, SystemClock())


@pytest.mark.parametrize("gone", ["STREAM.DELETE", "STREAM.PURGE"])
async def test_a_lease_outlives_the_bucket_that_lost_it(client: FloeClient, kv: KeyValue, gone: str):
    lease = await leases(kv, "me").acquire("k")
    keeping = asyncio.create_task(lease.keep())
    await client.api(f"{gone}.KV_{kv.bucket}")
    await soon(partial(is_held, kv))
    await asyncio.sleep(TTL * 1.5)
    assert await is_held(kv)
    assert lease.is_usable()
    await cancelled(keeping)


async def is_held(kv: KeyValue) -> bool:
    with suppress(BucketGone):
        return await leases(kv).holder("k") == "me"
    return False


async def renewed(kv: KeyValue, revision: int) -> bool:
    entry = await kv.get("k")
    return entry is not None and entry.revision > revision


@pytest.mark.real
async def test_a_lease_is_unusable_before_it_is_free_and_outlives_a_lost_answer(nats_server: NatsServer, kv: KeyValue):
    async with TcpProxy(nats_server.port) as proxy:
        client = await connect(NatsSettings(url=proxy.url), name="proxied", ping_interval=TTL)
        lease = await leases(await KeyValue(client, kv.bucket, ttl=TTL).ensure(), "me").acquire("k")
        keeping = asyncio.create_task(lease.keep())
        revision = (await kv.get("k")).revision
        proxy.blackhole("down")
        await soon(lambda: renewed(kv, revision))
        proxy.heal()
        revision = (await kv.get("k")).revision
        await soon(lambda: renewed(kv, revision))
        assert (lease.is_usable(), lease.lost.is_set) == (True, False)
        proxy.blackhole()
        await soon(lambda: not lease.is_usable())
        assert await leases(kv, "you").acquire("k") is None
        await soon(lambda: leases(kv, "you").acquire("k"))
        await asyncio.wait_for(lease.lost.wait(), PATIENCE)
        await asyncio.wait_for(keeping, PATIENCE)
        await lease.release()
        proxy.heal()
        await client.aclose()
    assert await leases(kv).holder("k") == "you"
