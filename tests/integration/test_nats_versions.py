"""The same promises on an older nats-server and on the newest (and on 2.9 where one is to be had)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import FloeError, OutcomeUnknown, Unavailable
from common.jetstream.api import stream_info
from common.metrics import REGISTRY
from egress.evidence import source_of
from infra.local.nats import NatsCluster, NatsServer, nats_server_binary
from tests.support.basics import soon, unique
from tests.support.egress import QUICK, Bench, Partitioned, connected, feed_of, publish_over
from tests.support.ingress import Archive, Centre
from tests.support.servers import placing

pytestmark = pytest.mark.servers

VERSIONS = ["2.9", "2.10", "newest"]


@pytest.fixture(scope="module", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    version = "" if request.param == "newest" else request.param
    try:
        binary = nats_server_binary(version)
    except FileNotFoundError as error:
        if version != "2.9":  # the others are installed by `make setup`
            raise
        pytest.skip(str(error))
    with NatsServer(binary=binary) as running:
        yield running


@pytest.fixture
async def bench(server: NatsServer, tmp_path: Path) -> AsyncIterator[Bench]:
    client = await connected(server.url)
    yield Bench(server.url, tmp_path, client)
    await client.aclose()


async def test_messages_go_the_whole_way_and_what_was_deleted_at_the_end_is_covered(bench: Bench) -> None:
    """Coverage past the last message delivered comes from the heartbeat's `Nats-Last-Stream`."""
    stream = await bench.make_stream(unique("WAY"))
    headers = b"NATS/1.0\r\nA: 1\r\na:  2 \r\nA: 1\r\nNats-Msg-Id: x\r\n\r\n"
    await bench.publish(stream, (b"%d" % n for n in range(300)))
    await bench.publish(stream, [b"once"], headers=headers)
    await bench.publish(stream, [b"deleted"] * 2)
    for sequence in (10, 302, 303):
        await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, 303)
    sources = [{"site": "site", "feed": stream, "subject_prefix": "fleet"}]
    create = {"subjects": [f"fleet.{stream}.>"]}
    centre = Centre(bench.root, Archive(bench.root / "bucket"), bench.url, create=create, sources=sources)
    async with centre.running():
        found = await centre.carried(bench.client, 300)

    assert [each.message.payload for each in found] == [m.payload for m in bench.messages(stream)]
    assert found[-1].message.headers == headers
    assert bench.ledger(stream) == {"deleted": 3}
    await bench.same(stream, stream)


async def test_a_filter_passes_what_it_does_not_take(bench: Bench) -> None:
    stream = await bench.make_stream(unique("FILTER"))
    for subject in ("a", "b", "c.d"):
        await bench.publish(stream, [b"1", b"2"], subject=subject)

    async with bench.egress({"stream": stream, "filter_subject": f"{stream}.a"}):
        await bench.archived_to(stream, 6)

    assert [message.sequence for message in bench.messages(stream)] == [1, 2]
    assert bench.ledger(stream) == {"not_matched": 4}


async def test_a_stream_that_was_made_again_begins_its_next_incarnation(bench: Bench) -> None:
    stream = await bench.make_stream(unique("AGAIN"))
    await bench.publish(stream, [b"old"] * 20)
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, 20)
        await bench.delete_stream(stream)
        await bench.make_stream(stream)
        await bench.publish(stream, [b"new"] * 30)
        await bench.archived_to(stream, 30, incarnation=1)

    assert {message.payload for message in bench.messages(stream, 0)} == {b"old"}
    assert {message.payload for message in bench.messages(stream, 1)} == {b"new"}
    bench.check(stream, 1)


async def test_a_restarted_server_loses_nothing(bench: Bench, server: NatsServer) -> None:
    stream = await bench.make_stream(unique("RESTART"), storage="file")
    await bench.publish(stream, [b"before"] * 100)
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, 100)
        await asyncio.to_thread(server.restart)
        await soon(lambda: bench.client.is_up)
        await bench.publish(stream, [b"after"] * 100)
        await bench.archived_to(stream, 200)

    await bench.same(stream, stream)


async def test_the_time_of_the_answer_is_told_where_the_server_tells_it(bench: Bench) -> None:
    stream = await bench.make_stream(unique("TS"))
    info = await stream_info(bench.client, stream)
    assert info is not None

    assert (source_of(info).asked_ns is not None) == (bench.client.server_version >= (2, 10, 0))


