"""Actors of a world: services of the product, publishers with their own log, a foreign writer, compaction."""

import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.archive.documents import ChainStore
from common.archive.keys import Layout
from common.archive.store import SegmentStore
from common.clock import SystemClock
from common.errors import OutcomeUnknown, Unavailable
from common.observe.monitor import Health
from common.service.process import ThreadPool
from common.settings.root import Settings
from common.tasks import Stop
from compaction.retention import Retention, RetentionRule
from compaction.run import Compaction, LocalRunner, Selection
from egress.deps import Intervals, PullSettings, Tuning
from egress.service import EgressService
from ingress.service import Controller
from tests.sim.auditor import Broken, PublisherLog
from tests.sim.hardships import HOSTILE_SITE
from tests.sim.nats import SimNats
from tests.sim.store import SimObjects
from tests.sim.world import Process, World

RESTART = 2.0  # seconds until a supervisor restarts a process that ended by itself
CLEANS_EVERY = 8.0  # seconds between two runs of compaction
# Checks that are minutes apart in production happen within a world too.
TUNING = Tuning(
    PullSettings(heartbeat=1.5), Intervals(check=10.0, newest=20.0, walk=60.0, walk_retry=20.0, reexamine=10.0)
)
SELDOM = Tuning(intervals=Intervals(check=30.0, newest=100.0, walk=100.0, walk_retry=20.0, reexamine=10.0))
WATCHING = replace(TUNING, intervals=replace(TUNING.intervals, account=5.0))
PASSING = (Unavailable, OutcomeUnknown)  # errors by which a process may end


class Member:
    """One service. Its supervisor starts it after each end or kill."""

    def __init__(self, world: World, name: str, main: Callable[[Health], Coroutine[Any, Any, Any]]) -> None:
        self.world, self.name, self._main, self.ended = world, name, main, 0
        self.is_gone = False  # for ever
        self.health = Health(SystemClock())
        self.process: Process | None = None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.alive

    def start(self) -> None:
        if not (self.is_alive or self.is_gone):
            self.health = Health(SystemClock())
            self.process = self.world.spawn(self.name, lambda: self._main(self.health))

    def look(self) -> None:
        """Start it again if it has ended. Raises Broken if it ended by an error that is not transient."""
        if (process := self.process) is None or not process.alive or not process.task.done():
            return
        error = process.task.exception()
        if not isinstance(error, PASSING):
            raise Broken(f"{self.name} ended: {type(error).__name__} {error}") from error
        self.ended += 1
        process.kill()
        self.world.at(RESTART, self.start)

    def state(self) -> str:
        """Its readiness, as one line."""
        return f"{self.name}: {'; '.join(self.health.problems()) or 'ready'}" if self.is_alive else f"{self.name}: dead"


def egress(world: World, name: str, settings: Settings, objects: SimObjects, tuning: Tuning = TUNING) -> Member:
    """One process of egress."""

    async def main(health: Health) -> None:
        await EgressService(settings, tuning, SystemClock(), health, Stop(), objects).run()

    return Member(world, name, main)


def ingress(world: World, name: str, settings: Callable[[], Settings], objects: SimObjects, folder: Path) -> Member:
    """One process of ingress, with the `settings` of the time at which it starts."""

    async def main(health: Health) -> None:
        found, clock = settings(), SystemClock()
        layout = Layout(found.store.prefix)
        store = SegmentStore(objects, layout, spool_dir=folder)
        await Controller(found, store, ChainStore(objects, layout), health, clock).run(Stop())

    return Member(world, name, main)


@dataclass
class Cleaning:
    """Results of the runs of compaction, only for the numbers of a run.

    `expected`: the codes of failures that are right in this world. E-FORK: the source may be set back, and an egress
    instance that was paused in a put may put messages that the source has lost. E-LATE-ROWS: the source drops messages
    by a limit, and such an instance may put some of them after another one has found them gone.
    """

    expected: tuple[str, ...] = ()
    runs: int = 0
    merged: int = 0
    deleted: int = 0
    expired: int = 0


