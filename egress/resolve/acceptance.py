"""An operator's word that a stream is the same, though the evidence does not say so: pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from common.sequences import MAX_SEQUENCE
from egress.identity import Evidence, Kind, Verdict, judge

FORMAT_VERSION = 1


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format_version: int
    created: str
    end: int


# Made at import: a type that two threads decode for the first time at once ends the process.
_DECODER = msgspec.json.Decoder(_Wire)
_ENCODER = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The stream created at `created` is taken for the one that was archived up to `end`, whatever differs
    up to there.
    """

    created: str
    end: int

    def to_json(self) -> bytes:
        return _ENCODER.encode(_Wire(FORMAT_VERSION, self.created, self.end))

    @classmethod
    def from_json(cls, raw: bytes) -> Acceptance:
        """What `to_json` wrote. Raises ValueError."""
        try:
            wire = _DECODER.decode(raw)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if wire.format_version != FORMAT_VERSION or not 0 <= wire.end <= MAX_SEQUENCE:
            raise ValueError(f"expected version {FORMAT_VERSION} and an end, found {wire!r:.80}")
        return cls(wire.created, wire.end)


def judge_with(evidence: Evidence, acceptance: Acceptance | None) -> Verdict:
    """The verdict, where an acceptance stands for all that was archived up to its end.

    It says nothing of another stream, nor where the stream ends before what it accepted, nor of what was
    archived since: that is judged as ever.
    """
    source = evidence.source
    if acceptance is None or source is None or source.created != acceptance.created:
        return judge(evidence)
    if source.last < acceptance.end or evidence.end < acceptance.end:
        return judge(evidence)
    newer = tuple(witness for witness in evidence.tips if witness.tip.sequence > acceptance.end)
    if not newer and evidence.end == acceptance.end:
        return Verdict(Kind.SAME, f"accepted by an operator up to {acceptance.end}")
    return judge(replace(evidence, created=acceptance.created, tips=newer, older=None))
