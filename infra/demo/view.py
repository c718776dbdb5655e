"""The output of the demo: numbered steps, with a moving line on a terminal and plain lines elsewhere."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.clock import Clock

LINE_INTERVAL_S = 5.0  # if lines cannot be rewritten


class DemoView(Protocol):
    """The output of the demo."""

    def step(self, title: str, reason: str) -> None:
        """Begin the next numbered step. `reason`: the reason why it is worth seeing."""

    def print_line(self, text: str) -> None: ...

    def progress(self, text: str) -> None:
        """Show the progress of the step; replace the former text if that is possible."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table. The first column holds names."""


class ConsoleView:
    """The output for people, on stdout. `steps`: how many there will be."""

    def __init__(self, clock: Clock, steps: int) -> None:
        self._clock, self._steps, self._number = clock, steps, 0
        self._console = Console(highlight=False)
        self._progress_bar = Progress(
            SpinnerColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
        )
        self._line = self._progress_bar.add_task("starting", total=None)
        self._started = self._printed_at = clock.monotonic()

    def running(self) -> AbstractContextManager[object]:
        """Keep the moving line in place, and restore the terminal afterwards."""
        return self._progress_bar if self._console.is_terminal else nullcontext()

    def step(self, title: str, reason: str) -> None:
        self._number += 1
        self._console.print(f"\n[bold]Step {self._number} of {self._steps}: {title}[/bold]")
        self._console.print(f"  [dim]{reason}[/dim]", soft_wrap=True)
        self._update(title)

    def print_line(self, text: str) -> None:
        self._printed_at = self._clock.monotonic()
        self._console.print(f"  {self._printed_at - self._started:5.1f} s  {text}", markup=False, soft_wrap=True)

    def progress(self, text: str) -> None:
        self._update(text)
        if not self._console.is_terminal and self._clock.monotonic() - self._printed_at >= LINE_INTERVAL_S:
            self.print_line(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
        for index, name in enumerate(columns):
            table.add_column(name, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self._console.print()
        self._console.print(table)
        self._console.print()

    def _update(self, text: str) -> None:
        self._progress_bar.update(self._line, description=text)


class StepView:
    """The output of `--json`: steps only, on stderr, because stdout belongs to the result."""

    def __init__(self) -> None:
        self._number = 0

    def step(self, title: str, reason: str) -> None:  # noqa: ARG002
        self._number += 1
        sys.stderr.write(f"step {self._number}: {title}\n")

    def print_line(self, text: str) -> None: ...

    def progress(self, text: str) -> None: ...

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...
