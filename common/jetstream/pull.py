"""Reading a stream from a sequence or a time on, through an ephemeral consumer, in pieces of bounded size."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from common.clock import NS_PER_S, format_time
from common.errors import FloeError, Unavailable
from common.jetstream.api import create_ephemeral, delete_consumer, message_of
from common.jetstream.client import FloeClient, frame
from common.jetstream.protocol import ConsumerTrouble, Heartbeat, RequestOver, parse_acks, parse_status
from common.segments.segment import Message
from common.tasks import Trouble, wait_for

SILENT = 10  # missing heartbeats after which the consumer is lost
MESSAGE_ROOM = 16 * 1024  # bytes of subject and reply, counted on top of a payload
EXPIRES = 30  # seconds that a pull request stays open
MOST_UNHEARD, AGAIN = 50, 0.1  # pulls without responder while the consumer is new; seconds between them
PLACINGS = 60  # attempts to get a consumer on the requested server
INACTIVE = 60  # seconds without a pull request after which the server removes the consumer


@dataclass(frozen=True, slots=True)
class Asked:
    """The limits of a pull request: `batch` messages or `window` bytes at a time; `heartbeat` in seconds."""

    batch: int = 2000
    window: int = 4 * 1024 * 1024
    heartbeat: float = 0.5


@dataclass(frozen=True, slots=True)
class From:
    """The start of a scan: `sequence`, or, if that is 0, the first message stored at `time_ns` or later."""

    sequence: int = 0
    time_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        if self.sequence:
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": self.sequence}
        return {"deliver_policy": "by_start_time", "opt_start_time": format_time(max(0, self.time_ns))}


async def scan(
    client: FloeClient,
    stream: str,
    start: From,
    *,
    until: int | None,
    subject: str = "",
    headers_only: bool = False,
    asked: Asked | None = None,
    server: str = "",
) -> AsyncGenerator[Sequence[Message]]:
    """Yield the messages on `subject` (empty: all) in pieces, up to sequence `until` or for ever.

    An empty piece means that no message arrived. `headers_only`: payloads are empty. `server`: the replica of the
    stream to read from; empty: any. Raises Unavailable if the consumer or the connection is lost, ApiError if there is
    no such stream or no permission. The caller must close the generator (`contextlib.aclosing`).
    """
    if until is not None and until < max(1, start.sequence):
        return
    reading = _Reading(client, stream, asked or Asked(), server)
    try:
        await reading.open({**start.to_json(), **({"headers_only": True} if headers_only else {})}, subject)
        while until is None or reading.passed < until:
            piece = await reading.next()
            if until is not None and reading.passed > until:
                piece = [message for message in piece if message.sequence <= until]
            yield piece
    finally:
        await reading.close()


async def read_through(
    client: FloeClient,
    stream: str,
    until: int,
    take: Callable[[Message], None],
    *,
    after: int = 0,
    headers_only: bool = False,
) -> None:
    """Pass each message after sequence `after`, up to `until`, to `take`. Raises the errors of `scan` and `take`."""
    async with aclosing(scan(client, stream, From(after + 1), until=until, headers_only=headers_only)) as pieces:
        async for piece in pieces:
            for message in piece:
                take(message)


async def get_message(client: FloeClient, stream: str, sequence: int) -> Message | None:
    """Return the message of that sequence, read from the leader; None if the stream does not hold it.

    Raises ApiError if there is no such stream.
    """
    message = await message_of(client, stream, {"seq": sequence})
    if message is None or "\ufffd".encode() not in message.subject:
        return message
    # The API's JSON cannot carry a subject that is not UTF-8; a delivered message can.
    delivered: list[Message] = []
    await read_through(client, stream, sequence, delivered.append, after=sequence - 1)
    return delivered[0] if delivered else None


class _Reading:
    """One consumer and the open pull request on it."""

    def __init__(self, client: FloeClient, stream: str, asked: Asked, server: str) -> None:
        self._client, self._stream, self._asked, self._server = client, stream, asked, server
        self._name = f"floe-{secrets.token_hex(8)}"
        self._generation = client.generation
        self._frames: list[tuple[bytes, bytes, bytes, bytes | None]] = []
        self._arrived = asyncio.Event()
        self._trouble, self._next, self._owed = Trouble(self._arrived), 1, 0
        self._unheard: int | None = 0  # pulls without responder; None once the consumer has answered
        self._batch = asked.batch
        self._window = max(asked.window, client.max_payload + MESSAGE_ROOM)
        #: Every message up to this sequence was returned, or is not on the subject.
        self.passed = 0

    async def open(self, config: dict[str, Any], subject: str) -> None:
        config |= {
            "name": self._name,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": INACTIVE * NS_PER_S,
            "mem_storage": True,  # the server chooses the replicas: one, except on an interest stream
        }
        if subject:
            config["filter_subject"] = subject
        self._inbox = self._client.new_inbox()
        self._subscription = await self._client.subscribe_raw(self._inbox, self._sink, self._trouble.tell)
        for _ in range(PLACINGS):
            consumer = await create_ephemeral(self._client, self._stream, config)
            if self._server in ("", consumer.leader):
                self._batch = min(self._batch, consumer.max_batch or self._batch)
                self._pull()
                return
            # The cluster places it on any of the replicas.
            await delete_consumer(self._client, self._stream, self._name)
            self._name = config["name"] = f"floe-{secrets.token_hex(8)}"
        raise Unavailable(f"stream {self._stream}: no consumer was placed on {self._server} in {PLACINGS} tries")

    async def close(self) -> None:
        if hasattr(self, "_subscription"):
            await self._subscription.unsubscribe()
        with suppress(FloeError):
            if self._client.is_up:
                await delete_consumer(self._client, self._stream, self._name)

    def _sink(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        self._frames.append((subject, reply, payload, headers))
        self._arrived.set()

    def _pull(self) -> None:
        request = {
            "batch": self._batch,
            "max_bytes": self._window,
            "expires": EXPIRES * NS_PER_S,
            "idle_heartbeat": int(self._asked.heartbeat * NS_PER_S),
        }
        self._client.send(frame(self._pulling, json.dumps(request).encode(), None, self._inbox.encode()))
        self._owed = self._batch

    @property
    def _pulling(self) -> bytes:
        return self._client.api_subject(f"CONSUMER.MSG.NEXT.{self._stream}.{self._name}").encode()

    async def next(self) -> list[Message]:
        if not await wait_for(self._arrived, SILENT * self._asked.heartbeat):
            silent = Unavailable(f"stream {self._stream}: nothing heard of the consumer")
            raise self._client.refusal(self._pulling) or silent
        self._trouble.check()
        if self._client.generation != self._generation:
            raise Unavailable(f"stream {self._stream}: the connection was lost while reading")
        self._arrived.clear()
        frames, self._frames = self._frames, []
        found = self._take([each for each in frames if each[1]])
        for _, reply, _, headers in frames:
            if not reply:
                self._on_status(headers)
        if self._owed <= 0:
            if self._unheard:
                await self._client.clock.sleep(AGAIN)
            self._pull()
        return found

    def _take(self, frames: Sequence[tuple[bytes, bytes, bytes, bytes | None]]) -> list[Message]:
        if not frames:
            return []
        subjects, replies, payloads, headers = zip(*frames, strict=True)
        try:
            acks = parse_acks(replies, self._name.encode(), self._next)
        except ValueError as error:
            raise Unavailable(f"stream {self._stream}: {error}") from None
        if acks.contiguous < len(frames):
            missing = self._next + acks.contiguous
            raise Unavailable(f"stream {self._stream}: expected message {missing}, found another")
        self._next, self._owed, self._unheard = self._next + len(frames), self._owed - len(frames), None
        self.passed = acks.sequences[-1]
        return list(map(Message, acks.sequences, acks.timestamps_ns, subjects, headers, payloads))

    def _on_status(self, headers: bytes | None) -> None:
        status = parse_status(headers)
        if isinstance(status, ConsumerTrouble):
            if self._unheard is None or self._unheard >= MOST_UNHEARD or not status.is_unheard:
                raise Unavailable(f"stream {self._stream}: the server says: {status.text}")
            # A cluster confirms a new consumer before its server listens.
            self._unheard, self._owed = self._unheard + 1, 0
            return
        self._unheard = None
        if isinstance(status, Heartbeat) and status.consumer_sequence == self._next - 1:
            self.passed = max(self.passed, status.sequence)
        elif isinstance(status, RequestOver):
            if status.most >= self._batch:
                raise Unavailable(f"stream {self._stream}: the server refuses to be asked for {self._batch} messages")
            self._batch, self._owed = min(self._batch, status.most or self._batch), 0
            self._window *= 2 if status.too_small and status.undelivered == self._batch else 1
