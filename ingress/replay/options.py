"""What an operator allows a replay, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ingress.replay.pace import Pace
from ingress.verdict.settle import LOOK_SPACING


@dataclass(frozen=True, slots=True)
class Options:
    """`again`: begin anew, whatever is remembered of a former replay. `pace` None: as fast as possible.

    `paced`: the options that said so, to repeat. `look_spacing`: seconds between the three looks that confirm
    a verdict.
    """

    create: bool = False
    append: bool = False
    allow_lossy: bool = False
    skip_holes: bool = False
    again: bool = False
    pace: Pace | None = None
    paced: tuple[str, ...] = ()
    look_spacing: float = LOOK_SPACING

    def words(self) -> Iterator[str]:
        """The options that say the same, for a command to paste."""
        for name in ("create", "append", "allow_lossy", "skip_holes", "again"):
            if getattr(self, name):
                yield f"--{name.replace('_', '-')}"
        yield from self.paced


@dataclass(frozen=True, slots=True)
class Result:
    """How a replay ended. `finished`: all is stored; `was_done`: by an earlier run. `rows`: messages stored
    by all its runs; `rows_now`, `bytes`, `seconds`: of this run."""

    finished: bool
    was_done: bool
    rows: int
    rows_now: int
    bytes: int
    seconds: float
    target: str

    @property
    def rate(self) -> float:
        """Messages a second of this run."""
        return self.rows_now / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "finished": self.finished,
            "was_done": self.was_done,
            "target": self.target,
            "rows": self.rows,
            "rows_now": self.rows_now,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "rows_per_second": round(self.rate),
        }
