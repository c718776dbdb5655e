"""The simulation of crashes with an operator who switches `exclusive` over and back, also while an intent is
open and others publish: nothing is lost, and first deliveries keep their order.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from common.errors import Stopped
from common.tasks import Stop
from ingress.checkpoint_store import StateStore
from ingress.verdict.settle import Reconciler, SharedSettler
from ingress.verdict.verdict import TargetErrors
from tests.property.test_ingress_crashes import EXPECTED_ENDS, FakeSource, Host
from tests.property.test_ingress_shared_crashes import SharedWorld
from tests.support.basics import seeded


class SwitchingWorld(SharedWorld):
    """Each start of an instance finds another configuration; in the end all are for sharing.

    Messages stay readable: what a foreign message stood for that is gone when ingress looks at an exclusive
    target, nobody can know (docs/delivery.md).
    """

    foreign, forgets = 0.03, False

    async def instance(self, name: str) -> None:
        host = Host(name, self)
        while True:
            state = StateStore(host, "key", "T")
            stop = Stop()
            kind = SharedSettler if not self.trouble else self.rng.choice([Reconciler, SharedSettler])
            reconciler = kind(TargetErrors("T"), state, host, host, host, 1.0)
            delivery = self.kind("T", state, reconciler, host, FakeSource(host, stop), host, host.mark)
            try:
                await delivery.run(stop)
                return
            except (*EXPECTED_ENDS, Stopped):
                await self.gates.step(name)


@pytest.mark.parametrize("number", range(30))
async def test_switching_exclusive_loses_nothing(number: int) -> None:
    world = SwitchingWorld(seeded())
    await world.run(faults=800)
    assert world.verdict() == ""


async def test_the_simulation_finds_what_counting_foreign_messages_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingress.verdict.verdict.counts", lambda state: True)
    for _ in range(40):
        world = SwitchingWorld(seeded())
        with suppress(IndexError):  # counted beyond the intent
            await world.run(faults=800)
            if world.verdict():
                return
    pytest.fail("40 runs without a message lost: the simulation is too tame")
