"""What ingress counts."""

from __future__ import annotations

from common.service.metrics import counter, gauge, histogram

_CHAIN = ("target", "site", "feed", "partition")

messages = counter("ingress_messages", "Messages stored in the target.", _CHAIN)
payload_bytes = counter("ingress_bytes", "Bytes published: payloads and header blocks.", ("target",))
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
