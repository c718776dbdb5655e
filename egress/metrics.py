"""The metrics of egress."""

from __future__ import annotations

from common.service.metrics import counter, gauge, histogram

CHAIN = ("site", "feed", "partition")

messages = counter("egress_messages", "Messages archived.", CHAIN)
raw_bytes = counter("egress_raw_bytes", "Bytes of subjects, headers and payloads archived.", CHAIN)
stored_bytes = counter("egress_stored_bytes", "Bytes of segments put.", CHAIN)
segments = counter("egress_segments", "Segments put.", CHAIN)
closed = counter("egress_segments_closed", "Segments closed, by what closed them.", (*CHAIN, "reason"))
left_out = counter("egress_left_out", "Sequences archived without a message, by why.", (*CHAIN, "reason"))
put_seconds = histogram("egress_put_seconds", "Time to put one segment, tail and mark.", CHAIN)
incarnation = gauge("egress_incarnation", "The incarnation that is written.", CHAIN)
end_sequence = gauge("egress_end_sequence", "The last sequence archived.", CHAIN)
end_timestamp = gauge("egress_end_timestamp_seconds", "Time of the last message archived, since 1970.", CHAIN)
source_sequence = gauge(
    "egress_source_sequence", "The last sequence of the stream, when it was last asked.", CHAIN
)
source_timestamp = gauge(
    "egress_source_timestamp_seconds", "Time of the stream's last message, when it was last asked.", CHAIN
)
doubts = counter("egress_doubts", "Readers that were given up, by why.", (*CHAIN, "reason"))
unverified = gauge(
    "egress_unverified", "1 while no archived message is left in the stream to compare.", CHAIN
)
drifted = gauge(
    "egress_created_drifted", "1 while the stream's creation time differs though its data do not.", CHAIN
)
stopped = gauge("egress_stopped", "1 while the chain waits for an operator.", CHAIN)
waiting = gauge("egress_waiting", "1 while NATS or the object store cannot be reached.", CHAIN)
lost = gauge(
    "egress_lost_sequences", "Sequences under existing coverage that neither archive nor stream hold.", CHAIN
)
lease_held = gauge(
    "egress_lease_held", "1 while this process works on the chain, 0 while it stands by.", CHAIN
)
memory_used = gauge("egress_memory_bytes", "Bytes between the wire and the object store.")
memory_limit = gauge("egress_memory_limit_bytes", "The budget for them.")
