"""One replay: look, refuse or begin, carry, go on after what passes by itself, remember the end.

survey → checks → target made → receipt stored → carried by intents → receipt marked as finished

A crash anywhere leaves nothing, or a receipt with which the same command goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from common.clock import Clock, wait_for
from common.errors import FloeError, Unavailable
from common.failpoints import failpoint
from common.jetstream.api import StreamInfo
from common.jetstream.client import FloeClient, connect
from common.jetstream.kv import KeyValue
from common.jetstream.lease import new_owner
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.service.threads import Threads
from common.settings.root import Settings
from common.settings.service import ServiceSettings
from ingress.checkpoint import Checkpoint, TargetState
from ingress.errors import passes_by_itself
from ingress.replay import target
from ingress.replay.advice import Advice
from ingress.replay.carrying import Carrying, Surroundings
from ingress.replay.leasing import HeldError, check_free, leased
from ingress.replay.options import Options, Result
from ingress.replay.outlook import Outlook, check_plan, continued, former_of, outlook
from ingress.replay.progress import Teller
from ingress.replay.receipt import Receipt, Remembered, Unreadable, receipt_key
from ingress.replay.request import Request
from ingress.replay.survey import Survey

THREADS = 6
PATIENCE = 300.0  # seconds without progress until it is given up
FIRST_PAUSE, LAST_PAUSE = 1.0, 15.0  # seconds between attempts


class Replay:
    """One request over one archive."""

    def __init__(
        self,
        settings: Settings,
        request: Request,
        options: Options,
        store: SegmentStore,
        documents: ChainStore,
        clock: Clock,
        teller: Teller,
    ) -> None:
        self._settings, self.request, self._options = settings, request, options
        self._store, self._documents, self._clock, self._teller = store, documents, clock, teller
        self._threads = Threads("replay", THREADS)
        self.survey = Survey(store, documents, self._threads, clock)
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

    async def run(self, client: FloeClient, stop: asyncio.Event) -> Result:
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

    async def _attempt(self, client: FloeClient, stop: asyncio.Event, started: float) -> Result:
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
    ) -> Result:
        rows = state.checkpoint.target_sequence - receipt.base
        before = rows if was_done else self._former_rows
        seconds = self._clock.monotonic() - started
        return Result(finished, was_done, rows, rows - before, self._bytes, seconds, receipt.request.target)
