"""Keys whose feature is not in this version: agreed, checked, and refused where they are set.

When a feature is built, its line here goes.
"""

from __future__ import annotations

from typing import NamedTuple


class Unbuilt(NamedTuple):
    """A key by its path (`*`: any entry of a list). `values`: these only; none: all but the default."""

    path: str
    values: tuple[object, ...] = ()


_NATS = ("context", "jetstream_domain")

UNBUILT = (
    *(Unbuilt(f"{section}.{key}") for section in ("nats", "egress.nats", "ingress.nats") for key in _NATS),
    Unbuilt("compaction.retention.delete_after"),
)
