"""The small JSON documents beside the segments, and `Document`, which decides what an unanswered put of one means.

It is the one way in which they are put and read, and also decides about those that are too large or damaged.

    stream.json   one for each incarnation: the stream as it was found, the end of the incarnation before, and
                  the beginning of each partition
    chain.json    one for each chain: filters, number of partitions, first sequence, relay or not
    floor.json    the first sequence that retention has left
    tails/…       the end of a chain's coverage; a hint that a listing is worthwhile
    gaps/…        accepted gaps: sequences that are skipped
    alive/…       the heartbeat of each egress process, every 30 seconds (`common.archive.heartbeats`)
    ingress/…     the positions of each target, and the tails that it knows
    tombstones/runs/…   the result of the last compaction run

Every program that can write to the bucket can write these objects. So the size of a read is limited, every field is
checked, and an invalid document is never acted on (DataError, code E-STATE-JSON).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec

from common.archive.heartbeats import HeartbeatObject, drop_outdated
from common.archive.keys import Layout, StateName
from common.chain import MAX_INCARNATION, MAX_PARTITIONS_PER_FEED, Chain
from common.clock import NS_PER_S, format_time, parse_time
from common.documents import JsonCodec
from common.errors import DataError, FloeError, OutcomeUnknown, Refused, Unavailable
from common.exits import floe_command
from common.failpoints import failpoint
from common.logs import get_logger
from common.objects.port import ChecksumMismatch, ConditionalPutRefused, ObjectInfo, ObjectStore, sha256_of
from common.sequences import MAX_SEQUENCE, SequenceRange, holes
from common.subjects import name_matches

log = get_logger(__name__)


MAX_DOCUMENT_BYTES = 1024 * 1024
PUT_ATTEMPTS = 3  # attempts to put an object that is then read back

D = TypeVar("D")


class StoredValue(Protocol):
    """A value that knows its stored form. `from_json` raises ValueError."""

    def to_json(self) -> bytes: ...
    @classmethod
    def from_json(cls, raw: bytes) -> Self: ...


V = TypeVar("V", bound=StoredValue)


class PutOnceClaims(Protocol):
    """Arbiter between writers of one document, for stores that refuse conditions. Blocking; not for the event loop."""

    def claim(self, key: str, body: bytes) -> tuple[bytes, int]:
        """Claim `key`. Return the bytes that were claimed first, `body` if none were, and the claim's revision.

        Raises Unavailable, OutcomeUnknown.
        """

    def settle(self, key: str, revision: int) -> None:
        """Remove the claim: its document is there. If this fails, the claim stays, which is harmless."""


@dataclass(frozen=True, slots=True)
class Document(Generic[D]):
    """One small object that holds a value of type D. Its twin for the buckets of NATS is `common.nats.kv.KvDocument`.

    A put that is answered by nothing may have been done, and may still be under way. It is never repeated by guess: the
    object is read, and its bytes are the answer.

        create    the value that is there counts, of any writer; none: not done (Unavailable)
        update    done if the object holds these bytes; else another writer was first, or it was not done
        add       done if there is an object of this name; else as `put`
        put       done if the object holds these bytes; else it is put again, at most PUT_ATTEMPTS times (Unavailable)
        replace   unknown (OutcomeUnknown): for a value that is soon written again, and for which no read is worthwhile

    A value above `max_bytes` is not written, and not more than that is read. Bytes that are too large, damaged, of
    another version, or that have a problem according to `check` are never acted on: `read` and `create` raise DataError
    (E-STATE-JSON) with `hint`. Every method raises the errors of the object store. `claims`: for `create`, if the store
    refuses conditions; it raises ConditionalPutRefused without.
    """

    objects: ObjectStore
    key: str
    encode: Callable[[D], bytes]
    decode: Callable[[bytes], D]
    check: Callable[[D], str] = lambda _: ""
    max_bytes: int = MAX_DOCUMENT_BYTES
    hint: str = "put a good copy in its place; until then it is not used"
    claims: PutOnceClaims | None = None

    # Reading

    def head(self) -> ObjectInfo | None:
        """Return the properties of the object; None if there is none. Read them before the content for an `update`: a
        change between the two then makes the update fail, not the decision.
        """
        return self.objects.head(self.key)

    def read(self) -> D | None:
        if (raw := self.objects.get(self.key, length=self.max_bytes + 1)) is None:
            return None
        try:
            if len(raw) > self.max_bytes:
                raise ValueError(f"expected at most {self.max_bytes} bytes, found more")
            value = self.decode(raw)
            if problem := self.check(value):
                raise ValueError(problem)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.key}: {error}", hint=self.hint, code="E-STATE-JSON") from error
        return value

    def holds(self, value: D) -> bool:
        """True if the object has the very bytes of `value`."""
        body = self.encode(value)
        return self.objects.get(self.key, length=len(body) + 1) == body

    # Writing

    def create(self, value: D) -> D:
        """Put the value unless there is an object. Return the value that is there afterwards."""
        body = self._body(value)
        # Check first, because some servers ignore the condition of the put.
        if self.head() is None:
            try:
                self._send(self.objects.put_if_absent, body, sha256=sha256_of(body))
            except ConditionalPutRefused:
                if self.claims is None:
                    raise
                self._put_claimed(self.claims, body)
        if (found := self.read()) is None:
            raise Unavailable(f"{self.key}: not found after it was put", code="E-READ-BACK")
        return found

    def update(self, value: D, etag: str | None) -> bool:
        """Put the value if the object still has `etag` (None: if there is none). Return True if it is there now."""
        body, objects = self._body(value), self.objects
        if etag is None:
            self._send(objects.put_if_absent, body, sha256=sha256_of(body))
        else:
            self._send(objects.put_if_match, body, etag)
        return self.holds(value)

    def add(self, value: D) -> bool:
        """Put an object that has the same bytes from every writer, as its name holds their digest. Return False if it
        is there already. One request, if that is answered.
        """
        body = self._body(value)
        try:
            return self.objects.put_if_absent(self.key, body, sha256=sha256_of(body))
        except (ConditionalPutRefused, OutcomeUnknown):
            if self.head() is not None:
                return False
        self.put(value)
        return True

    def put(self, value: D, metadata: Mapping[str, str] | None = None) -> None:
        """Put the value over any other until the store returns it. Raises Unavailable if it never does."""
        body = self._body(value)
        for _ in range(PUT_ATTEMPTS):
            # A store that received other bytes kept none of them.
            self._send(self.objects.put, body, sha256=sha256_of(body), metadata=metadata, also=ChecksumMismatch)
            if self.holds(value):
                return
        message = f"{self.key}: put {PUT_ATTEMPTS} times and never read back as it was sent"
        raise Unavailable(message, code="E-READ-BACK")

    def replace(self, value: D) -> None:
        """Put the value over any other. Raises OutcomeUnknown if the answer is lost."""
        self.objects.put(self.key, self._body(value))

    def _body(self, value: D) -> bytes:
        if len(body := self.encode(value)) > self.max_bytes:
            message = f"{self.key}: expected at most {self.max_bytes} bytes, found {len(body)}"
            raise DataError(message, code="E-STATE-JSON")
        return body

    def _send(self, put: Callable[..., Any], *given: Any, also: type[FloeError] = OutcomeUnknown, **named: Any) -> None:
        """Call `put`. The caller reads the object to find the outcome, also if no answer comes, or the error `also`."""
        try:
            put(self.key, *given, **named)
        except (OutcomeUnknown, also) as error:
            log.warning("document unconfirmed", action="document_unconfirmed", key=self.key, error=str(error))

    def _put_claimed(self, claims: PutOnceClaims, body: bytes) -> None:
        """Put the bytes that were claimed first, by this writer or by another."""
        claimed, revision = claims.claim(self.key, body)
        failpoint("documents.claimed")
        # Check after the claim: another writer may have settled its own before, or the bucket of claims was lost.
        if self.head() is None:
            failpoint("documents.put_claimed")
            self._send(self.objects.put, claimed, sha256=sha256_of(claimed))
        if self.head() is not None:
            failpoint("documents.settle")
            claims.settle(self.key, revision)


def list_named(objects: ObjectStore, prefix: str, parse: Callable[[str], D | None]) -> Iterator[tuple[D, ObjectInfo]]:
    """List the objects under `prefix`, each with what `parse` makes of its key. Foreign keys are skipped."""
    for info in objects.list(prefix):
        if (name := parse(info.key)) is not None:
            yield name, info
        else:
            log.debug("foreign key skipped", action="foreign_key_skipped", key=info.key)


class _Versioned(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="format_version", tag=1):
    """Base of the documents with format version 1."""

    def to_json(self) -> bytes:
        return _CODECS[type(self)].encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Parse the stored form. Raises ValueError."""
        found: Self = _CODECS[cls].decode(raw)
        return found


