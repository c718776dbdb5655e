"""Servers shared by a whole test run. Tests use unique stream and bucket names, so they never meet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

# A developer's credentials or proxies must neither help nor hurt a test.
for _name in [n for n in os.environ if n.startswith(("AWS_", "NATS_", "FLOE_")) and n != "FLOE_SEED"]:
    del os.environ[_name]
for _name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
    os.environ.pop(_name, None)


@dataclass(frozen=True)
class S3:
    """The shared S3 server."""

    endpoint_url: str
    access_key: str
    secret_key: str
    server: object

    def new_bucket(self) -> str:
        from tests.support import unique

        name = unique("t").replace("_", "-")
        self.server.create_bucket(name)
        return name


@pytest.fixture(scope="session")
def nats_server() -> Iterator[object]:
    from infra.local.nats import NatsServer

    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def nats_url(nats_server: object) -> str:
    return nats_server.url


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    from infra.local.seaweedfs import SeaweedFS

    with SeaweedFS() as server:
        yield S3(server.endpoint_url, server.access_key, server.secret_key, server)
