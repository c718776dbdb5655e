"""From the sampler to the advisories: what it finds out about values, and time for those that are silent."""

from __future__ import annotations

from dataclasses import dataclass

from egress.advisories.advising import Advisories
from egress.advisories.event import Advisory
from egress.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Again:
    """What a former session may have found already.

    `last`: up to this sequence messages may have been read before. `until_ns`: and this time may have been
    let pass, if by then all messages up to `last` are folded in; 0 if not.
    """

    last: int
    until_ns: int = 0


class Tracking:
    """`advisories`: None where the feed has none; then time only lets the sampler forget."""

    def __init__(self, sampler: Sampler, advisories: Advisories | None, again: Again) -> None:
        self._sampler, self._advisories, self._again = sampler, advisories, again
        self._advanced_ns = 0
        self.is_again = True

    @property
    def has_room(self) -> bool:
        """False while advisories wait to be stored."""
        return self._advisories is None or self._advisories.has_room

    def found(self, advisories: list[Advisory], *, again: bool = False) -> None:
        """Hand these over; `again`: they may have been sent, though nothing is read again any more."""
        if self._advisories is not None and advisories:
            self._advisories.take(advisories, again=again or self.is_again)

    def reached(self, sequence: int) -> None:
        """All up to `sequence` is folded in."""
        if self.is_again and sequence >= self._again.last:
            self.advance(max(self._sampler.watermark_ns, self._again.until_ns))
            self.is_again = False
            if self._advisories is not None:
                self._advisories.settle()

    def advance(self, now_ns: int, *, again: bool = False) -> None:
        """No message older than `now_ns` is still to come; `again` as in `found`."""
        if now_ns > self._advanced_ns:
            self._advanced_ns = now_ns
            self.found(self._sampler.advance(now_ns), again=again)

    def tick(self) -> None:
        """Let as much time pass as the messages did."""
        self.advance(self._sampler.watermark_ns)

    def pending(self) -> tuple[Advisory, ...]:
        """What is not stored yet."""
        return () if self._advisories is None else self._advisories.pending()
