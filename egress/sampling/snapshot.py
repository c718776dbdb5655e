"""Snapshots of a sampler at positions of its chain: their file format, their store, the choice of one to resume from.

The file holds a head, then keys with their columns, then advisories, as msgpack. A name contains a hash of the content,
so nothing is ever overwritten with other bytes, and writes of a late or a second instance do no harm. Any process that
can write to the bucket can write here: a read is bounded and compared with the name, memory grows with the bytes that
were read and checked, never with a size that is only declared, and a snapshot is used only if its content agrees with
its key.
"""

import asyncio
import builtins
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pyarrow as pa

from common.archive.documents import SnapshotRef, list_snapshots, newest_first
from common.archive.keys import DIGEST_LENGTH, StateName
from common.archive.store import SegmentStore
from common.archive.writer import spool_errors
from common.chain import Chain
from common.clock import Clock, SystemClock
from common.errors import DataError, FloeError
from common.failpoints import failpoint
from common.logs import get_logger
from common.objects.port import body_size, sha256_of
from common.service.process import ThreadPool
from egress.advisories.advisory import Advisory, AdvisoryEvent
from egress.report import SamplingReport
from egress.sampling.keys import MAX_KEY_BYTES
from egress.sampling.sampler import CHUNK_VALUES, MAX_INT64, Notice, SamplerState

#: The last character is the version.
MAGIC = b"FLOESMP1"
MAX_BLOCK_BYTES = 8 * 2**20
_LENGTHS = struct.Struct("<II")
_HASH_BYTES = 32


