"""Carrying what a receipt says, once: the parts of ingress that publish, over the rows of a replay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError, LeaseLost, Unavailable
from common.jetstream.api import StreamInfo
from common.jetstream.client import FloeClient
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, holes
from common.service.pasting import ways
from common.service.threads import Threads
from common.settings.service import ServiceSettings
from common.tasks import beside, either
from ingress.checkpoint import TargetState
from ingress.checkpoints.state import StateStore
from ingress.delivery import Carrier
from ingress.deps import open_bucket
from ingress.errors import leading
from ingress.limits import ServerLimits
from ingress.preflight import shape_of
from ingress.publishers.choose import choose, make, offered
from ingress.publishers.publisher import Replies
from ingress.publishing.publisher import Publisher
from ingress.replay import target
from ingress.replay.advice import Advice
from ingress.replay.leasing import Tenures
from ingress.replay.options import Options
from ingress.replay.pacing import Interrupted, PacedPublisher
from ingress.replay.preparing import ReplayRoster, target_settings
from ingress.replay.progress import Standing, Teller, progress_line, standing
from ingress.replay.receipt import Receipt, ReceiptBucket, receipt_key
from ingress.replay.source import ReplaySource
from ingress.rows.prepare import Shape
from ingress.verdict.settle import Settler
from ingress.verdict.verdict import Finding, Reading, Verdict
from ingress.verdicts.choices import Choices
from ingress.verdicts.target import Target

WATCH_SPACING = 0.25  # seconds


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What carrying needs. `connect` opens a fresh connection to the target's server."""

    client: FloeClient
    connect: Callable[[], Awaitable[FloeClient]]
    settings: ServiceSettings
    options: Options
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

    async def run(self, stop: asyncio.Event) -> bool:
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
        if not stop.is_set():
            raise Unavailable(f"target {self._target}: its state was moved by somebody else")
        return False

    async def _run_beside(self, carrier: Carrier, source: ReplaySource, stop: asyncio.Event) -> None:
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

    async def _watch(self, carrier: Carrier, source: ReplaySource) -> None:
        """Tell how far it is; ends everything when a lease is lost."""
        clock = self._around.clock
        begun, started = self.standing(self._begun, 0), clock.monotonic()
        while not self._tenures.is_lost:
            await clock.sleep(WATCH_SPACING)
            now, at = self.standing(carrier.state, source.bytes_done), clock.monotonic()
            text = progress_line(now, begun, at - started)
            self._around.teller.progress(f"{text} ({carrier.trouble})" if carrier.trouble else text, at)
        raise LeaseLost(f"lease of target {self._target} is not ours any more")

    def standing(self, state: TargetState, raw_bytes: int) -> Standing:
        """How far the replay is by `state`."""
        rows = state.checkpoint.target_sequence - self._receipt.base
        return standing(self._receipt.ranges, state.checkpoint.positions, rows, raw_bytes)

    # The components

    def _roster(self, info: StreamInfo) -> ReplayRoster:
        settings = target_settings(self._receipt.request)
        shape = shape_of(self._around.client, info, settings)
        return ReplayRoster(settings, shape, self._receipt.request)

    async def _shape(self) -> Shape:
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

    async def _publisher(self, info: StreamInfo, stop: asyncio.Event) -> Publisher:
        around, name = self._around, self._target
        against = offered(around.client.server_version, info.config, frozenset())
        chosen = choose(name, "auto", against)
        publisher = make(chosen, around.client, name, await Replies.open(around.client))
        pace = around.options.pace
        return publisher if pace is None else PacedPublisher(publisher, pace, around.clock, stop)

    def _carrier(
        self, keeper: StateStore, source: ReplaySource, publisher: Publisher, roster: ReplayRoster
    ) -> Carrier:
        around, name = self._around, self._target
        looker = Target(around.client, name, around.connect)
        spacing = around.options.look_spacing
        settler = Settler(ReplayChoices(self._advice), keeper, looker, self._tenures, around.clock, spacing)
        hint = self._advice.refused("E-MSG-TOO-LARGE")
        limits = ServerLimits(around.client, roster, self._shape, source.reset, hint)
        return Carrier(name, keeper, settler, publisher, source, around.clock, limits=limits)


class ReplayChoices(Choices):
    """What an operator does about a target that a replay found changed."""

    def __init__(self, advice: Advice) -> None:
        super().__init__(advice.request.target)
        self._advice = advice

    def error(self, verdict: Verdict, seen: Sequence[Reading], described: str = "") -> FloeError:
        found = super().error(verdict, seen, described)
        found.hint = self._advice.anew("stop what else writes to it, ")
        if verdict.finding is Finding.GONE:
            anew = self._advice.same("--again", "--create")
            found.hint = ways(("make it again and begin anew", anew))
        return found

    def no_checkpoint(self, reading: Reading | None) -> FloeError:
        found = super().no_checkpoint(reading)
        if reading is not None:
            found.hint = self._advice.anew()
        return found
