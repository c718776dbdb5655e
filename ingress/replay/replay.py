"""One replay: look, refuse or begin, carry, go on after what passes by itself, remember the end.

survey → checks → target made → receipt stored → carried by intents → receipt marked as finished

A crash anywhere leaves nothing, or a receipt with which the same command goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError, LeaseLost, Unavailable
from common.failpoints import failpoint
from common.jetstream.api import StreamInfo
from common.jetstream.client import FloeClient, connect
from common.jetstream.kv import BucketGone, KeyValue, state_key
from common.jetstream.lease import Lease, Leases, new_owner, owner_text
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, holes
from common.service.exits import ways
from common.service.process import Threads
from common.settings.root import Settings
from common.settings.service import ServiceSettings
from common.tasks import Stop, beside, either, end, orphaned, wait_for, watched
from ingress.buckets import open_bucket
from ingress.checkpoint import Checkpoint, TargetState
from ingress.checkpoint_store import ROLE as INGRESS
from ingress.checkpoint_store import StateStore
from ingress.delivery import Delivery, ServerLimits
from ingress.errors import leading, passes_by_itself
from ingress.preflight import shape_of
from ingress.publishers.choose import choose, make, offered
from ingress.publishers.publisher import Publisher, Replies
from ingress.replay import target
from ingress.replay.outlook import Outlook, check_plan, continued, former_of, outlook
from ingress.replay.output import ReplayProgress, Teller, progress_line, standing
from ingress.replay.pace import Interrupted, PacedPublisher
from ingress.replay.receipt import Receipt, ReceiptBucket, Remembered, Unreadable, receipt_key
from ingress.replay.request import Advice, ReplayOptions, ReplayResult, Request
from ingress.replay.source import ReplayRoster, ReplaySource, target_settings
from ingress.replay.survey import ReplaySurvey
from ingress.rows.prepare import TargetLimits
from ingress.verdict.settle import Reconciler
from ingress.verdict.verdict import Finding, IntentVerdict, TargetErrors, TargetReading, TargetStream


class HeldError(LeaseLost):
    """Somebody else holds the target, and goes on holding it."""

    default_code = "E-REPLAY-RUNS"


class Tenures:
    """The right to carry while all of `leases` may be used (`ingress.interfaces.Tenure`)."""

    def __init__(self, *leases: Lease) -> None:
        self.leases = leases

    def is_usable(self) -> bool:
        return all(lease.is_usable() for lease in self.leases)

    @property
    def is_lost(self) -> bool:
        return any(lease.lost.is_set for lease in self.leases)


@asynccontextmanager
async def leased(
    client: FloeClient,
    settings: ServiceSettings,
    target: str,
    owner: str,
    clock: Clock,
    teller: Teller,
    stop: Stop,
    advice: Advice,
) -> AsyncIterator[Tenures]:
    """The leases of replay and of ingress on `target`; those of a killed holder are waited for.

    An ingress that is told of the target meanwhile then waits too. Raises HeldError where a holder lives on,
    or `stop` is set first.
    """
    ttl = settings.lease_ttl
    bucket = await open_bucket(client, settings, settings.lease_bucket, ttl=ttl, target=target)
    waiting = _Waiting(Leases(bucket, owner, ttl, clock), target, clock, teller, stop, advice)
    held: dict[Lease, asyncio.Task[None]] = {}
    try:
        for key in (receipt_key(target), state_key(INGRESS, target)):
            lease = await waiting.acquired(key)
            # From now on: planning may take longer than a lease lives.
            held[lease] = watched(lease.keep(), orphaned, name=f"keep-{key}")
        yield Tenures(*held)
    finally:
        for lease, keeping in held.items():
            await end(keeping)
            await lease.release()


async def check_free(client: FloeClient, settings: ServiceSettings, target: str, advice: Advice) -> None:
    """Raises HeldError where somebody holds a lease on `target` now. Makes no bucket and takes no lease."""
    bucket = KeyValue(client, settings.lease_bucket, ttl=settings.lease_ttl, replicas=1)
    for key in (receipt_key(target), state_key(INGRESS, target)):
        try:
            entry = await bucket.get(key)
        except BucketGone:
            return
        if entry is not None:
            raise held_error(advice, target, key, owner_text(entry.value.decode("utf-8", "backslashreplace")))


def held_error(advice: Advice, target: str, key: str, holder: str) -> HeldError:
    """What to say where `holder` holds the lease `key` on the target."""
    what, then = "a replay", "wait until it is done, or stop it there"
    if key == state_key(INGRESS, target):
        what, then = "ingress", "stop that ingress, or replay into another stream (--target)"
    return HeldError(
        f"target {target}: {what} by {holder} carries into it",
        hint=ways((f"{then}; then", advice.same())),
    )


class _Waiting:
    """Waits for leases, longer than a killed holder's live."""

    def __init__(
        self,
        leases: Leases,
        target: str,
        clock: Clock,
        teller: Teller,
        stop: Stop,
        advice: Advice,
    ) -> None:
        self._advice = advice
        self._leases, self._target, self._clock, self._teller = leases, target, clock, teller
        self._stop, self._told = stop, False

    async def acquired(self, key: str) -> Lease:
        deadline = self._clock.monotonic() + 1.5 * self._leases.ttl + 1
        while (lease := await self._leases.acquire(key)) is None:
            holder = owner_text(await self._leases.holder(key) or "nobody any more")
            if self._stop.is_set or self._clock.monotonic() > deadline:
                raise held_error(self._advice, self._target, key, holder)
            if not self._told:
                self._teller.say(f"waiting for the lease of {holder}")
                self._told = True
            await wait_for(self._stop, min(0.5, self._leases.ttl / 4))
        return lease


