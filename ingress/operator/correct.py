"""Execution of an operator's correction: read, plan, show, ask, read again, compare and set."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace

from common.archive.segment import Message
from common.chain import Chain
from common.clock import Clock, SystemClock
from common.errors import DataError, FloeError, OtherWriter, Stopped, Unavailable, UsageError
from common.nats.api import next_message, stream_info
from common.nats.client import FloeClient
from common.nats.kv import KeyValue, open_ingress_state, state_key
from common.nats.pull import for_each_message
from common.open import open_for_view
from common.service.process import ThreadPool
from common.service.progress import Progress, format_share
from common.settings.ingress import TargetSettings
from common.settings.root import Settings
from common.settings.types import format_count
from ingress.checkpoint import STATE_ROLE, ParkedNames, StateStore, TargetState, from_json
from ingress.operator import corrections
from ingress.operator.corrections import Correction, CorrectionRefused, ParkedMarks, Positions, TargetScan
from ingress.parked import ParkedEntry, ParkedName, ParkedStore
from ingress.preflight import control_headers
from ingress.redelivery import PARALLEL_CALLS, run_in_threads
from ingress.verdict.verdict import TargetReading, read_target

BUSY_TIMEOUT_S = 20.0  # seconds that a running delivery may delay a correction of one chain
BUSY_RETRY_S = 0.02  # seconds between two attempts
STILL_INTERVAL_S = 1.0  # seconds in which a target must not move
PROGRESS_MESSAGES = 1000  # messages between two reports of the progress of a scan


@dataclass(frozen=True, slots=True)
class ReadState:
    """Stored value: the state (None: there is none, or it is unreadable), its revision, the reason if unreadable."""

    state: TargetState | None
    revision: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """A correction of the state stored at `known`, planned at the target's last sequence `last`."""

    known: ReadState
    correction: Correction
    last: int | None = None

    @property
    def has_changes(self) -> bool:
        after = self.correction.after  # None frees the positions in the bucket, even without a state
        return bool(self.known.problem) or after is None or after != self.known.state


