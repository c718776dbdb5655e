"""Archives as nats-server takes them, restored and read back: the tests' own ends of `ingress/recovery`."""

import hashlib
import io
import struct
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import google_crc32c

from common.archive.segment import Message
from common.nats.api import stream_info
from common.nats.client import FloeClient
from common.nats.protocol import api_answer
from common.nats.pull import for_each_message
from ingress.recovery.files_form import hash_of
from ingress.recovery.stream_archive import ArchiveState


def unframed(stream: bytes, *, checked: bool = True) -> bytes:
    """Return the contents of an S2 stream of uncompressed and skippable frames. Raises AssertionError for any other."""
    assert stream.startswith(b"\xff\x06\x00\x00S2sTwO")
    position, found = 10, []
    while position < len(stream):
        kind, size = stream[position], int.from_bytes(stream[position + 1 : position + 4], "little")
        body = stream[position + 4 : position + 4 + size]
        assert len(body) == size, "the last frame is cut off"
        position += 4 + size
        if kind == 1:
            assert size - 4 <= 4 << 20, f"a frame of {size} bytes"
            if checked:
                crc = google_crc32c.value(body[4:])
                masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
                assert int.from_bytes(body[:4], "little") == masked
            found.append(body[4:])
        else:
            assert kind >= 0x80, f"a frame of kind {kind:#x}"
    return b"".join(found)


class Entry(NamedTuple):
    """One entry of the archive of nats-server 2.15."""

    name: bytes
    timestamp_ns: int
    sequence: int
    headers: bytes
    payload: bytes


def entries(archive: bytes) -> Iterator[Entry]:
    """Yield the entries of an archive without its S2 frames. Raises AssertionError if it ends in the middle."""
    assert archive.startswith(b"NATSARC1")
    position = 8

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = archive[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def taken(size: int) -> bytes:
        nonlocal position
        position += size
        assert position <= len(archive)
        return archive[position - size : position]

    while position < len(archive):
        name, time, sequence, headers, payload = (number() for _ in range(5))
        yield Entry(taken(name), time >> 1 ^ -(time & 1), sequence, taken(headers), taken(payload))


# The files of a stream, read and written slowly


def tar_files(archive: bytes) -> dict[str, bytes]:
    """Return the files of an archive without its S2 frames by name, in order."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def encoded_block(stream: str, index: int, rows: Iterable[Message], erased: tuple[int, int] | None = None) -> bytes:
    """Return a block of a file store, record by record. `erased`: sequence and time of an erased message at the end."""
    key = hashlib.sha256(f"{stream}-{index}".encode()).digest()
    found = []
    for row in rows:
        content = struct.pack("<Qq", row.sequence, row.timestamp_ns) + row.subject
        headers = row.headers or b""
        length = 4 + len(content) + 2 + (4 + len(headers) if headers else 0) + len(row.payload) + 8
        checked = content + headers + row.payload
        found.append(struct.pack("<I", length | (1 << 31 if headers else 0)) + content[:16])
        found.append(struct.pack("<H", len(row.subject)) + row.subject)
        found.append(struct.pack("<I", len(headers)) + headers if headers else b"")
        found.append(row.payload + hash_of(key, checked))
    if erased is not None:
        content = struct.pack("<Qq", erased[0] | 1 << 63, erased[1])
        found.append(struct.pack("<I", 30) + content + b"\0\0" + hash_of(key, content))
    return b"".join(found)


# The server's end of a restore

CHUNK = 256 * 1024  # bytes of one message of an archive
PATIENCE = 120.0  # seconds; that of other tests would load boto3 and pytest into each simulation


async def send_archive(
    client: FloeClient, stream: str, config: dict[str, Any], state: ArchiveState, pieces: Iterable[bytes]
) -> dict[str, Any]:
    """Restore `stream` from an archive, one message after another; return the server's last answer. Raises ApiError."""
    asked = {"config": config, "state": state.to_json(0)}
    answer = await client.api(f"STREAM.RESTORE.{stream}", asked, timeout=PATIENCE)
    subject = answer["deliver_subject"].encode()
    archive = b"".join(pieces)
    for start in range(0, len(archive), CHUNK):
        answered, _ = await client.request_raw(subject, archive[start : start + CHUNK], timeout=PATIENCE)
        assert not answered, answered
    answered, _ = await client.request_raw(subject, b"", timeout=PATIENCE)
    return api_answer("the end of the archive", answered)


@dataclass(frozen=True)
class Captured:
    """A stream as a server holds it: configuration, the counts of its state, and every message in it."""

    config: dict[str, Any]
    created: str
    first: int
    last: int
    messages: int
    rows: list[Message]

    @property
    def state(self) -> ArchiveState:
        size = sum(len(row.subject) + len(row.headers or b"") + len(row.payload) for row in self.rows)
        ends = [self.rows[0].timestamp_ns, self.rows[-1].timestamp_ns] if self.rows else [0, 0]
        return ArchiveState(len(self.rows), size, self.first, ends[0], self.last, ends[1])


async def captured(client: FloeClient, stream: str) -> Captured:
    info = await stream_info(client, stream)
    assert info is not None, f"no stream {stream}"
    rows: list[Message] = []
    if info.messages:
        await for_each_message(client, stream, info.last_sequence, rows.append)
    assert len(rows) == info.messages
    config = {name: value for name, value in info.config.items() if name != "metadata"}
    return Captured(config, info.created, info.first_sequence, info.last_sequence, info.messages, rows)
