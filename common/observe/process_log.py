"""Log lines on the life of a process: one at the start, one a minute with the amounts processed, one at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from common.clock import Clock
from common.errors import FloeError
from common.exits import config_source
from common.logs import get_logger
from common.metrics import version
from common.observe.monitor import Health

if TYPE_CHECKING:
    from common.settings.root import Settings

log = get_logger(__name__)

LOG_INTERVAL_S = 60.0  # seconds between two lines with the amounts processed

Totals = Mapping[str, Callable[[], float]]


class ProcessLog:
    """Log lines of a process: the amounts that it processes; as a context manager also its start and its end.

    `fields`: the objects that it works on. `totals`: the amounts processed since the process began, by the name of
    their log field. `health`, if given, names the problems.
    """

    def __init__(
        self,
        process_name: str,
        settings: Settings,
        clock: Clock,
        totals: Totals,
        health: Health | None = None,
        **fields: object,
    ) -> None:
        self._process_name, self._clock, self._totals, self._health = process_name, clock, totals, health
        self._began, self._result = clock.monotonic(), dict[str, object]()
        self._first = self._before = self._counts()
        self._at = self._began
        store = f"{settings.store.url.rstrip('/')}/{settings.store.prefix}".rstrip("/")
        self._fields = {
            "process": process_name,
            "version": version(),
            "configuration": config_source(),
            "site": settings.site,
            "store": store,
            **fields,
        }

    def __enter__(self) -> ProcessLog:
        log.info("process started", action="process_started", **_without_empty(self._fields))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        failure: dict[str, object] = {}
        if isinstance(error, FloeError):
            failure = {"code": error.code, "error": error.message}
        elif error is not None and not isinstance(error, GeneratorExit):
            failure = {"error": f"{type(error).__name__}: {error}".removesuffix(": ")}
        lasted = {"process": self._process_name, "seconds": round(self._clock.monotonic() - self._began, 1)}
        done = _difference(self._counts(), self._first)
        log.info("process ended", action="process_ended", **lasted, **done, **self._result, **failure)

    def add_end_fields(self, **fields: object) -> None:
        """Add fields to the line at the end."""
        self._result.update(fields)

    async def run(self) -> None:
        """Log a line for each minute in which anything was processed or is wrong; until cancelled."""
        while True:
            await self._clock.sleep(LOG_INTERVAL_S)
            self.log_amounts()

    def log_amounts(self) -> None:
        """Log the amounts since the last call; no line if all are 0 and all is well."""
        now, counts = self._clock.monotonic(), self._counts()
        done, seconds = _difference(counts, self._before), round(now - self._at, 1)
        self._before, self._at = counts, now
        problems = self._health.problems() if self._health else []
        if problems or any(done.values()):
            waits = {"problems": problems} if problems else {}
            log.info("messages processed", action="messages_processed", seconds=seconds, **done, **waits)

    def _counts(self) -> dict[str, float]:
        return {name: total() for name, total in self._totals.items()}


def _difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, int]:
    return {name: round(count - before[name]) for name, count in now.items()}


def _without_empty(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value not in ("", None)}
