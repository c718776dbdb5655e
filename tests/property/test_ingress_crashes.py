"""The protocol of intents under crashes, pauses, twins, lost answers and late messages: a simulated server
and bucket, the real delivery, state store and transitions. Whatever happens, the target holds each row once,
in order: also one that forgets or is purged, one that was not empty, with gaps that are given up, and with
parked messages that are left out and tried again out of turn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pytest

from common.chain import Chain
from common.errors import AnotherWriter, LeaseLost, OutcomeUnknown, Stopped, Unavailable
from common.segments.keys import SegmentName
from common.sequences import SequenceRange
from common.tasks import Stop
from ingress.checkpoint import Checkpoint, Gap, Intent, IntentPiece, TargetState
from ingress.checkpoint_store import StateStore, Stored, from_json, to_json
from ingress.delivery import Delivery
from ingress.operator.corrections import count_stored
from ingress.publishers.publisher import Outcome, UnknownOutcome
from ingress.rows.rows import Block, PreparedBatch, Rows
from ingress.verdict.settle import Reconciler
from ingress.verdict.verdict import Finding, Origin, TargetErrors, TargetReading, Unread
from tests.support.basics import seeded

CHAINS = [Chain("us", "A"), Chain("us", "B"), Chain("eu", "A")]
FOREIGN = b"foreign"
NOTHING = b"nothing"  # a sequence that a purge skipped
EXPECTED_ENDS = (AnotherWriter, LeaseLost, OutcomeUnknown, Unavailable)


class Gates:
    """Every step of every instance waits here until the driver lets it go on."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def step(self, who: str) -> None:
        gate = asyncio.get_running_loop().create_future()
        self.waiting.append((who, gate))
        await gate

    def release(self, paused: set[str]) -> bool:
        """Let one instance go one step on; False if none waits."""
        self.waiting = [(who, gate) for who, gate in self.waiting if not gate.done()]
        ready = [gate for who, gate in self.waiting if who not in paused]
        if ready:
            self.rng.choice(ready).set_result(None)
        return bool(ready)


@dataclass
class Batch:
    expected: int
    rows: list[bytes]
    accepted: bool | None = None


@dataclass
class Server:
    """The target and the state bucket. What is on its way arrives late, in any order, or never."""

    rng: random.Random
    log: list[bytes] = field(default_factory=list)
    on_the_way: list[Batch] = field(default_factory=list)
    seen: list[int] = field(default_factory=lambda: [0])
    held_from: int = 1
    gone: set[int] = field(default_factory=set)
    parked: set[tuple[Chain, int]] = field(default_factory=set)
    value: bytes = b""
    revision: int = 0
    writes: list[tuple[bytes, int]] = field(default_factory=list)

    def deliver(self, batch: Batch) -> None:
        batch.accepted = batch.expected == len(self.log)
        if batch.accepted:
            self.log += batch.rows
            self.seen.append(len(self.log))

    def write(self, value: bytes, revision: int) -> int | None:
        if revision != self.revision:
            return None
        self.value, self.revision = value, revision + 1
        return self.revision

    def something_arrives(self) -> None:
        if self.on_the_way and self.rng.random() < 0.7:
            self.deliver(self.on_the_way.pop(self.rng.randrange(len(self.on_the_way))))
        elif self.writes:
            self.write(*self.writes.pop(self.rng.randrange(len(self.writes))))


