"""How far a target is behind the archive, chain by chain: the gauges, set from what is in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from common.chain import Chain
from common.clock import NS_PER_S
from common.segments.alive import Sighting
from ingress import metrics
from ingress.chains.chain_state import Lane
from ingress.checkpoint import Intent
from ingress.discovery.sites import Sites
from ingress.rows.rows import Block

Labels = tuple[str, str, str, str]


@dataclass(slots=True)
class Lag:
    """Where one chain, or one partition over all its incarnations, stands.

    `sequences`, `messages`: archived and not carried; what is not decoded counts by its sequences in both.
    `seconds`: age of the oldest message of it, or of its segment; 0 where everything is carried. `waiting`:
    seconds that a hole or damage has lasted; `late`: sequences of that hole.
    """

    sequences: int = 0
    messages: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    late: int = 0

    def add(self, other: Lag) -> None:
        """Count another incarnation of the same partition in."""
        self.sequences, self.messages = self.sequences + other.sequences, self.messages + other.messages
        self.seconds, self.waiting = max(self.seconds, other.seconds), max(self.waiting, other.waiting)
        self.late += other.late


class Lags:
    """The gauges of one target. What was shown is remembered, so that it can be taken back."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._oldest: dict[Chain, tuple[int, float]] = {}
        self._shown: set[Labels] = set()

    def measure(
        self,
        lanes: Iterable[Lane],
        positions: Mapping[Chain, int],
        ready: Iterable[Block],
        intent: Intent | None,
        now: float,
        sites: Sites | None = None,
    ) -> None:
        """Set the gauges at `now` (seconds since 1970). `ready`: decoded blocks, in order; `intent`: open.

        `sites`: what egress says of itself.
        """
        counts, times = _decoded(ready, intent)
        found: dict[Labels, Lag] = {}
        stopped = paused = 0
        newest: dict[Labels, Lane] = {}
        for lane in lanes:
            lag = self._lag(lane, positions, counts[lane.chain], times.get(lane.chain), now)
            labels = self._labels(lane.chain)
            found.setdefault(labels, Lag()).add(lag)
            newest[labels] = max(lane, newest.get(labels, lane), key=lambda each: each.chain.incarnation)
            stopped += lane.stopped is not None
            paused += lane.paused
        metrics.stopped_chains.labels(self._target).set(stopped)
        metrics.paused_chains.labels(self._target).set(paused)
        metrics.intent_open.labels(self._target).set(intent is not None)
        for labels, lag in found.items():
            _show(labels, lag)
            lane = newest[labels]
            if sites is not None and (sighting := sites.of(lane.chain)) is not None:
                self._show_source(labels, lag, lane, sighting)
        self._shown |= set(found)
        metrics.lag_measured.labels(self._target).set(now)

    def _show_source(self, labels: Labels, lag: Lag, lane: Lane, sighting: Sighting) -> None:
        left = sighting.sign.not_archived(lane.chain.incarnation, lane.archived)
        if left is not None:  # else the last value stands
            metrics.source_lag_sequences.labels(*labels).set(lag.sequences + left)

    def forget(self) -> None:
        """Take everything back: the target is not this process's any more."""
        self._oldest.clear()
        for labels in self._shown:
            for each in _OF_CHAINS:
                with suppress(KeyError):
                    each.remove(*labels)
        for each in (
            metrics.stopped_chains,
            metrics.paused_chains,
            metrics.intent_open,
            metrics.target_sequence,
            metrics.lag_measured,
        ):
            with suppress(KeyError):
                each.remove(self._target)
        self._shown.clear()

    def of(self, lane: Lane, positions: Mapping[Chain, int], now: float) -> float:
        """Seconds: age of the oldest message of the chain that is not carried; 0: none, or not measured."""
        at, since = self._oldest.get(lane.chain, (0, now))
        return max(0.0, now - since) if at == _position(lane, positions) else 0.0

    def _lag(
        self, lane: Lane, positions: Mapping[Chain, int], decoded: int, oldest: float | None, now: float
    ) -> Lag:
        at = _position(lane, positions)
        # What lies behind the end of the incarnation is never carried.
        archived = lane.archived if lane.end is None else min(lane.archived, lane.end)
        sequences = max(0, archived - at + 1)
        messages = decoded + max(0, archived - max(at, lane.position) + 1)
        since = lane.plan.waiting_since
        return Lag(
            sequences,
            min(messages, sequences) if sequences else messages,
            now - self._since(lane, at, oldest, now) if sequences or decoded else 0.0,
            0.0 if since is None else max(0.0, now - since),
            0 if lane.plan.hole is None else len(lane.plan.hole),
        )

    def _since(self, lane: Lane, at: int, oldest: float | None, now: float) -> float:
        """When the oldest message not carried was published; the same as long as nothing is carried."""
        known = self._oldest.get(lane.chain)
        if known is None or known[0] != at:
            segment = lane.stretches[0].segment.modified if lane.stretches else lane.plan.waiting_since
            found = next((time for time in (oldest, segment) if time is not None), now)
            known = self._oldest[lane.chain] = (at, min(now, found))
        return known[1]

    def _labels(self, chain: Chain) -> Labels:
        return self._target, chain.site, chain.feed, str(chain.partition)


_OF_CHAINS = (
    metrics.position,
    metrics.lag_sequences,
    metrics.lag_messages,
    metrics.lag_seconds,
    metrics.waiting_seconds,
    metrics.late_sequences,
    metrics.source_lag_sequences,
)


def _show(labels: Labels, lag: Lag) -> None:
    metrics.lag_sequences.labels(*labels).set(lag.sequences)
    metrics.lag_messages.labels(*labels).set(lag.messages)
    metrics.lag_seconds.labels(*labels).set(lag.seconds)
    metrics.waiting_seconds.labels(*labels).set(lag.waiting)
    metrics.late_sequences.labels(*labels).set(lag.late)


def _position(lane: Lane, positions: Mapping[Chain, int]) -> int:
    return positions.get(lane.chain, lane.position or 1)


def _decoded(ready: Iterable[Block], intent: Intent | None) -> tuple[Counter[Chain], dict[Chain, float]]:
    """Messages that are decoded and not stored, and the time of the first of them, by chain."""
    counts: Counter[Chain] = Counter()
    times: dict[Chain, float] = {}
    for piece in intent.pieces if intent else ():
        counts[piece.chain] += piece.count
    for block in ready:
        counts[block.piece.chain] += block.piece.count
        if block.material is not None and block.material.timestamps_ns:
            times.setdefault(block.piece.chain, block.material.timestamps_ns[0] / NS_PER_S)
    return counts, times