WATCH_SPACING = 0.25  # seconds


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What carrying needs. `connect` opens a fresh connection to the target's server."""

    client: FloeClient
    connect: Callable[[], Awaitable[FloeClient]]
    settings: ServiceSettings
    options: ReplayOptions
    store: SegmentStore
    documents: ChainStore
    threads: Threads
    clock: Clock
    teller: Teller

    async def keeper(self, receipt: Receipt) -> tuple[StateStore, ReceiptBucket]:
        """Where the state of this replay is kept."""
        name = receipt.request.target
        bucket = await open_bucket(self.client, self.settings, self.settings.state_bucket, target=name)
        around = ReceiptBucket(bucket, receipt)
        return StateStore(around, receipt_key(name), name), around


class Carrying:
    """Carries one receipt from `state` on."""

    def __init__(self, around: Surroundings, receipt: Receipt, state: TargetState, tenures: Tenures) -> None:
        self._around, self._receipt, self._tenures = around, receipt, tenures
        self._begun, self._target = state, receipt.request.target
        # What has begun goes on without `--again`.
        self._advice = Advice(receipt.request, replace(around.options, again=False))
        self.state, self.bytes_done = state, 0

    async def run(self, stop: Stop) -> bool:
        """Carry until all is stored, or `stop` is set; whether all is.

        Raises Stopped with what to do, LeaseLost, and what passes by itself.
        """
        info = await target.look(self._around.client, self._receipt.request)
        if info is None:
            raise ReplayChoices(self._advice).no_checkpoint(None)
        keeper, envelope = await self._around.keeper(self._receipt)
        roster = self._roster(info)
        source, publisher = await self._source(roster), await self._publisher(info, stop)
        carrier = self._carrier(keeper, source, publisher, roster)
        try:
            await self._run_beside(carrier, source, stop)
        finally:
            self.state, self.bytes_done = carrier.state, source.bytes_done
            await publisher.aclose()
        if self._is_done:
            return await self._finish(keeper, envelope)
        if not stop.is_set:
            raise Unavailable(f"target {self._target}: its state was moved by somebody else")
        return False

    async def _run_beside(self, carrier: Delivery, source: ReplaySource, stop: Stop) -> None:
        sides = [source.run(), self._watch(carrier, source)]
        try:
            async with either(stop, source.finished) as ended:
                await beside(carrier.run(ended), *sides)
        except BaseExceptionGroup as errors:
            error = leading(errors)
            if not isinstance(error, Interrupted):
                raise error from None

    @property
    def _is_done(self) -> bool:
        positions = self.state.checkpoint.positions
        behind = all(positions.get(each.chain, 0) > each.rows.last for each in self._receipt.ranges)
        return behind and self.state.intent is None

    async def _finish(self, keeper: StateStore, envelope: ReceiptBucket) -> bool:
        """Remember that all is stored."""
        stored = await keeper.load()
        envelope.receipt = self._receipt.done(self._around.clock.now())
        if stored.state != self.state or await keeper.save(self.state, stored.revision) is None:
            raise Unavailable(f"target {self._target}: its state was changed at the very end")
        return True

    async def _watch(self, carrier: Delivery, source: ReplaySource) -> None:
        """Tell how far it is; ends everything when a lease is lost."""
        clock = self._around.clock
        begun, started = self.standing(self._begun, 0), clock.monotonic()
        while not self._tenures.is_lost:
            await clock.sleep(WATCH_SPACING)
            now, at = self.standing(carrier.state, source.bytes_done), clock.monotonic()
            text = progress_line(now, begun, at - started)
            self._around.teller.progress(f"{text} ({carrier.trouble})" if carrier.trouble else text, at)
        raise LeaseLost(f"lease of target {self._target} is not ours any more")

    def standing(self, state: TargetState, raw_bytes: int) -> ReplayProgress:
        """How far the replay is by `state`."""
        rows = state.checkpoint.target_sequence - self._receipt.base
        return standing(self._receipt.ranges, state.checkpoint.positions, rows, raw_bytes)

    # The components

    def _roster(self, info: StreamInfo) -> ReplayRoster:
        settings = target_settings(self._receipt.request)
        shape = shape_of(self._around.client, info, settings)
        return ReplayRoster(settings, shape, self._receipt.request, self._shape)

    async def _shape(self) -> TargetLimits:
        """What the target takes now. Raises as looking at it."""
        info = await target.look(self._around.client, self._receipt.request)
        if info is None:
            raise ReplayChoices(self._advice).no_checkpoint(None)
        return shape_of(self._around.client, info, target_settings(self._receipt.request))

    async def _source(self, roster: ReplayRoster) -> ReplaySource:
        around, receipt = self._around, self._receipt
        gaps = {each.chain: await self._gaps(each.chain) for each in receipt.ranges}
        skips = receipt.skips_holes or around.options.skip_holes

        def may_skip(chain: Chain, hole: SequenceRange) -> bool:
            return skips or not holes(gaps[chain], hole)

        limit = around.settings.memory_limit
        return ReplaySource(
            receipt.ranges,
            around.store,
            around.documents,
            around.threads,
            roster,
            may_skip,
            limit,
            self._advice,
        )

    async def _gaps(self, chain: Chain) -> list[SequenceRange]:
        around = self._around
        return [gap.range for gap in await around.threads.run(around.documents.gaps, chain)]

    async def _publisher(self, info: StreamInfo, stop: Stop) -> Publisher:
        around, name = self._around, self._target
        against = offered(around.client.server_version, info.config, frozenset())
        chosen = choose(name, "auto", against)
        publisher = make(chosen, around.client, name, await Replies.open(around.client))
        pace = around.options.pace
        return publisher if pace is None else PacedPublisher(publisher, pace, around.clock, stop)

    def _carrier(
        self, keeper: StateStore, source: ReplaySource, publisher: Publisher, roster: ReplayRoster
    ) -> Delivery:
        around, name = self._around, self._target
        looker = TargetStream(around.client, name, around.connect)
        spacing = around.options.look_spacing
        settler = Reconciler(
            ReplayChoices(self._advice), keeper, looker, self._tenures, around.clock, spacing
        )
        hint = self._advice.refused("E-MSG-TOO-LARGE")
        limits = ServerLimits(around.client, roster, source.reset, hint)
        return Delivery(name, keeper, settler, publisher, source, around.clock, limits=limits)