@dataclass
class Host:
    """The fakes of one instance: bucket, looker, publisher, lease and clock share its gate."""

    name: str
    world: World

    def is_usable(self) -> bool:
        return self.world.rng.random() > self.world.trouble / 20

    # Clock

    def now(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await self.world.gates.step(self.name)

    # Bucket

    async def get(self, key: str):
        await self.world.gates.step(self.name)
        server = self.world.server
        return Value(server.value, server.revision) if server.revision else None

    async def create(self, key: str, value: bytes) -> int | None:
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        await self.world.gates.step(self.name)
        fate = self.world.fate()
        if fate == "late":
            self.world.server.writes.append((value, revision))
        if fate in ("lost", "late"):
            raise OutcomeUnknown("lost")
        written = self.world.server.write(value, revision)
        await self.world.gates.step(self.name)
        if fate == "unanswered":
            raise OutcomeUnknown("unanswered")
        return written

    # Looker

    async def read(self) -> TargetReading:
        await self.world.gates.step(self.name)
        server, rng = self.world.server, self.world.rng
        last = len(server.log)
        if rng.random() < self.world.trouble:
            last = rng.choice(server.seen[-4:])  # a deposed leader
        return self.reading(last)

    async def read_fresh(self) -> TargetReading:
        await self.world.gates.step(self.name)
        return self.reading(len(self.world.server.log))

    async def origins(self, places: Collection[int]) -> Mapping[int, Origin | Unread]:
        await self.world.gates.step(self.name)
        return {place: self.origin(place) for place in places}

    def reading(self, last: int) -> TargetReading:
        return TargetReading(last, "t0", self.origin(last), self.world.forgets)

    async def described(self, place: int) -> str:
        return ""

    def origin(self, place: int) -> Origin | Unread:
        server = self.world.server
        if place < server.held_from or place in server.gone:
            return Unread.GONE
        if server.log[place - 1] in (FOREIGN, NOTHING):
            return Unread.FOREIGN
        chain, _, sequence = server.log[place - 1].decode().partition("|")
        return Origin(Chain.parse(chain), int(sequence))

    # Publisher

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        rng, server = self.world.rng, self.world.server
        while stored < rows.count:
            stop = min(rows.count, stored + rng.randint(1, 7))
            batch = Batch(base + stored, [subject for subject, _, _ in rows.messages(stored, stop)])
            await self.world.gates.step(self.name)
            fate = self.world.fate()
            if fate == "late":
                server.on_the_way.append(batch)
            if fate in ("lost", "late"):
                return Outcome(stored, UnknownOutcome("no answer"), stop)
            server.deliver(batch)
            await self.world.gates.step(self.name)
            if fate == "unanswered" or not batch.accepted:
                return Outcome(stored, UnknownOutcome("no answer, or refused"), stop)
            stored = stop
        return Outcome(stored)

    async def mark(self, intent: Intent) -> None:
        """Before an intent is closed: parked messages of it are not parked any more."""
        for piece in intent.pieces:
            if piece.out_of_turn:
                await self.world.gates.step(self.name)
                self.world.server.parked.discard((piece.chain, piece.rows.first))


@dataclass(frozen=True)
class Value:
    value: bytes
    revision: int


class Archive:
    """Rows of each chain, and the pieces that a prefetcher or an intent takes of them."""

    def __init__(self, rng: random.Random, rows: int) -> None:
        self.last = {chain: rng.randint(rows // 2, rows) for chain in CHAINS}
        rows_of = {chain: [s for s in range(1, last + 1) if rng.random() < 0.7] for chain, last in self.last.items()}
        self.given_up = {
            chain: set(range(first := rng.randint(1, last), first + rng.choice([0, 1, 12])))
            for chain, last in self.last.items()
        }
        kept = {chain: [s for s in rows_of[chain] if s not in self.given_up[chain]] for chain in CHAINS}
        self.parked = {chain: {s for s in kept[chain] if rng.random() < 0.05} for chain in CHAINS}
        self.carried = {chain: [s for s in kept[chain] if s not in self.parked[chain]] for chain in CHAINS}

    def stretch(self, chain: Chain, first: int, most: int) -> SequenceRange:
        """The next sequences: all of them given up, or none."""
        is_gap, last = first in self.given_up[chain], first
        while last < min(self.last[chain], first + most) and (last + 1 in self.given_up[chain]) == is_gap:
            last += 1
        return SequenceRange(first, last)

    def block(self, chain: Chain, rows: SequenceRange) -> Block:
        if rows.first in self.given_up[chain]:
            return Block(IntentPiece(Gap(chain), rows, 0))
        held = [s for s in self.carried[chain] if s in rows]
        left_out = tuple(s for s in sorted(self.parked[chain]) if s in rows)
        return self._block(chain, held, rows, left_out, out_of_turn=False)

    def again(self, chain: Chain, sequence: int) -> Block:
        """A parked message that is tried again."""
        return self._block(chain, [sequence], SequenceRange(sequence, sequence), (), out_of_turn=True)

    def remade(self, piece: IntentPiece) -> Block:
        return self.again(piece.chain, piece.rows.first) if piece.out_of_turn else self.block(piece.chain, piece.rows)

    def _block(
        self, chain: Chain, held: list[int], rows: SequenceRange, left_out: tuple[int, ...], *, out_of_turn: bool
    ) -> Block:
        name = SegmentName(chain, 0, SequenceRange(1, self.last[chain]), "0" * 16)
        subjects = [f"{chain}|{s}".encode() for s in held]
        sizes = list(range(1, len(held) + 1))
        batch = PreparedBatch(held, held, subjects, b"", None, pa.array([b""] * len(held), pa.binary()), sizes)
        piece = IntentPiece(name, rows, len(held), left_out, out_of_turn)
        return Block(piece, batch if held else None)

    def messages(self) -> int:
        return sum(len(self.carried[chain]) + len(self.parked[chain]) for chain in CHAINS)


class FakeSource:
    """Gives out random stretches in random turns, as the real one gives out what is decoded."""

    def __init__(self, host: Host, stop: Stop) -> None:
        self.stop = stop
        self.host, self.archive, self.rng = host, host.world.archive, host.world.rng
        self.at: dict[Chain, int] = {}
        self.recall = self

    async def take(self, stop: Stop, seconds: float) -> Rows | None:
        await self.host.world.gates.step(self.host.name)
        blocks = []
        for _ in range(self.rng.randint(1, 4)):
            left = [c for c in CHAINS if self.at.get(c, 1) <= self.archive.last[c]]
            if not left:
                break
            chain = self.rng.choice(left)
            rows = self.archive.stretch(chain, self.at.get(chain, 1), self.rng.randint(0, 12))
            blocks.append(self.archive.block(chain, rows))
            self.at[chain] = rows.last + 1
        parked = self.host.world.server.parked
        for chain, sequence in sorted(parked):
            if sequence < self.at.get(chain, 1) - 13 or (self.rng.random() < 0.5 and not blocks):
                blocks.append(self.archive.again(chain, sequence))
                break
        if not blocks and not parked:
            self.stop.set()  # everything is carried
        return Rows(blocks) if blocks else None

    async def rows(self, intent: Intent, stored: int) -> Rows:
        await self.host.world.gates.step(self.host.name)
        return Rows([self.archive.remade(piece) for piece in intent.pieces])

    def reset(self, positions: Mapping[Chain, int]) -> None:
        self.at = dict(positions)

    def release(self, rows: Rows) -> None: ...
    def closed(self, positions: Mapping[Chain, int]) -> None: ...


class World:
    forgets = True

    def __init__(self, rng: random.Random, kind: type[Delivery] = Delivery, rows: int = 60) -> None:
        self.rng, self.kind, self.trouble = rng, kind, 0.15
        self.gates, self.server, self.archive = Gates(rng), Server(rng), Archive(rng, rows)
        self.server.parked = {(c, s) for c in CHAINS for s in self.archive.parked[c]}
        self.begins = rng.choice([0, 0, 5])
        if self.begins:  # the target was not empty, and an operator took it as it was
            self.server.log = [FOREIGN] * self.begins
            self.server.seen = [self.begins]
            accepted = TargetState(Checkpoint(self.begins, "t0", {}, self.begins))
            self.server.write(to_json("T", accepted), 0)

    def fate(self) -> str:
        if self.rng.random() >= self.trouble:
            return "done"
        return self.rng.choice(["lost", "late", "unanswered"])

    async def instance(self, name: str) -> None:
        """One process: begins again after every error that asks for it; ends when everything is carried."""
        host = Host(name, self)
        while True:
            state = StateStore(host, "key", "T")
            stop = Stop()
            reconciler = Reconciler(TargetErrors("T"), state, host, host, host, 1.0)
            delivery = self.kind("T", state, reconciler, host, FakeSource(host, stop), host, host.mark)
            try:
                await delivery.run(stop)
                return
            except EXPECTED_ENDS:
                await self.gates.step(name)
            except Stopped as stopped:
                self.look_at(stopped)
                await self.gates.step(name)

    def look_at(self, stopped: Stopped) -> None:
        """As an operator: rows are gone that another instance sent without a lease. Raises any other stop."""
        if Finding.AHEAD.value not in stopped.message:
            raise stopped

    async def run(self, faults: int = 400) -> None:
        names = [f"i{n}" for n in range(3)]
        tasks = {name: asyncio.create_task(self.instance(name)) for name in names}
        paused: set[str] = set()
        for _ in range(faults):
            await self.turn(tasks, paused)
        self.trouble = 0.0
        while self.server.writes or self.server.on_the_way:
            self.server.something_arrives()
        for _ in range(20_000):
            await self.attend(tasks)
            if all(task.done() for task in tasks.values()):
                break
            self.gates.release(set())
            await quiet()
        await asyncio.gather(*tasks.values())

    async def turn(self, tasks: dict[str, asyncio.Task[None]], paused: set[str]) -> None:
        roll = self.rng.random()
        if roll < 0.03:
            name = self.rng.choice(sorted(tasks))
            if not tasks[name].done():
                tasks[name].cancel()  # SIGKILL: nothing of its memory is left
                await asyncio.gather(tasks[name], return_exceptions=True)
            tasks[name] = asyncio.create_task(self.instance(name))
        elif roll < 0.08:
            paused ^= {self.rng.choice(sorted(tasks))}
        elif roll < 0.16:
            self.server.something_arrives()
        elif roll < 0.18:
            self.forget()
        else:
            self.gates.release(paused)
        await quiet()
        await self.attend(tasks)
        for task in tasks.values():
            if task.done():
                task.result()

    async def attend(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        """An operator looks."""

    def forget(self) -> None:
        """Messages expire, are consumed or superseded, or the target is purged."""
        server, length = self.server, len(self.server.log)
        server.held_from = self.rng.choice(
            [self.rng.randint(server.held_from, length + 1), server.held_from, length + 1]
        )
        server.gone |= {place for place in range(1, length + 1) if self.rng.random() < 0.2}

    def verdict(self) -> str:
        """What is wrong with the target; empty if each row is there once, in order within its chain, parked
        ones anywhere.
        """
        for chain in CHAINS:
            prefix = f"{chain}|".encode()
            found = [int(row[len(prefix) :]) for row in self.server.log if row.startswith(prefix)]
            parked = self.archive.parked[chain]
            in_turn = [sequence for sequence in found if sequence not in parked]
            if in_turn != self.archive.carried[chain]:
                return f"{chain}: expected {self.archive.carried[chain]}, found {in_turn}"
            if sorted(again := [sequence for sequence in found if sequence in parked]) != sorted(parked):
                return f"{chain}: expected parked {sorted(parked)}, found {again}"
        return ""


async def quiet() -> None:
    """Until every instance waits at its gate again."""
    for _ in range(12):
        await asyncio.sleep(0)


@pytest.mark.parametrize("number", range(60))
async def test_each_row_is_stored_once_and_in_order_whatever_happens(number: int) -> None:
    world = World(seeded())
    await world.run()
    assert world.verdict() == ""
    assert len(world.server.log) == world.begins + world.archive.messages()


class PurgedWorld(World):
    """A target that keeps everything, and is purged up to sequences beyond its end. An operator who knows
    what was stored decides each stop, with all instances stopped.
    """

    forgets, purges = False, 3
    stopped: Stopped | None = None

    def look_at(self, stopped: Stopped) -> None:
        self.stopped = stopped

    def forget(self) -> None:
        if self.purges and self.rng.random() < 0.3:
            self.purges -= 1
            self.server.log += [NOTHING] * self.rng.randint(0, 20)
            self.server.held_from = len(self.server.log) + 1
            self.server.seen.append(len(self.server.log))

    async def attend(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        if self.stopped is None:
            return
        assert self.stopped.code in ("E-TARGET-SHARED", "E-TARGET-UNREAD", "E-TARGET-NOT-EMPTY")
        self.stopped = None
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        server, host = self.server, Host("operator", self)
        server.on_the_way.clear()
        server.writes.clear()
        last = len(server.log)
        state = from_json("T", server.value) if server.revision else TargetState(Checkpoint(0, "t0"))
        if state.intent is None:
            state = replace(state, checkpoint=replace(state.checkpoint, target_sequence=last, begins=last))
        else:
            state = count_stored(state, host.reading(last), self.stored(state.intent)).after
        server.write(to_json("T", state), server.revision)
        for name in tasks:
            tasks[name] = asyncio.create_task(self.instance(name))

    def stored(self, intent: Intent) -> int:
        """How many rows of the intent were stored."""
        rows = Rows([self.archive.remade(piece) for piece in intent.pieces])
        found = {*self.server.log}
        return sum(subject in found for subject, _, _ in rows.messages(0, rows.count))


@pytest.mark.parametrize("number", range(30))
async def test_a_purge_beyond_the_end_loses_and_repeats_nothing(number: int) -> None:
    world = PurgedWorld(seeded())
    await world.run()
    assert world.verdict() == ""


async def test_the_simulation_finds_the_rows_that_a_purge_passes_off_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingress.verdict.verdict._unread", lambda *_: None)
    rng = seeded()
    for _ in range(30):
        world = PurgedWorld(random.Random(rng.random()))
        await world.run()
        if world.verdict():
            return
    pytest.fail("30 runs without a message lost: the simulation is too tame")


class ReplacingDelivery(Delivery):
    """The mistake that the protocol exists to avoid: an open intent is thrown away."""

    def _adopt(self, stored: Stored) -> None:
        state = stored.state
        if state is not None and state.intent is not None:
            kept = replace(state.checkpoint, target_sequence=len(self._store._bucket.world.server.log))
            stored = Stored(TargetState(kept), stored.revision)
        super()._adopt(stored)


async def test_the_simulation_finds_the_harm_of_replacing_an_open_intent() -> None:
    rng = seeded()
    for _ in range(30):
        world = World(random.Random(rng.random()), ReplacingDelivery)
        try:
            await world.run()
        except Exception:  # stopped by a verdict: noticed too, but only sometimes
            return
        if world.verdict():
            return
    pytest.fail("30 runs without a message lost or repeated: the simulation is too tame")
