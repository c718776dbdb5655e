"""Segments in the bucket: compaction and deletion under readers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common.chain import Chain
from common.open import load_settings, open_store
from common.segments.store import SegmentGone, SegmentStore
from infra.oracle import Trace, archived, compare
from tests.scenarios.faults import Outcome, prepare
from tests.scenarios.judge import judge, sources_of
from tests.scenarios.load import Load
from tests.scenarios.processes import run_floe
from tests.scenarios.world import World

POLICY = {
    "engine": "local",
    "delete_grace": "1s",
    "allow_short_times": True,
    "levels": [
        {"from": 0, "to": 1, "min_age": "1s", "max_wait": "2s", "min_count": 2, "max_count": 5, "min_size": "1M"},
        {"from": 1, "to": 2, "min_age": "1s", "max_wait": "2s", "min_count": 2, "max_count": 4, "min_size": "1M"},
    ],
}


async def compacted(s3: Any, rng: random.Random, seconds: float, rate: int = 400, engine: str = "local") -> Outcome:
    """The cover gives the same rows during and after compaction and deletion, ingress reading (I5)."""
    with World(s3, "alpha") as world:
        await prepare(world, rng)
        central = world.central_config(compaction={**POLICY, "engine": engine})
        services = [world.egress(world.site_config("alpha")), world.ingress(central)]
        started, faults = time.monotonic(), Counter[str]()
        done = asyncio.Event()
        watch = asyncio.create_task(asyncio.to_thread(_watch, central, done, faults))
        try:
            async with Load(world.sites["alpha"].url, "alpha", rng, rate):
                while time.monotonic() < started + seconds:
                    await asyncio.sleep(rng.uniform(0.5, 2.0))
                    await asyncio.to_thread(_compact, central, faults)
                    if rng.random() < 0.3:
                        await asyncio.to_thread(services[1].kill)
                        services[1].start()
            for run in range(10):  # a slow machine may need more than three
                await asyncio.to_thread(_compact, central, faults)
                if run >= 2 and faults["segments deleted"]:
                    break
                await asyncio.sleep(1.5)
        finally:
            done.set()  # else what looks on would keep the process for ever
        await watch
        verdict = await judge(world, central, await sources_of(world))
        checked = run_floe("segments", "verify", "-c", str(central))
        assert checked.code == 0, checked
        assert faults["covers compared"] > 0
        assert faults["segments deleted"] > 0
        for service in services:
            assert service.drain() == 0, service.tail()
        return Outcome(verdict, time.monotonic() - started, faults)


def _compact(config: Path, faults: Counter[str]) -> None:
    store = open_store(load_settings(str(config)))
    before = {ref.name for ref in store.list(Chain("alpha", "NODES"))}
    done = run_floe("compact", "-c", str(config), seconds=900)
    assert done.code == 0, done
    after = {ref.name for ref in store.list(Chain("alpha", "NODES"))}
    faults["compactions"] += 1
    faults["segments deleted"] += len(before - after)


def _watch(config: Path, done: asyncio.Event, counts: Counter[str]) -> None:
    """Read the cover over and over; what it gave once, it must give again."""
    store, known = open_store(load_settings(str(config))), Trace()
    while not done.is_set():
        current = _trace(store)
        again = compare(known, _upto(current, known))
        assert again.ok, f"the cover changed under compaction: {again.report()}"
        known = current
        counts["covers compared"] += 1
        time.sleep(0.2)


def _trace(store: SegmentStore) -> Trace:
    """The cover's rows now; a segment deleted between listing and reading means: list again."""
    for _ in range(50):
        try:
            return Trace.of(archived(store, Chain("alpha", "NODES")))
        except SegmentGone:
            continue
    raise AssertionError("the cover could not be read in 50 tries: its segments vanish without a successor")


def _upto(trace: Trace, known: Trace) -> Trace:
    """The part of `trace` that `known` speaks of."""
    count = sum(1 for sequence in trace.sequences if sequence <= known.through)
    return Trace(trace.sequences[:count], trace.timestamps[:count], trace.prints[:count], through=known.through)