class CheckpointEditor:
    """Editor of one target for an operator. `config`: the whole configuration, `settings`: the target's part."""

    def __init__(
        self, client: FloeClient, bucket: KeyValue, config: Settings, settings: TargetSettings, clock: Clock
    ) -> None:
        self._client, self._bucket, self._config, self._clock = client, bucket, config, clock
        self._settings, self.target = settings, settings.stream
        self._key = state_key(STATE_ROLE, self.target)

    # Reading

    async def known(self) -> ReadState:
        if (entry := await self._bucket.get(self._key)) is None:
            return ReadState(None, 0)
        try:
            return ReadState(from_json(self.target, entry.value), entry.revision)
        except Stopped as error:
            return ReadState(None, entry.revision, error.message)

    async def _reading(self) -> TargetReading | None:
        return await read_target(self._client, self.target, control_headers(self._settings))

    async def _require_reading(self) -> TargetReading:
        if (reading := await self._reading()) is None:
            raise CorrectionRefused(f"{self.target}: expected a stream, found none", hint="restore it, or use --forget")
        return reading

    async def _run_scan(self, scan: TargetScan) -> TargetScan:
        info = await stream_info(self._client, self.target)
        retention = str(info.config.get("retention", "limits")) if info else "limits"
        progress, begun = Progress(), self._clock.monotonic()

        def report() -> None:
            now = self._clock.monotonic()
            share = format_share(scan.found, scan.last - scan.after, now - begun)
            progress.update(f"read {format_count(scan.found, 'message')} of {self.target}: {share}", now)

        try:
            return await run_scan(self._client, self.target, retention, scan, report)
        finally:
            progress.end_line()

    # Planning

    async def move(self, chain: Chain, sequence: int) -> CheckpointPlan:
        known = await self.known()
        correction = corrections.move(self._state(known), chain, sequence)
        with suppress(FloeError):  # a correction does not depend on the store
            floor = await asyncio.to_thread(lambda: open_for_view(self._config)[1].floor(chain))
            if floor is not None and sequence < floor.first:
                correction.effects.append(f"{chain}: {floor}: the chain stops if those are gone (E-FLOOR)")
        return CheckpointPlan(known, correction)

    async def accept(self, given: Positions, repeats: bool) -> CheckpointPlan:
        known, reading = await self.known(), await self._require_reading()
        state = self._state(known)
        is_same = reading.created == state.checkpoint.target_created
        after = state.checkpoint.target_sequence if is_same else 0
        scan = await self._run_scan(corrections.scan_after_checkpoint(state.intent, after, reading.last_sequence))
        result = corrections.accept(state, reading, scan, given, repeats=repeats, exclusive=self._settings.exclusive)
        return CheckpointPlan(known, result, reading.last_sequence)

    async def count_stored(self, stored: int) -> CheckpointPlan:
        known, reading = await self.known(), await self._require_reading()
        correction = corrections.count_stored(self._state(known), reading, stored)
        return CheckpointPlan(known, correction, reading.last_sequence)

    async def rebuild(self, repeats: bool) -> CheckpointPlan:
        known, reading = await self.known(), await self._require_reading()
        names = known.state.checkpoint.parked_names if known.state else ParkedNames(reading.created)
        entries = await self._parked(names)
        parked = {(name.chain, name.sequence) for name in entries}
        scan = await self._run_scan(TargetScan(0, reading.last_sequence, parked=parked))
        correction = corrections.rebuild(known.state, reading, scan, repeats=repeats, entries=list(entries.values()))
        return CheckpointPlan(known, correction, reading.last_sequence)

    async def forget(self) -> CheckpointPlan:
        known, reading = await self.known(), await self._reading()
        info = await stream_info(self._client, self.target)
        correction = corrections.forget(known.state, reading, info.messages if info else 0)
        return CheckpointPlan(known, correction, None if reading is None else reading.last_sequence)

    async def forget_unlisted(self) -> CheckpointPlan:
        known = await self.known()
        state = self._state(known)
        listed = self._settings.listed_feeds({(chain.site, chain.feed) for chain in state.checkpoint.positions})
        parked = {name.chain for name in await self._parked(state.checkpoint.parked_names)}
        return CheckpointPlan(known, corrections.forget_unlisted(state, listed, parked))

    async def _parked(self, names: ParkedNames) -> dict[ParkedName, ParkedEntry]:
        return await asyncio.to_thread(lambda: open_parked(self._config, self.target, names).list_entries())

    def _state(self, known: ReadState) -> TargetState:
        if known.state is None:
            raise CorrectionRefused(
                f"target {self.target}: expected a stored state, found none: {known.problem or 'no key'}",
                hint="find the positions by reading the target (--from-target), or fill an empty one again (--forget)",
            )
        return known.state

    # Applying

    async def apply(self, plan: CheckpointPlan) -> None:
        """Store the plan, if neither the state nor the target has changed since it was made.

        Raises OtherWriter if the target has changed, Unavailable if the state has.
        """
        if plan.last is not None and self._settings.exclusive:
            await self._clock.sleep(STILL_INTERVAL_S)
            if (reading := await self._reading()) is None or reading.last_sequence != plan.last:
                found = "none" if reading is None else reading.last_sequence
                raise OtherWriter(
                    f"target {self.target}: expected last sequence {plan.last} as before, found {found}",
                    hint="stop its other publisher, then run the command again",
                    code="E-TARGET-SHARED",
                )
        if not await self._store_plan(plan):
            message = f"state of target {self.target}: changed by another process meanwhile"
            raise Unavailable(message, hint="run the command again", code="E-STATE-MOVED")

    async def apply_with_retry(self, plan: CheckpointPlan, planning: Callable[[], Awaitable[CheckpointPlan]]) -> None:
        deadline = self._clock.monotonic() + BUSY_TIMEOUT_S
        while not await self._store_plan(plan):
            await self._clock.sleep(BUSY_RETRY_S)
            plan = await self.plan_with_retry(planning, deadline)

    async def plan_with_retry(
        self, planning: Callable[[], Awaitable[CheckpointPlan]], deadline: float | None = None
    ) -> CheckpointPlan:
        """Return the plan; retry while an open intent prevents it, and raise its error in the end."""
        deadline = self._clock.monotonic() + BUSY_TIMEOUT_S if deadline is None else deadline
        while True:
            try:
                return await planning()
            except CorrectionRefused:
                if self._clock.monotonic() > deadline:
                    raise
                before = await self.known()
                await self._clock.sleep(STILL_INTERVAL_S)
                # If the state changes, the intent that is open now will be closed.
                if (await self.known()).revision == before.revision:
                    raise
            await self._clock.sleep(BUSY_RETRY_S)

    async def _store_plan(self, plan: CheckpointPlan) -> bool:
        after, revision = plan.correction.after, plan.known.revision
        if after is None or not after.checkpoint.positions:
            await asyncio.to_thread(self._free_positions)
        if after is None:
            return revision == 0 or await self._bucket.delete(self._key, revision)
        # Before the state moves: afterwards no process would write them.
        if (marks := plan.correction.marks) != ParkedMarks():
            await self._write_marks(marks, open_parked(self._config, self.target, after.checkpoint.parked_names))
        store = StateStore(self._bucket, self.target)
        return await store.save(after, revision) is not None

    def _free_positions(self) -> None:
        """Remove positions and writer from the object in the bucket: the target needs everything again, and no state
        shows any more that it is ours. Blocking.
        """
        documents = open_for_view(self._config)[1]
        with suppress(DataError):
            if (found := documents.read_positions(self.target)) is not None:
                documents.write_positions(replace(found, positions={}, stopped={}, writer=""))

    async def _write_marks(self, marks: ParkedMarks, parked: ParkedStore) -> None:
        with closing(ThreadPool("marks", PARALLEL_CALLS)) as threads:
            await run_in_threads(threads, parked.mark_left_out, [parked.name(*each) for each in marks.left_out])
            await run_in_threads(threads, parked.mark_delivered, [parked.name(*each) for each in marks.delivered])


