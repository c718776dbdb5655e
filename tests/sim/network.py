"""Connections between processes and servers: ordered and reliable until they are cut, swallowed or abandoned."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Protocol

from tests.sim.world import Process, World

NEAREST, FARTHEST = 0.00005, 0.0015  # seconds on the way
HICCUP, LONGEST_HICCUP = 0.002, 0.2  # chance that a packet is late, and the most seconds


class Listener(Protocol):
    """A server that accepts connections."""

    is_up: bool

    def accept(self, link: Link) -> None:
        """Accept a new connection."""

    def received(self, link: Link, data: bytes) -> None:
        """Take bytes from the client."""

    def lost(self, link: Link) -> None:
        """Take note of the end of a connection."""


class Link:
    """One TCP connection of a process. Bytes under way at a cut of the network are lost. Bytes that the client sent
    before it abandoned the connection, or died, arrive.

    `swallows`: bytes of the server no longer arrive, and nobody notices. `lag`: additional seconds in each direction.
    """

    def __init__(self, world: World, process: Process, protocol: Any, server: Listener, port: int) -> None:
        self.world, self.process, self.protocol, self.server, self.port = world, process, protocol, server, port
        self.transport, self.is_open, self.swallows = SimTransport(self), True, False
        self.is_cut, self.lag = False, 0.0
        self._up_at = self._down_at = 0.0
        self._down: list[bytes] = []
        self._rng = world.chance(f"link/{process.number}/{len(process.links)}")
        process.links.append(self)

    def _arrival(self, last: float) -> float:
        delay = self._rng.uniform(NEAREST, FARTHEST)
        if self._rng.random() < HICCUP:
            delay += self._rng.uniform(0, LONGEST_HICCUP)
        return max(last, self.world.now + delay + self.lag)

    def up(self, data: bytes) -> None:
        """Send to the server."""
        if self.is_open:
            self._up_at = self._arrival(self._up_at)
            sent = self.world.now
            self.world.at(self._up_at - self.world.now, lambda: self._arrive_up(data, sent))

    def _arrive_up(self, data: bytes, sent: float) -> None:
        if not self.is_cut:
            self.world.arriving = self, sent
            self.server.received(self, data)

    def down(self, data: bytes) -> None:
        """Send to the client; all bytes of one step arrive together."""
        if not self.is_open or self.swallows:
            return
        if not self._down:
            self._down_at = self._arrival(self._down_at)
            self.world.at(self._down_at - self.world.now, self._arrive)
        self._down.append(data)

    def _arrive(self) -> None:
        data, self._down = b"".join(self._down), []
        if self.is_open and self.process.alive and not self.swallows:
            self.process.loop.call_soon(self._give, data)

    def _give(self, data: bytes) -> None:
        if not self.transport.has_ended:
            self.protocol.data_received(data)

    def cut(self) -> None:
        """Reset it, as the network or the server does."""
        if self.is_open:
            self.is_open, self.is_cut = False, True
            self.server.lost(self)
            if self.process.alive:
                self.process.loop.call_soon(self.transport.end, ConnectionResetError(104, "reset"))

    def abandon(self) -> None:
        """Close it, as the client does; the server notices after the bytes that were sent before."""
        if self.is_open:
            self.is_open = False
            self.world.at(self._arrival(self._up_at) - self.world.now, self._leave)

    def _leave(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            self.server.lost(self)


class SimTransport(asyncio.Transport):
    """The client's end of a link. `has_ended`: the protocol knows that it is closed."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link, self._is_aborted, self.has_ended = link, False, False

    def write(self, data: Any) -> None:
        self._link.up(bytes(data))

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self._is_aborted or self.has_ended or not self._link.process.alive

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        found = {"peername": ("127.0.0.1", self._link.port), "socket": SimpleNamespace(setsockopt=lambda *_: None)}
        return found.get(name, default)

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._is_aborted = True
        if not self.has_ended:
            self._link.abandon()
            self._link.process.loop.call_soon(self.end, None)

    def end(self, error: Exception | None) -> None:
        """Report the end to the protocol, once."""
        if not self.has_ended:
            self.has_ended = True
            self._link.protocol.connection_lost(error)


class SimServer:
    """A listener in a process of the world, such as the proxy of a test. It accepts connections until `close`; open
    ones stay.
    """

    def __init__(self, process: Process, protocol_factory: Any) -> None:
        self.is_up, self._process, self._new_protocol = True, process, protocol_factory
        self._protocols: dict[Link, Any] = {}

    def close(self) -> None:
        self.is_up = False

    def accept(self, link: Link) -> None:
        self._protocols[link] = protocol = self._new_protocol()
        self._process.loop.call_soon(protocol.connection_made, ServerTransport(link))

    def received(self, link: Link, data: bytes) -> None:
        self._process.loop.call_soon(self._protocols[link].data_received, data)

    def lost(self, link: Link) -> None:
        self._process.loop.call_soon(self._protocols.pop(link).connection_lost, None)


class ServerTransport(SimTransport):
    """The server's end of a link."""

    def write(self, data: Any) -> None:
        self._link.down(bytes(data))

    def abort(self) -> None:
        self._is_aborted = True
        self._link.cut()
