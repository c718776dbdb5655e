"""Components shared by the workers of a process, of one partition and of a command; and the tuning that no user sets.

A command ends by itself: an unreachable server or store ends it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ParamSpec, TypeVar

from common.archive.catalog import parse_chain_name
from common.archive.documents import ChainStore
from common.archive.heartbeats import HEARTBEAT_INTERVAL_S
from common.archive.store import SegmentStore
from common.chain import Chain
from common.clock import Clock, SystemClock
from common.errors import Unavailable, UsageError
from common.metrics import version
from common.nats.client import FloeClient, connect
from common.nats.kv import BucketClaims, KeyValue, optional_state
from common.nats.lease import Lease, Leases, format_owner, new_owner, optional_leases
from common.objects.open import VIEW_TIMEOUT_S, open_objects
from common.objects.port import ObjectStore
from common.observe.monitor import Health
from common.open import open_chains, open_store
from common.service.process import ThreadPool, wait_ended
from common.settings.egress import FeedSettings
from common.settings.root import Settings
from common.tasks import Stop, cancel, raise_fatal, run_until_stopped, spawn
from egress.memory import MemoryBudget
from egress.partition import Partition, lease_key
from egress.report import FeedReport

P = ParamSpec("P")
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
    `account`: between two listings of the account's streams.
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
    account: float = 30.0


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


IO_THREADS, LARGE_PUT_THREADS, ENCODER_THREADS = 24, 8, 8
PROCESS_THREADS = IO_THREADS + LARGE_PUT_THREADS + ENCODER_THREADS  # with the monitor's and some others at most 64
FURTHER_CALLS = 6  # of feeds that have a running call of the store


class SharedThreads:
    """`workers` threads, which each feed uses through an executor of its own. For the event loop only.

    A call of the store may hang for minutes, on a file system for ever. So the feed with the fewest running calls comes
    first, and at most `further` threads, about, run a second call of a feed, or a third: calls that hang hold these,
    and one thread for each feed.
    """

    def __init__(self, name: str, workers: int, further: int = 0) -> None:
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._free, self._spare = workers, workers - further
        self._waiting: dict[FeedExecutor, None] = {}  # feeds with calls that wait, by their turn

    def start_calls(self, feed: FeedExecutor) -> None:
        """Start waiting calls while there are threads. Call it after a call of `feed` came, and after one ended."""
        self._waiting.setdefault(feed)
        while self._free and self._waiting:
            chosen = min(self._waiting, key=lambda each: each.running)
            if chosen.running and self._free <= self._spare:
                return
            del self._waiting[chosen]
            if chosen.waiting:
                self._start(chosen, *chosen.waiting.popleft())
                self._waiting[chosen] = None

    def _start(self, feed: FeedExecutor, call: Future[Any], work: Callable[[], Any]) -> None:
        if not call.cancelled():
            self._free -= 1
            feed.running += 1
            wait_ended(call).add_done_callback(lambda _: self._end(feed))
            self._threads.submit(_perform, call, work)

    def _end(self, feed: FeedExecutor) -> None:
        self._free += 1
        feed.running -= 1
        self.start_calls(feed)

    def close(self) -> None:
        """Take no more calls; do not wait for running ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class FeedExecutor(Executor):
    """Executor of one feed over shared threads. A call whose future is cancelled before its turn is never called."""

    def __init__(self, shared: SharedThreads) -> None:
        self._shared, self.running = shared, 0
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        call: Future[T] = Future()
        self.waiting.append((call, partial(fn, *args, **kwargs)))
        self._shared.start_calls(self)
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Drop the calls that wait for a thread, if `cancel_futures`. Never waits for running ones."""
        while cancel_futures and self.waiting:
            self.waiting.popleft()[0].cancel()


def _perform(call: Future[Any], work: Callable[[], Any]) -> None:
    if call.set_running_or_notify_cancel():
        try:
            call.set_result(work())
        except BaseException as error:
            call.set_exception(error)


LARGE_PUT_BYTES = 8 * 2**20  # stored bytes of a segment, from which its put may take long over a slow line


@dataclass(frozen=True, slots=True)
class Pools:
    """Threads for one partition. `io`: for a put, a check, a snapshot, a walk and a capture. `large_puts`: for segments
    from LARGE_PUT_BYTES on, so that others need not wait for them. `encoder`: one call at a time, so that pieces stay
    in order.
    """

    io: ThreadPool
    large_puts: ThreadPool
    encoder: ThreadPool

    async def idle(self) -> None:
        """Wait until no call is running, including calls with a cancelled await."""
        for each in (self.io, self.large_puts, self.encoder):
            await each.wait_idle()

    def close(self) -> None:
        for each in (self.io, self.large_puts, self.encoder):
            each.close()


class ProcessThreads:
    """Threads of all partitions of a process, few enough for hundreds of feeds."""

    def __init__(self) -> None:
        io = SharedThreads("egress", IO_THREADS, FURTHER_CALLS)
        self._shared = io, SharedThreads("large-put", LARGE_PUT_THREADS), SharedThreads("encode", ENCODER_THREADS)

    def pools(self) -> Pools:
        """Return the pools of one partition, over these threads."""
        return Pools(*(ThreadPool(executor=FeedExecutor(each)) for each in self._shared))

    def close(self) -> None:
        for each in self._shared:
            each.close()


PARALLEL_STARTS = 32
START_TURN_S = 5.0  # seconds


class StartTurns:
    """Turns of partitions that begin to read, at most PARALLEL_STARTS at once: if hundreds began together, NATS and the
    store would answer none of them in time. A turn ends after START_TURN_S, so one that hangs hardly delays the others.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(PARALLEL_STARTS)

    @asynccontextmanager
    async def turn(self, stop: Stop) -> AsyncIterator[Callable[[], None]]:
        """Wait for a turn, or until `stop` is set; yield a function that ends the turn before the block does."""
        with ExitStack() as turn:
            if await run_until_stopped(stop, self._free.acquire()) is not None:
                turn.callback(self._free.release)
                turn.callback(asyncio.get_running_loop().call_later(START_TURN_S, turn.close).cancel)
            yield turn.close


