"""What ingress counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.chain import Chain
from common.service.metrics import counter, gauge, histogram
from ingress.chains.lane import Lane
from ingress.checkpoints.intent import Intent

_CHAIN = ("target", "site", "feed", "partition")

messages = counter("ingress_messages", "Messages stored in the target.", _CHAIN)
position = gauge(
    "ingress_position", "The first sequence of the chain that the target does not hold yet.", _CHAIN
)
lag_sequences = gauge("ingress_lag_sequences", "Archived sequences that are not carried yet.", _CHAIN)
waiting_seconds = gauge(
    "ingress_waiting_seconds",
    "For how long a hole or damage has kept the chain waiting; 0: it does not.",
    _CHAIN,
)
stopped_chains = gauge("ingress_stopped_chains", "Chains that wait for an operator.", ("target",))
damaged = counter("ingress_damaged_segments", "Segments left out because they are damaged.", ("site", "feed"))
intents = counter(
    "ingress_intents",
    "Intents: opened, closed, taken over half done, lost to another instance.",
    ("target", "result"),
)
unclear = counter(
    "ingress_unclear_outcomes", "Batches whose fate had to be read from the target.", ("target",)
)
publish_seconds = histogram("ingress_publish_seconds", "From opening an intent to closing it.", ("target",))
target_sequence = gauge(
    "ingress_target_sequence", "Last sequence of the target that ingress accounts for.", ("target",)
)
holds_lease = gauge("ingress_lease_held", "1 while this process may carry into the target.", ("target",))
unreadable = counter(
    "ingress_store_errors", "Looks at the store that failed and are tried again.", ("target",)
)


def closed(target: str, intent: Intent) -> None:
    """Count what an intent carried, now that it is closed."""
    intents.labels(target, "closed").inc()
    target_sequence.labels(target).set(intent.end)
    for piece in intent.pieces:
        chain = piece.chain
        labels = (target, chain.site, chain.feed, str(chain.partition))
        messages.labels(*labels).inc(piece.count)
        position.labels(*labels).set(piece.rows.last + 1)


def measure(target: str, lanes: Iterable[Lane], positions: Mapping[Chain, int], now: float) -> None:
    """Set the gauges of all chains at `now` (seconds since 1970); a partition's incarnations count as one."""
    lags: dict[tuple[str, str, str, str], int] = {}
    waits: dict[tuple[str, str, str, str], float] = {}
    stopped = 0
    for lane in lanes:
        chain, since = lane.chain, lane.plan.waiting_since
        labels = (target, chain.site, chain.feed, str(chain.partition))
        at = positions.get(chain, lane.position or 1)
        lags[labels] = lags.get(labels, 0) + max(0, lane.archived - at + 1)
        waits[labels] = max(waits.get(labels, 0.0), 0.0 if since is None else now - since)
        stopped += lane.stopped is not None
    stopped_chains.labels(target).set(stopped)
    for labels, lag in lags.items():
        lag_sequences.labels(*labels).set(lag)
        waiting_seconds.labels(*labels).set(waits[labels])
