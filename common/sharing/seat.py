"""One chain's place in the sharing: where its lease arrives, and where it is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from common.clock import first_of
from common.errors import FloeError
from common.jetstream.lease import Lease


class Told(Protocol):
    """Whom a seat tells why it has no lease."""

    def standby(self, holder: str | None) -> None: ...

    def waits(self, error: FloeError) -> None: ...


class Seat:
    """The place of the lease `key`. `told` hears who holds it instead.

    `lease`: what this member holds, from the moment it is acquired until `vacate`. `is_told`: whether `told`
    has heard anything since then. `rests_until`: given back, and not taken again before (monotonic seconds).
    """

    def __init__(self, key: str, told: Told, vacated: Callable[[Seat, bool], None]) -> None:
        self.key, self._told, self._vacated = key, told, vacated
        self.lease: Lease | None = None
        self.rests_until = 0.0
        self.is_told = False
        self.holder: str | None = None
        self._offered = asyncio.Event()

    async def occupy(self, stop: asyncio.Event) -> Lease | None:
        """The lease, as soon as this member holds it; None if `stop` is set first."""
        if not stop.is_set():
            await first_of(self._offered.wait(), stop.wait())
        self._offered.clear()
        return self.lease

    def vacate(self, *, lost: bool) -> None:
        """The lease that `occupy` gave is released, or was lost."""
        self._vacated(self, lost)

    # The sharing's side

    def offer(self, lease: Lease) -> None:
        """This member has acquired the lease."""
        self.lease, self.holder = lease, None
        self._offered.set()

    @property
    def is_unclaimed(self) -> bool:
        """Whether a lease was offered that nobody has come for."""
        return self._offered.is_set()

    def clear(self) -> Lease | None:
        """Hold nothing any more; the lease that was held."""
        self._offered.clear()
        lease, self.lease, self.is_told = self.lease, None, False
        return lease

    def taken(self, holder: str | None) -> None:
        """Another member holds it, or nobody: then this one must not, for now."""
        self.is_told, self.holder = True, holder
        self._told.standby(holder)

    def fails(self, error: FloeError) -> None:
        """Nobody can say who holds it."""
        self.is_told = True
        self._told.waits(error)
