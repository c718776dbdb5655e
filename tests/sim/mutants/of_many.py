"""Mistakes that only many chains in one target show: of their schedule, of recorded tails, of keys."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

import ingress.delivery
from common.archive.documents import KnownTail
from common.chain import Chain
from egress.incarnations import HighWaterMarks
from ingress.discovery.discovery import Discovery, ListingSchedule
from tests.sim.mutants.registry import change, changing, mutant

CAPACITY = 10  # chains of a schedule that forgets the others


@mutant
def schedule_forgets_chains() -> None:
    """The schedule of listings holds some chains only."""

    @changing(ListingSchedule, "add")
    def add(original: Any, self: ListingSchedule, chains: Any) -> None:
        original(self, [*chains][: max(0, CAPACITY - len(self._known))])


@mutant
def first_chains_listed_for_ever() -> None:
    """A chain keeps its place in the schedule when it is listed: within the bound, the same ones are always next."""

    @changing(ListingSchedule, "take_due")
    def take(original: Any, self: ListingSchedule, pairs: Any) -> Iterator[Any]:
        due = [*self._due]
        yield from original(self, pairs)
        self._due = due


@mutant
def recorded_tail_believed() -> None:
    """The end that a former process recorded counts for the tail that is there now, whatever its ETag."""

    @changing(Discovery, "_recall")
    async def recall(original: Any, self: Discovery) -> Mapping[Chain, KnownTail]:
        found, etags = await original(self), await self._threads.run(self._documents.tail_etags)
        return {chain: KnownTail(etags.get(chain, ""), known.end) for chain, known in found.items()}


@mutant
def site_left_out_of_a_position() -> None:
    """The chains of two sites with one feed and partition share their position."""

    @changing(ingress.delivery, "close_intent")
    def close(original: Any, state: Any, base: int | None = None) -> Any:
        closed = original(state, base)
        before, positions = state.checkpoint.positions, closed.checkpoint.positions
        moved = {structs.replace(chain, site="eu"): at for chain, at in positions.items() if before.get(chain) != at}
        shared = {chain: moved.get(structs.replace(chain, site="eu"), at) for chain, at in positions.items()}
        return replace(closed, checkpoint=replace(closed.checkpoint, positions=shared))


@mutant
def feed_left_out_of_a_mark() -> None:
    """The partitions of two feeds with one number share their high-water mark."""
    change(HighWaterMarks, "key", lambda key: staticmethod(lambda chain: key(structs.replace(chain, feed="S0"))))
