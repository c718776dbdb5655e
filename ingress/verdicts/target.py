"""Looking at the target: how far it is, and what its last message says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from common.jetstream.api import MESSAGE_NOT_FOUND, STREAM_NOT_FOUND, ask, stored_message, stream_info
from common.jetstream.client import FloeClient
from common.jetstream.headers import restore
from common.jetstream.requests import ApiError
from common.segments.segment import Message, decode_subject
from ingress.verdict.verdict import Origin, Reading, Unread

PARALLEL = 32  # messages that are asked for at the same time


class Target:
    """The target stream as one client sees it; `connect` makes a client for verdicts that need a
    fresh look.
    """

    def __init__(
        self,
        client: FloeClient,
        stream: str,
        connect: Callable[[], Awaitable[FloeClient]],
        control_headers: frozenset[bytes] = frozenset(),
    ) -> None:
        self._client, self._stream, self._connect = client, stream, connect
        self._control_headers = control_headers

    async def read(self) -> Reading | None:
        """What the target says now; None if there is no such stream. Raises Unavailable, OutcomeUnknown."""
        return await read(self._client, self._stream, self._control_headers)

    async def read_fresh(self) -> Reading | None:
        """The same over a connection of its own, which a deposed leader's old one cannot be."""
        client = await self._connect()
        try:
            return await read(client, self._stream, self._control_headers)
        finally:
            await client.aclose()

    async def origins(self, places: Collection[int]) -> dict[int, Origin | Unread]:
        """What the messages at these target sequences say. Raises as `read`."""
        gate = asyncio.Semaphore(PARALLEL)

        async def one(place: int) -> Origin | Unread:
            async with gate:
                return await _tail(self._client, self._stream, place)

        found = await asyncio.gather(*map(one, places))
        return dict(zip(places, found, strict=True))

    async def described(self, place: int) -> str:
        """The message at this target sequence, for people; empty where it is gone. Raises as `read`."""
        message = await _message(self._client, self._stream, place)
        if message is None:
            return ""
        provenance, _ = restore(message.headers)
        at = datetime.fromtimestamp(message.timestamp_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        header = "without" if provenance is None else "with"
        subject = decode_subject(message.subject)
        return f"message {place} has subject {subject!r}, was stored at {at}, {header} a Floe-Source"


async def read(
    client: FloeClient, stream: str, control_headers: frozenset[bytes] = frozenset()
) -> Reading | None:
    """One look at the stream, over `client`. `control_headers`: those that act in it."""
    info = await stream_info(client, stream)
    if info is None:
        return None
    tail = await _tail(client, stream, info.last_sequence)
    lets_go = forgets(info.config, control_headers, client.max_payload)
    return Reading(info.last_sequence, info.created, tail, lets_go)


def forgets(config: Mapping[str, Any], control_headers: frozenset[bytes], largest: int) -> bool:
    """Whether the stream may let go of its last message by itself: it is consumed, it expires, or it is
    larger than all that the stream may hold. Every other limit takes older ones first.

    `largest`: bytes that a message may have.
    """
    is_consumed = config.get("retention", "limits") != "limits"
    expires = int(config.get("max_age") or 0) > 0 or b"nats-ttl" in control_headers
    return is_consumed or expires or 0 < int(config.get("max_bytes") or -1) < largest


async def _tail(client: FloeClient, stream: str, sequence: int) -> Origin | Unread:
    message = await _message(client, stream, sequence) if sequence else None
    return Unread.GONE if message is None else origin_of(message.headers)


async def _message(client: FloeClient, stream: str, sequence: int) -> Message | None:
    """The message of that sequence; None where it is gone. Its subject is for people: the answer's JSON
    cannot carry every one.
    """
    try:
        return stored_message(await ask(client, f"STREAM.MSG.GET.{stream}", {"seq": sequence}))
    except ApiError as error:
        if error.err_code not in (MESSAGE_NOT_FOUND, STREAM_NOT_FOUND):
            raise
        return None


def origin_of(headers: bytes | None) -> Origin | Unread:
    """Where a message with this header block says it comes from."""
    provenance, _ = restore(headers)
    try:
        return Unread.FOREIGN if provenance is None else Origin(provenance.chain, provenance.sequence)
    except ValueError:
        return Unread.FOREIGN
