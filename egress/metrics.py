"""Metrics of egress."""

from collections.abc import Callable
from functools import partial

from common.archive.keys import CAPTURES
from common.archive.segment import Reason
from common.leasing import HAND_OVER_REASONS
from common.metrics import counter, counter_total, gauge, histogram
from egress.builder import REASON_BY_CODE, ClosedBy
from egress.consumers import RESET_REASONS

# Labels of `egress.advisories` and `egress.sampling.snapshot`, which import this module
EVENTS = ("new", "timeout", "recover", "expire")
ADVISORY_RESULTS = ("stored", "duplicate", "published", "unknown", "failed", "stale", "dropped")
REBUILDS = ("settings", "damaged", "source")

CHAIN = ("site", "feed", "partition")

messages = counter("egress_messages", "Messages archived.", CHAIN)
received_bytes = counter(
    "egress_received_bytes", "Bytes of subjects, headers and payloads received, of what is archived or left out.", CHAIN
)
left_out_bytes = counter(
    "egress_left_out_bytes",
    "Bytes of subjects, headers and payloads of messages that were received and left out, by reason.",
    (*CHAIN, "reason"),
    kind="sampled",
    reason=REASON_BY_CODE.values(),
)
raw_bytes = counter("egress_raw_bytes", "Bytes of subjects, headers and payloads archived.", CHAIN)
stored_bytes = counter("egress_stored_bytes", "Bytes of segments put.", CHAIN)
segments = counter("egress_segments", "Segments put.", CHAIN)
closed = counter("egress_segments_closed", "Segments closed, by reason.", (*CHAIN, "reason"), reason=ClosedBy)
left_out = counter("egress_left_out", "Sequences without a message, by reason.", (*CHAIN, "reason"), reason=Reason)
put_seconds = histogram("egress_put_seconds", "Time to put one segment, tail and mark.", CHAIN)
put_done = gauge(
    "egress_put_last_success_timestamp_seconds",
    "Time of the last put of a segment of the chain by this process, since 1970; 0: none yet.",
    CHAIN,
)
open_messages = gauge(
    "egress_open_segment_messages", "Messages kept in the open segment: received, in no finished segment yet.", CHAIN
)
open_bytes = gauge("egress_open_segment_bytes", "Raw bytes of the messages in the open segment.", CHAIN)
open_age = gauge(
    "egress_open_segment_age_seconds", "Time since the open segment's first message; 0 if none is open.", CHAIN
)
incarnation = gauge("egress_incarnation", "The incarnation that is written.", CHAIN)
end_sequence = gauge("egress_end_sequence", "The last sequence archived, or left out before the chain begins.", CHAIN)
end_timestamp = gauge("egress_end_timestamp_seconds", "Time of the last message archived, since 1970.", CHAIN)
source_sequence = gauge("egress_source_sequence", "The last sequence of the stream, at the last query.", CHAIN)
source_timestamp = gauge("egress_source_timestamp_seconds", "Time of the stream's last message.", CHAIN)
source_asked = gauge(
    "egress_source_last_success_timestamp_seconds",
    "Time of the last successful query of the stream, since 1970: the age of its other metrics.",
    CHAIN,
)
resets = counter("egress_doubts", "Readers that were abandoned, by reason.", (*CHAIN, "reason"), reason=RESET_REASONS)
unverified = gauge("egress_unverified", "1 while no archived message is left in the stream to compare.", CHAIN)
drifted = gauge("egress_created_drifted", "1 while the stream's creation time differs but its data do not.", CHAIN)
stopped = gauge("egress_stopped", "1 while the chain waits for an operator.", CHAIN)
source_gone = gauge("egress_source_gone", "1 while the chain is stopped because its stream does not exist.", CHAIN)
waiting = gauge("egress_waiting", "1 while NATS or the object store cannot be reached.", CHAIN)
lost = gauge("egress_lost_sequences", "Sequences under existing coverage that neither archive nor stream hold.", CHAIN)
damaged = gauge(
    "egress_damaged_segments",
    "Segments at the end of the archive that do not match their names: left out, and their ranges read again.",
    CHAIN,
)
recreated = counter("egress_recreated", "Incarnations begun because the stream was recreated or rolled back.", CHAIN)
lease_held = gauge("egress_lease_held", "1 while this process works on the chain, 0 while it is a standby.", CHAIN)
memory_used = gauge("egress_memory_bytes", "Bytes between the wire and the object store.")
memory_limit = gauge("egress_memory_limit_bytes", "Memory budget for these bytes.")
spool_bytes = gauge("egress_spool_bytes", "Bytes in the spool: segments being encoded, and those not put yet.")

SITE = ("site",)