async def test_partitions_share_a_stream(bench: Bench) -> None:
    stream = await bench.make_stream(unique("PARTS"))
    parts = Partitioned(bench, stream, 2)
    await publish_over(bench, stream, ["0.a", "1.b"], 60, "x")
    async with bench.egress(feed_of(stream, 2)):
        await parts.archived_to(60)

    await parts.same(stream)


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_what_is_archived_leaves_a_stream_that_keeps_until_then(bench: Bench, retention: str) -> None:
    stream = await bench.make_stream(unique("KEEPS"), retention=retention)
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: running.state(stream) == "reading")
        await bench.publish(stream, (b"%d" % n for n in range(40)))
        await bench.archived_to(stream, 40)
        await soon(lambda: is_empty(bench, stream))
    async with bench.egress({"stream": stream}) as running:  # a durable that is there already is replaced
        await soon(lambda: running.state(stream) == "reading")
        await bench.publish(stream, (b"%d" % n for n in range(40, 60)))
        await bench.archived_to(stream, 60)
        await soon(lambda: is_empty(bench, stream))

    assert [message.payload for message in bench.messages(stream)] == [b"%d" % n for n in range(60)]


async def is_empty(bench: Bench, stream: str) -> bool:
    info = await stream_info(bench.client, stream)
    return info is not None and info.messages == 0


async def test_samples_and_reliable_advisories(bench: Bench) -> None:
    stream, told = await bench.make_stream(unique("SAMPLED")), await bench.make_stream(unique("TOLD"))
    feed = {
        "stream": stream,
        "inspect_subject_token": 2,
        "inspect_duration": "1h",
        "snapshot_interval": "1s",
        "advisory": {"subject": f"{told}.%s.%v", "reliable": True},
    }
    for _ in range(2):  # the second run goes on with the snapshot of the first
        async with bench.egress(feed):
            before = await bench.last(stream)
            for sender in ("a", "b", "c"):
                await bench.publish(stream, [b"x"] * 10, subject=sender)
            await bench.archived_to(stream, before + 30)

            async def all_told() -> bool:
                return await bench.last(told) >= 3

            await soon(all_told)

    assert [message.sequence for message in bench.messages(stream)] == [1, 11, 21]
    assert bench.ledger(stream) == {"sampled_out": 57}
    assert await bench.last(told) == 3
    bench.check(stream)


async def test_heartbeats_are_stored(bench: Bench) -> None:
    stream = await bench.make_stream(unique("BEATS"))
    beats = {"interval": "1s", "subjects": [{"subject": f"{stream}.beat"}]}
    async with bench.egress({"stream": stream}, heartbeats=beats):
        await bench.archived_to(stream, 2)

    assert {message.subject for message in bench.messages(stream)} == {f"{stream}.beat".encode()}


async def test_no_heartbeat_takes_up_a_reader_for_long(bench: Bench) -> None:
    """A reader that no message comes to stays the same one: heartbeats reach it, on every version."""
    stream = await bench.make_stream(unique("QUIET"))
    await bench.publish(stream, [b"x"])
    tuning = replace(QUICK, pulling=replace(QUICK.pulling, heartbeat=1.0))
    async with bench.egress({"stream": stream}, tuning=tuning) as running:
        await bench.archived_to(stream, 1)
        await asyncio.sleep(3.5)  # three heartbeats, past the time after which silence is a doubt
        assert running.state(stream) == "reading"
        labels = {"site": "site", "feed": stream, "partition": "0", "reason": "silent"}
        assert not REGISTRY.get_sample_value("floe_egress_doubts_total", labels)


async def test_a_leader_that_dies_in_a_cluster_of_an_older_version(tmp_path: Path) -> None:
    with NatsCluster(binary=nats_server_binary("2.10")) as cluster:
        await asyncio.to_thread(placing, cluster)
        client = await connected(cluster.urls[0])
        bench = Bench(cluster.urls, tmp_path, client)
        stream = await bench.make_stream(unique("R3"), num_replicas=3, storage="file")
        await bench.publish(stream, [b"before"] * 100)
        async with bench.egress({"stream": stream}, kv_replicas=3):
            await bench.archived_to(stream, 100)
            info = await stream_info(client, stream)
            leader = cluster.server(info.leader)
            await asyncio.to_thread(leader.kill)
            other = await connected(next(each.url for each in cluster.servers if each is not leader))
            alive = replace(bench, client=other)
            await soon(lambda: answers(alive, stream))
            await alive.publish(stream, [b"after"] * 100)
            await alive.archived_to(stream, 200)
        await asyncio.to_thread(leader.start)  # the comparison needs a place for its consumer
        await soon(lambda: same(alive, stream))
        await other.aclose()
        await client.aclose()


async def same(bench: Bench, stream: str) -> bool:
    """Whether the archive is the stream; False while the stream has no leader to read it from."""
    with suppress(FloeError):
        await bench.same(stream, stream)
        return True
    return False


async def answers(bench: Bench, stream: str) -> bool:
    try:
        info = await stream_info(bench.client, stream)
    except (Unavailable, OutcomeUnknown):
        return False
    return info is not None and bool(info.leader)
