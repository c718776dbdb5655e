"""Report of a target's lag behind the archive, chain by chain: gauges, set from values in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

from common.archive.documents import ChainStore, TargetPositions
from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError
from common.logs import get_logger
from common.metrics import show_zeros
from common.nats.lease import format_owner
from common.observe.monitor import Health
from common.service.process import ThreadPool
from ingress import metrics
from ingress.chains.chain_state import ChainState
from ingress.chains.plan import Phase
from ingress.chains.prefetch import Prefetcher
from ingress.checkpoint import Intent
from ingress.delivery import Delivery
from ingress.discovery.sites import Heartbeats, interleave_by_site
from ingress.rows.rows import Block, Rows

log = get_logger(__name__)


Labels = tuple[str, str, str, str]


@dataclass(slots=True)
class Lag:
    """Lag of one chain, or of one partition over all its incarnations.

    `sequences`, `messages`: archived, and not in the target yet; rows that are not decoded count by their sequences in
    both. `seconds`: age of the oldest such message, or of its segment; 0 if there is none; at least the time for which
    the store has been unreadable. `waiting`: seconds that a hole or damage has lasted; `late`: sequences of that hole.
    """

    sequences: int = 0
    messages: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    late: int = 0

    def add(self, other: Lag) -> None:
        self.sequences, self.messages = self.sequences + other.sequences, self.messages + other.messages
        self.seconds, self.waiting = max(self.seconds, other.seconds), max(self.waiting, other.waiting)
        self.late += other.late


class Lags:
    """The gauges of one target. The label sets that were shown are kept, so that they can be removed."""

    def __init__(self, target: str) -> None:
        self._target = target
        # Position, time, and True for the time of a message or a segment; False: the time of the first measurement.
        self._oldest: dict[Chain, tuple[int, float, bool]] = {}
        self._shown: set[Labels] = set()
        self._unreadable_since: float | None = None

    def record_store_state(self, *, is_read: bool, now: float) -> None:
        """Record if the store can be read at `now` (seconds since 1970). While it cannot, segments archived since then
        are unknown: each chain counts as behind for at least as long.
        """
        self._unreadable_since = None if is_read else self._unreadable_since or now

    def _at_least_outage(self, seconds: float, now: float) -> float:
        return seconds if self._unreadable_since is None else max(seconds, now - self._unreadable_since)

    def measure(
        self,
        chains: Iterable[ChainState],
        positions: Mapping[Chain, int],
        ready: Iterable[Block],
        intent: Intent | None,
        now: float,
        sites: Heartbeats | None = None,
        sending: Mapping[Chain, float] | None = None,
    ) -> None:
        """Set the gauges at `now` (seconds since 1970). `ready`: decoded blocks, in order; `intent`: the open one;
        `sending`: for each chain in it, the time of its first message; `sites`: the reports of egress.
        """
        counts, times = _decoded(ready, intent, sending or {})
        found: dict[Labels, Lag] = {}
        stopped = paused = 0
        newest: dict[Labels, ChainState] = {}
        latest: dict[Labels, tuple[int, int]] = {}  # the newest incarnation with a position
        for state in chains:
            lag = self._lag(state, positions, counts[state.chain], times.get(state.chain), now)
            labels = self._target, state.chain.site, state.chain.feed, str(state.chain.partition)
            lag.seconds = self._at_least_outage(lag.seconds, now)
            found.setdefault(labels, Lag()).add(lag)
            newest[labels] = max(state, newest.get(labels, state), key=lambda each: each.chain.incarnation)
            if at := positions.get(state.chain, state.position if state.plan.is_waiting else 0):
                latest[labels] = max(latest.get(labels, (-1, 0)), (state.chain.incarnation, at))
            stopped += state.stopped is not None
            paused += state.phase is Phase.PAUSED
        metrics.stopped_chains.labels(self._target).set(stopped)
        metrics.paused_chains.labels(self._target).set(paused)
        metrics.intent_open.labels(self._target).set(intent is not None)
        for labels, (_, at) in latest.items():
            metrics.position.labels(*labels).set(at)
        for labels, lag in found.items():
            for gauge, value in zip(_LAGS, astuple(lag), strict=True):
                gauge.labels(*labels).set(value)
            state = newest[labels]
            stored = sites.heartbeat_of(state.chain) if sites else None
            left = stored.heartbeat.unarchived_count(state.chain.incarnation, state.archived) if stored else None
            if left is not None:  # else keep the last value
                metrics.source_lag_sequences.labels(*labels).set(lag.sequences + left)
        self._shown |= set(found)
        metrics.lag_measured.labels(self._target).set(now)

    def forget(self) -> None:
        self._oldest.clear()
        for gauge, labels in [*product(_OF_CHAINS, self._shown), *product(_OF_TARGET, [(self._target,)])]:
            with suppress(KeyError):
                gauge.remove(*labels)
        self._shown.clear()

    def age(self, state: ChainState, positions: Mapping[Chain, int], now: float) -> float:
        """Age in seconds of the chain's oldest message that is not in the target; 0: none, or not measured."""
        at, since, _ = self._oldest.get(state.chain, (0, now, False))
        return self._at_least_outage(max(0.0, now - since) if at == _position(state, positions) else 0.0, now)

    def _lag(
        self, state: ChainState, positions: Mapping[Chain, int], decoded: int, oldest: float | None, now: float
    ) -> Lag:
        at = _position(state, positions)
        # Sequences after the end of the incarnation never reach the target.
        archived = state.archived if state.end is None else min(state.archived, state.end)
        sequences = max(0, archived - at + 1)
        messages = decoded + max(0, archived - max(at, state.position) + 1)
        since = state.plan.waiting_since
        return Lag(
            sequences,
            min(messages, sequences) if sequences else messages,
            now - self._since(state, at, oldest, now) if sequences or decoded else 0.0,
            0.0 if since is None else max(0.0, now - since),
            0 if state.plan.hole is None else len(state.plan.hole),
        )

    def _since(self, state: ChainState, at: int, oldest: float | None, now: float) -> float:
        """Return the publish time of the oldest message that is not in the target. It stays while nothing moves.

        If no message of it has been read, as in a paused chain, it is the time at which it was first seen.
        """
        known_at, since, is_known = self._oldest.get(state.chain, (0, now, False))
        if known_at != at:
            since, is_known = now, False
        if not is_known:
            segment = state.stretches[0].segment.modified if state.stretches else state.plan.waiting_since
            found = next((time for time in (oldest, segment) if time is not None), None)
            since, is_known = min(since, found or since), found is not None
        self._oldest[state.chain] = (at, since, is_known)
        return since


