"""Replays that were stopped, are not alone, or go into the source that was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.chain import Chain
from common.clock import SystemClock
from common.jetstream.headers import hops, is_replayed, restore
from common.jetstream.kv import KeyValue, state_key
from common.jetstream.lease import Leases
from common.segments.archive import read_cover
from common.segments.columns import messages
from common.segments.segment import Message
from common.sequences import SequenceRange
from common.service.progress import Teller
from common.tasks import Stop
from ingress.replay.output import plan_json, plan_lines
from ingress.replay.pace import MessageRate
from ingress.replay.replay import Replay
from ingress.replay.request import ReplayOptions, ReplayResult, Request
from tests.support.basics import soon, unique
from tests.support.egress import SITE, Bench
from tests.support.ingress import CHAIN, count_in
from tests.support.replay import World, refused

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


async def test_the_same_command_again_does_nothing(world: World) -> None:
    world.fill((1, 20))
    await world.make()
    await world.run()
    again = await world.run()
    assert (again.was_done, again.rows, again.rows_now) == (True, 20, 0)
    await refused(world, "E-TARGET-NOT-EMPTY", ReplayOptions(again=True))
    await world.run(ReplayOptions(again=True, append=True))
    assert await world.sequences() == [*range(1, 21), *range(1, 21)]


@asynccontextmanager
async def under_way(world: World, rate: int, **asked: Any) -> AsyncIterator[asyncio.Task[ReplayResult]]:
    """A slow replay that has stored something, and is stopped at the end."""
    work, stop = world.replay(ReplayOptions(pace=MessageRate(rate)), **asked), Stop()
    async with work.connected() as client:
        running = asyncio.create_task(work.run(client, stop))
        await soon(lambda: count_in(world.client, world.target))
        yield running
        stop.set()
        assert not (await running).finished


async def test_a_stopped_replay_goes_on_without_a_repeat_over_what_was_compacted_to_the_end_of_before(
    world: World,
) -> None:
    world.fill((1, 700), (701, 1400), (1401, 2500))
    await world.make()
    ten_years = 10 * 365 * 86400.0
    async with under_way(world, 400, since=ten_years) as stopped:
        pass
    result = await stopped
    assert 0 < len(await world.sequences()) < 2500
    assert (result.rows_now, result.bytes) == (0, 0), "its one intent is open"
    refs = world.archive.store.list(CHAIN)
    world.archive.put(world.archive.rows[CHAIN], level=1)
    for ref in refs:
        world.archive.store.delete(ref)
    world.fill((2501, 2600))
    went_on = await world.run(since=ten_years)
    assert await world.sequences() == list(range(1, 2501))
    whole = await world.run(ReplayOptions(again=True, append=True), to_sequence=2500)
    assert (went_on.rows, went_on.rows_now, went_on.bytes) == (2500, 2500, whole.bytes)


async def test_two_at_a_time_are_kept_apart(world: World) -> None:
    world.fill((1, 2500))
    await world.make()
    first, second = world.replay(ReplayOptions(pace=None)), world.replay()
    async with first.connected() as one, second.connected() as two:
        results = await asyncio.gather(first.run(one, Stop()), second.run(two, Stop()))
    assert all(result.finished for result in results)
    assert await world.sequences() == list(range(1, 2501))


async def test_another_that_goes_on_for_long_is_refused(world: World) -> None:
    world.fill((1, 2500))
    await world.make()
    async with under_way(world, 50):
        error = await refused(world, "E-REPLAY-RUNS")
    assert "a replay by " in error.message
    assert error.hint.startswith("wait until it is done, or stop it there; then:\nfloe replay -c ")


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


# The runbook of a lost source: made again, replayed into, frozen again as the next incarnation


def frozen(bench: Bench, chain: Chain) -> list[Message]:
    """What the archive holds of the chain."""
    refs = bench.store.list(chain)
    last = max((ref.coverage.last for ref in refs), default=0)
    found = read_cover(bench.store, refs, SequenceRange(1, last), pytest.fail) if last else ()
    return [m for batch in found for m in messages(batch)]


@pytest.mark.parametrize("relay", [False, True])
async def test_a_lost_source_comes_back_and_is_frozen_again(bench: Bench, relay: bool) -> None:
    name = unique("NODES")
    feed = {"stream": name, "relay": relay}
    await bench.make_stream(name)
    await bench.publish(name, (b"%d" % n for n in range(300)))
    async with bench.egress(feed):
        await soon(lambda: len(frozen(bench, Chain(SITE, name))) == 300)
    before = frozen(bench, Chain(SITE, name))

    await bench.client.api(f"STREAM.DELETE.{name}")
    request, options = Request(SITE, name, name, into_source=True), ReplayOptions(create=True)
    work = Replay(bench.settings(feed), request, options, bench.store, bench.chains, SystemClock(), Teller())
    async with work.connected() as client:
        result = await work.run(client, Stop())
    assert (result.finished, result.rows) == (True, 300)

    following = Chain(SITE, name, 1)
    async with bench.egress(feed):
        await soon(lambda: len(frozen(bench, following)) == 300)
    for old, new in zip(before, frozen(bench, following), strict=True):
        assert (new.subject, new.payload, new.sequence) == (old.subject, old.payload, old.sequence)
        assert is_replayed(new.headers or b"")
        assert hops(new.headers)[0].timestamp_ns == old.timestamp_ns
        assert restore(new.headers)[1] == old.headers
