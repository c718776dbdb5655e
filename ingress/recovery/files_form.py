"""The archive of nats-server 2.10 to 2.14, a tar of the files of a stream, and the choice of the form for a server.

The server rebuilds its index from these files:

    meta.inf, meta.sum              configuration, and its hash
    obs/{consumer}/meta.inf, …sum   the same of each consumer
    obs/{consumer}/o.dat            its position
    msgs/{n}.blk                    up to 8 MB of records, n from 1 on

A record: its length (the highest bit: with headers), sequence, time (ns), length of the subject, subject, length of the
headers and the headers if there are any, payload, and a hash of all these except the lengths, HighwayHash-64. Sequences
between two records count as deleted, one by one within a block; so a wide range of them begins a new block. If the
stream ends after the last row, the last record is that of an erased message, in a block of its own: in the block of the
last row it would make replicas of 2.10 extremely slow.

This form cannot restore a stream to memory, only to disk; a consumer with `mem_storage` starts from the beginning.
After a restart, servers before 2.14 report the time of the restore as the creation time of the stream.
From nats-server: server/filestore.go, server/store.go (`encodeConsumerState`).
"""

from __future__ import annotations

import re
import struct
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from common.archive.captures import CapturedConsumer
from common.clock import NS_PER_S
from common.errors import ConfigError
from ingress.recovery.stream_archive import (
    S2_HEADER,
    ArchiveState,
    ArchiveWriter,
    LogicalWriter,
    RawColumns,
    concat_rows,
    fixed_width,
    frames,
    raw_columns,
    sizes,
    split_batch,
    varints,
)

MAX_BLOCK_BYTES = 8 << 20  # bytes; the server's own limit
ENCODED_BYTES = 2 << 20  # bytes of rows that are encoded at once
MAX_DELETED_RUN = 10_000  # sequences that a block holds as deleted between two of its messages
_ERASED_BIT = 1 << 63
_HEADERS_BIT = 1 << 31
_FIXED_BYTES = 4 + 8 + 8 + 2 + 8  # bytes of a record beside subject, headers and payload
_CONSUMER_STATE = bytes([22, 2])  # the server's file mark, and the version of the format
_JSON = msgspec.json.Encoder()
_TAR_END = b"\0" * 1024