_OF_TARGET = (
    metrics.stopped_chains,
    metrics.paused_chains,
    metrics.intent_open,
    metrics.target_sequence,
    metrics.lag_measured,
)
# In the order of the fields of `Lag`.
_LAGS = (
    metrics.lag_sequences,
    metrics.lag_messages,
    metrics.lag_seconds,
    metrics.waiting_seconds,
    metrics.late_sequences,
)
_OF_CHAINS = (*_LAGS, metrics.position, metrics.source_lag_sequences)


def _position(state: ChainState, positions: Mapping[Chain, int]) -> int:
    return positions.get(state.chain, state.position or 1)


def _decoded(
    ready: Iterable[Block], intent: Intent | None, sending: Mapping[Chain, float]
) -> tuple[Counter[Chain], dict[Chain, float]]:
    counts: Counter[Chain] = Counter()
    for piece in intent.pieces if intent else ():
        counts[piece.chain] += piece.count
    rows = Rows(list(ready))
    for block in rows.blocks:
        counts[block.piece.chain] += block.piece.count
    return counts, rows.first_times() | (dict(sending) if intent else {})


REMINDER_INTERVAL_S = 600.0  # seconds until the same reason is logged again
MAX_STATUS_CHAINS = 1000  # chains of one target in /status, at most


