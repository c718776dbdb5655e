"""What a store does with a put whose checksum is wrong."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from weakref import WeakKeyDictionary

from common.errors import FloeError, Refused
from common.objects.checksums import ChecksumMismatch
from common.objects.port import ObjectStore
from common.service.logs import get_logger

PROBE_PREFIX = "_floe/probe/"

log = get_logger("objects.probe")

_guard = threading.Lock()
_answers: WeakKeyDictionary[ObjectStore, bool] = WeakKeyDictionary()


def is_verifying(objects: ObjectStore, prefix: str = PROBE_PREFIX) -> bool:
    """`verifies_checksums`, asked once for each `objects`; False where the credential may not try it."""
    with _guard:
        answer = _answers.get(objects)
        if answer is None:
            try:
                answer = verifies_checksums(objects, prefix)
                if not answer:
                    log.warning("store takes wrong checksums: reading back whole", action="read_back_whole")
            except Refused:
                # Who may only read finds out by reading.
                log.info("no right to try the store: reading back whole", action="read_back_whole")
                answer = False
            _answers[objects] = answer
        return answer


def verifies_checksums(objects: ObjectStore, prefix: str = PROBE_PREFIX) -> bool:
    """Whether the store refuses bytes that their SHA-256 denies; if not, only a full GET proves a put.

    Puts one object under `prefix`, always the same, and removes it where that is allowed. Raises what
    `ObjectStore.put` raises.
    """
    key = f"{prefix}wrong-checksum"
    try:
        objects.put(key, b"these bytes", sha256=hashlib.sha256(b"other bytes").hexdigest())
    except ChecksumMismatch:
        return True
    with suppress(FloeError):  # egress may not delete
        objects.delete(key)
    return False
