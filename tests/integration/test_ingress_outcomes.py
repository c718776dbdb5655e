"""What `last_seq`, the intent and the readable tail say, times what was closed: the rows of docs/delivery.md
after which ingress goes on by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient
from ingress.checkpoint import Checkpoint, IntentPiece, TargetState, open_intent
from tests.support.basics import soon
from tests.support.ingress import (
    Archive,
    Centre,
    Consumer,
    arrived,
    change,
    check_exact,
    closed_at,
    foreign,
    left_open,
    make,
    rows_of,
    sequences,
    service,
    stop_of,
    store,
    update,
)

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


@pytest.fixture
def centre(tmp_path: Path, archive: Archive, nats_url: str) -> Centre:
    return Centre(tmp_path, archive, nats_url, create=None)


@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("stored", [0, 11, 30])
async def test_an_open_intent_stored_in_part_or_all(client: FloeClient, centre: Centre, stored: int, base: int) -> None:
    created = await make(client, centre)
    if base:
        centre.archive.put(rows_of(1, 1))
        await store(client, centre, rows_of(1, 1))
    ref = centre.archive.put(rows_of(base + 1, base + 30))
    centre.archive.put(rows_of(base + 31, base + 60))
    await left_open(client, centre, ref, created, base)
    await store(client, centre, rows_of(base + 1, base + stored))
    async with centre.running():
        check_exact(await centre.carried(client, base + 60), centre.archive, centre.prefix)
        await closed_at(client, centre, base + 60)


@pytest.mark.parametrize("stored", [0, 11, 30])
async def test_a_consumed_work_queue_gets_each_row_once(client: FloeClient, centre: Centre, stored: int) -> None:
    ref = centre.archive.put(rows_of(1, 30))
    created = await make(client, centre, retention="workqueue")
    await left_open(client, centre, ref, created)
    await store(client, centre, rows_of(1, stored))
    consumer = Consumer(client, centre.target)
    await consumer.start()
    await soon(lambda: empty(client, centre))
    async with centre.running():
        await closed_at(client, centre, 30)
        await soon(lambda: len(consumer.seen) >= 30)
    assert consumer.seen == list(range(1, 31))


async def empty(client: FloeClient, centre: Centre) -> bool:
    info = await stream_info(client, centre.target)
    return info is not None and info.messages == 0


@pytest.mark.parametrize(
    ("config", "held"),
    [({"max_age": 10**9}, range(12, 31)), ({"max_msgs_per_subject": 1}, range(24, 31))],
    ids=["expired", "superseded per subject"],
)
async def test_a_part_that_is_gone_from_the_target_is_not_stored_again(
    client: FloeClient, centre: Centre, config: dict[str, Any], held: range
) -> None:
    ref = centre.archive.put(rows_of(1, 30))
    created = await make(client, centre, **config)
    await left_open(client, centre, ref, created)
    await store(client, centre, rows_of(1, 11))
    if "max_age" in config:
        await soon(lambda: empty(client, centre))
        await update(client, centre, max_age=3600 * 10**9)
    async with centre.running():
        await closed_at(client, centre, 30)
        found = await arrived(client, centre.target)
    assert sequences(found) == list(held)
    assert [each.sequence for each in found] == list(held)


@pytest.mark.parametrize(
    ("stored", "config"), [(0, {}), (11, {"max_age": 3600 * 10**9})], ids=["before", "within, where messages expire"]
)
async def test_a_purge_before_or_within_an_intent_takes_nothing_back(
    client: FloeClient, centre: Centre, stored: int, config: dict[str, Any]
) -> None:
    centre.archive.put(rows_of(1, 5))
    created = await make(client, centre, **config)
    await store(client, centre, rows_of(1, 5))
    await left_open(client, centre, centre.archive.put(rows_of(6, 35)), created, 5)
    await store(client, centre, rows_of(6, 5 + stored))
    await client.api(f"STREAM.PURGE.{centre.target}")
    async with centre.running():
        await closed_at(client, centre, 35)
        assert sequences(await arrived(client, centre.target)) == list(range(6 + stored, 36))


async def test_another_creation_time_is_believed_where_our_message_vouches(client: FloeClient, centre: Centre) -> None:
    """nats-server up to 2.14 may report another one after an update and a restart."""
    centre.archive.put(rows_of(1, 30))
    await make(client, centre)
    async with centre.running():
        await closed_at(client, centre, 30)
    await change(client, centre, target_created="2020-01-01T00:00:00Z")
    centre.archive.put(rows_of(31, 40))
    async with centre.running():
        check_exact(await centre.carried(client, 40), centre.archive, centre.prefix)


async def test_a_row_of_another_interleaving_before_the_last_message_stops(client: FloeClient, centre: Centre) -> None:
    """Two ingresses, each with a state bucket of its own, began on one empty target: the last message agrees
    with our intent by chance, those before it do not.
    """
    first, second = centre.archive.put(rows_of(1, 10)), centre.archive.put(rows_of(11, 30))
    created = await make(client, centre)
    pieces = [IntentPiece(each.segment, each.coverage, len(each.coverage)) for each in (first, second)]
    await (await centre.state(client)).save(open_intent(TargetState(Checkpoint(0, created)), pieces), 0)
    await store(client, centre, [*rows_of(1, 9), *rows_of(1001, 1001), *rows_of(11, 15)])
    async with service(centre) as health:
        stop = await stop_of(centre, health)
    assert stop["code"] == "E-TARGET-SHARED"
    assert "message 10 is us-east/NODES/0000/0 1001, expected us-east/NODES/0000/0 1..10" in stop["why"]


async def test_a_foreign_message_in_front_of_a_first_run_stops(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 30))
    await make(client, centre)
    await foreign(client, centre)
    async with service(centre) as health:
        assert (await stop_of(centre, health))["code"] == "E-TARGET-NOT-EMPTY"
