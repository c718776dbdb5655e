"""Messages that are too large for the target or its server: put aside, listed, delivered once they are taken."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient
from common.segments.segment import Message
from infra.local.nats import NatsServer
from ingress.parked import ParkedStore, State
from tests.support import ingress
from tests.support.basics import soon
from tests.support.commands import floe
from tests.support.ingress import (
    CHAIN,
    Archive,
    Centre,
    arrived,
    client_of,
    left_open,
    rows_of,
    service,
    stands,
    stop_of,
    store,
)
from tests.support.segments import message

pytestmark = [pytest.mark.servers, pytest.mark.simulated]

LIMIT = 1000
LARGE = {5: 2000, 17: 1500, 30: 5000}


def with_large(first: int, last: int, large: dict[int, int] = LARGE) -> list[Message]:
    """Rows of which some are too large for the target."""
    rows = {row.sequence: row for row in rows_of(first, last)}
    for sequence, size in large.items():
        if first <= sequence <= last:
            text = f"{CHAIN}|{sequence}|".encode().ljust(size, b"L")
            rows[sequence] = message(sequence, text, subject=b"nodes.large", headers=block(b"A: 1", b"A:  2"))
    return list(rows.values())


def block(*lines: bytes) -> bytes:
    return b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


async def make(client: FloeClient, centre: Centre) -> None:
    """The target with a greatest message."""
    await ingress.make(client, centre, max_msg_size=LIMIT, allow_batched=True, allow_direct=True)


async def raise_limit(client: FloeClient, centre: Centre, size: int) -> None:
    await ingress.update(client, centre, max_msg_size=size)


async def kept(client: FloeClient, centre: Centre) -> ParkedStore:
    """What is parked for the target of now."""
    info = await stream_info(client, centre.target)
    documents = centre.archive.documents
    return ParkedStore(documents.objects, documents.layout, centre.target, info.created)


def states(parked: ParkedStore) -> dict[int, State]:
    return {name.sequence: entry.state for name, entry in parked.entries().items()}


def check_all_once(messages: list[Any], archive: Archive, centre: Centre, late: set[int]) -> None:
    """Each row once and byte for byte; in order but for `late`, which may stand anywhere behind."""
    in_turn = [each for each in messages if each.message.sequence not in late]
    rows = {row.sequence: row for row in archive.rows[CHAIN]}
    assert sorted(each.message.sequence for each in messages) == sorted(rows)
    assert [each.message.sequence for each in in_turn] == sorted(set(rows) - late)
    for each in messages:
        row = rows[each.message.sequence]
        assert (each.message.headers, each.message.payload) == (row.headers, row.payload)
        assert each.subject == centre.prefix + row.subject


async def listed(config: Path) -> dict[int, dict[str, Any]]:
    return {row["sequence"]: row for row in (await floe("parked", "ls", "-c", str(config), "--json")).json()}


async def are(config: Path, states: list[str]) -> bool:
    return [row["state"] for row in (await listed(config)).values()] == states


async def test_the_command_lists_shows_asks_and_delivers_each_once(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(with_large(1, 20))
    centre.having(on_oversize="park")
    config = centre.write()
    of_chain = ["-c", str(config), "--target", centre.target, "--site", CHAIN.site, "--feed", CHAIN.feed]

    await make(client, centre)
    async with centre.running():
        await centre.carried(client, 18)
        await soon(lambda: are(config, ["parked", "parked"]))
        assert set(await listed(config)) == {5, 17}
        assert (await listed(config))[5]["why"].endswith("bytes, the target takes 1000")

        row, cat = centre.archive.rows[CHAIN][16], ["parked", "cat", *of_chain, "--sequence", "17"]
        assert (await floe(*cat)).out.encode() == row.payload
        assert (await floe(*cat, "--headers")).out.splitlines() == (row.headers or b"").decode().splitlines()
        found = (await floe(*cat, "--json")).json()
        parts = [base64.b64decode(found[part]) for part in ("subject", "headers", "payload")]
        assert parts == [row.subject, row.headers, row.payload]

        # The archive's copy goes: what is parked needs it no more.
        for ref in centre.archive.store.list(CHAIN):
            centre.archive.store.delete(ref)
        await raise_limit(client, centre, 1800)
        assert (await floe("parked", "retry", *of_chain, "--all")).code == 2
        assert (await floe("parked", "retry", *of_chain, "--sequence", "9", "--yes")).code == 3
        assert (await floe("parked", "retry", *of_chain, "--all", "--yes")).code == 0
        assert "parked" not in {row["state"] for row in (await listed(config)).values()}
        messages = await centre.carried(client, 19)
        await soon(lambda: are(config, ["parked", "delivered"]))
        assert (await listed(config))[5]["why"].endswith("bytes, the target takes 1800")
        assert [each.message.sequence for each in messages][-1] == 17
        assert (await floe("parked", "retry", *of_chain, "--sequence", "17", "--yes")).code == 3

        await raise_limit(client, centre, 100_000)
        assert (await floe("parked", "retry", *of_chain, "--sequence", "5", "--yes")).code == 0
        centre.archive.put(rows_of(21, 30))
        messages = await centre.carried(client, 30)
    check_all_once(messages, centre.archive, centre, {5, 17})


@pytest.mark.parametrize("publisher", ["fast", "atomic", "single"])
async def test_messages_at_the_limits_are_stored_or_parked(client: FloeClient, centre: Centre, publisher: str) -> None:
    """The connection is never lost to one that is too large."""
    most, wide = 1024 * 1024, b"A: " + b"v" * 60_000
    sizes = [most, most - 1, most - 100, *range(most - 290, most - 230, 6), most - 400]
    rows = [message(n, b"x" * size, subject=b"nodes.a") for n, size in enumerate(sizes, 1)]
    count = len(rows)
    for more in range(5_200, 5_500, 30):
        count += 1
        rows.append(message(count, headers=block(wide, b"B: " + b"v" * more), subject=b"nodes.a"))
    rows.append(message(count + 1, subject=b"nodes.a"))
    centre.archive.put(rows)
    centre.having(on_oversize="park", publisher=publisher)

    async with centre.running() as health:

        async def is_accounted() -> bool:
            info = await stream_info(client, centre.target)
            if info is None:
                return False
            kept_states = states(await kept(client, centre))
            return info.messages + list(kept_states.values()).count(State.PARKED) == len(rows)

        await soon(is_accounted)
        parked = set(states(await kept(client, centre)))
        messages = await arrived(client, centre.target)
        assert {each.message.sequence for each in messages} == set(range(1, len(rows) + 1)) - parked
        assert {1, 2, 3} < parked < set(range(1, len(rows)))
        assert health.status()["parts"][f"target {centre.target}"]["state"] == "carrying"


# Nodes of a cluster, and a server that is started again, may take smaller messages than before


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
            await left_open(client, centre, ref, await ingress.make(client, centre))
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


async def test_a_server_without_headers_is_named(tmp_path: Path, archive: Archive) -> None:
    with NatsServer(tmp_path / "nats", extra="no_header_support: true") as server:
        with pytest.raises(ConfigError) as error:
            await Centre(tmp_path, archive, server.url).run()
        assert error.value.code == "E-NATS-HEADERS"
        assert "`headers: false`" in error.value.message
