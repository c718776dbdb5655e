"""One replay: survey, check, deliver rows into the target, retry after temporary errors, record the end.

survey → checks → target made → receipt stored → delivered by intents → receipt marked as finished

A crash at any point leaves nothing, or a receipt from which the same command continues.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import replace
from itertools import pairwise

from common.chain import Chain
from common.clock import Backoff, Clock, doubling_delays
from common.errors import FloeError, LeaseLost, Unavailable
from common.exits import choices
from common.failpoints import failpoint
from common.nats.api import StreamInfo
from common.nats.client import FloeClient, connect
from common.nats.kv import KeyValue, open_state, state_key
from common.nats.lease import Lease, Leases, format_owner, new_owner, open_leases, optional_leases
from common.sequences import SequenceRange, holes
from common.service.process import ThreadPool
from common.settings.root import Settings
from common.settings.service import ServiceSettings
from common.settings.types import format_count
from common.tasks import Stop, any_set, cancel, raise_fatal, run_with, spawn, wait_for
from ingress.checkpoint import STATE_ROLE, Checkpoint, StateStore, TargetState
from ingress.delivery import Delivery, ServerLimits
from ingress.errors import is_transient, most_important_error
from ingress.preflight import limits_from
from ingress.publishers.batches import PUBLISHERS, choose_publisher, objections
from ingress.publishers.publisher import Outcome, Publisher, Replies
from ingress.recovery import target
from ingress.recovery.ranges import ReplayProgress
from ingress.recovery.request import Pace, RecoveryParts, ReplayHints, ReplayOptions, ReplayRequest, ReplayResult
from ingress.recovery.source import ReplayRegistry, ReplaySource, target_settings
from ingress.recovery.survey import ReplayPreview, ReplaySurvey, check_plan, resumable_replay
from ingress.recovery.target import Receipt, ReceiptCodec, StoredReplay, UnreadableReplay, load_replay, receipt_key
from ingress.rows.prepare import TargetLimits
from ingress.rows.rows import Rows
from ingress.verdict.settle import TargetReconciler
from ingress.verdict.verdict import Finding, IntentVerdict, TargetErrors, TargetReading, TargetStream

HELD_CODE = "E-REPLAY-RUNS"
REPLAY_THREADS = 6
STALL_TIMEOUT_S = 300.0  # seconds without progress before an error
ATTEMPT_BACKOFF = doubling_delays(1.0, 15.0)  # seconds between attempts
PROGRESS_INTERVAL_S = 0.25  # seconds between two checks of the progress


def target_held_error(hints: ReplayHints, key: str, holder: str) -> LeaseLost:
    """Return the error for a target with a lease that another process holds, and keeps."""
    target = hints.request.target
    what, then = "a replay", "wait until it is done, or stop it there"
    if key == state_key(STATE_ROLE, target):
        what, then = "ingress", "stop that ingress, or replay into another stream (--target)"
    hint = choices((f"{then}; then", hints.command()))
    return LeaseLost(f"target {target}: {what} by {holder} publishes into it", hint=hint, code=HELD_CODE)


class Leaseholders(tuple[Lease, ...]):
    """The leases of one target; usable while each of them is (`ingress.verdict.settle.Leaseholder`)."""

    def is_usable(self) -> bool:
        return all(lease.is_usable() for lease in self)


class Replay:
    """One replay from one archive."""

    def __init__(
        self, settings: Settings, request: ReplayRequest, options: ReplayOptions, parts: RecoveryParts
    ) -> None:
        self._settings, self.request, self.options = settings, request, options
        self.store, self.documents, self.clock, self.progress = parts
        self.threads, self._owner = ThreadPool("replay", REPLAY_THREADS), new_owner(settings.instance)
        self._former_rows, self._has_begun, self._bytes = 0, False, 0

    @property
    def service(self) -> ServiceSettings:
        """The settings of the target's server: of egress for the source of the feed, of ingress for other targets."""
        return self._settings.egress if self.request.into_source else self._settings.ingress

    @property
    def _hints(self) -> ReplayHints:
        return ReplayHints(self.request, self.options)

    @property
    def _keys(self) -> tuple[str, str]:
        return receipt_key(self.request.target), state_key(STATE_ROLE, self.request.target)

    @asynccontextmanager
    async def open_connection(self) -> AsyncIterator[FloeClient]:
        """Connect for the duration of the block; close the threads with the connection."""
        with closing(self.threads):
            async with aclosing(await self.connect()) as client:
                yield client

    async def connect(self) -> FloeClient:
        nats = self._settings.nats_for("egress" if self.request.into_source else "ingress")
        return await connect(nats, name=f"floe replay {self._settings.instance}".strip(), clock=self.clock)

    # Survey and checks

    async def preview(self, client: FloeClient) -> ReplayPreview:
        """Preview `run`; nothing is written. Raises the errors of the survey, ConfigError for an unsuitable target."""
        request = self.request
        survey = ReplaySurvey(self.store, self.documents, self.threads, self.clock, request)
        plan, stream = await survey.run()
        target.check_source(self._hints, stream)
        info = await target.read_target(client, request)
        template = target.template(request, stream) if info is None and stream else None
        config = info.config if info else template.config if template else {}
        notes = (*survey.notes, *target.target_notes(config, plan, request, stream))
        return ReplayPreview(request, plan, stream, info, template, await self.load_former(client), notes)

    async def check(self, client: FloeClient, preview: ReplayPreview) -> FloeError | None:
        """Return the error of `run` if it would refuse now; None if it would begin or continue. Nothing is written, no
        bucket is made.
        """
        try:
            if resumable_replay(self._hints, preview.former) is None:
                await self._check(client, preview)
            leases = optional_leases(client, self.service, self._owner, self.clock)
            for key in self._keys:
                if (holder := await leases.get_owner(key)) is not None:
                    return target_held_error(self._hints, key, format_owner(holder))
        except FloeError as error:
            return error
        return None

    async def _check(self, client: FloeClient, preview: ReplayPreview) -> None:
        await target.check_ingress(client, self._settings.ingress.state_bucket, self.request.target)
        check_plan(preview.plan, self._hints)
        if preview.info is None:
            if not self.options.create:
                raise target.missing_error(self._hints)
            target.template(self.request, preview.stream)
        elif preview.info.messages and not self.options.append:
            raise target.not_empty_error(self._hints, preview.info, preview.stream)

    async def load_former(self, client: FloeClient) -> StoredReplay | UnreadableReplay | None:
        return await load_replay(KeyValue(client, self.service.state_bucket, optional=True), self.request.target)

    # Running

    async def run(self, client: FloeClient, stop: Stop) -> ReplayResult:
        """Replay until all is stored, or until `stop` is set.

        Raises Stopped, ConfigError, UsageError; LeaseLost if another process holds the target; a temporary error
        after `STALL_TIMEOUT_S` seconds without progress, or if `stop` is set before the next attempt.
        """
        started = moved = self.clock.monotonic()
        backoff, seen = Backoff(None, ATTEMPT_BACKOFF), -1
        while True:
            try:
                return await self._attempt(client, stop, started)
            except FloeError as error:
                if not is_transient(error) or error.code == HELD_CODE:
                    raise
                if (revision := await self._revision(client)) != seen:
                    seen, moved = revision, self.clock.monotonic()
                    backoff.reset()
                if self.clock.monotonic() > moved + STALL_TIMEOUT_S:
                    raise
                self.progress.print(f"trying again in a moment: {error.message}")
                if await wait_for(stop, backoff.next_delay()):
                    raise

    async def _revision(self, client: FloeClient) -> int:
        """Return a number that changes with every step of the replay; 0 if it cannot be read now."""
        with suppress(FloeError):
            if former := await self.load_former(client):
                return former.revision
        return 0

    async def _attempt(self, client: FloeClient, stop: Stop, started: float) -> ReplayResult:
        if not self._has_begun and await self.load_former(client) is None:
            # Before the lease: an ingress must not be stopped for a replay that is then refused.
            await target.check_ingress(client, self._settings.ingress.state_bucket, self.request.target)
        async with self._hold_leases(client, stop) as leaseholders:
            former = resumable_replay(self._hints, await self.load_former(client))
            if former is not None and former.receipt.finished:
                self._former_rows = _rows(former.receipt, former.state)
                return self._result(former.receipt, former.state, started, finished=True)
            receipt, state = self._resume(former) if former else await self._begin(client)
            replay_run = ReplayRun(self, client, receipt, state, leaseholders)
            try:
                finished = await replay_run.run(stop)
            finally:
                self._bytes += replay_run.bytes_done
            return self._result(receipt, replay_run.state, started, finished=finished)

    @asynccontextmanager
    async def _hold_leases(self, client: FloeClient, stop: Stop) -> AsyncIterator[Leaseholders]:
        """Hold the leases of replay and of ingress on the target. Wait until leases of a killed holder expire.

        An ingress that gets the target in the meantime waits too. Raises LeaseLost if a holder stays alive, or if
        `stop` is set first.
        """
        service, name = self.service, self.request.target
        leases = await open_leases(client, service, self._owner, self.clock, target=name)
        held: dict[Lease, asyncio.Task[None]] = {}
        try:
            for key in self._keys:
                lease = await self._acquire_lease(leases, key, stop)
                # Renewed from now on: planning may take longer than a lease lasts.
                held[lease] = spawn(lease.run_renewals(), raise_fatal, name=f"keep-{key}")
            yield Leaseholders(held)
        finally:
            for lease, keeping in held.items():
                await cancel(keeping)
                await lease.release()

    async def _acquire_lease(self, leases: Leases, key: str, stop: Stop) -> Lease:
        deadline, is_reported = self.clock.monotonic() + 1.5 * leases.ttl + 1, False
        while (lease := await leases.acquire(key)) is None:
            holder = format_owner(await leases.get_owner(key) or "an expired holder")
            if stop.is_set or self.clock.monotonic() > deadline:
                raise target_held_error(self._hints, key, holder)
            if not is_reported:
                self.progress.print(f"waiting for the lease of {holder}")
                is_reported = True
            await wait_for(stop, min(0.5, leases.ttl / 4))
        return lease

    # Begin, or continue

    def _resume(self, former: StoredReplay) -> tuple[Receipt, TargetState]:
        if not self._has_begun:
            self._has_begun, self._former_rows = True, _rows(former.receipt, former.state)
            self.progress.print(f"continuing after {format_count(self._former_rows, 'message')}")
        return former.receipt, former.state

    async def _begin(self, client: FloeClient) -> tuple[Receipt, TargetState]:
        preview = await self.preview(client)
        for note in preview.notes:
            self.progress.print(f"note: {note}")
        await self._check(client, preview)
        info = preview.info or await self._create_target(client, preview)
        plan, last = preview.plan, info.last_sequence
        ranges, skips = tuple(chain.range for chain in plan.chains), self.options.skip_holes
        receipt = Receipt(self.request, ranges, last, plan.rows, plan.is_exact, self.clock.now(), skips_holes=skips)
        # Messages that the target holds already may come from anyone: they are not read.
        positions = {each.chain: each.rows.first for each in ranges}
        state = TargetState(Checkpoint(last, info.created, positions, last))
        if preview.former is not None:
            bucket = KeyValue(client, self.service.state_bucket)
            await bucket.delete(receipt_key(self.request.target), preview.former.revision)
        states = await self.open_states(client, ReceiptCodec(receipt))
        if await states.save(state, 0) is None:
            raise Unavailable(f"target {self.request.target}: another replay began at the same moment")
        # From now on any attempt, also one of this run, continues this replay.
        self.options, self._has_begun = replace(self.options, again=False), True
        failpoint("replay.begun")
        return receipt, state

    async def _create_target(self, client: FloeClient, preview: ReplayPreview) -> StreamInfo:
        template = target.template(self.request, preview.stream)
        if template.left_out:
            self.progress.print(f"note: created without {', '.join(template.left_out)} of the source")
        return await target.create_target(client, template, self._hints)

    async def open_states(self, client: FloeClient, codec: ReceiptCodec) -> StateStore:
        name = self.request.target
        bucket = await open_state(client, self.service, target=name)
        return StateStore(bucket, name, key=receipt_key(name), codec=codec)

    def _result(self, receipt: Receipt, state: TargetState, started: float, *, finished: bool) -> ReplayResult:
        rows, seconds, was_done = _rows(receipt, state), self.clock.monotonic() - started, bool(receipt.finished)
        now = rows - self._former_rows
        return ReplayResult(receipt.request, finished, was_done, rows, now, self._bytes, seconds)


