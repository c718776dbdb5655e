"""The archive from which nats-server restores a stream (`$JS.API.STREAM.RESTORE`): its content and its two forms.

Since 2.15 the server accepts the messages themselves, in the logical form (`LogicalWriter`), before that the files of a
stream (`files_form.py`). Both are sent as an S2 stream (snappy's framing). Floe does not compress its frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from common.archive.captures import CapturedConsumer, CapturedConsumers
from common.archive.columns import row_sizes, subject_bytes
from common.clock import format_time
from common.nats.api import INTEREST, RESTORE_PREFIX
from common.settings.types import format_count

UInt64Array = npt.NDArray[np.uint64]

S2_HEADER = b"\xff\x06\x00\x00S2sTwO"
MAX_FRAME_BYTES = 1 << 20  # bytes of a frame; the server takes up to 4 MiB
_FRAME = struct.Struct("<I I")


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """The state of the restored stream. New messages begin after `last_sequence`.

    `first_sequence`: of the first row; without rows, one after `last_sequence`. `last_sequence`: at or after the last
    row: the end of coverage, or of the sequences that are skipped after it.
    """

    messages: int
    bytes: int
    first_sequence: int
    first_timestamp_ns: int
    last_sequence: int
    last_timestamp_ns: int

    def to_json(self, consumers: int) -> dict[str, Any]:
        """Return the state in the form of nats-server. `consumers`: their number."""
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
    """A writer of one archive. Call `encode_head` once, `encode_rows` for each batch in ascending order, `encode_tail`
    once. The caller bounds all stream sequences of consumers by the last one of the restored stream; no message is
    delivered and not acknowledged.

    Each piece that they yield consists of whole frames and is at most a little larger than `MAX_FRAME_BYTES` bytes. So
    a keep-alive frame may be sent between any two pieces. A server ends the restore after 5 s without a byte.
    """

    @property
    def format(self) -> str: ...

    def encode_head(
        self, config: Mapping[str, Any], created: str, state: ArchiveState, consumers: Sequence[CapturedConsumer]
    ) -> Iterator[bytes]: ...

    def encode_rows(self, batch: pa.RecordBatch) -> Iterator[bytes]: ...

    def encode_tail(self) -> Iterator[bytes]: ...


# Captured consumers


def restorable_consumers(captured: CapturedConsumers, end: int) -> tuple[list[CapturedConsumer], list[str]]:
    """Return the consumers to restore, with no position after `end` and no pending message, and a line of text for each
    deviation.
    """
    found, notes = list[CapturedConsumer](), list[str]()
    durables = [each for each in captured.consumers if each.config.get("durable_name")]
    if passing := len(captured.consumers) - len(durables):
        notes.append(f"{format_count(passing, 'ephemeral consumer')} left out: applications create them again")
    for each in durables:
        config = {**each.config}
        # The server compares `_nats.req.level` with the declaration of an application, and writes the others itself.
        config["metadata"] = {
            key: value
            for key, value in (config.get("metadata") or {}).items()
            if not key.startswith("_nats.") or key == "_nats.req.level"
        }
        if subject := config.get("deliver_subject"):
            # Captured after a promotion, before `GuardedStream.restore_delivery`.
            config["deliver_subject"] = without_guard_subject(subject)
        floor, delivered = each.ack_floor_stream, (each.delivered_consumer, each.delivered_stream)
        if each.ack_pending:
            notes.append(
                f"consumer {each.name}: {format_count(each.ack_pending, 'message')} delivered and not acknowledged: "
                f"unknown which ones, so all after {floor} are delivered again"
            )
            delivered = (each.ack_floor_consumer, floor)
        if delivered[1] > end or floor > end:
            notes.append(f"consumer {each.name}: was at {delivered[1]}, and is set to the end, {end}")
        position = (delivered[0], min(delivered[1], end), each.ack_floor_consumer, min(floor, end))
        found.append(CapturedConsumer(config, each.created, *position))
    return found, notes


def with_replicas(
    consumers: Sequence[CapturedConsumer], config: Mapping[str, Any]
) -> tuple[list[CapturedConsumer], list[str]]:
    """Return the consumers with replica counts that a stream of this configuration permits, and a line of text for each
    changed count. A consumer has at most as many replicas as the stream; with interest retention exactly as many.
    """
    found, notes, most = list[CapturedConsumer](), list[str](), int(config.get("num_replicas") or 1)
    for each in consumers:
        had = int(each.config.get("num_replicas") or 0)  # 0: as the stream
        if had > most or (had and had != most and config.get("retention") == INTEREST):
            notes.append(f"consumer {each.name}: had {format_count(had, 'replica')}, and gets {most} like its stream")
            each = replace(each, config={**each.config, "num_replicas": most})
        found.append(each)
    return found, notes


# Keys that make a consumer push messages, or expire.
_PUSH_KEYS = (
    "deliver_subject",
    "deliver_group",
    "flow_control",
    "idle_heartbeat",
    "rate_limit_bps",
    "inactive_threshold",
)


def as_pull_consumer(consumer: CapturedConsumer) -> CapturedConsumer:
    """Return it as a pull consumer that never expires: subscribers of the real one must receive no message twice."""
    return replace(consumer, config={key: value for key, value in consumer.config.items() if key not in _PUSH_KEYS})


def with_guard_subject(consumer: CapturedConsumer, stream: str) -> CapturedConsumer:
    """Return the consumer with a delivery subject that has no subscribers, for the time until promotion."""
    if not (subject := consumer.config.get("deliver_subject")):
        return consumer
    return replace(consumer, config={**consumer.config, "deliver_subject": f"{RESTORE_PREFIX}{stream}.{subject}"})


def without_guard_subject(subject: str) -> str:
    """Return the `deliver_subject` from before `with_guard_subject`; any other subject is unchanged."""
    return subject.removeprefix(RESTORE_PREFIX).partition(".")[2] if subject.startswith(RESTORE_PREFIX) else subject


# The S2 stream


def frames(data: bytes | memoryview) -> Iterator[bytes]:
    """Yield `data` in uncompressed frames of at most `MAX_FRAME_BYTES` bytes."""
    for start in range(0, len(data), MAX_FRAME_BYTES):
        part = bytes(data[start : start + MAX_FRAME_BYTES])
        crc = google_crc32c.value(part)
        masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        yield _FRAME.pack(1 | len(part) + 4 << 8, masked) + part


# Rows as columns of bytes


class RawColumns(NamedTuple):
    """Rows in the layout that both forms of an archive need; `headers` and `payload` are empty if a row has none."""

    sequence: UInt64Array
    timestamp_ns: npt.NDArray[np.int64]
    subject: pa.Array[Any]
    headers: pa.Array[Any]
    payload: pa.Array[Any]

    def slice(self, start: int, stop: int) -> RawColumns:
        columns: tuple[Any, ...] = self
        return RawColumns(*(column[start:stop] for column in columns))


def raw_columns(batch: pa.RecordBatch) -> RawColumns:
    """Return the columns of a batch, its subjects byte for byte as in the stream."""
    return RawColumns(
        batch.column("sequence").to_numpy().astype(np.uint64),
        batch.column("timestamp_ns").to_numpy().astype(np.int64),
        subject_bytes(batch),
        batch.column("headers").fill_null(b""),
        batch.column("payload"),
    )


def split_batch(batch: pa.RecordBatch, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Split the rows, in order, into few batches of at most `max_bytes` bytes; a larger row is a batch of its own."""
    ends = np.cumsum(row_sizes(batch).to_numpy())
    start = before = 0
    while start < len(ends):
        stop = max(start + 1, int(np.searchsorted(ends, before + max_bytes, "right")))
        yield batch.slice(start, stop - start)
        start, before = stop, int(ends[stop - 1])


