"""Where a copy begins: at most one of four keys, the same for egress and ingress."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from common.sequences import MAX_SEQUENCE
from common.settings.base import Section, option, several
from common.settings.types import Duration, Flag, Range, Time, Whole


class StartSettings(Section):
    """The four keys; without any, everything there is."""

    start_sequence: Annotated[Whole, Range(0, MAX_SEQUENCE)] = option(0, "begin at this sequence")
    start_time: Time = option("", "begin with the first message at or after this time")
    start_delta: Duration = option("0s", "begin this long ago")
    start_at_end: Flag = option(False, "begin with the next message")

    @property
    def is_set(self) -> bool:
        """Whether any of the keys says something."""
        return bool(self.start_sequence or self.start_time or self.start_delta or self.start_at_end)

    def combinations(self) -> Iterator[tuple[str, str]]:
        found = several(
            {
                "start_sequence": self.start_sequence,
                "start_time": self.start_time,
                "start_delta": self.start_delta,
                "start_at_end": self.start_at_end,
            }
        )
        if len(found) > 1:
            yield found[1], f"expected at most one of the start keys, found {' and '.join(found)}"
