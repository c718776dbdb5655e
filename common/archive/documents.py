"""The small JSON documents beside the segments: definition, beginning and end of each chain, and more.

    stream.json   one for each incarnation: the stream as it was found, the end of the incarnation before, and
                  the beginning of each partition
    chain.json    one for each chain: filters, number of partitions, first sequence, relay or not
    floor.json    the first sequence that retention has left
    tails/…       the end of a chain's coverage; a hint that a listing is worthwhile
    gaps/…        accepted gaps: sequences that are skipped
    alive/…       the heartbeat of each egress process, every 30 seconds (`common.archive.heartbeats`)
    ingress/…     the positions of each target
    tombstones/runs/…   the result of the last compaction run

Every program that can write to the bucket can write these objects. So the size of a read is limited, every field is
checked, and an invalid document is never acted on (DataError, code E-STATE-JSON).
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from common.archive.heartbeats import HeartbeatObject, drop_outdated
from common.archive.keys import Layout, StateName
from common.chain import MAX_INCARNATION, MAX_PARTITIONS_PER_FEED, Chain
from common.clock import NS_PER_S, format_time, parse_time
from common.documents import JsonCodec
from common.errors import DataError, OutcomeUnknown, Refused, Unavailable
from common.exits import floe_command
from common.failpoints import failpoint
from common.logs import get_logger
from common.objects.port import ConditionalPutRefused, ObjectInfo, ObjectStore
from common.sequences import MAX_SEQUENCE, SequenceRange

log = get_logger(__name__)


class _Versioned(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="format_version", tag=1):
    """Base of the documents with format version 1."""


class _ChainStartWire(msgspec.Struct, frozen=True, omit_defaults=True):
    filters: tuple[str, ...]
    first: int
    relay: bool = False


class _StreamWire(_Versioned, frozen=True):
    config: dict[str, Any]
    created: str
    previous: dict[int, int] | None
    chains: tuple[_ChainStartWire, ...] = ()
    continues: bool = False
    continues_from: dict[int, int] | None = None
    continued: int | None = None
    stream_first: int | None = None


class _FloorWire(_Versioned, frozen=True):
    first: int


class _TailWire(_Versioned, frozen=True):
    end: int


class ChainDocument(_Versioned, frozen=True):
    """The definition of a chain. `filters`: its filter subjects, none for the whole stream. `partitions`: of its feed.

    `first`: the sequence at which the chain begins. `relay`: the stream is itself a target of Floe, so its
    `Floe-*` headers are trusted. Raises ValueError if a number is outside its range.
    """

    filters: tuple[str, ...]
    partitions: int
    first: int
    relay: bool = False

    def __post_init__(self) -> None:
        _expect("partitions", self.partitions, 1, MAX_PARTITIONS_PER_FEED)
        _expect("first", self.first, 1, MAX_SEQUENCE)

    def to_json(self) -> bytes:
        return _CHAIN_CODEC.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> ChainDocument:
        """Parse `chain.json`. Raises ValueError."""
        return _CHAIN_CODEC.decode(raw)


@dataclass(frozen=True, slots=True)
class StreamDocument:
    """One incarnation of a stream. `config`, `created`: as in STREAM.INFO when it was first seen.

    `previous`: for each partition of the incarnation before, the last sequence it covered (0: none); None
    if there is no incarnation before. `chains`: the content of each partition's `chain.json`, by its number, so
    that all hosts begin alike, in any order; empty in the oldest documents. `continues`: the history is that of the
    incarnation before, only divided into other partitions.

    `continues_from`: for each partition, the sequence below which egress found the stream equal to an earlier
    incarnation, None if nothing was compared; `continued`: that incarnation, None for the one before.
    `stream_first`: the first sequence of the stream at the time of writing, None if it was not recorded.

    Raises ValueError if a number is outside its range.
    """

    config: Mapping[str, Any]
    created: str
    previous: Mapping[int, int] | None = None
    chains: tuple[ChainDocument, ...] = ()
    continues: bool = False
    continues_from: Mapping[int, int] | None = None
    continued: int | None = None
    stream_first: int | None = None

    def __post_init__(self) -> None:
        for partition, end in (self.previous or {}).items():
            _expect("previous: partition", partition, 0, MAX_PARTITIONS_PER_FEED - 1)
            _expect("previous: end", end, 0, MAX_SEQUENCE)
        for partition, first in (self.continues_from or {}).items():
            _expect("continues_from: partition", partition, 0, MAX_PARTITIONS_PER_FEED - 1)
            _expect("continues_from: sequence", first, 1, MAX_SEQUENCE)
        _expect("continued", self.continued or 0, 0, MAX_INCARNATION)
        _expect("stream_first", 1 if self.stream_first is None else self.stream_first, 1, MAX_SEQUENCE)
        for chain in self.chains:
            _expect("chains: partitions", chain.partitions, len(self.chains), len(self.chains))

    def to_json(self) -> bytes:
        previous, joins = (None if each is None else dict(each) for each in (self.previous, self.continues_from))
        chains = tuple(_ChainStartWire(each.filters, each.first, each.relay) for each in self.chains)
        more = self.continues, joins, self.continued, self.stream_first
        return _STREAM_CODEC.encode(_StreamWire(dict(self.config), self.created, previous, chains, *more))

    @classmethod
    def from_json(cls, raw: bytes) -> StreamDocument:
        """Parse `stream.json`. Raises ValueError."""
        wire = _STREAM_CODEC.decode(raw)
        count = len(wire.chains)
        chains = tuple(ChainDocument(each.filters, count, each.first, each.relay) for each in wire.chains)
        more = wire.continues, wire.continues_from, wire.continued, wire.stream_first
        return cls(wire.config, wire.created, wire.previous, chains, *more)

    @property
    def join_sequences(self) -> Mapping[int, int]:
        """The sequence below which an earlier incarnation has the messages, by partition; empty if none has them."""
        if self.continues:
            return {number: chain.first for number, chain in enumerate(self.chains)}
        return self.continues_from or {}


def floor_to_json(first: int) -> bytes:
    """Encode `floor.json`. Raises ValueError."""
    return _FLOOR_CODEC.encode(_FloorWire(_expect("first", first, 1, MAX_SEQUENCE)))


def floor_from_json(raw: bytes) -> int:
    """Parse `floor.json`. Raises ValueError."""
    return _expect("first", _FLOOR_CODEC.decode(raw).first, 1, MAX_SEQUENCE)


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor of a chain: retention left the sequences from `first` on. `raised_at`: the time of its last rise, in
    seconds since 1970 by the store's clock; 0.0 if unknown.
    """

    first: int
    raised_at: float

    def __str__(self) -> str:
        return f"retention deleted the sequences before {self.first} at {format_time(int(self.raised_at) * NS_PER_S)}"


