"""Progress of long work on stderr: a line that is rewritten on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from common.logs import escape
from common.settings.types import duration_words

if TYPE_CHECKING:
    from rich.status import Status

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