class FloorDocument(_Versioned, frozen=True):
    """The floor of a chain: retention left the sequences from `first` on. Raises ValueError for another number."""

    first: int

    def __post_init__(self) -> None:
        expect_range("first", self.first, 1, MAX_SEQUENCE)


class TailDocument(_Versioned, frozen=True):
    """The end of the coverage of a chain; 0: nothing is covered. Raises ValueError for another number."""

    end: int

    def __post_init__(self) -> None:
        expect_range("end", self.end, 0, MAX_SEQUENCE)


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
        expect_range("partitions", self.partitions, 1, MAX_PARTITIONS_PER_FEED)
        expect_range("first", self.first, 1, MAX_SEQUENCE)


class ChainStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a `chain.json` in `stream.json`, without the number of partitions."""

    filters: tuple[str, ...]
    first: int
    relay: bool = False

    @classmethod
    def of(cls, layout: Iterable[ChainDocument]) -> tuple[ChainStart, ...]:
        """Return the starts of the partitions of a layout."""
        return tuple(cls(each.filters, each.first, each.relay) for each in layout)


class StreamDocument(_Versioned, frozen=True, rename={"starts": "chains"}):
    """One incarnation of a stream. `config`, `created`: as in STREAM.INFO when it was first seen.

    `previous`: for each partition of the incarnation before, the last sequence it covered (0: none); None
    if there is no incarnation before. `starts`: the content of each partition's `chain.json`, by its number, so
    that all hosts begin alike, in any order; empty in the oldest documents. `continues`: the history is that of the
    incarnation before, only divided into other partitions.

    `continues_from`: for each partition, the sequence below which egress found the stream equal to an earlier
    incarnation, None if nothing was compared; `continued`: that incarnation, None for the one before.
    `stream_first`: the first sequence of the stream at the time of writing, None if it was not recorded. `importing`:
    the SHA-256 of a backup while its import has not ended; its chain has no `chain.json` before.

    Raises ValueError if a number is outside its range.
    """

    config: dict[str, Any]
    created: str
    previous: dict[int, int] | None
    starts: tuple[ChainStart, ...] = ()
    continues: bool = False
    continues_from: dict[int, int] | None = None
    continued: int | None = None
    stream_first: int | None = None
    importing: str = ""

    def __post_init__(self) -> None:
        for partition, end in (self.previous or {}).items():
            expect_range("previous: partition", partition, 0, MAX_PARTITIONS_PER_FEED - 1)
            expect_range("previous: end", end, 0, MAX_SEQUENCE)
        for partition, first in (self.continues_from or {}).items():
            expect_range("continues_from: partition", partition, 0, MAX_PARTITIONS_PER_FEED - 1)
            expect_range("continues_from: sequence", first, 1, MAX_SEQUENCE)
        expect_range("continued", self.continued or 0, 0, MAX_INCARNATION)
        expect_range("stream_first", 1 if self.stream_first is None else self.stream_first, 1, MAX_SEQUENCE)
        for each in self.starts:
            expect_range("chains: first", each.first, 1, MAX_SEQUENCE)
        expect_range("chains", len(self.starts), 0, MAX_PARTITIONS_PER_FEED)

    @property
    def chains(self) -> tuple[ChainDocument, ...]:
        """The content of each partition's `chain.json`."""
        return tuple(ChainDocument(each.filters, len(self.starts), each.first, each.relay) for each in self.starts)

    @property
    def join_sequences(self) -> Mapping[int, int]:
        """The sequence below which an earlier incarnation has the messages, by partition; empty if none has them."""
        if self.continues:
            return {number: start.first for number, start in enumerate(self.starts)}
        return self.continues_from or {}


