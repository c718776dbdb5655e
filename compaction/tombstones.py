"""Tombstones: one small object for each supersession, naming the superseded segments and the superseding ones.

    {prefix}/_floe/tombstones/site=…/…/partition={n}/{last:020d}-{first:020d}-{sha256[:16]}.json

A tombstone is written once the rows of its superseded segments were found in the superseding ones. The grace is counted
from then, by the store's clock. It holds no time and no host: two jobs, or a repeated job, write the same bytes under
the same name. A tombstone is untrusted until its name, its hash and every rule of `compaction.plan` have been
checked; a damaged one is reported and never acted on.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common.archive.documents import Document, SnapshotRef, newest_first
from common.archive.keys import Layout, digest_of
from common.archive.segment import SegmentRef
from common.archive.table import SegmentTable
from common.chain import Chain
from common.errors import DataError
from common.logs import get_logger
from common.objects.port import ObjectInfo, ObjectStore, read_store_clock
from common.sequences import SequenceRange, holes
from compaction.failures import Failure
from compaction.plan import Supersession, may_supersede

log = get_logger(__name__)


FORMAT_VERSION = 1
TOMBSTONE_MAX_BYTES = 16 << 20
FORGED_HINT = "it deletes no segment; find its writer, then quarantine it"

_NAME = re.compile(r"(?P<last>\d{20})-(?P<first>\d{20})-(?P<digest>[0-9a-f]{16})\.json")


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Segments that were proved to be in others. The stored form has no times: `modified` is 0."""

    superseded: tuple[SegmentRef, ...]
    superseding: tuple[SegmentRef, ...]

    @classmethod
    def of(cls, supersession: Supersession) -> Tombstone:
        return cls(_without_times(supersession.superseded), _without_times(supersession.superseding))

    @property
    def chain(self) -> Chain:
        return self.superseded[0].chain

    @property
    def coverage(self) -> SequenceRange:
        ranges = [s.coverage for s in self.superseded]
        return SequenceRange(min(r.first for r in ranges), max(r.last for r in ranges))

    @property
    def name(self) -> str:
        return f"{self.coverage.last:020d}-{self.coverage.first:020d}-{digest_of(self.to_json())}.json"

    def problem(self) -> str:
        """Return a description of the rule that it breaks; empty if it keeps them all."""
        for lower in self.superseded:
            above = [u for u in self.superseding if may_supersede(u, lower)]
            if len(above) < len(self.superseding):
                return f"{lower.name} is not below all segments that are to supersede it"
            if holes((u.coverage for u in above), lower.coverage):
                return f"{lower.name} is not contained in the segments that are to supersede it"
        return ""

    def to_json(self) -> bytes:
        document = {
            "format_version": FORMAT_VERSION,
            "superseded": [_segment_to_json(s) for s in self.superseded],
            "superseding": [_segment_to_json(s) for s in self.superseding],
        }
        return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes, layout: Layout, chain: Chain) -> Tombstone:
        """Parse `raw`. Raises ValueError, naming the fault, unless it is a valid tombstone of `chain`."""
        document = json.loads(raw)
        fields = document.keys() if isinstance(document, dict) else set()
        version = document["format_version"] if "format_version" in fields else FORMAT_VERSION
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version: expected {FORMAT_VERSION}, found {version!r:.40}")
        if not fields >= _FIELDS:  # further fields are from a newer version
            raise ValueError(f"expected an object of {sorted(_FIELDS)}, found {raw[:60]!r}")
        tombstone = cls(_refs(document["superseded"], layout, chain), _refs(document["superseding"], layout, chain))
        if problem := tombstone.problem():
            raise ValueError(problem)
        return tombstone


_FIELDS = {"format_version", "superseded", "superseding"}


@dataclass(frozen=True, slots=True)
class TombstoneMatch:
    """The listed segments that a tombstone names; 8 bytes for each segment, by its place in the listing. `written_at`:
    seconds since 1970 UTC by the store's clock.

    `superseded`: those of them that are listed; `changed`: among these, those with another length than the tombstone
    states. `superseding`: None if one is not listed with the length that the tombstone states.
    """

    key: str
    written_at: float
    superseded: array[int]
    changed: frozenset[int]
    superseding: array[int] | None


