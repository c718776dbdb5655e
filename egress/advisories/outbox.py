"""Reliable advisories that are not stored yet. Pure: nothing here sends, waits or reads a clock.

What is doubtful may have been sent already: by a process that ended, or by this one, whose answer was lost.
It is not sent before the stream was asked, and neither is what follows it for the same value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain, islice

from egress.advisories.event import Advisory

LIMIT = 100_000  # advisories
# Reading stops here. What was asked for by then still comes: a batch, with up to three advisories a message.
HIGH_WATER = LIMIT - 3 * 10_000
WAVE = 256  # advisories on their way at once


class Outbox:
    """Advisories by value, in order for each; one stays until it is stored or dropped."""

    def __init__(self, high_water: int = HIGH_WATER) -> None:
        self._high_water = high_water
        self._queues: dict[str, list[Advisory]] = {}
        self._doubtful: dict[Advisory, None] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def has_room(self) -> bool:
        """Whether more should be looked for. `add` never refuses: what was found cannot be found again."""
        return self._count < self._high_water

    @property
    def doubtful(self) -> Collection[Advisory]:
        """What may have been stored already, in the order in which it was added."""
        return self._doubtful.keys()

    def add(self, advisories: Iterable[Advisory], *, doubtful: bool = False) -> None:
        """Behind what is there of the same value. What is there already and in doubt is not added twice."""
        for advisory in advisories:
            if self._doubtful and advisory in self._doubtful:
                continue
            self._queues.setdefault(advisory.value, []).append(advisory)
            self._count += 1
            if doubtful:
                self._doubtful[advisory] = None

    def wave(self, most: int = WAVE) -> list[Advisory]:
        """What to send now: of each of the first values its first advisory, unless that is doubtful."""
        heads = (queue[0] for queue in self._queues.values())
        return list(islice((head for head in heads if head not in self._doubtful), most))

    def remove(self, advisory: Advisory) -> None:
        """It is stored, or not to be sent any more. Nothing where it is not there."""
        self._doubtful.pop(advisory, None)
        queue = self._queues.get(advisory.value, [])
        if advisory not in queue:
            return
        queue.remove(advisory)
        self._count -= 1
        self._to_the_end(advisory.value)

    def put_back(self, advisory: Advisory, *, doubtful: bool) -> None:
        """It was sent, and is not known to be stored."""
        self._to_the_end(advisory.value)
        if doubtful:
            self._doubtful[advisory] = None

    def _to_the_end(self, value: str) -> None:
        """A value that had its turn comes last, so that no other is held up."""
        queue = self._queues.pop(value)
        if queue:
            self._queues[value] = queue

    def trust(self, advisories: Iterable[Advisory]) -> None:
        """These are not stored, as far as that can be known: they may be sent."""
        for advisory in advisories:
            self._doubtful.pop(advisory, None)

    def pending(self) -> tuple[Advisory, ...]:
        """Everything that is not known to be stored, in order for each value."""
        return tuple(chain.from_iterable(self._queues.values()))