class Floor(msgspec.Struct, frozen=True):
    """The floor of a chain: retention left the sequences from `first` on. `raised_at`: the time of its last rise, in
    seconds since 1970 by the store's clock; 0.0 if unknown.
    """

    first: int
    raised_at: float

    def __str__(self) -> str:
        return f"retention deleted the sequences before {self.first} at {format_time(int(self.raised_at) * NS_PER_S)}"


def expect_range(name: str, value: int, least: int, most: int) -> None:
    """Raise ValueError unless the value is from `least` to `most`."""
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, found {value}")


HOLE_HINT = (
    "the source may still hold them: egress at the site checks at each start and every six hours; start it if it is "
    "down, or restart it to check now; otherwise put the segment back"
)
MAX_TEXT_CHARS = 1000  # characters of a note and of a name


class _GapWire(_Versioned, frozen=True):
    first: int
    last: int
    by: str
    at: str
    note: str = ""
    from_hole: bool = False


class AcceptedGap(msgspec.Struct, frozen=True):
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
        return _GapWire(self.range.first, self.range.last, *decided, self.note, self.from_hole).to_json()

    @classmethod
    def from_json(cls, raw: bytes) -> AcceptedGap:
        """Parse an accepted gap. Raises ValueError."""
        wire = _GapWire.from_json(raw)
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


