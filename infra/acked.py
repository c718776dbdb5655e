"""A publisher of many messages to a stream that counts the acknowledgement of each one.

Every message carries a reply subject of its own, so acknowledgements are counted exactly and in any order. The number
in flight is bounded: a server that falls behind slows the publisher instead of dropping messages.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import Unavailable
from common.nats.client import FloeClient, RawSubscription, frame
from common.tasks import wait_for

MAX_UNACKED = 4096  # messages in flight
ACK_TIMEOUT_S = 10.0  # seconds without any acknowledgement until those in flight count as unknown
FLUSH_BYTES = 256 * 1024  # bytes queued between two waits for the socket

Frame = Callable[[bytes, bytes, bytes | None, bytes | None], bytes]
OnStored = Callable[[int, int], None]  # number of the message (0 is the first published), its sequence


@dataclass(slots=True)
class PublishCounts:
    """The outcomes of the messages. `unknown`: neither acknowledged nor refused in time."""

    sent: int = 0
    stored: int = 0
    duplicates: int = 0
    unknown: int = 0
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        refused = "".join(f"; refused {count}: {reason}" for reason, count in self.refused.most_common(3))
        more = f", {self.duplicates} duplicates" * bool(self.duplicates) + f", {self.unknown} unknown" * bool(
            self.unknown
        )
        return f"{self.sent:,} sent, {self.stored:,} stored{more}{refused}"


class AckedPublisher:
    """The publisher. Use `async with AckedPublisher(client) as publisher`; the exit waits for messages in flight.

    `published`: set it before the first message to counts that several publishers share.
    """

    def __init__(self, client: FloeClient, *, window: int = MAX_UNACKED, on_stored: OnStored | None = None) -> None:
        self.published = PublishCounts()
        self._client, self._window, self._on_stored = client, window, on_stored
        self._inbox = client.new_inbox().encode() + b"."
        self._in_flight: set[int] = set()
        self._queued = 0
        self._progress = asyncio.Event()
        self._subscription: RawSubscription | None = None

    async def __aenter__(self) -> AckedPublisher:
        self._subscription = await self._client.subscribe_raw(self._inbox.decode() + "*", self._on_ack)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            await self.wait_for_acks()
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def publish(
        self, subject: bytes, payload: bytes, headers: bytes | None = None, *, build_frame: Frame = frame
    ) -> int:
        """Send one message when there is room; return its number. Raises the errors of `build_frame` (ValueError)."""
        number = self.published.sent
        data = build_frame(subject, payload, headers, self._inbox + b"%d" % number)
        while len(self._in_flight) >= self._window:
            await self._wait_for_ack()
        await self._send(data)
        self._in_flight.add(number)
        self.published.sent += 1
        self.published.bytes += len(payload) + len(headers or b"")
        self._queued += len(data)
        if self._queued >= FLUSH_BYTES:
            await self.flush()
        return number

    async def flush(self) -> None:
        """Write the queued bytes to the socket. Raises Unavailable if the connection stays lost."""
        self._queued = 0
        try:
            await self._client.flush_writes()
        except Unavailable:
            await self._wait_for_reconnect()

    async def wait_for_acks(self) -> PublishCounts:
        await self.flush()
        while self._in_flight:
            await self._wait_for_ack()
        return self.published

    async def _send(self, data: bytes) -> None:
        try:
            self._client.send(data)
        except Unavailable:
            await self._wait_for_reconnect()
            self._client.send(data)

    async def _wait_for_reconnect(self) -> None:
        """Count the messages in flight as unknown, and wait for the connection. Raises Unavailable if it stays lost."""
        self._mark_unknown()
        if not await self._client.wait_up(ACK_TIMEOUT_S):
            raise Unavailable(f"the NATS connection was lost and not restored within {ACK_TIMEOUT_S:g} s")

    async def _wait_for_ack(self) -> None:
        await self.flush()
        self._progress.clear()
        if self._in_flight and not await wait_for(self._progress, ACK_TIMEOUT_S):
            self._mark_unknown()

    def _mark_unknown(self) -> None:
        self.published.unknown += len(self._in_flight)
        self._in_flight.clear()

    def _on_ack(self, subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        number = int(subject[len(self._inbox) :])
        if number not in self._in_flight:  # already counted as unknown
            return
        self._in_flight.remove(number)
        self._progress.set()
        ack = json.loads(payload) if payload else {}
        if "error" in ack:
            self.published.refused[ack["error"].get("description", "without a reason")] += 1
        elif "seq" not in ack:
            self.published.refused["no stream has this subject"] += 1
        elif ack.get("duplicate"):
            self.published.duplicates += 1
        else:
            self.published.stored += 1
            if self._on_stored:
                self._on_stored(number, ack["seq"])
