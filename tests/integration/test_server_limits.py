"""Servers and accounts with limits of their own: Floe asks for no more than they accept, and names missing features."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from common.clock import NS_PER_S
from common.doctor_cli import _buckets, _stream_size_limits
from common.nats.api import stream_info
from common.nats.client import FloeClient
from common.nats.kv import BucketFull, KeyValue
from common.nats.pull import StartAt, scan
from egress.init import set_up
from infra.local.nats import NatsServer
from ingress.target import examine_target
from tests.support import restoring as back
from tests.support.basics import raises_code, soon, unique
from tests.support.egress import Bench, bench_of
from tests.support.ingress import Archive, Centre, check_exact, rows_of

pytestmark = pytest.mark.simulated

TINY = {"max_bytes_required": True, "storage_max_stream_bytes": 9}
BATCH = 16  # messages that a pull request may ask for


@pytest.fixture(scope="module")
def limited() -> Iterator[NatsServer]:
    """A server that takes small pull requests only, and an account that takes no stream without `max_bytes`."""
    server = NatsServer()
    server.extra = f"""
    jetstream {{ store_dir: "{server.store}", limits: {{ max_request_batch: {BATCH} }} }}
    accounts {{
      A {{
        users: [{{user: a, password: a}}],
        jetstream: {{ max_file: 1G, max_mem: 1G, max_bytes_required: true, store_max_stream_bytes: 100M }}
      }}
    }}
    no_auth_user: a
    """
    with server:
        yield server


@pytest.fixture
async def narrow(limited: NatsServer, tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(limited.url, tmp_path) as bench:
        yield bench


async def max_bytes(client: FloeClient, bucket: str) -> int:
    return int((await stream_info(client, f"KV_{bucket}")).config["max_bytes"])


@pytest.mark.real
async def test_a_server_that_takes_no_more_consumers_names_its_limit(tmp_path: Path) -> None:
    with NatsServer(extra="jetstream { limits { default_max_consumers: 1 } }") as server:
        async with bench_of(server.url, tmp_path) as bench:
            stream = await bench.make_stream(unique("T"))
            async with bench.egress({"stream": stream}, {"stream": stream, "name": "SECOND"}) as running:
                await soon(lambda: "E-JS-10026" in {running.status(name).get("code") for name in (stream, "SECOND")})
                hints = [str(running.status(name).get("hint")) for name in (stream, "SECOND")]
    assert "default_max_consumers of the server" in "".join(hints)


async def test_buckets_have_a_size_where_the_account_demands_one(narrow: Bench) -> None:
    stream = await narrow.make_stream(unique("T"), max_bytes=10_000_000)
    done, problems = await set_up(narrow.client, narrow.settings({"stream": stream}, kv_max_bytes="32M"))
    assert (problems, [each.name for each in done[:2]]) == ([], [narrow.lease_bucket, narrow.state_bucket])
    assert await max_bytes(narrow.client, narrow.state_bucket) == 32 * 2**20
    assert await max_bytes(narrow.client, narrow.lease_bucket) == 4 * 2**20
    with raises_code(BucketFull, "E-KV-FULL", 1, match="max bytes exceeds account limit") as refused:
        await KeyValue(narrow.client, unique("B"), max_bytes=200 * 2**20).ensure()
    assert "kv_max_bytes" in refused.value.hint


async def small_bucket(client: FloeClient, bucket: str, size: int) -> None:
    await KeyValue(client, bucket).ensure()
    info = await stream_info(client, f"KV_{bucket}")
    await client.api(f"STREAM.UPDATE.KV_{bucket}", {**info.config, "max_bytes": size})


async def fill(kv: KeyValue) -> BucketFull:
    for number in range(1000):
        try:
            await kv.create(f"k{number}", b"x" * 40)
        except BucketFull as full:
            return full
    raise AssertionError("the bucket takes more than its size")


async def test_a_chain_stops_at_a_full_bucket_and_resumes_when_there_is_room(bench: Bench) -> None:
    stream = await bench.filled([b"1"])
    await small_bucket(bench.client, bench.state_bucket, 2048)
    full = await fill(KeyValue(bench.client, bench.state_bucket))
    edit = f"nats stream edit KV_{bench.state_bucket} --max-bytes 4096"
    found = await _buckets(bench.client, bench.settings().egress, _stream_size_limits({}))
    assert found.state == "warning"
    assert full.hint.splitlines()[-1] == found.todo.splitlines()[-1] == edit
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: running.state(stream) == "stopped")
        assert running.status(stream)["code"] == "E-KV-FULL"
        await small_bucket(bench.client, bench.state_bucket, 1 << 20)
        await bench.archived_to(stream, 1)


async def test_a_target_stops_at_a_full_bucket_and_resumes(
    client: FloeClient, centre: Centre, archive: Archive
) -> None:
    archive.put(rows_of(1, 20))
    await small_bucket(client, centre.state_bucket, 2048)
    await fill(KeyValue(client, centre.state_bucket))
    async with centre.running() as health:
        await soon(lambda: centre.status(health).get("code") == "E-KV-FULL")
        assert "nats stream edit" in centre.status(health)["hint"]
        await small_bucket(client, centre.state_bucket, 1 << 20)
        check_exact(await centre.carried(client, 20), archive, centre.prefix)


async def test_members_wait_at_a_full_bucket_of_leases(bench: Bench) -> None:
    stream = await bench.filled([b"1"])
    leases = await KeyValue(bench.client, bench.lease_bucket, ttl=2.0).ensure()
    await bench.client.api(
        f"STREAM.UPDATE.KV_{bench.lease_bucket}", {**leases._config(2 * NS_PER_S, 1), "max_bytes": 8}
    )
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: running.status(stream).get("code") == "E-KV-FULL")
        await bench.client.api(f"STREAM.UPDATE.KV_{bench.lease_bucket}", leases._config(2 * NS_PER_S, 1))
        await bench.archived_to(stream, 1)


async def test_the_doctor_names_an_account_that_demands_sizes(bench: Bench) -> None:
    for account, state, text in (
        ({}, "ok", "not made yet"),
        ({"limits": {"max_bytes_required": True}}, "ok", "max_bytes 67108864, as the account requires"),
        ({"tiers": {"R1": {"limits": TINY}}}, "problem", "allows 9"),
    ):
        found = await _buckets(bench.client, bench.settings().egress, _stream_size_limits(account))
        assert (found.state, text in found.found) == (state, True), found


async def test_the_doctor_names_a_target_that_the_account_would_not_take(client: FloeClient, centre: Centre) -> None:
    for size, demands, state in ((0, True, "problem"), (1 << 20, True, "ok"), (0, False, "ok")):
        centre.target_settings["create"] |= {"max_bytes": size}  # type: ignore[operator]
        [settings] = centre.settings().ingress.targets
        found = await examine_target(client, settings, {}, demands)
        assert [each.state for each in found if each.what == "target"] == [state]


async def test_consumers_idle_no_longer_than_the_stream_allows(bench: Bench) -> None:
    stream = await bench.filled([b"1", b"2", b"3"], consumer_limits={"inactive_threshold": 2 * NS_PER_S})
    await bench.freeze({"stream": stream, "start_time": "2020-01-01T00:00:00Z"})
    async with aclosing(scan(bench.client, stream, StartAt(1), until=3)) as pieces:
        assert [message.sequence async for piece in pieces for message in piece] == [1, 2, 3]


async def test_a_restore_reads_back_with_as_many_messages_as_the_server_takes(narrow: Bench) -> None:
    stream = await narrow.filled([b"%d" % n for n in range(3 * BATCH + 1)], max_bytes=10_000_000)
    before = await back.contents(narrow, stream)
    async with narrow.egress({"stream": stream}):
        await narrow.archived_to(stream, len(before))
    await narrow.delete_stream(stream)
    report = await back.restored(narrow, stream)
    assert (report.exit_code, report.comparison.rows_read) == (0, len(before))
    assert await back.contents(narrow, stream) == before
