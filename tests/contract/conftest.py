"""Fixtures for the contract of the publishers; a file with servers of its own has its own client."""

import pytest

from common.nats.client import FloeClient
from ingress.publishers.batches import PUBLISHERS
from tests.support.publishers import new_stream


@pytest.fixture(params=list(PUBLISHERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def stream(client: FloeClient) -> str:
    return await new_stream(client)
