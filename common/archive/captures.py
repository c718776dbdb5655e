"""Captures: the state of a stream beside its messages, recorded so that the stream can be restored as it was.

    config/…       the configuration of the stream, after each change
    consumers/…    its consumers: configuration and positions
    deletions/…    the deleted messages, for streams in which a deletion leaves no row in the archive
    restored/…     written by `floe restore`: the stream that it made from the archive

Each is one small object of an incarnation. Its name holds `end`, the sequence up to which the archive covered at the
time. Egress queries the server before it reads `end`. So a restore of the messages up to a sequence takes the newest
capture at or below it. Positions are as old as their capture: a restored consumer receives again the messages that it
acknowledged since, and skips none. Positions may be after `end`, if the archive was behind the stream. Deletions count
only once the archive has all that the stream had then: a message may be gone because of one that is not archived.

Every program that can write to the bucket can write these objects. So the size of a read is limited, every field is
checked, and an invalid capture is never acted on (DataError, code E-STATE-JSON).
"""

from __future__ import annotations

import hashlib
import string
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from common.archive.documents import Document, expect_range, list_named
from common.archive.keys import CAPTURES, CaptureName, Layout, digest_of
from common.chain import FEED_PATTERN, Chain
from common.clock import parse_time
from common.documents import JsonCodec
from common.objects.port import ObjectStore
from common.sequences import MAX_SEQUENCE

MAX_CAPTURE_BYTES = 32 * 1024 * 1024  # some 50,000 consumers
OLDER_CAPTURE_HINT = "remove it: an older capture is used then"
CONFIG, CONSUMERS, DELETIONS, RESTORED = CAPTURES

_SAME_TIME_S = 2.0  # seconds: objects of one end that were stored within them are ordered by their content

# Keys of a stream's or a consumer's configuration that Floe acts on, by the type of their values.
_KEYS: tuple[tuple[Any, str], ...] = (
    (str, "name durable_name retention storage discard deliver_subject deliver_group"),
    (int, "num_replicas max_msgs max_bytes max_age max_msgs_per_subject max_msg_size max_consumers first_seq"),
    (int, "subject_delete_marker_ttl inactive_threshold"),
    (bool, "sealed deny_delete deny_purge allow_rollup_hdrs allow_msg_ttl allow_msg_schedules mem_storage"),
    (list[str], "subjects"),
    (dict[str, str], "metadata"),
)


class _SourceKeys(msgspec.Struct, frozen=True):
    name: str
    filter_subject: str = ""
    external: dict[str, str] | None = None
    consumer: dict[str, Any] | None = None
    subject_transforms: list[dict[str, str]] | None = None


_NESTED_KEYS = (("mirror", _SourceKeys), ("sources", list[_SourceKeys]), ("republish", dict[str, str | bool]))
_CONFIG_KEYS: list[tuple[str, Any]] = [*((key, kind) for kind, keys in _KEYS for key in keys.split()), *_NESTED_KEYS]
_DECODER = msgspec.json.Decoder(msgspec.defstruct("_Known", [(key, kind | None, None) for key, kind in _CONFIG_KEYS]))
_JSON = msgspec.json.Encoder()
_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a configuration of a stream or consumer with a key of another type than the server's, or
    with an invalid name: a restore makes file names from them.
    """
    _DECODER.decode(_JSON.encode(config))
    for key in ("name", "durable_name"):
        if (name := config.get(key)) is not None and not FEED_PATTERN.fullmatch(name):
            raise ValueError(f"{key}: expected 1 to 255 characters without space . * > / \\, found {name!r:.80}")


class _Origin(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    chain: str = ""
    ts: str = ""


class _Capture(_Origin, frozen=True, omit_defaults=True, tag_field="format_version", tag=1):
    at: str
    end: int

    def __post_init__(self) -> None:
        for text in (self.at, self.ts or self.at):
            parse_time(text)
        expect_range("end", self.end, 0, MAX_SEQUENCE)

    @property
    def moment(self) -> str:
        """Time of the capture: `ts`, the server's own, else `at`."""
        return self.ts or self.at

    @property
    def moment_ns(self) -> int:
        return parse_time(self.moment)


