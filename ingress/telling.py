"""What a target tells about itself: readiness, /status, metrics and the log."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from common.clock import Clock
from common.errors import FloeError
from common.jetstream.lease import owner_text
from common.service.logs import get_logger
from common.service.metrics import begin
from common.service.monitor import Health
from ingress import metrics
from ingress.chains.chain_state import Lane
from ingress.chains.prefetch import Supply
from ingress.delivery import Carrier
from ingress.discovery.sites import Sites
from ingress.report import Lags

log = get_logger("ingress.target")

REMIND = 600.0  # seconds until the same reason is logged again
CHAINS = 1000  # that /status shows of one target at most


class TargetReport:
    """The report of one target (`common.sharing.seat.Told` among other things). `is_stopped`: it waits for an
    operator, as far as is known.
    """

    def __init__(
        self, target: str, health: Health, clock: Clock, sites: Sites | None = None, owner: str = ""
    ) -> None:
        self.target, self._health, self._clock, self._sites = target, health, clock, sites
        self._part, self._owner = f"target {target}", owner
        self._lags = Lags(target)
        self.is_stopped = self._is_over = False
        self._publisher, self._reason, self._logged = "", "", float("-inf")
        begin("ingress_", target=target)
        for each in (metrics.holds_lease, metrics.stopped_targets):
            each.labels(target).set(0)
        self._state("starting", ready=False, why="nobody knows yet who holds its lease")

    # The lease

    def standby(self, holder: str | None) -> None:
        """Another instance carries into the target: what was shown of the chains is that one's now."""
        if holder not in (None, self._owner):
            self._lags.forget()
            self._shows_publisher("")
        self._state("standby", ready=True, holder=owner_text(holder or ""))

    def waits(self, error: FloeError) -> None:
        """Nobody can say who holds the lease, or whether the target is there."""
        self._state("waits", ready=False, why=error.message)

    def holds(self) -> None:
        """This instance holds the lease."""
        metrics.holds_lease.labels(self.target).set(1)
        self._state("starting", ready=False, why="starting")
        log.info("carrying", action="carrying", target=self.target)

    def gives_back(self) -> None:
        """It holds it no more. What it showed of the chains stays until another instance is seen to hold it:
        where NATS is away nobody does.
        """
        metrics.holds_lease.labels(self.target).set(0)
        metrics.stopped_targets.labels(self.target).set(0)
        self.is_stopped = False
        self._state("standby", ready=True, holder="")
        log.info("lease released", action="lease_released", target=self.target)

    # Carrying

    def publishes(self, name: str, against: dict[str, str]) -> None:
        """The publisher was chosen; `against`: what speaks against each."""
        self._shows_publisher(name)
        why = {other: reason for other, reason in against.items() if reason}
        log.info("publisher chosen", action="publisher", target=self.target, publisher=name, against=why)

    def carries(self, carrier: Carrier, supply: Supply) -> None:
        """What goes on now; to be told every second."""
        metrics.stopped_targets.labels(self.target).set(0)
        self.is_stopped = False
        self._health.set_ready(self._part, not carrier.trouble, carrier.trouble)
        self._health.set_status(self._part, {"state": "carrying", **self._carrying(carrier, supply)})
        now = self._clock.now()
        self._lags.measure(
            supply.roster, supply.positions, supply.ready(), carrier.state.intent, now, self._sites
        )

    def _carrying(self, carrier: Carrier, supply: Supply) -> dict[str, Any]:
        state, now = carrier.state, self._clock.now()
        positions = state.checkpoint.positions

        def chain(lane: Lane) -> dict[str, Any]:
            told = {**lane.status(positions), "lag_seconds": round(self._lags.of(lane, positions, now))}
            return {**told, **self._source(lane)}

        return {
            "publisher": self._publisher,
            "trouble": carrier.trouble,
            "target_sequence": state.checkpoint.target_sequence,
            "intent": state.intent and {"base": state.intent.base, "count": state.intent.count},
            "chains": {str(lane.chain): chain(lane) for lane in list(supply.roster)[:CHAINS]},
        }

    def _source(self, lane: Lane) -> dict[str, Any]:
        """What egress says of the chain, where it says anything."""
        sighting = self._sites and self._sites.of(lane.chain)
        if not sighting or not self._sites:
            return {}
        sign = sighting.sign
        told = {
            "state": "silent" if self._sites.is_silent(sighting) else sign.state,
            "code": sign.code,
            "why": sign.why,
            "sequence": sign.source_last,
            "alive": sighting.modified,
        }
        return {"source": told}

    # Not carrying

    def retries(self, error: FloeError, pause: float) -> None:
        """What keeps it from carrying passes by itself; it is tried again after `pause` seconds."""
        log.warning("tried again later", action="retry", target=self.target, error=str(error), pause=pause)
        self.waits(error)

    def stopped(self, error: FloeError) -> None:
        """An operator has to do something; it is looked at again, and logged once for each new reason."""
        metrics.stopped_targets.labels(self.target).set(1)
        self.is_stopped = True
        self._state("stopped", ready=False, why=error.message, code=error.code, hint=error.hint)
        reason, now = f"{error.code} {error.message}", self._clock.monotonic()
        if reason == self._reason and now - self._logged < REMIND:
            return
        self._reason, self._logged = reason, now
        self._log_stop(error)

    def ended(self, error: FloeError) -> None:
        """It is not carried by this process any more, whatever an operator does."""
        self.stopped(error)
        self._is_over = True
        self._log_stop(error)

    def _log_stop(self, error: FloeError) -> None:
        log.error(
            "target stopped", action="target_stopped", target=self.target, error=str(error), code=error.code
        )

    def _state(self, state: str, *, ready: bool, why: str = "", **more: str) -> None:
        if not self._is_over:  # whoever asks for its lease just now tells nothing new
            self._health.set_ready(self._part, ready, why)
            self._health.set_status(self._part, {"state": state, "why": why, **more})

    def _shows_publisher(self, name: str) -> None:
        with suppress(KeyError):
            metrics.publisher.remove(self.target, self._publisher)
        self._publisher = name
        if name:
            metrics.publisher.labels(self.target, name).set(1)
