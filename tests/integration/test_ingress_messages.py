"""Special messages: too large for the target or its server, or with headers that a server acts on.

The large ones are parked, listed, and delivered once they are accepted. Such headers do nothing unless listed.
"""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from common.archive.segment import Message
from common.errors import ConfigError
from common.nats.api import stream_info
from common.nats.client import FloeClient
from common.nats.pull import get_message
from infra.local.nats import NatsServer
from ingress.parked import ParkedState, ParkedStore
from tests.support import ingress
from tests.support.basics import raises_code, soon
from tests.support.commands import floe, ran
from tests.support.ingress import CHAIN, Archive, Centre, arrived, client_of, holds, make, rows_of, store, update
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


async def make_limited(client: FloeClient, centre: Centre) -> None:
    """Make the target with a limit for messages."""
    await make(client, centre, max_msg_size=LIMIT, allow_batched=True, allow_direct=True)


async def raise_limit(client: FloeClient, centre: Centre, size: int) -> None:
    await update(client, centre, max_msg_size=size)


async def kept(client: FloeClient, centre: Centre) -> ParkedStore:
    """The parked messages of the current target."""
    info = await stream_info(client, centre.target)
    documents = centre.archive.documents
    return ParkedStore(documents.objects, documents.layout, centre.target, info.created)


def states(parked: ParkedStore) -> dict[int, ParkedState]:
    return {name.sequence: entry.state for name, entry in parked.list_entries().items()}


def check_all_once(messages: list[Any], archive: Archive, centre: Centre, late: set[int]) -> None:
    """Check each row once and byte for byte; in order but for `late`, which may be anywhere behind."""
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
    of_chain = ["-c", str(config), "--target", centre.target, f"{CHAIN.site}/{CHAIN.feed}"]

    await make_limited(client, centre)
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

        # The archive's copy goes: parked messages need it no more.
        for ref in centre.archive.store.list(CHAIN):
            centre.archive.store.delete(ref)
        await raise_limit(client, centre, 1800)
        await ran("parked", "retry", *of_chain, "--all", code=2)
        await ran("parked", "retry", *of_chain, "--sequence", "9", "--yes", code=3)
        await ran("parked", "retry", *of_chain, "--all", "--yes")
        assert "parked" not in {row["state"] for row in (await listed(config)).values()}
        messages = await centre.carried(client, 19)
        await soon(lambda: are(config, ["parked", "delivered"]))
        assert (await listed(config))[5]["why"].endswith("bytes, the target takes 1800")
        assert [each.message.sequence for each in messages][-1] == 17
        await ran("parked", "retry", *of_chain, "--sequence", "17", "--yes", code=3)

        await raise_limit(client, centre, 100_000)
        await ran("parked", "retry", *of_chain, "--sequence", "5", "--yes")
        centre.archive.put(rows_of(21, 30))
        messages = await centre.carried(client, 30)
    check_all_once(messages, centre.archive, centre, {5, 17})


@pytest.mark.parametrize("publisher", ["fast", "atomic", "single"])
async def test_messages_at_the_limits_are_stored_or_parked(client: FloeClient, centre: Centre, publisher: str) -> None:
    """A message that is too large never costs the connection."""
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
            return info.messages + list(kept_states.values()).count(ParkedState.PARKED) == len(rows)

        await soon(is_accounted)
        parked = set(states(await kept(client, centre)))
        messages = await arrived(client, centre.target)
        assert {each.message.sequence for each in messages} == set(range(1, len(rows) + 1)) - parked
        assert {1, 2, 3} < parked < set(range(1, len(rows)))
        assert health.status()["parts"][f"target {centre.target}"]["state"] == "carrying"


# Nodes of a cluster, and restarted servers, may accept smaller messages than before


SMALLER = 8 * 1024
TOO_LARGE = message(15, f"{CHAIN}|15|".encode().ljust(20_000, b"L"), subject=b"nodes.large")


@pytest.fixture
def server(tmp_path: Path) -> NatsServer:
    return NatsServer(tmp_path / "nats")


async def started_with(server: NatsServer, max_payload: int | None) -> None:
    """Restart the same server with another limit, like a node that is connected to next."""
    server.max_payload = max_payload
    await asyncio.to_thread(server.restart)


def violations(server: NatsServer) -> int:
    """The number of connections that the server has cut because of a message that was too large."""
    return server.log.read_text().lower().count("maximum payload")


async def test_a_server_that_takes_less_now_stops_nothing(tmp_path: Path, archive: Archive, server: NatsServer) -> None:
    """The row is parked; it was decoded under the former limit, before the connection was another one."""
    archive.put(rows_of(1, 10))
    with server:
        centre = Centre(tmp_path, archive, server.url, on_oversize="park")
        async with client_of(server.url) as client, centre.running() as health:
            await centre.carried(client, 10)
            await started_with(server, SMALLER)
            archive.put([*rows_of(11, 14), TOO_LARGE, *rows_of(16, 30)])
            await holds(client, centre, [*range(1, 15), *range(16, 31)])
            parked = await kept(client, centre)
            await soon(lambda: states(parked) == {15: ParkedState.PARKED})
            await soon(lambda: centre.status(health).get("state") == "carrying")
            # A higher limit is used again, too.
            await started_with(server, None)
            archive.put([message(31, TOO_LARGE.payload, subject=b"nodes.large")])
            await holds(client, centre, [*range(1, 15), *range(16, 32)])
        assert violations(server) == 0