class FilesWriter:
    """An `ArchiveWriter` of the file form, which every server accepts. It holds one block until the next one begins."""

    format = "files"

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._index = 1
        self._block = bytearray()
        self._last = 0  # sequence of the last row
        self._state: ArchiveState | None = None

    def encode_head(
        self, config: Mapping[str, Any], created: str, state: ArchiveState, consumers: Sequence[CapturedConsumer]
    ) -> Iterator[bytes]:
        self._state = state
        meta = _JSON.encode({**config, "name": self._stream, "created": created})
        yield S2_HEADER
        yield from self._hashed_file("", self._stream, meta)
        for each in consumers:
            # The configuration has the keys of the API; `Created` and `Name` belong to the file.
            config = {**each.config, "name": each.name, "Created": each.created, "Name": each.name}
            yield from self._hashed_file(f"obs/{each.name}/", f"{self._stream}/{each.name}", _JSON.encode(config))
            yield from self._file(f"obs/{each.name}/o.dat", consumer_state(each))

    def encode_rows(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        for part in split_batch(batch, ENCODED_BYTES):
            yield from self._add_records(raw_columns(part))

    def encode_tail(self) -> Iterator[bytes]:
        assert self._state is not None, "encode_head comes first"
        yield from self._flush_block()
        if self._last < self._state.last_sequence:
            erased = struct.pack("<Qq", self._state.last_sequence | _ERASED_BIT, self._state.last_timestamp_ns)
            self._block += struct.pack("<I16sH8s", _FIXED_BYTES, erased, 0, hash_of(self._key, erased))
            yield from self._flush_block()
        yield from frames(_TAR_END)

    @property
    def _key(self) -> bytes:
        """The key of the hashes of the records in the open block."""
        return sha256(f"{self._stream}-{self._index}".encode()).digest()

    def _add_records(self, rows: RawColumns) -> Iterator[bytes]:
        """Add the rows to the open block, and yield each block that is full."""
        ends = np.cumsum(_record_lengths(rows).astype(np.int64))
        before = np.concatenate([[np.uint64(self._last or rows.sequence[0])], rows.sequence[:-1]])
        wide = np.flatnonzero(rows.sequence - before > MAX_DELETED_RUN)
        start = done = 0
        while start < len(ends):
            if len(self._block) and start in wide:
                yield from self._flush_block()
            full = int(np.searchsorted(ends, done + MAX_BLOCK_BYTES - len(self._block), "right"))
            after = wide[np.searchsorted(wide, start, "right") :]
            stop = min(full, int(after[0])) if len(after) else full
            if stop > start or not self._block:
                stop = max(stop, start + 1)
                self._block += _encode_records(self._key, rows.slice(start, stop))
                start, done = stop, int(ends[stop - 1])
            else:
                yield from self._flush_block()
        self._last = int(rows.sequence[-1])

    def _flush_block(self) -> Iterator[bytes]:
        if self._block:
            yield from self._file(f"msgs/{self._index}.blk", self._block)
            self._index += 1
            self._block = bytearray()

    def _hashed_file(self, folder: str, name: str, meta: bytes) -> Iterator[bytes]:
        """Yield the file of a configuration and that of its hash. `name`: the key of the hash."""
        yield from self._file(f"{folder}meta.inf", meta)
        yield from self._file(f"{folder}meta.sum", hash_of(sha256(name.encode()).digest(), meta).hex().encode())

    def _file(self, name: str, content: bytes | bytearray) -> Iterator[bytes]:
        assert self._state is not None, "encode_head comes first"
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(content), 0o600
        entry.mtime = max(0, self._state.last_timestamp_ns) // NS_PER_S
        yield from frames(b"".join([entry.tobuf(tarfile.GNU_FORMAT), content, b"\0" * (-len(content) % 512)]))


def _record_lengths(rows: RawColumns) -> Any:
    """Return the length of each record in bytes."""
    headers = sizes(rows.headers)
    return np.uint64(_FIXED_BYTES) + sizes(rows.subject) + headers + np.uint64(4) * (headers > 0) + sizes(rows.payload)


def _encode_records(key: bytes, rows: RawColumns) -> memoryview:
    """Encode the records of one block, or of a part of it."""
    words = np.stack([rows.sequence, rows.timestamp_ns.view(np.uint64)], axis=1)
    numbers = fixed_width(words.astype("<u8"))
    hashes = highwayhash64(key, *concat_rows(numbers, rows.subject, rows.headers, rows.payload))
    headers = sizes(rows.headers)
    has_headers = headers > 0
    return concat_rows(
        fixed_width((_record_lengths(rows) | has_headers * np.uint64(_HEADERS_BIT)).astype("<u4")),
        numbers,
        fixed_width(sizes(rows.subject).astype("<u2")),
        rows.subject,
        pc.if_else(pa.array(has_headers), fixed_width(headers.astype("<u4")), pa.scalar(b"", pa.binary())),
        rows.headers,
        rows.payload,
        fixed_width(hashes.astype("<u8")),
    )[0]


def consumer_state(consumer: CapturedConsumer) -> bytes:
    """Encode `o.dat`: the positions, and that no message is pending or redelivered."""
    floor = (consumer.ack_floor_consumer, consumer.ack_floor_stream)
    return _CONSUMER_STATE + varints(*floor, consumer.delivered_consumer, consumer.delivered_stream, 0, 0)


# Minors of nats-server that the tests restore into.
MIN_MINOR, LOGICAL_MINOR, MAX_MINOR = (2, 10), (2, 15), (2, 15)


def archive_writer(stream: str, version: str, form: str = "auto", *, force: bool = False) -> ArchiveWriter:
    """Return a writer for nats-server `version`, such as `2.14.6`. `stream`: its name after the restore.

    `form`: `logical`; `files`, which every server accepts and which keeps the creation time of the stream; or `auto`.
    Raises ConfigError for a server before 2.10, for a server that lacks the form, for an invalid version, and, without
    `force`, for a minor newer than the tested ones: the form may have changed.
    """
    match = re.match(r"(\d+)\.(\d+)\.", version)
    minor = (int(match[1]), int(match[2])) if match else (0, 0)
    if minor < MIN_MINOR:
        problem = f"expected {_dotted(MIN_MINOR)} or newer, which can restore from an archive"
        hint = "restore into a newer nats-server"
    elif minor > MAX_MINOR and not force:
        problem = f"restores are tested with {_dotted(MIN_MINOR)} to {_dotted(MAX_MINOR)}"
        problem += ", and this one may expect another form"
        hint = "update Floe, restore into an older nats-server, or add --force: it is verified before it is used"
    elif form == "logical" and minor < LOGICAL_MINOR:
        problem = f"expected {_dotted(LOGICAL_MINOR)} or newer, which accepts the logical form"
        hint = "use --format files, or leave out --format"
    else:
        return LogicalWriter() if minor >= LOGICAL_MINOR and form != "files" else FilesWriter(stream)
    raise ConfigError(f"nats-server {version}: {problem}", hint=hint, code="E-RESTORE-VERSION")


def _dotted(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))


