"""Fills traces for the oracle from a source and from a target stream.

Streams are read raw, byte for byte, through a consumer of their own. In memory is one pull of messages at a
time, beside 24 to 32 bytes for each message read.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from common.chain import Chain
from common.errors import ConfigError, DataError, OutcomeUnknown
from common.jetstream.api import create_consumer, delete_consumer, parse_ack, stream_info
from common.jetstream.client import FloeClient, frame
from common.jetstream.headers import restore, status
from common.segments.segment import Message
from common.tasks import wait_for
from infra.oracle import SubjectMap, Trace, same_subject

BATCH = 2000
NO_MESSAGES = 404
PULL = {"batch": BATCH, "max_bytes": 32 * 1024 * 1024, "no_wait": True}
CONSUMER = {
    "ack_policy": "none",
    "deliver_policy": "all",
    "mem_storage": True,
    "inactive_threshold": 60 * 10**9,
}
PULL_TIMEOUT = 30.0  # seconds without a message until the reading fails


async def source_trace(client: FloeClient, stream: str, subject: SubjectMap = same_subject) -> Trace:
    """What the stream holds now. Raises ConfigError where it does not exist."""
    trace = Trace()
    last = await read_stream(client, stream, lambda message: trace.add(message, subject(message.subject)))
    trace.through = last
    return trace


@dataclass(slots=True)
class Arrived:
    """What a target stream holds, chain by chain, in the order in which it was stored.

    `delays`: milliseconds between a message's time at its source and its time here. `foreign`: messages
    without provenance.
    """

    traces: dict[Chain, Trace] = field(default_factory=dict)
    delays: dict[Chain, array[int]] = field(default_factory=dict)
    foreign: int = 0

    def take(self, message: Message) -> None:
        """Note one message of the target."""
        provenance, original = restore(message.headers)
        if provenance is None:
            self.foreign += 1
            return
        chain = Chain(provenance.site, provenance.feed, provenance.incarnation, provenance.partition)
        self.traces.setdefault(chain, Trace()).add(
            Message(provenance.sequence, provenance.timestamp_ns, message.subject, original, message.payload)
        )
        delay = (message.timestamp_ns - provenance.timestamp_ns) // 1_000_000
        self.delays.setdefault(chain, array("q")).append(delay)


async def target_traces(client: FloeClient, stream: str) -> Arrived:
    """What has arrived in the target stream. Raises ConfigError where it does not exist."""
    arrived = Arrived()
    await read_stream(client, stream, arrived.take)
    return arrived


async def read_stream(client: FloeClient, stream: str, take: Callable[[Message], None]) -> int:
    """Give every message that the stream holds to `take`, in order; the stream's last sequence.

    Raises ConfigError where the stream does not exist, OutcomeUnknown where the server falls silent.
    """
    info = await stream_info(client, stream)
    if info is None:
        raise ConfigError(f"stream {stream}: expected to exist, found none")
    name = f"oracle_{secrets.token_hex(8)}"
    await create_consumer(client, stream, {"name": name, **CONSUMER})
    reading = _Reading(client, f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", take)
    try:
        await reading.run()
    finally:
        await delete_consumer(client, stream, name)
    return info.last_sequence


class _Reading:
    """Pulls until a pull finds nothing. The reply subject of a pull tells its status from others.

    Messages are taken as they arrive, in the client's read loop: nothing is queued.
    """

    def __init__(self, client: FloeClient, next_subject: str, take: Callable[[Message], None]) -> None:
        self._client, self._take = client, take
        self._next_subject = next_subject.encode()
        self._inbox = client.new_inbox()
        self._pull = b""
        self._missing, self._count = 0, 0
        self._status: bytes | None = None
        self._error: Exception | None = None
        self._progress = asyncio.Event()

    async def run(self) -> None:
        subscription = await self._client.subscribe_raw(f"{self._inbox}.*", self._sink)
        try:
            number = 0
            while await self._one_pull(f"{self._inbox}.{number}".encode()):
                number += 1
        finally:
            await subscription.unsubscribe()

    async def _one_pull(self, inbox: bytes) -> bool:
        """Take what one pull brings; False where the stream has no more."""
        self._pull, self._missing, self._count, self._status = inbox, BATCH, 0, None
        self._client.send(frame(self._next_subject, json.dumps(PULL).encode(), None, inbox))
        await self._client.flush_writes()
        while self._missing:
            self._progress.clear()
            if not await wait_for(self._progress, PULL_TIMEOUT):
                raise OutcomeUnknown(f"no message within {PULL_TIMEOUT:g} s: the reading is incomplete")
        if self._error is not None:
            raise self._error
        return self._goes_on()

    def _goes_on(self) -> bool:
        """What the end of a pull means. Raises DataError where one message exceeds a whole pull."""
        code, text = status(self._status) or (0, b"")
        if not self._count and code != NO_MESSAGES:
            raise DataError(f"pull of {PULL}: expected messages, found status {code} {text.decode()!r}")
        return self._count > 0

    def _sink(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        try:
            if reply.startswith(b"$JS.ACK."):
                ack = parse_ack(reply)
                self._take(Message(ack.stream_sequence, ack.timestamp_ns, subject, headers, payload))
                self._count += 1
                self._missing -= 1
            elif subject == self._pull:
                self._status, self._missing = headers, 0
        except Exception as error:  # raised where the reading is awaited, not in the read loop
            self._error, self._missing = error, 0
        self._progress.set()
