"""A small world for fault runs: sites, a bucket, a centre, and Floe's services between them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from infra.local.nats import NatsServer
from tests.scenarios.processes import Service

TARGET = "FLEET"
SERVICE = {"monitor": {"listen": ""}, "lease_ttl": "2s"}


class World:
    """Site servers by name, a central server and one store, all on loopback.

    `segment`: the limits of open segments, short so that a short run sees many segments.
    """

    def __init__(self, store: Mapping[str, str], *sites: str, segment: Mapping[str, Any] | None = None) -> None:
        self.folder, self.store = Path(tempfile.mkdtemp(prefix="floe-world-")), store
        self.sites = {site: NatsServer(self.folder / f"nats-{site}", name=site) for site in sites}
        # Messages grow by their provenance, so the centre takes larger ones than the sites.
        self.central = NatsServer(self.folder / "nats-central", name="central", max_payload=2 * 1024 * 1024)
        self.segment = dict(segment or {"max_age": "1s", "max_messages": 2000})
        self.services: list[Service] = []

    def __enter__(self) -> World:
        for server in (*self.sites.values(), self.central):
            server.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for service in self.services:
            service.kill()
        for server in (*self.sites.values(), self.central):
            server.close()
        if error is not None:
            print("\n".join(service.tail() for service in self.services))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, name: str, url: str, **sections: Any) -> Path:
        """Write a configuration file."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"nats": {"url": url}, "store": dict(self.store), **sections}))
        path.chmod(0o600)
        return path

    def site_config(self, site: str, *feeds: Mapping[str, Any], **more: Any) -> Path:
        """Write the configuration of one site's egress; without feeds the stream NODES. `more`: keys of `egress`."""
        entries = [dict(feed) for feed in feeds] or [{"stream": "NODES"}]
        egress = {**SERVICE, "defaults": {"segment": self.segment}, "feeds": entries, **more}
        return self._write(site, self.sites[site].url, site=site, egress=egress)

    def central_config(self, *, feeds: Sequence[str] = ("NODES",), **more: Any) -> Path:
        """Write the configuration of the centre, with all sites in one target. `more`: keys of `ingress`."""
        target = {
            "stream": TARGET,
            "create": {"replicas": 1, "storage": "file", "subjects": ["fleet.>"]},
            "sources": [{"site": list(self.sites), "feed": list(feeds), "subject_prefix": "fleet"}],
        }
        ingress = {**SERVICE, "poll_interval": "1s", "targets": [target], **more}
        return self._write("central", self.central.url, ingress=ingress)

    def egress(self, config: Path, name: str = "egress", **env: str) -> Service:
        """Start an egress process."""
        return self._service(name, "egress", config, env)

    def ingress(self, config: Path, name: str = "ingress") -> Service:
        """Start an ingress process."""
        return self._service(name, "ingress", config, {})

    def _service(self, name: str, role: str, config: Path, env: dict[str, str]) -> Service:
        service = Service(self.folder, name, role, "run", "-c", str(config), env=env).start()
        self.services.append(service)
        return service
