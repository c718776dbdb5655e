"""A replicated stream whose leader dies under egress. Simulated worlds have moving leaders, and none for a while."""

import asyncio
from contextlib import aclosing, suppress
from pathlib import Path

from common.errors import FloeError
from infra.local.nats import NatsCluster, nats_server_binary
from infra.publish import AckedPublisher
from tests.contract.test_publishers_cluster import leader_of
from tests.support.basics import soon
from tests.support.egress import Bench, connected
from tests.support.servers import placing


async def test_a_leader_that_dies_in_an_older_cluster_and_comes_back_as_the_newest_loses_nothing(tmp_path: Path):
    with NatsCluster(binary=nats_server_binary("2.10")) as older:
        await asyncio.to_thread(placing, older)
        async with aclosing(await connected(older.urls)) as client:
            bench = Bench(older.urls, tmp_path, client)
            stream = await bench.make_replicated()

            async def reaches(last: int) -> bool:
                with suppress(FloeError):  # no leader just now
                    async with AckedPublisher(client, window=64) as publisher:
                        for count in range(100):
                            await publisher.publish(f"{stream}.a".encode(), b"%d" % count, None)
                        await publisher.wait_for_acks()
                    return await bench.last(stream) >= last
                return False

            await soon(lambda: reaches(100))
            async with bench.egress({"stream": stream}, kv_replicas=3, lease_ttl="10s"):
                await bench.archived_to(stream, 100)
                leader = await leader_of(older, client, stream)  # a busy cluster may choose one just now
                await asyncio.to_thread(leader.kill)
                leader.binary = nats_server_binary()
                await asyncio.to_thread(leader.start)
                await asyncio.to_thread(older.wait_ready)
                await soon(lambda: reaches(200))
                await bench.archived_to(stream, await bench.last(stream))
            await bench.same_at_last(stream, stream)
            assert len(bench.messages(stream)) >= 200
