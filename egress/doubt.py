"""Why a reader is given up."""

from __future__ import annotations

REASONS = (
    "closed", "consumer_gone", "consumer_taken", "gap", "identity", "malformed", "reconnect", "redelivered",
    "silent", "stalled", "stream_changed", "unreachable",
)  # fmt: skip


class DoubtError(Exception):
    """The consumer or the stream behind it may not be what it was; `reason` is one of REASONS, for
    metrics.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
