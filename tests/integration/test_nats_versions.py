"""The same guarantees on an older nats-server and on the newest (and on 2.9 if one is available)."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from common.nats.api import stream_info
from egress.evidence import source_of
from infra.local.nats import NatsServer, nats_server_binary
from tests.support.basics import unique
from tests.support.egress import Bench, Partitioned, bench_of, publish_over
from tests.support.ingress import Archive, Centre

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
    async with bench_of(server.url, tmp_path) as bench:
        yield bench


async def test_messages_go_the_whole_way_and_deleted_ones_at_the_end_are_covered(bench: Bench) -> None:
    """Coverage past the last delivered message comes from the heartbeat's `Nats-Last-Stream`."""
    stream = await bench.make_stream(unique("WAY"))
    info = await stream_info(bench.client, stream)
    assert (source_of(info).server_time_ns is not None) == (bench.client.server_version >= (2, 10, 0)), (
        "the answer's time"
    )
    headers = b"NATS/1.0\r\nA: 1\r\na:  2 \r\nA: 1\r\nNats-Msg-Id: x\r\n\r\n"
    await publish_over(bench, stream, "ab", 300, "x")
    await bench.publish(stream, [b"once"], headers=headers)
    await bench.publish(stream, [b"deleted"] * 2)
    for sequence in (10, 302, 303):
        await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    parts = Partitioned(bench, unique("PARTS"), 2)
    cut = {"name": parts.feed, "stream": stream, "partitions": [f"{stream}.a", f"{stream}.b"]}
    async with bench.egress({"stream": stream}, cut):
        await bench.archived_to(stream, 303)
        await parts.archived_to(303)
    await parts.same(stream)
    sources = [{"site": "site", "feed": stream, "subject_prefix": "fleet"}]
    create = {"subjects": [f"fleet.{stream}.>"]}
    centre = Centre(bench.root, Archive(bench.root / "bucket"), bench.url, create=create, sources=sources)
    async with centre.running():
        found = await centre.carried(bench.client, 300)

    assert [each.message.payload for each in found] == [m.payload for m in bench.messages(stream)]
    assert (found[-1].message.headers, bench.ledger(stream)) == (headers, {"deleted": 3})
    await bench.same(stream, stream)
