"""What an operator sees while a replay runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from common.chain import Chain
from common.settings.units import format_duration
from ingress.replay.plan import ChainRange

EVERY = 10.0  # seconds between two lines where there is no terminal


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a replay is. `sequences`: accounted for, of `of`; `rows`: messages stored; `bytes`: of them, in
    this run. `chain`, `sequence`: the last one stored; None before the first."""

    rows: int
    bytes: int
    sequences: int
    of: int
    chain: Chain | None
    sequence: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.sequences / self.of if self.of else 1.0


def standing(
    ranges: Sequence[ChainRange], positions: Mapping[Chain, int], rows: int, raw_bytes: int
) -> Standing:
    """Where a replay of `ranges` is that stands at `positions`."""
    done = {each: min(positions.get(each.chain, 0), each.rows.last + 1) - each.rows.first for each in ranges}
    current = next((e for e in reversed(ranges) if done[e] > 0), None)
    return Standing(
        rows,
        raw_bytes,
        sum(max(0, count) for count in done.values()),
        sum(len(each.rows) for each in ranges),
        None if current is None else current.chain,
        0 if current is None else positions[current.chain] - 1,
    )


def progress_line(now: Standing, begun: Standing, seconds: float) -> str:
    """One line; `begun`: where this run began, `seconds` ago."""
    moved = now.sequences - begun.sequences
    left = (
        format_duration(round((now.of - now.sequences) * seconds / moved))
        if moved > 0 and seconds > 0
        else "-"
    )
    rate = (now.rows - begun.rows) / seconds if seconds > 0 else 0
    where = f", {now.chain} at {now.sequence:,}" if now.chain else ""
    return (
        f"{now.share:4.0%}  {now.rows:,} messages, {size_text(now.bytes)}, {rate:,.0f} msg/s, "
        f"{left} left{where}"
    )


def size_text(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"


class Teller:
    """Writes to stderr: on a terminal one line that is rewritten, elsewhere a line now and then."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._told = float("-inf")
        self._open = False

    @property
    def spacing(self) -> float:
        """Seconds between two progress lines that are worth making."""
        return 0.5 if self._terminal else EVERY

    def say(self, text: str) -> None:
        """A line that stays."""
        self.end_line()
        click.echo(text, err=True)

    def progress(self, text: str, at: float) -> None:
        """A line that is out of date soon; `at`: monotonic seconds."""
        if at < self._told + self.spacing:
            return
        self._told = at
        if self._terminal:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
            self._open = True
        else:
            click.echo(text, err=True)

    def end_line(self) -> None:
        """Leave the line that is rewritten, if there is one."""
        if self._open:
            click.echo("", err=True)
            self._open = False
