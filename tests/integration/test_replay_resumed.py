"""Replays that were stopped, disturbed, or are not alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.clock import SystemClock
from common.errors import Stopped
from common.jetstream.kv import KeyValue, state_key
from common.jetstream.lease import Leases
from common.segments.documents import ChainDocument, StreamDocument
from common.segments.segment import Message
from common.tasks import Stop
from infra.local.nats import NatsServer
from ingress.replay.request import ReplayOptions, ReplayResult
from tests.support.basics import PATIENCE, soon, unique
from tests.support.ingress import CHAIN, arrived, count_in, rows_of
from tests.support.replay import World, refused

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


# Going on


async def test_the_same_command_again_does_nothing(world: World) -> None:
    world.fill((1, 20))
    await world.make()
    await world.run()
    again = await world.run()
    assert (again.was_done, again.rows, again.rows_now) == (True, 20, 0)
    await refused(world, "E-TARGET-NOT-EMPTY", ReplayOptions(again=True))
    await world.run(ReplayOptions(again=True, append=True))
    assert await world.sequences() == [*range(1, 21), *range(1, 21)]


async def stopped_half_way(world: World, **asked: Any) -> ReplayResult:
    """A slow replay that is stopped."""
    from ingress.replay.pace import MessageRate

    work, stop = world.replay(ReplayOptions(pace=MessageRate(400)), **asked), Stop()
    async with work.connected() as client:
        running = asyncio.create_task(work.run(client, stop))
        await soon(lambda: count_in(world.client, world.target))
        stop.set()
        result = await running
    assert not result.finished
    return result


async def test_bytes_are_those_of_what_was_stored(world: World) -> None:
    world.fill((1, 2500))
    await world.make()
    stopped = await stopped_half_way(world)
    assert 0 < len(await world.sequences()) < 2500
    assert (stopped.rows_now, stopped.bytes) == (0, 0), "its one intent is open"
    went_on = await world.run()
    assert went_on.rows_now == 2500
    whole = await world.run(ReplayOptions(again=True, append=True))
    assert went_on.bytes == whole.bytes > 2500


async def test_a_stopped_replay_goes_on_without_a_repeat(world: World) -> None:
    world.fill((1, 700), (701, 2500))
    await world.make()
    await stopped_half_way(world)
    middle = len(await world.sequences())
    assert 0 < middle < 2500
    error = await refused(world, "E-REPLAY-OTHER", from_sequence=5)
    assert "--from-sequence 5" in error.message
    assert "--again" in error.hint
    result = await world.run()
    assert await world.sequences() == list(range(1, 2501))
    assert result.rows == 2500


async def test_the_end_is_fixed_when_a_replay_begins(world: World) -> None:
    world.fill((1, 2500))
    await world.make()
    await stopped_half_way(world, since=10 * 365 * 86400.0)
    world.fill((2501, 2600))
    await world.run(since=10 * 365 * 86400.0)
    assert await world.sequences() == list(range(1, 2501))


async def test_segments_may_be_compacted_in_between(world: World) -> None:
    world.fill((1, 700), (701, 1400), (1401, 2500))
    await world.make()
    await stopped_half_way(world)
    refs = world.archive.store.list(CHAIN)
    world.archive.put(world.archive.rows[CHAIN], level=1)
    for ref in refs:
        world.archive.store.delete(ref)
    await world.run()
    assert await world.sequences() == list(range(1, 2501))


async def test_a_foreign_message_stops_it_before_the_order_is_lost(world: World) -> None:
    world.fill((1, 2500))
    await world.make()
    await stopped_half_way(world)
    before = await world.sequences()
    await world.client.request_raw(f"{world.target}.x".encode(), b"theirs", None, timeout=PATIENCE)
    error = await refused(world, "E-TARGET-SHARED")
    assert "--again" in error.hint
    found = await arrived(world.client, world.target)
    assert [each.message.sequence for each in found[:-1]] == before


async def test_two_at_a_time_are_kept_apart(world: World) -> None:
    world.fill((1, 2500))
    await world.make()
    first, second = world.replay(ReplayOptions(pace=None)), world.replay()
    async with first.connected() as one, second.connected() as two:
        results = await asyncio.gather(first.run(one, Stop()), second.run(two, Stop()))
    assert all(result.finished for result in results)
    assert await world.sequences() == list(range(1, 2501))


async def test_another_that_goes_on_for_long_is_refused(world: World) -> None:
    from ingress.replay.pace import MessageRate

    world.fill((1, 2500))
    await world.make()
    slow, stop = world.replay(ReplayOptions(pace=MessageRate(50))), Stop()
    async with slow.connected() as client:
        running = asyncio.create_task(slow.run(client, stop))
        await soon(lambda: count_in(world.client, world.target))
        error = await refused(world, "E-REPLAY-RUNS")
        assert "a replay by " in error.message
        assert error.hint.startswith("wait until it is done, or stop it there; then:\nfloe replay -c ")
        stop.set()
        assert not (await running).finished


async def test_ingress_and_replay_do_not_share_a_target(world: World) -> None:
    world.fill((1, 20))
    async with world.centre.running():
        await world.centre.carried(world.client, 20)
    with pytest.raises(Stopped) as caught:
        await world.run(target=world.centre.target, prefix=world.centre.target)
    assert caught.value.code == "E-REPLAY-INGRESS"


async def test_nobody_is_told_to_stop_an_ingress_for_a_replay_that_is_refused_then(world: World) -> None:
    world.fill((1, 20))
    asked = {"target": world.centre.target, "prefix": world.centre.target}
    async with world.centre.running():
        await world.centre.carried(world.client, 20)
        error = await refused(world, "E-REPLAY-INGRESS", **asked)
        work = world.replay(**asked)
        async with work.connected() as client:
            planned = await work.refusal(client, await work.outlook(client))
    assert "stop" not in error.hint
    assert planned is not None
    assert (planned.code, planned.message, planned.hint) == (error.code, error.message, error.hint)


async def test_ingress_that_is_about_to_carry_is_not_overtaken(world: World) -> None:
    """It holds the lease, and nothing is remembered of the target yet."""
    world.fill((1, 20))
    await world.make()
    bucket = await KeyValue(world.client, world.centre.lease_bucket, ttl=2).ensure()
    lease = await Leases(bucket, "central/a/1/x", 2, SystemClock()).acquire(state_key("ingress", world.target))
    assert lease is not None
    keeping = asyncio.create_task(lease.keep())
    work = world.replay()
    async with work.connected() as client:
        planned = await work.refusal(client, await work.outlook(client))
    error = await refused(world, "E-REPLAY-RUNS")
    keeping.cancel()
    assert planned is not None
    assert (planned.code, planned.message, planned.hint) == (error.code, error.message, error.hint)
    assert "ingress by " in error.message
    assert f"--site us-east --feed NODES --target {world.target}" in error.hint


async def test_a_dry_run_touches_nothing(world: World) -> None:
    world.fill((1, 100), (101, 200), (301, 400))
    from ingress.replay.output import plan_json, plan_lines

    request = world.replay(from_sequence=50).request
    view = await world.look(from_sequence=50)
    text = "\n".join(plan_lines(view, request))
    document = plan_json(view, request)
    assert "hole (--skip-holes): us-east/NODES/0000/0 201..300" in text
    assert document["plan"]["rows"] == 251
    assert document["plan"]["exact"] is False
    assert document["target"] is None
    streams = await world.client.api("STREAM.NAMES", {"subject": "$KV.>"})
    assert f"KV_{world.centre.state_bucket}" not in (streams["streams"] or [])
    assert f"KV_{world.centre.lease_bucket}" not in (streams["streams"] or [])


async def test_into_its_own_source_the_messages_are_marked(world: World) -> None:
    from common.jetstream.headers import hops, is_replayed
    from common.jetstream.pull import get_message

    world.archive.documents.create_stream(CHAIN, StreamDocument({"name": world.target, "subjects": ["nodes.>"]}, "t0"))
    world.archive.documents.create_chain(CHAIN, ChainDocument((), 1, 1))
    world.archive.put([*rows_of(1, 9), replace(rows_of(10, 10)[0], headers=b"NATS/1.0\r\nA: 1\r\n\r\n")])
    await world.make()
    await world.run(into_source=True)
    for sequence in (1, 10):
        message = await get_message(world.client, world.target, sequence)
        assert isinstance(message, Message)
        assert is_replayed(message.headers or b"")
        assert hops(message.headers)[0].sequence == sequence
    assert await world.sequences() == list(range(1, 11))
    await refused(world, "E-REPLAY-SOURCE", target=unique("ELSE"), into_source=True)


@pytest.mark.real
async def test_cut_connections_and_lost_answers_repeat_nothing(
    world: World, nats_server: NatsServer, tmp_path: Path
) -> None:
    from ingress.replay.pace import MessageRate
    from tests.support.proxies import TcpProxy

    world.fill(*((first, first + 499) for first in range(1, 3000, 500)))
    await world.make()
    async with TcpProxy(nats_server.port) as proxy:
        world.centre.urls[:] = [proxy.url]
        work = world.replay(ReplayOptions(pace=MessageRate(2500)))
        async with work.connected() as client:
            running = asyncio.create_task(work.run(client, Stop()))
            for _ in range(3):
                await asyncio.sleep(0.4)
                await proxy.refuse()
                await proxy.listen()
            result = await asyncio.wait_for(running, PATIENCE)
    assert result.finished
    assert await world.sequences() == list(range(1, 3001))
