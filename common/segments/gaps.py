"""Gaps that are given up: sequences of a chain that no segment covers, and that nobody waits for any more.

An operator accepts one for all targets (`floe gap accept`); ingress writes one for its target before it goes
on without what is lost or accepted. Neither is ever changed or deleted by Floe.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from common.chain import Chain
from common.sequences import SequenceRange
from common.service.pasting import command
from common.settings.units import parse_time

FORMAT_VERSION = 1
BEFORE_GIVING_UP = (
    "the source may still hold them: egress at the site looks within six hours, and at once when it is "
    "started again; otherwise put the segment back"
)
MAX_TEXT = 1000  # characters of a note and of a name


class _Version(msgspec.Struct, frozen=True):
    format_version: int


class _Wire(msgspec.Struct, frozen=True, omit_defaults=True):
    format_version: int
    first: int
    last: int
    by: str
    at: str
    note: str = ""
    from_hole: bool = False


# Made at import: a type that two threads decode for the first time at once ends the process.
_VERSION = msgspec.json.Decoder(_Version)
_DECODER = msgspec.json.Decoder(_Wire)
_ENCODER = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class AcceptedGap:
    """`range` is given up. `by`: who decided; `at`: when, RFC 3339 by the decider's clock; `note`: why, or
    empty. An empty `at`: not known. `from_hole`: segments cover it, and lack some of what was lost there.

    Raises ValueError for texts that are too long, and for an `at` that is no time.
    """

    range: SequenceRange
    note: str = ""
    by: str = ""
    at: str = ""
    from_hole: bool = False

    def __post_init__(self) -> None:
        for name, text in (("note", self.note), ("by", self.by), ("at", self.at)):
            if len(text) > MAX_TEXT:
                raise ValueError(f"{name}: expected at most {MAX_TEXT} characters, found {len(text)}")
        if self.at:
            parse_time(self.at)

    def to_json(self) -> bytes:
        bounds = self.range.first, self.range.last
        wire = _Wire(FORMAT_VERSION, *bounds, self.by, self.at, self.note, self.from_hole)
        return _ENCODER.encode(wire)

    @classmethod
    def from_json(cls, raw: bytes) -> AcceptedGap:
        """What `to_json` wrote. Raises ValueError."""
        found = _VERSION.decode(raw).format_version
        if found != FORMAT_VERSION:
            raise ValueError(f"format_version: expected {FORMAT_VERSION}, found {found}")
        wire = _DECODER.decode(raw)
        return cls(SequenceRange(wire.first, wire.last), wire.note, wire.by, wire.at, wire.from_hole)


def of_chain(chain: Chain) -> str:
    """The options that name a chain, in full: without an incarnation they would mean the newest."""
    words = ["--site", chain.site, "--feed", shlex.quote(chain.feed)]
    words += ["--incarnation", str(chain.incarnation), "--partition", str(chain.partition)]
    return " ".join(words)


def accept_command(chain: Chain, hole: SequenceRange) -> str:
    """Give up a hole, for all targets; it asks first."""
    return command("gap accept", of_chain(chain), f"--first {hole.first} --last {hole.last}")


def way_out(chain: Chain, hole: SequenceRange) -> str:
    """What to do about a hole, in the order in which it costs least: giving up comes last."""
    return (
        f"{BEFORE_GIVING_UP}; only when nobody has them any more, give them up for all targets:\n"
        f"{accept_command(chain, hole)}"
    )


def way_out_filled(chain: Chain, rows: SequenceRange) -> str:
    """What to do about sequences that are missing where a hole was filled."""
    return (
        "put the lost segment back; only when nobody has it any more, give up what is missing, for all "
        f"targets (what is there is carried):\n{accept_command(chain, rows)}"
    )


def carry_late(chain: Chain, rows: SequenceRange) -> str:
    """What to do about rows that came behind the position of a target."""
    bounds = f"--from-sequence {rows.first} --to-sequence {rows.last}"
    target = shlex.quote(f"{chain.feed}_LATE")
    replay = command("replay", of_chain(chain), bounds, f"--target {target} --subject-prefix late --create")
    return (
        "a target that lacks them gets them with the rest by `floe checkpoint set`, which says how many "
        f"messages it then holds twice; or carry them into another stream:\n{replay}"
    )


def accepted_part(hole: SequenceRange, gaps: Iterable[SequenceRange]) -> SequenceRange | None:
    """The leading part of `hole` that `gaps` account for without a break; None where its first is in none."""
    reach = hole.first - 1
    for gap in sorted(gaps):
        if gap.first > reach + 1:
            break
        reach = max(reach, gap.last)
    return SequenceRange(hole.first, min(reach, hole.last)) if reach >= hole.first else None
