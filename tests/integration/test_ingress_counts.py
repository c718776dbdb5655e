"""What ingress counts while chains stop, wait, are paused and parked: the figures that alerts stand on."""

from __future__ import annotations

from typing import Any

import pytest

from common.chain import Chain
from common.errors import Unavailable
from common.jetstream.client import FloeClient
from common.metrics import REGISTRY
from tests.support.basics import soon
from tests.support.commands import floe
from tests.support.ingress import CHAIN, Centre, count_in, make, rows_of
from tests.support.segments import message

pytestmark = [pytest.mark.servers, pytest.mark.simulated]

OTHER = Chain("eu-west", "NODES")


def reading(name: str, target: str, **labels: str) -> float:
    """The sample of `floe_ingress_{name}` for the target; 0 where there is none."""
    return REGISTRY.get_sample_value(f"floe_ingress_{name}", {"target": target, **labels}) or 0.0


def of_chain(name: str, target: str, chain: Chain = CHAIN) -> float:
    return reading(name, target, site=chain.site, feed=chain.feed, partition=str(chain.partition))


async def test_stopped_and_paused_chains_and_what_was_stored_are_counted(client: FloeClient, centre: Centre) -> None:
    centre.archive.put([message(1), message(2, subject=b"elsewhere")])
    centre.archive.put(rows_of(1, 5, OTHER), chain=OTHER)
    centre.having(create=None)
    await make(client, centre, subjects=[f"{centre.target}.nodes.*"])
    async with centre.running():
        await soon(lambda: reading("stopped_chains", centre.target) == 1)
        await soon(lambda: of_chain("messages_total", centre.target, OTHER) == 5)
        assert reading("paused_chains", centre.target) == 0
        where = ("--target", centre.target, "--site", OTHER.site, "--feed", OTHER.feed)
        done = await floe("chain", "pause", "-c", str(centre.write()), *where)
        assert done.code == 0, done
        await soon(lambda: reading("paused_chains", centre.target) == 1)

        assert reading("publish_seconds_count", centre.target) >= 1
        assert reading("publish_last_success_timestamp_seconds", centre.target) > 1_700_000_000
        payloads = sum(len(row.payload) for row in centre.archive.rows[OTHER])
        assert of_chain("bytes_total", centre.target, OTHER) >= payloads
        assert of_chain("bytes_total", centre.target) > 0
        assert reading("intents_total", centre.target, result="closed") >= 1
        assert reading("lease_held", centre.target) == 1
    assert await count_in(client, centre.target) == 6


async def test_parked_messages_are_counted_until_they_are_delivered(client: FloeClient, centre: Centre) -> None:
    centre.archive.put([message(1), message(2, b"x" * 5000), message(3)])
    centre.having(create=None, on_oversize="park")
    await make(client, centre, max_msg_size=4000)
    async with centre.running():
        await soon(lambda: reading("parked_waiting", centre.target) == 1)
        assert of_chain("parked_messages_total", centre.target) == 1
    assert await count_in(client, centre.target) == 2


async def test_foreign_messages_of_a_shared_target_are_counted(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 5))
    centre.having(create=None, exclusive=False, delivery="at_least_once")
    await make(client, centre)
    async with centre.running():
        await centre.carried(client, 5)
        for number in range(3):
            await client.request(f"{centre.target}.nodes.{number}", b"not ours")
        centre.archive.put(rows_of(6, 9))
        await centre.carried(client, 12)

        await soon(lambda: reading("foreign_messages_total", centre.target) == 3)


async def test_a_store_away_is_counted(client: FloeClient, centre: Centre, monkeypatch: pytest.MonkeyPatch) -> None:
    centre.archive.put(rows_of(1, 5))
    async with centre.running():
        await centre.carried(client, 5)
        whole = centre.archive.objects.list

        def away(prefix: str, **where: Any) -> Any:
            if "level=" in prefix:
                raise Unavailable("the store is away")
            return whole(prefix, **where)

        monkeypatch.setattr(centre.archive.objects, "list", away)
        centre.archive.put(rows_of(6, 9))
        await soon(lambda: reading("store_errors_total", centre.target) >= 1)
        monkeypatch.undo()
        await centre.carried(client, 9)
