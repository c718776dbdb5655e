"""Looking at the target: how far it is, and what its last message says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from common.jetstream.client import FloeClient
from common.jetstream.headers import restore
from common.jetstream.requests import ApiError
from common.jetstream.streams import (
    MESSAGE_NOT_FOUND,
    STREAM_NOT_FOUND,
    ask,
    stored_message,
    stream_info,
)
from ingress.verdicts.verdict import Origin, Reading, Unread

PARALLEL = 32  # messages that are asked for at the same time


class Target:
    """The target stream as one client sees it; `connect` makes a client for verdicts that need a
    fresh look.
    """

    def __init__(self, client: FloeClient, stream: str, connect: Callable[[], Awaitable[FloeClient]]) -> None:
        self._client, self._stream, self._connect = client, stream, connect

    async def read(self) -> Reading | None:
        """What the target says now; None if there is no such stream. Raises Unavailable, OutcomeUnknown."""
        return await read(self._client, self._stream)

    async def read_fresh(self) -> Reading | None:
        """The same over a connection of its own, which a deposed leader's old one cannot be."""
        client = await self._connect()
        try:
            return await read(client, self._stream)
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


async def read(client: FloeClient, stream: str) -> Reading | None:
    """One look at the stream, over `client`."""
    info = await stream_info(client, stream)
    if info is None:
        return None
    return Reading(info.last_sequence, info.created, await _tail(client, stream, info.last_sequence))


async def _tail(client: FloeClient, stream: str, sequence: int) -> Origin | Unread:
    if sequence == 0:
        return Unread.GONE
    try:
        # Only the header block counts, so that the answer's JSON, which cannot carry every subject, does.
        message = stored_message(await ask(client, f"STREAM.MSG.GET.{stream}", {"seq": sequence}))
    except ApiError as error:
        if error.err_code not in (MESSAGE_NOT_FOUND, STREAM_NOT_FOUND):
            raise
        return Unread.GONE
    return origin_of(message.headers)


def origin_of(headers: bytes | None) -> Origin | Unread:
    """Where a message with this header block says it comes from."""
    provenance, _ = restore(headers)
    try:
        return Unread.FOREIGN if provenance is None else Origin(provenance.chain, provenance.sequence)
    except ValueError:
        return Unread.FOREIGN
