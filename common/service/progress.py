"""How far long work is, told on stderr: a line that is rewritten on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from common.logs import escaped
from common.settings.types import duration_words

if TYPE_CHECKING:
    from rich.status import Status

EVERY = 10.0  # seconds between two lines where there is no terminal
REWRITTEN = 0.5  # seconds between two of a line that is rewritten


class Teller:
    """Writes to stderr, so that stdout holds results only. May be called from several threads.

    `is_terminal`: somebody looks at it; None: where stderr is one.
    """

    def __init__(self, is_terminal: bool | None = None) -> None:
        self._is_terminal = sys.stderr.isatty() if is_terminal is None else is_terminal
        self._told: float | None = None
        self._line: Status | None = None

    def say(self, text: str) -> None:
        """A line that stays."""
        self.end_line()
        click.echo(escaped(text), err=True)

    def progress(self, text: str, at: float) -> None:
        """A line that is out of date soon; `at`: monotonic seconds. On no terminal the first comes after `EVERY`
        seconds, so that what is done by then says nothing.
        """
        if self._told is None and not self._is_terminal:
            self._told = at
        if self._told is not None and at < self._told + (REWRITTEN if self._is_terminal else EVERY):
            return
        self._told = at
        if self._is_terminal:
            self._rewrite(text)
        else:
            click.echo(escaped(text), err=True)

    def _rewrite(self, text: str) -> None:
        from rich.console import Console  # here: a service and a log know no terminal
        from rich.text import Text

        if self._line is None:
            console = Console(stderr=True, highlight=False, force_terminal=True)
            self._line = console.status(Text(escaped(text)))
            self._line.start()
        else:
            self._line.update(Text(escaped(text)))

    def end_line(self) -> None:
        """Leave the line that is rewritten, if there is one."""
        if self._line is not None:
            self._line.stop()
            self._line = None


def share_text(done: float, of: float, seconds: float) -> str:
    """`done` of `of` after `seconds`, and how long the rest takes at that rate: ` 25%, 3 m left`."""
    share = done / of if of else 1.0
    left = f", {duration_words(seconds * (of - done) / done)} left" if done and seconds > 0 and done < of else ""
    return f"{share:4.0%}{left}"
