"""What a sampler knows, as `floe state` prints it: chosen, sorted, one line at a time."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from common.segments.listing import timestamp
from common.service.text import escaped
from egress.sampling.state import Known, Notice, SamplerState

_TIME_WIDTH = len("2026-11-20T10:00:00.000000000Z")
_HEADER = f"{'seen':{_TIME_WIDTH}}  {'copied':{_TIME_WIDTH}}  {'size':>10}  {'advised':7}  value"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which values: those that match `pattern` (None: all), were seen at `since_ns` or later, and, where
    `silent_ns` is not None, are known to be silent or were seen before it.

    Those last seen at `expired_ns` or before have expired, like those that were told about: they are unknown.
    """

    pattern: re.Pattern[str] | None = None
    since_ns: int = 0
    silent_ns: int | None = None
    expired_ns: int = 0

    def is_expired(self, known: Known) -> bool:
        """Whether `known` only waits to be forgotten."""
        return known.notice == Notice.EXPIRE or known.seen_ns <= self.expired_ns

    def takes(self, known: Known) -> bool:
        """Whether `known`, which has not expired, is one of them."""
        if known.seen_ns < self.since_ns:
            return False
        if self.silent_ns is not None and not (known.notice or known.seen_ns < self.silent_ns):
            return False
        return self.pattern is None or self.pattern.search(known.value) is not None


class Values:
    """The values of `state` that `selection` takes, by name; a million of them take some 100 MB.

    `known`: how many there are to take them from; `expired`: how many more have expired.
    """

    def __init__(self, state: SamplerState, selection: Selection) -> None:
        self._values: list[str] = []
        self._times = array("q")  # seen, copied, due of each
        self._sizes = array("Q")
        self._notices = bytearray()
        self.known = self.expired = 0
        for known in state.known():
            if selection.is_expired(known):
                self.expired += 1
                continue
            self.known += 1
            if not selection.takes(known):
                continue
            self._values.append(known.value)
            self._times.extend((known.seen_ns, known.copied_ns, known.due_ns))
            self._sizes.append(known.size)
            self._notices.append(known.notice)

    def __len__(self) -> int:
        return len(self._values)

    def last_seen_by(self, time_ns: int) -> int:
        """How many of them were seen last at `time_ns` or before."""
        return sum(seen <= time_ns for seen in self._times[::3])

    def __iter__(self) -> Iterator[Known]:
        for n in sorted(range(len(self._values)), key=self._values.__getitem__):
            seen, copied, due = self._times[3 * n : 3 * n + 3]
            yield Known(self._values[n], seen, copied, due, self._sizes[n], Notice(self._notices[n]))


def header(chain_width: int) -> str:
    """What the columns of `as_text` are, behind that of the chain."""
    return f"{'chain':{chain_width}}  {_HEADER}"


def as_value(known: Known) -> str:
    """The value alone."""
    return escaped(known.value)


def as_text(known: Known) -> str:
    """One line for people; what a value holds cannot forge another."""
    advised = known.notice.name.lower() if known.notice else "-"
    seen, copied = timestamp(known.seen_ns), timestamp(known.copied_ns)
    return (
        f"{seen:{_TIME_WIDTH}}  {copied:{_TIME_WIDTH}}  {known.size:10}  {advised:7}  {escaped(known.value)}"
    )


def as_json(chain: str, known: Known) -> str:
    """One line for programs. `advised`: null or `timeout`; `due`: when the next one passes."""
    return json.dumps(
        {
            "chain": chain,
            "value": known.value,
            "seen": timestamp(known.seen_ns),
            "copied": timestamp(known.copied_ns),
            "due": timestamp(known.due_ns),
            "size": known.size,
            "advised": known.notice.name.lower() if known.notice else None,
        }
    )
