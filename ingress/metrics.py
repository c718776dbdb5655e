"""The metrics of ingress."""

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

from common.leasing import HAND_OVER_REASONS
from common.metrics import ScrapedMetrics, counter, counter_total, gauge, histogram
from ingress.checkpoint import Intent

# The refusals that are known to occur: a wrong last sequence (two), an incomplete batch, a batch that is too large, a
# stream at its limits (two). A series for another number begins with its first refusal.
REFUSALS = ("10071", "10164", "10176", "10199", "10047", "10077")

# Labels
TARGET = ("target",)
SITE = ("site",)
_CHAIN = ("target", "site", "feed", "partition")

# The series of a chain, of which `ingress.report` gives the values at a scrape. All others are by target or site: a
# centre may have ten thousand chains.
chain_metrics = ScrapedMetrics(
    _CHAIN,
    {"ingress_messages": "Messages stored in the target."},
    {
        "ingress_lag_seconds": (
            "Age of the oldest archived message that is not delivered, or of its segment; 0: all are delivered."
        ),
        "ingress_source_lag_sequences": (
            "Sequences of the source's stream that the target does not hold: archived or not, by the last report of "
            "egress."
        ),
        "ingress_waiting_seconds": "Time that the chain has waited for a hole or damage; only while it does.",
    },
)
Partition = tuple[str, str, int]  # site, feed and number: a chain without its incarnation
delivered: defaultdict[str, Counter[Partition]] = defaultdict(Counter)  # messages stored, by target

delivered_bytes = counter("ingress_bytes", "Bytes of headers and payloads published into the target.", TARGET)
stopped_chains = gauge("ingress_stopped_chains", "Chains that wait for an operator.", TARGET)
damaged = counter("ingress_damaged_segments", "Segments left out because they are damaged.", TARGET)
intents = counter(
    "ingress_intents",
    "Intents: opened, closed, taken over half done, lost to another instance.",
    ("target", "result"),
    result=("opened", "closed", "taken_over", "lost"),
)
unclear = counter("ingress_unclear_outcomes", "Batches with an outcome that was read from the target.", TARGET)
publish_seconds = histogram("ingress_publish_seconds", "Time from opening an intent to closing it.", TARGET)
publish_done = gauge(
    "ingress_publish_last_success_timestamp_seconds",
    "Time of the last intent of the target that this process closed, since 1970; 0: none yet.",
    TARGET,
)
target_sequence = gauge("ingress_target_sequence", "Last sequence of the target that ingress accounts for.", TARGET)
holds_lease = gauge("ingress_lease_held", "1 while this process may deliver into the target.", TARGET)
unreadable = counter("ingress_store_errors", "Checks of the store that failed and are retried.", TARGET)

# Lag and holes: `ingress.report` sets them once a second
lag_messages = gauge(
    "ingress_lag_messages",
    "Archived messages that are not delivered yet; ranges not decoded yet count by their sequences.",
    TARGET,
)
late_sequences = gauge(
    "ingress_late_sequences", "Sequences of the holes that chains wait for; 0: none waits for one.", TARGET
)
lost_sequences = counter(
    "ingress_lost_sequences", "Sequences accepted as lost, by `on_lost` or by an operator.", TARGET
)

# Reports of egress (`ingress.discovery.sites`), and the age of the values shown
source_stopped = gauge("ingress_source_stopped", "Chains of the site that wait for an operator there.", SITE)
source_silent = gauge(
    "ingress_source_silent",
    "Chains of the site whose process of egress has stored no heartbeat for `silent_after`.",
    SITE,
)
site_silent = gauge(
    "ingress_site_silent", "1 while no process of egress of the site has stored a heartbeat for `silent_after`.", SITE
)
site_heartbeat = gauge("ingress_site_alive_timestamp_seconds", "Time of the site's last heartbeat.", SITE)
heartbeats_read = gauge("ingress_alive_last_success_timestamp_seconds", "Time heartbeats were last read, since 1970.")
lag_measured = gauge(
    "ingress_lag_last_success_timestamp_seconds",
    "Time of the last measurement of the target's lags, since 1970: the age of their values.",
    TARGET,
)
store_reachable = gauge("ingress_store_reachable", "1 while the store answers the polls; 0 also while it refuses them.")
store_answered = gauge("ingress_store_last_success_timestamp_seconds", "Time of the store's last answer, since 1970.")
nats_reachable = gauge("ingress_nats_reachable", "1 while the connection to NATS is up.")
nats_answered = gauge(
    "ingress_nats_last_success_timestamp_seconds",
    "Last time when the connection to NATS was up, since 1970; the present while it is.",
)

