"""Retries of parked messages on request of an operator, alongside the delivery."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from common.chain import Chain
from common.clock import Clock
from common.errors import ConfigError, DataError, FloeError
from common.failpoints import failpoint
from common.logs import get_logger
from common.service.process import ThreadPool
from common.tasks import Stop
from ingress import metrics
from ingress.chains.prefetch import Prefetcher
from ingress.chains.sources import PauseStore
from ingress.checkpoint import Intent, IntentPiece
from ingress.parked import ParkedEntry, ParkedName, ParkedState, ParkedStore, count_waiting
from ingress.rows.prepare import RowRefused
from ingress.rows.rows import Block, Rows

log = get_logger(__name__)


T = TypeVar("T")
R = TypeVar("R")

PARALLEL_CALLS = 16


async def run_in_threads(threads: ThreadPool, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call with each item, PARALLEL_CALLS at a time, and return the results in order. Raises the error of any call."""
    wanted, done = list(items), list[R]()
    for start in range(0, len(wanted), PARALLEL_CALLS):
        group = wanted[start : start + PARALLEL_CALLS]
        done += await asyncio.gather(*(threads.run(call, one) for one in group))
    return done


class ParkedSource:
    """The rows of a prefetcher, with parked messages to retry among them."""

    def __init__(self, prefetcher: Prefetcher, parked: ParkedStore, threads: ThreadPool) -> None:
        self._prefetcher, self._parked, self._threads = prefetcher, parked, threads
        self.recall = prefetcher.recall
        self.offered: dict[ParkedName, int] = {}

    @property
    def offered_bytes(self) -> int:
        return sum(self.offered.values())

    def offer(self, block: Block) -> None:
        self.offered[self._name(block.piece)] = block.size
        self._prefetcher.offer(block)

    async def take(self, stop: Stop, seconds: float) -> Rows | None:
        while (rows := await self._prefetcher.take(stop, seconds)) is not None:
            if not any(block.piece.is_retry for block in rows.blocks):
                return rows
            remaining = await self._without_delivered(rows)
            if remaining.blocks:
                return remaining
        return None

    async def _without_delivered(self, rows: Rows) -> Rows:
        remaining, refused = list[Block](), list[Block]()
        names = list({self._name(block.piece): None for block in rows.blocks if block.piece.is_retry})
        try:
            deliverable = await run_in_threads(self._threads, self._parked.may_be_delivered, names)
        except BaseException:
            self._prefetcher.release(rows)
            raise
        left = {name for name, each in zip(names, deliverable, strict=True) if each}
        for block in rows.blocks:
            if not block.piece.is_retry:
                remaining.append(block)
            elif (name := self._name(block.piece)) in left:
                left.discard(name)  # each message once
                remaining.append(block)
            else:
                refused.append(block)
                self.offered.pop(name, None)
        self._prefetcher.release(Rows(refused))
        return Rows(remaining)

    def release(self, rows: Rows) -> None:
        self._prefetcher.release(rows)

    def record_stored(self, positions: Mapping[Chain, int]) -> None:
        self._prefetcher.record_stored(positions)

    def reset(self, positions: Mapping[Chain, int]) -> None:
        self.offered.clear()
        self._prefetcher.reset(positions)

    async def before_close(self, intent: Intent) -> None:
        """Mark the messages that the intent delivered out of turn and those it left out, before the state moves."""
        left_out = [(p.chain, each) for p in intent.pieces for each in p.parked]
        names = [self._parked.name(*each) for each in left_out]
        await run_in_threads(self._threads, self._parked.mark_left_out, names)
        delivered = [self._name(piece) for piece in intent.pieces if piece.is_retry]
        if delivered:
            failpoint("ingress.before_delivered")
            await run_in_threads(self._threads, self._parked.mark_delivered, delivered)
        for name in delivered:
            self.offered.pop(name, None)
        # The listing that sets the exact value is rare.
        metrics.parked_waiting.labels(self._parked.target).inc(len(names) - len(delivered))

    def _name(self, piece: IntentPiece) -> ParkedName:
        return self._parked.name(piece.chain, piece.rows.first)