def tail_to_json(end: int) -> bytes:
    """Encode a tail. `end` 0: nothing is covered. Raises ValueError."""
    return _TAIL_CODEC.encode(_TailWire(_expect("end", end, 0, MAX_SEQUENCE)))


def tail_from_json(raw: bytes) -> int:
    """Parse a tail. Raises ValueError."""
    return _expect("end", _TAIL_CODEC.decode(raw).end, 0, MAX_SEQUENCE)


def _expect(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, found {value}")
    return value


HOLE_HINT = (
    "the source may still hold them: egress at the site checks within six hours, and immediately after a "
    "restart; otherwise put the segment back"
)
MAX_TEXT_CHARS = 1000  # characters of a note and of a name


class _GapWire(_Versioned, frozen=True):
    first: int
    last: int
    by: str
    at: str
    note: str = ""
    from_hole: bool = False


@dataclass(frozen=True, slots=True)
class AcceptedGap:
    """An accepted gap: the sequences `range` are no longer required. `decided_by`: the person that decided, or
    `ingress`; `decided_at`: the time, RFC 3339 by the clock of that host; empty: not known; `note`: the reason, or
    empty. `from_hole`: segments cover the range, but lack some of the messages that were lost there.

    Raises ValueError for texts that are too long, and for an invalid `decided_at`.
    """

    range: SequenceRange
    note: str = ""
    decided_by: str = ""
    decided_at: str = ""
    from_hole: bool = False

    def __post_init__(self) -> None:
        for name, text in (("note", self.note), ("by", self.decided_by), ("at", self.decided_at)):
            if len(text) > MAX_TEXT_CHARS:
                raise ValueError(f"{name}: expected at most {MAX_TEXT_CHARS} characters, found {len(text)}")
        if self.decided_at:
            parse_time(self.decided_at)

    def to_json(self) -> bytes:
        decided = self.decided_by, self.decided_at
        return _GAP_CODEC.encode(_GapWire(self.range.first, self.range.last, *decided, self.note, self.from_hole))

    @classmethod
    def from_json(cls, raw: bytes) -> AcceptedGap:
        """Parse an accepted gap. Raises ValueError."""
        wire = _GAP_CODEC.decode(raw)
        return cls(SequenceRange(wire.first, wire.last), wire.note, wire.by, wire.at, wire.from_hole)


def chain_arguments(chain: Chain) -> str:
    """Return the argument that names a chain in full: without an incarnation it would mean the newest."""
    return shlex.quote(str(chain))


def accept_command(chain: Chain, hole: SequenceRange) -> str:
    return floe_command("gap accept", chain_arguments(chain), f"--first {hole.first} --last {hole.last}")


def hole_remedies(chain: Chain, hole: SequenceRange) -> str:
    """Return the remedies for a hole, the cheapest first: accepting the gap comes last."""
    return f"{HOLE_HINT}; only if no copy is left, accept them as a gap for all targets:\n{accept_command(chain, hole)}"


def filled_hole_remedies(chain: Chain, rows: SequenceRange) -> str:
    return (
        "put the lost segment back; only if no copy is left, accept the missing sequences as a gap for all "
        f"targets (the archived rows are delivered):\n{accept_command(chain, rows)}"
    )


def late_rows_remedies(chain: Chain, rows: SequenceRange) -> str:
    bounds = f"--from-sequence {rows.first} --to-sequence {rows.last}"
    target = shlex.quote(f"{chain.feed}_LATE")
    replay = floe_command("replay", chain_arguments(chain), bounds, f"--target {target} --subject-prefix late --create")
    return (
        "deliver them to a target that lacks them by `floe checkpoint set`, which reports how many "
        f"messages the target then holds twice; or replay them into another stream:\n{replay}"
    )


def accepted_part(hole: SequenceRange, gaps: Iterable[SequenceRange]) -> SequenceRange | None:
    """Return the first part of `hole` that `gaps` account for without a break; None if they lack its first sequence."""
    reach = hole.first - 1
    for gap in sorted(gaps):
        if gap.first > reach + 1:
            break
        reach = max(reach, gap.last)
    return SequenceRange(hole.first, min(reach, hole.last)) if reach >= hole.first else None


_SAMPLING = "sampling"


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A snapshot in the store.

    `size`: stored bytes. `modified`: seconds since 1970 UTC by the *store's* clock, 0.0 if it was put and
    not listed.
    """

    state: StateName
    key: str
    size: int
    modified: float

    @property
    def chain(self) -> Chain:
        return self.state.chain

    @property
    def position(self) -> int:
        """The first sequence that the snapshot does not include."""
        return self.state.position

    def log_context(self) -> dict[str, object]:
        return {**self.chain.log_context(), "snapshot": self.key.rpartition("/")[2]}


def newest_first(ref: SnapshotRef) -> tuple[int, float, str]:
    """Sort key: the greatest position first; of one position, the one that was stored last."""
    return -ref.position, -ref.modified, ref.key


def list_snapshots(objects: ObjectStore, layout: Layout, chain: Chain) -> list[SnapshotRef]:
    """List the snapshots of a chain, newest first. Foreign keys are skipped. Raises the errors of the store."""
    found = []
    for info in objects.list(layout.states_prefix(chain)):
        if (name := layout.parse_state(info.key)) is None:
            log.debug("foreign key skipped", action="foreign_key_skipped", key=info.key)
        else:
            found.append(SnapshotRef(name, info.key, info.size, info.modified))
    return sorted(found, key=newest_first)


def snapshot_metadata(sampling_digest: str, sha256: str) -> dict[str, str]:
    """Return the object metadata of a snapshot, readable without opening it. Only a hint: its content counts."""
    return {"format": "1", _SAMPLING: sampling_digest, "sha256": sha256}


def sampling_digest_of(metadata: Mapping[str, str]) -> str:
    """Return the digest of the settings with which the snapshot was made; empty if the metadata lack it."""
    return metadata.get(_SAMPLING, "")


MAX_POSITIONS_BYTES = 8 * 1024 * 1024  # about 100,000 chains


class _PositionsWire(_Versioned, frozen=True):
    target: str
    time: float
    positions: dict[str, int]
    sources: tuple[str, ...] = ()
    released: bool = False
    stopped: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class TargetPositions:
    """The positions of one target, written at `time` (seconds since 1970 by the clock of ingress).

    `positions`: by chain, the first sequence that the target does not hold yet. `sources`: the `site/feed` that may
    flow in; a chain of them without a position has not begun, and needs everything. `released`: an operator released
    the target; it needs nothing any more. `stopped`: the reasons why chains have stopped, with the remedies; each text
    is cut at MAX_TEXT_CHARS characters.
    """

    target: str
    time: float
    positions: Mapping[Chain, int] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    released: bool = False
    stopped: Mapping[Chain, str] = field(default_factory=dict)

    def needed_from(self, chain: Chain, first: int, sources: Collection[str] = ()) -> int | None:
        """Return the first sequence that it needs of `chain`, which begins at `first`; None if it needs nothing of it.

        `sources`: the `site/feed` that its configuration lets flow in; this document may be older.
        """
        if self.released:
            return None
        is_listed = f"{chain.site}/{chain.feed}" in {*self.sources, *sources}
        return self.positions.get(chain, first if is_listed else None)

    def to_json(self) -> bytes:
        positions = {str(chain): at for chain, at in self.positions.items()}
        stopped = {str(chain): reason[:MAX_TEXT_CHARS] for chain, reason in self.stopped.items()}
        return _POSITIONS_CODEC.encode(
            _PositionsWire(self.target, self.time, positions, self.sources, self.released, stopped)
        )

    @classmethod
    def from_json(cls, raw: bytes) -> TargetPositions:
        """Parse a document of this version, or of a later one that added fields. Raises ValueError."""
        wire = _POSITIONS_CODEC.decode(raw)
        for chain, at in wire.positions.items():
            if not 0 <= at <= MAX_SEQUENCE + 1:
                raise ValueError(f"{chain}: expected a position from 0 to {MAX_SEQUENCE + 1}, found {at}")
        positions = {Chain.parse(chain): at for chain, at in wire.positions.items()}
        stopped = {Chain.parse(chain): reason[:MAX_TEXT_CHARS] for chain, reason in wire.stopped.items()}
        return cls(wire.target, wire.time, positions, wire.sources, wire.released, stopped)


_MAX_UNIX_S = 253_402_300_799  # since 1970: the year 9999


class CompactionRun(_Versioned, frozen=True):
    """The result of a compaction run: exit code `code`, at `ended` by the clock of its host (seconds since 1970).

    `seconds`: its duration. `succeeded`: the time at which a run of the same chains last ended with 0, None if none
    has. Raises ValueError if a number is outside its range.
    """

    ended: float
    seconds: float
    code: int
    succeeded: float | None = None

    def __post_init__(self) -> None:
        _expect("code", self.code, 0, 255)
        for name, value in (("ended", self.ended), ("seconds", self.seconds), ("succeeded", self.succeeded or 0)):
            _expect(name, int(value), 0, _MAX_UNIX_S)

    def to_json(self) -> bytes:
        return _RUN_CODEC.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> CompactionRun:
        """Parse a run. Raises ValueError."""
        return _RUN_CODEC.decode(raw)


#: By site and feed, None for all of them.
CompactionRuns = Mapping[tuple[str | None, str | None], CompactionRun]


def run_of(runs: CompactionRuns, chain: Chain) -> CompactionRun | None:
    """Return the last of `runs` that included `chain`, with the newest success of all that did; None if none did."""
    names = ((None, None), (chain.site, None), (chain.site, chain.feed))
    found = [run for name in names if (run := runs.get(name)) is not None]
    if not found:
        return None
    succeeded = max((run.succeeded for run in found if run.succeeded is not None), default=None)
    return msgspec.structs.replace(max(found, key=lambda run: run.ended), succeeded=succeeded)


_RUN_CODEC = JsonCodec(CompactionRun)
_CHAIN_CODEC, _STREAM_CODEC = JsonCodec(ChainDocument), JsonCodec(_StreamWire)
_FLOOR_CODEC, _TAIL_CODEC = JsonCodec(_FloorWire), JsonCodec(_TailWire)
_GAP_CODEC, _POSITIONS_CODEC = JsonCodec(_GapWire), JsonCodec(_PositionsWire)

MAX_DOCUMENT_BYTES = 1024 * 1024
_PAGE_KEYS = 1000  # keys of one listing
_CAS_ATTEMPTS = 5  # attempts at compare-and-set, each lost to another writer

D = TypeVar("D")


class PutOnceClaims(Protocol):
    """Arbiter between writers of one document, for stores that refuse conditions. Blocking; not for the event loop."""

    def claim(self, key: str, body: bytes) -> tuple[bytes, int]:
        """Claim `key`. Return the bytes that were claimed first, `body` if none were, and the claim's revision.

        Raises Unavailable, OutcomeUnknown.
        """

    def settle(self, key: str, revision: int) -> None:
        """Remove the claim: its document is there. If this fails, the claim stays, which is harmless."""


class ChainStore:
    """The documents under one layout. Blocking; safe to use from several threads.

    `claims`: needed for a `create_…` and `put_once` if the store refuses conditions; they raise ConditionalPutRefused
    without.

    A `read_…` method returns None if there is no such document; a `create_…` method writes the document unless there
    is one, and returns the one that is there afterwards. Every method raises the errors of the object store, and
    DataError (E-STATE-JSON) for an invalid document.
    """

    def __init__(self, objects: ObjectStore, layout: Layout, claims: PutOnceClaims | None = None) -> None:
        self.objects, self.layout, self.claims = objects, layout, claims
        self._reported_invalid: dict[str, str] = {}  # the key and error of invalid gaps, heartbeats and runs

    def create_stream(self, chain: Chain, document: StreamDocument) -> StreamDocument:
        return self._create(self.layout.stream_document(chain), document.to_json(), StreamDocument.from_json)

    def read_stream(self, chain: Chain) -> StreamDocument | None:
        return self._read(self.layout.stream_document(chain), StreamDocument.from_json)

    def has_next_incarnation(self, chain: Chain) -> bool:
        """True if the next incarnation exists: nothing is put into this one any more. One HEAD request."""
        return self.next_incarnation_start(chain) is not None

    def next_incarnation_start(self, chain: Chain) -> float | None:
        """Return the start of the next incarnation, seconds since 1970 by the store's clock; None if there is none."""
        if chain.incarnation == MAX_INCARNATION:
            return None
        info = self.objects.head(self.layout.stream_document(chain.next_incarnation()))
        return info.modified if info else None

    def read_end(self, chain: Chain) -> int | None:
        """Return the end of the chain if its incarnation has ended (0: nothing was covered); None while it has not."""
        following = None if chain.incarnation == MAX_INCARNATION else self.read_stream(chain.next_incarnation())
        previous = None if following is None else following.previous
        return None if previous is None else previous.get(chain.partition, 0)

    def create_chain(self, chain: Chain, document: ChainDocument) -> ChainDocument:
        return self._create(self.layout.chain_document(chain), document.to_json(), ChainDocument.from_json)

    def read_chain(self, chain: Chain) -> ChainDocument | None:
        return self._read(self.layout.chain_document(chain), ChainDocument.from_json)

    def read_floor(self, chain: Chain) -> int | None:
        """Return the first sequence that retention left; None if there is no floor."""
        return self._read(self.layout.floor_document(chain), floor_from_json)

    def floor(self, chain: Chain) -> Floor | None:
        """Return the floor with its time; None as for `read_floor`."""
        if (first := self.read_floor(chain)) is None:
            return None
        info = self.objects.head(self.layout.floor_document(chain))
        return Floor(first, info.modified if info else 0.0)

    def raise_floor(self, chain: Chain, first: int) -> None:
        """Raise the floor to `first` unless it is that high already: it never falls. Raises also Unavailable."""
        key, body = self.layout.floor_document(chain), floor_to_json(first)
        for _ in range(_CAS_ATTEMPTS):
            # Read the ETag before the content: a change between the two makes the write fail, not the check.
            info = self.objects.head(key)
            if (self.read_floor(chain) or 0) >= first:
                return
            self._replace(key, body, info.etag if info else None)
        if (self.read_floor(chain) or 0) < first:
            raise Unavailable(
                f"floor of {chain}: lost to other writers {_CAS_ATTEMPTS} times", code="E-STORE-CONTENDED"
            )

    def write_tail(self, chain: Chain, end: int) -> None:
        self.objects.put(self.layout.tail(chain), tail_to_json(end))

    def read_tail(self, chain: Chain) -> int | None:
        """Return the end of coverage at the time the tail was written; None if there is none, or it is invalid.

        It is only a hint: an invalid tail is written again, and stops nothing.
        """
        try:
            return self._read(self.layout.tail(chain), tail_from_json)
        except DataError as error:
            log.warning("tail ignored", action="tail_ignored", error=str(error), **chain.log_context())
            return None

    def tail_etags(self) -> dict[Chain, str]:
        """Return the ETag of every tail, from one listing: a tail that changed since the last call has a new one."""
        return {chain: info.etag for chain, info in self.list_tails().items()}

    def list_tails(self, site: str | None = None) -> dict[Chain, ObjectInfo]:
        """Return the tails of a site, or of all, from one listing; `modified` is the time of the last archiving."""
        listing = self.objects.list(self.layout.tails_prefix(site))
        found = ((self.layout.parse_tail(info.key), info) for info in listing)
        return {chain: info for chain, info in found if chain is not None}

    # Heartbeats

    def write_heartbeat(self, process: str, heartbeat: HeartbeatObject) -> None:
        self.objects.put(self.layout.heartbeat(heartbeat.site, process), heartbeat.to_json())

    def list_heartbeats(self, site: str | None = None) -> list[ObjectInfo]:
        """Return the heartbeat objects of a site, or of all, without those that are too old (`drop_outdated`)."""
        listing = self.objects.list(self.layout.heartbeats_prefix(site))
        parsed = ((self.layout.parse_heartbeat(info.key), info) for info in listing)
        return drop_outdated((name[0], info) for name, info in parsed if name is not None)

    def read_heartbeat(self, key: str) -> HeartbeatObject | None:
        """Read a heartbeat; None if there is none at `key`, or it is invalid: it stops nothing."""
        name = self.layout.parse_heartbeat(key)
        try:
            heartbeat = self._read(key, HeartbeatObject.from_json)
            if heartbeat is not None and (name is None or heartbeat.site != name[0]):
                raise _unreadable(key, f"expected the site of its key, found {heartbeat.site!r:.80}")
        except DataError as error:
            self._warn_once(key, str(error), "heartbeat")
            return None
        self._reported_invalid.pop(key, None)
        return heartbeat

    # Targets

    def write_positions(self, positions: TargetPositions) -> None:
        self.objects.put(self.layout.ingress_positions(positions.target), positions.to_json())

    def read_positions(self, target: str) -> TargetPositions | None:
        key = self.layout.ingress_positions(target)
        found = self._read(key, TargetPositions.from_json, MAX_POSITIONS_BYTES)
        if found is not None and found.target != target:
            raise _unreadable(key, f"expected target {target}, found {found.target!r:.80}")
        return found

    def targets_with_positions(self) -> list[str]:
        """Return the targets that have a positions document, released ones too."""
        listing = self.objects.list(self.layout.ingress_targets_prefix())
        return [t for info in listing if (t := self.layout.parse_ingress_positions(info.key)) is not None]

    # Runs of compaction

    def write_run(self, site: str | None, feed: str | None, run: CompactionRun) -> None:
        self.objects.put(self.layout.run(site, feed), run.to_json())

    def read_run(self, site: str | None, feed: str | None) -> CompactionRun | None:
        """Read a run; None if there is none, or it is invalid: it stops nothing."""
        key = self.layout.run(site, feed)
        try:
            run = self._read(key, CompactionRun.from_json)
        except DataError as error:
            self._warn_once(key, str(error), "compaction run")
            return None
        self._reported_invalid.pop(key, None)
        return run

    def runs(self) -> CompactionRuns:
        """Return the last run of each selection; none if access is refused."""
        try:
            names = [self.layout.parse_run(info.key) for info in self.objects.list(self.layout.runs_prefix())]
            return {name: run for name in names if name is not None and (run := self.read_run(*name)) is not None}
        except Refused:
            return {}

    def chains(self, site: str | None = None, feed: str | None = None, incarnation: int | None = None) -> list[Chain]:
        """Return the chains that have a `chain.json`, ascending; None means all."""
        found, after, prefix = list[Chain](), "", self.layout.documents_prefix(site, feed, incarnation)
        while True:
            page = self.objects.list(prefix, start_after=after, limit=_PAGE_KEYS)
            parsed = (self.layout.parse_chain_document(info.key) for info in page)
            found += (chain for chain in parsed if chain is not None and feed in (None, chain.feed))
            if len(page) < _PAGE_KEYS:
                return sorted(found)
            after = self.layout.skip_captures(page[-1].key)

    def partitions(self, chain: Chain) -> set[Chain]:
        """Return the partitions of the chain's incarnation that have any segment. The listing skips most segments."""
        found, after = set[Chain](), ""
        while page := self.objects.list(self.layout.incarnation_prefix(chain), start_after=after, limit=_PAGE_KEYS):
            chains = [self.layout.chain_of_key(info.key) for info in page]
            found.update(chain for chain in chains if chain is not None)
            last = chains[-1]
            # "0" sorts right after the slash: the next page begins with the next partition.
            after = page[-1].key if last is None else self.layout.partition_prefix(last).removesuffix("/") + "0"
        return found

    # Accepted gaps

    def gaps(self, chain: Chain, *, position: int = 1) -> list[AcceptedGap]:
        """Return the accepted gaps that reach `position`, by their end; invalid ones are skipped."""
        return self._gaps(self.layout.gaps_prefix(chain), position)

    def accept_gap(self, chain: Chain, gap: AcceptedGap) -> AcceptedGap:
        """Write an accepted gap unless its range is accepted already. Return the stored one, read back."""
        prefix = self.layout.gaps_prefix(chain)
        try:
            return self._create_gap(prefix, gap)
        except ConditionalPutRefused:  # another writer accepts the same range, which is the key: only the notes differ
            self.objects.put(self.layout.gap(prefix, gap.range), gap.to_json())
            return self._create_gap(prefix, gap)

    def skipped_gaps(self, target: str, chain: Chain, *, position: int = 1) -> list[AcceptedGap]:
        return self._gaps(self.layout.skipped_prefix(target, chain), position)

    def record_skipped_gap(self, target: str, chain: Chain, gap: AcceptedGap) -> AcceptedGap:
        return self._create_gap(self.layout.skipped_prefix(target, chain), gap)

    def _gaps(self, prefix: str, position: int) -> list[AcceptedGap]:
        listing = self.objects.list(prefix, start_after=self.layout.gaps_after(prefix, position))
        return [gap for info in listing if (gap := self._gap(prefix, info.key)) is not None]

    def _gap(self, prefix: str, key: str) -> AcceptedGap | None:
        expected = self.layout.parse_gap(prefix, key)
        try:
            gap = None if expected is None else self._read(key, AcceptedGap.from_json)
            if gap is not None and gap.range != expected:
                raise _unreadable(key, f"expected {expected}, found {gap.range}")
        except DataError as error:
            self._warn_once(key, str(error), "gap")
            return None
        self._reported_invalid.pop(key, None)
        return gap

    def _warn_once(self, key: str, reason: str, kind: str) -> None:
        """Log an invalid object once: a chain that waits has its gaps read again and again."""
        if self._reported_invalid.get(key) != reason:
            self._reported_invalid[key] = reason
            log.warning("document ignored", action="document_ignored", kind=kind, error=reason)

    def _create_gap(self, prefix: str, gap: AcceptedGap) -> AcceptedGap:
        return self._create(self.layout.gap(prefix, gap.range), gap.to_json(), AcceptedGap.from_json)

    def _create(self, key: str, body: bytes, parse: Callable[[bytes], D]) -> D:
        if len(body) > MAX_DOCUMENT_BYTES:
            raise DataError(f"{key}: expected at most {MAX_DOCUMENT_BYTES} bytes, found {len(body)}")
        # Check first, because some servers ignore the condition of the put.
        if self.objects.head(key) is None:
            self.put_once(key, body)
        if (document := self._read(key, parse)) is None:
            raise Unavailable(f"{key}: not found after it was put", code="E-READ-BACK")
        return document

    def put_once(self, key: str, body: bytes) -> None:
        """Write the object unless there is one. If another writer has claimed it, write the bytes of that claim. The
        caller reads the object to find its content.
        """
        try:
            self._replace(key, body, None)
        except ConditionalPutRefused:
            if self.claims is None:
                raise
            self._put_claimed(self.claims, key, body)

    def _put_claimed(self, claims: PutOnceClaims, key: str, body: bytes) -> None:
        claimed, revision = claims.claim(key, body)
        failpoint("documents.claimed")
        # Check after the claim: another writer may have settled its own before, or the bucket of claims was lost.
        if self.objects.head(key) is None:
            failpoint("documents.put_claimed")
            try:
                self.objects.put(key, claimed, sha256=hashlib.sha256(claimed).hexdigest())
            except OutcomeUnknown as error:
                log.warning("document unconfirmed", action="document_unconfirmed", key=key, error=str(error))
        if self.objects.head(key) is not None:
            failpoint("documents.settle")
            claims.settle(key, revision)

    def _replace(self, key: str, body: bytes, etag: str | None) -> None:
        """Write if the object still has `etag` (None: does not exist). The caller reads it to find the outcome."""
        try:
            if etag is None:
                self.objects.put_if_absent(key, body, sha256=hashlib.sha256(body).hexdigest())
            else:
                self.objects.put_if_match(key, body, etag)
        except OutcomeUnknown as error:
            log.warning("document unconfirmed", action="document_unconfirmed", key=key, error=str(error))

    def _read(self, key: str, parse: Callable[[bytes], D], most: int = MAX_DOCUMENT_BYTES) -> D | None:
        if (raw := self.objects.get(key, length=most + 1)) is None:
            return None
        if len(raw) > most:
            raise _unreadable(key, f"expected at most {most} bytes, found more")
        try:
            return parse(raw)
        except ValueError as error:
            raise _unreadable(key, str(error)) from error


def _unreadable(key: str, cause: str) -> DataError:
    return DataError(f"{key}: {cause}", hint="compare it with a good copy; it is not used", code="E-STATE-JSON")
