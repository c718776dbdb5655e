"""A hub and a leaf, each with a JetStream domain of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infra.local.nats import NatsServer
from infra.local.process import free_port


@contextmanager
def hub_and_leaf(users: Callable[[NatsServer], str] | None = None) -> Iterator[tuple[NatsServer, NatsServer]]:
    """Run two servers joined by a leaf node connection; their domains have the names of the servers.

    `users`: of the hub, as lines of its configuration, `all` with the password `secret` among them.
    """
    port = free_port()
    hub, leaf = NatsServer(name="hub"), NatsServer(name="leaf")
    hub.extra = f'leafnodes {{ listen: "127.0.0.1:{port}" }}\n{_domain(hub)}'
    if users is not None:
        hub.extra += f"\n{users(hub)}"
    login = "" if users is None else "all:secret@"
    leaf.extra = f'leafnodes {{ remotes: [{{ url: "nats-leaf://{login}127.0.0.1:{port}" }}] }}\n{_domain(leaf)}'
    with hub, leaf:
        yield hub, leaf


def _domain(server: NatsServer) -> str:
    return f'jetstream {{ store_dir: "{server.store}", domain: {server.name} }}'
