"""Durations as stream-replicator writes them: Go's, and days, weeks, months and years."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from common.settings.units import MAX_DURATION, format_duration

FORM = "a duration of stream-replicator such as 500ms 5s 1m30s 1h 1d 1w 1M 1Y"

_DAYS = {"w": 7, "W": 7, "d": 1, "D": 1, "M": 30, "Y": 365, "y": 365}
_LONG = re.compile(r"([0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})([wWdDMYy])")
_GO_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(ns|us|µs|μs|ms|s|m|h)")
_GO = re.compile(rf"(?:{_GO_PART.pattern})+")
_SECONDS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "μs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}


def convert(text: str) -> str:
    """The duration as Floe writes it; `0s` for an empty text. Raises ValueError with what was expected.

    A month is 30 days and a year 365, and parts of an hour of such a number are dropped, as there.
    """
    text = text.strip()
    if not text or text == "0":
        return "0s"
    seconds = _seconds(text)
    if seconds > MAX_DURATION:
        raise ValueError(f"expected at most {format_duration(MAX_DURATION)}, found more")
    if 0 < seconds < Decimal("0.001"):
        raise ValueError("expected at least 1ms, which is the smallest duration of Floe, found less")
    return format_duration(float(seconds))


def _seconds(text: str) -> Decimal:
    if match := _LONG.fullmatch(text):
        hours = Decimal(match[1]) * _DAYS[match[2]] * 24
        return Decimal(math.floor(hours)) * 3600
    if not _GO.fullmatch(text):
        raise ValueError(f"expected {FORM}, found {text!r:.60}")
    return sum((Decimal(number) * _SECONDS[unit] for number, unit in _GO_PART.findall(text)), Decimal(0))