uncovered = gauge(
    "egress_uncovered_streams",
    "Streams of the account that no feed archives and that may need an archive; none before they were listed.",
    SITE,
)

# Reachability, and the heartbeat of the process (`egress.heartbeats`)

store_reachable = gauge("egress_store_reachable", "1 while the object store answers and accepts the credential.")
store_answered = gauge("egress_store_last_success_timestamp_seconds", "Time of the store's last answer, since 1970.")
nats_reachable = gauge("egress_nats_reachable", "1 while all connections to NATS are up.")
nats_answered = gauge(
    "egress_nats_last_success_timestamp_seconds",
    "Last time when all connections to NATS were up, since 1970; the present while they are.",
)
alive_put = gauge(
    "egress_alive_last_success_timestamp_seconds",
    "Time of the last heartbeat that this process put into the store, since 1970.",
    SITE,
)
alive_errors = counter("egress_alive_errors", "Process heartbeats that the store did not accept.", SITE)

# Sharing

members = gauge("egress_members", "Members that share the site's leases, when they were last counted.", SITE)
share = gauge("egress_share", "The most leases that this process holds as its fair share.", SITE)
leases_held = gauge("egress_leases_held", "Leases that this process holds.", SITE)
hand_overs = counter(
    "egress_hand_overs",
    "Leases released (drained, surplus to the fair share) or lost.",
    (*SITE, "reason"),
    reason=HAND_OVER_REASONS,
)
take_overs = counter("egress_take_overs", "Leases taken over from another member.", SITE)

# Heartbeats

heartbeats_leader = gauge("egress_heartbeats_leader", "1 while this process publishes the heartbeats.", SITE)
heartbeats = counter("egress_heartbeats", "Heartbeats that a stream stored.", SITE)
heartbeat_errors = counter("egress_heartbeat_errors", "Heartbeats that no stream is known to have stored.", SITE)
heartbeat_seconds = histogram("egress_heartbeat_seconds", "Time until a heartbeat was stored.", SITE)
advisories = counter(
    "egress_advisories",
    "Advisories, by event and result.",
    (*CHAIN, "event", "result"),
    kind="advisories",
    event=EVENTS,
    result=ADVISORY_RESULTS,
)
advisories_failing = gauge("egress_advisories_failing", "1 while advisories cannot be stored.", CHAIN)
advisories_waiting = gauge("egress_advisories_waiting", "Advisories found and not stored yet.", CHAIN)
sampler_rebuilt = counter(
    "egress_sampler_rebuilt",
    "Samplers built again from the archive, by reason.",
    (*CHAIN, "reason"),
    kind="sampled",
    reason=REBUILDS,
)

# Sampling

tracked_values = gauge("egress_tracked_values", "Values that the sampler knows.", CHAIN)
sample_keys_missing = counter(
    "egress_sample_keys_missing", "Messages without a value to sample by; they pass.", CHAIN, kind="sampled"
)
forced_copies = counter("egress_forced_copies", "Messages that the force field let pass.", CHAIN, kind="sampled")
snapshots = counter(
    "egress_snapshots",
    "Snapshots of the sampler, by result.",
    (*CHAIN, "result"),
    kind="sampled",
    result=("written", "failed"),
)
snapshot_seconds = histogram(
    "egress_snapshot_seconds", "Time to encode and put one snapshot, in parallel with the data.", CHAIN, kind="sampled"
)
unmatched = gauge("egress_unmatched_messages", "Messages on subjects that no partition takes.", ("site", "feed"))

# Interest and work-queue streams

interest_lapsed = counter(
    "egress_interest_lapsed", "Times that an interest stream was found without the durable it had.", CHAIN
)

# Liveness

stalled = gauge("egress_stalled", "1 while messages wait and none is received or archived.", CHAIN)
expiry = gauge(
    "egress_expiry_seconds",
    "Time until the stream expires messages that are not archived; +Inf if it never does or none waits.",
    CHAIN,
)


# Captures (`egress.captures`)

captures = counter(
    "egress_captures",
    "Captures of the stream's configuration, its consumers and its deleted messages, by result.",
    (*CHAIN, "what", "result"),
    what=CAPTURES,
    result=("written", "failed"),
)
capture_bytes = counter("egress_capture_bytes", "Bytes of captures put.", CHAIN)
capture_done = gauge(
    "egress_capture_last_success_timestamp_seconds",
    "Time of the last check of configuration, consumers or deleted messages, and of the put if due, since 1970.",
    (*CHAIN, "what"),
)


def totals() -> dict[str, Callable[[], float]]:
    """Return the totals that this process has archived since it began."""
    return {
        "messages": partial(counter_total, messages),
        "bytes": partial(counter_total, stored_bytes),
        "segments": partial(counter_total, segments),
    }
