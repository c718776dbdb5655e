"""Beside carrying: says in the store how far the target is, for those who delete what everybody has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError
from common.segments.documents import ChainStore
from common.segments.target_positions import TargetPositions
from common.service.logs import get_logger
from common.service.threads import Threads
from ingress import metrics

log = get_logger("ingress.checkpoints.reporting")

SPACING = 60.0  # seconds between two objects at least
LOOK = 1.0  # seconds between two looks whether anything has changed


class PositionsReport:
    """Puts `positions.json` of one target. Nothing waits for it: a store that refuses it stops no carrying.

    `positions`: of the last closed checkpoint; None while that is not known to be true. `sources`: the
    `site/feed` that may flow in.
    """

    def __init__(
        self,
        target: str,
        sources: tuple[str, ...],
        positions: Callable[[], Mapping[Chain, int] | None],
        documents: ChainStore,
        threads: Threads,
        clock: Clock,
    ) -> None:
        self._target, self._sources, self._positions = target, sources, positions
        self._documents, self._threads, self._clock = documents, threads, clock
        self._put: Mapping[Chain, int] | None = None
        self._asked_at, self._failure = float("-inf"), ""

    async def run(self) -> None:
        """Say it for as long as the target is carried."""
        while True:
            await self.look()
            await self._clock.sleep(LOOK)

    async def look(self) -> None:
        """Say it if it has changed, and the last time is long enough ago."""
        positions, now = self._positions(), self._clock.monotonic()
        if positions is not None and self._is_due(positions, now):
            self._asked_at = now
            await self._say(dict(positions))

    def _is_due(self, positions: Mapping[Chain, int], now: float) -> bool:
        """Whether to put it now: what was put must not stay ahead of a chain that was moved back."""
        if self._put is not None and _is_behind(positions, self._put):
            return not self._failure or now - self._asked_at >= SPACING
        return positions != self._put and now - self._asked_at >= SPACING

    async def _say(self, positions: Mapping[Chain, int]) -> None:
        said = TargetPositions(self._target, self._clock.now(), positions, self._sources)
        try:
            await self._threads.run(self._documents.write_positions, said)
        except FloeError as error:
            metrics.positions_errors.labels(self._target).inc()
            if error.code != self._failure:
                self._failure = error.code
                log.warning(
                    "positions not stored",
                    action="positions_failed",
                    target=self._target,
                    code=error.code,
                    error=str(error),
                )
            return
        self._put, self._failure = positions, ""
        metrics.positions_put.labels(self._target).set(said.time)


def _is_behind(positions: Mapping[Chain, int], put: Mapping[Chain, int]) -> bool:
    return any(positions.get(chain, 0) < at for chain, at in put.items())
