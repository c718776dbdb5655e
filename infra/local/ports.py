"""Free TCP ports on loopback, for local servers."""

from __future__ import annotations

import secrets
import socket

# Below the range that Linux hands to outgoing connections (32768 and up): a server keeps its port over
# restarts, and would else find it taken by a client of some other server.
_LOWEST, _HIGHEST = 10_240, 22_500
PAIR_DISTANCE = 10_000
_TRIES = 1000


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on. Raises OSError where none is found."""
    return free_ports(1)[0]


def free_ports(count: int, *, paired: bool = False) -> list[int]:
    """`count` different free ports; with `paired`, `port + 10_000` of each is free too. Raises OSError."""
    found: list[int] = []
    for _ in range(_TRIES):
        port = _LOWEST + secrets.randbelow(_HIGHEST - _LOWEST)
        if port not in found and is_free(port) and (not paired or is_free(port + PAIR_DISTANCE)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"expected {count} free ports in {_LOWEST}..{_HIGHEST}, found {len(found)}")


def is_free(port: int) -> bool:
    """Whether a server could bind `port` on 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
