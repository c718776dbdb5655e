"""Must hold: thousands of chains flow into their targets while ingress is killed; each message is there once."""

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import connect_bench
from bench.scale import MOVING_SHARE, START_TIMEOUT_S, ChainFleet, count_stored
from common.archive.segment import Message
from common.chain import Chain
from common.nats.client import FloeClient
from common.open import load_settings
from infra.local.nats import NatsServer
from infra.oracle import Trace, prefix_subject, read_target_traces
from tests.scenarios.processes import Service
from tests.support.basics import soon
from tests.support.oracle import classes, compare_target

RUNS_FOR = (60.0, 240.0)  # seconds until ingress is killed again; in a short run a quarter of it at most
CALM = 3.0  # seconds in which nothing more may arrive


class WrittenFleet(ChainFleet):
    """A fleet that keeps what it wrote. `written`: the messages of each chain, as its target is to hold them."""

    def __init__(self, folder: Path, chains: int, nats_url: str) -> None:
        super().__init__(folder, chains, nats_url)
        self._targets = {
            pair: each.stream for each in load_settings(str(self.config)).ingress.targets for pair in each.feed_sources
        }
        self.written = {chain: Trace() for chain in self.chains}

    def append(self, chain: Chain) -> Message:
        row, target = super().append(chain), self._targets[chain.site, chain.feed]
        self.written[chain].add(row, prefix_subject(target.lower())(row.subject))
        return row

    async def arrived(self, client: FloeClient, service: Service) -> None:
        """Wait until the targets hold as many messages as were written, and then for a calm."""

        async def has_all() -> bool:
            assert service.runs(), service.tail()
            return await count_stored(client, self.targets) >= sum(self.ends.values())

        await soon(has_all, seconds=START_TIMEOUT_S, every=1.0)
        await asyncio.sleep(CALM)

    async def compare(self, client: FloeClient) -> dict[str, int]:
        """Compare the targets with all that was written. Raises AssertionError with the oracle's report."""
        found, foreign = dict[Chain, Trace](), 0
        for target in self.targets:
            traces = await read_target_traces(client, target)
            strange = {chain for chain in traces.traces if self._targets.get((chain.site, chain.feed)) != target}
            assert not strange, f"target {target} holds messages of {strange}"
            found |= traces.traces
            foreign += traces.foreign
        compared = compare_target(self.written, found, foreign)
        assert compared.is_ok, compared.report()
        return {"chains": len(self.chains), "messages": compared.expected, **classes(compared)}


async def many_chains(rng: random.Random, chains: int, seconds: float) -> dict[str, Any]:
    """Carry `chains` chains for `seconds`, one in a hundred of which grows each second, while ingress is killed every
    few minutes and started again. Raises AssertionError if a target does not hold each message once, in order.
    """
    began, kills = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="floe-many-") as name, NatsServer() as nats:
        fleet, client = WrittenFleet(folder := Path(name), chains, nats.url), await connect_bench(nats.url)
        service = Service(folder, "ingress", "ingress", "run", "-c", str(fleet.config))
        await asyncio.to_thread(fleet.fill)
        try:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                service.start()
                await fleet.live(min(left, seconds / 4, rng.uniform(*RUNS_FOR)), MOVING_SHARE * chains)
                assert service.runs(), service.tail()
                service.kill()
                kills += 1
            await fleet.arrived(client, service.start())
            found = await fleet.compare(client)
        finally:
            service.kill()
            await client.aclose()
    return {"seconds": round(time.monotonic() - began), "kills": kills, **found}