# HighwayHash-64 of many values at once: the algorithm of the reference (google/highwayhash). A value is processed in
# packets of 32 bytes. All values of a group process their next packet together, so few long values are slow: 4 MB/s for
# values of 1 MB, 200 MB/s for values of 200 bytes.

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
_State = tuple[Words, Words, Words, Words]  # v0, v1, mul0, mul1: each four lanes of one word for each value

_MUL0 = np.array([0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3], np.uint64)
_MUL1 = np.array([0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377], np.uint64)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_PACKET_BYTES = 32
_GROUP_VALUES = 4096  # values; their state stays in the cache
_LANE_OFFSETS = np.array([[0], [8], [16], [24]], np.int64)
_PADDING = b"\0" * _PACKET_BYTES


def highwayhash64(key: bytes, data: bytes | bytearray | memoryview, offsets: npt.NDArray[Any]) -> Words:
    """Return the hash of each value `data[offsets[i] : offsets[i + 1]]`. `key`: 32 bytes."""
    starts = offsets[:-1].astype(np.int64)
    sizes = np.diff(offsets).astype(np.int64)
    padded = np.frombuffer(b"".join([data, _PADDING]), np.uint8)
    order = np.argsort(-sizes, kind="stable")  # longest first, so values with a further packet are a prefix
    found = np.empty(len(starts), np.uint64)
    for begin in range(0, len(order), _GROUP_VALUES):
        chosen = order[begin : begin + _GROUP_VALUES]
        found[chosen] = _group(key, padded, starts[chosen], sizes[chosen])
    return found


def hash_of(key: bytes, value: bytes) -> bytes:
    """Return the hash of one value as it is stored: eight bytes, the lowest first."""
    return highwayhash64(key, value, np.array([0, len(value)])).astype("<u8").tobytes()


