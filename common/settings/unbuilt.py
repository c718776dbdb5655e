"""Keys whose feature is not in this version: agreed, checked, and refused where they are set.

When a feature is built, its line here goes.
"""

from __future__ import annotations

from typing import NamedTuple


class Unbuilt(NamedTuple):
    """A key by its path (`*`: any entry of a list). `values`: these only; none: all but the default."""

    path: str
    values: tuple[object, ...] = ()


_NATS = ("context", "nkey_seed_file", "jwt_file", "jetstream_domain")
_FEED = (
    "partitions",
    "relay",
    "inspect_field",
    "inspect_header",
    "inspect_subject_token",
    "inspect_force_field",
    "inspect_duration",
    "warn_duration",
    "size_trigger",
    "snapshot_interval",
    "advisory",
)
_SOURCE = (
    "subject_transform",
    "start_sequence",
    "start_time",
    "start_delta",
    "start_at_end",
    "lost_segment_timeout",
    "on_lost",
)

UNBUILT = (
    *(Unbuilt(f"{section}.{key}") for section in ("nats", "egress.nats", "ingress.nats") for key in _NATS),
    Unbuilt("egress.workers"),
    *(Unbuilt(f"egress.feeds.*.{key}") for key in _FEED),
    Unbuilt("egress.heartbeats.interval"),
    Unbuilt("egress.heartbeats.headers"),
    Unbuilt("egress.heartbeats.subjects"),
    Unbuilt("ingress.events"),
    Unbuilt("ingress.targets.*.exclusive"),
    Unbuilt("ingress.targets.*.delivery"),
    Unbuilt("ingress.targets.*.publisher", ("fast",)),
    Unbuilt("ingress.targets.*.on_oversize"),
    *(Unbuilt(f"ingress.targets.*.sources.*.{key}") for key in _SOURCE),
    Unbuilt("compaction.retention.delete_after"),
)