REQUEST_CHECK_INTERVAL_S = 15.0  # seconds between two checks: one HEAD, and one short listing for each open request
FULL_LISTING_INTERVAL_S = 600.0  # seconds until all parked messages are listed, even without a new request
MAX_OFFERED_BYTES = 16 * 1024 * 1024  # bytes in flight at a time, or one larger message
ROOM_CHECK_INTERVAL_S = 0.1  # seconds between two checks for room


class Retries:
    """Retry of parked messages when an operator requests it. If the target still refuses a message, its request is
    answered, and the message stays parked.

    `renew_limits`: reads the limits of the target, before a message is prepared for it.
    """

    check_interval_s = REQUEST_CHECK_INTERVAL_S

    def __init__(
        self,
        parked: ParkedStore,
        source: ParkedSource,
        threads: ThreadPool,
        clock: Clock,
        renew_limits: Callable[[], Awaitable[None]],
        decisions: PauseStore,
    ) -> None:
        self._parked, self._source, self._threads = parked, source, threads
        self._renew_limits, self._decisions, self._clock = renew_limits, decisions, clock
        self._seen: object = None  # at the last listing of everything
        self._listed_at = float("-inf")
        self._open: list[ParkedEntry] = []
        self._warned: set[ParkedName] = set()

    async def run(self) -> None:
        while True:
            try:
                await self.check()
            except FloeError as error:
                # No error here may end the delivery.
                target = self._parked.target
                log.warning("parked check deferred", action="parked_check_deferred", target=target, error=str(error))
            await self._clock.sleep(self.check_interval_s)

    async def check(self) -> None:
        """Retry the messages that are requested and not in flight. Raises as store, target and state bucket do."""
        await self._find_requests()
        wanted = [entry for entry in self._open if entry.name not in self._source.offered]
        if wanted:
            paused = (await self._decisions.read()).paused
            wanted = [entry for entry in wanted if entry.name.chain not in paused]
        if wanted:
            await self._renew_limits()
        for entry in wanted:
            while self._source.offered_bytes and self._source.offered_bytes + entry.size > MAX_OFFERED_BYTES:
                await self._clock.sleep(ROOM_CHECK_INTERVAL_S)
            try:
                await self._try(entry)
                self._warned.discard(entry.name)
            except FloeError as error:
                # It delays no other message, and is logged once.
                if entry.name not in self._warned:
                    self._warned.add(entry.name)
                    context = self._log_context(entry, str(error))
                    log.warning("parked retry deferred", action="parked_retry_deferred", **context)

    async def _find_requests(self) -> None:
        seen = (self._parked.names, await self._threads.run(self._parked.request_etag))
        now = self._clock.monotonic()
        if seen != self._seen or now - self._listed_at >= FULL_LISTING_INTERVAL_S:
            found = await self._threads.run(self._parked.list_entries)
            metrics.parked_waiting.labels(self._parked.target).set(count_waiting(found))
            self._seen, self._listed_at, entries = seen, now, list(found.values())
        else:
            names = [entry.name for entry in self._open]
            entries = await run_in_threads(self._threads, self._parked.read_entry, names)
        self._open = [entry for entry in entries if entry.state is ParkedState.REQUESTED]

    async def _try(self, entry: ParkedEntry) -> None:
        try:
            self._source.offer(await self._source.recall.prepare_parked(entry.name))
        except (RowRefused, ConfigError, DataError) as error:
            reason = error.reason if isinstance(error, RowRefused) else error.message
            await self._threads.run(self._parked.refuse_retry, entry, reason)
            context = self._log_context(entry, reason)
            log.warning("parked retry refused", action="parked_retry_refused", **context)

    def _log_context(self, entry: ParkedEntry, reason: str) -> dict[str, object]:
        own = {"target": self._parked.target, "sequence": entry.name.sequence, "error": reason}
        return own | entry.name.chain.log_context()