def accepted_part(hole: SequenceRange, gaps: Iterable[SequenceRange]) -> SequenceRange | None:
    """Return the first part of `hole` that `gaps` account for without a break; None if they lack its first sequence."""
    missing = holes(gaps, hole)
    last = missing[0].first - 1 if missing else hole.last
    return SequenceRange(hole.first, last) if last >= hole.first else None


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
    listed = list_named(objects, layout.states_prefix(chain), layout.parse_state)
    return sorted((SnapshotRef(name, info.key, info.size, info.modified) for name, info in listed), key=newest_first)


MAX_POSITIONS_BYTES = 8 * 1024 * 1024  # about 100,000 chains


class _PositionsWire(_Versioned, frozen=True):
    target: str
    time: float
    positions: dict[str, int]
    sources: tuple[str, ...] = ()
    released: bool = False
    stopped: dict[str, str] = {}
    writer: str = ""


@dataclass(frozen=True, slots=True)
class TargetPositions:
    """The positions of one target, written at `time` (seconds since 1970 by the clock of ingress).

    `positions`: by chain, the first sequence that the target does not hold yet. `sources`: the `site/feed` that may
    flow in, with `*` for any text; a chain of them without a position has not begun, and needs everything. `released`:
    an operator released the target; it needs nothing any more. `stopped`: the reasons why chains have stopped, with the
    remedies; each text is cut at MAX_TEXT_CHARS characters. `writer`: a random name of the delivery that wrote it, by
    which its centre recognises it; empty: any centre may replace it.
    """

    target: str
    time: float
    positions: Mapping[Chain, int] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    released: bool = False
    stopped: Mapping[Chain, str] = field(default_factory=dict)
    writer: str = ""

    def needed_from(self, chain: Chain, first: int, sources: Collection[str] = ()) -> int | None:
        """Return the first sequence that it needs of `chain`, which begins at `first`; None if it needs nothing of it.

        `sources`: the `site/feed` that its configuration lets flow in; this document may be older.
        """
        if self.released:
            return None
        if (position := self.positions.get(chain)) is not None:
            return position
        feed, listed = f"{chain.site}/{chain.feed}", {*self.sources, *sources}
        is_listed = feed in listed or any("*" in each and name_matches(each, feed) for each in listed)
        return first if is_listed else None

    def to_json(self) -> bytes:
        positions = {str(chain): at for chain, at in self.positions.items()}
        stopped = {str(chain): reason[:MAX_TEXT_CHARS] for chain, reason in self.stopped.items()}
        more = self.sources, self.released, stopped, self.writer
        return _PositionsWire(self.target, self.time, positions, *more).to_json()

    @classmethod
    def from_json(cls, raw: bytes) -> TargetPositions:
        """Parse a document of this version, or of a later one that added fields. Raises ValueError."""
        wire = _PositionsWire.from_json(raw)
        for chain, at in wire.positions.items():
            expect_range(f"position of {chain}", at, 0, MAX_SEQUENCE + 1)
        positions = {Chain.parse(chain): at for chain, at in wire.positions.items()}
        stopped = {Chain.parse(chain): reason[:MAX_TEXT_CHARS] for chain, reason in wire.stopped.items()}
        return cls(wire.target, wire.time, positions, wire.sources, wire.released, stopped, wire.writer)


