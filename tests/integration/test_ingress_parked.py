"""Messages that are too large for the target: put aside, listed, delivered once the target takes them."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from common.errors import AnotherWriter
from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient
from common.segments.segment import Message
from ingress.parked import ParkedStore, State
from tests.support import ingress
from tests.support.basics import soon
from tests.support.commands import floe
from tests.support.ingress import CHAIN, Archive, Centre, arrived, rows_of
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


async def test_the_command_lists_shows_and_asks_and_is_told_what_came_of_it(client: FloeClient, centre: Centre) -> None:
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

        await raise_limit(client, centre, 1800)
        assert (await floe("parked", "retry", *of_chain, "--all")).code == 2
        assert (await floe("parked", "retry", *of_chain, "--sequence", "9", "--yes")).code == 3
        assert (await floe("parked", "retry", *of_chain, "--all", "--yes")).code == 0
        assert {row["state"] for row in (await listed(config)).values()} == {"asked for"}
    async with centre.running():
        messages = await centre.carried(client, 19)
        await soon(lambda: are(config, ["parked", "delivered"]))
        assert (await listed(config))[5]["why"].endswith("bytes, the target takes 1800")
        assert [each.message.sequence for each in messages][-1] == 17
        assert (await floe("parked", "retry", *of_chain, "--sequence", "17", "--yes")).code == 3


async def test_what_is_asked_for_meanwhile_is_delivered_without_a_restart(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(with_large(1, 20))
    centre.having(on_oversize="park")

    await make(client, centre)
    async with centre.running():
        await centre.carried(client, 18)
        parked = await kept(client, centre)
        await soon(lambda: set(states(parked).values()) == {State.PARKED})
        # The archive's copy goes: what is parked needs it no more.
        for ref in centre.archive.store.list(CHAIN):
            centre.archive.store.delete(ref)
        await raise_limit(client, centre, 100_000)
        for entry in parked.entries().values():
            parked.ask(entry)
        messages = await centre.carried(client, 20)
        centre.archive.put(rows_of(21, 30))
        messages = await centre.carried(client, 30)
    check_all_once(messages, centre.archive, centre, {5, 17})


async def test_all_messages_of_a_feed_may_be_too_large(client: FloeClient, centre: Centre) -> None:
    large = dict.fromkeys(range(1, 61), 1200)
    centre.archive.put(with_large(1, 60, large))
    centre.having(on_oversize="park")

    await make(client, centre)
    async with centre.running():
        parked = await kept(client, centre)
        await soon(lambda: states(parked) == dict.fromkeys(large, State.PARKED))
        centre.archive.put(rows_of(61, 70))
        check = await centre.carried(client, 10)
    assert [each.message.sequence for each in check] == list(range(61, 71))


@pytest.mark.parametrize("way", ["skip", "raise"])
async def test_without_parking_it_stops_and_its_way_out_is_pasted(client: FloeClient, centre: Centre, way: str) -> None:
    centre.archive.put(with_large(1, 20, {5: 2000}))

    await make(client, centre)
    async with centre.running() as health:

        def stopped() -> Any:
            chains = health.status()["parts"].get(f"target {centre.target}", {}).get("chains", {})
            return (found := chains.get(str(CHAIN), {})).get("stopped") and found

        found = await soon(stopped)
        assert "sequence 5: the message with its headers needs" in found["stopped"]
        assert len(await centre.carried(client, 4)) == 4
        resume, skip = re.findall(r"floe ((?:chain|checkpoint) [^,)\n]+)", found["hint"])
        if way == "raise":
            await raise_limit(client, centre, 100_000)
        words = shlex.split((resume if way == "raise" else skip).replace("site.yaml", str(centre.write())))
        pasted = await floe(*words)
        assert pasted.code == 0, pasted
        messages = await centre.carried(client, 20 if way == "raise" else 19)
    expected = [*range(1, 21)] if way == "raise" else [1, 2, 3, 4, *range(6, 21)]
    assert [each.message.sequence for each in messages] == expected


@asynccontextmanager
async def carried_twice(centre: Centre) -> AsyncIterator[None]:
    """Two instances that know nothing of each other's lease."""
    one, other = (f"{centre.lease_bucket}_{letter}" for letter in "ab")
    async with centre.running(lease_bucket=one), centre.running(lease_bucket=other):
        yield


async def test_twins_park_and_deliver_once(client: FloeClient, centre: Centre) -> None:
    large = dict.fromkeys(range(3, 300, 9), 1500)
    centre.archive.put(with_large(1, 300, large))
    centre.having(on_oversize="park")

    await make(client, centre)
    parked = await kept(client, centre)
    # One of the two may give up because of the other; what it leaves is what counts.
    with suppress(AnotherWriter):
        async with carried_twice(centre):
            await centre.carried(client, 300 - len(large))
            await soon(lambda: states(parked) == dict.fromkeys(large, State.PARKED))
    await raise_limit(client, centre, 100_000)
    for entry in parked.entries().values():
        parked.ask(entry)
    with suppress(AnotherWriter):
        async with carried_twice(centre):
            await centre.carried(client, 300)
            await soon(lambda: set(states(parked).values()) == {State.DELIVERED})
    messages = await arrived(client, centre.target)
    check_all_once(messages, centre.archive, centre, set(large))


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