def encode_frames(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the file of these blocks, each of at most `MAX_BLOCK_BYTES` bytes, one block at a time."""
    codec = pa.Codec("zstd", compression_level=1)
    digest = hashlib.sha256(MAGIC)
    yield MAGIC
    for block in blocks:
        packed = codec.compress(block, asbytes=True)
        step = _LENGTHS.pack(len(packed), len(block)) + packed
        digest.update(step)
        yield step
    yield digest.digest()


def decode_frames(raw: bytes) -> Iterator[bytes]:
    """Yield the blocks that `encode_frames` wrote, one at a time. Raises ValueError for anything else."""
    if raw[: len(MAGIC)] != MAGIC:
        raise ValueError(f"snapshot: expected {MAGIC!r} first, found {raw[: len(MAGIC)]!r}")
    body = memoryview(raw)[:-_HASH_BYTES]
    if len(body) < len(MAGIC) or hashlib.sha256(body).digest() != raw[-_HASH_BYTES:]:
        raise ValueError("snapshot: expected the hash of its content at its end, found other bytes")
    body, codec = body[len(MAGIC) :], pa.Codec("zstd")
    while body:
        if len(body) < _LENGTHS.size:
            raise ValueError(f"snapshot: expected a block, found {len(body)} bytes")
        length, size = _LENGTHS.unpack(body[: _LENGTHS.size])
        packed, body = body[_LENGTHS.size : _LENGTHS.size + length], body[_LENGTHS.size + length :]
        if len(packed) < length or size > MAX_BLOCK_BYTES:
            raise ValueError(f"snapshot: expected a block of at most {MAX_BLOCK_BYTES} bytes, found {size}")
        try:
            block = codec.decompress(packed, size, asbytes=True)
        except OSError as error:
            raise ValueError(f"snapshot: expected a block of {size} bytes, found damage: {error}") from error
        yield block


ADVISORIES_PER_BLOCK = 1024

NonNegative = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a sampler before `position`, the first sequence not folded in.

    `sampling_digest`: `SamplingSettings.digest` of the settings it was made with. `newest_ns`: the newest message time
    seen. `outbox`: advisories that were found and not stored yet.
    """

    chain: Chain
    position: int
    sampling_digest: str
    newest_ns: int
    state: SamplerState
    outbox: tuple[Advisory, ...] = ()


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    """The head of the file. `byte_order`: of the columns. `keys`, `advisories`: how many follow."""

    chain: str
    position: NonNegative
    sampling_digest: str
    newest_ns: NonNegative
    duration_ns: NonNegative
    watermark_ns: NonNegative
    byte_order: Literal["little", "big"]
    keys: NonNegative
    advisories: NonNegative


class _Keys(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A block of keys and their columns, in the form of `SamplerState`."""

    values: Annotated[list[Key], msgspec.Meta(max_length=CHUNK_VALUES)]
    seen: bytes
    due: bytes
    sizes: bytes
    notices: bytes


class _Advisory(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    event: AdvisoryEvent
    value: Key
    seen_ns: NonNegative
    event_time_ns: NonNegative


_Advisories = Annotated[list[_Advisory], msgspec.Meta(max_length=ADVISORIES_PER_BLOCK)]

_pack = msgspec.msgpack.Encoder().encode
_head = msgspec.msgpack.Decoder(_Head).decode
_keys = msgspec.msgpack.Decoder(_Keys).decode
_advisories = msgspec.msgpack.Decoder(_Advisories).decode


def encode(snapshot: Snapshot) -> Iterator[bytes]:
    """Encode in steps of `CHUNK_VALUES` keys, so that the thread does not block the other threads of the process."""
    return encode_frames(_blocks(snapshot))


def _blocks(snapshot: Snapshot) -> Iterator[bytes]:
    state, outbox = snapshot.state, snapshot.outbox
    yield _pack(
        _Head(
            chain=str(snapshot.chain),
            position=snapshot.position,
            sampling_digest=snapshot.sampling_digest,
            newest_ns=snapshot.newest_ns,
            duration_ns=state.duration_ns,
            watermark_ns=state.watermark_ns,
            byte_order=sys.byteorder,
            keys=state.count(),
            advisories=len(outbox),
        )
    )
    for number, values in enumerate(state.values):
        if values.count(None) < len(values):
            yield _pack(_keys_block(state, number * CHUNK_VALUES, values))
    for first in range(0, len(outbox), ADVISORIES_PER_BLOCK):
        some = outbox[first : first + ADVISORIES_PER_BLOCK]
        yield _pack([_Advisory(a.event, a.value, a.seen_ns, a.event_time_ns) for a in some])


def _keys_block(state: SamplerState, first: int, values: list[str | None]) -> _Keys:
    used = [value is not None for value in values]
    last = first + len(values)
    return _Keys(
        [value for value in values if value is not None],
        array("q", compress(array("q", state.seen[8 * first : 8 * last]), used)).tobytes(),
        array("q", compress(array("q", state.due[8 * first : 8 * last]), used)).tobytes(),
        array("I", compress(array("I", state.sizes[4 * first : 4 * last]), used)).tobytes(),
        bytes(compress(state.notices[first:last], used)),
    )


def decode(raw: bytes) -> Snapshot:
    """Decode a snapshot. Raises ValueError for anything that `encode` did not write."""
    blocks = decode_frames(raw)
    head = _head(next(blocks, b""))
    if head.byte_order != sys.byteorder:
        raise ValueError(f"snapshot: expected byte order {sys.byteorder}, found {head.byte_order}")
    # Distinct keys, each with a time that follows from its hash, take more than a byte each when compressed;
    # advisories about consecutive values at one moment take a little less.
    if head.keys > len(raw) or head.advisories > 4 * len(raw):
        raise ValueError(f"snapshot: expected no more keys than fit into {len(raw)} bytes, found {head.keys}")
    state, outbox = _decode_state(head, blocks), list[Advisory]()
    while len(outbox) < head.advisories:
        if not (some := _advisories(next(blocks, b""))):
            raise ValueError(f"snapshot: expected {head.advisories} advisories, found {len(outbox)}")
        outbox += [Advisory(a.event, a.value, a.seen_ns, a.event_time_ns) for a in some]
    if next(blocks, None) is not None:
        raise ValueError(f"snapshot: expected {head.advisories} advisories at its end, found more")
    return Snapshot(Chain.parse(head.chain), head.position, head.sampling_digest, head.newest_ns, state, tuple(outbox))


def _decode_state(head: _Head, blocks: Iterator[bytes]) -> SamplerState:
    values: list[str | None] = []
    seen, due, sizes, notices = array("q"), array("q"), array("I"), bytearray()
    distinct: set[str] = set()
    while len(values) < head.keys:
        found = _keys(next(blocks, b""))
        _check_columns(found)
        values.extend(found.values)
        distinct.update(found.values)
        if len(distinct) < len(values):
            raise ValueError(f"snapshot: expected distinct keys, found {len(values)}, {len(distinct)} distinct")
        seen.frombytes(found.seen)
        due.frombytes(found.due)
        sizes.frombytes(found.sizes)
        notices += found.notices
    if len(values) > head.keys:
        raise ValueError(f"snapshot: expected {head.keys} keys, found {len(values)}")
    chunks = tuple(values[first : first + CHUNK_VALUES] for first in range(0, len(values), CHUNK_VALUES))
    columns = seen.tobytes(), due.tobytes(), sizes.tobytes(), bytes(notices)
    return SamplerState(head.duration_ns, head.watermark_ns, chunks, *columns)


def _check_columns(found: _Keys) -> None:
    count = len(found.values)
    widths = (len(found.seen), len(found.due), len(found.sizes), len(found.notices))
    if not count or widths != (8 * count, 8 * count, 4 * count, count):
        raise ValueError(f"snapshot: expected columns of {count} keys, found {widths} bytes")
    times = array("q", found.seen + found.due)
    if min(times) < 0 or max(times) >= MAX_INT64 or max(found.notices) > Notice.EXPIRE:
        raise ValueError("snapshot: expected valid times and notices, found others")


log = get_logger(__name__)


# A larger object is not read. 1,000,000 values of the greatest length allowed stay below this.
MAX_SNAPSHOT_BYTES = 1 << 30
# The key of the settings' digest in the object metadata, read without opening the object: a hint, the content counts.
_SAMPLING = "sampling"
READ_RETRY_PAUSES_S = (0.1, 0.5)  # seconds before a snapshot that arrived damaged is read again


class SnapshotStore:
    """The snapshots of `chain` in `store`. Blocking; safe to use from several threads.

    Every method raises the errors of the object store.
    """

    def __init__(self, store: SegmentStore, chain: Chain, *, clock: Clock | None = None) -> None:
        self.chain, self._store, self._objects = chain, store, store.objects
        self._clock = clock or SystemClock()

    def list(self) -> builtins.list[SnapshotRef]:
        """List the snapshots, newest first: the greatest position, and at one position the one stored last."""
        return list_snapshots(self._objects, self._store.layout, self.chain)

    def stored_digest(self, ref: SnapshotRef) -> str:
        """Return the sampling digest in the object's metadata; empty if it has none or the object does not exist.

        A hint that saves reading a snapshot of other settings.
        """
        info = self._objects.head(ref.key)
        return "" if info is None else info.metadata.get(_SAMPLING, "")

    def read(self, ref: SnapshotRef) -> Snapshot:
        """Read a snapshot. Raises DataError (E-SNAPSHOT) if it is gone, too large, or does not match its name."""
        raw = self._fetch(ref)
        try:
            snapshot = decode(raw)
        except (ValueError, MemoryError) as error:
            raise _corrupt_snapshot(ref, str(error)) from error
        if (snapshot.chain, snapshot.position) != (ref.chain, ref.position):
            found = f"{snapshot.chain} at {snapshot.position}"
            raise _corrupt_snapshot(ref, f"expected {ref.chain} at {ref.position} as in the key, found {found}")
        return snapshot

    def _fetch(self, ref: SnapshotRef) -> bytes:
        if ref.size > MAX_SNAPSHOT_BYTES:
            raise _corrupt_snapshot(ref, f"expected at most {MAX_SNAPSHOT_BYTES} bytes, found {ref.size}")
        found = ""
        for pause in (0.0, *READ_RETRY_PAUSES_S):
            if found:
                # The transfer may have damaged it; the stored object may be intact.
                log.warning("snapshot read retried", action="snapshot_read_retried", **ref.log_context())
                self._clock.block(pause)
            if (raw := self._objects.get(ref.key, length=ref.size + 1)) is None:
                raise _corrupt_snapshot(ref, "no longer in the store")
            digest = sha256_of(raw)
            if len(raw) == ref.size and digest.startswith(ref.state.digest):
                return raw
            found = f"{len(raw)} with {digest[:DIGEST_LENGTH]}…"
        expected = f"{ref.size} bytes with SHA-256 {ref.state.digest}…"
        raise _corrupt_snapshot(ref, f"expected {expected}, found {found}")

    def write(self, position: int, body: Path | bytes, *, sampling_digest: str = "") -> SnapshotRef:
        """Put an encoded snapshot and read it back; after the return the store holds exactly these bytes.

        `sampling_digest`: as in the snapshot; readers find it in the metadata without reading the object. Any instance
        may write the same bytes again. Raises Unavailable, code E-READ-BACK, if reading it back never succeeds.
        """
        sha256 = sha256_of(body)
        name = StateName(self.chain, position, sha256[:DIGEST_LENGTH])
        ref = SnapshotRef(name, self._store.layout.state(name), body_size(body), 0.0)
        metadata = {"format": "1", _SAMPLING: sampling_digest, "sha256": sha256}
        info = self._store.put_verified(ref, body, metadata, lambda: None, "egress.snapshot_")
        return replace(ref, modified=info.modified)

    def save(self, snapshot: Snapshot) -> SnapshotRef:
        """Encode `snapshot` into a new spool file, step by step, and `write` it.

        Raises Unavailable, code E-SPOOL, if the disk of the spool fails.
        """
        spool = self._store.new_spool()
        try:
            with spool_errors(spool.parent), spool.open("wb") as file:
                file.writelines(encode(snapshot))
            return self.write(snapshot.position, spool, sampling_digest=snapshot.sampling_digest)
        finally:
            spool.unlink(missing_ok=True)


def _corrupt_snapshot(ref: SnapshotRef, cause: str) -> DataError:
    return DataError(
        f"snapshot {ref.key}: {cause}",
        hint="nothing to do: an older one is used, or the state is built again from the segments",
        code="E-SNAPSHOT",
    )


def followable(refs: Iterable[SnapshotRef], position: int, source_first: int) -> list[SnapshotRef]:
    """Return the snapshots from which reading can resume at `position` as if it had never stopped; newest first.

    `source_first`: the first sequence that the source holds.
    """
    return [ref for ref in at_or_before(refs, position) if ref.position >= source_first]


def at_or_before(refs: Iterable[SnapshotRef], position: int) -> list[SnapshotRef]:
    """Return the snapshots that hold the state at `position` or earlier, not after it; newest first."""
    return sorted((ref for ref in refs if ref.position <= position), key=newest_first)


def may_match_digest(stored_digest: str, digest: str) -> bool:
    return stored_digest in ("", digest)


def rebuild_reason(is_known: bool, is_followed: bool, written_by: str, digest: str) -> str:
    """Return the reason why no snapshot could be resumed from: `settings`, `damaged` or `source`.

    `is_known`: True if any snapshot is known to be of the settings `digest`. `is_followed`: True if the source still
    follows one of those. `written_by`: the digest of the settings of the newest segment.
    """
    if is_known:
        return "damaged" if is_followed else "source"
    return "damaged" if written_by == digest else "settings"


MAX_CHECKED_SNAPSHOTS = 200  # snapshots that are checked before the archive is used instead


class SnapshotSelector:
    """The snapshots that may be used with the settings of `digest`. Blocking; raises the errors of the store.

    A damaged snapshot is logged once and left out.
    """

    def __init__(self, snapshots: SnapshotStore, digest: str) -> None:
        self._snapshots, self._digest = snapshots, digest
        self._stored_digests: dict[str, str] = {}
        self._damaged: set[str] = set()

    def select_newest(self, refs: Sequence[SnapshotRef]) -> tuple[SnapshotRef, Snapshot] | None:
        """Return the newest of `refs`, which are newest first, that is of the settings and readable; None if none is.
        Of several at one position, it is the one with the newest message: a store's clock has a resolution of seconds.
        """
        found: tuple[SnapshotRef, Snapshot] | None = None
        for ref in refs[:MAX_CHECKED_SNAPSHOTS]:
            if found is not None and ref.position < found[0].position:
                break
            snapshot = self._read_or_skip(ref) if may_match_digest(self._stored_digest(ref), self._digest) else None
            if snapshot is None or snapshot.sampling_digest != self._digest:
                continue
            if found is None or snapshot.newest_ns > found[1].newest_ns:
                found = ref, snapshot
        return found

    def select_any(self, refs: Sequence[SnapshotRef]) -> Snapshot | None:
        return next(filter(None, map(self._read_or_skip, refs[:MAX_CHECKED_SNAPSHOTS])), None)

    def matching(self, refs: Sequence[SnapshotRef]) -> list[SnapshotRef]:
        return [ref for ref in refs if self._stored_digests.get(ref.key) == self._digest]

    def _stored_digest(self, ref: SnapshotRef) -> str:
        if ref.key not in self._stored_digests:
            self._stored_digests[ref.key] = self._snapshots.stored_digest(ref)
        return self._stored_digests[ref.key]

    def _read_or_skip(self, ref: SnapshotRef) -> Snapshot | None:
        if ref.key in self._damaged:
            return None
        try:
            snapshot = self._snapshots.read(ref)
        except DataError as error:
            self._damaged.add(ref.key)
            fields = {"code": error.code, "error": str(error), **ref.log_context()}
            log.warning("snapshot left out", action="snapshot_left_out", **fields)
            return None
        self._stored_digests[ref.key] = snapshot.sampling_digest
        return snapshot


class SnapshotWriter:
    """The schedule and the writer of snapshots; holds one at most. `interval`: seconds from one to the next."""

    def __init__(
        self, snapshots: SnapshotStore, threads: ThreadPool, clock: Clock, interval: float, report: SamplingReport
    ) -> None:
        self._snapshots, self._threads = snapshots, threads
        self._clock, self._interval, self._report = clock, interval, report
        self._frozen: Snapshot | None = None
        self._last = 0  # last sequence that `mark_put` reported as put
        self._frozen_at, self._segments, self._is_requested = clock.monotonic(), 0, False
        self._reached, self._free = asyncio.Event(), asyncio.Event()
        self._free.set()

    def is_due(self, segments: int) -> bool:
        """True if the state is to be frozen now, after `segments` segments have been closed.

        That needs a closed segment since the last time: then the position is mostly the end of a segment, and little
        has to be read again.
        """
        is_time = self._is_requested or self._clock.monotonic() - self._frozen_at >= self._interval
        return self._frozen is None and is_time and segments > self._segments

    def request(self) -> None:
        """Make the next one due as soon as a segment has been closed, even before `interval` has passed."""
        self._is_requested = True

    def schedule(self, snapshot: Snapshot, segments: int) -> None:
        """Keep `snapshot` until `mark_put` reports that it may be stored. Call it only while none is held."""
        self._is_requested = False
        self._frozen, self._frozen_at, self._segments = snapshot, self._clock.monotonic(), segments
        self._free.clear()
        self.mark_put(self._last)  # a quiet feed puts nothing else, so `mark_put` may not be called again

    def mark_put(self, last: int) -> None:
        self._last = max(self._last, last)
        if self._frozen is not None and self._frozen.position - 1 <= last:
            self._reached.set()

    async def wait_until_written(self) -> None:
        """Wait until none is held: the last one is stored, or has failed."""
        await self._free.wait()

    async def run(self) -> None:
        while True:
            await self._reached.wait()
            self._reached.clear()
            if self._frozen is not None:
                await self._save(self._frozen)
            self._frozen = None
            self._free.set()

    async def _save(self, snapshot: Snapshot) -> None:
        started = self._clock.monotonic()
        try:
            ref = await self._threads.run(self._write, snapshot)
        except (FloeError, OSError) as error:
            self._report.record_failure(snapshot.position, error)
        else:
            self._report.record_snapshot(ref, self._clock.monotonic() - started)

    def _write(self, snapshot: Snapshot) -> SnapshotRef:
        failpoint("egress.before_snapshot")
        ref = self._snapshots.save(snapshot)
        failpoint("egress.after_snapshot")
        return ref
