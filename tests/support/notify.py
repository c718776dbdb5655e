"""A service manager's side of sd_notify: a real datagram socket, and its received datagrams with their process."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from tests.support.basics import eventually

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class Notification:
    """One datagram: its lines, and its sender's process by the kernel."""

    lines: tuple[str, ...]
    pid: int


class ServiceManager:
    """A listener on `address`: a path, or an abstract name that begins with `@`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.received: list[Notification] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)

    def __enter__(self) -> ServiceManager:
        self._socket.bind(self.address.replace("@", "\0", 1))
        if self.address.startswith("/"):
            os.chmod(self.address, 0o777)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def read(self) -> list[Notification]:
        """Return all datagrams that have come in, oldest first."""
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(65536, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return self.received
            [(_, _, credentials)] = ancillary
            pid, _, _ = _CREDENTIALS.unpack(credentials)
            self.received.append(Notification(tuple(data.decode().split("\n")), pid))

    def lines(self) -> list[str]:
        """Return the lines of all that has come in."""
        return [line for each in self.read() for line in each.lines]

    def wait(self, line: str, times: int = 1) -> None:
        """Wait until `line` has come in so many times."""
        eventually(lambda: self.lines().count(line) >= times)

    def forget(self) -> None:
        """Drop the datagrams that have come in so far."""
        self.read()
        self.received.clear()
