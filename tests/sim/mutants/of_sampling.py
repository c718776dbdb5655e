"""Mistakes of a sampled feed: the resume of its sampler, and its advisories."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from egress.advisories.senders import Outbox, ReliableSender
from egress.sampling.resume import ResumedSampler, SamplerResume
from egress.sampling.sampler import Sampler
from tests.sim.mutants.registry import change, mutant


def resume(make: Callable[[SamplerResume, ResumedSampler], ResumedSampler]) -> None:
    """Replace the result of a sampler's resume by the result of `make`."""
    change(SamplerResume, "_run", lambda run: lambda self: make(self, run(self)))


@mutant
def sampler_begins_anew() -> None:
    """A takeover knows nothing of the messages before it."""
    resume(lambda self, found: replace(found, sampler=Sampler(self._sampling, makes_advisories=False)))


@mutant
def nothing_folded_again() -> None:
    """Messages between the snapshot and the position are not shown to the sampler."""
    resume(lambda self, found: replace(found, read_from=self._first))


@mutant
def folded_twice() -> None:
    """Messages before the snapshot are shown to the sampler a second time."""

    def again(self: SamplerResume, found: ResumedSampler) -> ResumedSampler:
        return replace(found, read_from=max(self._archive.first, found.read_from - 20))

    resume(again)


@mutant
def sampler_rebuilt_always() -> None:
    """No snapshot is used: the memory is built from the archived rows."""

    def running(_run: Any) -> Any:
        return lambda self: self._rebuild([])

    change(SamplerResume, "_run", running)


@mutant
def doubtful_advisories_sent_again() -> None:
    """Doubtful advisories are sent again without looking for them in the stream."""

    async def nothing(*_: Any) -> set[str]:
        return set()

    change(ReliableSender, "_find_stored", lambda _find: nothing)


@mutant
def unknown_advisory_taken_for_told() -> None:
    """An advisory without an answer counts as stored."""

    def requeue(real: Any) -> Any:
        return lambda self, advisory, doubtful: self.remove(advisory) if doubtful else real(self, advisory, doubtful)

    change(Outbox, "requeue", requeue)


@mutant
def snapshot_without_its_advisories() -> None:
    """A snapshot leaves out the advisories that were not sent yet."""
    change(ReliableSender, "pending", lambda _pending: lambda _self: ())
