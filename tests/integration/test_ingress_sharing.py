"""Instances that share targets by lease: fair shares, take-over, and exactness throughout."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.chain import Chain
from common.clock import SystemClock
from common.errors import AnotherWriter
from common.jetstream.client import FloeClient
from common.jetstream.kv import KeyValue
from common.service.monitor import Health
from common.tasks import Stop
from infra.local.nats import NatsServer
from ingress.deps import lease_key
from tests.support.basics import PATIENCE, soon, unique
from tests.support.ingress import Archive, Centre, check_exact, rows_of
from tests.support.proxies import TcpProxy

pytestmark = [pytest.mark.servers, pytest.mark.simulated]
TTL = 4.0  # seconds


@dataclass
class Instance:
    """One process of ingress, nearly: its own connection, health and leases."""

    centre: Centre
    names: Sequence[str]
    ingress: dict[str, Any]
    health: Health = field(default_factory=lambda: Health(SystemClock()))
    stop: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        self.task = asyncio.create_task(self.centre.run(self.stop, self.health, **self.ingress))

    def held(self) -> list[str]:
        parts = self.health.status()["parts"]
        return [n for n in self.names if parts.get(f"target {n}", {}).get("state") == "carrying"]

    async def drain(self) -> None:
        self.stop.set()
        with suppress(AnotherWriter):
            await asyncio.wait_for(self.task, PATIENCE)


@dataclass
class Fleet:
    """Several targets, each with a site of its own, and the instances that carry them."""

    folder: Path
    archive: Archive
    url: str
    count: int

    def __post_init__(self) -> None:
        self.first = Centre(self.folder, self.archive, self.url)
        self.names = [unique("T") for _ in range(self.count)]
        self.chains = [Chain(f"site{n}", "NODES") for n in range(self.count)]
        self.carried = 0

    def targets(self) -> list[dict[str, Any]]:
        return [
            {
                "stream": name,
                "create": {"subjects": [f"{name}.>"]},
                "sources": [{"site": chain.site, "feed": chain.feed, "subject_prefix": name}],
            }
            for name, chain in zip(self.names, self.chains, strict=True)
        ]

    def start(self, url: str = "") -> Instance:
        centre = Centre(self.folder, self.archive, url or self.url)
        centre.lease_bucket, centre.state_bucket = self.first.lease_bucket, self.first.state_bucket
        return Instance(centre, self.names, {"targets": self.targets(), "lease_ttl": f"{TTL:g}s"})

    def put(self, rows: int = 40) -> None:
        first = self.carried + 1
        for chain in self.chains:
            self.archive.put(rows_of(first, first + rows - 1, chain), chain=chain)
        self.carried += rows

    async def owners(self, client: FloeClient) -> list[str | None]:
        bucket = await KeyValue(client, self.first.lease_bucket, ttl=TTL).ensure()
        found = [await bucket.get(lease_key(name)) for name in self.names]
        return [each.value.decode() if each else None for each in found]

    async def is_shared(self, client: FloeClient, shares: list[int]) -> bool:
        """Whether every lease is held, by so many owners, of whom each holds its part of `shares`."""
        owners = await self.owners(client)
        return None not in owners and sorted(Counter(owners).values()) == shares

    async def check(self, client: FloeClient) -> None:
        for name, chain in zip(self.names, self.chains, strict=True):
            centre = Centre(self.folder, self.archive, self.url, stream=name)
            messages = await centre.carried(client, self.carried)
            mine = Archive(self.archive.folder)
            mine.rows = {chain: self.archive.rows[chain]}
            check_exact(messages, mine, f"{name}.".encode())


def counts(*instances: Instance) -> list[int]:
    return sorted(len(each.held()) for each in instances)


@pytest.mark.real
async def test_three_instances_split_six_targets_take_over_and_stay_exact(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_server: NatsServer, nats_url: str
) -> None:
    fleet = Fleet(tmp_path, archive, nats_url, 6)
    fleet.put()
    loading = asyncio.create_task(keep_loading(fleet))
    async with TcpProxy(nats_server.port) as proxy:
        one = fleet.start()
        await soon(lambda: counts(one) == [6])
        two, three = fleet.start(), fleet.start(proxy.url)
        await soon(lambda: counts(one, two, three) == [2, 2, 2])
        await soon(lambda: not two.health.problems())

        proxy.blackhole()
        began = time.monotonic()
        # By the leases: what an instance shows of itself comes up to a second later.
        await soon(lambda: fleet.is_shared(client, [3, 3]), every=0.1)
        print(f"take-over of 2 of 6 targets: {(time.monotonic() - began) / TTL:.2f} lease times")
        await soon(lambda: counts(one, two) == [3, 3])

        new = fleet.start()
        await soon(lambda: counts(one, two, new) == [2, 2, 2])
        proxy.heal()
        loading.cancel()
        owners = await fleet.owners(client)
        assert None not in owners
        began = time.monotonic()
        await one.drain()
        await soon(lambda: len(two.held()) + len(new.held()) + len(three.held()) == 6)
        print(f"hand-over of 2 targets by a drain: {time.monotonic() - began:.2f} s")
        await fleet.check(client)
        for each in (two, three, new):
            await each.drain()


async def keep_loading(fleet: Fleet) -> None:
    while True:
        fleet.put(20)
        await asyncio.sleep(0.3)
