"""Up to what time nothing is still to come, by what the server answers. Pure.

An answer says: at this time the stream ended at that sequence. A leader that was deposed does not know of
newer messages, so a time is believed only once all is folded in that the stream held at the *next* answer.
"""

from __future__ import annotations


class Quiet:
    """The answers about one stream, in the order in which they came."""

    def __init__(self) -> None:
        self._times: list[int] = []
        self._last = 0

    def waits(self, end: int) -> bool:
        """Whether it is too early to ask again: up to `end` all is folded in."""
        return self._last > end

    def heard(self, last: int, now_ns: int) -> None:
        """At `now_ns` the stream ended at the sequence `last`."""
        self._times, self._last = [*self._times[-1:], now_ns], last

    def forget(self) -> None:
        """Nobody answered, or not for this stream."""
        self._times, self._last = [], 0

    def until(self, end: int) -> int | None:
        """Up to what time (ns) all messages are folded in, if all up to `end` are; None if nobody knows."""
        return self._times[0] if len(self._times) > 1 and not self.waits(end) else None
