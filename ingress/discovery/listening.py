"""What a source of notifications hands them to, and how long it waits when it fails."""

from __future__ import annotations

from typing import Protocol

FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0  # seconds between attempts


class Notifiable(Protocol):
    """Who takes notifications (`ingress.discovery.events.Notified`); all methods on the event loop.

    `is_wanted`: whether they are of use here now; may be read from any thread.
    """

    @property
    def is_wanted(self) -> bool: ...
    def take(self, raw: bytes) -> None: ...
    def listening(self) -> None: ...
    def failed(self, why: str) -> None: ...


def longer(pause: float) -> float:
    """The pause after `pause`, both in seconds."""
    return min(LAST_PAUSE, pause * 2)
