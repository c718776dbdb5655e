"""Ingress killed at each step of putting messages aside and of delivering them again: each once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.jetstream.client import FloeClient
from common.segments.segment import Message
from ingress.parked import ParkedStore, State
from tests.integration.test_ingress_parked import kept, make, raise_limit, states
from tests.scenarios.processes import Service
from tests.support.basics import seeded, soon, unique
from tests.support.ingress import CHAIN, Archive, Arrived, Centre, arrived, rows_of
from tests.support.segments import message

pytestmark = pytest.mark.servers

PARKING = [
    "ingress.before_park",
    "ingress.after_park",
    "ingress.after_intent",
    "ingress.mid_batch",
    "ingress.before_close",
    "ingress.after_close",
]
DELIVERING = [
    "ingress.after_intent",
    "ingress.mid_batch",
    "ingress.after_commit",
    "ingress.before_close",
    "ingress.before_delivered",
    "ingress.after_close",
]

KILLS = 3  # of each list, at random: a start takes seconds on a busy machine


@pytest.fixture
def services() -> Iterator[list[Service]]:
    started: list[Service] = []
    yield started
    for service in started:
        service.kill()
        print(service.tail(15))


class Round:
    """Services of one centre, one after the other."""

    def __init__(self, folder: Path, centre: Centre, services: list[Service]) -> None:
        self.folder, self.centre, self.services = folder, centre, services

    def start(self, failpoint: str = "") -> Service:
        config = self.centre.write(lease_bucket=unique("L"), memory_limit="16M")
        env = {"FLOE_FAILPOINTS": f"{failpoint}=kill"} if failpoint else {}
        service = Service(self.folder, unique("ingress"), "ingress", "run", "-c", str(config), env=env)
        self.services.append(service.start())
        return service

    async def killed(self, failpoint: str) -> None:
        """A service that runs into the failpoint."""
        service = self.start(failpoint)
        await soon(lambda: not service.runs())


def rows_with_large(first: int, large: list[int]) -> list[Message]:
    rows = rows_of(first, first + 19)
    for sequence in large:
        rows[sequence - first] = message(sequence, b"%d|" % sequence + b"L" * 1500, subject=b"nodes.large")
    return rows


def check_each_once(messages: list[Arrived], rows: dict[int, Message], late: set[int]) -> None:
    assert sorted(each.message.sequence for each in messages) == sorted(rows)
    assert [each.message.payload for each in messages] == [rows[each.message.sequence].payload for each in messages]
    in_turn = [each.message.sequence for each in messages if each.message.sequence not in late]
    assert in_turn == sorted(in_turn)


async def test_killed_at_each_step_a_message_is_parked_once_and_delivered_once(
    client: FloeClient, tmp_path: Path, nats_url: str, services: list[Service]
) -> None:
    rng, archive = seeded(), Archive(tmp_path / "store")
    centre = Centre(tmp_path, archive, nats_url, on_oversize="park")
    rounds, large = Round(tmp_path, centre, services), list[int]()
    await make(client, centre)
    parked = await kept(client, centre)
    for number, failpoint in enumerate(rng.sample(PARKING, KILLS)):
        first = 1 + 20 * number
        large += (those := [first + 4, first + 13])
        archive.put(rows_with_large(first, those))
        await rounds.killed(failpoint)
    await carried(rounds, client, archive, parked, dict.fromkeys(large, State.PARKED))
    rows = {row.sequence: row for row in archive.rows[CHAIN]}
    check_each_once(await arrived(client, centre.target), {s: rows[s] for s in set(rows) - set(large)}, set())

    await raise_limit(client, centre, 100_000)
    entries = {name.sequence: entry for name, entry in parked.entries().items()}
    for sequence, failpoint in zip(large, rng.sample(DELIVERING, KILLS), strict=False):
        parked.ask(entries[sequence])
        await rounds.killed(failpoint)
    for sequence in large[KILLS:]:
        parked.ask(entries[sequence])
    await carried(rounds, client, archive, parked, dict.fromkeys(large, State.DELIVERED))
    check_each_once(await arrived(client, centre.target), rows, set(large))


async def carried(
    rounds: Round, client: FloeClient, archive: Archive, parked: ParkedStore, expected: dict[int, State]
) -> None:
    """A service that is left alone until everything is as expected and carried, and is then drained."""
    service = rounds.start()
    await soon(lambda: states(parked) == expected)
    whole = len(archive.rows[CHAIN]) - [*expected.values()].count(State.PARKED)

    async def is_whole() -> bool:
        return len(await arrived(client, rounds.centre.target)) == whole

    await soon(is_whole, every=0.1)
    assert service.drain(20) == 0


async def test_what_an_open_intent_leaves_out_stays_out_when_the_limit_was_raised_meanwhile(
    client: FloeClient, tmp_path: Path, nats_url: str, services: list[Service]
) -> None:
    archive = Archive(tmp_path / "store")
    centre = Centre(tmp_path, archive, nats_url, on_oversize="park")
    rounds = Round(tmp_path, centre, services)
    archive.put(rows_with_large(1, [5, 14]))
    await make(client, centre)
    parked = await kept(client, centre)
    await rounds.killed("ingress.after_intent")
    await raise_limit(client, centre, 100_000)
    archive.put(rows_with_large(21, [25]))
    await carried(rounds, client, archive, parked, {5: State.PARKED, 14: State.PARKED})
    for entry in parked.entries().values():
        parked.ask(entry)
    await carried(rounds, client, archive, parked, {5: State.DELIVERED, 14: State.DELIVERED})
    rows = {row.sequence: row for row in archive.rows[CHAIN]}
    check_each_once(await arrived(client, centre.target), rows, {5, 14})


async def test_what_was_parked_but_went_in_its_turn_is_not_delivered_again(
    client: FloeClient, tmp_path: Path, nats_url: str, services: list[Service]
) -> None:
    """Killed between putting it aside and the intent, with the limit raised meanwhile."""
    archive = Archive(tmp_path / "store")
    centre = Centre(tmp_path, archive, nats_url, on_oversize="park")
    rounds = Round(tmp_path, centre, services)
    archive.put(rows_with_large(1, [5]))
    await make(client, centre)
    parked = await kept(client, centre)
    await rounds.killed("ingress.after_park")
    await raise_limit(client, centre, 100_000)
    for entry in parked.entries().values():
        parked.ask(entry)
    service = rounds.start()
    await centre.carried(client, 20)
    assert service.drain(20) == 0
    rows = {row.sequence: row for row in archive.rows[CHAIN]}
    check_each_once(await arrived(client, centre.target), rows, set())
    assert states(parked) == {5: State.PENDING}
