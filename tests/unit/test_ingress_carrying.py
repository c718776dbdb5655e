"""What a delivery and its runner do with a stop, with an operator's corrections, and with a defect."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from common.clock import SystemClock, doubling
from common.errors import AnotherWriter, Stopped
from common.service.monitor import Health
from common.settings.ingress import TargetSettings
from common.tasks import Stop
from ingress.checkpoint import Checkpoint, CheckpointConflict, TargetState, open_intent
from ingress.checkpoint_store import StateMoved, Stored
from ingress.delivery import Delivery
from ingress.deps import IngressTuning
from ingress.publishers.publisher import Outcome
from ingress.rows.rows import Block, PreparedBatch, Rows
from ingress.target import TargetSupervisor
from ingress.verdict.verdict import Sending, Settled
from tests.support.basics import PATIENCE
from tests.support.clock import ManualClock
from tests.support.ingress import CHAIN, piece


def state(position: int, sequence: int = 0) -> TargetState:
    return TargetState(Checkpoint(sequence, "t0", {CHAIN: position}))


class World:
    """Everything around a delivery: a target that takes all, a backlog without end, a state of its own.

    `moves`: what somebody else stores, one at each look at the state.
    """

    steps_over, name = False, "fake"

    def __init__(self, moves: list[TargetState] | None = None, first: int = 1) -> None:
        self.stored, self.moves = Stored(state(1), 1), moves or []
        self.next, self.published, self.stop_at = first, 0, 5
        self.stop = Stop()
        self.recall, self.sending = self, Sending()

    @property
    def state(self) -> TargetState:
        assert self.stored.state is not None
        return self.stored.state

    def delivery(self, limits: Any = None) -> Delivery:
        world: Any = self
        return Delivery("T", world, world, world, world, ManualClock(), limits=limits)

    # State and target

    async def first(self) -> tuple[Stored, None]:
        return self.stored, None

    async def save(self, after: TargetState, revision: int) -> Stored:
        self.stored = Stored(after, revision + 1)
        return self.stored

    async def settle(self, known: Stored, _: Rows | None) -> Settled:
        return Settled(self.state.checkpoint.target_sequence, 0)

    async def check_moved(self, known: Stored) -> None:
        if self.moves:
            raise StateMoved(Stored(self.moves.pop(0), known.revision + 1))

    def check_lease(self) -> None: ...

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        self.published += 1
        if self.published == self.stop_at:
            self.stop.set()
        return Outcome(rows.count)

    # Rows

    async def take(self, stop: Stop, seconds: float) -> Rows | None:
        """As the real ones: nothing is waited for where rows are ready."""
        assert self.published < 50, "it never stops"
        self.next += 1
        return Rows([Block(piece(self.next - 1, self.next - 1))])

    def release(self, rows: Rows) -> None: ...
    def closed(self, positions: Any) -> None: ...
    def reset(self, positions: Any) -> None: ...


async def test_a_stop_in_a_backlog_ends_behind_the_open_intent() -> None:
    world = World()
    await asyncio.wait_for(world.delivery().run(world.stop), PATIENCE)

    found = world.published, world.state.intent, world.state.checkpoint.positions
    assert found == (5, None, {CHAIN: 6})


class Limits:
    """A server that takes less at the first look; `refuses`: what an open intent holds too."""

    def __init__(self, world: World, *, refuses: bool = False) -> None:
        self.world, self.refuses, self.renewed, self.are_outdated = world, refuses, 0, True

    async def renew(self, positions: Any) -> None:
        assert self.world.state.intent is None
        self.renewed, self.are_outdated = self.renewed + 1, False
        self.world.next = positions[CHAIN]

    def check(self, rows: Rows, stored: int) -> None:
        assert self.world.state.intent is not None
        if self.refuses:
            raise Stopped("too large", code="E-OVERSIZE-INTENT")


async def test_rows_made_ready_for_another_server_get_into_no_intent_and_what_it_refuses_is_not_sent() -> None:
    world = World()
    limits: Any = Limits(world)
    await asyncio.wait_for(world.delivery(limits).run(world.stop), PATIENCE)
    assert (limits.renewed, world.state.checkpoint.positions) == (1, {CHAIN: 6})

    refusing = World()
    with pytest.raises(Stopped, match="too large"):
        await asyncio.wait_for(refusing.delivery(Limits(refusing, refuses=True)).run(refusing.stop), PATIENCE)
    assert refusing.published == 0


@pytest.mark.parametrize(("limit", "stored", "found"), [(99, 0, (CHAIN, 2, 100)), (99, 2, None), (100, 0, None)])
def test_the_first_row_above_a_limit_is_found(limit: int, stored: int, found: tuple[object, int, int] | None) -> None:
    payloads = pa.array([b"", b"", b""], pa.binary())
    batch = PreparedBatch([1, 2, 3], [1, 2, 3], [b"a"] * 3, b"", None, payloads, [10, 110, 120], most=100)
    rows = Rows([Block(piece(1, 3), batch)])

    assert rows.most == 100
    assert rows.above(limit, stored) == found


async def test_rows_that_do_not_continue_the_checkpoint_name_what_to_look_at() -> None:
    with pytest.raises(CheckpointConflict) as error:
        await World(first=7).delivery().run(Stop())
    assert "floe status -c " in error.value.hint


async def test_corrections_of_single_chains_in_a_row_do_not_end_a_target() -> None:
    delivery = World(moves=[state(n) for n in (100, 200, 300, 400, 500)]).delivery()
    await delivery.begin()
    for _ in range(5):
        await delivery.wait_for_quiet()
    assert delivery.state.checkpoint.positions == {CHAIN: 500}


@pytest.mark.parametrize(
    "moves", [[state(n + 1, n) for n in (1, 2, 3)], [open_intent(state(1), [piece(1, n)]) for n in (1, 2, 3)]]
)
async def test_who_carries_on_and_on_is_another_writer(moves: list[TargetState]) -> None:
    delivery = World(moves).delivery()
    await delivery.begin()
    with pytest.raises(AnotherWriter) as error:
        await delivery.wait_for_quiet()
    assert error.value.exit_code == 4
    assert "floe checkpoint ls -c " in error.value.hint


# A defect


class Sharing:
    """The sharing of the leases, as far as one runner sees it."""

    def __init__(self) -> None:
        self.retired: list[object] = []
        self.owner = "me"

    def slot(self, key: str, told: Any) -> object:
        self.told = told
        return SimpleNamespace(occupy=self.occupy)

    async def occupy(self, stop: Stop) -> None:
        return None

    async def retire(self, slot: object) -> None:
        self.retired.append(slot)
        self.told.standby("somebody")  # an answer that was on its way


async def test_after_a_defect_a_target_begins_again_after_pauses_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    health, sharing, clock = Health(SystemClock()), Sharing(), SystemClock()
    discovery = SimpleNamespace(sites=None)
    deps: Any = SimpleNamespace(health=health, clock=clock, sharing=sharing, pace=IngressTuning(), discovery=discovery)
    settings = TargetSettings.model_validate({"stream": "T", "sources": [{"site": "us", "feed": "NODES"}]})
    stop, began = Stop(), []

    async def check() -> None:
        began.append(clock.monotonic())
        if len(began) == 4:
            stop.set()
        raise KeyError("nobody foresaw this")

    monkeypatch.setattr("ingress.target.PAUSES", doubling(0.05, 30.0))
    monkeypatch.setattr("ingress.target.Target", lambda *_: SimpleNamespace(check=check))
    await TargetSupervisor(deps, settings).run(stop)

    pauses = [b - a for a, b in pairwise(began)]
    assert all(pause >= least for pause, least in zip(pauses, (0.05, 0.1, 0.2), strict=True))
    assert sharing.retired == []
    shown = health.status()["parts"]["target T"]
    assert (shown["state"], shown["code"]) == ("stopped", "E-UNEXPECTED")
    assert "nobody foresaw this" in shown["why"]
    assert any("nobody foresaw this" in problem for problem in health.problems())