def _group(key: bytes, data: Bytes, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Words:
    words: Words = np.ndarray((len(data) - 7,), "<u8", buffer=data.data, strides=(1,))  # a word from any byte on
    state = _reset(key, len(starts))
    packets = sizes // _PACKET_BYTES
    at = starts + _LANE_OFFSETS
    for packet in range(int(packets[0])):
        count = int(np.searchsorted(-packets, -packet, "left"))
        _update(tuple(each[:, :count] for each in state), words[at[:, :count] + packet * _PACKET_BYTES])  # type: ignore[arg-type]
    if len(short := np.flatnonzero(sizes % _PACKET_BYTES)):
        _update_remainder(state, data, short, starts + packets * _PACKET_BYTES, sizes % _PACKET_BYTES)
    v0, v1, mul0, mul1 = state
    for _ in range(4):
        _update(state, _swap_halves(v0[[2, 3, 0, 1]]))
    found: Words = v0[0] + v1[0] + mul0[0] + mul1[0]
    return found


def _reset(key: bytes, count: int) -> _State:
    words = np.frombuffer(key, "<u8").astype(np.uint64)
    first = (_MUL0 ^ words, _MUL1 ^ _swap_halves(words), _MUL0, _MUL1)
    v0, v1, mul0, mul1 = (np.repeat(each[:, None], count, axis=1) for each in first)
    return v0, v1, mul0, mul1


def _update(state: _State, packet: Words) -> None:
    v0, v1, mul0, mul1 = state
    v1 += mul0
    v1 += packet
    mul0 ^= (v1 & _LOW) * (v0 >> _HALF)
    v0 += mul1
    mul1 ^= (v0 & _LOW) * (v1 >> _HALF)
    _zipper_merge(v1, v0)
    _zipper_merge(v0, v1)


def _zipper_merge(source: Words, target: Words) -> None:
    """Add the bytes of each two lanes to those of the target, in an order that spreads them."""
    low, high = source[0::2], source[1::2]
    target[0::2] += (
        (_mask(low, 0xFF000000) | _mask(high, 0xFF00000000)) >> np.uint64(24)
        | (_mask(low, 0xFF0000000000) | _mask(high, 0xFF000000000000)) >> np.uint64(16)
        | _mask(low, 0xFF0000)
        | _mask(low, 0xFF00) << _HALF
        | _mask(high, 0xFF00000000000000) >> np.uint64(8)
        | low << np.uint64(56)
    )
    target[1::2] += (
        (_mask(high, 0xFF000000) | _mask(low, 0xFF00000000)) >> np.uint64(24)
        | _mask(high, 0xFF0000)
        | _mask(high, 0xFF0000000000) >> np.uint64(16)
        | _mask(high, 0xFF00) << np.uint64(24)
        | _mask(low, 0xFF000000000000) >> np.uint64(8)
        | _mask(high, 0xFF) << np.uint64(48)
        | _mask(low, 0xFF00000000000000)
    )


def _update_remainder(
    state: _State, data: Bytes, rows: npt.NDArray[np.intp], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> None:
    """Process the last 1 to 31 bytes of the values at `rows`, in a packet that depends on their number."""
    starts, sizes = starts[rows], sizes[rows]
    whole, rest = sizes & ~3, sizes & 3
    columns = np.arange(_PACKET_BYTES)
    packet = np.where(columns < whole[:, None], data[starts[:, None] + columns], 0).astype(np.uint8)
    large = sizes >= 16
    packet[large, 28:] = data[(starts + sizes - 4)[large, None] + np.arange(4)]
    small = ~large & (rest > 0)
    after, left = (starts + whole)[small], rest[small]
    packet[small, 16] = data[after]
    packet[small, 17] = data[after + (left >> 1)]
    packet[small, 18] = data[after + left - 1]

    v0, v1, mul0, mul1 = (each[:, rows] for each in state)
    count = sizes.astype(np.uint64)
    v0 += (count << _HALF) + count
    low, high = v1 & _LOW, v1 >> _HALF
    low, high = (((each << count) | (each >> (_HALF - count))) & _LOW for each in (low, high))
    v1 = low | high << _HALF
    ended = (v0, v1, mul0, mul1)
    _update(ended, np.ascontiguousarray(packet.view("<u8").T))
    for each, new in zip(state, ended, strict=True):
        each[:, rows] = new


def _swap_halves(words: Words) -> Words:
    """Return the words with their halves exchanged."""
    return words >> _HALF | words << _HALF


def _mask(words: Words, bits: int) -> Words:
    return words & np.uint64(bits)
