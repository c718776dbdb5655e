"""Finds advisories in a stream, whoever wrote them and under whatever subjects, and shows them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime

from common.clock import NS_PER_S, Clock
from common.errors import FloeError, Unavailable
from common.jetstream.api import parse_time, stream_info
from common.jetstream.client import FloeClient
from common.jetstream.pull import From, scan
from common.service.text import escaped
from common.settings.units import format_duration
from egress.advisories.advisory import Document, parse

CODE = "E-STREAM"
PAUSE = 1.0  # seconds until a connection that was lost is tried again


def line_of(document: Document) -> str:
    """One line for people; times are UTC. Raises ValueError for a time that no calendar has."""
    try:
        at = datetime.fromtimestamp(document.timestamp, UTC)
    except (OverflowError, OSError, ValueError):
        raise ValueError(f"timestamp {document.timestamp}: expected seconds since 1970") from None
    ago = format_duration(max(0, document.timestamp - document.seen))
    words = f"{document.event:>7} {document.value} seen {ago} earlier on {document.replicator}"
    return escaped(f"[{at:%Y-%m-%d %H:%M:%S}] {words}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is looked for: advisories of `value` (None: of all) stored in the last `since` seconds.

    `follow`: and those that come.
    """

    stream: str
    value: str | None
    since: float
    follow: bool


class Search:
    """One search; `foreign` counts the messages that were no advisories."""

    def __init__(self, client: FloeClient, clock: Clock, wanted: Wanted, warn: Callable[[str], None]) -> None:
        self._client, self._clock, self._wanted, self._warn = client, clock, wanted, warn
        self._next = 0
        self.foreign = 0

    async def documents(self) -> AsyncGenerator[Document]:
        """What is found, in the stream's order; without an end where it follows, through lost connections."""
        start, last = await self._range()
        while True:
            try:
                async with aclosing(self._read(start, None if self._wanted.follow else last)) as found:
                    async for document in found:
                        yield document
                return
            except Unavailable as error:
                if not self._wanted.follow:
                    raise
                self._warn(error.message)
            await self._clock.sleep(PAUSE)
            start = From(sequence=self._next) if self._next else start

    async def _range(self) -> tuple[From, int]:
        """Where to begin, and the last sequence there is."""
        stream = self._wanted.stream
        info = await stream_info(self._client, stream)
        if info is None:
            raise FloeError(
                f"stream {stream}: expected one on this server, found none",
                hint="nats stream ls names those there are; --nats takes the connection of the other role",
                code=CODE,
            )
        now_ns = parse_time(info.time) if info.time else int(self._clock.now() * NS_PER_S)
        return From(time_ns=now_ns - int(self._wanted.since * NS_PER_S)), info.last_sequence

    async def _read(self, start: From, until: int | None) -> AsyncGenerator[Document]:
        async with aclosing(scan(self._client, self._wanted.stream, start, until=until)) as pieces:
            async for piece in pieces:
                for message in piece:
                    self._next = message.sequence + 1
                    document = self._document(message.payload)
                    if document is not None and self._wanted.value in (None, document.value):
                        yield document

    def _document(self, payload: bytes) -> Document | None:
        document = parse(payload)
        try:
            if document is not None:
                line_of(document)
                return document
        except ValueError:
            pass
        self.foreign += 1
        return None
