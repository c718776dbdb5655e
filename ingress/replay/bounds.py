"""Whether a range means anything of the archive: a mistyped date must not look like an empty success."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from common.chain import Chain
from common.errors import UsageError
from common.sequences import SequenceRange
from common.settings.units import format_duration
from ingress.replay.request import Request

Moments = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Held:
    """What the archive holds of a chain: sequences (None: nothing), and the times (ns, inclusive) of
    the first and the last message (None: its segments do not tell).
    """

    chain: Chain
    rows: SequenceRange | None
    first_ns: int | None = None
    last_ns: int | None = None


def check_meets(request: Request, moments: Moments, archive: Sequence[Held]) -> None:
    """Raises UsageError where the bounds of `request` lie before or behind all that is archived.

    Fine is a range inside the archive that holds no messages, and an archive that holds nothing yet.
    """
    held = [each for each in archive if each.rows is not None]
    if held and not any(_meets(request, moments, each) for each in held):
        raise UsageError(
            f"{_asked(request)}: expected a range that meets the archive of {_extent(held)}",
            hint="look at the dates and the zone; without bounds all of it is replayed",
        )


def _meets(request: Request, moments: Moments, held: Held) -> bool:
    assert held.rows is not None, "only chains that hold something are asked"
    begin, end = moments
    too_late = (request.from_sequence or 1) > held.rows.last
    too_early = request.to_sequence is not None and request.to_sequence < held.rows.first
    too_new = begin is not None and held.last_ns is not None and begin > held.last_ns
    too_old = end is not None and held.first_ns is not None and end <= held.first_ns
    return not (too_late or too_early or too_new or too_old)


def _asked(request: Request) -> str:
    """The bounds as they were typed."""
    bounds = {
        "--from-sequence": request.from_sequence,
        "--from-time": request.from_time,
        "--since": format_duration(request.since) if request.since else "",
        "--to-sequence": request.to_sequence,
        "--to-time": request.to_time,
    }
    return " ".join(f"{option} {value}" for option, value in bounds.items() if value)


def _extent(held: Sequence[Held]) -> str:
    chain, rows = held[0].chain, [each.rows for each in held if each.rows is not None]
    incarnations = " to ".join(_ends([f"{each.chain.incarnation:04d}" for each in held]))
    first = [each.first_ns for each in held if each.first_ns is not None]
    last = [each.last_ns for each in held if each.last_ns is not None]
    times = f", from {time_text(min(first))} to {time_text(max(last))}" if first and last else ""
    which = f"{chain.site}/{chain.feed} (incarnation {incarnations})"
    return f"{which}: sequences {min(r.first for r in rows)} to {max(r.last for r in rows)}{times}"


def _ends(values: list[str]) -> list[str]:
    return sorted({min(values), max(values)})


def time_text(timestamp_ns: int) -> str:
    """A time for people, to the second."""
    return datetime.fromtimestamp(timestamp_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
