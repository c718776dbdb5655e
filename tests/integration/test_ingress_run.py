"""Ingress as a service over a real server: what is archived arrives, once, in order, as it was."""

from __future__ import annotations

import asyncio

import pytest

from common.chain import Chain
from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient
from common.segments.segment import SegmentRef
from common.sequences import SequenceRange
from common.service.monitor import Health
from tests.support.basics import soon
from tests.support.ingress import CHAIN, Centre, check_exact, count_in, left_open, make, rows_of, store

pytestmark = [pytest.mark.servers, pytest.mark.simulated]
OTHER = Chain("eu-west", "NODES")


def chain_status(health: Health, centre: Centre, chain: Chain = CHAIN) -> dict[str, object]:
    """What /status says of a chain."""
    status = health.status()["parts"].get(f"target {centre.target}", {})
    return dict(status.get("chains", {}).get(str(chain), {}))


@pytest.mark.parametrize("publisher", ["fast", "atomic", "single"])
async def test_several_chains_arrive_once_and_in_order(client: FloeClient, centre: Centre, publisher: str) -> None:
    for first in (1, 201, 401):
        centre.archive.put(rows_of(first, first + 199))
        centre.archive.put(rows_of(first, first + 199, OTHER), chain=OTHER)
    centre.having(publisher=publisher)

    async with centre.running():
        messages = await centre.carried(client, 1200)

    check_exact(messages, centre.archive, centre.prefix)


async def test_a_prefix_with_the_names_of_the_chain_tells_two_sites_apart(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 40))
    centre.archive.put(rows_of(1, 30, OTHER), chain=OTHER)
    target, sites = centre.target, ["us-east", "eu-west"]
    source = {"site": sites, "feed": "NODES", "subject_prefix": target + ".{site}.{feed}-{partition}"}
    centre.having(create={}, sources=[source])

    async with centre.running():
        messages = await centre.carried(client, 70)
    info = await stream_info(client, target)

    assert sorted(info.config["subjects"]) == [f"{target}.eu-west.*.>", f"{target}.us-east.*.>"]
    assert {m.subject.rsplit(b".", 2)[0].decode() for m in messages if m.chain == OTHER} == {
        f"{target}.eu-west.NODES-0"
    }
    for chain in (CHAIN, OTHER):
        prefix = f"{target}.{chain.site}.NODES-0.".encode()
        sent = [prefix + row.subject for row in centre.archive.rows[chain]]
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


async def test_a_hole_waits_until_it_is_filled_and_other_chains_go_on(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 10))
    centre.archive.put(rows_of(21, 30))
    centre.archive.put(rows_of(1, 40, OTHER), chain=OTHER)

    async with centre.running() as health:
        await centre.carried(client, 50)
        await soon(lambda: chain_status(health, centre).get("hole") == "11..20")
        assert chain_status(health, centre)["phase"] == "late"
        assert await count_in(client, centre.target) == 50
        centre.archive.put(rows_of(11, 20))
        messages = await centre.carried(client, 70)

    check_exact(messages, centre.archive, centre.prefix)


async def test_a_long_backlog_of_one_chain_does_not_keep_another_waiting(client: FloeClient, centre: Centre) -> None:
    for first in range(1, 3001, 100):
        centre.archive.put(rows_of(first, first + 99))
    centre.archive.put(rows_of(1, 10, OTHER), chain=OTHER)
    centre.having(publisher="single")

    async with centre.running():
        messages = await centre.carried(client, 3010)

    check_exact(messages, centre.archive, centre.prefix)
    assert next(m.sequence for m in messages if m.chain == OTHER) < 1000


async def test_damage_that_nothing_else_covers_stops_its_chain_and_no_other(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 10))
    good = centre.archive.put(rows_of(11, 20))
    centre.archive.put(rows_of(1, 40, OTHER), chain=OTHER)
    bytes_of = (centre.archive.folder / good.key).read_bytes()
    (centre.archive.folder / good.key).write_bytes(bytes_of[:-100] + b"\0" * 100)

    async with centre.running() as health:
        await centre.carried(client, 50)
        await soon(lambda: chain_status(health, centre).get("phase") == "damaged")
        assert chain_status(health, centre)["hole"] == "11..20"


async def test_a_segment_of_another_site_under_a_listed_key_is_damage(client: FloeClient, centre: Centre) -> None:
    secret = Chain("mars", "NODES")
    ref = centre.archive.put(rows_of(1, 10, secret), chain=secret)
    centre.archive.begin()
    raw = (centre.archive.folder / ref.key).read_bytes()
    forged = centre.archive.store.layout.segment(ref.segment._replace(chain=CHAIN))
    centre.archive.objects.put(forged, raw)
    centre.archive.documents.write_tail(CHAIN, 10)

    async with centre.running() as health:
        await soon(lambda: chain_status(health, centre).get("phase") == "damaged")
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


# Open intents that another instance left behind


async def opened(client: FloeClient, centre: Centre, ref: SegmentRef) -> None:
    """A target with an open intent over the segment, of which 7 rows are stored."""
    await left_open(client, centre, ref, await make(client, centre))
    await store(client, centre, rows_of(1, 7))


async def test_the_rows_of_an_open_intent_are_found_through_the_cover(client: FloeClient, centre: Centre) -> None:
    gone = centre.archive.put(rows_of(1, 40))
    centre.archive.store.delete(gone)
    for first, last in ((1, 15), (16, 40), (41, 60)):
        centre.archive.put(rows_of(first, last), level=1)
    centre.archive.rows[CHAIN] = rows_of(1, 60)
    await opened(client, centre, gone)

    async with centre.running():
        check_exact(await centre.carried(client, 60), centre.archive, centre.prefix)


async def test_other_rows_in_the_range_of_an_open_intent_stop_the_target(client: FloeClient, centre: Centre) -> None:
    await opened(client, centre, centre.archive.put(rows_of(1, 39), SequenceRange(1, 40)))

    assert "expected 40 messages in 1..40, found 39" in (await centre.ending()).message
    assert await count_in(client, centre.target) == 7