def _rows(receipt: Receipt, state: TargetState) -> int:
    return state.checkpoint.target_sequence - receipt.base


ADMIT_MESSAGES = 5_000  # the most messages in one call of `Pace.admit`


class Interrupted(Exception):
    """The replay is to stop; the next run finishes its open intent."""


class PacedPublisher:
    """A publisher that sends as many of the rows as `pace` allows now, and waits if it allows none.

    Raises Interrupted once `stop` is set, so that a slow replay need not finish its intent first.
    """

    def __init__(self, inner: Publisher, pace: Pace, clock: Clock, stop: Stop) -> None:
        self._inner, self._pace, self._clock, self._stop = inner, pace, clock, stop

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        if not (count := await self._pace.wait_admitted(next_sizes(rows, stored), self._clock, self._stop)):
            raise Interrupted
        return await self._inner.publish(rows.leading(stored + count), base, stored)

    async def aclose(self) -> None:
        await self._inner.aclose()


def next_sizes(rows: Rows, start: int) -> list[int]:
    """Return the bytes of each of the next messages, at most `ADMIT_MESSAGES` of them."""
    sizes = list[int]()
    for batch, row, end in rows.runs(start, min(rows.count, start + ADMIT_MESSAGES)):
        sizes += [after - before for before, after in pairwise([0, *batch.byte_ends][row : end + 1])]
    return sizes


