"""Repartition of a feed: closes its incarnation, and opens the next of the same history, cut as configured.

    take the leases of all partitions, old and new
    read every old partition up to the end of the furthest one, with its old filter
    create the durables of the new ones, if the stream keeps messages only for consumers
    put stream.json of the next incarnation, which is valid from then on
    put chain.json of each new partition

Every step may be repeated. After a crash before `stream.json` the old incarnation remains for now; after a crash later,
the next run, or the next start of egress, completes the work.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from common.archive.documents import ChainDocument, ChainStart, StreamDocument
from common.chain import Chain
from common.errors import LeaseLost, Stopped, Unavailable, UsageError
from common.failpoints import failpoint
from common.logs import get_logger
from common.nats.api import INTEREST, WORK_QUEUE, StreamInfo, consumer_names, delete_consumer, stream_info
from common.nats.lease import Lease
from common.settings.egress import FeedSettings, PartitionSettings
from common.tasks import Stop
from egress.archive import Archive
from egress.consumers import WantedMessages, create_durable
from egress.deps import CommandContext
from egress.incarnations import Incarnation, Incarnations, configured_layout, newest_incarnation, partition_layout
from egress.partition import Partition, accounted_until, partitions_of
from egress.report import NewlyUnmatched, find_unmatched
from egress.session import ReadContext
from egress.worker import Worker

log = get_logger(__name__)


def settings_of(layout: Sequence[ChainDocument], settings: FeedSettings) -> FeedSettings:
    filters = tuple(each.filters[0] if each.filters else "" for each in layout)
    partitions, single = (filters, "") if len(filters) > 1 else (PartitionSettings(), filters[0])
    return settings.model_copy(update={"partitions": partitions, "filter_subject": single, "relay": layout[0].relay})


@dataclass(frozen=True, slots=True)
class RepartitionPlan:
    """Plan of a repartition. `current`: the open incarnation. `old`, `new`: its partitions, as they are and as
    configured. `reached`: the sequence that each old one is accounted for until. `is_done`: the incarnation has the
    configured partitions already.
    """

    current: Chain
    old: Sequence[Partition]
    new: Sequence[Partition]
    reached: Sequence[int]
    is_done: bool

    @property
    def end(self) -> int:
        return max(self.reached)

    @property
    def remaining(self) -> dict[int, int]:
        return {number: self.end - until for number, until in enumerate(self.reached)}


@dataclass(frozen=True, slots=True)
class RepartitionResult:
    """Next incarnation, the first sequence of its partitions, and the ends of the partitions before."""

    chain: Chain
    first: int
    ends: dict[int, int]


class Repartition:
    """Division of one feed into new partitions."""

    def __init__(self, context: CommandContext, settings: FeedSettings) -> None:
        self._context, self._settings, self._site = context, settings, context.settings.site
        self._new = partitions_of(self._site, settings)

    async def plan(self) -> RepartitionPlan:
        """Return the plan. Raises UsageError for a feed that has not begun, Stopped for a broken one."""
        deps, io = self._context.deps, self._context.pools.io
        if (number := await io.run(newest_incarnation, deps.chains, self._new[0].chain)) is None:
            raise UsageError(f"feed {self._settings.name} has not begun: it will begin with the configured partitions")
        chain = self._new[0].chain.with_incarnation(number)
        layout = await io.run(self._read_layout, chain)
        old = partitions_of(self._site, settings_of(layout, self._settings))
        reached = [await self._reached(each, number) for each in old]
        is_done = partition_layout(layout) == partition_layout(configured_layout(self._new[0]))
        return RepartitionPlan(chain, old, self._new, reached, is_done)

    def _read_layout(self, chain: Chain) -> Sequence[ChainDocument]:
        chains = self._context.deps.chains
        stream, document = chains.read_stream(chain), chains.read_chain(chain)
        if stream is None or not (stream.chains or document):
            raise Stopped(
                f"{chain}: expected stream.json and chain.json, found at most one of them",
                hint="restore the missing object, or start egress with its former configuration: it completes them",
                code="E-HISTORY",
            )
        return stream.chains or ([document] if document else [])

    async def _reached(self, partition: Partition, number: int) -> int:
        current = await self._load(partition)
        if current.chain.incarnation != number:
            raise Unavailable(f"{current.chain}: the feed has a newer incarnation", hint="stop egress, then try again")
        archive = await Archive.open(current, self._context.deps_of(partition))
        await archive.load()
        return accounted_until(archive.first, archive.end)

    async def _load(self, partition: Partition) -> Incarnation:
        if (found := await Incarnations(self._context.deps_of(partition)).load()) is None:
            raise UsageError(f"feed {self._settings.name} has not begun: it will begin with the configured partitions")
        return found

    async def left_out(self, plan: RepartitionPlan) -> list[NewlyUnmatched]:
        client, stream = self._context.deps.client, self._settings.stream
        filters = [partition.filter_subject for partition in plan.new]
        if plan.is_done or not all(filters) or await stream_info(client, stream) is None:
            return []
        found = []
        for partition in plan.old:
            within = partition.filter_subject or ">"
            unmatched = await find_unmatched(client, stream, filters, self._context.pools.io, within=within)
            found.append(NewlyUnmatched(partition.filter_subject, unmatched))
        return [each for each in found if each.found.messages]

    # Execution

    async def run(self, stop: Stop) -> RepartitionResult:
        """Carry out the plan, or complete it. Raises Unavailable if one of the leases is held: nothing is done."""
        await self._context.deps.state.ensure()
        plan = await self.plan()
        if plan.is_done:
            return await self._complete()
        async with self._leases(plan) as leases:
            plan = await self.plan()  # final, now that the leases are held
            if not plan.is_done:
                await self._close(plan, leases, stop)
            return await self._complete()

    @asynccontextmanager
    async def _leases(self, plan: RepartitionPlan) -> AsyncIterator[list[Lease]]:
        longer = max(plan.old, plan.new, key=len)
        async with AsyncExitStack() as stack:
            yield [await self._context.hold_lease(stack, partition.chain) for partition in longer]
            await self._context.pools.idle()

    async def _close(self, plan: RepartitionPlan, leases: Sequence[Lease], stop: Stop) -> None:
        held = zip(plan.old, leases, strict=False)
        ends = {each.number: await self._catch_up(each, plan.end, lease, stop) for each, lease in held}
        if (info := await stream_info(self._context.deps.client, self._settings.stream)) is None:
            raise Unavailable(f"stream {self._settings.stream} does not exist any more")
        layout = ChainStart.of(configured_layout(self._new[0], plan.end + 1))
        stream_first = max(1, info.first_sequence)
        document = StreamDocument(info.config, info.created, ends, layout, continues=True, stream_first=stream_first)
        await self._make_durables(info, plan.end + 1)
        failpoint("repartition.before_stream")
        if not all(lease.is_usable() for lease in leases):
            raise LeaseLost(f"feed {self._settings.name}: a lease was lost; nothing was changed, try again")
        await Incarnations(self._context.deps_of(self._new[0])).open_next(plan.current.next_incarnation(), document)
        failpoint("repartition.after_stream")
        await self._drop_durables(info, plan.old)

    async def _make_durables(self, info: StreamInfo, first: int) -> None:
        """Create the new durables before the old ones are deleted: an interest stream keeps messages only for
        consumers.
        """
        if info.config.get("retention") == INTEREST:
            for partition in self._new:
                await create_durable(self._context.deps.client, WantedMessages(partition, INTEREST, first))

    async def _drop_durables(self, info: StreamInfo, old: Sequence[Partition]) -> None:
        """Delete the old durables, before new ones are made: a work queue allows one consumer for each subject."""
        if info.config.get("retention") == WORK_QUEUE:
            client = self._context.deps.client
            for name in await consumer_names(client, info.name):
                if any(WantedMessages(partition, WORK_QUEUE).is_own_durable(name) for partition in old):
                    await delete_consumer(client, info.name, name)

    async def _complete(self) -> RepartitionResult:
        found = []
        for partition in self._new:
            found.append(await self._load(partition))
            failpoint("repartition.after_chain")
        first, ends = found[0].document.first, dict(found[0].stream.previous or {})
        log.info("feed divided", action="feed_divided", first=first, ends=ends, **found[0].chain.log_context())
        return RepartitionResult(found[0].chain, first, ends)

    # One old partition

    async def _catch_up(self, partition: Partition, last: int, lease: Lease, stop: Stop) -> int:
        """Read up to `last`, as `Worker.read_up_to`. Return the end of coverage (0: nothing is covered)."""
        worker = Worker(self._context.deps_of(partition))
        return (await worker.read_up_to(last, partial(self._judge, partition, worker), lease, stop)).end

    async def _judge(self, partition: Partition, worker: Worker) -> ReadContext:
        """Return `Worker.judge_whole`, if the incarnation is still open. Raises as it does, and Unavailable."""
        context = await worker.judge_whole(current := await self._load(partition))
        closing = await worker.handover.closing(current)
        if not await worker.handover.reopen(current, closing):
            raise Unavailable(
                f"{current.chain}: it is being closed already, although the stream is still the same",
                hint="start egress with its former configuration, wait for its next incarnation, then try again",
            )
        return context