async def run_scan(
    client: FloeClient, stream: str, retention: str, scan: TargetScan, on_progress: Callable[[], None] = lambda: None
) -> TargetScan:
    """Run the scan, headers only. `retention`: the stream's. A work queue allows no second consumer, so it is read
    message by message. `on_progress`: called every `PROGRESS_MESSAGES` messages. Raises Unavailable if it does not
    answer, ApiError.
    """

    def add(message: Message) -> None:
        scan.add(message.sequence, message.headers)
        if scan.found % PROGRESS_MESSAGES == 0:
            on_progress()

    if retention == "limits":
        await for_each_message(client, stream, scan.last, add, after=scan.after, headers_only=True)
        return scan
    at = scan.after + 1
    while at <= scan.last:
        if (message := await next_message(client, stream, at)) is None or message.sequence > scan.last:
            break
        add(message)
        at = message.sequence + 1
    return scan


@asynccontextmanager
async def open_editor(settings: Settings, target: str) -> AsyncIterator[CheckpointEditor]:
    """Open an editor of the target's state. Raises UsageError if the configuration has no such target."""
    found = find_target(settings, target)
    async with open_ingress_state(settings, "floe checkpoint") as (client, bucket):
        yield CheckpointEditor(client, bucket, settings, found, SystemClock())


def find_target(settings: Settings, target: str) -> TargetSettings:
    """Return the settings of the target. Raises UsageError if the configuration has no such target."""
    targets = {each.stream: each for each in settings.ingress.targets}
    if target not in targets:
        raise UsageError(f"--target: expected one of {', '.join(targets) or 'none'}, found {target}")
    return targets[target]


def open_parked(settings: Settings, target: str, names: ParkedNames | str) -> ParkedStore:
    _, documents = open_for_view(settings)
    return ParkedStore(documents.objects, documents.layout, target, names)