class ReplayRun:
    """One run that delivers the rows of a receipt into its target, from `state` on."""

    def __init__(
        self, work: Replay, client: FloeClient, receipt: Receipt, state: TargetState, leaseholders: Leaseholders
    ) -> None:
        self._work, self._client, self._receipt, self._leaseholders = work, client, receipt, leaseholders
        self._first_state, self._target = state, receipt.request.target
        self._hints = ReplayHints(receipt.request, work.options)
        self.state, self.bytes_done = state, 0

    async def run(self, stop: Stop) -> bool:
        """Deliver rows until all are stored, or `stop` is set. Return True if all are stored.

        Raises Stopped with a hint, LeaseLost, and temporary errors.
        """
        info = await self._target_info()
        envelope = ReceiptCodec(self._receipt)
        states = await self._work.open_states(self._client, envelope)
        delivery, source, publisher = await self._build_delivery(info, states, stop)
        try:
            async with any_set(stop, source.finished) as ended:
                await run_with(delivery.run(ended), source.run(), self._watch(delivery, source))
        except BaseExceptionGroup as errors:
            error = most_important_error(errors)
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
            raise Unavailable(f"target {self._target}: its state was changed by another process")
        return is_done

    async def _watch(self, delivery: Delivery, source: ReplaySource) -> None:
        clock, receipt, state = self._work.clock, self._receipt, self._first_state
        progress = ReplayProgress(receipt.ranges, state.checkpoint.positions, _rows(receipt, state))
        started = clock.monotonic()
        while not any(lease.lost.is_set for lease in self._leaseholders):
            await clock.sleep(PROGRESS_INTERVAL_S)
            state, at = delivery.state, clock.monotonic()
            stored = _rows(receipt, state)
            text = progress.line(state.checkpoint.positions, stored, source.bytes_done, at - started)
            self._work.progress.update(f"{text} ({delivery.trouble})" if delivery.trouble else text, at)
        raise LeaseLost(f"lease of target {self._target}: no longer held by this process")

    # The components

    async def _target_info(self) -> StreamInfo:
        if (info := await target.read_target(self._client, self._receipt.request)) is None:
            raise ReplayTargetErrors(self._hints).no_checkpoint(None)
        return info

    async def _limits(self) -> TargetLimits:
        return limits_from(self._client, await self._target_info(), target_settings(self._receipt.request))

    async def _build_delivery(
        self, info: StreamInfo, states: StateStore, stop: Stop
    ) -> tuple[Delivery, ReplaySource, Publisher]:
        work, client, hints, name = self._work, self._client, self._hints, self._target
        limits = limits_from(client, info, target_settings(self._receipt.request))
        chains = ReplayRegistry(limits, hints, self._limits)
        source = await self._build_source(chains)
        chosen = choose_publisher(name, "auto", objections(client.server_version, info.config, frozenset()))
        publisher: Publisher = PUBLISHERS[chosen](client, name, await Replies.open(client))
        if work.options.pace is not None:
            publisher = PacedPublisher(publisher, work.options.pace, work.clock, stop)
        reader = TargetStream(client, name, work.connect)
        reconciler = TargetReconciler(ReplayTargetErrors(hints), states, reader, self._leaseholders, work.clock)
        server = ServerLimits(client, chains, source.reset, hints.refused_hint("E-MSG-TOO-LARGE"))
        return Delivery(name, states, reconciler, publisher, source, work.clock, limits=server), source, publisher

    async def _build_source(self, chains: ReplayRegistry) -> ReplaySource:
        work, call, ranges = self._work, self._work.threads.run, self._receipt.ranges
        found = {each.chain: await call(work.documents.gaps, each.chain) for each in ranges}
        gaps = {chain: [gap.range for gap in accepted] for chain, accepted in found.items()}
        skips = self._receipt.skips_holes or work.options.skip_holes

        def may_skip(chain: Chain, hole: SequenceRange) -> bool:
            return skips or not holes(gaps[chain], hole)

        limit = work.service.memory_limit
        return ReplaySource(ranges, work.store, work.documents, work.threads, chains, may_skip, limit)


class ReplayTargetErrors(TargetErrors):
    """Errors about a target that changed during a replay, with hints for an operator."""

    def __init__(self, hints: ReplayHints) -> None:
        super().__init__(hints.request.target)
        self._hints = hints

    def error(self, verdict: IntentVerdict, seen: Sequence[TargetReading], described: str = "") -> FloeError:
        found = super().error(verdict, seen, described)
        found.hint = self._hints.restart_hint("stop its other writers, ")
        if verdict.finding is Finding.GONE:
            found.hint = choices(("recreate it, and begin again", self._hints.command("--again", "--create")))
        return found

    def no_checkpoint(self, reading: TargetReading | None) -> FloeError:
        found = super().no_checkpoint(reading)
        if reading is not None:
            found.hint = self._hints.restart_hint()
        return found
