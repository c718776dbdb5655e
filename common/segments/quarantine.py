"""Puts an object away that does harm where it is: copied, read back, and only then deleted.

    {prefix}/_floe/quarantine/{sha256[:16]}/{its key below the prefix}

For segments (damaged, or one side of a fork) and for keys that are none of Floe's. Documents that rule a
chain are an operator's to mend, never to put away.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import DataError, OutcomeUnknown, UsageError
from common.failpoints import failpoint
from common.segments.parquet_guard import SegmentGone
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, cover, holes
from common.service.exits import command

AGAIN = "egress reads them again while the source holds them; otherwise every target waits there"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What became of the object at `key`. `uncovered`: sequences that nothing else covers now. `note`: what
    egress needs before it goes on; empty where it needs nothing.
    """

    key: str
    kept_at: str
    size: int
    sha256: str
    uncovered: tuple[SequenceRange, ...]
    note: str = ""


def quarantine_command(key: str) -> str:
    """The command that puts the object at `key` away."""
    return command("segments quarantine", shlex.quote(key))


def quarantine(store: SegmentStore, key: str, *, accept_hole: bool = False) -> Quarantined:
    """Put the object at `key` away.

    Raises UsageError (E-QUARANTINE) for a document that rules a chain, and unless `accept_hole` for a segment
    with sequences that no other undamaged segment covers; SegmentGone where there is no such object;
    OutcomeUnknown where the copy does not read back. The object stays until then; repeating it does no harm.
    """
    info = store.objects.head(key)
    if info is None:
        raise SegmentGone(f"object {key}: not in the store")
    if not store.layout.may_be_put_away(key):
        raise UsageError(
            f"{key}: expected a segment, or an object below the prefix that is none of Floe's, "
            "found one that rules a chain or belongs to others",
            hint="where it rules a chain, put a good copy of it back instead",
            code="E-QUARANTINE",
        )
    name = store.layout.parse_segment(key)
    segment = SegmentRef(name, key, info.size, info.modified) if name else None
    uncovered = _uncovered(store, segment) if segment else []
    note = _at_the_end(store, segment) if segment and uncovered else ""
    if uncovered and not accept_hole:
        raise UsageError(
            f"{key}: nothing else covers {', '.join(map(str, uncovered))}: expected --yes",
            hint="; ".join(filter(None, [AGAIN, note])),
            code="E-QUARANTINE",
        )
    kept_at, sha256 = _copy(store, key, info.metadata)
    failpoint("segments.quarantine")
    store.objects.delete(key)
    return Quarantined(key, kept_at, info.size, sha256, tuple(uncovered), note)


def _at_the_end(store: SegmentStore, segment: SegmentRef) -> str:
    """What egress needs where nothing reaches the end of `segment` then: the high-water mark may be there."""
    last = segment.coverage.last
    if any(ref.key != segment.key for ref in store.list(segment.chain, position=last, limit=2)):
        return ""
    feed = shlex.quote(segment.chain.feed)
    return (
        "it is the last of its chain: where egress at the site then waits with E-LISTING, have it believe "
        f"the listing there: `floe egress resolve -c site.yaml {feed} --believe-listing`"
    )


def _uncovered(store: SegmentStore, segment: SegmentRef) -> Sequence[SequenceRange]:
    """The sequences of `segment` that no other undamaged segment covers."""
    first, last = segment.coverage.first, segment.coverage.last
    others = [s for s in store.list(segment.chain, position=first) if s.key != segment.key]
    while True:
        chosen = {stretch.segment.key: stretch.segment for stretch in cover(others, first, last)}
        damaged = {key for key, other in chosen.items() if not _is_sound(store, other)}
        if not damaged:
            return holes((s.coverage for s in chosen.values()), segment.coverage)
        others = [s for s in others if s.key not in damaged]


def _is_sound(store: SegmentStore, segment: SegmentRef) -> bool:
    try:
        with store.open(segment):
            return True
    except DataError:
        return False


def _copy(store: SegmentStore, key: str, metadata: Mapping[str, str]) -> tuple[str, str]:
    """Copy the object into the quarantine and read it back: the copy's key, and the SHA-256 of both."""
    spool = store.new_spool()
    try:
        sha256 = _fetched(store, key, spool)
        kept_at = store.layout.quarantined(key, sha256)
        store.objects.put(kept_at, spool, sha256=sha256, metadata=metadata)
        # The line may damage what the store keeps well: the original is read again too.
        if {_fetched(store, each, spool) for each in (kept_at, key)} != {sha256}:
            raise OutcomeUnknown(f"object {kept_at}: what was read back is not what was written")
    finally:
        spool.unlink(missing_ok=True)
    return kept_at, sha256


def _fetched(store: SegmentStore, key: str, spool: Path) -> str:
    """The SHA-256 of an object, once it is in the file `spool`."""
    if not store.objects.download(key, spool):
        raise SegmentGone(f"object {key}: not in the store")
    with spool.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
