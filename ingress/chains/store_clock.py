"""What time it is by the store: an object is written, and the store says when that was."""

from __future__ import annotations

import threading

from common.clock import Clock
from common.errors import FloeError, OutcomeUnknown, Refused, Unavailable
from common.objects.port import ObjectStore
from common.service.logs import get_logger

log = get_logger("ingress.chains.store_clock")

ASKED_EVERY = 60.0  # seconds; in between the host's clock that never jumps is added


class StoreClock:
    """The store's clock as one target asks for it, by the object `key`. Blocking; safe to use from several
    threads.
    """

    def __init__(self, objects: ObjectStore, key: str, clock: Clock) -> None:
        self._objects, self._key, self._clock = objects, key, clock
        self._known: tuple[float, float] | None = None  # of the store, of the host
        self._refused, self._lock = False, threading.Lock()

    def now(self, at_least: float) -> float:
        """Seconds since 1970 UTC by the store's clock.

        `at_least`: the time of an object that is there; it is the answer where ingress may not write, which
        can only make holes wait longer. Raises what the store raises otherwise.
        """
        known = self._now()
        return at_least if known is None else max(at_least, known)

    def stamp(self) -> float:
        """As `now`, for what is only written down: by the host's clock where ingress may not write."""
        known = self._now()
        return self._clock.now() if known is None else known

    def _now(self) -> float | None:
        """None where ingress may not write."""
        # Locked: two that ask at once would put the object twice, and neither would know whose time it has.
        with self._lock:
            return self._asked()

    def _asked(self) -> float | None:
        host = self._clock.monotonic()
        if self._known is None or host - self._known[1] >= ASKED_EVERY:
            asked = self._ask()
            if asked is None:
                return None
            self._known = (asked, host)
        return self._known[0] + host - self._known[1]

    def _ask(self) -> float | None:
        try:
            self._objects.put(self._key, b"")
        except Refused as error:
            self._note(error)
            return None
        except OutcomeUnknown as error:
            raise Unavailable(error.message, code=error.code) from error
        info = self._objects.head(self._key)
        if info is None:
            raise Unavailable(f"object {self._key}: written and not found", code="E-READ-BACK")
        return info.modified

    def _note(self, error: FloeError) -> None:
        if not self._refused:
            self._refused = True
            log.warning("the store's clock cannot be read", action="store_clock", error=str(error))
