"""Reads a stream from a time or a sequence on, through an ephemeral consumer, a bounded piece at a time."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from common.clock import NS_PER_S
from common.errors import DataError, FloeError, OutcomeUnknown, Unavailable
from common.jetstream.api import StreamInfo, ack_numbers, create_consumer, delete_consumer, parse_ack
from common.jetstream.client import FloeClient, frame
from common.jetstream.headers import status
from common.jetstream.protocol import ConsumerTrouble, Heartbeat, RequestOver, parse_status
from common.segments.segment import Message
from common.tasks import Trouble, wait_for

SILENT = 10  # heartbeats that may fail to come
MESSAGE_ROOM = 16 * 1024  # bytes of subject and reply, counted on top of a payload


@dataclass(frozen=True, slots=True)
class Asked:
    """How it is asked for: `batch` messages or `window` bytes at a time; seconds for the rest."""

    batch: int = 2000
    window: int = 4 * 1024 * 1024
    heartbeat: float = 0.5
    expires: float = 30.0
    inactive: float = 60.0


@dataclass(frozen=True, slots=True)
class PulledMessage:
    """One message; `payload` is empty where only headers were asked for."""

    sequence: int
    payload: bytes
    headers: bytes | None


@dataclass(frozen=True, slots=True)
class From:
    """Where to begin: at a sequence, or, where that is 0, at the first message stored at `time_ns` or
    later.
    """

    sequence: int = 0
    time_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        if self.sequence:
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": self.sequence}
        seconds, nanoseconds = divmod(max(0, self.time_ns), NS_PER_S)
        text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return {"deliver_policy": "by_start_time", "opt_start_time": f"{text}.{nanoseconds:09d}Z"}


async def scan(
    client: FloeClient,
    stream: str,
    start: From,
    *,
    until: int | None,
    subject: str = "",
    headers_only: bool = False,
    asked: Asked | None = None,
) -> AsyncGenerator[Sequence[PulledMessage]]:
    """The messages on `subject` (empty: all) in pieces, up to sequence `until` or for ever.

    A piece may be empty: the stream is quiet. Raises Unavailable where the consumer or the connection is
    lost, ApiError where there is no such stream or no such right. To be closed (`contextlib.aclosing`).
    """
    if until is not None and until < max(1, start.sequence):
        return
    reading = _Reading(client, stream, asked or Asked())
    try:
        await reading.open({**start.to_json(), **({"headers_only": True} if headers_only else {})}, subject)
        while until is None or reading.passed < until:
            yield await reading.next()
    finally:
        await reading.close()


class _Reading:
    """One consumer and the pull request that is open on it."""

    def __init__(self, client: FloeClient, stream: str, asked: Asked) -> None:
        self._client, self._stream, self._asked = client, stream, asked
        self._name = f"floe-{secrets.token_hex(8)}"
        self._generation = client.generation
        self._frames: list[tuple[bytes, bytes, bytes | None]] = []
        self._arrived = asyncio.Event()
        self._trouble = Trouble(self._arrived)
        self._next, self._owed = 1, 0
        self._window = max(asked.window, client.max_payload + MESSAGE_ROOM)
        #: Everything up to this sequence was handed over, or is not on the subject.
        self.passed = 0

    async def open(self, config: dict[str, Any], subject: str) -> None:
        config |= {
            "name": self._name,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": int(self._asked.inactive * NS_PER_S),
            "mem_storage": True,
            "num_replicas": 1,
        }
        if subject:
            config["filter_subject"] = subject
        self._inbox = self._client.new_inbox()
        self._subscription = await self._client.subscribe_raw(self._inbox, self._sink, self._trouble.tell)
        await create_consumer(self._client, self._stream, config)
        self._pull()

    async def close(self) -> None:
        if hasattr(self, "_subscription"):
            await self._subscription.unsubscribe()
        with suppress(FloeError):
            if self._client.is_up:
                await delete_consumer(self._client, self._stream, self._name)

    def _sink(self, _subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        self._frames.append((reply, payload, headers))
        self._arrived.set()

    def _pull(self) -> None:
        request = {
            "batch": self._asked.batch,
            "max_bytes": self._window,
            "expires": int(self._asked.expires * NS_PER_S),
            "idle_heartbeat": int(self._asked.heartbeat * NS_PER_S),
        }
        ask = self._client.api_subject(f"CONSUMER.MSG.NEXT.{self._stream}.{self._name}").encode()
        self._client.send(frame(ask, json.dumps(request).encode(), None, self._inbox.encode()))
        self._owed = self._asked.batch

    async def next(self) -> list[PulledMessage]:
        """What has arrived; waits for a frame of any kind, a heartbeat at the latest."""
        try:
            await asyncio.wait_for(self._arrived.wait(), SILENT * self._asked.heartbeat)
        except TimeoutError:
            raise Unavailable(f"stream {self._stream}: nothing heard of the consumer") from None
        self._trouble.check()
        if self._client.generation != self._generation:
            raise Unavailable(f"stream {self._stream}: the connection was lost while reading")
        self._arrived.clear()
        frames, self._frames = self._frames, []
        found = [each for item in frames if (each := self._take(*item)) is not None]
        if self._owed <= 0:
            self._pull()
        return found

    def _take(self, reply: bytes, payload: bytes, headers: bytes | None) -> PulledMessage | None:
        if not reply:
            self._on_status(headers)
            return None
        try:
            sequence, number, _ = ack_numbers(reply)
        except ValueError as error:
            raise Unavailable(f"stream {self._stream}: {error}") from None
        if number != self._next:
            raise Unavailable(f"stream {self._stream}: expected message {self._next}, found {number}")
        self._next, self._owed, self.passed = number + 1, self._owed - 1, sequence
        return PulledMessage(sequence, payload, headers)

    def _on_status(self, headers: bytes | None) -> None:
        status = parse_status(headers)
        if isinstance(status, Heartbeat) and status.consumer_sequence == self._next - 1:
            self.passed = max(self.passed, status.sequence)
        elif isinstance(status, RequestOver):
            self._owed = 0
            self._window *= 2 if status.too_small and status.undelivered == self._asked.batch else 1
        elif isinstance(status, ConsumerTrouble):
            raise Unavailable(f"stream {self._stream}: the server says: {status.text}")


PULL = {"batch": 1000, "max_bytes": 16 * 1024 * 1024, "no_wait": True}
SILENCE = 30.0  # seconds without an answer until the reading fails
CONSUMER = {
    "ack_policy": "none",
    "deliver_policy": "all",
    "mem_storage": True,
    "inactive_threshold": 60 * 10**9,
}


async def read_all(client: FloeClient, info: StreamInfo, take: Callable[[Message], None]) -> None:
    """Give each message of the stream, in order, to `take`. Raises OutcomeUnknown where the server is silent,
    DataError where one is left out, and what `take` raises.
    """
    if not info.messages:
        return
    name = f"floe_{secrets.token_hex(8)}"
    await create_consumer(client, info.name, {"name": name, **CONSUMER})
    try:
        await _StreamReading(client, info, name, take).run()
    finally:
        await delete_consumer(client, info.name, name)


class _StreamReading:
    """Pulls batch by batch; a pull is over when its batch came or a status tells so."""

    def __init__(
        self, client: FloeClient, info: StreamInfo, consumer: str, take: Callable[[Message], None]
    ) -> None:
        self._client, self._last, self._take = client, info.last_sequence, take
        self._subject = client.api_subject(f"CONSUMER.MSG.NEXT.{info.name}.{consumer}").encode()
        self._delivered, self._sequence, self._left = 0, 0, 0
        self._over = asyncio.Event()
        self._trouble = Trouble(self._over)
        self._failed = False

    async def run(self) -> None:
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe_raw(inbox, self._sink, self._trouble.tell)
        try:
            while self._sequence < self._last:
                self._over.clear()
                self._left = PULL["batch"]
                self._client.send(frame(self._subject, json.dumps(PULL).encode(), None, inbox.encode()))
                if not await wait_for(self._over, SILENCE):
                    raise OutcomeUnknown(f"nothing read from the scratch stream for {SILENCE:g} s")
                self._trouble.check()
                if self._failed:
                    raise DataError("reading the scratch stream: a message was left out by the server")
        finally:
            await subscription.unsubscribe()

    def _sink(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if not reply.startswith(b"$JS.ACK."):
            if status(headers) is not None:
                self._over.set()
            return
        ack = parse_ack(reply)
        self._delivered, self._sequence = self._delivered + 1, ack.stream_sequence
        self._failed = self._failed or ack.consumer_sequence != self._delivered
        self._take(Message(ack.stream_sequence, ack.timestamp_ns, subject, headers, payload))
        self._left -= 1
        if self._left == 0 or self._sequence >= self._last:
            self._over.set()
