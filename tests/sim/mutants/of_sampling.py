"""Mistakes of a sampled feed: where its sampler goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from egress.sampling.resume import Resumed, Resuming
from egress.sampling.sampler import Sampler
from tests.sim.mutants.registry import change, mutant


def resume(make: Callable[[Resuming, Resumed], Resumed]) -> None:
    """Let a sampler go on as `make` makes it of what was found."""
    change(Resuming, "_run", lambda run: lambda self: make(self, run(self)))


@mutant
def sampler_begins_anew() -> None:
    """Who takes over knows nothing of what passed before."""
    resume(lambda self, found: replace(found, sampler=Sampler(self._sampling, tracks=False)))


@mutant
def nothing_folded_again() -> None:
    """Messages between the snapshot and the position are not shown to the sampler."""
    resume(lambda self, found: replace(found, read_from=self._first))


@mutant
def folded_twice() -> None:
    """Messages before the snapshot are shown to the sampler once more."""

    def again(self: Resuming, found: Resumed) -> Resumed:
        return replace(found, read_from=max(self._archive.first, found.read_from - 20))

    resume(again)


@mutant
def sampler_rebuilt_always() -> None:
    """No snapshot is gone by: the memory is built from the rows that passed."""

    def running(_run: Any) -> Any:
        return lambda self: self._rebuild([])

    change(Resuming, "_run", running)
