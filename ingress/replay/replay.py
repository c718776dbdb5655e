"""One replay: survey, check, carry rows into the target, retry after temporary errors, record the end.

survey → checks → target made → receipt stored → carried by intents → receipt marked as finished

A crash at any point leaves nothing, or a receipt from which the same command continues.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import replace

from common.chain import Chain
from common.clock import Backoff, Clock, doubling
from common.errors import FloeError, LeaseLost, Unavailable
from common.exits import ways
from common.failpoints import failpoint
from common.jetstream.api import StreamInfo
from common.jetstream.buckets import open_leases, open_state, optional_leases
from common.jetstream.client import FloeClient, connect
from common.jetstream.kv import KeyValue, state_key
from common.jetstream.lease import Lease, Leases, new_owner, owner_text
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, holes
from common.service.process import Threads
from common.service.progress import Teller
from common.settings.root import Settings
from common.settings.service import ServiceSettings
from common.settings.types import counted
from common.tasks import Stop, beside, either, end, orphaned, wait_for, watched
from ingress.checkpoint import Checkpoint, TargetState
from ingress.checkpoint_store import ROLE as INGRESS
from ingress.checkpoint_store import StateStore
from ingress.delivery import Delivery, ServerLimits
from ingress.errors import leading, passes_by_itself
from ingress.preflight import shape_of
from ingress.publishers.choose import PUBLISHERS, choose, offered
from ingress.publishers.publisher import Publisher, Replies
from ingress.replay import target
from ingress.replay.output import ReplayProgress, progress_line, standing
from ingress.replay.pace import Interrupted, PacedPublisher
from ingress.replay.receipt import Receipt, ReceiptBucket, Remembered, Unreadable, receipt_key, remembered
from ingress.replay.request import Advice, ReplayOptions, ReplayResult, Request
from ingress.replay.source import ReplayRegistry, ReplaySource, target_settings
from ingress.replay.survey import Outlook, ReplaySurvey, check_plan, continued
from ingress.rows.prepare import TargetLimits
from ingress.verdict.settle import Reconciler
from ingress.verdict.verdict import Finding, IntentVerdict, TargetErrors, TargetReading, TargetStream

THREADS = 6
PATIENCE = 300.0  # seconds without progress before an error
PAUSES = doubling(1.0, 15.0)  # seconds between attempts
WATCH_SPACING = 0.25  # seconds between two checks of the progress


class HeldError(LeaseLost):
    """Another process holds the lease of the target, and keeps it."""

    default_code = "E-REPLAY-RUNS"


def held_error(advice: Advice, key: str, holder: str) -> HeldError:
    target = advice.request.target
    what, then = "a replay", "wait until it is done, or stop it there"
    if key == state_key(INGRESS, target):
        what, then = "ingress", "stop that ingress, or replay into another stream (--target)"
    return HeldError(
        f"target {target}: {what} by {holder} carries into it", hint=ways((f"{then}; then", advice.same()))
    )


class Tenures(tuple[Lease, ...]):
    """The leases of one target; usable while each of them is (`ingress.verdict.settle.Tenure`)."""

    def is_usable(self) -> bool:
        return all(lease.is_usable() for lease in self)


class Replay:
    """One replay from one archive."""

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
        self._settings, self.request, self.options = settings, request, options
        self.store, self.documents, self.clock, self.teller = store, documents, clock, teller
        self.threads, self._owner = Threads("replay", THREADS), new_owner(settings.instance)
        self._again, self._former_rows, self._begun, self._bytes = options.again, 0, False, 0

    @property
    def service(self) -> ServiceSettings:
        """The settings of the target's server: of egress for the source of the feed, of ingress for other targets."""
        return self._settings.egress if self.request.into_source else self._settings.ingress

    @property
    def _advice(self) -> Advice:
        return Advice(self.request, replace(self.options, again=self._again))

    @property
    def _keys(self) -> tuple[str, str]:
        return receipt_key(self.request.target), state_key(INGRESS, self.request.target)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[FloeClient]:
        """Connect for the duration of the block; close the threads with the connection."""
        with closing(self.threads):
            async with aclosing(await self.connect()) as client:
                yield client

    async def connect(self) -> FloeClient:
        nats = self._settings.nats_for("egress" if self.request.into_source else "ingress")
        return await connect(nats, name=f"floe replay {self._settings.instance}".strip(), clock=self.clock)

    # Survey and checks

    async def outlook(self, client: FloeClient) -> Outlook:
        """Preview `run`; nothing is written. Raises the errors of the survey, ConfigError for an unsuitable target."""
        request = self.request
        survey = ReplaySurvey(self.store, self.documents, self.threads, self.clock, request)
        plan, stream = await survey.look()
        target.check_source(self._advice, stream)
        info = await target.look(client, request)
        recipe = target.recipe(request, stream) if info is None and stream else None
        config = info.config if info else recipe.config if recipe else {}
        notes = (*survey.notes, *target.notes(config, plan, request, stream))
        return Outlook(plan, stream, info, recipe, await self.former(client), notes)

    async def refusal(self, client: FloeClient, view: Outlook) -> FloeError | None:
        """Return the error of `run` if it would refuse now; None if it would begin or continue. Nothing is written, no
        bucket is made.
        """
        try:
            if continued(self._advice, view.former) is None:
                await self._check(client, view)
            leases = optional_leases(client, self.service, self._owner, self.clock)
            for key in self._keys:
                if (holder := await leases.holder(key)) is not None:
                    return held_error(self._advice, key, owner_text(holder))
        except FloeError as error:
            return error
        return None

    async def _check(self, client: FloeClient, view: Outlook) -> None:
        await target.check_ingress(client, self._settings.ingress.state_bucket, self.request.target)
        check_plan(view.plan, self._advice)
        if view.info is None:
            if not self.options.create:
                raise target.missing(self._advice)
            target.recipe(self.request, view.stream)
        elif view.info.messages and not self.options.append:
            raise target.not_empty(self._advice, view.info)

    async def former(self, client: FloeClient) -> Remembered | Unreadable | None:
        return await remembered(KeyValue(client, self.service.state_bucket, optional=True), self.request.target)

    # Running

    async def run(self, client: FloeClient, stop: Stop) -> ReplayResult:
        """Replay until all is stored, or until `stop` is set.

        Raises Stopped, ConfigError, UsageError; HeldError if another process holds the target; a temporary error after
        `PATIENCE` seconds without progress, or if `stop` is set before the next attempt.
        """
        started = moved = self.clock.monotonic()
        backoff, seen = Backoff(None, PAUSES), -1
        while True:
            try:
                return await self._attempt(client, stop, started)
            except FloeError as error:
                if not passes_by_itself(error) or isinstance(error, HeldError):
                    raise
                if (revision := await self._revision(client)) != seen:
                    seen, moved = revision, self.clock.monotonic()
                    backoff.reset()
                if self.clock.monotonic() > moved + PATIENCE:
                    raise
                self.teller.say(f"tried again in a moment: {error.message}")
                if await wait_for(stop, backoff.next()):
                    raise

    async def _revision(self, client: FloeClient) -> int:
        """Return a number that changes with every step of the replay; 0 if it cannot be read now."""
        with suppress(FloeError):
            if former := await self.former(client):
                return former.revision
        return 0

    async def _attempt(self, client: FloeClient, stop: Stop, started: float) -> ReplayResult:
        if not self._begun and await self.former(client) is None:
            # Before the lease: an ingress must not be stopped for a replay that is then refused.
            await target.check_ingress(client, self._settings.ingress.state_bucket, self.request.target)
        async with self._leased(client, stop) as tenures:
            former = continued(self._advice, await self.former(client))
            if former is not None and former.receipt.finished:
                self._former_rows = _rows(former.receipt, former.state)
                return self._result(former.receipt, former.state, started, finished=True)
            receipt, state = self._resumed(former) if former else await self._begin(client)
            carrying = Carrying(self, client, receipt, state, tenures)
            try:
                finished = await carrying.run(stop)
            finally:
                self._bytes += carrying.bytes_done
            return self._result(receipt, carrying.state, started, finished=finished)

    @asynccontextmanager
    async def _leased(self, client: FloeClient, stop: Stop) -> AsyncIterator[Tenures]:
        """Hold the leases of replay and of ingress on the target. Wait until leases of a killed holder expire.

        An ingress that gets the target in the meantime waits too. Raises HeldError if a holder stays alive, or if
        `stop` is set first.
        """
        service, name = self.service, self.request.target
        leases = await open_leases(client, service, self._owner, self.clock, target=name)
        held: dict[Lease, asyncio.Task[None]] = {}
        try:
            for key in self._keys:
                lease = await self._acquired(leases, key, stop)
                # Renewed from now on: planning may take longer than a lease lasts.
                held[lease] = watched(lease.keep(), orphaned, name=f"keep-{key}")
            yield Tenures(held)
        finally:
            for lease, keeping in held.items():
                await end(keeping)
                await lease.release()

    async def _acquired(self, leases: Leases, key: str, stop: Stop) -> Lease:
        deadline, is_told = self.clock.monotonic() + 1.5 * leases.ttl + 1, False
        while (lease := await leases.acquire(key)) is None:
            holder = owner_text(await leases.holder(key) or "nobody any more")
            if stop.is_set or self.clock.monotonic() > deadline:
                raise held_error(self._advice, key, holder)
            if not is_told:
                self.teller.say(f"waiting for the lease of {holder}")
                is_told = True
            await wait_for(stop, min(0.5, leases.ttl / 4))
        return lease

    # Begin, or continue

    def _resumed(self, former: Remembered) -> tuple[Receipt, TargetState]:
        if not self._begun:
            self._begun, self._former_rows = True, _rows(former.receipt, former.state)
            self.teller.say(f"going on behind {counted(self._former_rows, 'message')}")
        return former.receipt, former.state

    async def _begin(self, client: FloeClient) -> tuple[Receipt, TargetState]:
        view = await self.outlook(client)
        for note in view.notes:
            self.teller.say(f"note: {note}")
        await self._check(client, view)
        info = view.info or await self._created(client, view)
        plan, last = view.plan, info.last_sequence
        ranges, skips = tuple(chain.range for chain in plan.chains), self.options.skip_holes
        receipt = Receipt(self.request, ranges, last, plan.rows, plan.is_exact, self.clock.now(), skips_holes=skips)
        # Messages that the target holds already may come from anyone: they are not read.
        positions = {each.chain: each.rows.first for each in ranges}
        state = TargetState(Checkpoint(last, info.created, positions, last))
        if view.former is not None:
            bucket = KeyValue(client, self.service.state_bucket)
            await bucket.delete(receipt_key(self.request.target), view.former.revision)
        states, _ = await self.states(client, receipt)
        if await states.save(state, 0) is None:
            raise Unavailable(f"target {self.request.target}: another replay began at the same moment")
        # From now on any attempt, also one of this run, continues this replay.
        self._again, self._begun = False, True
        failpoint("replay.begun")
        return receipt, state

    async def _created(self, client: FloeClient, view: Outlook) -> StreamInfo:
        recipe = target.recipe(self.request, view.stream)
        if recipe.left_out:
            self.teller.say(f"note: made without {', '.join(recipe.left_out)} of the source")
        return await target.create(client, recipe, self._advice)

    async def states(self, client: FloeClient, receipt: Receipt) -> tuple[StateStore, ReceiptBucket]:
        name = receipt.request.target
        bucket = await open_state(client, self.service, target=name)
        envelope = ReceiptBucket(bucket, receipt)
        return StateStore(envelope, receipt_key(name), name), envelope

    def _result(self, receipt: Receipt, state: TargetState, started: float, *, finished: bool) -> ReplayResult:
        rows, seconds, was_done = _rows(receipt, state), self.clock.monotonic() - started, bool(receipt.finished)
        now = rows - self._former_rows
        return ReplayResult(finished, was_done, receipt.request.target, rows, now, self._bytes, seconds)


