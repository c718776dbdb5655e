"""Ingress as processes that are killed, paused and doubled; the target is checked message by message."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.chain import Chain
from common.jetstream.api import create_stream, stream_info
from common.jetstream.client import FloeClient
from tests.scenarios.processes import Service
from tests.support.basics import PATIENCE, at_length, seeded, soon, unique
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


@pytest.mark.parametrize("publisher", ["fast", at_length("atomic"), at_length("single")])
async def test_a_process_killed_between_any_two_steps_is_taken_over_exactly(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str, processes: Processes, publisher: str
) -> None:
    centre = Centre(tmp_path, archive, nats_url, publisher=publisher)
    for step in ("after_intent", "mid_batch", "after_commit", "before_close", "after_close"):
        killed = processes.start(alone(centre), f"ingress.{step}=kill")
        await soon(lambda process=killed: dead(process))

    last = processes.start(alone(centre))
    await finished(centre, archive, client)
    assert await asyncio.to_thread(last.drain) == 0


@pytest.mark.soak
@pytest.mark.parametrize("publisher", ["fast", "atomic", "single"])
async def test_a_process_paused_in_the_middle_of_a_batch_wakes_up_too_late_for_harm(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str, processes: Processes, publisher: str
) -> None:
    centre = Centre(tmp_path, archive, nats_url, publisher=publisher)
    paused = processes.start(centre.write(lease_ttl="1s"), "ingress.mid_batch=stop@2")
    await soon(lambda: stopped(paused))
    processes.start(centre.write(lease_ttl="1s"))
    await more_than(client, centre, 2 * ROWS // 3)
    paused.send(signal.SIGCONT)
    await finished(centre, archive, client)
    for service in processes.services:
        assert await asyncio.to_thread(service.drain) == 0, service.tail()


def stopped(service: Service) -> bool:
    """Whether the process is stopped by a signal."""
    return Path(f"/proc/{service.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.soak
async def test_kills_at_random_moments_lose_and_repeat_nothing(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str, processes: Processes
) -> None:
    rng = seeded()
    centre = Centre(tmp_path, archive, nats_url, publisher="single")
    before = 0
    for _ in range(3):
        service = processes.start(alone(centre))
        before = await more_than(client, centre, before)
        await asyncio.sleep(rng.uniform(0, 0.3))
        service.kill()
    service = processes.start(alone(centre))
    await finished(centre, archive, client)
    assert await asyncio.to_thread(service.drain) == 0


async def more_than(client: FloeClient, centre: Centre, before: int) -> int:
    """The target's last sequence once it has moved, or is complete."""

    async def moved() -> int:
        info = await stream_info(client, centre.target)
        last = info.last_sequence if info else 0
        return last if last > before or last == 2 * ROWS else 0

    return await soon(moved)


@pytest.mark.soak
@pytest.mark.parametrize("publisher", ["fast", "atomic", "single"])
async def test_two_instances_that_know_nothing_of_each_other_waste_work_only(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str, processes: Processes, publisher: str
) -> None:
    """Each has a lease bucket of its own, so both believe that the target is theirs."""
    rng = seeded()
    centre = Centre(tmp_path, archive, nats_url, publisher=publisher)
    configs = [alone(centre) for _ in range(2)]
    twins = [processes.start(config) for config in configs]
    for _ in range(3):
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        for twin in twins:
            twin.start()  # again, where it gave way with exit code 4
    await finished(centre, archive, client)
    for twin in twins:
        assert await asyncio.to_thread(twin.drain) in (0, 4), twin.tail()


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
