"""Keys whose feature is not in this version: agreed, checked, and refused where they are set to anything but
their default.

When a feature is built, its line here goes. A key stands here by its path (`*`: any entry of a list).
"""

from __future__ import annotations

_NATS = ("context", "jetstream_domain")

UNBUILT = (
    *(f"{section}.{key}" for section in ("nats", "egress.nats", "ingress.nats") for key in _NATS),
    "compaction.retention.delete_after",
)
