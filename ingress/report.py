"""Report of a target: the lag of its chains behind the archive, its part of /status, and its positions in the store."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.archive.documents import ChainStore, TargetPositions
from common.chain import Chain
from common.clock import Clock, format_unix
from common.errors import DataError, FloeError, Stopped
from common.exits import checkpoint_command, choices
from common.logs import get_logger
from common.metrics import ScrapedValues, remove_series, show_zeros
from common.nats.lease import format_owner
from common.observe.monitor import Health
from common.service.process import ThreadPool
from ingress import metrics
from ingress.chains.chain_state import ChainRegistry, ChainState
from ingress.chains.plan import Phase
from ingress.chains.prefetch import Prefetcher
from ingress.checkpoint import Intent, StoredState
from ingress.delivery import Delivery
from ingress.discovery.sites import Heartbeats, interleave_by_site
from ingress.rows.rows import Block, Rows

log = get_logger(__name__)


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
    """The lags of one target's chains. A measurement looks at the chains that are behind or wait, and at those with
    decoded rows; any other costs two comparisons. A scrape makes the series of the chains, from the last measurement.

    `per_chain`: as in `IngressMonitorSettings`. `behind`: the lags by the last measurement; no other chain has any.
    """

    def __init__(self, target: str, per_chain: bool | str = True) -> None:
        self._target, self._per_chain = target, per_chain
        self.behind: Mapping[Chain, Lag] = {}
        # Position, time, and True for the time of a message or a segment; False: the time of the first measurement.
        self._oldest: dict[Chain, tuple[int, float, bool]] = {}
        self._unreadable_since: float | None = None
        # For a scrape. They outlast the delivery, until another instance is seen to deliver.
        self._chains: Iterable[ChainState] = ()
        self._sites: Heartbeats | None = None
        self._measured_at = 0.0
        self._source_lags: dict[metrics.Partition, int] = {}

    def record_store_state(self, *, is_read: bool, now: float) -> None:
        """Record if the store can be read at `now` (seconds since 1970). While it cannot, segments archived since then
        are unknown: each chain counts as behind for at least as long.
        """
        self._unreadable_since = None if is_read else self._unreadable_since or now

    def measure(
        self,
        chains: ChainRegistry,
        positions: Mapping[Chain, int],
        ready: Iterable[Block],
        intent: Intent | None,
        now: float,
        sites: Heartbeats | None = None,
        sending: Mapping[Chain, float] | None = None,
    ) -> None:
        """Measure at `now` (seconds since 1970). `ready`: decoded blocks, in order; `intent`: the open one; `sending`:
        for each chain in it, the time of its first message; `sites`: the reports of egress.
        """
        counts, times = _decoded(ready, intent, sending or {})
        idle, done = Phase.IDLE, Phase.DONE
        active = [s for s in chains if (s.archived >= s.position if s.phase is idle else s.phase is not done)]
        states = {state.chain: state for state in active}
        # Rows may also be in hand: neither ready nor in an intent yet.
        states |= {c: state for c in {*counts, *self.behind} if (state := chains.get(c)) is not None}
        lags = {c: self._lag(state, positions, counts[c], times.get(c), now) for c, state in states.items()}
        self.behind = {chain: lag for chain, lag in lags.items() if lag != Lag()}
        self._oldest = {chain: found for chain, found in self._oldest.items() if chain in self.behind}
        for gauge, value in (
            (metrics.stopped_chains, sum(state.stopped is not None for state in states.values())),
            (metrics.paused_chains, sum(state.phase is Phase.PAUSED for state in states.values())),
            (metrics.lag_messages, sum(lag.messages for lag in self.behind.values())),
            (metrics.late_sequences, sum(lag.late for lag in self.behind.values())),
            (metrics.intent_open, intent is not None),
            (metrics.lag_measured, now),
        ):
            gauge.labels(self._target).set(value)
        self._chains, self._sites, self._measured_at = chains, sites, now
        metrics.chain_metrics.sources[self._target] = self.samples

    def forget(self) -> None:
        self.behind, self._chains = {}, ()
        self._oldest.clear()
        self._source_lags.clear()
        metrics.chain_metrics.sources.pop(self._target, None)
        for gauge in _OF_TARGET:
            with suppress(KeyError):
                gauge.remove(self._target)

    def age(self, chain: Chain) -> float:
        """Age in seconds, at the last measurement, of the chain's oldest message that is not in the target; 0: none.
        Called from any thread.
        """
        lag = self.behind.get(chain)
        return self._at_least_outage(lag.seconds if lag else 0.0)

    def _at_least_outage(self, seconds: float) -> float:
        since = self._unreadable_since
        return seconds if since is None else max(seconds, self._measured_at - since)

    def samples(self) -> Iterator[ScrapedValues]:
        """Yield the labels and the values for `metrics.chain_metrics`: of each partition, over all its incarnations, or
        of the target. Called from any thread.
        """
        behind, counts = self.behind, metrics.delivered[self._target]
        lags: dict[metrics.Partition, Lag] = {}
        newest: dict[metrics.Partition, ChainState] = {}
        stopped = set[metrics.Partition]()
        for state in self._chains:
            chain = state.chain
            key = chain.site, chain.feed, chain.partition
            lag = lags.setdefault(key, Lag())
            if (found := behind.get(chain)) is not None:
                lag.add(found)
            if key not in newest or chain.incarnation > newest[key].chain.incarnation:
                newest[key] = state
            if state.stopped is not None:
                stopped.add(key)
        ages = {key: self._at_least_outage(lag.seconds) for key, lag in lags.items()}
        sources = {key: self._source_lag(key, state, lags[key].sequences) for key, state in newest.items()}
        total = {"target": self._target}
        if not self._per_chain:
            waiting = max((lag.waiting for lag in lags.values()), default=0.0)
            source_lag = sum(each or 0 for each in sources.values())
            yield total, (counts.total(), max(ages.values(), default=0.0), source_lag, waiting or None)
            return
        is_whole = self._per_chain is True
        if not is_whole:
            yield total, (counts.total(), None, None, None)
        for key, lag in lags.items():
            if is_whole or ages[key] or sources[key] or lag != Lag() or key in stopped:
                labels = {**total, "site": key[0], "feed": key[1], "partition": str(key[2])}
                yield labels, (counts[key] if is_whole else None, ages[key], sources[key], lag.waiting or None)

    def _source_lag(self, key: metrics.Partition, newest: ChainState, sequences: int) -> int | None:
        """Return the lag behind the source, as long as it is unknown the last one; None if it was never known."""
        stored = self._sites.heartbeat_of(newest.chain) if self._sites else None
        left = stored.heartbeat.unarchived_count(newest.chain.incarnation, newest.archived) if stored else None
        if left is not None:
            self._source_lags[key] = sequences + left
        return self._source_lags.get(key)

    def _lag(
        self, state: ChainState, positions: Mapping[Chain, int], decoded: int, oldest: float | None, now: float
    ) -> Lag:
        at = positions.get(state.chain, state.position or 1)
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
    metrics.lag_messages,
    metrics.late_sequences,
    metrics.matched_feeds,
    metrics.untaken_feeds,
)


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
        self,
        target: str,
        health: Health,
        clock: Clock,
        sites: Heartbeats | None = None,
        owner: str = "",
        per_chain: bool | str = True,
    ) -> None:
        self.target, self._health, self._clock, self._sites = target, health, clock, sites
        self._part, self._owner, self.lags = f"target {target}", owner, Lags(target, per_chain)
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
        self.lags.measure(
            chains, prefetcher.positions, prefetcher.ahead, state.intent, now, self._sites, delivery.sending_times
        )
        status = {
            "state": "carrying",
            "publisher": self._publisher,
            "trouble": delivery.trouble,
            "target_sequence": state.checkpoint.target_sequence,
            "intent": state.intent and {"base": state.intent.base, "count": state.intent.count},
            "chains": partial(self._chains_status, delivery, chains),
        }
        if chains.patterns:
            plan = chains.patterns.plan
            counts = {"matched_feeds": len(plan.taken), "untaken_feeds": len(plan.untaken)}
            status |= {**counts, "untaken": plan.untaken_texts}
            metrics.matched_feeds.labels(self.target).set(len(plan.taken))
            metrics.untaken_feeds.labels(self.target).set(len(plan.untaken))
        self._health.set_ready(self._part, not delivery.unready_reason, delivery.unready_reason)
        self._health.set_status(self._part, status)
        metrics.target_sequence.labels(self.target).set(state.checkpoint.target_sequence)

    def _chains_status(self, delivery: Delivery, chains: ChainRegistry) -> dict[str, Any]:
        """Return the chains of /status, of each site in turn; of too many, first those that are stopped or behind.
        Called from any thread.
        """
        positions, lags = delivery.state.checkpoint.positions, self.lags
        shown = interleave_by_site(chains, lambda each: each.chain.site)
        if len(shown) > MAX_STATUS_CHAINS:
            shown.sort(key=lambda each: each.stopped is None and each.chain not in lags.behind)
        return {
            str(each.chain): {
                **each.status(positions),
                "lag_seconds": round(lags.age(each.chain)),
                **self._source(each.chain),
            }
            for each in shown[:MAX_STATUS_CHAINS]
        }

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
        self._troubled_at = self._troubled_at if self._trouble else self._clock.monotonic()
        self._trouble = error.message

    def _end_trouble(self) -> None:
        if self._trouble:
            seconds, before = round(self._clock.monotonic() - self._troubled_at, 1), self._trouble
            self._trouble = self._reason = ""  # if it returns, it is logged again
            log.info("target recovered", action="target_recovered", target=self.target, seconds=seconds, trouble=before)

    def remove(self) -> None:
        """Remove everything that was reported: the target has left this process."""
        self.lags.forget()
        self._health.remove(self._part)
        remove_series({"target": self.target})

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
MAX_WRITERS = 16  # names in a state: so many restarts without the bucket, or since the copy that it was set back to
POSITIONS_CHECK_INTERVAL_S = 1.0  # seconds between two checks for a change


class PositionsWriter:
    """Writer of one target's `positions.json`. Nothing waits for it: delivery continues if the store refuses it.

    `stored`: the state with the last closed checkpoint; None while it is unconfirmed, and without the lease. `sources`:
    the `site/feed` pairs that may flow into the target. `stopped`: the reason of each stopped chain.

    Every method raises Stopped (E-TARGET-TWICE) if another centre delivers into a target of this name: retention would
    delete by the positions of one what the other still needs.
    """

    def __init__(
        self,
        target: str,
        sources: Callable[[], tuple[str, ...]],
        stored: Callable[[], StoredState | None],
        stopped: Callable[[], Mapping[Chain, str]],
        documents: ChainStore,
        threads: ThreadPool,
        clock: Clock,
    ) -> None:
        self._target, self._sources, self._stored, self._stopped = target, sources, stored, stopped
        self._documents, self._threads, self._clock = documents, threads, clock
        self._put = TargetPositions(target, 0.0)  # at the last write
        self._compared: Mapping[Chain, int] | None = None  # with `_put`: no chain was moved back
        self._tried_at, self._failure = float("-inf"), ""

    async def run(self) -> None:
        while True:
            await self.write_if_due()
            await self._clock.sleep(POSITIONS_CHECK_INTERVAL_S)

    async def write_if_due(self) -> None:
        stored, now = self._stored(), self._clock.monotonic()
        if stored is not None and self._is_due(stored.existing.checkpoint.positions, now):
            self._tried_at = now
            await self._write(stored)

    async def name_writers(self, stored: StoredState) -> tuple[str, ...]:
        """Return `Checkpoint.writers` for a delivery that begins with `stored`; empty if the store does not answer."""
        try:
            found = await self._find_writer(stored)
        except Stopped:
            raise
        except FloeError:
            return ()
        names = (secrets.token_hex(8), found, *stored.existing.checkpoint.writers)
        return (*dict.fromkeys(filter(None, names)),)[:MAX_WRITERS]

    async def _find_writer(self, stored: StoredState) -> str:
        """Return the writer of the positions in the bucket; empty if any centre may replace them."""
        try:
            found = await self._threads.run(self._documents.read_positions, self._target)
        except DataError:  # damaged: the next write repairs it
            return ""
        known, has_state = stored.existing.checkpoint.writers, stored.revision > 0
        if found is None or found.writer in ("", *known) or (has_state and not known):
            return found.writer if found else ""
        text = f"target {self._target}: expected the positions of this centre in the bucket, found those that another"
        command = checkpoint_command(self._target, "--accept" if has_state else "--from-target")
        other = "stop the other centre; or deliver into a stream of another name, in one of them"
        remedy = "or, if that centre is gone, or the bucket or this server was set back, take its place"
        hint = choices(other, (remedy, command))
        raise Stopped(f"{text} centre stored at {format_unix(found.time)}", hint=hint, code="E-TARGET-TWICE")

    def _is_due(self, positions: Mapping[Chain, int], now: float) -> bool:
        """True if a write is due, early if a stored value is ahead of a chain moved back or omits a stopped chain."""
        is_long_ago, stopped = now - self._tried_at >= POSITIONS_INTERVAL_S, self._stopped()
        if stopped.keys() - self._put.stopped or self._was_moved_back(positions):
            return is_long_ago or not self._failure
        put = self._put.positions, self._put.stopped, self._put.sources
        return is_long_ago and (positions, stopped, self._sources()) != put

    def _was_moved_back(self, positions: Mapping[Chain, int]) -> bool:
        # A checkpoint is never changed, only replaced.
        if positions is not self._compared:
            if any(positions.get(chain, 0) < at for chain, at in self._put.positions.items()):
                return True
            self._compared = positions
        return False

    async def _write(self, stored: StoredState) -> None:
        stopped, sources, checkpoint = dict(self._stopped()), self._sources(), stored.existing.checkpoint
        positions, writer = dict(checkpoint.positions), next(iter(checkpoint.writers), "")
        document = TargetPositions(self._target, self._clock.now(), positions, sources, stopped=stopped, writer=writer)
        try:
            await self._find_writer(stored)
            await self._threads.run(self._documents.write_positions, document)
        except Stopped:
            raise
        except FloeError as error:
            metrics.positions_errors.labels(self._target).inc()
            if error.code != self._failure:
                self._failure = error.code
                context = {"target": self._target, "code": error.code, "error": str(error)}
                log.warning("positions write failed", action="positions_write_failed", **context)
            return
        if self._failure:
            log.info("positions write recovered", action="positions_write_recovered", target=self._target)
        self._put, self._failure, self._compared = document, "", None
        metrics.positions_put.labels(self._target).set(document.time)