class KnownTail(NamedTuple):
    """A tail that was read. `etag`: that of its object; `end`: the end of coverage in it."""

    etag: str
    end: int


class _KnownTailsWire(_Versioned, frozen=True):
    tails: dict[str, KnownTail]


def known_tails_to_json(tails: Mapping[Chain, KnownTail]) -> bytes:
    return _KnownTailsWire({str(chain): tail for chain, tail in tails.items()}).to_json()


def known_tails_from_json(raw: bytes) -> Mapping[Chain, KnownTail]:
    """Parse known tails. Raises ValueError."""
    wire = _KnownTailsWire.from_json(raw)
    for tail in wire.tails.values():
        expect_range("end", tail.end, 0, MAX_SEQUENCE)
    return {Chain.parse(chain): tail for chain, tail in wire.tails.items()}


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
        expect_range("code", self.code, 0, 255)
        for name, value in (("ended", self.ended), ("seconds", self.seconds), ("succeeded", self.succeeded or 0)):
            expect_range(name, int(value), 0, _MAX_UNIX_S)


class ComparedTo(_Versioned, frozen=True):
    """The record of `floe compare` for one chain and one copy of its stream. `last`: everything up to this sequence was
    found equal, 0: nothing. `at`: the time of the last comparison, RFC 3339; `same`: it found no difference.

    Raises ValueError if the number is outside its range.
    """

    last: int
    at: str
    same: bool

    def __post_init__(self) -> None:
        expect_range("last", self.last, 0, MAX_SEQUENCE)


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


# All of them at import: if two threads decode a type for the first time at once, the process ends.
_CODECS: dict[type[_Versioned], JsonCodec[Any]] = {kind: JsonCodec(kind) for kind in _Versioned.__subclasses__()}

_PAGE_KEYS = 1000  # keys of one listing
_CAS_ATTEMPTS = 5  # attempts at compare-and-set, each lost to another writer


