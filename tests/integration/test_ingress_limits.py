"""Nodes of a cluster, and a server that is started again, may take smaller messages than before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.errors import ConfigError, Unavailable
from infra.local.nats import NatsServer
from ingress.parked import State
from tests.integration.test_ingress_parked import kept, states
from tests.support.basics import PATIENCE, soon
from tests.support.ingress import (
    CHAIN,
    Archive,
    Centre,
    client_of,
    left_open,
    make,
    rows_of,
    service,
    stands,
    stop_of,
    store,
)
from tests.support.segments import message

pytestmark = [pytest.mark.servers, pytest.mark.simulated]

SMALLER = 8 * 1024
LARGE = message(15, f"{CHAIN}|15|".encode().ljust(20_000, b"L"), subject=b"nodes.large")


@pytest.fixture
def server(tmp_path: Path) -> NatsServer:
    return NatsServer(tmp_path / "nats")


async def started_with(server: NatsServer, max_payload: int | None) -> None:
    """The same server with another limit, as a node that is connected to next."""
    server.max_payload = max_payload
    await asyncio.to_thread(server.restart)


def violations(server: NatsServer) -> int:
    """How many connections the server has cut because of a message that was too large."""
    return server.log.read_text().lower().count("maximum payload")


async def test_a_server_that_takes_less_now_stops_nothing(tmp_path: Path, archive: Archive, server: NatsServer) -> None:
    """The row is put aside; it was decoded, by the former limit, before the connection was another one."""
    archive.put(rows_of(1, 10))
    with server:
        centre = Centre(tmp_path, archive, server.url, on_oversize="park")
        async with client_of(server.url) as client, centre.running() as health:
            await centre.carried(client, 10)
            await started_with(server, SMALLER)
            archive.put([*rows_of(11, 14), LARGE, *rows_of(16, 30)])
            await stands(client, centre, [*range(1, 15), *range(16, 31)])
            parked = await kept(client, centre)
            await soon(lambda: states(parked) == {15: State.PARKED})
            assert centre.status(health)["state"] == "carrying"
            # And one that takes more again is made use of.
            await started_with(server, None)
            large = message(31, LARGE.payload, subject=b"nodes.large")
            archive.put([large])
            await stands(client, centre, [*range(1, 15), *range(16, 32)])
        assert violations(server) == 0


async def test_a_row_taken_no_more_stops_its_own_target(tmp_path: Path, archive: Archive, server: NatsServer) -> None:
    ref = archive.put([*rows_of(1, 14), LARGE, *rows_of(16, 30)])
    with server:
        centre = Centre(tmp_path, archive, server.url, create=None, on_oversize="park")
        async with client_of(server.url) as client:
            await left_open(client, centre, ref, await make(client, centre))
            await store(client, centre, rows_of(1, 5))
            await started_with(server, SMALLER)
            async with service(centre) as health:
                stop = await stop_of(centre, health)
                assert stop["code"] == "E-OVERSIZE-INTENT"
                assert f"the target takes {SMALLER}" in stop["why"]
                assert violations(server) == 0
                # Nothing has to be done once the server takes it again.
                await started_with(server, None)
                await stands(client, centre, list(range(1, 31)))


async def test_what_the_server_does_not_take_is_not_asked_and_cuts_no_connection(server: NatsServer) -> None:
    server.max_payload = SMALLER
    with server:
        async with client_of(server.url) as client:
            with pytest.raises(Unavailable, match=f"expected at most {SMALLER} bytes"):
                await client.request_raw(b"a", b"x" * (SMALLER + 1), timeout=PATIENCE)
            assert client.is_up
        assert violations(server) == 0


async def test_a_server_without_headers_is_named(tmp_path: Path, archive: Archive) -> None:
    with NatsServer(tmp_path / "nats", extra="no_header_support: true") as server:
        with pytest.raises(ConfigError) as error:
            await Centre(tmp_path, archive, server.url).run()
        assert error.value.code == "E-NATS-HEADERS"
        assert "`headers: false`" in error.value.message
