"""Which keys the stores take: those that mean the same on every S3 server and on a file system."""

from __future__ import annotations

import re

from common.errors import ConfigError

MAX_KEY_BYTES = 1024

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_key(key: str) -> None:
    """Raises ConfigError unless `key` is up to 1024 bytes of UTF-8, no part empty, `.` or `..`."""
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise _refusal(key, "parts that are neither empty, '.' nor '..'")
    _check_text(key)


def check_prefix(prefix: str) -> None:
    """Raises ConfigError unless keys can begin with `prefix`, which may be empty or end inside a part."""
    *folders, _ = prefix.split("/")
    if any(part in ("", ".", "..") for part in folders):
        raise _refusal(prefix, "parts that are neither empty, '.' nor '..'")
    _check_text(prefix)


def in_key_order(key: str) -> bytes:
    """What to sort keys by: S3 orders them by the bytes of their UTF-8."""
    return key.encode()


def _check_text(key: str) -> None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise _refusal(key, "UTF-8") from None
    if size > MAX_KEY_BYTES:
        raise _refusal(key, f"at most {MAX_KEY_BYTES} bytes")
    if _CONTROL.search(key):
        raise _refusal(key, "no control characters")


def _refusal(key: str, expected: str) -> ConfigError:
    return ConfigError(f"object key {key!r:.200}: expected {expected}", code="E-KEY")