class ChainStore:
    """The documents under one layout. Blocking; safe to use from several threads.

    `claims`: needed for a `create_…` if the store refuses conditions; it raises ConditionalPutRefused without.

    A `read_…` method returns None if there is no such document; a `create_…` method writes the document unless there
    is one, and returns the one that is there afterwards. Every method raises the errors of the object store, and
    DataError (E-STATE-JSON) for an invalid document.
    """

    def __init__(self, objects: ObjectStore, layout: Layout, claims: PutOnceClaims | None = None) -> None:
        self.objects, self.layout, self.claims = objects, layout, claims
        self._reported_invalid: dict[str, str] = {}  # the key and error of invalid gaps, heartbeats and runs

    def _document(self, key: str, kind: type[V], check: Callable[[V], str] = lambda _: "") -> Document[V]:
        return Document(self.objects, key, kind.to_json, kind.from_json, check=check, claims=self.claims)

    def create_stream(self, chain: Chain, document: StreamDocument) -> StreamDocument:
        return self._stream(chain).create(document)

    def replace_stream(self, chain: Chain, document: StreamDocument) -> None:
        """Put the document over the one of an import, which only the holder of the feed's lease writes."""
        self._stream(chain).put(document)

    def read_stream(self, chain: Chain) -> StreamDocument | None:
        return self._stream(chain).read()

    def _stream(self, chain: Chain) -> Document[StreamDocument]:
        return self._document(self.layout.stream_document(chain), StreamDocument)

    def has_next_incarnation(self, chain: Chain) -> bool:
        """True if the next incarnation exists: nothing is put into this one any more. One HEAD request."""
        return self.next_incarnation_start(chain) is not None

    def next_incarnation_start(self, chain: Chain) -> float | None:
        """Return the start of the next incarnation, seconds since 1970 by the store's clock; None if there is none."""
        if chain.incarnation == MAX_INCARNATION:
            return None
        info = self._stream(chain.next_incarnation()).head()
        return info.modified if info else None

    def read_end(self, chain: Chain) -> int | None:
        """Return the end of the chain if its incarnation has ended (0: nothing was covered); None while it has not."""
        following = None if chain.incarnation == MAX_INCARNATION else self.read_stream(chain.next_incarnation())
        previous = None if following is None else following.previous
        return None if previous is None else previous.get(chain.partition, 0)

    def create_chain(self, chain: Chain, document: ChainDocument) -> ChainDocument:
        return self._document(self.layout.chain_document(chain), ChainDocument).create(document)

    def read_chain(self, chain: Chain) -> ChainDocument | None:
        return self._document(self.layout.chain_document(chain), ChainDocument).read()

    def read_floor(self, chain: Chain) -> int | None:
        """Return the first sequence that retention left; None if there is no floor."""
        found = self._floor(chain).read()
        return None if found is None else found.first

    def floor(self, chain: Chain) -> Floor | None:
        """Return the floor with its time; None as for `read_floor`."""
        document = self._floor(chain)
        if (found := document.read()) is None:
            return None
        info = document.head()
        return Floor(found.first, info.modified if info else 0.0)

    def raise_floor(self, chain: Chain, first: int) -> None:
        """Raise the floor to `first` unless it is that high already: it never falls. Raises also Unavailable."""
        document, wanted = self._floor(chain), FloorDocument(first)
        for _ in range(_CAS_ATTEMPTS):
            info = document.head()
            if (self.read_floor(chain) or 0) >= first or document.update(wanted, info.etag if info else None):
                return
        if (self.read_floor(chain) or 0) < first:
            message = f"floor of {chain}: lost to other writers {_CAS_ATTEMPTS} times"
            raise Unavailable(message, code="E-STORE-CONTENDED")

    def _floor(self, chain: Chain) -> Document[FloorDocument]:
        return self._document(self.layout.floor_document(chain), FloorDocument)

    def compared(self, chain: Chain, copy: str) -> Document[ComparedTo]:
        """The record of a comparison with `copy`: `source`, or the name of a replica's server."""
        return self._document(self.layout.compared(chain, copy), ComparedTo)

    def write_tail(self, chain: Chain, end: int) -> None:
        self._document(self.layout.tail(chain), TailDocument).replace(TailDocument(end))

    def read_tail(self, chain: Chain) -> int | None:
        """Return the end of coverage at the time the tail was written; None if there is none, or it is invalid.

        It is only a hint: an invalid tail is written again, and stops nothing.
        """
        document = self._document(self.layout.tail(chain), TailDocument)
        found = self._read_or_warn(document, "tail", **chain.log_context())
        return None if found is None else found.end

    def tail_etags(self) -> dict[Chain, str]:
        """Return the ETag of every tail, from one listing: a tail that changed since the last call has a new one."""
        return {chain: info.etag for chain, info in self.list_tails().items()}

    def list_tails(self, site: str | None = None) -> dict[Chain, ObjectInfo]:
        """Return the tails of a site, or of all, from one listing; `modified` is the time of the last archiving."""
        return dict(list_named(self.objects, self.layout.tails_prefix(site), self.layout.parse_tail))

    # Heartbeats

    def write_heartbeat(self, process: str, heartbeat: HeartbeatObject) -> None:
        self._document(self.layout.heartbeat(heartbeat.site, process), HeartbeatObject).replace(heartbeat)

    def list_heartbeats(self, site: str | None = None) -> list[ObjectInfo]:
        """Return the heartbeat objects of a site, or of all, without those that are too old (`drop_outdated`)."""
        listed = list_named(self.objects, self.layout.heartbeats_prefix(site), self.layout.parse_heartbeat)
        return drop_outdated((name[0], info) for name, info in listed)

    def read_heartbeat(self, key: str) -> HeartbeatObject | None:
        """Read a heartbeat; None if there is none at `key`, or it is invalid: it stops nothing."""
        name = self.layout.parse_heartbeat(key)

        def check(found: HeartbeatObject) -> str:
            return "" if name and found.site == name[0] else f"expected the site of its key, found {found.site!r:.80}"

        return self._read_or_warn(self._document(key, HeartbeatObject, check), "heartbeat")

    # Targets

    def write_positions(self, positions: TargetPositions) -> None:
        self._positions(positions.target).replace(positions)

    def read_positions(self, target: str) -> TargetPositions | None:
        return self._positions(target).read()

    def _positions(self, target: str) -> Document[TargetPositions]:
        def check(found: TargetPositions) -> str:
            return "" if found.target == target else f"expected target {target}, found {found.target!r:.80}"

        document = self._document(self.layout.ingress_positions(target), TargetPositions, check)
        return replace(document, max_bytes=MAX_POSITIONS_BYTES)

    def write_known_tails(self, target: str, tails: Mapping[Chain, KnownTail]) -> None:
        self._known_tails(target).replace(tails)

    def read_known_tails(self, target: str) -> Mapping[Chain, KnownTail]:
        """Return the tails that the target knew when they were last written: a tail of the same ETag need not be read
        again. Empty if there are none, or they are invalid: they stop nothing.
        """
        return self._read_or_warn(self._known_tails(target), "known tails") or {}

    def _known_tails(self, target: str) -> Document[Mapping[Chain, KnownTail]]:
        form = known_tails_to_json, known_tails_from_json
        return Document(self.objects, self.layout.ingress_tails(target), *form, max_bytes=MAX_POSITIONS_BYTES)

    def targets_with_positions(self) -> list[str]:
        """Return the targets that have a positions document, released ones too."""
        listing = self.objects.list(self.layout.ingress_targets_prefix())
        return [t for info in listing if (t := self.layout.parse_ingress_positions(info.key)) is not None]

    # Runs of compaction

    def write_run(self, site: str | None, feed: str | None, run: CompactionRun) -> None:
        self._document(self.layout.run(site, feed), CompactionRun).replace(run)

    def read_run(self, site: str | None, feed: str | None) -> CompactionRun | None:
        """Read a run; None if there is none, or it is invalid: it stops nothing."""
        return self._read_or_warn(self._document(self.layout.run(site, feed), CompactionRun), "compaction run")

    def runs(self) -> CompactionRuns:
        """Return the last run of each selection; none if access is refused."""
        try:
            listed = list_named(self.objects, self.layout.runs_prefix(), self.layout.parse_run)
            return {name: run for name, _ in listed if (run := self.read_run(*name)) is not None}
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
        document = self._gap(self.layout.gaps_prefix(chain), gap.range)
        try:
            return document.create(gap)
        except ConditionalPutRefused:  # another writer accepts the same range, which is the key: only the notes differ
            document.replace(gap)
            return document.create(gap)

    def skipped_gaps(self, target: str, chain: Chain, *, position: int = 1) -> list[AcceptedGap]:
        return self._gaps(self.layout.skipped_prefix(target, chain), position)

    def record_skipped_gap(self, target: str, chain: Chain, gap: AcceptedGap) -> AcceptedGap:
        return self._gap(self.layout.skipped_prefix(target, chain), gap.range).create(gap)

    def _gaps(self, prefix: str, position: int) -> list[AcceptedGap]:
        listing = self.objects.list(prefix, start_after=self.layout.gaps_after(prefix, position))
        ranges = (rows for info in listing if (rows := self.layout.parse_gap(prefix, info.key)) is not None)
        return [gap for rows in ranges if (gap := self._read_or_warn(self._gap(prefix, rows), "gap")) is not None]

    def _gap(self, prefix: str, rows: SequenceRange) -> Document[AcceptedGap]:
        def check(found: AcceptedGap) -> str:
            return "" if found.range == rows else f"expected {rows}, found {found.range}"

        return self._document(self.layout.gap(prefix, rows), AcceptedGap, check)

    def _read_or_warn(self, document: Document[D], kind: str, **context: object) -> D | None:
        """Read a document that stops nothing: an invalid one counts as none. It is logged once, with `context`, since a
        chain that waits has its gaps read again and again.
        """
        try:
            found = document.read()
        except DataError as error:
            if self._reported_invalid.get(document.key) != str(error):
                self._reported_invalid[document.key] = str(error)
                log.warning("document ignored", action="document_ignored", kind=kind, error=str(error), **context)
            return None
        self._reported_invalid.pop(document.key, None)
        return found