def compaction(
    world: World, name: str, settings: Settings, objects: SimObjects, folder: Path, rule: RetentionRule, done: Cleaning
) -> Member:
    """A process that runs compaction repeatedly, with retention by `rule`."""

    def once() -> None:
        store = SegmentStore(objects, Layout(settings.store.prefix), spool_dir=folder)
        chosen = settings.compaction
        sources = {e.stream: e.source_names for e in settings.ingress.targets}
        retention = Retention(store, lambda _site, _feed: rule, sources)
        try:
            run = Compaction(store, chosen.levels, chosen.delete_grace, LocalRunner(store), prove_deletions=True)
            report = run.run(Selection(), retention if rule.is_set else None)
        except PASSING as error:
            world.note(f"{name} gives up: {error.code}")
            return
        finally:
            store.close()
        for each in report.failures:
            is_expected = each.line.startswith(tuple(f"error[{code}]" for code in done.expected))
            is_hostile = each.chain is not None and each.chain.site == HOSTILE_SITE
            if not (each.is_stale or is_expected or is_hostile or each.exit_code == Unavailable.exit_code):
                raise Broken(f"{name} finds the archive damaged: {each.line.splitlines()[0]}")
        done.runs, done.merged = done.runs + 1, done.merged + len(report.merged)
        done.deleted, done.expired = done.deleted + len(report.deleted), done.expired + len(report.retention.expired)

    async def main(_health: Health) -> None:
        clock, threads = SystemClock(), ThreadPool("compaction", 1)
        while True:
            await clock.sleep(CLEANS_EVERY)
            await threads.run(once)

    return Member(world, name, main)


MESSAGE_ID = b"Nats-Msg-Id"  # replaced by one that is new
# Headers of publishers: none, plain, repeated and odd values, and headers that would act at a server.
HEADERS: tuple[bytes | None, ...] = (
    None,
    None,
    b"NATS/1.0\r\nContent-Type: text/plain\r\n\r\n",
    b"NATS/1.0\r\nX-N: 1\r\nx-n:  2\r\nX-N: 1\r\n\r\n",
    b"NATS/1.0\r\nNats-Expected-Stream: ORDERS\r\n\r\n",
    MESSAGE_ID,
    b"NATS/1.0\r\nFloe-Source: eu ORDERS 0000 0 1 1\r\nEmpty:\r\n\r\n",
)


class Publishers:
    """Publishers that send bursts of messages to the source and log each of them, and if it was acknowledged.

    A publisher does not retry a message without an acknowledgement: it may arrive or not.
    """

    def __init__(self, nats: SimNats, log: PublisherLog, stream: str, parts: int, total: int, seconds: float) -> None:
        self._nats, self.log, self._stream, self._parts, self.total = nats, log, stream, parts, total
        self._world, self._rng = nats.world, nats.world.chance("publishers")
        self._rate, self._count = total / 10 / seconds, 0
        self.may_begin: Callable[[], bool] = lambda: True

    @property
    def is_done(self) -> bool:
        return self._count >= self.total

    def begin(self) -> None:
        if not (self._nats.is_up and self.may_begin()):
            self._world.at(0.5, self.begin)
        elif not self.is_done:
            for _ in range(self._rng.choice([1, 1, 5, 30])):
                part = self._rng.randrange(self._parts)
                self._count += 1
                self.publish(self._nats, self._stream, part, f"partition {part}")
            self._world.at(self._rng.expovariate(self._rate), self.begin)

    def publish(
        self, nats: SimNats, stream: str, part: int, chain: str, choices: Sequence[bytes | None] = HEADERS
    ) -> None:
        rng, subject = self._rng, f"{stream}.{part}.{self._rng.randrange(5)}".encode()
        headers = rng.choice(choices)
        if headers is MESSAGE_ID:
            headers = b"NATS/1.0\r\nNats-Msg-Id: %d\r\n\r\n" % len(self.log.all)
        publication = self.log.add(chain, subject, headers, rng.randbytes(rng.choice([0, 10, 100])))
        nats.publish(subject, b"", headers, publication.payload)
        # The answer may be lost, as other answers of the server.
        publication.is_acknowledged = publication.sequence > 0 and rng.random() >= nats.lost_answers


class ForeignWriter:
    """A writer of foreign messages that publishes into the target now and then."""

    def __init__(self, nats: SimNats, subject: bytes, every: float) -> None:
        self._nats, self._subject, self._every, self.is_over = nats, subject, every, False
        self._rng: random.Random = nats.world.chance("foreign")

    def begin(self) -> None:
        if self.is_over:
            return
        for _ in range(self._rng.choice([1, 1, 3])):
            self.write()
        self._nats.world.at(self._rng.expovariate(1 / self._every), self.begin)

    def write(self) -> None:
        """Publish one message if the server is up."""
        if self._nats.is_up:
            self._nats.publish(self._subject, b"", None, b"foreign %d" % self._rng.randrange(1 << 30))