async def test_a_newly_refused_row_stops_its_own_target(tmp_path: Path, archive: Archive, server: NatsServer) -> None:
    ref = archive.put([*rows_of(1, 14), TOO_LARGE, *rows_of(16, 30)])
    with server:
        centre = Centre(tmp_path, archive, server.url, create=None, on_oversize="park")
        async with client_of(server.url) as client:
            await ingress.left_open(client, centre, ref, await make(client, centre))
            await store(client, centre, rows_of(1, 5))
            await started_with(server, SMALLER)
            async with ingress.service(centre) as health:
                stop = await ingress.stop_of(centre, health)
                assert stop["code"] == "E-OVERSIZE-INTENT"
                assert f"the target takes {SMALLER}" in stop["why"]
                assert violations(server) == 0
                # Nothing has to be done once the server accepts it again.
                await started_with(server, None)
                await holds(client, centre, list(range(1, 31)))


async def test_a_server_without_headers_is_named(tmp_path: Path, archive: Archive) -> None:
    with NatsServer(tmp_path / "nats", extra="no_header_support: true") as server:
        with raises_code(ConfigError, "E-NATS-HEADERS") as error:
            await Centre(tmp_path, archive, server.url).run()
        assert "`headers: false`" in error.value.message


# Headers

# Everything that nats-server 2.15 acts on, with values that would drop, refuse, purge, expire or repeat.
ACTING = [
    b"Nats-Msg-Id: same", b"Nats-Expected-Stream: OTHER", b"Nats-Expected-Last-Sequence: 99999",
    b"Nats-Expected-Last-Subject-Sequence: 99999", b"Nats-Expected-Last-Subject-Sequence-Subject: a.b",
    b"Nats-Expected-Last-Msg-Id: nobody", b"Nats-Rollup: all", b"Nats-Rollup: sub", b"Nats-TTL: 1s",
    b"Nats-Marker-Reason: Purge", b"Nats-Incr: +5", b"Nats-Counter-Sources: {}",
    b"Nats-Batch-Id: b", b"Nats-Batch-Sequence: 7", b"Nats-Batch-Commit: 1",
    b"Nats-Schedule: @every 1s", b"Nats-Schedule-TTL: 1s", b"Nats-Schedule-Target: {target}.nodes.scheduled",
    b"Nats-Schedule-Source: {target}.nodes.1", b"Nats-Schedule-Rollup: sub",
    b"Nats-Schedule-Time-Zone: Europe/Zurich", b"Nats-Schedule-Next: purge", b"Nats-Scheduler: {target}.nodes.1",
    b"Nats-Stream-Source: X 1", b"Nats-Required-Api-Level: 99",
    b"Nats-Trace-Dest: somewhere", b"Nats-Trace-Only: true", b"Nats-Request-Info: {}",
]  # fmt: skip
AWKWARD = [
    b"plain", "zürich.straße".encode(), b"not.\xff\xfe.text", b"\xc3\x28", b"del.\x7f", b"bell.\x07.\x1b",
    b"star.*", b"rest.>", b"*", b"$JS.API.INFO", b"$SYS.x", b"_INBOX.a",
    b"deep." + b".".join([b"t"] * 500), b"l" * 3800,
]  # fmt: skip
ODD = [None, b"NATS/1.0\r\n\r\n", b"NATS/1.0 503 no\r\n\r\n", b"NATS/1.0\r\nno end"]
FORGED = b"Floe-Source: mars NODES 0000 0 1 1"
MARK = b"KV-Operation: PURGE"  # read by clients only


def block(*lines: bytes) -> bytes:
    return b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


ALLOWED = ("atomic", "batched", "direct", "msg_ttl", "rollup_hdrs", "msg_schedules")
EVERYTHING = dict.fromkeys([f"allow_{each}" for each in ALLOWED], True)


