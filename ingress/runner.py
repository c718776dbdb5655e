"""One target in this process: stands by for its lease, carries under it, begins again after what passes by
itself, waits for an operator after what does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from common.clock import first_of
from common.errors import FloeError, LeaseLost, Unforeseen
from common.jetstream.lease import Lease
from common.service.logs import get_logger
from common.settings.ingress import TargetSettings
from common.tasks import either, end, orphaned, told, watched
from ingress.errors import ends_target, passes_by_itself
from ingress.parts import Parts
from ingress.sharing import lease_key
from ingress.target import Carriage
from ingress.telling import TargetReport

log = get_logger("ingress.runner")

FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0  # seconds between attempts


class Runner:
    """Carries into one target for as long as the service runs."""

    def __init__(self, parts: Parts, settings: TargetSettings) -> None:
        self.target = settings.stream
        self._parts = parts
        self._report = TargetReport(
            settings.stream, parts.health, parts.clock, parts.discovery.sites, parts.sharing.owner
        )
        self._carriage = Carriage(parts, settings, self._report)
        self._seat = parts.sharing.seat(lease_key(settings.stream), self._report)
        self._was_checked, self._pause = False, FIRST_PAUSE

    async def run(self, stop: asyncio.Event) -> None:
        """Carry, or stand by, until `stop` is set and no intent is open.

        What nobody foresaw ends an attempt, loudly, and the next one begins after a pause that grows. Raises
        what ends the target for this process: ConfigError at the start, AnotherWriter.
        """
        try:
            await self._serve(stop)
        except FloeError as error:
            self._report.ended(error)
            await self._parts.sharing.retire(self._seat)
            raise

    async def _serve(self, stop: asyncio.Event) -> None:
        while not self._was_checked and not stop.is_set():
            await self._attempt(self._check(), stop)
        while (lease := await self._seat.occupy(stop)) is not None:
            await self._hold(lease, stop)

    async def _check(self) -> None:
        await self._carriage.check()
        self._was_checked = True

    async def _hold(self, lease: Lease, stop: asyncio.Event) -> None:
        """Work under the lease until it is lost or to be given back, or `stop` is set.

        A target that waits for an operator keeps its lease: another instance would find the same.
        """
        self._report.holds()
        keeping = watched(lease.keep(), orphaned, name=f"lease {self.target}")
        try:
            async with either(stop, lease.give_back, lease.lost) as leaving:
                while lease.is_usable() and not leaving.is_set():
                    await self._attempt(self._carry(lease, leaving), leaving)
        finally:
            await end(keeping)
            was_lost = lease.lost.is_set()
            await lease.release()
            self._report.gives_back()
            self._seat.vacate(lost=was_lost)

    async def _carry(self, lease: Lease, leaving: asyncio.Event) -> None:
        try:
            await self._carriage.run(lease, leaving)
        except LeaseLost as error:
            log.warning("lease lost", action="lease_lost", target=self.target, error=error.message)
            lease.lost.set()

    async def _attempt(self, work: Coroutine[Any, Any, None], leaving: asyncio.Event) -> None:
        """Do `work`, and wait after what keeps it from its end, unless `leaving` is set."""
        began = self._parts.clock.monotonic()
        try:
            await work
            return
        except Exception as error:
            lasted = self._parts.clock.monotonic() - began
            if not isinstance(error, FloeError) or isinstance(error, Unforeseen):
                pause = self._next_pause(lasted)
                known = told(error, "target", f"target {self.target}", target=self.target, pause=pause)
                self._report.stopped(known)
            elif passes_by_itself(error):
                pause = self._next_pause(lasted)
                self._report.retries(error, pause)
            elif ends_target(error, was_checked=self._was_checked):
                raise
            else:
                pause = self._parts.pace.reexamine
                self._report.stopped(error)
        await first_of(leaving.wait(), seconds=pause)

    def _next_pause(self, lasted: float) -> float:
        """Twice as long after each attempt that failed soon."""
        pause = FIRST_PAUSE if lasted > LAST_PAUSE else self._pause
        self._pause = min(LAST_PAUSE, pause * 2)
        return pause
