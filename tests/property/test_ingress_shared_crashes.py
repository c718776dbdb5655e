"""The same simulation with others who publish to the target: nothing is lost, first deliveries keep their
order, and where messages stay readable none comes again.
"""

from __future__ import annotations

import asyncio

import pytest

from common.tasks import Stop
from ingress.checkpoint_store import StateStore
from ingress.verdict.settle import Reconciler, SharedSettler
from ingress.verdict.verdict import TargetErrors
from tests.property.test_ingress_crashes import CHAINS, EXPECTED_ENDS, FOREIGN, FakeSource, Host, World
from tests.support.basics import seeded


class SharedWorld(World):
    """`forgets`: messages expire or are consumed; `foreign`: how likely somebody else publishes in a turn."""

    forgets, foreign = True, 0.2
    reconciler: type[Reconciler] = SharedSettler

    async def instance(self, name: str) -> None:
        host = Host(name, self)
        while True:
            state = StateStore(host, "key", "T")
            stop = Stop()
            reconciler = self.reconciler(TargetErrors("T"), state, host, host, host, 1.0)
            delivery = self.kind("T", state, reconciler, host, FakeSource(host, stop), host, host.mark)
            try:
                await delivery.run(stop)
                return
            except EXPECTED_ENDS:
                await self.gates.step(name)

    async def turn(self, tasks: dict[str, asyncio.Task[None]], paused: set[str]) -> None:
        if self.rng.random() < self.foreign:
            self.server.log.append(FOREIGN)
            self.server.seen.append(len(self.server.log))
        await super().turn(tasks, paused)

    def forget(self) -> None:
        if self.forgets:
            super().forget()

    def found(self) -> dict[str, list[int]]:
        """What the target took of each chain, in order."""
        rows: dict[str, list[int]] = {str(chain): [] for chain in CHAINS}
        for row in self.server.log:
            if row != FOREIGN:
                chain, _, sequence = row.decode().partition("|")
                rows[chain].append(int(sequence))
        return rows

    def repeats(self) -> int:
        return sum(len(rows) - len(set(rows)) for rows in self.found().values())

    def verdict(self) -> str:
        for chain in CHAINS:
            parked = self.archive.parked[chain]
            first = list(dict.fromkeys(self.found()[str(chain)]))
            if (in_turn := [s for s in first if s not in parked]) != self.archive.carried[chain]:
                return f"{chain}: expected {self.archive.carried[chain]}, found {in_turn}"
            if not parked <= set(first):
                return f"{chain}: expected parked {sorted(parked)}, found {first}"
        return ""


@pytest.mark.parametrize("number", range(15))
async def test_nothing_is_lost_and_first_deliveries_keep_their_order(number: int) -> None:
    world = SharedWorld(seeded())
    await world.run()
    assert world.verdict() == ""


@pytest.mark.parametrize("number", range(12))
async def test_what_stays_readable_does_not_come_again(number: int) -> None:
    world = SharedWorld(seeded())
    world.forgets = False
    await world.run()
    assert world.verdict() == ""
    assert world.repeats() == 0


class TrustingSettler(SharedSettler):
    """The mistake to avoid: foreign messages are counted as rows."""

    async def settle(self, known, rows):
        settled = await super().settle(known, rows)
        intent = known.state.intent
        last = settled.base + settled.stored
        return settled if intent is None else type(settled)(intent.base, min(intent.count, last - intent.base))


async def test_the_simulation_finds_rows_that_are_lost() -> None:
    lost = 0
    for _ in range(4):
        world = SharedWorld(seeded())
        world.reconciler, world.forgets = TrustingSettler, False
        try:
            await world.run()
        except Exception:  # whatever it ends with, it is found
            lost += 1
        else:
            lost += bool(world.verdict())
    assert lost > 0
