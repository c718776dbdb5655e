"""A process on a twentieth of a core makes progress, however slowly: all arrives, and its leases stay with it."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from bench.harness import connect_bench
from bench.scale import MOVING_SHARE, START_TIMEOUT_S, feeds_config
from common.chain import Chain
from common.nats.api import create_stream
from common.open import load_settings, open_chains, open_store
from infra.local.nats import NatsServer
from infra.local.process import free_port
from infra.oracle import archived_messages
from tests.scenarios.many_chains import WrittenFleet
from tests.scenarios.processes import Service
from tests.support.basics import PATIENCE, soon

pytestmark = pytest.mark.timing

RUNS_S, STOPS_S = 0.05, 0.95  # seconds, in turns
LIVES_S = 30  # seconds in which some chains grow
CHAINS, FEEDS, ROWS = 1000, 100, 5
MOST_LOST = 5  # leases: each renewal that runs out costs one, a livelock costs all of them again and again


@contextmanager
def starved(service: Service) -> Iterator[None]:
    """Let the process run for a twentieth of the time. Its leases are not lost meanwhile, except for a few."""
    is_over = threading.Event()

    def stop_and_go() -> None:
        while not is_over.is_set():
            service.send(signal.SIGCONT)
            time.sleep(RUNS_S)
            service.send(signal.SIGSTOP)
            is_over.wait(STOPS_S)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
        assert service.log.read_text().count("lease_lost") <= MOST_LOST, service.tail()
    finally:
        is_over.set()
        thread.join()
        service.kill()


async def test_ingress_of_a_thousand_chains_carries_all(tmp_path: Path) -> None:
    with NatsServer() as nats:
        fleet, client = WrittenFleet(tmp_path, CHAINS, nats.url), await connect_bench(nats.url)
        fleet.fill()
        with starved(service := Service(tmp_path, "ingress", "ingress", "run", "-c", str(fleet.config)).start()):
            await fleet.arrived(client, service)
            await fleet.live(LIVES_S, MOVING_SHARE * CHAINS)
            await fleet.arrived(client, service)
        assert (await fleet.compare(client))["messages"] > CHAINS
        await client.aclose()


async def test_egress_of_a_hundred_feeds_archives_all(tmp_path: Path) -> None:
    streams = [f"S{n}" for n in range(FEEDS)]
    chains, expected = [Chain("bench", stream) for stream in streams], [b"%d" % n for n in range(ROWS)] * 2
    with NatsServer() as nats:
        client = await connect_bench(nats.url)
        for stream in streams:
            await create_stream(client, {"name": stream, "subjects": [f"{stream}.>"]})
        config = feeds_config(tmp_path, nats.url, streams, free_port())
        documents = open_chains(settings := load_settings(str(config)))

        def is_archived(end: int) -> bool:
            return all(documents.read_tail(each) == end for each in chains)

        with starved(Service(tmp_path, "egress", "egress", "run", "-c", str(config)).start()):
            for end in (ROWS, 2 * ROWS):
                for stream, payload in product(streams, expected[:ROWS]):
                    await client.request_raw(f"{stream}.a".encode(), payload, timeout=PATIENCE)
                await soon(partial(is_archived, end), START_TIMEOUT_S, 1.0)
        with closing(open_store(settings)) as store:
            for chain in chains:
                assert [each.payload for each in archived_messages(store, chain)] == expected
        await client.aclose()
