"""Components shared by the workers of a process, components of one partition, and the tuning that no user sets."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from typing import TypeVar

from common.archive.documents import ChainStore
from common.archive.heartbeats import HEARTBEAT_INTERVAL_S
from common.archive.store import SegmentStore
from common.clock import Clock
from common.nats.client import FloeClient
from common.nats.kv import KeyValue
from common.objects.port import ObjectStore
from common.service.process import ThreadPool
from egress.memory import MemoryBudget
from egress.partition import Partition
from egress.report import FeedReport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Limits of pull requests.

    `batch`: greatest number of messages outstanding; half of it is requested again once half is used up. In seconds:
    `heartbeat` between idle heartbeats, `expires` until a request ends, `inactive` until the server drops an idle
    consumer.
    """

    batch: int = 10_000
    heartbeat: float = 5.0
    expires: float = 60.0
    inactive: float = 300.0


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals, in seconds.

    `tick`: between two checks of the clock. `check`: between two checks that the stream is the same. `hand_over`:
    longest time to keep a lease that others wait for, for the sake of the open segment. `advance`: between two checks
    for silent values. `idle`: between two queries for the state of a stream without new messages. `stalled`:
    without progress while messages wait, until a chain counts as stalled. `walk`, `walk_retry`: from a walk, or a
    failed one, to the next. `newest`: between two checks for the newest segment. `page`: between two pages of a walk.
    `alive`: between two heartbeats. `reexamine`: until a stopped chain is examined again. `flush`: between two checks
    for flush requests. `consumers_capture`: between two captures of consumers of which only positions differ.
    """

    tick: float = 0.5
    check: float = 30.0
    hand_over: float = 60.0
    advance: float = 1.0
    idle: float = 5.0
    stalled: float = 60.0
    walk: float = 6 * 3600.0
    walk_retry: float = 60.0
    newest: float = 300.0
    page: float = 0.1
    alive: float = HEARTBEAT_INTERVAL_S
    reexamine: float = 30.0
    flush: float = 1.0
    consumers_capture: float = 300.0


@dataclass(frozen=True, slots=True)
class ConfirmSettings:
    """Confirmation of an answer with consequences: the same one `times` times, `span` seconds from first to last.

    It fails after `attempts` without agreement.
    """

    times: int = 3
    span: float = 20.0
    attempts: int = 12


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tuning that no user sets, and tests shorten."""

    pulling: PullSettings = field(default_factory=PullSettings)
    intervals: Intervals = field(default_factory=Intervals)
    confirming: ConfirmSettings = field(default_factory=ConfirmSettings)


@dataclass(frozen=True, slots=True)
class Pools:
    """Threads of one partition. `io`: for a put, a check, a snapshot, a walk and a capture at once. `encoder`: one
    thread, so that pieces stay in order and only one heap keeps the memory that encoding has freed.
    """

    io: ThreadPool
    encoder: ThreadPool

    async def idle(self) -> None:
        """Wait until no call is running, including calls with a cancelled await."""
        await self.io.wait_idle()
        await self.encoder.wait_idle()

    def close(self) -> None:
        self.io.close()
        self.encoder.close()


@dataclass(frozen=True, slots=True)
class EgressDeps:
    """Components shared by the workers of one process.

    `connect` opens a fresh connection to the stream's server; `writer` is recorded in footers.
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

    async def with_fresh_client(self, query: Callable[[FloeClient], Awaitable[T]]) -> T:
        async with aclosing(await self.connect()) as client:
            return await query(client)

    def for_partition(self, partition: Partition, report: FeedReport, pools: Pools) -> PartitionDeps:
        shared = {each.name: getattr(self, each.name) for each in fields(EgressDeps)}
        return PartitionDeps(**shared, partition=partition, report=report, pools=pools)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDeps(EgressDeps):
    """Components for the work on one partition."""

    partition: Partition
    report: FeedReport
    pools: Pools
