"""Reads a stream that nobody writes to from its first message to its last."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable

from common.clock import wait_for
from common.errors import DataError, OutcomeUnknown
from common.jetstream.api import StreamInfo, create_consumer, delete_consumer, parse_ack
from common.jetstream.client import FloeClient, frame
from common.jetstream.headers import status
from common.segments.segment import Message
from common.tasks import Trouble

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
        await _Reading(client, info, name, take).run()
    finally:
        await delete_consumer(client, info.name, name)


class _Reading:
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