class TombstoneIndex:
    """Index of one chain's tombstones over its listed `segments`. Pure; `add` all of them before any query.

    `problems`: with objects among the tombstones.
    """

    def __init__(self, listed: SegmentTable) -> None:
        self.segments = listed
        self.problems: list[Failure] = []
        self._is_superseded = bytearray(len(listed))  # superseded by any tombstone: none of these may supersede another
        self._matches: list[TombstoneMatch] = []

    def add(self, stone: Tombstone, key: str, written_at: float) -> None:
        superseded, changed = array("q"), set()
        for segment in stone.superseded:
            if (place := self.segments.index_of(segment)) is not None:
                superseded.append(place)
                self._is_superseded[place] = 1
                if self.segments.size_at(place) != segment.size:
                    changed.add(place)
        superseding = self._places(stone.superseding)
        self._matches.append(TombstoneMatch(key, written_at, superseded, frozenset(changed), superseding))

    def _places(self, segments: Iterable[SegmentRef]) -> array[int] | None:
        found = array("q")
        for segment in segments:
            place = self.segments.index_of(segment)
            if place is None or self.segments.size_at(place) != segment.size:
                return None
            found.append(place)
        return found

    def valid_matches(self) -> list[TombstoneMatch]:
        """Return those with superseding segments all listed, with the same length, and themselves not superseded."""
        return [
            stone
            for stone in self._matches
            if stone.superseding is not None and not any(self._is_superseded[each] for each in stone.superseding)
        ]

    def superseded_mask(self) -> bytearray:
        """Return 1 at the place of each segment that a valid tombstone supersedes, 0 at all others."""
        found = bytearray(len(self.segments))
        for stone in self.valid_matches():
            for place in stone.superseded:
                found[place] = 1
        return found

    def deletable(self, now: float, grace: float) -> Iterator[Tombstone]:
        """Yield the segments that may be deleted, by tombstone, as listed; the caller still checks those that stay.

        `now`: by the store's clock; `grace`: seconds since a tombstone was written. A segment that reaches the chain's
        greatest end stays, and so does one with another length than the tombstone states.
        """
        greatest = self.segments.end
        for stone in self.valid_matches():
            # Without a grace the clock is not used: a store may round the times of objects.
            if grace and now - stone.written_at < grace:
                continue
            same = (place for place in stone.superseded if place not in stone.changed)
            may_go = tuple(self.segments[each] for each in same if self.segments.end_at(each) < greatest)
            if may_go:
                yield Tombstone(may_go, tuple(self.segments[place] for place in stone.superseding or ()))

    def finished_keys(self) -> list[str]:
        return [stone.key for stone in self._matches if not stone.superseded]


class TombstoneStore:
    """The tombstones of a store."""

    def __init__(self, objects: ObjectStore, layout: Layout) -> None:
        self._objects, self._layout = objects, layout

    def names(self, chain: Chain) -> list[ObjectInfo]:
        return self._objects.list(self._layout.tombstones_prefix(chain))

    def read(self, chain: Chain, key: str) -> Tombstone | None:
        """Return the tombstone; None if it was deleted meanwhile. Raises DataError (E-STATE-JSON) if it is invalid."""
        return self._document(chain, key).read()

    def put(self, supersession: Supersession) -> str:
        """Write it, read it back, and return its key; an equal one that exists already keeps its age.

        Raises DataError if `supersession` breaks a rule, and Unavailable if it does not read back.
        """
        tombstone = Tombstone.of(supersession)
        if problem := tombstone.problem():
            raise DataError(problem, code="E-TOMBSTONE")
        document = self._document(tombstone.chain, self._layout.tombstones_prefix(tombstone.chain) + tombstone.name)
        if not document.holds(tombstone):
            document.put(tombstone)
        return document.key

    def _document(self, chain: Chain, key: str) -> Document[Tombstone]:
        def decode(raw: bytes) -> Tombstone:
            if not (match := _NAME.fullmatch(key.rpartition("/")[2])):
                raise ValueError("foreign name")
            if digest_of(raw) != match["digest"]:
                raise ValueError(f"expected content with SHA-256 {match['digest']}…")
            return Tombstone.from_json(raw, self._layout, chain)

        limit = TOMBSTONE_MAX_BYTES
        return Document(self._objects, key, Tombstone.to_json, decode, max_bytes=limit, hint=FORGED_HINT)

    def now(self) -> float:
        """Return the seconds since 1970 UTC by the store's clock, taken from an object that is written for it."""
        return read_store_clock(self._objects, self._layout.clock())


def _without_times(segments: Iterable[SegmentRef]) -> tuple[SegmentRef, ...]:
    return tuple(s._replace(modified=0.0) for s in sorted(segments, key=lambda s: (s.level, s.name)))


def _segment_to_json(segment: SegmentRef) -> dict[str, Any]:
    return {"level": segment.level, "name": segment.name, "size": segment.size}


def _refs(entries: Any, layout: Layout, chain: Chain) -> tuple[SegmentRef, ...]:
    if not isinstance(entries, list) or not entries:
        raise ValueError("expected a list of segments that is not empty")
    found = []
    for entry in entries:
        level, name, size = (entry.get(n) if isinstance(entry, dict) else None for n in ("level", "name", "size"))
        if type(level) is not int or type(name) is not str or type(size) is not int:
            raise ValueError(f"expected level, name and size of a segment, found {entry!r:.60}")
        key = layout.segments_prefix(chain, level) + name
        if (segment := layout.parse_segment(key)) is None:
            raise ValueError(f"expected the name of a segment, found {name!r:.80}")
        found.append(SegmentRef(segment, key, size, 0.0))
    return tuple(found)


KEPT_SNAPSHOTS = 3


def outdated_snapshots(refs: Sequence[SnapshotRef], now: float, grace: float) -> list[SnapshotRef]:
    """Return the snapshots of one chain that may be deleted, the oldest position first. The newest `KEPT_SNAPSHOTS`
    stay.

    `now`: seconds since 1970 by the store's clock. `grace`: seconds.
    """
    last_stored = max((ref.modified for ref in refs), default=0.0)
    behind = sorted(refs, key=newest_first)[KEPT_SNAPSHOTS:]
    return [ref for ref in reversed(behind) if ref.modified < min(last_stored, now - grace)]
