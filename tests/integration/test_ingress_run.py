"""Ingress as a service over a real server: what is archived arrives, once, in order, as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.chain import Chain
from tests.ingress_world import CHAIN, Archive, Centre, check_exact, client_of, rows_of

pytestmark = pytest.mark.servers


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "store")


async def test_segments_of_several_chains_arrive_once_and_in_order(
    tmp_path: Path, archive: Archive, nats_url: str
) -> None:
    other = Chain("eu-west", "NODES")
    for first in (1, 501, 1001):
        archive.put(rows_of(first, first + 499))
        archive.put(rows_of(first, first + 499, other), chain=other)
    centre = Centre(tmp_path, archive, nats_url)

    async with client_of(nats_url) as client, centre.running():
        messages = await centre.carried(client, 3000)

    check_exact(messages, archive, centre.prefix)