class CapturedConfig(_Capture, frozen=True):
    """The stream as in STREAM.INFO: `config`, and the time at which it was `created` (RFC 3339).

    `at`: the time of the query (RFC 3339, by the clock of egress); `ts`: the `ts` of the answer (RFC 3339, by the clock
    of the server); `end`: as in its key; `chain`: partition 0 of its incarnation. `ts` and `chain` are empty in
    captures from before they were recorded, `ts` also for a server that does not send it.

    `first`, `last`, `messages`: of its state in the same answer; `before`: its last sequence when the same egress last
    saw the configuration before this one; None if they are unknown. Raises ValueError for a value outside its range.
    """

    created: str
    config: dict[str, Any]
    first: int | None = None
    last: int | None = None
    messages: int | None = None
    before: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_time(self.created)
        check_config(self.config)
        for field in ("first", "last", "messages", "before"):
            expect_range(field, getattr(self, field) or 0, 0, MAX_SEQUENCE)


class CapturedConsumer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One consumer as in CONSUMER.LIST. `delivered_…`: consumer and stream sequence of the last message delivered;
    `ack_floor_…`: of the last message up to which all are acknowledged; 0: none. `ack_pending`: number of messages
    delivered and not acknowledged; `redelivered`: number of these that were delivered more than once.

    Raises ValueError for a value outside its range.
    """

    config: dict[str, Any]
    created: str
    delivered_consumer: int = 0
    delivered_stream: int = 0
    ack_floor_consumer: int = 0
    ack_floor_stream: int = 0
    ack_pending: int = 0
    redelivered: int = 0
    paused: bool = False

    def __post_init__(self) -> None:
        parse_time(self.created)
        if not isinstance(name := self.config.get("name") or self.config.get("durable_name"), str):
            raise ValueError(f"config: expected the name of the consumer, found {name!r:.60}")
        check_config(self.config)
        sequences = ("delivered_consumer", "delivered_stream", "ack_floor_consumer", "ack_floor_stream")
        for field in (*sequences, "ack_pending", "redelivered"):
            expect_range(field, getattr(self, field), 0, MAX_SEQUENCE)

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.config["durable_name"])

    @property
    def declared(self) -> tuple[dict[str, Any], str, bool]:
        """The part that people set: everything except its position."""
        return self.config, self.created, self.paused


class CapturedConsumers(_Capture, frozen=True):
    """The consumers of the stream except Floe's own, by name. Other fields are as in CapturedConfig."""

    consumers: tuple[CapturedConsumer, ...]


class CapturedDeletions(_Capture, frozen=True):
    """The messages of `first` to `last` that the stream did not hold. `first`, `last`: as in STREAM.INFO; the stream
    held nothing if `first` is above `last`.

    `deleted`: ranges of them, both ends included, ascending. Other fields are as in CapturedConfig. Raises ValueError
    for other ranges, and for a value outside its range.
    """

    first: int
    last: int
    deleted: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_range("last", self.last, 0, MAX_SEQUENCE)
        expect_range("first", self.first, 0, MAX_SEQUENCE + 1)
        before = self.first - 1
        for first, last in self.deleted:
            if not before < first <= last <= self.last:
                raise ValueError(
                    f"deleted: expected ascending ranges of {self.first}..{self.last}, found {first, last}"
                )
            before = last


class CapturedRestore(_Capture, frozen=True):
    """The result of `floe restore` up to sequence `end`: the stream created at `created` is the archived one.

    `was`: the creation time of the lost stream; `ends`: for each partition of the incarnation, the end of its archive.
    `seen`: the time of the last check of a stream in a cluster, else empty: each server of a cluster may report
    another creation time, all of them between `was` and `seen`. `skipped_to`: the sequences after `end` up to this one
    were lost and no message gets them (0: none). Raises ValueError for a value outside its range.
    """

    created: str
    was: str
    ends: dict[int, int]
    seen: str = ""
    skipped_to: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_range("skipped_to", self.skipped_to, 0, MAX_SEQUENCE)
        parse_time(self.created)
        for text in (self.was, self.seen) if self.seen else ():
            parse_time(text)
        for end in self.ends.values():
            expect_range("ends", end, 0, MAX_SEQUENCE)

    def has_created(self, created: str) -> bool:
        """True if a stream with this creation time is the restored one."""
        if created == self.created or not self.seen:
            return created == self.created
        return parse_time(self.was) < parse_time(created) < parse_time(self.seen)


Captured = CapturedConfig | CapturedConsumers | CapturedDeletions | CapturedRestore
CaptureT = TypeVar("CaptureT", CapturedConfig, CapturedConsumers, CapturedDeletions, CapturedRestore)

#: The name of each kind in keys and metrics.
CAPTURE_KINDS: dict[type[Captured], str] = {
    CapturedConfig: CONFIG,
    CapturedConsumers: CONSUMERS,
    CapturedDeletions: DELETIONS,
    CapturedRestore: RESTORED,
}
_CODECS: dict[str, JsonCodec[Any]] = {kind: JsonCodec(of) for of, kind in CAPTURE_KINDS.items()}


