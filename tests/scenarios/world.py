"""A small world for fault runs: sites, a bucket, a centre, and Floe's services between them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from infra.local.nats import NatsServer
from tests.scenarios.processes import Service

TARGET = "FLEET"
LEASE_TTL = "2s"


class World:
    """Site servers by name, a central server and one bucket on the given S3 server, all on loopback.

    `segment`: the limits of open segments, short so that a short run sees many segments.
    """

    def __init__(self, s3: Any, *sites: str, segment: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="floe-world-"))
        self.s3, self.bucket = s3, s3.new_bucket()
        self.sites = {site: NatsServer(self.folder / f"nats-{site}", name=site) for site in sites}
        # Messages grow by their provenance, so the centre takes larger ones than the sites.
        self.central = NatsServer(self.folder / "nats-central", name="central", max_payload=2 * 1024 * 1024)
        self.segment = dict(segment or {"max_age": "1s", "max_messages": 2000})
        self.services: list[Service] = []

    def __enter__(self) -> World:
        for server in (*self.sites.values(), self.central):
            server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in self.services:
            service.kill()
        for server in (*self.sites.values(), self.central):
            server.close()
        if error is not None:
            self.print_tails()
        shutil.rmtree(self.folder, ignore_errors=True)

    def print_tails(self) -> None:
        """The ends of the services' logs, for whoever reads why a run failed."""
        print("\n".join(service.tail() for service in self.services))

    def store(self, bucket: str | None = None) -> dict[str, Any]:
        """The `store` part of a configuration."""
        return {
            "url": f"s3://{bucket or self.bucket}",
            "endpoint_url": self.s3.endpoint_url,
            "access_key_id": self.s3.access_key,
            "secret_access_key": self.s3.secret_key,
        }

    def write(self, name: str, document: Mapping[str, Any]) -> Path:
        """A configuration file."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(dict(document), sort_keys=False))
        path.chmod(0o600)
        return path

    def site_config(self, site: str, *feeds: Mapping[str, Any], lease_bucket: str = "FLOE_LEASES") -> Path:
        """The configuration of one site's egress; without feeds the stream NODES."""
        return self.write(
            f"{site}-{lease_bucket}",
            {
                "site": site,
                "nats": {"url": self.sites[site].url},
                "store": self.store(),
                "egress": {
                    "monitor": {"listen": ""},
                    "lease_ttl": LEASE_TTL,
                    "lease_bucket": lease_bucket,
                    "defaults": {"segment": self.segment},
                    "feeds": [dict(feed) for feed in feeds] or [{"stream": "NODES"}],
                },
            },
        )

    def central_config(
        self,
        *,
        feeds: tuple[str, ...] = ("NODES",),
        lease_bucket: str = "FLOE_LEASES",
        bucket: str | None = None,
        target: str = TARGET,
        publisher: str = "auto",
        compaction: Mapping[str, Any] | None = None,
    ) -> Path:
        """The configuration of the centre's ingress and compaction; all sites flow into one target."""
        return self.write(
            f"central-{lease_bucket}-{bucket or self.bucket}",
            {
                "nats": {"url": self.central.url},
                "store": self.store(bucket),
                "ingress": {
                    "monitor": {"listen": ""},
                    "lease_ttl": LEASE_TTL,
                    "lease_bucket": lease_bucket,
                    "poll_interval": "1s",
                    "targets": [
                        {
                            "stream": target,
                            "publisher": publisher,
                            "create": {"replicas": 1, "storage": "file", "subjects": ["fleet.>"]},
                            "sources": [{"site": list(self.sites), "feed": list(feeds), "subject_prefix": "fleet"}],
                        }
                    ],
                },
                "compaction": dict(compaction or {}),
            },
        )

    def egress(self, config: Path, name: str = "egress", **env: str) -> Service:
        """An egress process, started."""
        return self._service(name, "egress", "run", "-c", str(config), env=env)

    def ingress(self, config: Path, name: str = "ingress", **env: str) -> Service:
        """An ingress process, started."""
        return self._service(name, "ingress", "run", "-c", str(config), env=env)

    def _service(self, name: str, *command: str, env: dict[str, str]) -> Service:
        service = Service(self.folder, name, *command, env=env).start()
        self.services.append(service)
        return service
