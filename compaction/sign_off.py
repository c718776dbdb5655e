"""Sign-offs: records of the segments of a chain that `floe segments verify --since-last` need not read again.

    {prefix}/_floe/verify/site=…/…/partition={n}/{shallow,deep}.json

A sign-off holds a fingerprint of 8 bytes for each segment that was checked and is part of no problem: a hash of its
key, its size and its modification time at the store. So a segment that is stored later, merged into another level, or
overwritten under the same name is new, for any sequences and however late it arrives. The object is written last, after
all of a chain was read, and only over the version that the run itself had found.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field

import msgspec
import numpy as np

from common.archive.documents import Document
from common.archive.keys import Layout
from common.archive.segment import SegmentRef
from common.chain import Chain
from common.documents import JsonCodec
from common.errors import DataError
from common.failpoints import failpoint
from common.logs import get_logger
from common.objects.port import ObjectStore

log = get_logger(__name__)

SIGN_OFF_MAX_BYTES = 32 << 20  # about 3,000,000 segments
FINGERPRINT_BYTES = 8


class _SignOffWire(msgspec.Struct, frozen=True, tag_field="format_version", tag=1):
    deep: bool
    end: int
    marks: bytes


_SIGN_OFF = JsonCodec(_SignOffWire)


def fingerprint(ref: SegmentRef) -> int:
    """Return 64 bits of a hash over the listed key, size and modification time of a segment."""
    text = f"{ref.key}\n{ref.size}\n{ref.modified!r}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES).digest(), "little")


@dataclass(frozen=True, slots=True)
class SignOff:
    """Segments of one chain that earlier runs found sound. `end`: there is no problem up to this sequence, 0 if the
    chain begins with one; `written_at`: seconds since 1970 UTC by the store's clock; `fingerprints`: ascending.

    `etag`: ETag of the object, None if there is no object yet. If the object is unreadable, no segment is signed off.
    """

    end: int = 0
    written_at: float = 0.0
    etag: str | None = None
    fingerprints: array[int] = field(default_factory=lambda: array("Q"))

    def __contains__(self, ref: SegmentRef) -> bool:
        wanted = fingerprint(ref)
        place = bisect_left(self.fingerprints, wanted)
        return place < len(self.fingerprints) and self.fingerprints[place] == wanted


class SignOffStore:
    """The sign-offs of one store, for deep or for shallow runs. They are separate: a shallow check signs nothing off
    for a deep run.
    """

    def __init__(self, objects: ObjectStore, layout: Layout, *, deep: bool) -> None:
        self._objects, self._layout, self._deep = objects, layout, deep

    def read(self, chain: Chain) -> SignOff:
        """Return the sign-off of `chain`; an empty one if there is none. An unreadable one is logged and counts as
        empty: all segments are read, and it is rewritten.
        """
        document = self._document(chain)
        if (info := document.head()) is None:
            return SignOff()
        try:
            wire = document.read()
        except DataError as error:
            log.warning("sign-off ignored", action="sign_off_ignored", key=document.key, error=error.message)
            return SignOff(etag=info.etag)
        return SignOff(wire.end, info.modified, info.etag, array("Q", wire.marks)) if wire else SignOff()

    def write(self, chain: Chain, former: SignOff, end: int, fingerprints: array[int]) -> bool:
        """Sign `fingerprints` off in place of `former`, and read the object back. Return False if another run has
        written meanwhile, or if there are too many: the stored object then stays as it is. Raises the errors of the
        store.
        """
        marks = np.sort(np.array(fingerprints, np.uint64)).tobytes()  # without a Python integer for each
        document, wire = self._document(chain), _SignOffWire(self._deep, end, marks)
        failpoint("verify.sign_off")
        try:
            return document.update(wire, former.etag)
        except DataError:
            log.warning("sign-off skipped", action="sign_off_skipped", key=document.key, segments=len(fingerprints))
            return False

    def _document(self, chain: Chain) -> Document[_SignOffWire]:
        def check(found: _SignOffWire) -> str:
            is_sound = found.deep is self._deep and len(found.marks) % FINGERPRINT_BYTES == 0
            return "" if is_sound else f"expected whole marks and deep: {self._deep}, found deep: {found.deep}"

        key = self._layout.verify_result(chain, deep=self._deep)
        form = _SIGN_OFF.encode, _SIGN_OFF.decode
        return Document(self._objects, key, *form, check=check, max_bytes=SIGN_OFF_MAX_BYTES)