def _rows(receipt: Receipt, state: TargetState) -> int:
    return state.checkpoint.target_sequence - receipt.base


class Carrying:
    """One run that carries the rows of a receipt into its target, from `state` on."""

    def __init__(
        self, work: Replay, client: FloeClient, receipt: Receipt, state: TargetState, tenures: Tenures
    ) -> None:
        self._work, self._client, self._receipt, self._tenures = work, client, receipt, tenures
        self._begun, self._target = state, receipt.request.target
        # A replay that has begun continues without `--again`.
        self._advice = Advice(receipt.request, replace(work.options, again=False))
        self.state, self.bytes_done = state, 0

    async def run(self, stop: Stop) -> bool:
        """Carry rows until all are stored, or `stop` is set. Return True if all are stored.

        Raises Stopped with a hint, LeaseLost, and temporary errors.
        """
        info = await self._look()
        states, envelope = await self._work.states(self._client, self._receipt)
        delivery, source, publisher = await self._assembled(info, states, stop)
        try:
            async with either(stop, source.finished) as ended:
                await beside(delivery.run(ended), source.run(), self._watch(delivery, source))
        except BaseExceptionGroup as errors:
            error = leading(errors)
            if not isinstance(error, Interrupted):
                raise error from None
        finally:
            self.state, self.bytes_done = delivery.state, source.bytes_done
            await publisher.aclose()
        positions, ranges = self.state.checkpoint.positions, self._receipt.ranges
        is_behind = all(positions.get(each.chain, 0) > each.rows.last for each in ranges)
        if is_done := is_behind and self.state.intent is None:
            # Record in the receipt that all is stored.
            stored = await states.load()
            envelope.receipt = replace(self._receipt, finished=self._work.clock.now())
            if stored.state != self.state or await states.save(self.state, stored.revision) is None:
                raise Unavailable(f"target {self._target}: its state was changed at the very end")
        elif not stop.is_set:
            raise Unavailable(f"target {self._target}: its state was moved by somebody else")
        return is_done

    async def _watch(self, delivery: Delivery, source: ReplaySource) -> None:
        clock = self._work.clock
        begun, started = self._progress(self._begun, 0), clock.monotonic()
        while not any(lease.lost.is_set for lease in self._tenures):
            await clock.sleep(WATCH_SPACING)
            now, at = self._progress(delivery.state, source.bytes_done), clock.monotonic()
            text = progress_line(now, begun, at - started)
            self._work.teller.progress(f"{text} ({delivery.trouble})" if delivery.trouble else text, at)
        raise LeaseLost(f"lease of target {self._target} is not ours any more")

    def _progress(self, state: TargetState, raw_bytes: int) -> ReplayProgress:
        rows = _rows(self._receipt, state)
        return standing(self._receipt.ranges, state.checkpoint.positions, rows, raw_bytes)

    # The components

    async def _look(self) -> StreamInfo:
        if (info := await target.look(self._client, self._receipt.request)) is None:
            raise ReplayChoices(self._advice).no_checkpoint(None)
        return info

    async def _limits(self) -> TargetLimits:
        return shape_of(self._client, await self._look(), target_settings(self._receipt.request))

    async def _assembled(
        self, info: StreamInfo, states: StateStore, stop: Stop
    ) -> tuple[Delivery, ReplaySource, Publisher]:
        work, client, advice, name = self._work, self._client, self._advice, self._target
        limits = shape_of(client, info, target_settings(self._receipt.request))
        chains = ReplayRegistry(limits, advice, self._limits)
        source = await self._source(chains)
        chosen = choose(name, "auto", offered(client.server_version, info.config, frozenset()))
        publisher: Publisher = PUBLISHERS[chosen](client, name, await Replies.open(client))
        if work.options.pace is not None:
            publisher = PacedPublisher(publisher, work.options.pace, work.clock, stop)
        looker, spacing = TargetStream(client, name, work.connect), work.options.look_spacing
        reconciler = Reconciler(ReplayChoices(advice), states, looker, self._tenures, work.clock, spacing)
        server = ServerLimits(client, chains, source.reset, advice.refused("E-MSG-TOO-LARGE"))
        return Delivery(name, states, reconciler, publisher, source, work.clock, limits=server), source, publisher

    async def _source(self, chains: ReplayRegistry) -> ReplaySource:
        work, call, ranges = self._work, self._work.threads.run, self._receipt.ranges
        found = {each.chain: await call(work.documents.gaps, each.chain) for each in ranges}
        gaps = {chain: [gap.range for gap in accepted] for chain, accepted in found.items()}
        skips = self._receipt.skips_holes or work.options.skip_holes

        def may_skip(chain: Chain, hole: SequenceRange) -> bool:
            return skips or not holes(gaps[chain], hole)

        limit = work.service.memory_limit
        return ReplaySource(ranges, work.store, work.documents, work.threads, chains, may_skip, limit)


class ReplayChoices(TargetErrors):
    """Errors about a target that changed during a replay, with hints for an operator."""

    def __init__(self, advice: Advice) -> None:
        super().__init__(advice.request.target)
        self._advice = advice

    def error(self, verdict: IntentVerdict, seen: Sequence[TargetReading], described: str = "") -> FloeError:
        found = super().error(verdict, seen, described)
        found.hint = self._advice.anew("stop what else writes to it, ")
        if verdict.finding is Finding.GONE:
            found.hint = ways(("make it again and begin anew", self._advice.same("--again", "--create")))
        return found

    def no_checkpoint(self, reading: TargetReading | None) -> FloeError:
        found = super().no_checkpoint(reading)
        if reading is not None:
            found.hint = self._advice.anew()
        return found
