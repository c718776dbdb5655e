"""The time of the fold: that of the messages, made to run forward.

A stream's timestamps may run backwards a little, when its leader moves to a machine with another clock. The
fold takes the newest time so far instead, so that it does not matter when silent keys are looked for. Where a
message is older than that by more than `inspect_duration`, the clock was set back: time begins there anew,
or a clock that was years ahead for a minute would leave out everything for years.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stretch:
    """Messages from the place `first` of a batch on, with their times, which never run backwards.

    `is_set_back`: the clock was set back before them, to the first of these times.
    """

    first: int
    times: Sequence[int]
    is_set_back: bool


def stretches(timestamps_ns: Sequence[int], newest_ns: int, tolerance_ns: int) -> list[Stretch]:
    """The batch as stretches of time, one behind the other; one, nearly always, and none of nothing.

    `newest_ns`: the newest time before the batch.
    """
    if not timestamps_ns:
        return []
    if timestamps_ns[0] >= newest_ns and sorted(timestamps_ns) == timestamps_ns:
        return [Stretch(0, timestamps_ns, False)]
    return _uneven(timestamps_ns, newest_ns, tolerance_ns)


def _uneven(timestamps_ns: Sequence[int], newest_ns: int, tolerance_ns: int) -> list[Stretch]:
    times: list[int] = []
    found = [Stretch(0, times, False)]
    for place, timestamp_ns in enumerate(timestamps_ns):
        if timestamp_ns < newest_ns - tolerance_ns:
            times, newest_ns = [], timestamp_ns
            found.append(Stretch(place, times, True))
        newest_ns = max(newest_ns, timestamp_ns)
        times.append(newest_ns)
    return [stretch for stretch in found if stretch.times]
