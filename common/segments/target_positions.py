"""How far each target of ingress is, for whoever deletes: one small object for each target.

    {prefix}/_floe/ingress/{target}/positions.json

Ingress puts it at most once a minute, when it has changed, and only what a closed checkpoint says: everything
below a position is stored in the target for good. It may be behind, never ahead (a chain that an operator
moved back is put again at once). A target that was released holds nothing back any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from common.chain import Chain
from common.sequences import MAX_SEQUENCE

FORMAT_VERSION = 1
MAX_BYTES = 8 * 1024 * 1024  # about 100,000 chains


class _Wire(msgspec.Struct, frozen=True, omit_defaults=True):
    format_version: int
    target: str
    time: float
    positions: dict[str, int]
    sources: list[str] = []
    released: bool = False


# Made at import: types that several threads use first at the same time are not safe.
_DECODER = msgspec.json.Decoder(_Wire)
_ENCODER = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class TargetPositions:
    """One object, written at `time` (seconds since 1970 by the clock of ingress).

    `positions`: by chain, the first sequence that the target does not hold yet. `sources`: the `site/feed`
    that may flow in; a chain of them without a position has not begun, and needs everything. `released`: an
    operator let the target go.
    """

    target: str
    time: float
    positions: Mapping[Chain, int] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    released: bool = False

    def to_json(self) -> bytes:
        positions = {str(chain): at for chain, at in self.positions.items()}
        wire = _Wire(FORMAT_VERSION, self.target, self.time, positions, [*self.sources], self.released)
        return _ENCODER.encode(wire)

    @classmethod
    def from_json(cls, raw: bytes) -> TargetPositions:
        """What `to_json` wrote, by this version or a later one that added fields. Raises ValueError."""
        wire = _DECODER.decode(raw)
        if wire.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version: expected {FORMAT_VERSION}, found {wire.format_version}")
        for chain, at in wire.positions.items():
            if not 0 <= at <= MAX_SEQUENCE + 1:
                raise ValueError(f"{chain}: expected a position from 0 to {MAX_SEQUENCE + 1}, found {at}")
        positions = {Chain.parse(chain): at for chain, at in wire.positions.items()}
        return cls(wire.target, wire.time, positions, tuple(wire.sources), wire.released)
