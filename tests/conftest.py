"""Servers shared by a whole test run. Tests use unique stream and bucket names, so they never meet."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from common.service import logs
from infra.local.nats import NatsServer
from infra.local.seaweedfs import SeaweedFS
from tests.support import SharedS3

# A developer's credentials or proxies must neither help nor hurt a test.
_KEPT = ("FLOE_SEED", "FLOE_NATS_SERVER_")  # the seed of a run, older servers
for _name in [n for n in os.environ if n.startswith(("AWS_", "NATS_", "FLOE_")) and not n.startswith(_KEPT)]:
    del os.environ[_name]
for _name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that a test runs in its own process sets the level of logs for all tests behind it."""
    level, root = logs._level, logging.getLogger().level
    yield
    if logs._level != level:
        logs._level = level
        logging.getLogger().setLevel(root)
        for name in logs._names:
            logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture(scope="session")
def s3() -> Iterator[SharedS3]:
    with SeaweedFS() as server:
        yield SharedS3(server)
