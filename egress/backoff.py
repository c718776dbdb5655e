"""How long to wait before something is tried again."""

from __future__ import annotations

import random

DELAYS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0)  # seconds, before jitter


class Backoff:
    """Growing delays with jitter, so that instances that failed together do not come back together."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._failures = 0

    def next(self) -> float:
        """Seconds to wait now: 50 to 100 % of the next delay."""
        delay = DELAYS[min(self._failures, len(DELAYS) - 1)]
        self._failures += 1
        return delay * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Something succeeded."""
        self._failures = 0
