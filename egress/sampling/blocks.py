"""A file of compressed blocks, ended by its own hash: how snapshots are written.

    FLOESMP1 | block … | SHA-256 of all before        a block: length, raw length (4 bytes each), zstd

A file in a bucket is untrusted: nothing is looked into before the hash is right, and no block is larger than
`MAX_BLOCK`, whatever it says.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator

import pyarrow as pa

#: The last character is the version.
MAGIC = b"FLOESMP1"
MAX_BLOCK = 8 * 2**20
_LENGTHS = struct.Struct("<II")
_HASH_BYTES = 32


def framed(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The file of these blocks, each of at most `MAX_BLOCK` bytes, in steps of one block."""
    codec = pa.Codec("zstd", compression_level=1)
    digest = hashlib.sha256(MAGIC)
    yield MAGIC
    for block in blocks:
        packed = codec.compress(block, asbytes=True)
        step = _LENGTHS.pack(len(packed), len(block)) + packed
        digest.update(step)
        yield step
    yield digest.digest()


def unframed(raw: bytes) -> Iterator[bytes]:
    """The blocks that `framed` wrote, one at a time. Raises ValueError for anything else."""
    body = _checked(raw)
    codec = pa.Codec("zstd")
    while body:
        if len(body) < _LENGTHS.size:
            raise ValueError(f"snapshot: expected a block, found {len(body)} bytes")
        length, size = _LENGTHS.unpack(body[: _LENGTHS.size])
        packed, body = body[_LENGTHS.size : _LENGTHS.size + length], body[_LENGTHS.size + length :]
        if len(packed) < length or size > MAX_BLOCK:
            raise ValueError(f"snapshot: expected a block of at most {MAX_BLOCK} bytes, found {size}")
        yield _unpacked(codec, packed, size)


def _checked(raw: bytes) -> memoryview:
    """What stands between the magic and the hash."""
    if raw[: len(MAGIC)] != MAGIC:
        raise ValueError(f"snapshot: expected {MAGIC!r} first, found {raw[: len(MAGIC)]!r}")
    body = memoryview(raw)[:-_HASH_BYTES]
    if len(body) < len(MAGIC) or hashlib.sha256(body).digest() != raw[-_HASH_BYTES:]:
        raise ValueError("snapshot: expected the hash of its content at its end, found other bytes")
    return body[len(MAGIC) :]


def _unpacked(codec: pa.Codec, packed: memoryview, size: int) -> bytes:
    try:
        return codec.decompress(packed, size, asbytes=True)
    except OSError as error:
        raise ValueError(f"snapshot: expected a block of {size} bytes, found damage: {error}") from error
