"""The fault runs on services. Each returns what it did and found; the caller asserts that all is well."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.scenarios.judge import Verdict, judge, sources_of
from tests.scenarios.load import Load, awkward_start, client_of, make_stream
from tests.scenarios.processes import Service
from tests.scenarios.world import World


@dataclass(slots=True)
class Outcome:
    """One run: its verdict, how long it took, and which faults were made."""

    verdict: Verdict
    seconds: float
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def messages(self) -> int:
        return self.verdict.target.expected

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 1),
            "faults": dict(self.faults),
            "messages": self.messages,
            "segments": self.verdict.segments,
            "archive": self.verdict.archive.line(),
            "target": self.verdict.target.line(),
        }


async def prepare(world: World, rng: random.Random) -> None:
    """A stream NODES at each site that already holds awkward messages and deleted sequences."""
    for site, server in world.sites.items():
        async with client_of(server.url) as client:
            await make_stream(client, "NODES", site)
            await awkward_start(client, "NODES", site, rng)


async def kill_rounds(s3: Any, rng: random.Random, rounds: int, rate: int = 400) -> Outcome:
    """SIGKILL egress, ingress or both at random moments under load (I1, I2, I6, I7)."""
    with World(s3, "alpha") as world:
        await prepare(world, rng)
        central = world.central_config()
        services = [world.egress(world.site_config("alpha")), world.ingress(central)]
        started, faults = time.monotonic(), Counter[str]()
        async with Load(world.sites["alpha"].url, "alpha", rng, rate):
            for _ in range(rounds):
                await asyncio.sleep(rng.uniform(0.5, 4.0))
                for victim in rng.choice([services[:1], services[1:], services]):
                    await asyncio.to_thread(victim.kill)
                    victim.start()
                    faults[f"SIGKILL {victim.name}"] += 1
        return await _settle(world, central, services, started, faults)


async def _settle(world: World, central: Any, services: list[Service], started: float, faults: Counter[str]) -> Outcome:
    """Let everything arrive, compare, and drain: a clean stop must end with 0."""
    for service in services:
        service.start()
    sources = await sources_of(world)
    verdict = await judge(world, central, sources)
    for service in services:
        code = await asyncio.to_thread(service.drain)
        assert code == 0, f"{service.name} ended with {code} on SIGTERM\n{service.tail()}"
    return Outcome(verdict, time.monotonic() - started, faults)
