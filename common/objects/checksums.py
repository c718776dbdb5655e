"""Checksums and sizes of what is put, and the error for bytes that are not what their checksum says."""

from __future__ import annotations

import base64
import hashlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from common.errors import Unavailable
from common.objects.port import Body

CHUNK_BYTES = 1024 * 1024


class ChecksumMismatch(Unavailable):
    """The store received other bytes than the checksum says and kept none of them."""

    default_code = "E-STORE-DIGEST"


def size_of(body: Body) -> int:
    """Bytes in `body`."""
    return body.stat().st_size if isinstance(body, Path) else len(body)


@contextmanager
def opened(body: Body) -> Iterator[BinaryIO]:
    """`body` as a file to read from."""
    with body.open("rb") if isinstance(body, Path) else io.BytesIO(body) as file:
        yield file


def chunks(file: BinaryIO, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The rest of `file` in pieces of `size` bytes, the last one shorter."""
    while chunk := file.read(size):
        yield chunk


def sha256_of(body: Body) -> str:
    """64 hex digits."""
    with opened(body) as file:
        return sha256_of_file(file)


def sha256_of_file(file: BinaryIO) -> str:
    """64 hex digits over the rest of `file`."""
    digest = hashlib.sha256()
    for chunk in chunks(file):
        digest.update(chunk)
    return digest.hexdigest()


def crc32_base64(body: Body) -> str:
    """As the header `x-amz-checksum-crc32` has it."""
    crc = 0
    with opened(body) as file:
        for chunk in chunks(file):
            crc = zlib.crc32(chunk, crc)
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def hex_to_base64(digest: str) -> str:
    """A digest as the headers `x-amz-checksum-…` have it."""
    return base64.b64encode(bytes.fromhex(digest)).decode()


def base64_to_sha256(text: str) -> str | None:
    """64 hex digits; None if `text` is not one SHA-256, such as the composite of a multipart upload."""
    try:
        digest = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return digest.hex() if len(digest) == 32 else None