class TargetReport:
    """Report of one target to log, metrics and /status. `is_stopped`: True if it is known to wait for an operator."""

    def __init__(
        self, target: str, health: Health, clock: Clock, sites: Heartbeats | None = None, owner: str = ""
    ) -> None:
        self.target, self._health, self._clock, self._sites = target, health, clock, sites
        self._part, self._owner, self.lags = f"target {target}", owner, Lags(target)
        self.is_stopped = self._is_final = False
        self._publisher, self._reason, self._logged = "", "", float("-inf")
        self._trouble, self._troubled_at = "", 0.0
        show_zeros("ingress_", target=target)
        for each in (metrics.holds_lease, metrics.stopped_targets, metrics.publish_done):
            each.labels(target).set(0)
        self._set_state("starting", ready=False, reason="the holder of its lease is not known yet")

    # The lease

    def set_standby(self, holder: str | None) -> None:
        if holder not in (None, self._owner):
            self.lags.forget()
            self._show_publisher("")
        self._set_state("standby", ready=True, holder=format_owner(holder or ""))

    def set_waiting(self, error: FloeError) -> None:
        self._set_state("waits", ready=False, reason=error.message)

    def report_held(self) -> None:
        metrics.holds_lease.labels(self.target).set(1)
        self._set_state("starting", ready=False, reason="starting")
        log.info("lease acquired", action="lease_acquired", target=self.target)

    def report_released(self) -> None:
        """Report that the lease is released. The values of the chains stay until another instance is seen to hold it:
        while NATS is unavailable, none does.
        """
        metrics.holds_lease.labels(self.target).set(0)
        metrics.stopped_targets.labels(self.target).set(0)
        self.is_stopped, self._trouble = False, ""  # the next holder finds the trouble by itself
        self._set_state("standby", ready=True, holder="")
        log.info("lease released", action="lease_released", target=self.target)

    # Delivering

    def report_publisher(self, name: str, against: dict[str, str]) -> None:
        """Report the publisher. It is logged only if it differs from the one shown."""
        if name != self._publisher:
            reasons = {other: reason for other, reason in against.items() if reason}
            log.info("publisher chosen", action="publisher_chosen", target=self.target, publisher=name, against=reasons)
        self._show_publisher(name)

    def report_progress(self, delivery: Delivery, prefetcher: Prefetcher) -> None:
        """Report the progress. Call it every second."""
        metrics.stopped_targets.labels(self.target).set(0)
        self.is_stopped = False
        state, now, chains = delivery.state, self._clock.now(), prefetcher.chains
        if delivery.is_settled and not delivery.trouble:
            self._end_trouble()
        self.lags.record_store_state(is_read=not self._health.not_ready_reason("store"), now=now)
        positions = state.checkpoint.positions
        shown = {
            str(each.chain): {
                **each.status(positions),
                "lag_seconds": round(self.lags.age(each, positions, now)),
                **self._source(each.chain),
            }
            for each in interleave_by_site(chains, lambda each: each.chain.site)[:MAX_STATUS_CHAINS]
        }
        status = {
            "state": "carrying",
            "publisher": self._publisher,
            "trouble": delivery.trouble,
            "target_sequence": state.checkpoint.target_sequence,
            "intent": state.intent and {"base": state.intent.base, "count": state.intent.count},
            "chains": shown,
        }
        self._health.set_ready(self._part, not delivery.unready_reason, delivery.unready_reason)
        self._health.set_status(self._part, status)
        metrics.target_sequence.labels(self.target).set(state.checkpoint.target_sequence)
        self.lags.measure(
            chains, prefetcher.positions, prefetcher.ahead, state.intent, now, self._sites, delivery.sending_times
        )

    def _source(self, chain: Chain) -> dict[str, Any]:
        if self._sites is None or (stored := self._sites.heartbeat_of(chain)) is None:
            return {}
        heartbeat = stored.heartbeat
        report = {
            "state": stored.state(self._sites.silent_after),
            "code": heartbeat.code,
            "why": heartbeat.why,
            "sequence": heartbeat.source_last,
        }
        return {"source": {**report, "alive": stored.modified}}

    # Not delivering

    def report_retry(self, error: FloeError, pause: float) -> None:
        """Report an error that passes by itself; the next attempt is after `pause` seconds."""
        self._begin_trouble(error)
        context = {"target": self.target, "error": str(error), "pause": pause}
        log.warning("target retry scheduled", action="target_retry_scheduled", **context)
        self.set_waiting(error)

    def report_stopped(self, error: FloeError) -> None:
        metrics.stopped_targets.labels(self.target).set(1)
        self.is_stopped = True
        self._begin_trouble(error)
        self._set_state("stopped", ready=False, reason=error.message, code=error.code, hint=error.hint)
        reason, now = f"{error.code} {error.message}", self._clock.monotonic()
        if reason != self._reason or now - self._logged >= REMINDER_INTERVAL_S:
            self._reason, self._logged = reason, now
            log.error("target stopped", action="target_stopped", target=self.target, error=str(error), code=error.code)

    def _begin_trouble(self, error: FloeError) -> None:
        if not self._trouble:
            self._troubled_at = self._clock.monotonic()
        self._trouble = error.message

    def _end_trouble(self) -> None:
        if self._trouble:
            seconds, before = round(self._clock.monotonic() - self._troubled_at, 1), self._trouble
            self._trouble = self._reason = ""  # if it returns, it is logged again
            log.info("target recovered", action="target_recovered", target=self.target, seconds=seconds, trouble=before)

    def report_ended(self, error: FloeError) -> None:
        self._reason = ""  # log it once more: no report follows
        self.report_stopped(error)
        self._is_final = True

    def _set_state(self, state: str, *, ready: bool, reason: str = "", **more: str) -> None:
        if not self._is_final:  # later changes of its lease do not matter
            self._health.set_ready(self._part, ready, reason.removeprefix(f"{self._part}: "))
            self._health.set_status(self._part, {"state": state, "why": reason, **more})

    def _show_publisher(self, name: str) -> None:
        with suppress(KeyError):
            metrics.publisher.remove(self.target, self._publisher)
        self._publisher = name
        if name:
            metrics.publisher.labels(self.target, name).set(1)