@pytest.mark.parametrize("publisher", ["fast", "atomic", "single"])
async def test_headers_act_only_where_listed(client: FloeClient, centre: Centre, publisher: str) -> None:
    centre.having(publisher=publisher)
    lines = [line.replace(b"{target}", centre.target.encode()) for line in ACTING]
    rows = [message(n, headers=block(b"A: 1", line, MARK)) for n, line in enumerate(lines, 1)]
    rows += [message(n, headers=block(line.lower())) for n, line in enumerate(lines, 101)]
    more = [block(*lines), block(*lines), *ODD, block(FORGED, b"A: 1", b"a:  2  ", b"A:", b"A: 1")]
    rows += [message(n, b"x" * (n % 2), headers=each) for n, each in enumerate(more, 201)]
    rows += [message(n, subject=subject) for n, subject in enumerate(AWKWARD, 301)]
    centre.archive.put(rows)

    await make(client, centre, **EVERYTHING)
    async with centre.running():
        messages = await centre.carried(client, len(rows))
    centre.archive.rows[CHAIN] = rows[: -len(AWKWARD)]  # the subjects of the others are no JSON: see below
    ingress.check_exact(messages[: -len(AWKWARD)], centre.archive, centre.prefix)
    info = await stream_info(client, centre.target)
    assert (info.last_sequence, info.messages) == (len(rows), len(rows))
    for sequence, row in enumerate(rows, 1):
        stored = await get_message(client, centre.target, sequence)
        assert stored.subject == centre.prefix + row.subject
        own, _, of_source = (stored.headers or b"").partition(b"\r\nFloe-Source: ")
        assert b"\r\nnats-" not in of_source.lower()
        assert b"Nats-TTL" not in own


def listing(centre: Centre, *headers: str) -> None:
    """Give the centre one source with these `control_headers`."""
    centre.target_settings["sources"][0] |= {"site": "us-east", "control_headers": [*headers]}


@pytest.mark.real
async def test_a_listed_ttl_expires_and_every_other_value_is_text(client: FloeClient, centre: Centre) -> None:
    """A value that the server would refuse, overflow included, is sent as no header: it would be refused for ever."""
    text = [b"1s ", b"1d", b"0", b"-1", b"soon", b"", b"1.5s", b"999999999h", b"9999999999", b"\t1s", b"1s\t"]
    acting = [b"1s", b"1", b"  1s", b"never", b"999999h", b"99999999m", b"999999999s", b"999999999"]
    rows = [message(n, headers=block(b"Nats-TTL: " + value)) for n, value in enumerate(text + acting, 1)]
    rows.append(message(len(rows) + 1, headers=block(b"Nats-TTL: 1s", b"Nats-TTL: never")))
    centre.archive.put(rows)
    listing(centre, "Nats-TTL")

    await make(client, centre, **EVERYTHING)
    async with centre.running():
        await soon(lambda: _last(client, centre, len(rows)))
        await soon(lambda: _count(client, centre, len(rows) - 4))
        left = {each.message.sequence for each in await arrived(client, centre.target)}
        first = len(text) + 1
        assert left == set(range(1, len(rows) + 1)) - {first, first + 1, first + 2, len(rows)}
        # The arithmetic holds though messages are gone: the next rows are behind them.
        centre.archive.put(rows_of(len(rows) + 1, len(rows) + 10))
        await ingress.closed_at(client, centre, len(rows) + 10)


async def _last(client: FloeClient, centre: Centre, sequence: int) -> bool:
    info = await stream_info(client, centre.target)
    assert info is None or info.last_sequence <= sequence
    return info is not None and info.last_sequence == sequence


async def _count(client: FloeClient, centre: Centre, count: int) -> bool:
    return await ingress.count_in(client, centre.target) == count


@pytest.mark.parametrize("publisher", ["fast", "single"])
async def test_a_listed_rollup_purges_no_sequences(client: FloeClient, centre: Centre, publisher: str) -> None:
    subjects = [b"a", b"a", b"b", b"a", b"c", b"a", b"b", b"b", b"c"]
    headers: list[bytes | None] = [None] * len(subjects)
    headers[3] = block(b"Nats-Rollup: sub")
    headers[4] = block(b"Nats-Rollup: SUB")
    headers[7] = block(b"Nats-Rollup: everything")
    headers[8] = block(b"Nats-Marker-Reason: Purge")
    rows = [
        message(n, subject=b"nodes." + subject, headers=lines)
        for n, (subject, lines) in enumerate(zip(subjects, headers, strict=True), 1)
    ]
    centre.archive.put(rows)
    listing(centre.having(publisher=publisher), "Nats-Rollup", "Nats-Marker-Reason")

    await make(client, centre, **EVERYTHING)
    async with centre.running():
        await soon(lambda: _last(client, centre, 9))
        left = [each.message.sequence for each in await arrived(client, centre.target)]
        assert left == [3, 4, 5, 6, 7, 8, 9]
        stored = await get_message(client, centre.target, 9)
        assert b"\r\nNats-Marker-Reason: Purge\r\n" in (stored.headers or b"")
        centre.archive.put([message(10, headers=block(b"Nats-Rollup: all")), *rows_of(11, 12)])
        await soon(lambda: _last(client, centre, 12))
    left = [each.message.sequence for each in await arrived(client, centre.target)]
    assert left == [10, 11, 12]
    state = (await (await centre.state(client)).load()).state
    assert (state.checkpoint.positions[CHAIN], state.checkpoint.target_sequence) == (13, 12)
