"""A snapshot: the state of a sampler at a position of its chain, and its file format.

The file holds a head, then keys with their columns, then advisories, as msgpack. Like everything in a bucket it
is untrusted: memory grows with the bytes that were read and checked, never with a size that is only declared.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Annotated, Literal

import msgspec
import pyarrow as pa

from common.chain import Chain
from egress.advisories.advisory import Advisory, AdvisoryEvent
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