POSITIONS_INTERVAL_S = 60.0  # seconds between two writes at least
POSITIONS_CHECK_INTERVAL_S = 1.0  # seconds between two checks for a change


class PositionsWriter:
    """Writer of one target's `positions.json`. Nothing waits for it: delivery continues if the store refuses it.

    `positions`: of the last closed checkpoint; None while it is unconfirmed. `sources`: the `site/feed` pairs that may
    flow into the target. `stopped`: the reason of each stopped chain.
    """

    def __init__(
        self,
        target: str,
        sources: tuple[str, ...],
        positions: Callable[[], Mapping[Chain, int] | None],
        stopped: Callable[[], Mapping[Chain, str]],
        documents: ChainStore,
        threads: ThreadPool,
        clock: Clock,
    ) -> None:
        self._target, self._sources, self._positions, self._stopped = target, sources, positions, stopped
        self._documents, self._threads, self._clock = documents, threads, clock
        self._put: Mapping[Chain, int] | None = None
        self._put_stopped: Mapping[Chain, str] = {}
        self._tried_at, self._failure = float("-inf"), ""

    async def run(self) -> None:
        while True:
            await self.write_if_due()
            await self._clock.sleep(POSITIONS_CHECK_INTERVAL_S)

    async def write_if_due(self) -> None:
        positions, now = self._positions(), self._clock.monotonic()
        if positions is not None and self._is_due(positions, now):
            self._tried_at = now
            await self._write(dict(positions))

    def _is_due(self, positions: Mapping[Chain, int], now: float) -> bool:
        """True if a write is due, early if a stored value is ahead of a chain moved back or omits a stopped chain."""
        is_long_ago, put = now - self._tried_at >= POSITIONS_INTERVAL_S, self._put or {}
        if self._stopped().keys() - self._put_stopped or any(positions.get(chain, 0) < at for chain, at in put.items()):
            return is_long_ago or not self._failure
        return is_long_ago and (positions != self._put or self._stopped() != self._put_stopped)

    async def _write(self, positions: Mapping[Chain, int]) -> None:
        stopped = dict(self._stopped())
        document = TargetPositions(self._target, self._clock.now(), positions, self._sources, stopped=stopped)
        try:
            await self._threads.run(self._documents.write_positions, document)
        except FloeError as error:
            metrics.positions_errors.labels(self._target).inc()
            if error.code != self._failure:
                self._failure = error.code
                context = {"target": self._target, "code": error.code, "error": str(error)}
                log.warning("positions write failed", action="positions_write_failed", **context)
            return
        if self._failure:
            log.info("positions write recovered", action="positions_write_recovered", target=self._target)
        self._put, self._put_stopped, self._failure = positions, stopped, ""
        metrics.positions_put.labels(self._target).set(document.time)