def sizes(values: pa.Array[Any]) -> UInt64Array:
    """Return the size of each value in bytes; there must be no null."""
    found: UInt64Array = pc.binary_length(values).to_numpy().astype(np.uint64)  # type: ignore[call-overload]
    return found


def fixed_width(numbers: npt.NDArray[Any]) -> pa.Array[Any]:
    """Return the bytes of each row of an array, as one binary value."""
    width = numbers.nbytes // max(1, len(numbers))
    offsets = np.arange(0, (len(numbers) + 1) * width, max(1, width), dtype=np.int32)[: len(numbers) + 1]
    return _binary(offsets, np.ascontiguousarray(numbers))


def varint_columns(*columns: UInt64Array) -> pa.Array[Any]:
    """Encode the numbers of each row one after another, each in the fewest 7-bit digits, lowest first."""
    blocks = [_varint(column) for column in columns]
    digits = np.concatenate([block for block, _ in blocks], axis=1)
    used = np.concatenate([used for _, used in blocks], axis=1)
    offsets = np.zeros(len(digits) + 1, np.int32)
    np.cumsum(used.sum(axis=1), out=offsets[1:])
    return _binary(offsets, digits[used])


def varints(*numbers: int) -> bytes:
    """Encode the numbers one after another, as `varint_columns` does. Each is below 2^64."""
    encoded: bytes = varint_columns(*(np.array([number], np.uint64) for number in numbers))[0].as_py()
    return encoded


