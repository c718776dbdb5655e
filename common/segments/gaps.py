"""Gaps that are given up: sequences of a chain that no segment covers, and that nobody waits for any more.

An operator accepts one for all targets (`floe gap accept`); ingress writes one for its target before it goes
on without what is lost or accepted. Neither is ever changed or deleted by Floe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from common.sequences import SequenceRange
from common.settings.units import parse_time

FORMAT_VERSION = 1
MAX_TEXT = 1000  # characters of a note and of a name


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    format_version: int
    first: int
    last: int
    by: str
    at: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class AcceptedGap:
    """`range` is given up. `by`: who decided; `at`: when, RFC 3339 by the decider's clock; `note`: why, or
    empty. An empty `at`: not known.

    Raises ValueError for texts that are too long, and for an `at` that is no time.
    """

    range: SequenceRange
    note: str = ""
    by: str = ""
    at: str = ""

    def __post_init__(self) -> None:
        for name, text in (("note", self.note), ("by", self.by), ("at", self.at)):
            if len(text) > MAX_TEXT:
                raise ValueError(f"{name}: expected at most {MAX_TEXT} characters, found {len(text)}")
        if self.at:
            parse_time(self.at)

    def to_json(self) -> bytes:
        wire = _Wire(FORMAT_VERSION, self.range.first, self.range.last, self.by, self.at, self.note)
        return msgspec.json.encode(wire, order="sorted")

    @classmethod
    def from_json(cls, raw: bytes) -> AcceptedGap:
        """What `to_json` wrote. Raises ValueError."""
        wire = msgspec.json.decode(raw, type=_Wire)
        if wire.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version: expected {FORMAT_VERSION}, found {wire.format_version}")
        return cls(SequenceRange(wire.first, wire.last), wire.note, wire.by, wire.at)


def accepted_part(hole: SequenceRange, gaps: Iterable[SequenceRange]) -> SequenceRange | None:
    """The leading part of `hole` that `gaps` account for without a break; None where its first is in none."""
    reach = hole.first - 1
    for gap in sorted(gaps):
        if gap.first > reach + 1:
            break
        reach = max(reach, gap.last)
    return SequenceRange(hole.first, min(reach, hole.last)) if reach >= hole.first else None
