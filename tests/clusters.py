"""A cluster that tests may put streams into."""

from __future__ import annotations

import json
import shutil
import socket
import time
from typing import TYPE_CHECKING, Any

from tests.support import PATIENCE

if TYPE_CHECKING:
    from infra.local.nats import NatsCluster, NatsServer


SETTLED = 10.0  # seconds after which a group that is too small stays so


def placing(cluster: NatsCluster) -> NatsCluster:
    """The cluster, once a stream can have a replica on every member.

    A member can be healthy while the leader has not yet heard that it serves JetStream; streams are then
    refused with "no suitable peers". An older server can also leave a member out of the group for good where
    all start at once on a busy machine; such a cluster begins anew. Nothing but a creation tells.
    """
    deadline = time.monotonic() + PATIENCE
    while answer := _refusal(cluster):
        assert time.monotonic() < deadline, f"the cluster places no stream: {answer}"
        for server in cluster.servers:
            server.kill()
            shutil.rmtree(server.store, ignore_errors=True)
        cluster.start()
    _ask(cluster.servers[0], "STREAM.DELETE._READY", {})
    return cluster


def _refusal(cluster: NatsCluster) -> dict[str, Any] | None:
    """Why the cluster places no stream, after a while; None once it has placed one."""
    config = {"name": "_READY", "storage": "memory", "num_replicas": len(cluster.servers)}
    settled = time.monotonic() + SETTLED
    while "error" in (answer := _ask(cluster.servers[0], "STREAM.CREATE._READY", config)):
        if time.monotonic() > settled:
            return answer
        time.sleep(0.1)
    return None


def _ask(server: NatsServer, request: str, document: dict[str, Any]) -> dict[str, Any]:
    """What the JetStream API answers one request, on a connection of its own."""
    body = json.dumps(document).encode()
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as link, link.makefile("rwb") as io:
        io.write(b'CONNECT {"verbose":false,"headers":false}\r\nSUB _INBOX.ask 1\r\n')
        io.write(b"PUB $JS.API.%s _INBOX.ask %d\r\n%s\r\n" % (request.encode(), len(body), body))
        io.flush()
        for line in io:
            if line.startswith(b"MSG "):
                return dict(json.loads(io.read(int(line.split()[-1]))))
            if line.startswith(b"PING"):
                io.write(b"PONG\r\n")
                io.flush()
    raise AssertionError(f"{server.name} closed the connection before it answered {request}")