paused_chains = gauge("ingress_paused_chains", "Chains that an operator has paused.", TARGET)
behind_gaps = counter(
    "ingress_segments_behind_gaps", "Segments that arrived in a skipped gap; they are not delivered.", TARGET
)
matched_feeds = gauge("ingress_matched_feeds", "Feeds that patterns of `sources` have taken.", TARGET)
untaken_feeds = gauge(
    "ingress_untaken_feeds",
    "Feeds that patterns of `sources` match and that are not delivered: several match, or `max_sites` is reached.",
    TARGET,
)

# Outcomes of intents and batches
intent_open = gauge("ingress_intent_open", "1 while an intent of the target is open.", TARGET)
refused_batches = counter(
    "ingress_refused_batches",
    "Batches that the server refused, by its error code.",
    ("target", "err_code"),
    err_code=REFUSALS,
)
publisher = gauge("ingress_publisher", "1 for the publisher in use for the target.", ("target", "publisher"))
foreign_messages = counter("ingress_foreign_messages", "Foreign messages in a shared target that were skipped.", TARGET)
stopped_targets = gauge("ingress_stopped", "1 while the target waits for an operator; the code is in /status.", TARGET)

# Freshness of the positions that a process reads before it deletes from the archive
positions_put = gauge(
    "ingress_positions_put_timestamp_seconds",
    "Time of the last store of the target's positions, for retention, since 1970; 0: not by this process.",
    TARGET,
)
positions_errors = counter(
    "ingress_positions_errors", "Attempts to store the positions of the target that failed; delivery continues.", TARGET
)

# Parked messages, and notifications
parked_messages = counter("ingress_parked_messages", "Messages put aside by `on_oversize: park`.", TARGET)
parked_waiting = gauge("ingress_parked_waiting", "Parked messages that the target does not hold yet.", TARGET)
events = counter(
    "ingress_events",
    "Notifications of the bucket, by source and result.",
    ("source", "result"),
    result=("woke", "ignored", "spoiled", "failed"),
)

# Sharing of targets among instances
members = gauge("ingress_members", "Members that share the targets' leases, when they were last counted.")
share = gauge("ingress_share", "The most targets that this process holds as its fair share.")
leases_held = gauge("ingress_leases_held", "Leases on targets that this process holds.")
hand_overs = counter(
    "ingress_hand_overs",
    "Leases released (drained, surplus to the fair share) or lost.",
    ("reason",),
    reason=HAND_OVER_REASONS,
)
take_overs = counter("ingress_take_overs", "Leases taken over from another member.")


def count_foreign(target: str, messages: int) -> None:
    if messages > 0:
        foreign_messages.labels(target).inc(messages)


def count_closed_intent(target: str, intent: Intent, now: float) -> None:
    """Count the messages of an intent, now that it is closed."""
    publish_done.labels(target).set(now)
    intents.labels(target, "closed").inc()
    for piece in intent.pieces:
        chain = piece.chain
        delivered[target][chain.site, chain.feed, chain.partition] += piece.count


def totals() -> dict[str, Callable[[], float]]:
    """Return the counts of this process since its start, by name."""
    return {
        "messages": lambda: sum(map(Counter.total, delivered.values())),
        "bytes": partial(counter_total, delivered_bytes),
        "intents": partial(counter_total, intents, result="closed"),
    }
