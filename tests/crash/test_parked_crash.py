"""Ingress killed at each step of parking messages and of delivering them again: each arrives once."""

from collections.abc import Collection
from pathlib import Path

import pytest

from common.nats.client import FloeClient
from ingress.parked import ParkedState
from tests.crash.conftest import Start
from tests.integration.test_ingress_messages import kept, make_limited, raise_limit, states, with_large
from tests.support.basics import seeded, soon
from tests.support.ingress import CHAIN, Archive, Centre, arrived

pytestmark = pytest.mark.servers

SENDING = ("ingress.after_intent", "ingress.mid_batch", "ingress.before_close", "ingress.after_close")
PARKING = ("ingress.before_park", "ingress.after_park", *SENDING)
DELIVERING = (*SENDING, "ingress.after_commit", "ingress.before_delivered")
KILLS = 2  # of each list, at random: a start takes seconds on a busy machine


class Round:
    """A target that takes no large messages, its parked messages, and services, one after the other."""

    def __init__(self, folder: Path, url: str, client: FloeClient, start: Start) -> None:
        self.archive = Archive(folder / "store")
        self.centre = Centre(folder, self.archive, url, on_oversize="park")
        self.client, self.start = client, start

    async def begin(self, *large: int) -> None:
        """Make the target, and archive twenty rows."""
        self.put(1, *large)
        await make_limited(self.client, self.centre)
        self.parked = await kept(self.client, self.centre)

    def put(self, first: int, *large: int) -> None:
        """Archive twenty rows, some of them too large."""
        self.archive.put(with_large(first, first + 19, dict.fromkeys(large, 1500)))

    async def killed(self, failpoint: str) -> None:
        """Run a service until the failpoint kills it."""
        service = self.start(self.centre, f"{failpoint}=kill")
        await soon(lambda: not service.runs())

    async def raise_limit(self) -> None:
        await raise_limit(self.client, self.centre, 100_000)

    def ask_for_all(self) -> None:
        for entry in self.parked.list_entries().values():
            self.parked.request_retry(entry)

    async def carried(self, state: ParkedState, *large: int) -> None:
        """Run a service until these messages have that state and all others are carried; then drain it."""
        service = self.start(self.centre)
        await soon(lambda: states(self.parked) == dict.fromkeys(large, state))
        whole = len(self.archive.rows[CHAIN]) - (len(large) if state is ParkedState.PARKED else 0)

        async def is_whole() -> bool:
            return len(await arrived(self.client, self.centre.target)) == whole

        await soon(is_whole, every=0.1)
        assert service.drain() == 0

    async def check_each_once(self, *late: int, without: Collection[int] = ()) -> None:
        rows = {row.sequence: row.payload for row in self.archive.rows[CHAIN] if row.sequence not in without}
        found = [each.message for each in await arrived(self.client, self.centre.target)]
        assert sorted((each.sequence, each.payload) for each in found) == sorted(rows.items())
        in_turn = [each.sequence for each in found if each.sequence not in late]
        assert in_turn == sorted(in_turn)


@pytest.fixture
def rounds(client: FloeClient, tmp_path: Path, nats_url: str, start: Start) -> Round:
    return Round(tmp_path, nats_url, client, start)


async def test_killed_at_each_step_a_message_is_parked_once_and_delivered_once(rounds: Round) -> None:
    rng, large = seeded(), [5, 14]
    await rounds.begin(*large)
    for number, failpoint in enumerate(rng.sample(PARKING, KILLS), 1):
        await rounds.killed(failpoint)
        if number < KILLS:
            large += (those := [20 * number + 5, 20 * number + 14])
            rounds.put(20 * number + 1, *those)
    await rounds.carried(ParkedState.PARKED, *large)
    await rounds.check_each_once(without=large)

    await rounds.raise_limit()
    entries = {name.sequence: entry for name, entry in rounds.parked.list_entries().items()}
    for sequence, failpoint in zip(large, rng.sample(DELIVERING, KILLS), strict=False):
        rounds.parked.request_retry(entries[sequence])
        await rounds.killed(failpoint)
    for sequence in large[KILLS:]:
        rounds.parked.request_retry(entries[sequence])
    await rounds.carried(ParkedState.DELIVERED, *large)
    await rounds.check_each_once(*large)


async def test_rows_left_out_of_an_open_intent_stay_out_after_the_limit_is_raised(rounds: Round) -> None:
    await rounds.begin(5, 14)
    await rounds.killed("ingress.after_intent")
    await rounds.raise_limit()
    rounds.put(21, 25)
    await rounds.carried(ParkedState.PARKED, 5, 14)
    rounds.ask_for_all()
    await rounds.carried(ParkedState.DELIVERED, 5, 14)
    await rounds.check_each_once(5, 14)


async def test_parked_rows_that_arrived_in_turn_are_not_delivered_again(rounds: Round) -> None:
    """Killed between the parking and the intent; the limit is raised meanwhile."""
    await rounds.begin(5)
    await rounds.killed("ingress.after_park")
    await rounds.raise_limit()
    rounds.ask_for_all()
    service = rounds.start(rounds.centre)
    await rounds.centre.carried(rounds.client, 20)
    assert service.drain() == 0
    await rounds.check_each_once()
    assert states(rounds.parked) == {5: ParkedState.PENDING}