@dataclass(frozen=True, slots=True)
class EgressDeps:
    """Components shared by the workers of one process.

    `connect` opens a fresh connection to the stream's server; `writer` is recorded in footers.
    """

    client: FloeClient
    connect: Callable[[], Awaitable[FloeClient]]
    state: KeyValue
    store: SegmentStore
    chains: ChainStore
    budget: MemoryBudget
    clock: Clock
    rng: random.Random
    writer: str
    tuning: Tuning = field(default_factory=Tuning)
    starts: StartTurns = field(default_factory=StartTurns)

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


@dataclass(frozen=True, slots=True)
class CommandContext:
    """Components that a command works with; its reports are not published."""

    settings: Settings
    deps: EgressDeps
    leases: Leases
    pools: Pools

    async def hold_lease(self, stack: AsyncExitStack, chain: Chain, *, waits: bool = False) -> Lease:
        """Hold the lease of a partition until `stack` ends. `waits`: until that of a killed instance has expired.

        Raises Unavailable if another instance holds it.
        """
        key, clock = lease_key(chain), self.deps.clock
        until = clock.monotonic() + (self.leases.ttl * 1.5 if waits else 0.0)
        while (lease := await self.leases.acquire(key)) is None and clock.monotonic() < until:
            await clock.sleep(min(0.5, self.leases.ttl / 10))
        if lease is None:
            holder = format_owner(await self.leases.get_owner(key) or "another instance")
            raise Unavailable(
                f"the lease of partition {chain.partition} of feed {chain.feed} is held by {holder}",
                hint="stop egress on all hosts, then try again; nothing was changed",
                code="E-LEASE",
            )
        stack.push_async_callback(lease.release)
        stack.push_async_callback(cancel, spawn(lease.run_renewals(), raise_fatal, name=f"lease {chain}"))
        return lease

    def deps_of(self, partition: Partition) -> PartitionDeps:
        report = FeedReport(partition.chain, partition.stream, Health(self.deps.clock))
        return self.deps.for_partition(partition, report, self.pools)


async def connect_egress(settings: Settings, name: str, clock: Clock) -> FloeClient:
    """Connect to the NATS server of egress. Raises Unavailable, Refused."""
    title = f"floe egress {settings.site} {name}"
    return await connect(settings.nats_for("egress"), name=title, clock=clock)


def make_deps(
    settings: Settings, tuning: Tuning, objects: ObjectStore, client: FloeClient, state: KeyValue, name: str
) -> EgressDeps:
    return EgressDeps(
        client=client,
        connect=partial(connect_egress, settings, name, client.clock),
        state=state,
        store=open_store(settings, objects),
        chains=open_chains(settings, objects, BucketClaims(state)),
        budget=MemoryBudget(settings.egress.memory_limit),
        clock=client.clock,
        rng=random.SystemRandom(),
        writer=f"floe {version()}",
        tuning=tuning,
    )


@asynccontextmanager
async def open_context(settings: Settings, *, is_view: bool = False) -> AsyncIterator[CommandContext]:
    """Open the components of a command. `is_view`: a person waits for the output, so a silent store fails after some
    ten seconds.

    Raises Unavailable, Refused, ConfigError.
    """
    clock, egress = SystemClock(), settings.egress
    client = await connect_egress(settings, "command", clock)
    io = ThreadPool("egress-command", 2)
    pools = Pools(io, io, ThreadPool("encode-command", 1))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.aclose)
        stack.callback(pools.close)
        leases = optional_leases(client, egress, new_owner(settings.instance), clock)
        state = optional_state(client, egress)
        objects = open_objects(settings.store, timeout=VIEW_TIMEOUT_S if is_view else None, creates=not is_view)
        deps = make_deps(settings, Tuning(), objects, client, state, "command")
        stack.callback(deps.store.close)
        yield CommandContext(settings, deps, leases, pools)


def parse_feed(settings: Settings, text: str) -> tuple[str, int | None, int | None]:
    """Return the feed of this site named by `FEED` or `SITE/FEED[/INCARNATION[/PARTITION]]`, and the numbers, None if
    they are absent. Raises UsageError for another site, and for a text that names no chain.
    """
    if "/" not in text:  # no feed name contains it
        return text, None, None
    site, feed, incarnation, partition = parse_chain_name(text)
    if site != settings.site:
        raise UsageError(f"{text}: expected a feed of site {settings.site}, as in the configuration")
    return feed or "", incarnation, partition


def find_feed(settings: Settings, name: str) -> FeedSettings:
    """Return the settings of a feed. Raises UsageError if the configuration has no such feed."""
    if (found := settings.egress.feed_named(name)) is not None:
        return found
    feeds = [each.label for each in settings.egress.feeds_]
    where = f"expected one of {', '.join(feeds)}" if feeds else "the configuration has no feed; use the site's file"
    raise UsageError(f"feed {name or repr(name)}: {where}")
