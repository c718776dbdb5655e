"""Ingress as a service: what is archived arrives, once, in order, as it was; what is counted meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.chain import Chain
from common.errors import Unavailable
from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient
from common.metrics import REGISTRY
from common.segments.segment import SegmentRef
from common.sequences import SequenceRange
from tests.support.basics import soon
from tests.support.commands import floe
from tests.support.ingress import (
    CHAIN,
    Centre,
    check_exact,
    closed_at,
    count_in,
    foreign,
    left_open,
    make,
    rows_of,
    sequences,
    store,
)
from tests.support.segments import message

pytestmark = [pytest.mark.servers, pytest.mark.simulated]
OTHER = Chain("eu-west", "NODES")
SHARED = {"exclusive": False, "delivery": "at_least_once"}


async def test_a_prefix_with_the_names_of_the_chain_tells_two_sites_apart(client: FloeClient, centre: Centre) -> None:
    target = centre.target
    for chain in (CHAIN, OTHER):
        centre.archive.put(rows_of(1, 30, chain), chain=chain)
    source = {"site": ["us-east", "eu-west"], "feed": "NODES", "subject_prefix": target + ".{site}.{feed}-{partition}"}
    centre.having(create={}, sources=[source])

    async with centre.running():
        messages = await centre.carried(client, 60)
    info = await stream_info(client, target)

    assert sorted(info.config["subjects"]) == [f"{target}.eu-west.*.>", f"{target}.us-east.*.>"]
    for chain in (CHAIN, OTHER):
        sent = [f"{target}.{chain.site}.NODES-0.".encode() + row.subject for row in centre.archive.rows[chain]]
        assert [m.subject for m in messages if m.chain == chain] == sent


async def test_what_comes_later_follows_and_a_restart_goes_on(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 50))
    async with centre.running():
        await centre.carried(client, 50)
        centre.archive.put(rows_of(51, 80), SequenceRange(51, 100))
        await centre.carried(client, 80)
    centre.archive.put(rows_of(101, 130))
    async with centre.running():
        messages = await centre.carried(client, 110)
        await asyncio.sleep(0.3)
        # For those who delete: what a closed checkpoint says.
        said = await soon(lambda: centre.archive.documents.read_positions(centre.target))
    stored = (await (await centre.state(client)).load()).state

    check_exact(messages, centre.archive, centre.prefix)
    assert stored.intent is None
    assert stored.checkpoint.positions == {CHAIN: 131}
    assert stored.checkpoint.target_sequence == 110
    assert said.sources == ("eu-west/NODES", "us-east/NODES")
    assert said.positions in ({CHAIN: 51}, {CHAIN: 101}, {CHAIN: 131})


async def test_a_segment_of_another_site_under_a_listed_key_is_damage(client: FloeClient, centre: Centre) -> None:
    secret = Chain("mars", "NODES")
    ref = centre.archive.put(rows_of(1, 10, secret), chain=secret)
    centre.archive.begin()
    raw = (centre.archive.folder / ref.key).read_bytes()
    forged = centre.archive.store.layout.segment(ref.segment._replace(chain=CHAIN))
    centre.archive.objects.put(forged, raw)
    centre.archive.documents.write_tail(CHAIN, 10)

    async with centre.running() as health:
        await soon(lambda: "'phase': 'damaged'" in str(centre.status(health)))
        assert await count_in(client, centre.target) == 0


async def test_a_replaced_segment_is_found(client: FloeClient, centre: Centre, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [centre.archive.put(rows_of(first, first + 9)) for first in (1, 11, 21)]
    centre.archive.put(rows_of(1, 30), level=1, tail=False)
    opened = []

    def gone_then_open(store: object, ref: SegmentRef, *, rows: SequenceRange | None = None) -> object:
        if not opened:
            for each in small:
                centre.archive.store.delete(each)
        opened.append(ref.level)
        return original(store, ref, rows=rows)  # type: ignore[arg-type]

    original = type(centre.archive.store).open
    monkeypatch.setattr(type(centre.archive.store), "open", gone_then_open)

    async with centre.running():
        messages = await centre.carried(client, 30)

    check_exact(messages, centre.archive, centre.prefix)
    assert set(opened) == {0, 1}


async def test_the_rows_of_an_open_intent_are_found_through_the_cover(client: FloeClient, centre: Centre) -> None:
    gone = centre.archive.put(rows_of(1, 40))
    centre.archive.store.delete(gone)
    for first, last in ((1, 15), (16, 40), (41, 60)):
        centre.archive.put(rows_of(first, last), level=1)
    centre.archive.rows[CHAIN] = rows_of(1, 60)
    await left_open(client, centre, gone, await make(client, centre))
    await store(client, centre, rows_of(1, 7))

    async with centre.running():
        check_exact(await centre.carried(client, 60), centre.archive, centre.prefix)


async def test_a_target_that_held_messages_before_is_begun_behind_them(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 30))
    centre.having(**SHARED)
    await make(client, centre)
    for _ in range(17):
        await foreign(client, centre)
    async with centre.running():
        state = await closed_at(client, centre, 47)
        assert sequences(await centre.carried(client, 47)) == list(range(1, 31))
    assert state.checkpoint.begins == 17


@pytest.mark.parametrize("is_made_again", [False, True])
async def test_a_shared_target_that_is_gone_or_another_one_stops(
    client: FloeClient, centre: Centre, is_made_again: bool
) -> None:
    centre.archive.put(rows_of(1, 30))
    centre.having(**SHARED)
    await make(client, centre)
    async with centre.running():
        await closed_at(client, centre, 30)
    await client.api(f"STREAM.DELETE.{centre.target}")
    if is_made_again:
        await make(client, centre)
    error = await centre.ending()
    assert error.code in ("E-TARGET-RECREATED", "E-TARGET-GONE")
    assert "floe checkpoint set" in error.hint


# What is counted: the figures that alerts stand on


def reading(name: str, target: str, **labels: str) -> float:
    """The sample of `floe_ingress_{name}` for the target; 0 where there is none."""
    return REGISTRY.get_sample_value(f"floe_ingress_{name}", {"target": target, **labels}) or 0.0


def of_chain(name: str, target: str, chain: Chain = CHAIN) -> float:
    return reading(name, target, site=chain.site, feed=chain.feed, partition=str(chain.partition))


async def test_what_is_stored_and_parked_and_chains_that_stop_and_pause_are_counted(
    client: FloeClient, centre: Centre
) -> None:
    target = centre.target
    centre.archive.put([message(1), message(2, b"x" * 5000), message(3, subject=b"elsewhere")])
    centre.archive.put(rows_of(1, 5, OTHER), chain=OTHER)
    centre.having(create=None, on_oversize="park")
    await make(client, centre, subjects=[f"{target}.nodes.*"], max_msg_size=4000)
    async with centre.running():
        await soon(lambda: reading("stopped_chains", target) == reading("parked_waiting", target) == 1)
        await soon(lambda: of_chain("messages_total", target, OTHER) == 5)
        assert reading("paused_chains", target) == 0
        where = ("--target", target, "--site", OTHER.site, "--feed", OTHER.feed)
        done = await floe("chain", "pause", "-c", str(centre.write()), *where)
        assert done.code == 0, done
        await soon(lambda: reading("paused_chains", target) == 1)

        assert reading("publish_seconds_count", target) >= 1
        assert reading("publish_last_success_timestamp_seconds", target) > 1_700_000_000
        payloads = sum(len(row.payload) for row in centre.archive.rows[OTHER])
        assert of_chain("bytes_total", target, OTHER) >= payloads
        assert of_chain("bytes_total", target) > 0
        assert of_chain("parked_messages_total", target) == 1
        assert reading("intents_total", target, result="closed") >= 1
        assert reading("lease_held", target) == 1
    assert await count_in(client, target) == 6


async def test_foreign_messages_of_a_shared_target_and_errors_of_the_store_are_counted(
    client: FloeClient, centre: Centre, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = centre.archive.objects.list

    def away(prefix: str, **where: Any) -> Any:
        if "level=" in prefix:
            raise Unavailable("the store is away")
        return whole(prefix, **where)

    centre.archive.put(rows_of(1, 5))
    centre.having(create=None, **SHARED)
    await make(client, centre)
    async with centre.running():
        await centre.carried(client, 5)
        for _ in range(3):
            await foreign(client, centre)
        monkeypatch.setattr(centre.archive.objects, "list", away)
        centre.archive.put(rows_of(6, 9))
        await soon(lambda: reading("store_errors_total", centre.target) >= 1)
        monkeypatch.undo()
        assert sequences(await centre.carried(client, 12)) == list(range(1, 10))
        await soon(lambda: reading("foreign_messages_total", centre.target) == 3)
