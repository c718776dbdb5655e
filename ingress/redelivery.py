"""Retries of parked messages on request of an operator, alongside the delivery."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from common.chain import Chain
from common.clock import Clock
from common.errors import ConfigError, DataError, FloeError
from common.failpoints import failpoint
from common.logs import get_logger
from common.service.process import Threads
from common.tasks import Stop
from ingress import metrics
from ingress.chains.pauses import PauseStore
from ingress.chains.prefetch import Prefetcher
from ingress.checkpoint import Intent, IntentPiece
from ingress.parked import ParkedEntry, ParkedName, ParkedStore, State, waiting
from ingress.rows.prepare import RowRefused
from ingress.rows.rows import Block, Rows

log = get_logger(__name__)


T = TypeVar("T")
R = TypeVar("R")

PARALLEL = 16


async def in_threads(threads: Threads, call: Callable[[T], R], each: Iterable[T]) -> list[R]:
    """Call with each item, PARALLEL at a time, and return the results in order. Raises the error of any call."""
    wanted, done = list(each), list[R]()
    for start in range(0, len(wanted), PARALLEL):
        group = wanted[start : start + PARALLEL]
        done += await asyncio.gather(*(threads.run(call, one) for one in group))
    return done


class ParkedSource:
    """The rows of a prefetcher, with parked messages to retry among them."""

    def __init__(self, prefetcher: Prefetcher, parked: ParkedStore, threads: Threads) -> None:
        self._prefetcher, self._parked, self._threads = prefetcher, parked, threads
        self.recall = prefetcher.recall
        self._offered: dict[ParkedName, int] = {}

    def is_offered(self, name: ParkedName) -> bool:
        return name in self._offered

    @property
    def offered_bytes(self) -> int:
        return sum(self._offered.values())

    def offer(self, block: Block) -> None:
        self._offered[self._name(block.piece)] = block.size
        self._prefetcher.offer(block)

    async def take(self, stop: Stop, seconds: float) -> Rows | None:
        while (rows := await self._prefetcher.take(stop, seconds)) is not None:
            if not any(block.piece.out_of_turn for block in rows.blocks):
                return rows
            kept = await self._kept(rows)
            if kept.blocks:
                return kept
        return None

    async def _kept(self, rows: Rows) -> Rows:
        kept, refused = list[Block](), list[Block]()
        names = list({self._name(block.piece): None for block in rows.blocks if block.piece.out_of_turn})
        try:
            may = await in_threads(self._threads, self._parked.may_be_delivered, names)
        except BaseException:
            self._prefetcher.release(rows)
            raise
        left = {name for name, each in zip(names, may, strict=True) if each}
        for block in rows.blocks:
            if not block.piece.out_of_turn:
                kept.append(block)
            elif (name := self._name(block.piece)) in left:
                left.discard(name)  # each message once
                kept.append(block)
            else:
                refused.append(block)
                self._offered.pop(name, None)
        self._prefetcher.release(Rows(refused))
        return Rows(kept)

    def release(self, rows: Rows) -> None:
        self._prefetcher.release(rows)

    def closed(self, positions: Mapping[Chain, int]) -> None:
        self._prefetcher.closed(positions)

    def reset(self, positions: Mapping[Chain, int]) -> None:
        self._offered.clear()
        self._prefetcher.reset(positions)

    async def before_close(self, intent: Intent) -> None:
        """Mark the messages that the intent delivered out of turn and those it left out, before the state moves."""
        left_out = [(p.chain, each) for p in intent.pieces for each in p.left_out]
        names = [self._parked.name(*each) for each in left_out]
        await in_threads(self._threads, self._parked.mark_left_out, names)
        delivered = [self._name(piece) for piece in intent.pieces if piece.out_of_turn]
        if delivered:
            failpoint("ingress.before_delivered")
            await in_threads(self._threads, self._parked.mark_delivered, delivered)
        for name in delivered:
            self._offered.pop(name, None)
        # The listing that sets the exact value is rare.
        metrics.parked_waiting.labels(self._parked.target).inc(len(names) - len(delivered))

    def _name(self, piece: IntentPiece) -> ParkedName:
        return self._parked.name(piece.chain, piece.rows.first)


SPACING = 15.0  # seconds between two checks: one HEAD, and one short listing for each open request
EVERYTHING = 600.0  # seconds until all parked messages are listed, even without a new request
MAX_OFFERED = 16 * 1024 * 1024  # bytes in flight at a time, or one larger message
ROOM_SPACING = 0.1  # seconds between two checks for room


class Retries:
    """Retry of parked messages when an operator requests it. If the target still refuses a message, its request is
    answered, and the message stays parked.

    `renew_limits`: reads the limits of the target, before a message is prepared for it.
    """

    spacing = SPACING

    def __init__(
        self,
        parked: ParkedStore,
        source: ParkedSource,
        threads: Threads,
        clock: Clock,
        renew_limits: Callable[[], Awaitable[None]],
        decisions: PauseStore,
    ) -> None:
        self._parked, self._source, self._threads = parked, source, threads
        self._renew_limits, self._decisions, self._clock = renew_limits, decisions, clock
        self._seen: object = None  # at the last listing of everything
        self._listed_at = float("-inf")
        self._open: list[ParkedEntry] = []
        self._told: set[ParkedName] = set()

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except FloeError as error:
                # No error here may end the delivery.
                what, target = "parked messages not looked at", self._parked.target
                log.warning(what, action="parked_retry", target=target, error=str(error))
            await self._clock.sleep(self.spacing)

    async def look(self) -> None:
        """Retry the messages that are requested and not in flight. Raises as store, target and state bucket do."""
        await self._find()
        wanted = [entry for entry in self._open if not self._source.is_offered(entry.name)]
        if wanted:
            paused = (await self._decisions.read()).paused
            wanted = [entry for entry in wanted if entry.name.chain not in paused]
        if wanted:
            await self._renew_limits()
        for entry in wanted:
            while self._source.offered_bytes and self._source.offered_bytes + entry.size > MAX_OFFERED:
                await self._clock.sleep(ROOM_SPACING)
            try:
                await self._try(entry)
                self._told.discard(entry.name)
            except FloeError as error:
                # It delays no other message, and is logged once.
                if entry.name not in self._told:
                    self._told.add(entry.name)
                    self._tell("parked message not tried", entry, "parked_retry", str(error))

    async def _find(self) -> None:
        seen = (self._parked.kept_as, await self._threads.run(self._parked.last_request))
        now = self._clock.monotonic()
        if seen != self._seen or now - self._listed_at >= EVERYTHING:
            found = await self._threads.run(self._parked.entries)
            metrics.parked_waiting.labels(self._parked.target).set(waiting(found))
            self._seen, self._listed_at, entries = seen, now, list(found.values())
        else:
            names = [entry.name for entry in self._open]
            entries = await in_threads(self._threads, self._parked.entry, names)
        self._open = [entry for entry in entries if entry.state is State.ASKED]

    async def _try(self, entry: ParkedEntry) -> None:
        try:
            self._source.offer(await self._source.recall.again(entry.name))
        except (RowRefused, ConfigError, DataError) as error:
            why = error.why if isinstance(error, RowRefused) else error.message
            await self._threads.run(self._parked.answer, entry, why)
            self._tell("message stays parked", entry, "parked_refused", why)

    def _tell(self, what: str, entry: ParkedEntry, action: str, why: str) -> None:
        context = entry.name.chain.log_context()
        target, sequence = self._parked.target, entry.name.sequence
        log.warning(what, action=action, target=target, sequence=sequence, error=why, **context)