def with_chain_name(chain: Chain, document: Captured) -> Captured:
    """Return the document with the name of its chain, partition 0."""
    return msgspec.structs.replace(document, chain=str(chain.with_partition(0)))


def outside_effects(
    name: str, config: Mapping[str, Any], pushed: Mapping[str, str], unknown: Collection[str] = ()
) -> Iterator[str]:
    """Describe, one line each, the effects of a stream with this configuration outside of its own subjects.

    `name`: the expected name of the stream; `pushed`: the deliver subjects of its push consumers, by their names;
    `unknown`: the sources that it reads again from the start, by `source_key`.
    """
    if (found := str(config.get("name") or name)) != name and found.startswith(("KV_", "OBJ_")):
        yield f"stream {found!r:.80}: the name of a bucket, expected {name}"
    for source in config.get("sources") or []:
        through = f" through {api!r:.80}" if (api := (source.get("external") or {}).get("api")) else ""
        again = ", all again: the archive has none of them" if source_key(source) in unknown else ""
        yield f"sources: takes messages from stream {source['name']!r:.80}{through}{again}"
    if republish := config.get("republish"):
        yield f"republish: sends each new message to {republish.get('dest', '>')!r:.80} too"
    yield from (f"consumer {consumer}: deliver_subject {subject!r:.80}" for consumer, subject in pushed.items())


def source_key(source: Mapping[str, Any]) -> str:
    """Return the name, filters and destinations of a source of a stream, in the form of `Nats-Stream-Source`."""
    name, pairs = str(source["name"]), [(source.get("filter_subject"), "")]
    for mark, of, key in ((":", "external", "api"), (":C=", "consumer", "name")):
        if of_it := source.get(of):
            name += mark + server_hash(str(of_it.get(key, "")))
    if transforms := source.get("subject_transforms"):
        pairs = [(each.get("src"), each.get("dest", "")) for each in transforms]
    return " ".join([name, *("\f".join(text or ">" for text in side) for side in zip(*pairs, strict=True))])


def server_hash(text: str) -> str:
    """Return the hash of nats-server in `Nats-Stream-Source`; of the creation time of a source, its identity."""
    return "".join(_DIGITS[byte % len(_DIGITS)] for byte in hashlib.sha256(text.encode()).digest()[:8])


def to_json(document: Captured) -> bytes:
    return _CODECS[CAPTURE_KINDS[type(document)]].encode(document)


