"""When a key is due again: the same in every process, and not for all keys at once."""

from __future__ import annotations

from hashlib import blake2b

from common.clock import NS_PER_S

#: A publisher with a period of `inspect_duration` is never quite on time: it may be early by this much.
SLACK_PART = 100


def period_ns(key: str, duration_ns: int) -> int:
    """After how many nanoseconds since its last copy a message of `key` passes again.

    That is `duration_ns`, less a slack of a hundredth of it (at most one second), less a share of a tenth of
    it that follows from the key alone: copies that began together drift apart, and none is late.
    """
    digest = blake2b(key.encode("utf-8", "backslashreplace"), digest_size=8).digest()
    spread = int.from_bytes(digest, "big") * duration_ns // (10 << 64)
    return duration_ns - min(NS_PER_S, duration_ns // SLACK_PART) - spread
