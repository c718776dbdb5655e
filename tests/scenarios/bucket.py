"""Services that are killed, and segments in the bucket: compaction and deletion under readers."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.archive.store import SegmentGone, SegmentStore
from common.chain import Chain
from common.open import load_settings, open_store
from infra.awkward import publish_awkward
from infra.oracle import Trace, archived_messages, compare
from tests.scenarios.judge import judged
from tests.scenarios.load import Background, Load, make_stream
from tests.scenarios.world import World
from tests.support.basics import PATIENCE, SharedS3, soon
from tests.support.commands import run_floe
from tests.support.ingress import client_of

CHAIN = Chain("alpha", "NODES")
POLICY = {
    "engine": "local",
    "delete_grace": "1s",
    "allow_short_times": True,
    "levels": [
        {"from": 0, "to": 1, "min_age": "1s", "max_wait": "2s", "min_count": 2, "max_count": 5, "min_size": "1M"},
        {"from": 1, "to": 2, "min_age": "1s", "max_wait": "2s", "min_count": 2, "max_count": 4, "min_size": "1M"},
    ],
}


async def compacted(s3: SharedS3, rng: random.Random, seconds: float, engine: str = "local") -> dict[str, Any]:
    """Kill egress, ingress or both under load (I1, I2, I6, I7). The cover gives the same rows during and after
    compaction and deletion (I5). Raises AssertionError otherwise.
    """
    with World(s3.store(), CHAIN.site) as world:
        url = world.sites[CHAIN.site].url
        async with client_of(url) as client:
            await make_stream(client, CHAIN.feed, CHAIN.site)
            assert (await publish_awkward(client, CHAIN.feed, CHAIN.site, rng, 300)).deleted
        central = world.central_config(compaction={**POLICY, "engine": engine})
        services = [world.egress(world.site_config(CHAIN.site)), world.ingress(central)]
        store = open_store(load_settings(str(central)))
        started, counts, done = time.monotonic(), Counter[str](), asyncio.Event()
        watch = asyncio.create_task(asyncio.to_thread(_watch, store, done, counts))
        try:
            async with Compactor(central, store, [CHAIN]) as compactor:
                async with Load(url, CHAIN.site, rng, 1000):
                    while time.monotonic() < started + seconds:
                        await asyncio.sleep(rng.uniform(0.5, 4.0))
                        for victim in rng.choice([services[:1], services[1:], services]):
                            await asyncio.to_thread(victim.kill)
                            victim.start()
                            counts[f"SIGKILL {victim.name}"] += 1
                runs = compactor.counts["compactions"] + 3
                counted = compactor.counts
                await soon(lambda: counted["compactions"] >= runs and counted["segments deleted"], 10 * PATIENCE, 0.3)
        finally:
            done.set()  # else the reading thread would keep the process alive for ever
        await watch
        messages = await judged(world, CHAIN.site, central, [CHAIN.feed])
        checked = run_floe("segments", "verify", "-c", str(central))
        assert checked.code == 0, checked
        for service in services:
            assert service.drain() == 0, service.tail()
        found = {"messages": messages, **counts, **compactor.counts}
        assert found["covers compared"] > 0
        assert found["segments deleted"] > 0
        return {"seconds": round(time.monotonic() - started, 1), **found}


class Compactor(Background):
    """Repeated runs of `floe compact` within a block: merging, and deleting merged inputs."""

    def __init__(self, config: Path, store: SegmentStore, chains: Sequence[Chain]) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._config, self._store, self._chains = config, store, chains

    async def _run(self) -> None:
        while not self._stop.is_set:
            await asyncio.to_thread(self._once)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 2.0)

    def _once(self) -> None:
        before = self._names()
        done = run_floe("compact", "-c", str(self._config), seconds=900)
        assert done.code == 0, done
        self.counts["compactions"] += 1
        self.counts["segments deleted"] += len(before - self._names())

    def _names(self) -> set[object]:
        return {ref.name for chain in self._chains for ref in self._store.list(chain)}


def _watch(store: SegmentStore, done: asyncio.Event, counts: Counter[str]) -> None:
    """Read the cover repeatedly; rows that it gave once, it must give again."""
    known = Trace()
    while not done.is_set():
        current = _trace(store)
        again = compare(known, _upto(current, known))
        assert again.is_ok, f"the cover changed under compaction: {again.report()}"
        known = current
        counts["covers compared"] += 1
        time.sleep(0.2)


def _trace(store: SegmentStore) -> Trace:
    """Return the cover's rows now; lists again if a segment was deleted between listing and reading."""
    for _ in range(50):
        try:
            return Trace.of(archived_messages(store, CHAIN))
        except SegmentGone:
            continue
    raise AssertionError("the cover could not be read in 50 tries: its segments vanish without a successor")


def _upto(trace: Trace, known: Trace) -> Trace:
    """Return the part of `trace` within the range of `known`."""
    count = sum(1 for sequence in trace.sequences if sequence <= known.last_accounted)
    return Trace(
        trace.sequences[:count],
        trace.timestamps[:count],
        trace.fingerprints[:count],
        last_accounted=known.last_accounted,
    )
