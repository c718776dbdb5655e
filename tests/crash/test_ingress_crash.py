"""Ingress as processes that are killed, paused and doubled; the target is checked message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.chain import Chain
from common.jetstream.api import create_stream, stream_info
from common.jetstream.client import FloeClient
from tests.scenarios.processes import Service
from tests.support.basics import PATIENCE, soon, unique
from tests.support.ingress import Archive, Centre, check_exact, rows_of

pytestmark = pytest.mark.servers
CHAINS = [Chain("us-east", "NODES"), Chain("eu-west", "NODES")]
ROWS = 1500


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "store")
    for first in range(1, ROWS, 500):
        for chain in CHAINS:
            archive.put(rows_of(first, first + 499, chain), chain=chain)
    return archive


class Processes:
    """Services of one test, all ended with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.services: list[Service] = []

    def start(self, config: Path, failpoints: str = "") -> Service:
        env = {"FLOE_FAILPOINTS": failpoints} if failpoints else {}
        service = Service(self._folder, unique("ingress"), "ingress", "run", "-c", str(config), env=env).start()
        self.services.append(service)
        return service


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    for service in started.services:
        service.kill()
        print(service.tail(15))


async def finished(centre: Centre, archive: Archive, client: FloeClient, seconds: float = PATIENCE) -> None:
    """Everything is there, exactly once; and stays so."""
    count = sum(len(rows) for rows in archive.rows.values())
    await centre.carried(client, count, seconds)
    await asyncio.sleep(0.5)
    check_exact(await centre.carried(client, count), archive, centre.prefix)


def dead(service: Service) -> bool:
    return not service.runs()


def alone(centre: Centre, **ingress: Any) -> Path:
    """A configuration with a lease bucket of its own: nobody waits for the lease of a dead process."""
    return centre.write(lease_bucket=unique("L"), memory_limit="16M", **ingress)


async def test_a_process_killed_between_any_two_steps_is_taken_over_exactly(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str, processes: Processes
) -> None:
    centre = Centre(tmp_path, archive, nats_url, publisher="fast")
    for step in ("after_intent", "mid_batch", "after_commit", "before_close", "after_close"):
        killed = processes.start(alone(centre), f"ingress.{step}=kill")
        await soon(lambda process=killed: dead(process))

    last = processes.start(alone(centre))
    await finished(centre, archive, client)
    assert await asyncio.to_thread(last.drain) == 0


async def more_than(client: FloeClient, centre: Centre, before: int) -> int:
    """The target's last sequence once it has moved, or is complete."""

    async def moved() -> int:
        info = await stream_info(client, centre.target)
        last = info.last_sequence if info else 0
        return last if last > before or last == 2 * ROWS else 0

    return await soon(moved)


async def test_a_target_that_forgets_gets_each_message_once_through_kills(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str, processes: Processes
) -> None:
    """Nothing of the target can be read back: it keeps ten messages. A mirror remembers what it saw."""
    centre = Centre(tmp_path, archive, nats_url, create=None)
    target = {"name": centre.target, "subjects": [f"{centre.target}.>"], "allow_atomic": True}
    await create_stream(client, {**target, "retention": "workqueue", "max_msgs": 2 * ROWS})
    memory = f"{centre.target}_MEMORY"
    await create_stream(client, {"name": memory, "sources": [{"name": centre.target}]})
    for failpoint in ("ingress.after_commit=kill", "ingress.mid_batch=kill@2"):
        killed = processes.start(alone(centre), failpoint)
        await soon(lambda process=killed: dead(process))
    processes.start(alone(centre))
    centre.target = memory
    count = sum(len(rows) for rows in archive.rows.values())
    found = await centre.carried(client, count)

    for chain, rows in archive.rows.items():
        assert [m.message.sequence for m in found if m.chain == chain] == [row.sequence for row in rows]


async def test_sigterm_finishes_what_is_open_and_leaves_the_lease_to_the_next(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str, processes: Processes
) -> None:
    centre = Centre(tmp_path, archive, nats_url, publisher="single")
    service = processes.start(centre.write(lease_ttl="5m"))
    await more_than(client, centre, 0)
    assert await asyncio.to_thread(service.drain) == 0
    stored = (await (await centre.state(client)).load()).state
    assert stored is not None
    assert stored.intent is None
    info = await stream_info(client, centre.target)
    assert info is not None
    assert info.last_sequence == stored.checkpoint.target_sequence

    processes.start(centre.write(lease_ttl="5m"))
    await finished(centre, archive, client)
