"""The archive that nats-server makes a stream from (`$JS.API.STREAM.RESTORE`): what goes into it, and in which form.

Since 2.15 the server takes the messages themselves (`logical.py`), before that the files of a stream (`files.py`).
Both travel as an S2 stream (snappy's framing); Floe does not compress, since what is in the archive has been.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from common.clock import format_time
from common.errors import ConfigError
from common.jetstream.api import GUARD
from common.jetstream.durables import INTEREST
from common.segments.captures import CapturedConsumers
from common.segments.columns import row_sizes
from common.settings.types import counted

Numbers = npt.NDArray[np.uint64]
OLDEST, LOGICAL_SINCE, NEWEST = (2, 10), (2, 15), (2, 15)  # minors of nats-server that the tests restore into

START = b"\xff\x06\x00\x00S2sTwO"
KEEP_ALIVE = b"\x99\x04\x00\x00idle"  # a frame that readers skip
CHUNK = 1 << 20  # bytes of a frame; the server takes up to 4 MiB
_FRAME = struct.Struct("<I I")


@dataclass(frozen=True, slots=True)
class ArchiveConsumer:
    """A consumer and where it stood. Whoever makes it bounds all sequences by the end of what is restored.

    `delivered`, `ack_floor`: consumer sequence and stream sequence. `pending`: by stream sequence, the consumer
    sequence and time (ns) of the delivery, of those that are delivered and not acknowledged; empty where they are not
    known. `redelivered`: how often each of them was delivered, beyond the first time.
    """

    name: str
    config: Mapping[str, Any]
    created: str
    delivered: tuple[int, int]
    ack_floor: tuple[int, int]
    pending: Mapping[int, tuple[int, int]]
    redelivered: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """What the rows come to. The stream goes on after `last_sequence`: the end of coverage, at or behind the last row.

    `first_sequence` is that of the first row; without rows, one after `last_sequence`.
    """

    messages: int
    bytes: int
    first_sequence: int
    first_timestamp_ns: int
    last_sequence: int
    last_timestamp_ns: int

    def to_json(self, consumers: int) -> dict[str, Any]:
        """As nats-server writes it; `consumers`: their number."""
        return {
            "messages": self.messages,
            "bytes": self.bytes,
            "first_seq": self.first_sequence,
            "first_ts": format_time(self.first_timestamp_ns),
            "last_seq": self.last_sequence,
            "last_ts": format_time(self.last_timestamp_ns),
            "consumer_count": consumers,
        }


class ArchiveWriter(Protocol):
    """Makes the bytes of one archive. Call `head` once, `rows` for each batch in ascending order, `tail` once.

    Each piece is whole frames, at most a little more than `CHUNK` bytes, so `KEEP_ALIVE` may stand between any two of
    them. A server gives up after 5 s without a byte.
    """

    @property
    def format(self) -> str: ...

    def head(
        self, config: Mapping[str, Any], created: str, state: ArchiveState, consumers: Sequence[ArchiveConsumer]
    ) -> Iterator[bytes]: ...

    def rows(self, batch: pa.RecordBatch) -> Iterator[bytes]: ...

    def tail(self) -> Iterator[bytes]: ...


def archive_writer(stream: str, version: str, form: str = "auto", *, force: bool = False) -> ArchiveWriter:
    """A writer for a nats-server of this version, such as `2.14.6`; `stream`: the name that it is restored under.

    `form`: `logical`, `files`, which every server takes and which keeps when the stream was created, or `auto`. Raises
    ConfigError for servers before 2.10, or that lack the form, for a version that is none, and without `force` for
    minors newer than those that it is tried with: the form may have changed.
    """
    # These build on this file.
    from ingress.restore.files import FilesWriter
    from ingress.restore.logical import LogicalWriter

    match = re.match(r"(\d+)\.(\d+)\.", version)
    minor = (int(match[1]), int(match[2])) if match else (0, 0)
    if minor < OLDEST:
        raise ConfigError(
            f"nats-server {version}: expected {_text(OLDEST)} or newer, which takes a stream back from an archive",
            hint="restore into a newer nats-server",
            code="E-RESTORE-VERSION",
        )
    if minor > NEWEST and not force:
        raise ConfigError(
            f"nats-server {version}: restores are tried with {_text(OLDEST)} to {_text(NEWEST)}, and this one may take "
            "them in another form",
            hint="update Floe, restore into an older nats-server, or add --force: it is verified before it counts",
            code="E-RESTORE-VERSION",
        )
    if form == "logical" and minor < LOGICAL_SINCE:
        raise ConfigError(
            f"nats-server {version}: expected {_text(LOGICAL_SINCE)} or newer, which takes the logical form",
            hint="--format files, or none",
            code="E-RESTORE-VERSION",
        )
    return LogicalWriter() if minor >= LOGICAL_SINCE and form != "files" else FilesWriter(stream)


def _text(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))


# Consumers, as they were captured


def bounded(captured: CapturedConsumers, end: int) -> tuple[list[ArchiveConsumer], list[str]]:
    """The consumers to restore, with no position behind `end`; and what of them is not as it was, in words."""
    found, notes = list[ArchiveConsumer](), list[str]()
    if passing := sum(not each.config.get("durable_name") for each in captured.consumers):
        notes.append(f"{counted(passing, 'ephemeral consumer')} left out: applications make them again")
    for each in captured.consumers:
        config = {**each.config}
        if not config.get("durable_name"):
            continue
        # A declaration by its application is compared with `_nats.req.level` too; the others the server makes anew.
        config["metadata"] = {
            key: value
            for key, value in (config.get("metadata") or {}).items()
            if not key.startswith("_nats.") or key == "_nats.req.level"
        }
        if subject := config.get("deliver_subject"):
            config["deliver_subject"] = unmuted(subject)  # captured between a promotion and what follows it
        delivered = (each.delivered_consumer, each.delivered_stream)
        floor = (each.ack_floor_consumer, each.ack_floor_stream)
        if each.ack_pending:
            notes.append(
                f"consumer {each.name}: {counted(each.ack_pending, 'message')} delivered and not acknowledged: which "
                f"is not known, so all behind {floor[1]} are delivered again"
            )
            delivered = floor
        if delivered[1] > end or floor[1] > end:
            notes.append(f"consumer {each.name}: stood at {delivered[1]}, and is set to the end, {end}")
        found.append(
            ArchiveConsumer(
                each.name,
                config,
                each.created,
                delivered=(delivered[0], min(delivered[1], end)),
                ack_floor=(floor[0], min(floor[1], end)),
                pending={},
                redelivered={},
            )
        )
    return found, notes


def with_replicas(
    consumers: Sequence[ArchiveConsumer], config: Mapping[str, Any]
) -> tuple[list[ArchiveConsumer], list[str]]:
    """The consumers with as many replicas as a stream of this configuration allows them, and in words each that gets
    another number: at most those of the stream, and for retention by interest exactly those.
    """
    found, notes, most = list[ArchiveConsumer](), list[str](), int(config.get("num_replicas") or 1)
    for consumer in consumers:
        had = int(consumer.config.get("num_replicas") or 0)  # 0: as the stream
        if had > most or (had and had != most and config.get("retention") == INTEREST):
            notes.append(f"consumer {consumer.name}: had {counted(had, 'replica')}, and gets {most} like its stream")
            consumer = replace(consumer, config={**consumer.config, "num_replicas": most})
        found.append(consumer)
    return found, notes


# What makes a consumer deliver by itself, or end by itself.
_UNASKED = (
    "deliver_subject",
    "deliver_group",
    "flow_control",
    "idle_heartbeat",
    "rate_limit_bps",
    "inactive_threshold",
)


def quiet(consumer: ArchiveConsumer) -> ArchiveConsumer:
    """The same as one that delivers only when it is asked: the subscribers of the real one must hear nothing twice."""
    return replace(consumer, config={key: value for key, value in consumer.config.items() if key not in _UNASKED})


def muted(consumer: ArchiveConsumer, stream: str) -> ArchiveConsumer:
    """The same, which delivers to a subject without subscribers until the stream is put to use."""
    if not (subject := consumer.config.get("deliver_subject")):
        return consumer
    return replace(consumer, config={**consumer.config, "deliver_subject": f"{GUARD}{stream}.{subject}"})


def unmuted(subject: str) -> str:
    """The `deliver_subject` that a consumer had before `muted`; any other as it is."""
    return subject.removeprefix(GUARD).partition(".")[2] if subject.startswith(GUARD) else subject


# The S2 stream


def frames(data: bytes | memoryview) -> Iterator[bytes]:
    """`data` in uncompressed frames of at most `CHUNK` bytes."""
    for start in range(0, len(data), CHUNK):
        part = bytes(data[start : start + CHUNK])
        crc = google_crc32c.value(part)
        masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        yield _FRAME.pack(1 | len(part) + 4 << 8, masked) + part


# Rows as columns of bytes


class RawColumns(NamedTuple):
    """Rows as both forms of an archive need them; `headers` and `payload` are empty where a row has none."""

    sequence: Numbers
    timestamp_ns: npt.NDArray[np.int64]
    subject: pa.Array[Any]
    headers: pa.Array[Any]
    payload: pa.Array[Any]

    def part(self, start: int, stop: int) -> RawColumns:
        return RawColumns(
            self.sequence[start:stop],
            self.timestamp_ns[start:stop],
            self.subject[start:stop],
            self.headers[start:stop],
            self.payload[start:stop],
        )


def raw_columns(batch: pa.RecordBatch) -> RawColumns:
    """Subjects byte for byte, as the stream had them."""
    subject = batch.column("subject")
    if isinstance(subject, pa.DictionaryArray):
        subject = subject.dictionary_decode()
    subject = subject.cast(pa.binary())
    if "subject_raw" in batch.schema.names and (raw := batch.column("subject_raw")).null_count < len(raw):
        subject = pc.coalesce(raw, subject)
    return RawColumns(
        batch.column("sequence").to_numpy().astype(np.uint64),
        batch.column("timestamp_ns").to_numpy().astype(np.int64),
        subject,
        batch.column("headers").fill_null(b""),
        batch.column("payload"),
    )


def parts(batch: pa.RecordBatch, most: int) -> Iterator[pa.RecordBatch]:
    """The rows in turn, as few batches of at most `most` bytes; a row with more stands alone."""
    ends = np.cumsum(row_sizes(batch).to_numpy())
    start = before = 0
    while start < len(ends):
        stop = max(start + 1, int(np.searchsorted(ends, before + most, "right")))
        yield batch.slice(start, stop - start)
        start, before = stop, int(ends[stop - 1])


def sizes(values: pa.Array[Any]) -> Numbers:
    """Bytes of each value; there must be no null."""
    found: Numbers = pc.binary_length(values).to_numpy().astype(np.uint64)  # type: ignore[call-overload]
    return found


def fixed(numbers: npt.NDArray[Any]) -> pa.Array[Any]:
    """Each row of an array as its bytes."""
    width = numbers.nbytes // max(1, len(numbers))
    offsets = np.arange(0, (len(numbers) + 1) * width, max(1, width), dtype=np.int32)[: len(numbers) + 1]
    return _binary(offsets, np.ascontiguousarray(numbers))


def varints(*columns: Numbers) -> pa.Array[Any]:
    """Of each row its numbers, one after the other, each in the fewest bytes of 7 bits, lowest first (`uvarint`)."""
    blocks = [_varint(column) for column in columns]
    digits = np.concatenate([block for block, _ in blocks], axis=1)
    used = np.concatenate([used for _, used in blocks], axis=1)
    offsets = np.zeros(len(digits) + 1, np.int32)
    np.cumsum(used.sum(axis=1), out=offsets[1:])
    return _binary(offsets, digits[used])


def _varint(numbers: Numbers) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """The digits of each number, as many as the greatest has, and which of them are written."""
    width = max(1, -(-int(numbers.max(initial=0)).bit_length() // 7))
    digits, used = np.empty((len(numbers), width), np.uint8), np.ones((len(numbers), width), np.bool_)
    for index in range(width):
        digits[:, index] = numbers & np.uint64(0x7F)
        numbers = numbers >> np.uint64(7)
        if index + 1 < width:
            used[:, index + 1] = more = numbers > 0
            digits[:, index] |= more.view(np.uint8) << 7
    return digits, used


def _binary(offsets: npt.NDArray[np.int32], data: npt.NDArray[Any]) -> pa.Array[Any]:
    return pa.Array.from_buffers(
        pa.binary(),
        len(offsets) - 1,
        [None, pa.py_buffer(offsets), pa.py_buffer(data)],  # type: ignore[arg-type]
    )


def joined(*columns: pa.Array[Any]) -> tuple[memoryview, npt.NDArray[np.int32]]:
    """The values of each row in one, all rows one after the other, and where each begins (one more: the end)."""
    rows = pc.binary_join_element_wise(*columns, pa.scalar(b"", pa.binary()))  # type: ignore[call-overload]
    _, ends, data = rows.buffers()
    offsets = np.frombuffer(ends, np.int32)[rows.offset : rows.offset + len(rows) + 1]
    view = memoryview(data if data is not None else b"")
    return view[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0]


# Single numbers


def uvarint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def varint(number: int) -> bytes:
    """A number with a sign, which becomes its last bit."""
    return uvarint(number << 1 if number >= 0 else (-number << 1) - 1)
