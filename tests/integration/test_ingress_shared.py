"""Targets that others publish to: nothing is lost, first deliveries keep their order, repeats are few."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.chain import Chain
from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient, frame
from tests.support.basics import PATIENCE, cancelled, soon, unique
from tests.support.ingress import Archive, Arrived, Centre, arrived, make, rows_of

pytestmark = [pytest.mark.servers, pytest.mark.simulated]
OTHER = Chain("eu-west", "NODES")
SHARED = {"exclusive": False, "delivery": "at_least_once"}
RATE = 200  # messages a second of the foreign publisher


@asynccontextmanager
async def foreigners(client: FloeClient, centre: Centre, rate: int = RATE) -> AsyncIterator[list[int]]:
    """Somebody else who publishes to the target all the time; how many messages so far."""
    sent = [0]

    async def publish() -> None:
        while True:
            client.send(frame(f"{centre.target}.foreign".encode(), b"%d" % sent[0]))
            sent[0] += 1
            await asyncio.sleep(1 / rate)

    task = asyncio.create_task(publish())
    try:
        yield sent
    finally:
        task.cancel()


async def our(client: FloeClient, centre: Centre) -> list[Arrived]:
    return [each for each in await arrived(client, centre.target) if each.provenance is not None]


async def all_there(client: FloeClient, centre: Centre, archive: Archive, seconds: float = PATIENCE) -> None:
    """Wait until the last row of each chain has arrived."""
    ends = {chain: rows[-1].sequence for chain, rows in archive.rows.items()}

    async def positions() -> bool:
        state = (await (await centre.state(client)).load()).state
        found = state.checkpoint.positions if state else {}
        return all(found.get(chain, 0) > end for chain, end in ends.items())

    await soon(positions, seconds, every=0.1)


def repeats(messages: Sequence[Arrived], archive: Archive) -> int:
    """How many messages came again. Fails where one is missing, or came for the first time out of order."""
    again = 0
    for chain, rows in archive.rows.items():
        got = [each.message.sequence for each in messages if each.chain == chain]
        first = list(dict.fromkeys(got))
        assert first == [row.sequence for row in rows]
        again += len(got) - len(first)
    return again


@pytest.mark.parametrize("publisher", ["atomic", "single"])
async def test_beside_foreign_publishers_all_arrives_once(client: FloeClient, centre: Centre, publisher: str) -> None:
    centre.having(publisher=publisher, **SHARED)
    await make(client, centre)
    async with foreigners(client, centre, rate=RATE), centre.running() as health:
        for part in range(6):
            first, size = part * 100 + 1, 100
            centre.archive.put(rows_of(first, first + size - 1))
            centre.archive.put(rows_of(first, first + size - 1, OTHER), chain=OTHER)
            await asyncio.sleep(0.1)
        await all_there(client, centre, centre.archive)
        assert not [problem for problem in health.problems() if centre.target in problem]
    assert repeats(await our(client, centre), centre.archive) == 0


async def test_a_target_that_held_messages_before_is_begun_behind_them(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 30))
    centre.having(**SHARED)
    await make(client, centre)
    for number in range(17):
        await client.request_raw(f"{centre.target}.before".encode(), b"%d" % number, timeout=PATIENCE)
    async with centre.running():
        await all_there(client, centre, centre.archive)
    assert repeats(await our(client, centre), centre.archive) == 0
    state = (await (await centre.state(client)).load()).state
    assert (state.checkpoint.begins, state.checkpoint.target_sequence) == (17, 47)


@pytest.mark.parametrize("how", ["deleted", "made again"])
async def test_a_shared_target_that_is_gone_or_another_one_stops(client: FloeClient, centre: Centre, how: str) -> None:
    centre.archive.put(rows_of(1, 30))
    centre.having(**SHARED)
    await make(client, centre)
    async with centre.running():
        await all_there(client, centre, centre.archive)
    await client.api(f"STREAM.DELETE.{centre.target}")
    if how == "made again":
        await make(client, centre)
    error = await centre.ending()
    assert error.code in ("E-TARGET-RECREATED", "E-TARGET-GONE")
    assert "floe checkpoint set" in error.hint


async def test_a_work_queue_that_is_consumed_gets_every_message(client: FloeClient, centre: Centre) -> None:
    """What was consumed can not be read: it may come again, but is not lost."""
    centre.having(create=None, **SHARED)
    rng, taken = random.Random(3), []
    await make(client, centre, retention="workqueue")
    task = asyncio.create_task(consume(client, centre, taken))
    async with foreigners(client, centre, rate=50):
        for part in range(5):
            centre.archive.put(rows_of(part * 100 + 1, part * 100 + 100))
            instance = asyncio.create_task(centre.run())
            await asyncio.sleep(rng.uniform(0.3, 1.0))
            await cancelled(instance)
        async with centre.running():
            await all_there(client, centre, centre.archive)

            async def consumed() -> bool:
                info = await stream_info(client, centre.target)
                return info is not None and info.messages < 20

            await soon(consumed)
    task.cancel()
    first = list(dict.fromkeys(taken))
    assert first == list(range(1, 501))
    assert len(taken) - len(first) <= 200


async def consume(client: FloeClient, centre: Centre, taken: list[int]) -> None:
    """Take and delete what stands first, for ever."""
    while True:
        for each in await arrived(client, centre.target):
            if each.provenance is not None:
                taken.append(each.message.sequence)
            await client.api(f"STREAM.MSG.DELETE.{centre.target}", {"seq": each.sequence})
        await asyncio.sleep(0.05)


async def test_one_feed_into_two_targets_is_carried_into_each_for_itself(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str
) -> None:
    archive.put(rows_of(1, 100))
    first = Centre(tmp_path, archive, nats_url)
    second = Centre(tmp_path, archive, nats_url, stream=unique("SECOND"), **SHARED)
    targets = [*first.document()["ingress"]["targets"], *second.document()["ingress"]["targets"]]
    second.state_bucket = first.state_bucket
    await make(client, second)
    async with foreigners(client, second), first.running(targets=targets):
        await all_there(client, first, archive)
        await all_there(client, second, archive)
        await client.api(f"STREAM.DELETE.{second.target}")
        archive.put(rows_of(101, 150))
        await all_there(client, first, archive)
    assert repeats(await our(client, first), archive) == 0
