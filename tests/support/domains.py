"""A hub and a leaf, each with a JetStream domain of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infra.local.nats import NatsServer
from infra.local.process import free_port


@contextmanager
def hub_and_leaf() -> Iterator[tuple[NatsServer, NatsServer]]:
    """Two servers joined by a leaf node connection; their domains are called as they are."""
    port = free_port()
    hub, leaf = NatsServer(name="hub"), NatsServer(name="leaf")
    hub.extra = f'leafnodes {{ listen: "127.0.0.1:{port}" }}\n{_domain(hub)}'
    leaf.extra = f'leafnodes {{ remotes: [{{ url: "nats-leaf://127.0.0.1:{port}" }}] }}\n{_domain(leaf)}'
    with hub, leaf:
        yield hub, leaf


def _domain(server: NatsServer) -> str:
    return f'jetstream {{ store_dir: "{server.store}", domain: {server.name} }}'
