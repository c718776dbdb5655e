"""Mistakes of a sampled feed: where its sampler goes on, and what becomes of its advisories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from egress.advisories.outbox import Outbox
from egress.advisories.senders import ReliableSender
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


@mutant
def doubtful_advisories_sent_again() -> None:
    """What may have been told is not looked for before it is sent."""

    async def nothing(*_: Any) -> set[str]:
        return set()

    change(ReliableSender, "_stored", lambda _stored: nothing)


@mutant
def unknown_advisory_taken_for_told() -> None:
    """An advisory without an answer counts as stored."""

    def put_back(real: Any) -> Any:
        return lambda self, advisory, doubtful: self.remove(advisory) if doubtful else real(self, advisory, doubtful)

    change(Outbox, "put_back", put_back)


@mutant
def snapshot_without_its_advisories() -> None:
    """A snapshot forgets what is not told yet."""
    change(ReliableSender, "pending", lambda _pending: lambda _self: ())
