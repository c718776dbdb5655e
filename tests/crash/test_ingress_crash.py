"""Ingress as processes that are killed, paused and doubled; the target is checked message by message."""

import asyncio
from pathlib import Path

import pytest

from common.chain import Chain
from common.nats.api import create_stream, stream_info
from common.nats.client import FloeClient
from tests.support.basics import seeded, soon
from tests.support.ingress import Archive, Centre, check_exact, rows_of

pytestmark = pytest.mark.servers
CHAINS = [Chain("us-east", "NODES"), Chain("eu-west", "NODES")]
ROWS = 1500
KILLS = 2  # at random: simulated worlds kill at each step in every run


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "store")
    for first in range(1, ROWS, 500):
        for chain in CHAINS:
            archive.put(rows_of(first, first + 499, chain), chain=chain)
    return archive


async def finished(centre: Centre, archive: Archive, client: FloeClient) -> None:
    """Check that everything is there exactly once, and stays so."""
    await centre.carried(client, 2 * ROWS)
    await asyncio.sleep(0.5)
    check_exact(await centre.carried(client, 2 * ROWS), archive, centre.prefix)


async def test_a_process_killed_between_any_two_steps_is_taken_over_exactly(client, tmp_path, archive, nats_url, start):
    centre = Centre(tmp_path, archive, nats_url, publisher="fast")
    steps = ("after_intent", "mid_batch", "after_commit", "before_close", "after_close")
    for step in seeded().sample(steps, KILLS):
        killed = start(centre, f"ingress.{step}=kill")
        await soon(lambda process=killed: not process.runs())

    last = start(centre)
    await finished(centre, archive, client)
    assert await asyncio.to_thread(last.drain) == 0


async def test_a_target_that_forgets_gets_each_message_once_through_kills(client, tmp_path, archive, nats_url, start):
    """No message can be read back from the target: another stream sources them from it, and keeps them all."""
    centre = Centre(tmp_path, archive, nats_url, create=None)
    target = {"name": centre.target, "subjects": [f"{centre.target}.>"], "allow_atomic": True}
    await create_stream(client, {**target, "retention": "workqueue", "max_msgs": 2 * ROWS})
    memory = f"{centre.target}_MEMORY"
    await create_stream(client, {"name": memory, "sources": [{"name": centre.target}]})
    for failpoint in ("ingress.after_commit=kill", "ingress.mid_batch=kill@2"):
        killed = start(centre, failpoint)
        await soon(lambda process=killed: not process.runs())
    start(centre)
    centre.target = memory
    found = await centre.carried(client, 2 * ROWS)
    for chain, rows in archive.rows.items():
        assert [m.message.sequence for m in found if m.chain == chain] == [row.sequence for row in rows]


async def test_sigterm_finishes_the_intent_and_leaves_the_lease_to_the_next(client, tmp_path, archive, nats_url, start):
    centre = Centre(tmp_path, archive, nats_url, publisher="single")
    service = start(centre, lease_ttl="5m", shutdown_timeout="2m")  # each row waits for an acknowledgement
    await centre.carried(client, 1)
    assert await asyncio.to_thread(service.drain) == 0
    stored = (await (await centre.state(client)).load()).state
    assert stored.intent is None
    assert (await stream_info(client, centre.target)).last_sequence == stored.checkpoint.target_sequence

    start(centre, lease_ttl="5m")
    await finished(centre, archive, client)