def _varint(numbers: UInt64Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """Return the digits of each number, as many as the greatest has, and a mask of the digits to write."""
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


def concat_rows(*columns: pa.Array[Any]) -> tuple[memoryview, npt.NDArray[np.int32]]:
    """Concatenate the values of each row, and all rows. Return the bytes, and the start of each row and the end."""
    rows = pc.binary_join_element_wise(*columns, pa.scalar(b"", pa.binary()))  # type: ignore[call-overload]
    _, ends, data = rows.buffers()
    offsets = np.frombuffer(ends, np.int32)[rows.offset : rows.offset + len(rows) + 1]
    view = memoryview(data if data is not None else b"")
    return view[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0]


# The logical form: the stream's state, its consumers, then message after message
#
#     "NATSARC1"
#     entry "state.json"
#     entry "consumers/{name}"   configuration and state, one for each
#     entry {subject}            one for each message, ascending; the server counts sequences between them as deleted
#     entry of zeros             the end; the server then continues at the state's last sequence
#
# An entry: length of the name, time (ns, with sign), sequence, length of the headers, length of the payload, each a
# varint; then name, headers and payload. From nats-server: server/archive/archive.go, server/stream_backup.go.

_MAGIC = b"NATSARC1"
_JSON = msgspec.json.Encoder()


class LogicalWriter:
    """An `ArchiveWriter` for servers since 2.15. It keeps no state between two calls."""

    format = "logical"

    def encode_head(
        self,
        config: Mapping[str, Any],  # noqa: ARG002 - the request carries it
        created: str,  # noqa: ARG002 - this form has no place for it
        state: ArchiveState,
        consumers: Sequence[CapturedConsumer],
    ) -> Iterator[bytes]:
        at = state.last_timestamp_ns
        entries = [_MAGIC, _document("state.json", at, state.to_json(len(consumers)))]
        entries += [_document(f"consumers/{each.name}", at, _consumer(each)) for each in consumers]
        first, *rest = frames(b"".join(entries))
        yield S2_HEADER + first
        yield from rest

    def encode_rows(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        for part in split_batch(batch, MAX_FRAME_BYTES):
            yield from frames(_entries(part))

    def encode_tail(self) -> Iterator[bytes]:
        yield from frames(_entry(b"", 0, b""))


def _entries(batch: pa.RecordBatch) -> memoryview:
    rows = raw_columns(batch)
    # The sign becomes the last bit.
    times = (rows.timestamp_ns << 1 ^ rows.timestamp_ns >> 63).view(np.uint64)
    numbers = varint_columns(sizes(rows.subject), times, rows.sequence, sizes(rows.headers), sizes(rows.payload))
    return concat_rows(numbers, rows.subject, rows.headers, rows.payload)[0]


def _entry(name: bytes, time_ns: int, content: bytes) -> bytes:
    """Encode an entry that is not a message."""
    # The sign of the time becomes the last bit.
    return varints(len(name), time_ns << 1 ^ time_ns >> 63, 0, 0, len(content)) + name + content


def _document(name: str, time_ns: int, content: dict[str, Any]) -> bytes:
    return _entry(name.encode(), time_ns, _JSON.encode(content))


def _consumer(consumer: CapturedConsumer) -> dict[str, Any]:
    position = {
        "delivered": {"consumer_seq": consumer.delivered_consumer, "stream_seq": consumer.delivered_stream},
        "ack_floor": {"consumer_seq": consumer.ack_floor_consumer, "stream_seq": consumer.ack_floor_stream},
    }
    return {"config": {**consumer.config, "name": consumer.name}, "state": position}
