"""Egress killed, paused and doubled as a process: the archive accounts for every message, once."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import urllib.request
from contextlib import suppress

import pytest

from common.jetstream.kv import KeyValue
from common.segments.captures import CaptureStore
from egress.feed import lease_key
from infra.local.process import free_port
from tests.support.basics import PATIENCE, at_length, seeded, soon, unique
from tests.support.egress import Bench
from tests.support.egress_process import Process, processes

# One with real processes; simulated worlds kill at each in every run, and the soak here.
MORE_POINTS = [
    "egress.after_stream_document=kill",
    "egress.before_put=kill@3",
    "egress.after_tail=kill@1",
    "egress.after_mark=kill@2",
    "egress.after_chain_document=kill",
    "egress.sealed=kill@2",
    "egress.before_put=kill@1",
    "egress.after_put=kill@3",
]


@pytest.mark.parametrize("point", ["egress.after_put=kill@1", *map(at_length, MORE_POINTS)])
async def test_killed_at_any_step_nothing_is_lost_or_repeated(bench: Bench, point: str) -> None:
    """F01, F02: and the tail and the mark are right again after the next start."""
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, (b"%d" % i for i in range(350)))
    with processes() as started:
        started.append(Process(bench, stream, failpoints=point))
        assert await started[0].ended() == -signal.SIGKILL, started[0].log.read_text()
        await bench.publish(stream, [b"more"] * 20)
        started.append(Process(bench, stream))
        await bench.archived_to(stream, 370)
        await started[1].drain()
    await bench.same(stream, stream)
    assert bench.chains.read_tail(bench.chain(stream)) == 370
    assert await bench.mark(stream) == 370


async def test_killed_between_captures_the_next_start_makes_up_for_what_is_not_there(bench: Bench) -> None:
    """The configuration was put, the consumers were not."""
    stream = await bench.make_stream(unique("T"))
    captures, chain = CaptureStore(bench.chains.layout, bench.objects), bench.chain(stream)
    await bench.publish(stream, (b"%d" % i for i in range(150)))
    with processes() as started:
        started.append(Process(bench, stream, failpoints="egress.before_capture=kill@2"))
        assert await started[0].ended() == -signal.SIGKILL, started[0].log.read_text()
        assert [len(captures.ls(chain, kind)) for kind in ("config", "consumers")] == [1, 0]
        started.append(Process(bench, stream))
        await bench.archived_to(stream, 150)
        await soon(lambda: captures.consumers(chain) is not None)
        await started[1].drain()
    assert [len(captures.ls(chain, kind)) for kind in ("config", "consumers")] == [1, 1]
    await bench.same(stream, stream)


@pytest.mark.soak
@pytest.mark.parametrize("point", ["egress.after_stream_document", "egress.after_chain_document"])
async def test_killed_while_it_begins_the_next_incarnation_both_histories_are_whole(bench: Bench, point: str) -> None:
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, (b"first %d" % i for i in range(120)))
    with processes() as started:
        started.append(Process(bench, stream, failpoints=f"{point}=kill@2"))
        await bench.archived_to(stream, 120)
        await bench.delete_stream(stream)
        await bench.make_stream(stream)
        await bench.publish(stream, (b"second %d" % i for i in range(130)))
        assert await started[0].ended() == -signal.SIGKILL, started[0].log.read_text()
        started.append(Process(bench, stream))
        await bench.archived_to(stream, 130, incarnation=1)
        await started[1].drain()
    assert [m.payload for m in bench.messages(stream)] == [b"first %d" % i for i in range(120)]
    await bench.same(stream, stream, incarnation=1)
    document = bench.chains.read_stream(bench.chain(stream, 1))
    assert document is not None
    assert document.previous == {0: 120}
    assert bench.chains.read_stream(bench.chain(stream, 2)) is None


async def publish_until(bench: Bench, stream: str, done: asyncio.Event, rng: random.Random) -> None:
    """Publish, and delete a message here and there, until `done`."""
    while not done.is_set():
        await bench.publish(stream, [rng.randbytes(rng.randrange(300)) for _ in range(rng.randrange(1, 60))])
        await asyncio.sleep(rng.uniform(0.0, 0.05))


@pytest.mark.soak
async def test_killed_at_random_moments_under_load(bench: Bench) -> None:
    """F01."""
    rng, stream, done = seeded(), await bench.make_stream(unique("T")), asyncio.Event()
    load = asyncio.create_task(publish_until(bench, stream, done, rng))
    with processes() as started:
        for _ in range(5):
            started.append(Process(bench, stream))
            await asyncio.sleep(rng.uniform(0.8, 2.0))
            await started[-1].kill()
        done.set()
        await load
        last = await bench.last(stream)
        started.append(Process(bench, stream))
        await bench.archived_to(stream, last)
        await started[-1].drain()
    await bench.same(stream, stream)
    assert await bench.mark(stream) == last


@pytest.mark.soak
async def test_paused_for_longer_than_its_lease_it_wastes_work_only(far: Bench) -> None:
    """F04, I9: another instance takes over; the first wakes up, finds out, and stands by."""
    rng, stream, done = seeded(), await far.make_stream(unique("T")), asyncio.Event()
    load = asyncio.create_task(publish_until(far, stream, done, rng))
    with processes() as started:
        started += [Process(far, stream), Process(far, stream)]
        await far.archived_to(stream, 1)
        for paused in started:
            before = far.end(stream)
            paused.send(signal.SIGSTOP)
            await far.archived_to(stream, before + 200)
            paused.send(signal.SIGCONT)
            await asyncio.sleep(0.5)
        done.set()
        await load
        await far.archived_to(stream, await far.last(stream))
        for each in started:
            await each.drain()
    await far.same(stream, stream)


@pytest.mark.soak
@pytest.mark.parametrize("point", ["egress.before_put", "egress.after_put"])
async def test_paused_around_a_put_its_late_segment_is_harmless(far: Bench, point: str) -> None:
    """F05: the object lands when another instance has long gone on."""
    stream = await far.make_stream(unique("T"))
    await far.publish(stream, (b"%d" % i for i in range(350)))
    with processes() as started:
        started.append(Process(far, stream, failpoints=f"{point}=stop@2"))
        await far.archived_to(stream, 100)
        started.append(Process(far, stream))
        await far.archived_to(stream, 350)
        started[0].send(signal.SIGCONT)
        await far.publish(stream, [b"more"] * 50)
        await far.archived_to(stream, 400)
        for each in started:
            await each.drain()
    await far.same(stream, stream)
    assert far.chains.read_tail(far.chain(stream)) == 400
    assert await far.mark(stream) == 400


async def test_sigterm_stores_the_open_segment_releases_the_lease_and_ends_with_0(bench: Bench) -> None:
    """F07."""
    stream = await bench.make_stream(unique("T"))
    feed = {"stream": stream, "segment": {"max_age": "1h"}}
    with processes() as started:
        listen = f"127.0.0.1:{free_port()}"
        started.append(Process(bench, stream, feeds=[feed], lease_ttl="10s", monitor={"listen": listen}))
        leases = await soon(lambda: KeyValue(bench.client, bench.lease_bucket, ttl=10.0).ensure())

        async def is_reading() -> bool:
            answer = await bench.client.api(f"CONSUMER.NAMES.{stream}")
            return bool(answer.get("consumers"))

        def has_all() -> bool:
            with suppress(OSError), urllib.request.urlopen(f"http://{listen}/status", timeout=PATIENCE) as answer:
                part = json.load(answer)["parts"].get(f"egress {stream}", {})
                return (part.get("open_segment") or {}).get("last") == 60
            return False

        await soon(is_reading)
        await bench.publish(stream, [b"x"] * 60)
        await soon(has_all)
        await started[0].drain()
        assert await leases.get(lease_key(bench.chain(stream))) is None
    assert bench.end(stream) == 60
    await bench.same(stream, stream)
