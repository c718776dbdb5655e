"""Durations, sizes, times and addresses as people write them. Everything that parses raises ValueError."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

DURATION_FORM = "a duration such as 500ms 5s 5m 1h30m 7d 1w"
SIZE_FORM = "a size such as 64K 100M 4G (binary, as NATS writes them)"
TIME_FORM = "a time with its zone such as 2026-01-02T03:04:05Z"
LISTEN_FORM = "an address such as 127.0.0.1:9464 or [::1]:9464"

MAX_DURATION = 100 * 365 * 86400.0  # seconds
MAX_SIZE = 2**63 - 1  # bytes

_MILLISECONDS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}

_NUMBER = r"\d{1,19}(?:\.\d{1,9})?"
_DURATION = re.compile(rf"(?:{_NUMBER}(?:ms|[smhdw]))+", re.ASCII)
_DURATION_PART = re.compile(rf"({_NUMBER})(ms|[smhdw])", re.ASCII)
_SIZE = re.compile(rf"({_NUMBER})([KMGTP]?)(?:(?<=[KMGTP])i?B|(?<![KMGTP])B)?", re.ASCII)
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|z|[+-]\d\d:\d\d)", re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds, from one or more numbers each with its unit (ms s m h d w)."""
    if not _DURATION.fullmatch(text):
        raise ValueError(f"expected {DURATION_FORM}, found {text!r:.60}")
    parts = _DURATION_PART.findall(text)
    seconds = sum(Decimal(number) * _MILLISECONDS[unit] for number, unit in parts) / 1000
    if seconds > MAX_DURATION:
        raise ValueError(f"expected at most {format_duration(MAX_DURATION)}, found {text!r:.60}")
    return float(seconds)


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads as `seconds`, to the millisecond; `0s` for nothing."""
    left, text = round(seconds * 1000), ""
    for unit, length in _MILLISECONDS.items():
        count, left = divmod(left, length)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def parse_size(text: str) -> int:
    """Bytes: a number, alone or with K M G T P, each with or without B or iB; all binary."""
    match = _SIZE.fullmatch(text)
    size = int(Decimal(match[1]) * _BYTES[match[2]]) if match else -1
    if not match or size > MAX_SIZE:
        raise ValueError(f"expected {SIZE_FORM}, found {text!r:.60}")
    return size


def format_size(size: int) -> str:
    """The text that `parse_size` reads as `size`, in the largest unit that divides it."""
    unit = next((u for u, n in reversed(_BYTES.items()) if size and size % n == 0), "")
    return f"{size // _BYTES[unit]}{unit}"


def parse_time(text: str) -> int:
    """Nanoseconds since 1970 UTC, from RFC 3339 with a zone and up to nine digits of a second."""
    match = _TIME.fullmatch(text)
    if not match:
        raise ValueError(f"expected {TIME_FORM}, found {text!r:.60}")
    try:
        at = datetime.fromisoformat(f"{match[1].upper()}{match[3].upper().replace('Z', '+00:00')}")
    except ValueError as error:
        raise ValueError(f"expected {TIME_FORM}, found {text!r:.60}: {error}") from error
    seconds = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    return seconds * 10**9 + int((match[2] or "").ljust(9, "0"))


def parse_listen(text: str) -> tuple[str, int] | None:
    """Host and port (0: any free one) to listen on; `:9464`: everywhere; None for an empty text: nowhere."""
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""  # an IPv6 address without brackets
    if (
        not colon
        or not re.fullmatch(r"[0-9]{1,5}", port)
        or int(port) > 65535
        or not re.fullmatch(r"[\w.:%-]*", host)
    ):
        raise ValueError(f"expected {LISTEN_FORM}, found {text!r:.60}")
    return host or "0.0.0.0", int(port)  # noqa: S104  (asked for by leaving the host out)
