"""Ingress as a service: each message arrives once, in order and unchanged; automatic recovery; metrics.

Rows of docs/design/delivery.md: states of `last_seq`, the intent and the readable tail, times the closed state.
"""

import asyncio
from typing import Any

import pytest

from common.chain import Chain
from common.errors import Unavailable
from common.nats.api import stream_info
from common.nats.client import FloeClient
from common.sequences import SequenceRange
from ingress.checkpoint import Checkpoint, IntentPiece, TargetState, open_intent
from tests.support import ingress
from tests.support.basics import metric_value, soon
from tests.support.commands import ran
from tests.support.ingress import CHAIN, Centre, check_exact, closed_at, left_open, make, rows_of, sequences, store
from tests.support.segments import message

pytestmark = [pytest.mark.servers, pytest.mark.simulated]
OTHER = Chain("eu-west", "NODES")
TARGET = {"create": None}


async def test_later_rows_follow_and_a_restart_resumes(client: FloeClient, centre: Centre) -> None:
    centre.archive.put(rows_of(1, 50))
    await make(client, centre)
    async with centre.running():
        await centre.carried(client, 50)
        centre.archive.put(rows_of(51, 80), SequenceRange(51, 100))
        await centre.carried(client, 80)
    centre.archive.put(rows_of(101, 130))
    async with centre.running():
        messages = await centre.carried(client, 110)
        await asyncio.sleep(0.3)
        # For those who delete: the positions of a closed checkpoint.
        written = await soon(lambda: centre.archive.documents.read_positions(centre.target))
    stored = (await (await centre.state(client)).load()).state

    check_exact(messages, centre.archive, centre.prefix)
    checkpoint = stored.checkpoint
    assert (stored.intent, checkpoint.positions, checkpoint.target_sequence) == (None, {CHAIN: 131}, 110)
    assert written.sources == ("eu-west/NODES", "us-east/NODES")
    assert written.positions in ({CHAIN: 51}, {CHAIN: 101}, {CHAIN: 131})


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


async def empty(client: FloeClient, centre: Centre) -> bool:
    info = await stream_info(client, centre.target)
    return info is not None and info.messages == 0


@pytest.mark.parametrize(
    ("config", "held"),
    [({"max_age": 10**9}, range(12, 31)), ({"max_msgs_per_subject": 1}, range(24, 31))],
    ids=["expired", "superseded per subject"],
)
async def test_what_is_gone_stays_gone(client: FloeClient, centre: Centre, config: dict[str, Any], held: range) -> None:
    await left_open(client, centre, centre.archive.put(rows_of(1, 30)), await make(client, centre, **config))
    await store(client, centre, rows_of(1, 11))
    if "max_age" in config:
        await soon(lambda: empty(client, centre))
        await ingress.update(client, centre, max_age=3600 * 10**9)
    async with centre.running():
        await closed_at(client, centre, 30)
        found = await ingress.arrived(client, centre.target)
    assert sequences(found) == [each.sequence for each in found] == list(held)


@pytest.mark.parametrize(
    ("stored", "config"), [(0, {}), (11, {"max_age": 3600 * 10**9})], ids=["before", "within, where messages expire"]
)
async def test_a_purge_takes_none_back(client: FloeClient, centre: Centre, stored: int, config: dict[str, Any]) -> None:
    centre.archive.put(rows_of(1, 5))
    created = await make(client, centre, **config)
    await store(client, centre, rows_of(1, 5))
    await left_open(client, centre, centre.archive.put(rows_of(6, 35)), created, 5)
    await store(client, centre, rows_of(6, 5 + stored))
    await client.api(f"STREAM.PURGE.{centre.target}")
    async with centre.running():
        await closed_at(client, centre, 35)
        assert sequences(await ingress.arrived(client, centre.target)) == list(range(6 + stored, 36))


async def test_a_row_of_another_interleaving_stops(client: FloeClient, centre: Centre) -> None:
    """Two ingresses, each with a state bucket of its own, began on one empty target: the last message agrees with our
    intent by chance, those before it do not.
    """
    first, second = centre.archive.put(rows_of(1, 10)), centre.archive.put(rows_of(11, 30))
    created = await make(client, centre)
    pieces = [IntentPiece(each.segment, each.coverage, len(each.coverage)) for each in (first, second)]
    await (await centre.state(client)).save(open_intent(TargetState(Checkpoint(0, created)), pieces), 0)
    await store(client, centre, [*rows_of(1, 9), *rows_of(1001, 1001), *rows_of(11, 15)])
    async with ingress.service(centre) as health:
        stop = await ingress.stop_of(centre, health)
    assert stop["code"] == "E-TARGET-SHARED"
    assert "message 10 is us-east/NODES/0000/0 1001, expected us-east/NODES/0000/0 1..10" in stop["why"]


# Metrics on which alerts are based


def reading(name: str, target: str, **labels: str) -> float:
    """The sample of `floe_ingress_{name}` for the target; 0 if there is none."""
    return metric_value(f"floe_ingress_{name}", {"target": target, **labels}) or 0.0


def of_chain(name: str, target: str, chain: Chain = CHAIN) -> float:
    return reading(name, target, site=chain.site, feed=chain.feed, partition=str(chain.partition))


async def test_stored_parked_stopped_and_paused_are_counted(client: FloeClient, centre: Centre) -> None:
    target = centre.target
    centre.archive.put([message(1), message(2, b"x" * 5000), message(3, subject=b"elsewhere")])
    centre.archive.put(rows_of(1, 5, OTHER), chain=OTHER)
    centre.having(create=None, on_oversize="park")
    await make(client, centre, subjects=[f"{target}.nodes.*"], max_msg_size=4000)
    async with centre.running():
        await soon(lambda: reading("stopped_chains", target) == reading("parked_waiting", target) == 1)
        await soon(lambda: of_chain("messages_total", target, OTHER) == 5)
        assert reading("paused_chains", target) == 0
        where = ("--target", target, f"{OTHER.site}/{OTHER.feed}")
        await ran("chain", "pause", "-c", str(centre.write()), *where)
        await soon(lambda: reading("paused_chains", target) == 1)

        assert reading("publish_last_success_timestamp_seconds", target) > 1_700_000_000
        assert reading("bytes_total", target) > sum(len(row.payload) for row in centre.archive.rows[OTHER])
        assert reading("parked_messages_total", target) == reading("lease_held", target) == 1
        assert min(reading("intents_total", target, result="closed"), reading("publish_seconds_count", target)) >= 1
    assert await ingress.count_in(client, target) == 6


async def test_foreign_ones_are_left_alone(client: FloeClient, centre: Centre, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = centre.archive.objects.list

    def away(prefix: str, **where: Any) -> Any:
        if "level=" in prefix:
            raise Unavailable("the store is away")
        return whole(prefix, **where)

    centre.archive.put(rows_of(1, 5))
    centre.having(create=None, exclusive=False, delivery="at_least_once")
    await make(client, centre)
    for _ in range(17):  # it begins behind these
        await ingress.foreign(client, centre)
    async with centre.running():
        state = await closed_at(client, centre, 22)
        for _ in range(3):
            await ingress.foreign(client, centre)
        monkeypatch.setattr(centre.archive.objects, "list", away)
        centre.archive.put(rows_of(6, 9))
        await soon(lambda: reading("store_errors_total", centre.target) >= 1)
        monkeypatch.undo()
        assert sequences(await centre.carried(client, 29)) == list(range(1, 10))
        await soon(lambda: reading("foreign_messages_total", centre.target) == 3)
    assert state.checkpoint.foreign_upto == 17
