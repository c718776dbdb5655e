"""Progress of a process: log lines at its start, once a minute and at its end; and that of long work, on stderr.

On a terminal the line on stderr is rewritten, elsewhere there is a line every ten seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import click

from common.clock import Clock
from common.errors import FloeError
from common.exits import config_source
from common.logs import escape, get_logger
from common.metrics import version
from common.settings.types import duration_words

if TYPE_CHECKING:
    from rich.status import Status

    from common.settings.root import Settings

log = get_logger(__name__)

PRINT_INTERVAL_S = 10.0  # seconds between two lines without a terminal
REWRITE_INTERVAL_S = 0.5  # seconds between two versions of a line that is rewritten


class Progress:
    """Writer of progress to stderr, so that stdout holds results only. May be called from several threads.

    `is_terminal`: a person reads it; None: if stderr is a terminal.
    """

    def __init__(self, is_terminal: bool | None = None) -> None:
        self._is_terminal = sys.stderr.isatty() if is_terminal is None else is_terminal
        self._printed_at: float | None = None
        self._line: Status | None = None

    def print(self, text: str) -> None:
        """Print a line that stays."""
        self.end_line()
        click.echo(escape(text), err=True)

    def update(self, text: str, at: float) -> None:
        """Print a line that is out of date soon; `at`: monotonic seconds. Without a terminal the first one comes after
        `PRINT_INTERVAL_S` seconds, so that short work prints nothing.
        """
        if self._printed_at is None and not self._is_terminal:
            self._printed_at = at
        interval = REWRITE_INTERVAL_S if self._is_terminal else PRINT_INTERVAL_S
        if self._printed_at is not None and at < self._printed_at + interval:
            return
        self._printed_at = at
        if self._is_terminal:
            self._rewrite(text)
        else:
            click.echo(escape(text), err=True)

    def _rewrite(self, text: str) -> None:
        from rich.console import Console  # here: a service and a log have no terminal
        from rich.text import Text

        if self._line is None:
            console = Console(stderr=True, highlight=False, force_terminal=True)
            self._line = console.status(Text(escape(text)))
            self._line.start()
        else:
            self._line.update(Text(escape(text)))

    def end_line(self) -> None:
        """End the line that is rewritten, if there is one."""
        if self._line is not None:
            self._line.stop()
            self._line = None


def format_share(done: float, total: float, seconds: float) -> str:
    """Return `done` of `total` after `seconds`, and the time that the rest takes at that rate: ` 25%, 3 m left`."""
    share = done / total if total else 1.0
    left = f", {duration_words(seconds * (total - done) / done)} left" if done and seconds > 0 and done < total else ""
    return f"{share:4.0%}{left}"


LOG_INTERVAL_S = 60.0  # seconds between two lines with the amounts processed

Totals = Mapping[str, Callable[[], float]]


class ProcessLog:
    """Log lines of a process: the amounts that it processes; as a context manager also its start and its end.

    `fields`: the objects that it works on. `totals`: the amounts processed since the process began, by the name of
    their log field. `problems`: returns what is wrong with the process, a line for each.
    """

    def __init__(
        self,
        process_name: str,
        settings: Settings,
        clock: Clock,
        totals: Totals,
        problems: Callable[[], Sequence[str]] = lambda: (),
        **fields: object,
    ) -> None:
        self._process_name, self._clock, self._totals, self._problems = process_name, clock, totals, problems
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
        if (problems := self._problems()) or any(done.values()):
            waits = {"problems": problems} if problems else {}
            log.info("messages processed", action="messages_processed", seconds=seconds, **done, **waits)

    def _counts(self) -> dict[str, float]:
        return {name: total() for name, total in self._totals.items()}


def _difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, int]:
    return {name: round(count - before[name]) for name, count in now.items()}


def _without_empty(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value not in ("", None)}
