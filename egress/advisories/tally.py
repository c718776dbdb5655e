"""What is told about advisories: metrics, and a log line each time sending begins to fail or works again."""

from __future__ import annotations

from enum import StrEnum

from common.chain import Chain
from common.errors import FloeError
from common.jetstream.requests import NOBODY
from common.service.logs import get_logger
from common.service.metrics import begin
from egress import metrics
from egress.advisories.event import Advisory
from egress.advisories.subject import filter_of

log = get_logger("egress.advisories")

CODE = "E-ADVISORIES"


class Result(StrEnum):
    """What became of an advisory, or of one attempt to send it."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    PUBLISHED = "published"
    UNKNOWN = "unknown"
    FAILED = "failed"
    STALE = "stale"
    DROPPED = "dropped"


class Tally:
    """The tally of one chain."""

    def __init__(self, chain: Chain, template: str) -> None:
        self._chain, self._template = chain, template
        self._labels = chain.site, chain.feed, str(chain.partition)
        self._failing = ""
        begin("egress_", "advisories", site=chain.site, feed=chain.feed, partition=str(chain.partition))
        self.waiting(0)
        metrics.advisories_failing.labels(*self._labels).set(0)

    def count(self, advisory: Advisory, result: Result) -> None:
        """One more of this event and result."""
        metrics.advisories.labels(*self._labels, advisory.event.value, result.value).inc()

    def waiting(self, count: int) -> None:
        """So many are not stored yet."""
        metrics.advisories_waiting.labels(*self._labels).set(count)

    @property
    def is_failing(self) -> bool:
        """Whether the last attempts failed."""
        return bool(self._failing)

    def fails(self, error: FloeError) -> None:
        """Sending fails; told once for each cause, not once for each advisory."""
        metrics.advisories_failing.labels(*self._labels).set(1)
        if error.code != self._failing:
            self._failing = error.code
            self._log_failure(error)

    def _log_failure(self, error: FloeError) -> None:
        why, hint = error.message, error.hint
        if error.code == NOBODY:
            why = f"no stream takes {self._template}"
            hint = f"nats stream add --subjects '{filter_of(self._template)}'; sending goes on by itself"
        log.error(
            "advisories cannot be stored",
            action="advisories_failing",
            code=CODE,
            error=why,
            hint=hint,
            **self._chain.log_context(),
        )

    def works(self) -> None:
        """Nothing that failed waits any more."""
        if self._failing:
            self._failing = ""
            metrics.advisories_failing.labels(*self._labels).set(0)
            log.info("advisories are stored again", action="advisories_work", **self._chain.log_context())

    def not_compared(self, why: str) -> None:
        """What may have been sent could not be looked for: only the stream's duplicate window protects."""
        log.warning(
            "advisories are not compared with their stream",
            action="advisories_not_compared",
            why=why,
            hint="allow STREAM.NAMES, STREAM.INFO and CONSUMER.CREATE on it; until then only its duplicate "
            "window keeps them from being stored twice",
            **self._chain.log_context(),
        )

    def refused(self, advisory: Advisory, error: ValueError) -> None:
        """It can never be sent."""
        self.count(advisory, Result.DROPPED)
        log.error(
            "advisory dropped",
            action="advisory_dropped",
            code=CODE,
            error=str(error),
            value=advisory.value[:200],
            **self._chain.log_context(),
        )
