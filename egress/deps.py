"""What the workers of one process share, what those of one partition do, and what no user tunes."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from typing import TypeVar

from common.clock import Clock
from common.jetstream.client import FloeClient
from common.jetstream.kv import KeyValue
from common.objects.port import ObjectStore
from common.segments.alive import EVERY
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.service.process import Threads
from egress.memory import MemoryBudget
from egress.partition import Partition
from egress.report import FeedReport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pulling:
    """How messages are requested.

    `batch`: greatest number of messages outstanding; half of it is requested again when half is used up. `heartbeat`,
    `expires`, `inactive`: seconds between idle heartbeats, until a request ends, and until the server drops an idle
    consumer.
    """

    batch: int = 10_000
    heartbeat: float = 5.0
    expires: float = 60.0
    inactive: float = 300.0


@dataclass(frozen=True, slots=True)
class EgressTuning:
    """Seconds: how often time is looked at, and between two checks that the stream is the same.

    `hand_over`: how long a lease that others wait for may be kept for the sake of the open segment. `advance`:
    between two looks at which values have fallen silent; `idle`: between two questions whether nothing comes because
    there is nothing. `stalled`: without progress while messages wait, until a chain counts as stalled. `alive`:
    between two signs of life. `reexamine`: until a stopped chain is looked at again.
    `flush`: between two looks whether a flush is asked for. `captured`: between two captures of consumers of which only
    positions differ. `newest`: between two looks for the newest segment.
    """

    tick: float = 0.5
    check: float = 30.0
    hand_over: float = 60.0
    advance: float = 1.0
    idle: float = 5.0
    stalled: float = 60.0
    walk: float = 6 * 3600.0
    walk_again: float = 60.0
    newest: float = 300.0
    page: float = 0.1
    alive: float = EVERY
    reexamine: float = 30.0
    flush: float = 1.0
    captured: float = 300.0


@dataclass(frozen=True, slots=True)
class Confirming:
    """How an answer with consequences is confirmed: the same `times`, `span` seconds from first to last.

    After `attempts` without agreement it is given up.
    """

    times: int = 3
    span: float = 20.0
    attempts: int = 12


@dataclass(frozen=True, slots=True)
class Tuning:
    """What no user tunes, and tests shorten."""

    pulling: Pulling = field(default_factory=Pulling)
    pace: EgressTuning = field(default_factory=EgressTuning)
    confirming: Confirming = field(default_factory=Confirming)


@dataclass(frozen=True, slots=True)
class Pools:
    """The threads of one feed. `io`: one puts, one looks, one writes a snapshot, one walks, one captures. `encoder`:
    one thread, so that pieces stay in order and only one heap keeps what encoding has freed.
    """

    io: Threads
    encoder: Threads

    async def idle(self) -> None:
        """Returns when no call is running, including calls whose await was cancelled."""
        await self.io.idle()
        await self.encoder.idle()

    def close(self) -> None:
        self.io.close()
        self.encoder.close()


@dataclass(frozen=True, slots=True)
class EgressDeps:
    """The components.

    `connect` opens a fresh connection to the stream's server; `writer` is named in footers.
    """

    client: FloeClient
    connect: Callable[[], Awaitable[FloeClient]]
    state: KeyValue
    objects: ObjectStore
    store: SegmentStore
    chains: ChainStore
    budget: MemoryBudget
    clock: Clock
    rng: random.Random
    writer: str
    tuning: Tuning = field(default_factory=Tuning)

    async def freshly(self, ask: Callable[[FloeClient], Awaitable[T]]) -> T:
        async with aclosing(await self.connect()) as client:
            return await ask(client)

    def of(self, partition: Partition, report: FeedReport, pools: Pools) -> PartitionDeps:
        shared = {each.name: getattr(self, each.name) for each in fields(EgressDeps)}
        return PartitionDeps(**shared, partition=partition, report=report, pools=pools)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDeps(EgressDeps):
    """The components of whatever works on one partition."""

    partition: Partition
    report: FeedReport
    pools: Pools
