"""Why a reader is given up."""

from __future__ import annotations


class DoubtError(Exception):
    """The consumer or the stream behind it may not be what it was; `reason` is one of a small set for
    metrics.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