def deleted_ranges(sequences: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending `sequences` as ranges, both ends included."""
    ranges: list[tuple[int, int]] = []
    for each in sequences:
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1] = ranges[-1][0], each
        else:
            ranges.append((each, each))
    return tuple(ranges)


@dataclass(frozen=True, slots=True)
class CaptureRef:
    """A capture in the store. `modified`: seconds since 1970 UTC by the store's clock."""

    name: CaptureName
    key: str
    size: int
    modified: float

    @property
    def chain(self) -> Chain:
        return self.name.chain

    @property
    def end(self) -> int:
        return self.name.end


class CaptureStore:
    """The captures under one layout. Blocking; safe to use from several threads.

    The partition of a chain does not matter. A method that reads returns the newest capture at or below `end` and at or
    before `moment_ns` (ns since 1970 UTC; None: no such bound); None if there is none. Every method raises the errors
    of the object store, and DataError (E-STATE-JSON) for an invalid document.
    """

    def __init__(self, layout: Layout, objects: ObjectStore) -> None:
        self.layout, self.objects = layout, objects

    def put(self, chain: Chain, document: Captured) -> bool:
        """Put the document with the name of its chain. Return False if the same is there.

        Raises DataError if it is larger than the limit of a read.
        """
        body = to_json(document := with_chain_name(chain, document))
        kind = CAPTURE_KINDS[type(document)]
        return self._document(CaptureName(chain.with_partition(0), kind, document.end, digest_of(body))).add(document)

    def config(self, chain: Chain, end: int | None = None, moment_ns: int | None = None) -> CapturedConfig | None:
        return self.newest(CapturedConfig, chain, end, moment_ns)

    def configs(self, chain: Chain, end: int | None = None, moment_ns: int | None = None) -> list[CapturedConfig]:
        """Return all captures that `config` chooses from, oldest first. If a restore undid the state of the stream,
        `first` and `last` are None.
        """
        restores, found = [self.read(ref) for ref in self.list_captures(chain, RESTORED)], list[CapturedConfig]()
        for each in (self.read(ref) for ref in self.list_captures(chain, CONFIG) if end is None or ref.end <= end):
            if isinstance(each, CapturedConfig) and (moment_ns is None or each.moment_ns <= moment_ns):
                is_undone = _is_undone(each, restores)
                found.append(msgspec.structs.replace(each, first=None, last=None) if is_undone else each)
        return sorted(found, key=lambda each: each.moment_ns)

    def consumers(self, chain: Chain, end: int | None = None, moment_ns: int | None = None) -> CapturedConsumers | None:
        return self.newest(CapturedConsumers, chain, end, moment_ns)

    def deletions(self, chain: Chain, end: int | None = None, moment_ns: int | None = None) -> CapturedDeletions | None:
        """Return the newest deletions. With `end`, the stream itself must also have ended at or below it, and no later
        restore may have set it back: a message that is missing later may have existed at `end`, and have gone because
        of a message after it.
        """
        if end is None:
            return self.newest(CapturedDeletions, chain)
        restores = [self.read(ref) for ref in self.list_captures(chain, RESTORED)]
        return self.newest(
            CapturedDeletions, chain, end, moment_ns, lambda each: each.last <= end and not _is_undone(each, restores)
        )

    def newest(
        self,
        kind: type[CaptureT],
        chain: Chain,
        end: int | None = None,
        moment_ns: int | None = None,
        accepts: Callable[[CaptureT], bool] = lambda _: True,
    ) -> CaptureT | None:
        """Return the newest capture of a kind. Only those count for which `accepts` is true."""
        left = [ref for ref in self.list_captures(chain, CAPTURE_KINDS[kind]) if end is None or ref.end <= end]
        if moment_ns is not None:
            left = left[: self._count_before(left, moment_ns)]
        while left:
            # Several of one end are ordered by the store's clock, which may have only whole seconds.
            last = left[-1]
            close = [ref for ref in left if ref.end == last.end and ref.modified >= last.modified - _SAME_TIME_S]
            found = [each for ref in close if isinstance(each := self.read(ref), kind) and accepts(each)]
            if found := [each for each in found if moment_ns is None or each.moment_ns <= moment_ns]:
                return max(found, key=lambda each: each.moment_ns)
            left = left[: -len(close)]
        return None

    def _count_before(self, refs: list[CaptureRef], moment_ns: int) -> int:
        """Return the number of `refs`, the first ones, that may be from the moment or before, with few reads."""
        count = bisect_right(refs, moment_ns, key=lambda ref: each.moment_ns if (each := self.read(ref)) else 0)
        while 0 < count < len(refs) and refs[count].modified <= refs[count - 1].modified + _SAME_TIME_S:
            count += 1
        return count

    def restored(self, chain: Chain) -> CapturedRestore | None:
        """Return the last restore; None if there is none."""
        return self.newest(CapturedRestore, chain)

    def list_captures(self, chain: Chain, kind: str) -> list[CaptureRef]:
        """List the captures, oldest first: by end, then by time of storage. Foreign keys are skipped."""
        listed = list_named(self.objects, self.layout.captures_prefix(chain, kind), self.layout.parse_capture)
        found = (CaptureRef(name, info.key, info.size, info.modified) for name, info in listed)
        return sorted(found, key=lambda ref: (ref.end, ref.modified, ref.key))

    def read(self, ref: CaptureRef) -> Captured | None:
        """Read a capture; None if it is gone."""
        return self._document(ref.name).read()

    def _document(self, name: CaptureName) -> Document[Captured]:
        def decode(raw: bytes) -> Captured:
            if (digest := digest_of(raw)) != name.digest:
                raise ValueError(f"expected the digest of its name, found {digest}")
            document: Captured = _CODECS[name.kind].decode(raw)
            if document.end != name.end:
                raise ValueError(f"expected end {name.end} of its name, found {document.end}")
            if document.chain not in ("", of := str(name.chain.with_partition(0))):
                raise ValueError(f"expected chain {of} of its name, found {document.chain:.80}")
            return document

        key, limit = self.layout.capture(name), MAX_CAPTURE_BYTES
        return Document(self.objects, key, to_json, decode, max_bytes=limit, hint=OLDER_CAPTURE_HINT)


def _is_undone(found: CapturedConfig | CapturedDeletions, restores: Iterable[Captured | None]) -> bool:
    """True if they describe lost messages: since a restore, other messages have their sequences."""
    at, last = found.moment_ns, found.last or 0
    return any(each and at < each.moment_ns and each.end < last for each in restores)