class ReplayChoices(TargetErrors):
    """What an operator does about a target that a replay found changed."""

    def __init__(self, advice: Advice) -> None:
        super().__init__(advice.request.target)
        self._advice = advice

    def error(self, verdict: IntentVerdict, seen: Sequence[TargetReading], described: str = "") -> FloeError:
        found = super().error(verdict, seen, described)
        found.hint = self._advice.anew("stop what else writes to it, ")
        if verdict.finding is Finding.GONE:
            anew = self._advice.same("--again", "--create")
            found.hint = ways(("make it again and begin anew", anew))
        return found

    def no_checkpoint(self, reading: TargetReading | None) -> FloeError:
        found = super().no_checkpoint(reading)
        if reading is not None:
            found.hint = self._advice.anew()
        return found


THREADS = 6
PATIENCE = 300.0  # seconds without progress until it is given up
FIRST_PAUSE, LAST_PAUSE = 1.0, 15.0  # seconds between attempts


class Replay:
    """One request over one archive."""

    def __init__(
        self,
        settings: Settings,
        request: Request,
        options: ReplayOptions,
        store: SegmentStore,
        documents: ChainStore,
        clock: Clock,
        teller: Teller,
    ) -> None:
        self._settings, self.request, self._options = settings, request, options
        self._store, self._documents, self._clock, self._teller = store, documents, clock, teller
        self._threads = Threads("replay", THREADS)
        self.survey = ReplaySurvey(store, documents, self._threads, clock)
        self._owner = new_owner(settings.instance)
        self._again, self._former_rows = options.again, 0
        self._begun, self._bytes = False, 0

    @property
    def service(self) -> ServiceSettings:
        """The source of a feed is on the server of egress, other targets are on that of ingress."""
        return self._settings.egress if self.request.into_source else self._settings.ingress

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[FloeClient]:
        """A connection for the length of the block; the threads are closed with it."""
        client = await self._connect()
        try:
            yield client
        finally:
            await client.aclose()
            self._threads.close()

    async def _connect(self) -> FloeClient:
        nats = self._settings.nats_for("egress" if self.request.into_source else "ingress")
        return await connect(nats, name=f"floe replay {self._settings.instance}".strip(), clock=self._clock)

    async def outlook(self, client: FloeClient) -> Outlook:
        """What `run` would do; nothing is written. Raises what speaks against the target's kind."""
        return await outlook(client, self.survey, self._advice, self.service.state_bucket)

    async def refusal(self, client: FloeClient, view: Outlook) -> FloeError | None:
        """Why `run` would refuse now; None where it would begin, or go on. Nothing is written."""
        try:
            if continued(self._advice, view.former) is None:
                await self._check(client, view)
            await check_free(client, self.service, self.request.target, self._advice)
        except FloeError as error:
            return error
        return None

    async def _check(self, client: FloeClient, view: Outlook) -> None:
        """Raises what speaks against beginning the replay of `view`."""
        await target.check_ingress(client, self._settings.ingress.state_bucket, self.request.target)
        check_plan(view.found.plan, self._advice)
        if view.info is None:
            if not self._options.create:
                raise target.missing(self._advice)
            target.recipe(self.request, view.found.stream)
        elif view.info.messages and not self._options.append:
            raise target.not_empty(self._advice, view.info)

    @property
    def _advice(self) -> Advice:
        """Commands for hints; once the replay has begun, they go on with it."""
        return Advice(self.request, replace(self._options, again=self._again))

    async def run(self, client: FloeClient, stop: Stop) -> ReplayResult:
        """Replay until all is stored, or until `stop` is set.

        Raises Stopped, ConfigError, UsageError; HeldError where another replay runs; Unavailable after long.
        """
        started = moved = self._clock.monotonic()
        pause, seen = FIRST_PAUSE, -1
        while True:
            try:
                return await self._attempt(client, stop, started)
            except FloeError as error:
                if not passes_by_itself(error) or isinstance(error, HeldError):
                    raise
                revision = await self._revision(client)
                if revision != seen:
                    seen, moved, pause = revision, self._clock.monotonic(), FIRST_PAUSE
                if self._clock.monotonic() > moved + PATIENCE:
                    raise
                self._teller.say(f"tried again in a moment: {error.message}")
                if await wait_for(stop, pause):
                    raise
                pause = min(LAST_PAUSE, pause * 2)

    async def _revision(self, client: FloeClient) -> int:
        """Something that changes with every step of the replay; 0 where nobody can tell now."""
        try:
            former = await former_of(client, self.service.state_bucket, self.request.target)
        except FloeError:
            return 0
        return former.revision if former else 0

    async def _attempt(self, client: FloeClient, stop: Stop, started: float) -> ReplayResult:
        name = self.request.target
        if not self._begun and await former_of(client, self.service.state_bucket, name) is None:
            # Before its lease: nobody shall stop an ingress for what is refused afterwards.
            await target.check_ingress(client, self._settings.ingress.state_bucket, name)
        async with leased(
            client, self.service, name, self._owner, self._clock, self._teller, stop, self._advice
        ) as tenures:
            found = await former_of(client, self.service.state_bucket, name)
            former = continued(self._advice, found)
            if former is not None and former.receipt.finished:
                return self._result(former.receipt, former.state, started, finished=True, was_done=True)
            around = self._surroundings(client)
            receipt, state = self._resumed(former) if former else await self._begin(around)
            carrying = Carrying(around, receipt, state, tenures)
            try:
                finished = await carrying.run(stop)
            finally:
                self._bytes += carrying.bytes_done
            return self._result(receipt, carrying.state, started, finished=finished)

    def _surroundings(self, client: FloeClient) -> Surroundings:
        return Surroundings(
            client,
            self._connect,
            self.service,
            self._options,
            self._store,
            self._documents,
            self._threads,
            self._clock,
            self._teller,
        )

    def _resumed(self, former: Remembered) -> tuple[Receipt, TargetState]:
        rows = former.state.checkpoint.target_sequence - former.receipt.base
        if not self._begun:
            self._begun, self._former_rows = True, rows
            self._teller.say(f"going on behind {rows:,} messages")
        return former.receipt, former.state

    # Beginning

    async def _begin(self, around: Surroundings) -> tuple[Receipt, TargetState]:
        """Check everything, make the target, and store what is going to be done."""
        view = await self.outlook(around.client)
        for note in view.notes:
            self._teller.say(f"note: {note}")
        await self._check(around.client, view)
        info = view.info or await self._created(around.client, view)
        receipt = self._receipt(view, info)
        positions = {each.chain: each.rows.first for each in receipt.ranges}
        # What stands there already need not be ours: it is not looked at.
        checkpoint = Checkpoint(info.last_sequence, info.created, positions, info.last_sequence)
        await self._remember(around, receipt, TargetState(checkpoint), view.former)
        # Whatever comes now is gone on with, also by another attempt of this very run.
        self._again, self._begun = False, True
        failpoint("replay.begun")
        return receipt, TargetState(checkpoint)

    def _receipt(self, view: Outlook, info: StreamInfo) -> Receipt:
        plan = view.found.plan
        return Receipt(
            self.request,
            tuple(chain.range for chain in plan.chains),
            info.last_sequence,
            plan.rows,
            plan.is_exact,
            self._clock.now(),
            skips_holes=self._options.skip_holes,
        )

    async def _created(self, client: FloeClient, view: Outlook) -> StreamInfo:
        recipe = target.recipe(self.request, view.found.stream)
        if recipe.left_out:
            self._teller.say(f"note: made without {', '.join(recipe.left_out)} of the source")
        return await target.create(client, recipe, self._advice)

    async def _remember(
        self,
        around: Surroundings,
        receipt: Receipt,
        state: TargetState,
        former: Remembered | Unreadable | None,
    ) -> None:
        if former is not None:
            await self._forget(around, former)
        keeper, _ = await around.keeper(receipt)
        if await keeper.save(state, 0) is None:
            raise Unavailable(f"target {receipt.request.target}: another replay began at the same moment")

    async def _forget(self, around: Surroundings, former: Remembered | Unreadable) -> None:
        bucket = KeyValue(around.client, self.service.state_bucket, ttl=None, replicas=1)
        await bucket.delete(receipt_key(self.request.target), former.revision)

    def _result(
        self,
        receipt: Receipt,
        state: TargetState,
        started: float,
        *,
        finished: bool,
        was_done: bool = False,
    ) -> ReplayResult:
        rows = state.checkpoint.target_sequence - receipt.base
        before = rows if was_done else self._former_rows
        seconds = self._clock.monotonic() - started
        return ReplayResult(
            finished, was_done, rows, rows - before, self._bytes, seconds, receipt.request.target
        )
