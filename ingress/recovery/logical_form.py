"""The archive of nats-server 2.15 and newer: the stream's state, its consumers, then message after message.

    "NATSARC1"
    entry "state.json"
    entry "consumers/{name}"   configuration and state, one for each
    entry {subject}            one for each message, ascending; the server counts sequences between them as deleted
    entry of zeros             the end; the server then continues at the state's last sequence

An entry: length of the name, time (ns, with sign), sequence, length of the headers, length of the payload, each a
varint; then name, headers and payload. From nats-server: server/archive/archive.go, server/stream_backup.go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from common.archive.captures import CapturedConsumer
from ingress.recovery.stream_archive import (
    MAX_FRAME_BYTES,
    S2_HEADER,
    ArchiveState,
    concat_rows,
    frames,
    raw_columns,
    sizes,
    split_batch,
    varint_columns,
    varints,
)

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
