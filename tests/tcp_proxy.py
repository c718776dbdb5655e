"""A TCP proxy on loopback that breaks connections in the ways networks do.

It runs in the event loop of the test. Faults act on the connections that are open and on those that come.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field

from infra.local.process import free_port

CHUNK = 65536
BOTH = ("up", "down")


@dataclass
class _Pair:
    """One client connection and its connection to the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class TcpProxy:
    """`async with TcpProxy(port) as proxy:` listens on `proxy.port`; "up" is towards the server, "down" back.

    `blackhole` swallows the bytes of a direction while connections stay open; `delay` holds each chunk back
    for that many seconds; `cut_after` resets a connection once so many bytes went in a direction (0: off);
    `lose` resets a connection instead of passing on a chunk that matches.
    """

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self.accepted = 0
        self.passed = {"up": 0, "down": 0}
        self.delay = 0.0
        self._target = target_port
        self._blackhole: set[str] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._cut_after = {"up": 0, "down": 0}
        self._loses: re.Pattern[bytes] | None = None
        self._lost = asyncio.Event()
        self._pairs: list[_Pair] = []
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def __aenter__(self) -> TcpProxy:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    async def listen(self) -> None:
        """Accept connections (again)."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=CHUNK)

    async def refuse(self) -> None:
        """Reset what is open and accept no connection until `listen`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()
        await asyncio.sleep(0)

    def blackhole(self, *directions: str) -> None:
        """Swallow what comes in these directions (both, if none is named) until `heal`."""
        self._blackhole.update(directions or BOTH)

    def stall(self) -> None:
        """Read nothing any more, so that the writers' buffers fill, until `heal`."""
        self._flowing.clear()

    def cut_after(self, direction: str, size: int) -> None:
        """Reset the connections when `size` more bytes went in `direction`; the bytes up to there arrive."""
        self._cut_after[direction] = self.passed[direction] + size

    def lose(self, pattern: re.Pattern[bytes]) -> asyncio.Event:
        """The next chunk from the server that matches is lost and its connection reset; set when it was."""
        self._loses, self._lost = pattern, asyncio.Event()
        return self._lost

    def lose_nothing(self) -> None:
        """Pass on what `lose` was waiting for."""
        self._loses = None

    def heal(self) -> None:
        """No faults any more; connections that were made to swallow or to stall are reset."""
        swallowed = bool(self._blackhole) or not self._flowing.is_set()
        self._flowing.set()
        self._blackhole.clear()
        self._cut_after = {"up": 0, "down": 0}
        self.delay, self._loses = 0.0, None
        if swallowed:
            self.cut()

    def cut(self) -> None:
        """Reset (RST) every open connection, at both ends."""
        for pair in self._pairs:
            for task in pair.tasks:
                task.cancel()
            for writer in (pair.client, pair.server):
                _reset(writer)
        self._pairs.clear()

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self._target, limit=CHUNK)
        except OSError:
            _reset(client)
            return
        pair = _Pair(client, server)
        self._pairs.append(pair)
        pair.tasks = [
            asyncio.create_task(self._pump(reader, server, "up", pair)),
            asyncio.create_task(self._pump(answers, client, "down", pair)),
        ]

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: str, pair: _Pair
    ) -> None:
        with suppress(OSError):
            while data := await source.read(CHUNK):
                await self._flowing.wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                if direction in self._blackhole:
                    continue
                if direction == "down" and self._loses and self._loses.search(data):
                    self._loses = None
                    self._lost.set()
                    break
                limit = self._cut_after[direction]
                if limit and self.passed[direction] + len(data) >= limit:
                    self._cut_after[direction] = 0
                    await self._pass(sink, direction, data[: limit - self.passed[direction]])
                    await asyncio.sleep(0.02)  # what was passed on arrives before the reset
                    break
                await self._pass(sink, direction, data)
        if direction not in self._blackhole:
            self._drop(pair)

    async def _pass(self, sink: asyncio.StreamWriter, direction: str, data: bytes) -> None:
        self.passed[direction] += len(data)
        sink.write(data)
        await sink.drain()

    def _drop(self, pair: _Pair) -> None:
        if pair in self._pairs:
            self._pairs.remove(pair)
        for task in pair.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for writer in (pair.client, pair.server):
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a crashed host or an impatient firewall does."""
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
